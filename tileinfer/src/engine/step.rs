//! The decode loop: plan, launch, read, commit, over any number of sequences. Up to the runner's depth of
//! steps are in flight; a token that has not been read yet is fed to the next step on the device.

use std::collections::VecDeque;
use std::time::Duration;

use super::generation::{FinishReason, Generation};
use crate::kv::{PagePool, Sequence};
use crate::runner::{Batch, Input, Rows, Runner, RunnerLimits, Span, Ticket, Want};
use crate::sampling::{Draw, Sampled};
use crate::spec::{Ask, Drafts, Moment, Pace, Round, Speculation};
use crate::{Error, Result};

/// Names a generation in a [`StepLoop`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Slot {
    index: usize,
    serial: u64,
}

/// What a plan gives one generation in the next step.
#[derive(Debug, Clone)]
pub struct Planned {
    /// Whom.
    pub slot: Slot,
    /// How many of its [`Generation::ready_rows`].
    pub rows: usize,
    /// Tokens that may follow, to be verified in the same step. Only where it [takes drafts](Generation::takes_drafts); those that
    /// could not become part of the answer, because it ends before them, are left out. Where there are none and
    /// the loop speculates, its proposer is asked.
    pub drafts: Vec<u32>,
}

/// What a step brought one generation.
#[derive(Debug, Clone)]
pub struct Advance {
    /// Whom.
    pub slot: Slot,
    /// Its new tokens: none for a chunk of prefill, several where drafts were accepted.
    pub tokens: Vec<Sampled>,
    /// Drafts that were verified in it.
    pub drafted: usize,
    /// Why it ended, if it has.
    pub finish: Option<FinishReason>,
}

/// A runner, its pages and the generations on it.
pub struct StepLoop {
    runner: Box<dyn Runner>,
    pool: PagePool,
    slots: Vec<Option<(u64, Generation)>>,
    serial: u64,
    flight: VecDeque<InFlight>,
    speculation: Option<Speculation>,
    /// When a step was last committed, by the speculation's clock.
    committed: Duration,
}

/// A step that has been launched and not read.
struct InFlight {
    ticket: Ticket,
    spans: Vec<SpanInFlight>,
    timing: Option<Timing>,
}

/// What is known of a step's time when it is launched, where the loop speculates.
#[derive(Clone, Copy)]
struct Timing {
    launched: Duration,
    /// Seconds that drafting took before.
    drafting: f64,
}

struct SpanInFlight {
    slot: Slot,
    start: usize,
    rows: usize,
    /// Drafts behind the rows, and their ids, which come with the output where they have not been read.
    drafted: usize,
    drafts: Vec<u32>,
    samples: bool,
    /// [`Generation::epoch`] at the launch.
    epoch: u32,
}

impl SpanInFlight {
    /// Tokens that it samples.
    fn samples(&self) -> usize {
        if self.samples { 1 + self.drafted } else { 0 }
    }
}

impl StepLoop {
    /// A loop over `runner`, all pages free.
    pub fn new(runner: Box<dyn Runner>) -> Self {
        let pool = PagePool::new(runner.limits().pages);
        StepLoop {
            runner,
            pool,
            slots: Vec::new(),
            serial: 0,
            flight: VecDeque::new(),
            speculation: None,
            committed: Duration::ZERO,
        }
    }

    /// Verifies what a proposer says may follow, wherever a plan has no drafts of its own.
    pub fn with_speculation(mut self, speculation: Speculation) -> Self {
        self.speculation = Some(speculation);
        self
    }

    /// Speculates by `speculation` from now on, or not at all; gives back how it did before.
    pub fn set_speculation(&mut self, speculation: Option<Speculation>) -> Option<Speculation> {
        std::mem::replace(&mut self.speculation, speculation)
    }

    /// Whether it speculates.
    pub fn speculates(&self) -> bool {
        self.speculation.is_some()
    }

    /// What the runner can hold and do.
    pub fn limits(&self) -> &RunnerLimits {
        self.runner.limits()
    }

    /// What a person calls the device.
    pub fn device(&self) -> String {
        self.runner.device()
    }

    /// The pages.
    pub fn pool(&self) -> &PagePool {
        &self.pool
    }

    /// The runner, for what is not generation. No step may be in flight.
    pub fn runner(&mut self) -> Result<&mut dyn Runner> {
        match self.flight.len() {
            0 => Ok(self.runner.as_mut()),
            steps => Err(Error::Bug(format!("{steps} steps are in flight"))),
        }
    }

    /// Steps launched and not committed.
    pub fn in_flight(&self) -> usize {
        self.flight.len()
    }

    /// An empty sequence.
    pub fn new_sequence(&self) -> Sequence {
        Sequence::new(&self.pool, self.limits().kv.page_size)
    }

    /// Takes a generation in.
    pub fn admit(&mut self, mut generation: Generation) -> Slot {
        if self.speculates() {
            generation.pace.get_or_insert_with(Pace::new);
        }
        self.serial += 1;
        let index = self
            .slots
            .iter()
            .position(Option::is_none)
            .unwrap_or_else(|| {
                self.slots.push(None);
                self.slots.len() - 1
            });
        self.slots[index] = Some((self.serial, generation));
        Slot {
            index,
            serial: self.serial,
        }
    }

    /// The generation in `slot`.
    pub fn get(&self, slot: Slot) -> Option<&Generation> {
        self.slots
            .get(slot.index)?
            .as_ref()
            .filter(|(serial, _)| *serial == slot.serial)
            .map(|(_, found)| found)
    }

    /// The generation in `slot`, to change.
    pub fn get_mut(&mut self, slot: Slot) -> Option<&mut Generation> {
        self.slots
            .get_mut(slot.index)?
            .as_mut()
            .filter(|(serial, _)| *serial == slot.serial)
            .map(|(_, found)| found)
    }

    /// Takes a generation out, finished or not. What a step in flight does for it is dropped: pages that it
    /// writes to may be handed on at once, since later steps run after it.
    pub fn remove(&mut self, slot: Slot) -> Option<Generation> {
        self.get(slot)?;
        if let Some(speculation) = &mut self.speculation {
            speculation.proposer.forget(slot.serial);
        }
        self.slots[slot.index]
            .take()
            .map(|(_, generation)| generation)
    }

    /// Makes sure that `rows` more rows of a generation have pages, letting go of what no window sees any
    /// more if that helps.
    pub fn reserve(&mut self, slot: Slot, rows: usize) -> Result<()> {
        let window = self.limits().window;
        let generation = self.get_mut(slot).ok_or_else(|| unknown(slot))?;
        let (start, sequence) = (generation.launched, &mut generation.sequence);
        let copies = match (sequence.reserve(start, start + rows), window) {
            (Err(Error::OutOfPages { .. }), Some(window)) => {
                sequence.retire_before(sequence.len().saturating_sub(window));
                sequence.reserve(start, start + rows)?
            }
            (result, _) => result?,
        };
        generation.copies.extend(copies);
        Ok(())
    }

    /// Drafts that a generation may be given in its next step: rows that are worth having pages for.
    pub fn drafts_wanted(&self, slot: Slot) -> usize {
        let (Some(speculation), Some(generation)) = (&self.speculation, self.get(slot)) else {
            return 0;
        };
        match generation.takes_drafts() {
            true => speculation
                .proposer
                .most()
                .min(generation.room_for_drafts()),
            false => 0,
        }
    }

    /// What may follow each part of `plan`, and the seconds it took to say so, which are part of the step's own
    /// where nobody waited for the drafts. A part whose drafts there are no rows or pages for has none.
    fn draft(&mut self, plan: &[Planned]) -> Result<(Vec<Drafts>, f64)> {
        let own = |planned: &Planned| Drafts {
            tokens: planned.drafts.clone(),
            ..Drafts::default()
        };
        let mut drafts: Vec<Drafts> = plan.iter().map(own).collect();
        let takes = |steps: &Self, planned: &Planned| match planned.drafts.is_empty() {
            true => steps.drafts_wanted(planned.slot),
            false => 0,
        };
        let wanted: Vec<usize> = plan.iter().map(|planned| takes(self, planned)).collect();
        if wanted.iter().all(|&most| most == 0) {
            return Ok((drafts, 0.0));
        }
        let used = |planned: &Planned| planned.rows + planned.drafts.len();
        let rows = plan.iter().map(used).sum();
        let mut left = self.limits().max_rows.saturating_sub(rows);
        let mut others = wanted.iter().filter(|&&most| most > 0).count();
        let texts = plan.iter().filter(|planned| planned.rows == 1).count();
        let mut asked: Vec<(usize, usize)> = Vec::new();
        for (i, &most) in wanted.iter().enumerate().filter(|&(_, &most)| most > 0) {
            let most = most.min(left / others);
            others -= 1;
            let most = self.worth_drafting(plan[i].slot, texts, most);
            if most == 0 {
                continue;
            }
            match self.reserve(plan[i].slot, 1 + most) {
                Ok(()) => asked.push((i, most)),
                Err(Error::OutOfPages { .. }) => continue,
                Err(error) => return Err(error),
            }
            left -= most;
        }
        let StepLoop {
            runner,
            slots,
            speculation: Some(speculation),
            ..
        } = self
        else {
            return Ok((drafts, 0.0));
        };
        let ask = |&(i, most): &(usize, usize)| {
            let slot = plan[i].slot;
            let (_, generation) = slots[slot.index].as_ref()?;
            Some(Ask {
                id: slot.serial,
                tokens: &generation.tokens,
                most,
                table: generation.sequence.table(),
                sampler: generation.sampler(generation.tokens.len(), &[]),
            })
        };
        let asks: Vec<Ask<'_>> = asked.iter().filter_map(ask).collect();
        if asks.is_empty() {
            return Ok((drafts, 0.0));
        }
        let start = (speculation.clock)();
        let proposed = speculation.proposer.propose(runner.as_mut(), &asks)?;
        let seconds = ((speculation.clock)() - start).as_secs_f64();
        if proposed.len() != asks.len() {
            return Err(Error::Bug(format!(
                "{} texts have drafts where {} were asked about",
                proposed.len(),
                asks.len()
            )));
        }
        let share = seconds / asks.len() as f64;
        for (&(i, most), mut proposed) in asked.iter().zip(proposed) {
            proposed.truncate(most);
            if proposed.read <= most + 1 {
                speculation.costs.drafting_took(most, share);
            }
            drafts[i] = proposed;
        }
        Ok((drafts, seconds))
    }

    /// How many of `most` drafts to ask for.
    fn worth_drafting(&mut self, slot: Slot, texts: usize, most: usize) -> usize {
        let StepLoop {
            slots, speculation, ..
        } = self;
        let generation = slots[slot.index].as_mut();
        let Some((speculation, (_, generation))) = speculation.as_ref().zip(generation) else {
            return 0;
        };
        let generated = generation.generated().len();
        match &mut generation.pace {
            Some(pace) if speculation.adapts => {
                let moment = Moment {
                    texts,
                    most,
                    generated,
                };
                pace.choose(moment, &speculation.costs)
            }
            Some(_) => most,
            None => 0,
        }
    }

    /// Launches what `plan` says (nothing for an empty plan) and commits the oldest step in flight, if there
    /// are as many as the runner wants or nothing was launched. If launching fails, nothing has changed but
    /// pages that were reserved; if a step cannot be read, its generations are preempted.
    pub fn advance(&mut self, plan: &[Planned]) -> Result<Vec<Advance>> {
        if !plan.is_empty() {
            self.launch(plan)?;
            if self.flight.len() < self.limits().depth {
                return Ok(Vec::new());
            }
        }
        self.commit()
    }

    fn launch(&mut self, plan: &[Planned]) -> Result<()> {
        let mut batch = Batch::default();
        let mut spans = Vec::with_capacity(plan.len());
        for (i, planned) in plan.iter().enumerate() {
            let generation = self
                .get(planned.slot)
                .ok_or_else(|| unknown(planned.slot))?;
            if plan[..i].iter().any(|earlier| earlier.slot == planned.slot) {
                return Err(Error::Bug(format!(
                    "slot {} is planned twice",
                    planned.slot.index
                )));
            }
            self.reserve(
                planned.slot,
                planned.rows + generation.useful(&planned.drafts).len(),
            )?;
        }
        let (drafts, drafting) = self.draft(plan)?;
        // Where each generation's token stands among the samples of the step before.
        let newest = self.flight.back().map_or(&[][..], |step| &step.spans);
        let sampling: Vec<Slot> = newest
            .iter()
            .flat_map(|span| std::iter::repeat_n(span.slot, span.samples()))
            .collect();
        for (Planned { slot, rows, .. }, mut proposed) in plan.iter().zip(drafts) {
            let generation = self.get(*slot).ok_or_else(|| unknown(*slot))?;
            proposed.truncate(generation.room_for_drafts());
            let drafted = proposed.len();
            if drafted > 0 && !generation.takes_drafts() {
                return Err(Error::Bug("drafts follow one known last token".to_owned()));
            }
            let drafts = &proposed.tokens;
            if *rows == 0 || *rows > generation.ready_rows() {
                return Err(Error::Bug(format!(
                    "{rows} rows planned where {} are ready",
                    generation.ready_rows()
                )));
            }
            let (start, end) = (generation.launched, generation.launched + rows);
            let samples = end >= generation.tokens.len();
            let input =
                if generation.runs_ahead() {
                    let index = sampling.iter().position(|sampled| sampled == slot);
                    Input::Previous(index.ok_or_else(|| {
                        Error::Bug("no step in flight brings its token".to_owned())
                    })? as u32)
                } else if !proposed.unread.is_empty() {
                    Input::Drafts {
                        newest: generation.tokens[start],
                        drafts: proposed.unread.clone(),
                    }
                } else {
                    Input::Ids([&generation.tokens[start..end], drafts].concat())
                };
            let want = if samples {
                let sample = (0..=drafted).map(|i| {
                    let mut sampler = generation.sampler(end + i, &drafts[..i.min(drafts.len())]);
                    if let Some((&draft, from)) = drafts.get(i).zip(proposed.drawn_from.get(i)) {
                        let from = from.clone();
                        sampler.draw = Draw::Verify { draft, from };
                    }
                    sampler
                });
                let sample = sample.collect();
                let rows = if drafted == 0 { Rows::Last } else { Rows::All };
                Want {
                    rows,
                    sample,
                    ..Want::default()
                }
            } else {
                Want::default()
            };
            batch
                .copies
                .extend(generation.copies.iter().map(|copy| copy.pages()));
            batch.spans.push(Span {
                input,
                start,
                table: generation.sequence.table(),
                want,
            });
            spans.push(SpanInFlight {
                slot: *slot,
                start,
                rows: *rows,
                drafted,
                epoch: generation.epoch,
                drafts: proposed.tokens,
                samples,
            });
        }
        let timing = self.speculation.as_ref().map(|speculation| Timing {
            launched: (speculation.clock)(),
            drafting,
        });
        let ticket = self.runner.launch(&batch)?;
        for span in &spans {
            if let Some(generation) = self.get_mut(span.slot) {
                generation.copies.clear();
                generation.launched += span.rows + span.drafted;
                // What follows a token with drafts behind it is known when they have been verified.
                generation.awaits = span.samples && span.drafted == 0;
            }
        }
        self.flight.push_back(InFlight {
            ticket,
            spans,
            timing,
        });
        Ok(())
    }

    fn commit(&mut self) -> Result<Vec<Advance>> {
        let Some(step) = self.flight.pop_front() else {
            return Ok(Vec::new());
        };
        let output = match self.runner.read(step.ticket) {
            Ok(output) => output,
            Err(error) => {
                // Nobody knows what the step did: whoever was in it has to begin again.
                for span in &step.spans {
                    if let Some(generation) = self.get_mut(span.slot) {
                        generation.preempt();
                    }
                }
                return Err(error);
            }
        };
        let texts = step.spans.iter().filter(|span| span.rows == 1).count();
        let seconds = step
            .timing
            .and_then(|timing| self.step_took(&step.spans, timing));
        let mut advances = Vec::with_capacity(step.spans.len());
        for (mut span, output) in step.spans.into_iter().zip(output.spans) {
            if !output.drafts.is_empty() {
                span.drafts = output.drafts;
            }
            let is_newest = !self
                .flight
                .iter()
                .flat_map(|step| &step.spans)
                .any(|later| later.slot == span.slot);
            let Some(generation) = self.get_mut(span.slot) else {
                continue;
            };
            if generation.finish.is_some() || generation.epoch != span.epoch {
                // It ended, or was preempted, while this step was in flight.
                continue;
            }
            let cached: Vec<u32> = generation.tokens[span.start..span.start + span.rows].to_vec();
            generation.sequence.append(&cached)?;
            let mut tokens = Vec::new();
            for (i, sampled) in output.sampled.into_iter().enumerate() {
                let token = sampled.token;
                tokens.push(sampled);
                let accepted = span.drafts.get(i) == Some(&token);
                if generation.accept(token) || !accepted {
                    break;
                }
                generation.sequence.append(&[token])?;
            }
            generation.awaits &= !is_newest;
            if generation.finish.is_some() || span.drafted > 0 {
                let len = generation.sequence.len();
                generation.sequence.truncate(len);
                generation.launched = len;
                generation.awaits = false;
            }
            let finish = generation.finish;
            if span.samples {
                self.observe(&span, tokens.len(), texts, seconds);
            }
            advances.push(Advance {
                slot: span.slot,
                tokens,
                drafted: span.drafted,
                finish,
            });
        }
        Ok(advances)
    }
}

impl StepLoop {
    /// Takes note of the time of a step that has been read, if it tells something: all its rows decode. Gives
    /// back the seconds it took, drafting included.
    fn step_took(&mut self, spans: &[SpanInFlight], timing: Timing) -> Option<f64> {
        let speculation = self.speculation.as_mut()?;
        let now = (speculation.clock)();
        // A step that was launched while another ran began when that one ended.
        let began = timing.launched.max(self.committed);
        self.committed = now;
        if spans.iter().any(|span| span.rows > 1 || !span.samples) {
            return None;
        }
        let rows = spans.iter().map(SpanInFlight::samples).sum();
        let seconds = now.saturating_sub(began).as_secs_f64();
        speculation.costs.step_took(rows, seconds);
        Some(seconds + timing.drafting)
    }

    /// Takes note of what a step brought one generation.
    fn observe(&mut self, span: &SpanInFlight, tokens: usize, texts: usize, seconds: Option<f64>) {
        let StepLoop {
            slots, speculation, ..
        } = self;
        let generation = slots[span.slot.index].as_mut();
        let Some((speculation, (_, generation))) = speculation.as_ref().zip(generation) else {
            return;
        };
        let generated = generation.generated().len() - tokens;
        if let Some(pace) = &mut generation.pace {
            let round = Round {
                drafted: span.drafted,
                accepted: tokens.saturating_sub(1),
                tokens,
                generated,
                texts,
                seconds: seconds.map(|seconds| seconds / texts.max(1) as f64),
            };
            pace.observe(round, &speculation.costs);
        }
    }
}

fn unknown(slot: Slot) -> Error {
    Error::Bug(format!("no generation is in slot {}", slot.index))
}
