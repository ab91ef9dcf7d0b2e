//! The same work on many items, a few at a time. Knows nothing of what the work is.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

/// Applies `work` to every item on up to `workers` threads; results come in the order of the items.
/// The first error is returned, and sets `stop`: items not begun are left, and work that looks at it ends early.
pub(super) fn in_parallel<T: Send, R: Send, E: Send>(
    workers: usize,
    stop: &AtomicBool,
    items: Vec<T>,
    work: impl Fn(T) -> Result<R, E> + Sync,
) -> Result<Vec<R>, E> {
    let count = items.len();
    let queue: Mutex<VecDeque<(usize, T)>> = Mutex::new(items.into_iter().enumerate().collect());
    let results: Mutex<Vec<Option<R>>> = Mutex::new((0..count).map(|_| None).collect());
    let failed: Mutex<Option<E>> = Mutex::new(None);
    let lock = "no worker panics while it holds a lock. This is a bug.";
    std::thread::scope(|scope| {
        for _ in 0..workers.max(1).min(count) {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let Some((at, item)) = queue.lock().expect(lock).pop_front() else {
                        return;
                    };
                    match work(item) {
                        Ok(result) => results.lock().expect(lock)[at] = Some(result),
                        Err(error) => {
                            failed.lock().expect(lock).get_or_insert(error);
                            stop.store(true, Ordering::Relaxed);
                        }
                    }
                }
            });
        }
    });
    match failed.into_inner().expect(lock) {
        Some(error) => Err(error),
        None => Ok(results
            .into_inner()
            .expect(lock)
            .into_iter()
            .map(|result| result.expect("every item was worked on. This is a bug."))
            .collect()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_in_order_and_the_first_error() {
        for workers in [0, 1, 3, 100] {
            let stop = AtomicBool::new(false);
            let items: Vec<u32> = (0..50).collect();
            let doubled = in_parallel(workers, &stop, items.clone(), |n| Ok::<_, ()>(2 * n));
            assert_eq!(doubled, Ok(items.iter().map(|n| 2 * n).collect()));
            assert_eq!(
                in_parallel(workers, &stop, vec![], |n: u32| Ok::<_, ()>(n)),
                Ok(vec![])
            );

            let begun = Mutex::new(0);
            let failed = in_parallel(workers, &stop, items, |n| {
                *begun.lock().unwrap() += 1;
                if n == 5 { Err(n) } else { Ok(n) }
            });
            assert_eq!(failed, Err(5));
            assert!(stop.load(Ordering::Relaxed));
            if workers < 4 {
                assert!(*begun.lock().unwrap() < 50);
            }
        }
    }
}
