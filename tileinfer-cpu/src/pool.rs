//! A small fork-join pool: `run(items, f)` calls `f(0) … f(items - 1)`, each once, on several threads.
//!
//! Made for some thousand short jobs a second: a job costs about a microsecond, workers spin for a while
//! between jobs and then sleep. Each thread begins with a share of the items of its own, neighbours in order,
//! because items that lie beside each other in memory are one stream for the processor's prefetchers; who is
//! through takes from the far end of the others' shares, so a thread that the operating system has put aside
//! delays nobody. Results cannot depend on who computed an item because they depend on the item alone, which
//! is the caller's side of the bargain.
//! What this module decided not to know: what is computed.

use std::any::Any;
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle, Thread};
use std::time::{Duration, Instant};

/// How long a worker looks for the next job before it sleeps: longer than what one thread does alone between
/// the jobs of a step (drawing a token from a large vocabulary).
const SPIN: Duration = Duration::from_micros(200);

/// The job is open: workers may enter.
const OPEN: u64 = 1 << 31;
/// Bits of `state` that count the workers inside the job.
const INSIDE: u64 = OPEN - 1;
/// Bits of `state` that number the jobs.
const JOB: u64 = !(OPEN | INSIDE);
/// One job further.
const NEXT_JOB: u64 = 1 << 32;

/// A fixed number of threads, the caller's own among them.
///
/// Dropping the pool ends its workers.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<Worker>,
}

struct Worker {
    thread: Thread,
    handle: Option<JoinHandle<()>>,
    asleep: Arc<AtomicBool>,
}

/// What caller and workers share. Padding keeps what each thread writes for itself away from the state that
/// everyone watches.
struct Shared {
    state: AtomicU64,
    /// What is left of each thread's share; the caller's is the first.
    shares: Box<[Share]>,
    /// Set by the caller before it opens a job, read by workers inside the job.
    job: Mutex<Option<Job>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// A caller is using the workers.
    busy: AtomicBool,
    stop: AtomicBool,
}

/// Items that nobody has begun: the first in the upper half of the word, the end in the lower.
#[repr(align(128))]
struct Share(AtomicU64);

impl Share {
    fn set(&self, items: Range<usize>) {
        self.0.store(
            (items.start as u64) << 32 | items.end as u64,
            Ordering::Relaxed,
        );
    }

    /// Takes the first item, or the last one.
    fn take(&self, first: bool) -> Option<usize> {
        let mut share = self.0.load(Ordering::Relaxed);
        loop {
            let (start, end) = (share >> 32, share & 0xffff_ffff);
            if start >= end {
                return None;
            }
            let (item, left) = if first {
                (start, share + (1 << 32))
            } else {
                (end - 1, share - 1)
            };
            let swapped =
                self.0
                    .compare_exchange_weak(share, left, Ordering::Relaxed, Ordering::Relaxed);
            match swapped {
                Ok(_) => return Some(item as usize),
                Err(now) => share = now,
            }
        }
    }
}

/// A borrowed closure whose lifetime `Pool::run` vouches for.
#[derive(Clone, Copy)]
struct Job {
    call: *const (dyn Fn(usize) + Sync),
}

// SAFETY: the closure behind the pointer is `Sync`, and `Pool::run` keeps it alive until no worker is inside.
unsafe impl Send for Job {}

impl Pool {
    /// A pool of `threads` threads (at least one): the caller and `threads - 1` workers.
    pub fn new(threads: usize) -> Pool {
        let shared = Arc::new(Shared {
            state: AtomicU64::new(0),
            shares: (0..threads.max(1))
                .map(|_| Share(AtomicU64::new(0)))
                .collect(),
            job: Mutex::new(None),
            panic: Mutex::new(None),
            busy: AtomicBool::new(false),
            stop: AtomicBool::new(false),
        });
        // A system that refuses a thread costs speed, not correctness: the pool is then smaller.
        let workers = (1..threads)
            .map_while(|i| {
                let asleep = Arc::new(AtomicBool::new(false));
                let (theirs, flag) = (Arc::clone(&shared), Arc::clone(&asleep));
                thread::Builder::new()
                    .name(format!("tileinfer-cpu-{i}"))
                    .spawn(move || theirs.work(i, &flag))
                    .ok()
                    .map(|handle| Worker {
                        thread: handle.thread().clone(),
                        handle: Some(handle),
                        asleep,
                    })
            })
            .collect();
        Pool { shared, workers }
    }

    /// Threads that take part, the caller's among them.
    pub fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `f(i)` for every `i < items`, each once, in no particular order; returns when all are done.
    ///
    /// A call from inside a job, or while another thread uses the pool, runs on the calling thread alone.
    ///
    /// # Panics
    /// If `f` panics: with its payload, after every thread has left `f`. Items not yet begun are skipped.
    /// If there are more than `u32::MAX` items.
    pub fn run(&self, items: usize, f: impl Fn(usize) + Sync) {
        assert!(
            items <= u32::MAX as usize,
            "items of a job are counted in 32 bits"
        );
        let shared = &*self.shared;
        if items <= 1 || self.workers.is_empty() || shared.busy.swap(true, Ordering::Acquire) {
            (0..items).for_each(f);
            return;
        }
        let call: &(dyn Fn(usize) + Sync) = &f;
        // SAFETY: only the lifetime changes. Workers call it only while counted in `state`, and this
        // function does not return, not even by panic, before it has closed the job and seen the count at 0.
        let call: &'static (dyn Fn(usize) + Sync) = unsafe { std::mem::transmute(call) };
        *shared.job.lock().unwrap_or_else(|e| e.into_inner()) = Some(Job { call });
        let sharers = items.min(self.threads());
        for (i, share) in shared.shares.iter().enumerate() {
            let edge = |i: usize| items * i.min(sharers) / sharers;
            share.set(edge(i)..edge(i + 1));
        }
        let job = (shared.state.load(Ordering::Relaxed) & JOB).wrapping_add(NEXT_JOB);
        // SeqCst, here and in `work`: either we see a worker asleep, or it sees this job before it sleeps.
        shared.state.store(job | OPEN, Ordering::SeqCst);
        for worker in self.workers.iter().take(items - 1) {
            if worker.asleep.swap(false, Ordering::SeqCst) {
                worker.thread.unpark();
            }
        }
        shared.take_items(0, &Job { call });
        shared.state.fetch_and(!OPEN, Ordering::AcqRel);
        let mut patience = Patience::new();
        while shared.state.load(Ordering::Acquire) & INSIDE != 0 {
            if patience.is_over() {
                // The machine is busy with something else: let the worker that we wait for run.
                thread::yield_now();
            }
        }
        let panic = shared
            .panic
            .lock()
            .unwrap_or_else(|e| e.into_inner())
            .take();
        shared.busy.store(false, Ordering::Release);
        if let Some(payload) = panic {
            resume_unwind(payload);
        }
    }

    /// Calls `f` with ranges that cover `0..n`, each of at most `chunk` (the last one may be shorter).
    pub fn run_chunks(&self, n: usize, chunk: usize, f: impl Fn(Range<usize>) + Sync) {
        let chunk = chunk.max(1);
        self.run(n.div_ceil(chunk), |i| f(i * chunk..n.min((i + 1) * chunk)));
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        for worker in &mut self.workers {
            worker.thread.unpark();
            if let Some(handle) = worker.handle.take() {
                // A worker catches the panics of jobs, so it cannot have panicked itself.
                let _ = handle.join();
            }
        }
    }
}

impl std::fmt::Debug for Pool {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pool")
            .field("threads", &self.threads())
            .finish()
    }
}

impl Shared {
    /// Takes items until there are none, thread `me`'s own share first; a panic is kept for the caller and
    /// ends the job.
    fn take_items(&self, me: usize, job: &Job) {
        // SAFETY: the caller of this function is inside the job: `Pool::run` itself or a counted worker.
        let call = unsafe { &*job.call };
        let result = catch_unwind(AssertUnwindSafe(|| {
            let (others, mine) = self.shares.split_at(me);
            for (i, share) in mine.iter().chain(others).enumerate() {
                while let Some(item) = share.take(i == 0) {
                    call(item);
                }
            }
        }));
        if let Err(payload) = result {
            self.shares.iter().for_each(|share| share.set(0..0));
            self.panic
                .lock()
                .unwrap_or_else(|e| e.into_inner())
                .get_or_insert(payload);
        }
    }

    /// The life of worker `me`: enter each job that opens, sleep when there has been none for a while.
    fn work(&self, me: usize, asleep: &AtomicBool) {
        let mut seen = 0;
        let mut patience = Patience::new();
        while !self.stop.load(Ordering::Relaxed) {
            let state = self.state.load(Ordering::SeqCst);
            if state & JOB != seen && state & OPEN != 0 {
                if self
                    .state
                    .compare_exchange(state, state + 1, Ordering::AcqRel, Ordering::Relaxed)
                    .is_err()
                {
                    continue;
                }
                seen = state & JOB;
                let job = *self.job.lock().unwrap_or_else(|e| e.into_inner());
                if let Some(job) = job {
                    self.take_items(me, &job);
                }
                self.state.fetch_sub(1, Ordering::AcqRel);
                patience = Patience::new();
            } else if patience.is_over() {
                asleep.store(true, Ordering::SeqCst);
                let state = self.state.load(Ordering::SeqCst);
                let news = state & JOB != seen && state & OPEN != 0;
                if !news && !self.stop.load(Ordering::SeqCst) {
                    thread::park();
                }
                asleep.store(false, Ordering::SeqCst);
                patience = Patience::new();
            }
        }
    }
}

/// Spins, looking at the clock now and then.
struct Patience {
    until: Option<Instant>,
    spins: u32,
}

impl Patience {
    fn new() -> Self {
        Patience {
            until: None,
            spins: 0,
        }
    }

    /// Pauses for a moment; true once [`SPIN`] has passed since the first call.
    fn is_over(&mut self) -> bool {
        std::hint::spin_loop();
        self.spins += 1;
        if !self.spins.is_multiple_of(64) {
            return false;
        }
        match self.until {
            None => {
                self.until = Some(Instant::now() + SPIN);
                false
            }
            Some(until) => Instant::now() >= until,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    #[test]
    fn every_item_runs_once_whatever_the_threads() {
        for threads in [1, 2, 3, 7] {
            let pool = Pool::new(threads);
            for items in [0, 1, 2, 3, 64, 1000] {
                let counts: Vec<AtomicUsize> = (0..items).map(|_| AtomicUsize::new(0)).collect();
                pool.run(items, |i| {
                    counts[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(counts.iter().all(|c| c.load(Ordering::Relaxed) == 1));
            }
        }
    }

    #[test]
    fn jobs_follow_each_other_awake_and_asleep() {
        let pool = Pool::new(3);
        let sum = AtomicUsize::new(0);
        for round in 0..2000 {
            pool.run(5, |i| {
                sum.fetch_add(i, Ordering::Relaxed);
            });
            if round % 500 == 0 {
                thread::sleep(Duration::from_millis(2));
            }
        }
        assert_eq!(sum.into_inner(), 2000 * 10);
    }

    #[test]
    fn more_than_one_thread_takes_part() {
        let pool = Pool::new(2);
        let (here, elsewhere) = (thread::current().id(), AtomicBool::new(false));
        let start = Instant::now();
        while !elsewhere.load(Ordering::Relaxed) && start.elapsed() < Duration::from_secs(20) {
            pool.run(8, |_| {
                if thread::current().id() != here {
                    elsewhere.store(true, Ordering::Relaxed);
                }
                thread::sleep(Duration::from_micros(50));
            });
        }
        assert!(elsewhere.into_inner());
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        let pool = Pool::new(3);
        for bad in 0..20 {
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(20, |i| assert!(i != bad, "item {bad}"));
            }));
            let payload = result.expect_err("the panic is passed on");
            assert_eq!(
                payload.downcast_ref::<String>().unwrap(),
                &format!("item {bad}")
            );
            let count = AtomicUsize::new(0);
            pool.run(9, |_| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(count.into_inner(), 9);
        }
    }

    #[test]
    fn nested_and_concurrent_calls_do_not_deadlock() {
        let pool = Pool::new(2);
        let count = AtomicUsize::new(0);
        thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        pool.run(4, |_| {
                            pool.run(3, |_| {
                                count.fetch_add(1, Ordering::Relaxed);
                            });
                        });
                    }
                });
            }
        });
        assert_eq!(count.into_inner(), 3 * 200 * 12);
    }

    #[test]
    fn chunks_cover_the_range() {
        let pool = Pool::new(2);
        for (n, chunk) in [(0, 4), (1, 4), (7, 3), (9, 3), (5, 100)] {
            let seen: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
            pool.run_chunks(n, chunk, |range| {
                assert!(range.len() <= chunk && !range.is_empty());
                range.for_each(|i| {
                    seen[i].fetch_add(1, Ordering::Relaxed);
                });
            });
            assert!(seen.iter().all(|c| c.load(Ordering::Relaxed) == 1));
        }
    }
}
