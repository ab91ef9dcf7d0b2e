//! One prompt, one answer: [`generate`] drives the decode loop with a single sequence, and [`TextOutput`]
//! turns its tokens into text that can be shown as it comes.

use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use crate::engine::{FinishReason, Generation, GenerationOptions, Planned, StepLoop};
use crate::kv::Sequence;
use crate::sampling::Sampled;
use crate::spec::SpecStats;
use crate::tokenizer::{DecodeStream, StopStrings, Tokenizer};
use crate::{Error, Result};

/// After a step that takes longer, the next has half as many rows, so that whoever breaks off is heard soon.
const LONG_STEP: Duration = Duration::from_secs(1);
/// No step is made smaller than this: fewer rows would cost as much for each step.
const FEW_ROWS: usize = 32;

/// An answer as tokens.
#[derive(Debug)]
pub struct Generated {
    /// The generated tokens; the last is an end token if one ended it.
    pub tokens: Vec<u32>,
    /// Why it ended.
    pub finish: FinishReason,
    /// Whether it ended because the context is full, not because enough tokens are there.
    pub context_full: bool,
    /// What was reused and what it took.
    pub stats: GenerationStats,
    /// Holds the prompt and every generated token but the last.
    pub sequence: Sequence,
}

/// Counts and times of one answer.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct GenerationStats {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these, taken from the cache.
    pub cached_tokens: usize,
    /// Tokens generated.
    pub completion_tokens: usize,
    /// From submission to the first token.
    pub to_first: Duration,
    /// From the first token to the last.
    pub after_first: Duration,
    /// What speculation did, where the loop speculates.
    pub spec: Option<SpecStats>,
}

impl GenerationStats {
    /// Prompt tokens run a second.
    pub fn prefill_rate(&self) -> f64 {
        rate(self.prompt_tokens - self.cached_tokens, self.to_first)
    }

    /// Tokens generated a second after the first one.
    pub fn decode_rate(&self) -> f64 {
        rate(self.completion_tokens.saturating_sub(1), self.after_first)
    }
}

fn rate(count: usize, time: Duration) -> f64 {
    if time.is_zero() {
        0.0
    } else {
        count as f64 / time.as_secs_f64()
    }
}

/// Continues `prompt` on `steps`, reusing what `sequence` has cached of it.
///
/// `on_progress` hears how many tokens of the prompt have run, `on_token` gets each new token. Both may break
/// off, which counts as [`FinishReason::Stop`]. No other generation may be in `steps`. On an error the
/// sequence's pages go back to the pool.
pub fn generate(
    steps: &mut StepLoop,
    sequence: Sequence,
    prompt: &[u32],
    options: GenerationOptions,
    on_progress: &mut dyn FnMut(usize) -> ControlFlow<()>,
    on_token: &mut dyn FnMut(&Sampled) -> ControlFlow<()>,
) -> Result<Generated> {
    let start = Instant::now();
    let max_length = steps.limits().max_length;
    let most = options.max_tokens;
    let slot = steps.admit(Generation::new(sequence, prompt, options, max_length)?);
    let result = drive(steps, slot, on_progress, on_token);
    // A step may still be in flight: wait, so that the loop is idle afterwards.
    while result.is_err() && steps.in_flight() > 0 {
        // The first error is the one to tell.
        let _ = steps.advance(&[]);
    }
    let Some(generation) = steps.remove(slot) else {
        return Err(Error::Bug("a generation vanished".to_owned()));
    };
    let first = result?;
    let tokens = generation.generated().to_vec();
    let finish = generation.finish().unwrap_or(FinishReason::Length);
    let stats = GenerationStats {
        prompt_tokens: generation.prompt_tokens(),
        cached_tokens: generation.cached_tokens(),
        completion_tokens: tokens.len(),
        to_first: first.map_or_else(|| start.elapsed(), |first| first - start),
        after_first: first.map_or(Duration::ZERO, |first| first.elapsed()),
        spec: generation.spec_stats(),
    };
    let context_full =
        finish == FinishReason::Length && most.is_none_or(|most| tokens.len() < most);
    Ok(Generated {
        tokens,
        finish,
        context_full,
        stats,
        sequence: generation.into_sequence(),
    })
}

/// Steps until the generation in `slot` ends; when the first token came.
fn drive(
    steps: &mut StepLoop,
    slot: crate::engine::Slot,
    on_progress: &mut dyn FnMut(usize) -> ControlFlow<()>,
    on_token: &mut dyn FnMut(&Sampled) -> ControlFlow<()>,
) -> Result<Option<Instant>> {
    let mut max_rows = steps.limits().max_rows;
    let (mut first, mut heard) = (None, 0);
    loop {
        let Some(generation) = steps.get(slot) else {
            return Ok(first);
        };
        if generation.finish().is_some() {
            // A step may still be in flight for it: wait, so that the loop is idle afterwards.
            while steps.in_flight() > 0 {
                steps.advance(&[])?;
            }
            return Ok(first);
        }
        let rows = generation.ready_rows().min(max_rows);
        let plan = (rows > 0).then(|| Planned {
            slot,
            rows,
            drafts: Vec::new(),
        });
        let launched = Instant::now();
        let advances = steps.advance(plan.as_slice())?;
        if launched.elapsed() > LONG_STEP {
            max_rows = (max_rows / 2).max(FEW_ROWS.min(max_rows));
        }
        for advance in advances {
            if advance.tokens.is_empty()
                && on_progress(steps.get(slot).map_or(0, Generation::cached_now)).is_break()
                && let Some(generation) = steps.get_mut(slot)
            {
                generation.end_after(heard, FinishReason::Stop);
            }
            for token in &advance.tokens {
                first.get_or_insert_with(Instant::now);
                heard += 1;
                if on_token(token).is_break() {
                    if let Some(generation) = steps.get_mut(slot) {
                        generation.end_after(heard, FinishReason::Stop);
                    }
                    break;
                }
            }
        }
    }
}

/// An answer as text.
#[derive(Debug)]
pub struct Answer {
    /// Neither the end token nor other special tokens, nor a stop string, are in it.
    pub text: String,
    /// The tokens behind it.
    pub generated: Generated,
}

/// [`generate`] with the text of the tokens handed to `on_text` as it comes, up to the first of
/// `stop_strings`. `on_text` may break off; it is not called again then.
pub fn answer(
    steps: &mut StepLoop,
    tokenizer: &Tokenizer,
    sequence: Sequence,
    prompt: &[u32],
    options: GenerationOptions,
    stop_strings: &[String],
    on_progress: &mut dyn FnMut(usize) -> ControlFlow<()>,
    on_text: &mut dyn FnMut(&str) -> ControlFlow<()>,
) -> Result<Answer> {
    let mut output = TextOutput::new(tokenizer, stop_strings)?;
    let mut broken_off = false;
    let stop_ids = options.stop_ids.clone();
    let mut on_token = |sampled: &Sampled| {
        if stop_ids.contains(&sampled.token) {
            return ControlFlow::Continue(());
        }
        let piece = output.push(sampled.token);
        if !piece.is_empty() && on_text(piece).is_break() {
            broken_off = true;
            return ControlFlow::Break(());
        }
        if output.stopped() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    };
    let generated = generate(steps, sequence, prompt, options, on_progress, &mut on_token)?;
    if !broken_off {
        let rest = output.finish();
        if !rest.is_empty() {
            let _ = on_text(rest);
        }
    }
    Ok(Answer {
        text: output.into_text(),
        generated,
    })
}

/// The text of an answer, token by token: whole characters only, nothing of a stop string, and no special
/// tokens.
pub struct TextOutput {
    stream: DecodeStream,
    stops: StopStrings,
    text: String,
    stopped: bool,
}

impl TextOutput {
    /// The text of tokens of `tokenizer` up to the first of `stop_strings`.
    pub fn new(tokenizer: &Tokenizer, stop_strings: &[String]) -> Result<Self> {
        Ok(TextOutput {
            stream: tokenizer.decode_stream(true),
            stops: StopStrings::new(stop_strings.to_vec())?,
            text: String::new(),
            stopped: false,
        })
    }

    /// What can be shown now that `token` has come.
    pub fn push(&mut self, token: u32) -> &str {
        let piece = self.stream.push(token);
        self.take(&piece)
    }

    /// What was held back, once no more tokens will come.
    pub fn finish(&mut self) -> &str {
        let from = self.text.len();
        let piece = self.stream.finish();
        self.take(&piece);
        if !self.stopped {
            let rest = self.stops.finish();
            self.text.push_str(&rest);
        }
        &self.text[from..]
    }

    /// Whether a stop string has been reached.
    pub fn stopped(&self) -> bool {
        self.stopped
    }

    /// Everything shown so far.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Everything shown.
    pub fn into_text(self) -> String {
        self.text
    }

    fn take(&mut self, piece: &str) -> &str {
        let from = self.text.len();
        if !self.stopped {
            let shown = self.stops.push(piece);
            self.text.push_str(&shown.text);
            self.stopped = shown.stopped;
        }
        &self.text[from..]
    }
}
