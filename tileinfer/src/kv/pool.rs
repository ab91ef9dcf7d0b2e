//! Who holds which page. A page is free, or counted by the tables and prefix entries that hold it, never
//! both: a [`Page`] is a counted handle, and the last one to go gives the page back.

use std::sync::{Arc, Mutex, PoisonError};

use crate::{Error, Result};

/// All pages of a cache.
#[derive(Debug, Clone)]
pub struct PagePool {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    total: usize,
    /// Free pages, the next to be handed out last: low numbers first, so that an idle cache stays small.
    free: Mutex<Vec<u32>>,
}

impl Shared {
    fn free(&self) -> std::sync::MutexGuard<'_, Vec<u32>> {
        // A list of numbers is whole after every push and pop, so a panic elsewhere cannot have spoilt it.
        self.free.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A held page. Clones share it.
#[derive(Debug, Clone)]
pub struct Page {
    held: Arc<Held>,
}

#[derive(Debug)]
struct Held {
    id: u32,
    pool: Arc<Shared>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.pool.free().push(self.id);
    }
}

impl Page {
    /// Its number in the backend's pages.
    pub fn id(&self) -> u32 {
        self.held.id
    }

    /// Whether anybody else holds it too.
    pub fn is_shared(&self) -> bool {
        Arc::strong_count(&self.held) > 1
    }
}

impl PagePool {
    /// A pool of `total` free pages.
    pub fn new(total: usize) -> Self {
        let free = Mutex::new((0..total as u32).rev().collect());
        PagePool {
            shared: Arc::new(Shared { total, free }),
        }
    }

    /// Pages there are.
    pub fn total(&self) -> usize {
        self.shared.total
    }

    /// Pages nobody holds.
    pub fn free(&self) -> usize {
        self.shared.free().len()
    }

    /// Takes `count` pages, or none and says how many are free.
    pub fn take(&self, count: usize) -> Result<Vec<Page>> {
        let mut free = self.shared.free();
        if free.len() < count {
            return Err(Error::OutOfPages {
                needed: count,
                free: free.len(),
            });
        }
        let rest = free.len() - count;
        let ids = free.split_off(rest);
        drop(free);
        Ok(ids
            .into_iter()
            .rev()
            .map(|id| Page {
                held: Arc::new(Held {
                    id,
                    pool: self.shared.clone(),
                }),
            })
            .collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_goes_back_with_its_last_holder() {
        let pool = PagePool::new(3);
        let pages = pool.take(2).unwrap();
        assert_eq!(pages.iter().map(Page::id).collect::<Vec<_>>(), [0, 1]);
        let copy = pages[1].clone();
        assert!(copy.is_shared() && !pages[0].is_shared());
        drop(pages);
        assert_eq!(pool.free(), 2);
        assert!(matches!(
            pool.take(3),
            Err(Error::OutOfPages { needed: 3, free: 2 })
        ));
        drop(copy);
        assert_eq!(pool.free(), 3);
    }
}
