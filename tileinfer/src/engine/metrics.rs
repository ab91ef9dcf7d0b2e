//! What an engine counts. Written by its thread, read by anybody at any time; it knows no format.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

macro_rules! metrics {
    ($($(#[$doc:meta])* $name:ident),* $(,)?) => {
        /// Counts and levels of an engine, as they change.
        #[derive(Debug, Default)]
        pub struct Metrics { $($(#[$doc])* pub(super) $name: AtomicU64),* }

        /// [`Metrics`] at one moment.
        #[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
        pub struct MetricsSnapshot { $($(#[$doc])* pub $name: u64),* }

        impl Metrics {
            /// All of them now.
            pub fn snapshot(&self) -> MetricsSnapshot {
                MetricsSnapshot { $($name: self.$name.load(Relaxed)),* }
            }
        }
    };
}

metrics! {
    /// Requests that run.
    running,
    /// Requests that wait, those on their way to the engine included.
    waiting,
    /// Pages of the cache.
    pages,
    /// Pages that sequences hold.
    pages_in_use,
    /// Pages that only the prefix cache holds.
    pages_cached,
    /// Steps launched.
    steps,
    /// Tokens of prompts whose requests started.
    prompt_tokens,
    /// Of these, found in the prefix cache.
    cached_tokens,
    /// Tokens generated.
    generated_tokens,
    /// Drafts verified.
    drafted_tokens,
    /// Of these, those that became part of an answer.
    accepted_tokens,
    /// Requests that gave up their pages to older ones.
    preemptions,
    /// Answers that ended with an end token or a stop string.
    finished_stop,
    /// Answers that ended with the tokens asked for or the context full.
    finished_length,
    /// Requests given up by those who asked.
    cancelled,
    /// Requests that ended with an error.
    failed,
    /// Times that the engine was idle and not every page was accounted for.
    pages_lost,
}

/// One more.
pub(super) fn count(counter: &AtomicU64) {
    add(counter, 1);
}

/// So many more.
pub(super) fn add(counter: &AtomicU64, more: usize) {
    counter.fetch_add(more as u64, Relaxed);
}

/// The level now.
pub(super) fn set(level: &AtomicU64, now: usize) {
    level.store(now as u64, Relaxed);
}
