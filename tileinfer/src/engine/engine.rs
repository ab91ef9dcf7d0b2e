//! Many requests at once: one thread owns the decode loop, takes messages between two steps, asks the
//! scheduler who runs, finds them pages, and tells each request what its tokens were. It does not wait for
//! anybody who listens.

use std::any::Any;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use super::generation::{FinishReason, Generation, GenerationOptions};
use super::metrics::{Metrics, add, count, set};
use super::request::{
    Constraint, Ended, Event, Finished, Listener, Request, RequestHandle, RequestTimes,
};
use super::scheduler::{Budget, RequestId, Scheduler};
use super::step::{Planned, Slot, StepLoop};
use crate::kv::{PrefixCache, Sequence};
use crate::runner::RunnerLimits;
use crate::sampling::Sampled;
use crate::tokenizer::{DecodeStream, StopStrings, Tokenizer};
use crate::{Error, ErrorKind, Result};

/// Steps after which pages are counted again for the metrics.
const STEPS_BETWEEN_COUNTS: usize = 16;

/// How an engine shares its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EngineOptions {
    /// Requests that run at once; at most what the runner has spans for.
    pub max_running: usize,
    /// Requests that may wait; more are refused.
    pub max_waiting: usize,
    /// Rows of prefill in a step that also decodes.
    pub prefill_beside_decode: usize,
    /// Whether beginnings of prompts are kept and found again.
    pub prefix_cache: bool,
}

impl Default for EngineOptions {
    fn default() -> Self {
        EngineOptions {
            max_running: usize::MAX,
            max_waiting: 512,
            prefill_beside_decode: usize::MAX,
            prefix_cache: true,
        }
    }
}

/// Whether an engine takes requests.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum EngineState {
    /// It does.
    Running,
    /// It was shut down.
    Stopped,
    /// It broke, for this reason. It answers every request with an error.
    Dead(String),
}

/// What an idle engine's pages are doing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdleReport {
    /// Pages there are.
    pub total: usize,
    /// Pages nobody holds.
    pub free: usize,
    /// Pages that the prefix cache holds.
    pub cached: usize,
    /// Pages of the prefix cache that somebody else holds too.
    pub shared: usize,
}

impl IdleReport {
    /// Whether every page is free or in the prefix cache, and in no other hands.
    pub fn is_whole(&self) -> bool {
        self.free + self.cached == self.total && self.shared == 0
    }
}

/// An engine. Clones speak to the same one; it stops when the last is gone.
#[derive(Clone)]
pub struct Engine {
    inner: Arc<Inner>,
}

struct Inner {
    messages: Sender<Message>,
    shared: Arc<Shared>,
    limits: RunnerLimits,
    max_length: usize,
    max_waiting: usize,
    device: String,
    next: AtomicU64,
    thread: Mutex<Option<JoinHandle<()>>>,
}

/// What the engine's thread and those who speak to it both see.
struct Shared {
    metrics: Metrics,
    state: Mutex<EngineState>,
}

impl Shared {
    fn state(&self) -> std::sync::MutexGuard<'_, EngineState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is said to the engine's thread.
pub(super) enum Message {
    Submit(Box<Submission>),
    Cancel(RequestId),
    Report(Sender<IdleReport>),
    Stop,
}

pub(super) struct Submission {
    id: RequestId,
    request: Asked,
    listener: Listener,
    arrived: Instant,
}

/// A request without its listener.
struct Asked {
    prompt: Vec<u32>,
    options: GenerationOptions,
    stop_strings: Vec<String>,
    skip_special: bool,
    constraint: Option<Box<dyn Constraint>>,
}

impl Engine {
    /// Starts an engine over `steps`, whose pages are all free. Texts are those of `tokenizer`; without one
    /// there are tokens only.
    ///
    /// # Errors
    /// The operating system may refuse another thread.
    pub fn start(
        steps: StepLoop,
        tokenizer: Option<Tokenizer>,
        options: EngineOptions,
    ) -> Result<Self> {
        let limits = steps.limits().clone();
        // With a window early pages come back, so the cache holds any length.
        let cached = limits
            .window
            .map_or(limits.pages * limits.kv.page_size, |_| usize::MAX);
        let max_length = limits.max_length.min(cached);
        let device = steps.device();
        let shared = Arc::new(Shared {
            metrics: Metrics::default(),
            state: Mutex::new(EngineState::Running),
        });
        set(&shared.metrics.pages, limits.pages);
        let (messages, inbox) = channel();
        let budget = Budget {
            running: options.max_running.min(limits.max_spans),
            rows: limits.max_rows,
            prefill_beside_decode: options.prefill_beside_decode,
        };
        let mut worker = Worker {
            cache: PrefixCache::new(limits.kv.page_size),
            caches: options.prefix_cache,
            steps,
            tokenizer,
            scheduler: Scheduler::new(budget),
            requests: HashMap::new(),
            slots: HashMap::new(),
            shared: shared.clone(),
            max_length,
        };
        let thread = std::thread::Builder::new()
            .name("engine".to_owned())
            .spawn(move || worker.live(&inbox))
            .map_err(|error| Error::Device(format!("no thread for the engine: {error}")))?;
        let (next, max_waiting, thread) = (
            AtomicU64::new(0),
            options.max_waiting,
            Mutex::new(Some(thread)),
        );
        Ok(Engine {
            inner: Arc::new(Inner {
                messages,
                shared,
                limits,
                max_length,
                max_waiting,
                device,
                next,
                thread,
            }),
        })
    }

    /// What its runner can hold and do.
    pub fn limits(&self) -> &RunnerLimits {
        &self.inner.limits
    }

    /// The longest sequence: what the model allows and all pages together hold.
    pub fn max_length(&self) -> usize {
        self.inner.max_length
    }

    /// What a person calls the device.
    pub fn device(&self) -> &str {
        &self.inner.device
    }

    /// What it counts.
    pub fn metrics(&self) -> &Metrics {
        &self.inner.shared.metrics
    }

    /// Whether it takes requests.
    pub fn state(&self) -> EngineState {
        self.inner.shared.state().clone()
    }

    /// Whether a request with this prompt and these options can be run at all.
    ///
    /// # Errors
    /// [`Error::Usage`] or [`Error::ContextFull`] with the numbers.
    pub fn check(&self, prompt: &[u32], options: &GenerationOptions) -> Result<()> {
        let limits = &self.inner.limits;
        Generation::check(prompt, options, self.inner.max_length)?;
        if let Some(id) = prompt.iter().find(|&&id| id as usize >= limits.vocabulary) {
            return Err(Error::usage(format!(
                "there is no token {id} in a vocabulary of {}",
                limits.vocabulary
            )));
        }
        let written = limits.head_rows.min(options.vocabulary);
        if let Some((id, _)) = options
            .sampling
            .logit_bias
            .iter()
            .find(|(id, _)| *id as usize >= written)
        {
            return Err(Error::usage(format!(
                "logit_bias names token {id}, the vocabulary ends before {written}"
            )));
        }
        Ok(())
    }

    /// Hands a request in. Its listener is told of its end exactly once, unless this returns an error.
    ///
    /// # Errors
    /// Those of [`Engine::check`]; an empty stop string; [`Error::QueueFull`]; [`Error::Device`] if the
    /// engine is not running.
    pub fn submit(&self, request: Request) -> Result<RequestHandle> {
        let Inner {
            messages,
            shared,
            next,
            max_waiting,
            ..
        } = &*self.inner;
        self.check(&request.prompt, &request.options)?;
        StopStrings::new(request.stop_strings.clone())?;
        match self.state() {
            EngineState::Running => {}
            EngineState::Stopped => return Err(Error::Device("the engine has stopped".to_owned())),
            EngineState::Dead(reason) => {
                return Err(Error::Device(format!("the engine is dead: {reason}")));
            }
        }
        let waiting = shared.metrics.waiting.fetch_add(1, Relaxed) as usize;
        if waiting >= *max_waiting {
            shared.metrics.waiting.fetch_sub(1, Relaxed);
            return Err(Error::QueueFull {
                waiting,
                limit: *max_waiting,
            });
        }
        let id = RequestId(next.fetch_add(1, Relaxed));
        let Request {
            prompt,
            options,
            stop_strings,
            skip_special,
            constraint,
            on_event,
        } = request;
        let request = Asked {
            prompt,
            options,
            stop_strings,
            skip_special,
            constraint,
        };
        let submission = Submission {
            id,
            request,
            listener: Listener::new(on_event),
            arrived: Instant::now(),
        };
        // If the thread is gone the submission comes back and its listener hears of the end as it is dropped.
        let _ = messages.send(Message::Submit(Box::new(submission)));
        Ok(RequestHandle {
            id,
            messages: messages.clone(),
        })
    }

    /// What the pages are doing, once no request runs or waits; none if the engine is not running.
    pub fn when_idle(&self) -> Option<IdleReport> {
        let (sender, report) = channel();
        self.inner.messages.send(Message::Report(sender)).ok()?;
        report.recv().ok()
    }

    /// Ends all requests as cancelled and waits until the device is released.
    pub fn shut_down(&self) {
        let _ = self.inner.messages.send(Message::Stop);
        let thread = self
            .inner
            .thread
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(thread) = thread {
            // The thread catches its panics, and there would be nobody left to tell.
            let _ = thread.join();
        }
    }
}

/// The engine's thread.
struct Worker {
    steps: StepLoop,
    tokenizer: Option<Tokenizer>,
    scheduler: Scheduler,
    cache: PrefixCache,
    caches: bool,
    requests: HashMap<RequestId, Active>,
    slots: HashMap<Slot, RequestId>,
    shared: Arc<Shared>,
    max_length: usize,
}

/// A request in the engine's hands.
struct Active {
    listener: Listener,
    place: Place,
    text: Option<Text>,
    constraint: Option<Box<dyn Constraint>>,
    arrived: Instant,
    /// Whether it has left the queue once.
    started: bool,
    times: RequestTimes,
    /// Full pages of it that the prefix cache has been shown.
    shown_pages: usize,
}

/// Where its generation is.
enum Place {
    /// Not begun.
    New {
        prompt: Vec<u32>,
        options: GenerationOptions,
    },
    /// Without pages, until there are some.
    Preempted(Box<Generation>),
    /// In the loop.
    Running(Slot),
}

/// Its text.
struct Text {
    stream: DecodeStream,
    stops: StopStrings,
}

impl Worker {
    /// Serves until it is told to stop, and outlives whatever breaks, to say so.
    fn live(&mut self, inbox: &Receiver<Message>) {
        let end = catch_unwind(AssertUnwindSafe(|| self.serve(inbox)));
        let reason = match end {
            Ok(Ok(())) => {
                *self.shared.state() = EngineState::Stopped;
                self.end_all(|| Ended::Cancelled);
                return;
            }
            Ok(Err(error)) => error.to_string(),
            Err(panic) => format!("it panicked: {}", panic_text(panic.as_ref())),
        };
        tracing::error!("the engine is dead: {reason}");
        *self.shared.state() = EngineState::Dead(reason.clone());
        let failed = || Ended::Failed(Error::Device(format!("the engine is dead: {reason}")));
        self.end_all(failed);
        while let Ok(message) = inbox.recv() {
            match message {
                Message::Submit(submission) => {
                    self.shared.metrics.waiting.fetch_sub(1, Relaxed);
                    count(&self.shared.metrics.failed);
                    submission.listener.end(failed());
                }
                Message::Cancel(_) | Message::Report(_) => {}
                Message::Stop => return,
            }
        }
    }

    fn serve(&mut self, inbox: &Receiver<Message>) -> Result<()> {
        let mut reports: Vec<Sender<IdleReport>> = Vec::new();
        let (mut failures, mut steps) = (0, 0_usize);
        loop {
            loop {
                let message = if self.requests.is_empty() {
                    self.rest(&mut reports)?;
                    inbox.recv().map_err(|_| TryRecvError::Disconnected)
                } else {
                    inbox.try_recv()
                };
                match message {
                    Ok(Message::Submit(submission)) => self.arrive(*submission),
                    Ok(Message::Cancel(id)) => self.end(id, Ended::Cancelled),
                    Ok(Message::Report(sender)) => reports.push(sender),
                    Ok(Message::Stop) | Err(TryRecvError::Disconnected) => return Ok(()),
                    Err(TryRecvError::Empty) => break,
                }
            }
            match self.step() {
                Ok(()) => failures = 0,
                Err(error) => {
                    failures += 1;
                    self.survive(error, failures)?;
                }
            }
            set(&self.shared.metrics.running, self.scheduler.running().len());
            steps += 1;
            if steps % STEPS_BETWEEN_COUNTS == 0 {
                self.measure();
            }
        }
    }

    /// What is done when there is nothing to do: nothing is in flight any more, and every page has its place.
    fn rest(&mut self, reports: &mut Vec<Sender<IdleReport>>) -> Result<()> {
        while self.steps.in_flight() > 0 {
            self.steps.advance(&[])?;
        }
        self.measure();
        let pool = self.steps.pool();
        let cached = self.cache.len();
        let shared = cached - self.cache.held_alone();
        let report = IdleReport {
            total: pool.total(),
            free: pool.free(),
            cached,
            shared,
        };
        if !report.is_whole() {
            count(&self.shared.metrics.pages_lost);
            tracing::error!("pages are lost: {report:?}");
        }
        for sender in reports.drain(..) {
            // Whoever asked may have gone.
            let _ = sender.send(report);
        }
        Ok(())
    }

    fn arrive(&mut self, submission: Submission) {
        let Submission {
            id,
            request,
            listener,
            arrived,
        } = submission;
        let Asked {
            prompt,
            options,
            stop_strings,
            skip_special,
            constraint,
        } = request;
        let text = self.tokenizer.as_ref().map(|tokenizer| {
            let stops = StopStrings::new(stop_strings)?;
            Ok(Text {
                stream: tokenizer.decode_stream(skip_special),
                stops,
            })
        });
        match text.transpose() {
            Ok(text) => {
                let place = Place::New { prompt, options };
                let times = RequestTimes::default();
                let active = Active {
                    listener,
                    place,
                    text,
                    constraint,
                    arrived,
                    started: false,
                    times,
                    shown_pages: 0,
                };
                self.requests.insert(id, active);
                self.scheduler.arrive(id);
            }
            Err(error) => {
                self.shared.metrics.waiting.fetch_sub(1, Relaxed);
                count(&self.shared.metrics.failed);
                listener.end(Ended::Failed(error));
            }
        }
    }

    /// Plan, find pages, launch, read, tell.
    fn step(&mut self) -> Result<()> {
        self.start_requests()?;
        let mut plan = Vec::new();
        let shares = self
            .scheduler
            .plan(|id| self.generation(id).map_or(0, Generation::ready_rows));
        for share in shares {
            if let Some(rows) = self.find_pages(share.id, share.rows)?
                && let Some(slot) = self.slot(share.id)
            {
                self.find_pages_for_drafts(slot, rows)?;
                plan.push(Planned {
                    slot,
                    rows,
                    drafts: Vec::new(),
                });
            }
        }
        if !plan.is_empty() {
            count(&self.shared.metrics.steps);
        }
        for advance in self.steps.advance(&plan)? {
            let Some(&id) = self.slots.get(&advance.slot) else {
                continue;
            };
            self.remember(id);
            let metrics = &self.shared.metrics;
            add(&metrics.drafted_tokens, advance.drafted);
            if advance.drafted > 0 {
                add(
                    &metrics.accepted_tokens,
                    advance.tokens.len().saturating_sub(1),
                );
            }
            self.deliver(id, advance.tokens, advance.finish);
        }
        Ok(())
    }

    /// Starts those that are next, while pages for their prompts are in sight.
    fn start_requests(&mut self) -> Result<()> {
        while let Some(id) = self.scheduler.candidate() {
            let Some(request) = self.requests.get(&id) else {
                return Err(Error::Bug(format!(
                    "request {} waits and is not known",
                    id.0
                )));
            };
            let tokens = match &request.place {
                Place::New { prompt, .. } => prompt.as_slice(),
                Place::Preempted(generation) => generation.tokens(),
                Place::Running(_) => {
                    return Err(Error::Bug(format!("request {} waits and runs", id.0)));
                }
            };
            // The last token has to be run, so its page is never taken from the cache whole.
            let found = &tokens[..tokens.len() - 1];
            let pages = if self.caches {
                self.cache.find(found)
            } else {
                Vec::new()
            };
            let kv = self.steps.limits().kv;
            let missing = kv.pages_for(tokens.len() + 1).saturating_sub(pages.len());
            if self.scheduler.running().len() > 0 && !self.in_sight(missing + self.promised()) {
                break;
            }
            let known = tokens[..pages.len() * kv.page_size].to_vec();
            let sequence = Sequence::from_prefix(self.steps.pool(), kv.page_size, pages, known)?;
            self.scheduler.start();
            self.begin(id, sequence);
        }
        Ok(())
    }

    /// Whether so many pages are free or would be if the prefix cache let go.
    fn in_sight(&self, pages: usize) -> bool {
        let free = self.steps.pool().free();
        free >= pages || free + self.cache.held_alone() >= pages
    }

    /// Pages that those who run will need for what is known of them and one more token.
    fn promised(&self) -> usize {
        let kv = self.steps.limits().kv;
        let missing = |id| {
            let generation = self.generation(id)?;
            let table_end = generation.sequence().capacity() / kv.page_size;
            Some(
                kv.pages_for(generation.tokens().len() + 1)
                    .saturating_sub(table_end),
            )
        };
        self.scheduler.running().filter_map(missing).sum()
    }

    /// A request leaves the queue, with the pages that were found for it.
    fn begin(&mut self, id: RequestId, sequence: Sequence) {
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        let empty = Place::New {
            prompt: Vec::new(),
            options: no_options(),
        };
        let generation = match std::mem::replace(&mut request.place, empty) {
            Place::New { prompt, options } => {
                Generation::new(sequence, &prompt, options, self.max_length)
            }
            Place::Preempted(mut generation) => generation.resume(sequence).map(|()| *generation),
            Place::Running(_) => Err(Error::Bug("a running request began again".to_owned())),
        };
        let generation = match generation {
            Ok(generation) => generation,
            Err(error) => return self.end(id, Ended::Failed(error)),
        };
        let (prompt_tokens, cached_tokens, finish) = (
            generation.prompt_tokens(),
            generation.cached_tokens(),
            generation.finish(),
        );
        request.shown_pages = generation.sequence().len() / self.steps.limits().kv.page_size;
        let slot = self.steps.admit(generation);
        request.place = Place::Running(slot);
        self.slots.insert(slot, id);
        if std::mem::replace(&mut request.started, true) {
            return;
        }
        let metrics = &self.shared.metrics;
        metrics.waiting.fetch_sub(1, Relaxed);
        add(&metrics.prompt_tokens, prompt_tokens);
        add(&metrics.cached_tokens, cached_tokens);
        request.times.to_start = request.arrived.elapsed();
        let listens = request.listener.tell(Event::Started { cached_tokens });
        if let Some(reason) = finish {
            self.finish(id, reason);
        } else if !listens {
            self.end(id, Ended::Cancelled);
        } else {
            self.constrain(id);
        }
    }

    /// Pages for `rows` more rows of a request, or for as many as there can be if it runs alone; none, if it
    /// had to give way.
    fn find_pages(&mut self, id: RequestId, mut rows: usize) -> Result<Option<usize>> {
        loop {
            let Some(slot) = self.slot(id) else {
                return Ok(None);
            };
            let (needed, free) = match self.steps.reserve(slot, rows) {
                Ok(()) => return Ok(Some(rows)),
                Err(Error::OutOfPages { needed, free }) => (needed, free),
                Err(error) => return Err(error),
            };
            if self.cache.evict(needed - free) > 0 {
                continue;
            }
            if let Some(victim) = self.scheduler.victim(id) {
                self.preempt(victim)?;
            } else if self.scheduler.running().len() > 1 {
                self.preempt(id)?;
            } else if !self.cache.is_empty() {
                // Alone, and pages of it are held twice: let all go.
                self.cache.clear();
            } else if rows > 1 {
                rows = rows.div_ceil(2);
            } else {
                self.end(id, Ended::Failed(Error::OutOfPages { needed, free }));
            }
        }
    }

    /// Pages for what may be drafted behind `rows` rows, if the prefix cache can spare them: nobody gives way
    /// for drafts.
    fn find_pages_for_drafts(&mut self, slot: Slot, rows: usize) -> Result<()> {
        let drafts = self.steps.drafts_wanted(slot);
        if drafts == 0 {
            return Ok(());
        }
        let result = match self.steps.reserve(slot, rows + drafts) {
            Err(Error::OutOfPages { needed, free }) if self.cache.evict(needed - free) > 0 => {
                self.steps.reserve(slot, rows + drafts)
            }
            result => result,
        };
        match result {
            Err(Error::OutOfPages { .. }) => Ok(()),
            result => result,
        }
    }

    fn preempt(&mut self, id: RequestId) -> Result<()> {
        let slot = self
            .slot(id)
            .ok_or_else(|| Error::Bug("who waits cannot give way".to_owned()))?;
        self.slots.remove(&slot);
        let mut generation = self
            .steps
            .remove(slot)
            .ok_or_else(|| Error::Bug("a running request has no generation".to_owned()))?;
        generation.preempt();
        self.scheduler.preempt(id);
        count(&self.shared.metrics.preemptions);
        if let Some(request) = self.requests.get_mut(&id) {
            request.place = Place::Preempted(Box::new(generation));
        }
        Ok(())
    }

    /// Shows the prefix cache the pages that have become full.
    fn remember(&mut self, id: RequestId) {
        let page_size = self.steps.limits().kv.page_size;
        let Some(Active {
            place: Place::Running(slot),
            shown_pages,
            ..
        }) = self.requests.get_mut(&id)
        else {
            return;
        };
        let Some(generation) = self.steps.get(*slot) else {
            return;
        };
        let sequence = generation.sequence();
        let full = sequence.len() / page_size;
        // A sequence that has let its beginning go has nothing that another could begin with.
        if self.caches && full > *shown_pages && sequence.table().first_page == 0 {
            self.cache.insert(sequence.tokens(), sequence.pages());
        }
        *shown_pages = full;
    }

    /// Tells a request its new tokens, and ends it if they end it.
    fn deliver(&mut self, id: RequestId, mut tokens: Vec<Sampled>, finish: Option<FinishReason>) {
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        let Place::Running(slot) = request.place else {
            return;
        };
        let Some(generation) = self.steps.get_mut(slot) else {
            return;
        };
        if tokens.is_empty() {
            return;
        }
        let before = generation.generated().len() - tokens.len();
        if before == 0 {
            request.times.to_first = request.arrived.elapsed();
        }
        let stop_ids = generation.options.stop_ids.clone();
        let ends = |token: &Sampled| stop_ids.contains(&token.token);
        let mut shown = String::new();
        let mut stopped = false;
        if let Some(text) = &mut request.text {
            for (i, token) in tokens.iter().enumerate().filter(|(_, token)| !ends(token)) {
                let piece = text.stops.push(&text.stream.push(token.token));
                shown.push_str(&piece.text);
                if piece.stopped {
                    // Drafts may have brought more than was wanted.
                    stopped = true;
                    generation.end_after(before + i + 1, FinishReason::Stop);
                    tokens.truncate(i + 1);
                    break;
                }
            }
        }
        add(&self.shared.metrics.generated_tokens, tokens.len());
        if let Some(constraint) = &mut request.constraint {
            let accepted = tokens
                .iter()
                .filter(|token| !ends(token))
                .try_for_each(|token| guarded(|| constraint.accept(token.token)));
            if let Err(error) = accepted {
                return self.end(id, Ended::Failed(error));
            }
        }
        let listens = request.listener.tell(Event::Tokens {
            text: shown,
            tokens,
        });
        if let Some(reason) = if stopped {
            Some(FinishReason::Stop)
        } else {
            finish
        } {
            self.finish(id, reason);
        } else if !listens {
            self.end(id, Ended::Cancelled);
        } else {
            self.constrain(id);
        }
    }

    /// Asks the grammar what may come next.
    fn constrain(&mut self, id: RequestId) {
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        let (Some(constraint), Place::Running(slot)) = (&mut request.constraint, &request.place)
        else {
            return;
        };
        match guarded(|| constraint.mask()) {
            Ok(Some(mask)) => {
                if let Some(generation) = self.steps.get_mut(*slot) {
                    generation.set_mask(mask);
                }
            }
            Ok(None) => self.finish(id, FinishReason::Stop),
            Err(error) => self.end(id, Ended::Failed(error)),
        }
    }

    fn finish(&mut self, id: RequestId, reason: FinishReason) {
        let Some(request) = self.requests.get_mut(&id) else {
            return;
        };
        let Place::Running(slot) = request.place else {
            return;
        };
        let Some(generation) = self.steps.get(slot) else {
            return;
        };
        let mut rest = String::new();
        if let Some(text) = &mut request.text {
            let piece = text.stops.push(&text.stream.finish());
            rest = piece.text;
            if !piece.stopped {
                rest.push_str(&text.stops.finish());
            }
        }
        request.times.to_end = request.arrived.elapsed();
        let finished = Finished {
            reason,
            text: rest,
            prompt_tokens: generation.prompt_tokens(),
            cached_tokens: generation.cached_tokens(),
            completion_tokens: generation.generated().len(),
            times: request.times,
            spec: generation.spec_stats(),
        };
        self.end(id, Ended::Finished(finished));
    }

    /// A request is over: its pages go back, and it is told.
    fn end(&mut self, id: RequestId, ended: Ended) {
        let Some(request) = self.requests.remove(&id) else {
            return;
        };
        if let Place::Running(slot) = request.place {
            self.slots.remove(&slot);
            self.steps.remove(slot);
        }
        self.scheduler.leave(id);
        let metrics = &self.shared.metrics;
        // Before it is told, so that whoever hears of the end sees it in the numbers.
        set(&metrics.running, self.scheduler.running().len());
        if !request.started {
            metrics.waiting.fetch_sub(1, Relaxed);
        }
        count(match &ended {
            Ended::Finished(Finished {
                reason: FinishReason::Stop,
                ..
            }) => &metrics.finished_stop,
            Ended::Finished(Finished {
                reason: FinishReason::Length,
                ..
            }) => &metrics.finished_length,
            Ended::Cancelled => &metrics.cancelled,
            Ended::Failed(_) => &metrics.failed,
        });
        request.listener.end(ended);
    }

    fn end_all(&mut self, ended: impl Fn() -> Ended) {
        let mut ids: Vec<RequestId> = self.requests.keys().copied().collect();
        ids.sort_unstable();
        for id in ids {
            // A listener that panics must not keep the others from hearing.
            let _ = catch_unwind(AssertUnwindSafe(|| self.end(id, ended())));
        }
        let _ = catch_unwind(AssertUnwindSafe(|| self.measure()));
    }

    /// A step failed: those who ran hear of it. A device that refuses, or steps that keep failing, are the end.
    fn survive(&mut self, error: Error, failures: usize) -> Result<()> {
        tracing::error!("a step failed: {error}");
        let (kind, message) = (error.kind(), error.to_string());
        if kind == ErrorKind::System || failures >= 3 {
            return Err(error);
        }
        let mut told = Some(error);
        for id in self.scheduler.running().collect::<Vec<_>>() {
            let error = told
                .take()
                .unwrap_or_else(|| Error::Device(format!("a step with it failed: {message}")));
            self.end(id, Ended::Failed(error));
        }
        // What the failed step wrote is not known: nothing of it may be found again.
        self.cache.clear();
        while self.steps.in_flight() > 0 {
            self.steps.advance(&[])?;
        }
        Ok(())
    }

    fn slot(&self, id: RequestId) -> Option<Slot> {
        match self.requests.get(&id)?.place {
            Place::Running(slot) => Some(slot),
            _ => None,
        }
    }

    fn generation(&self, id: RequestId) -> Option<&Generation> {
        self.steps.get(self.slot(id)?)
    }

    fn measure(&self) {
        let metrics = &self.shared.metrics;
        let cached = self.cache.held_alone();
        set(&metrics.running, self.scheduler.running().len());
        set(&metrics.pages_cached, cached);
        set(
            &metrics.pages_in_use,
            self.steps.pool().total() - self.steps.pool().free() - cached,
        );
    }
}

/// A place holder that is never run.
fn no_options() -> GenerationOptions {
    GenerationOptions {
        sampling: Arc::default(),
        seed: 0,
        max_tokens: None,
        stop_ids: Arc::default(),
        vocabulary: 0,
        top_logprobs: None,
    }
}

/// A grammar's panic as an error: it is the request's, not the engine's.
fn guarded<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    catch_unwind(AssertUnwindSafe(call)).unwrap_or_else(|panic| {
        Err(Error::Bug(format!(
            "the grammar panicked: {}",
            panic_text(panic.as_ref())
        )))
    })
}

fn panic_text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied())
        .unwrap_or("without a word")
}
