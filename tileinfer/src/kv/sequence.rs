//! A sequence's place in the cache: its pages, and the tokens whose keys and values are in them.

use super::pool::{Page, PagePool};
use crate::{Error, Result};

/// A sequence in the cache. Dropping it gives its pages back.
///
/// Positions `0 .. len()` are cached; the pages may reach further, for tokens that a step is about to add.
/// Pages before `first_page` have been let go, since no layer sees them any more.
#[derive(Debug)]
pub struct Sequence {
    pool: PagePool,
    page_size: usize,
    first_page: usize,
    pages: Vec<Page>,
    tokens: Vec<u32>,
}

/// A sequence's pages as a step needs them: page numbers from logical page `first_page` on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BlockTable {
    /// The logical page that `pages[0]` is.
    pub first_page: usize,
    /// Page numbers.
    pub pages: Vec<u32>,
}

/// A page whose contents have to be copied before a step writes to the copy: `(from, to)`. Holds the page it
/// copies from until the step is launched.
#[derive(Debug)]
pub struct PageCopy {
    from: Page,
    to: u32,
    first_position: usize,
}

impl PageCopy {
    /// The page numbers `(from, to)`.
    pub fn pages(&self) -> (u32, u32) {
        (self.from.id(), self.to)
    }

    /// The first position that the pages hold.
    pub fn first_position(&self) -> usize {
        self.first_position
    }
}

impl Sequence {
    /// An empty sequence in `pool`, whose pages hold `page_size` positions each.
    pub fn new(pool: &PagePool, page_size: usize) -> Self {
        Sequence {
            pool: pool.clone(),
            page_size,
            first_page: 0,
            pages: Vec::new(),
            tokens: Vec::new(),
        }
    }

    /// A sequence that begins with pages which already hold the keys and values of `tokens` (whole pages).
    pub fn from_prefix(
        pool: &PagePool,
        page_size: usize,
        pages: Vec<Page>,
        tokens: Vec<u32>,
    ) -> Result<Self> {
        if pages.len() * page_size != tokens.len() {
            return Err(Error::Bug(format!(
                "{} pages cannot be the prefix of {} tokens",
                pages.len(),
                tokens.len()
            )));
        }
        Ok(Sequence {
            pool: pool.clone(),
            page_size,
            first_page: 0,
            pages,
            tokens,
        })
    }

    /// Cached positions.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether nothing is cached.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// The tokens whose keys and values are cached, in position order.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// The pages held, from logical page [`BlockTable::first_page`] on.
    pub fn pages(&self) -> &[Page] {
        &self.pages
    }

    /// Positions the pages reach to.
    pub fn capacity(&self) -> usize {
        (self.first_page + self.pages.len()) * self.page_size
    }

    /// The block table of a step.
    pub fn table(&self) -> BlockTable {
        BlockTable {
            first_page: self.first_page,
            pages: self.pages.iter().map(Page::id).collect(),
        }
    }

    /// Makes room up to position `end`, so that positions from `start` on may be written: takes pages for
    /// what is missing, and a page of its own where one is shared that would be written to. Takes all or
    /// nothing. The copies belong to the next step's batch.
    pub fn reserve(&mut self, start: usize, end: usize) -> Result<Vec<PageCopy>> {
        let first_written = start / self.page_size;
        let shared: Vec<usize> = (first_written.max(self.first_page)
            ..self.first_page + self.pages.len())
            .filter(|&page| {
                page * self.page_size < end && self.pages[page - self.first_page].is_shared()
            })
            .collect();
        let missing = end
            .div_ceil(self.page_size)
            .saturating_sub(self.first_page + self.pages.len());
        let mut fresh = self.pool.take(shared.len() + missing)?.into_iter();
        let mut copies = Vec::new();
        for page in shared {
            let Some(new) = fresh.next() else { break };
            let to = new.id();
            let from = std::mem::replace(&mut self.pages[page - self.first_page], new);
            // Of a page that is written from its first slot on, nothing old is read.
            let first_position = page * self.page_size;
            if first_position < start {
                copies.push(PageCopy {
                    from,
                    to,
                    first_position,
                });
            }
        }
        self.pages.extend(fresh);
        Ok(copies)
    }

    /// Says that a step has cached `tokens` at the positions from `len()` on.
    pub fn append(&mut self, tokens: &[u32]) -> Result<()> {
        if self.len() + tokens.len() > self.capacity() {
            let (len, more, capacity) = (self.len(), tokens.len(), self.capacity());
            return Err(Error::Bug(format!(
                "{more} tokens after {len} do not fit in pages for {capacity}"
            )));
        }
        self.tokens.extend_from_slice(tokens);
        Ok(())
    }

    /// Drops the cached positions after the first `len` and the pages that are not needed for them. Returns
    /// how many positions are left: none if the pages of the beginning have been let go, since what a window
    /// would see there is gone.
    pub fn truncate(&mut self, len: usize) -> usize {
        let len = len.min(self.len());
        let len = if self.first_page > 0 && len < self.len() {
            0
        } else {
            len
        };
        if len == 0 {
            self.first_page = 0;
            self.pages.clear();
        }
        self.tokens.truncate(len);
        self.pages
            .truncate(len.div_ceil(self.page_size).saturating_sub(self.first_page));
        len
    }

    /// Gives all pages back and forgets the tokens.
    pub fn release(&mut self) {
        self.truncate(0);
    }

    /// Lets go of the pages that only hold positions before `position`.
    pub fn retire_before(&mut self, position: usize) {
        let page = position.min(self.len()) / self.page_size;
        if page > self.first_page {
            self.pages
                .drain(..(page - self.first_page).min(self.pages.len()));
            self.first_page = page;
        }
    }

    /// A second sequence with the same past; pages are shared until one of the two writes to them.
    pub fn fork(&self) -> Self {
        Sequence {
            pool: self.pool.clone(),
            page_size: self.page_size,
            first_page: self.first_page,
            pages: self.pages.clone(),
            tokens: self.tokens.clone(),
        }
    }

    /// How many of `tokens` are cached from the beginning on.
    pub fn common_prefix(&self, tokens: &[u32]) -> usize {
        self.tokens
            .iter()
            .zip(tokens)
            .take_while(|(a, b)| a == b)
            .count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_come_and_go_with_positions() {
        let pool = PagePool::new(4);
        let mut sequence = Sequence::new(&pool, 4);
        assert!(sequence.reserve(0, 9).unwrap().is_empty());
        sequence.append(&[1; 9]).unwrap();
        assert_eq!(
            (sequence.len(), sequence.capacity(), pool.free()),
            (9, 12, 1)
        );
        assert!(sequence.append(&[1; 4]).is_err());
        assert!(matches!(
            sequence.reserve(9, 17),
            Err(Error::OutOfPages { needed: 2, free: 1 })
        ));
        assert_eq!(pool.free(), 1, "a failed reservation takes nothing");
        assert_eq!(sequence.truncate(4), 4);
        assert_eq!(pool.free(), 3);
        sequence.release();
        assert_eq!(pool.free(), 4);
    }

    #[test]
    fn a_fork_copies_only_what_it_writes_into() {
        let pool = PagePool::new(8);
        let mut one = Sequence::new(&pool, 4);
        one.reserve(0, 6).unwrap();
        one.append(&[1, 2, 3, 4, 5, 6]).unwrap();
        let mut two = one.fork();
        assert_eq!(pool.free(), 6);
        let copies = two.reserve(6, 7).unwrap();
        assert_eq!(
            copies.iter().map(PageCopy::pages).collect::<Vec<_>>(),
            [(1, 2)]
        );
        assert_eq!(two.table().pages, [0, 2]);
        drop(copies);
        assert!(
            one.reserve(6, 7).unwrap().is_empty(),
            "the other one now has the page to itself"
        );
        // Rewound to a page's beginning, nothing of the shared page is needed.
        let mut three = one.fork();
        three.truncate(4);
        assert!(three.reserve(4, 5).unwrap().is_empty());
        assert_eq!(three.table().pages.len(), 2);
    }

    #[test]
    fn a_window_lets_early_pages_go() {
        let pool = PagePool::new(4);
        let mut sequence = Sequence::new(&pool, 4);
        sequence.reserve(0, 12).unwrap();
        sequence.append(&[7; 11]).unwrap();
        sequence.retire_before(9);
        assert_eq!(
            sequence.table(),
            BlockTable {
                first_page: 2,
                pages: vec![2]
            }
        );
        assert_eq!((pool.free(), sequence.capacity()), (3, 12));
        assert_eq!(
            sequence.truncate(10),
            0,
            "what the window would see is gone"
        );
        assert_eq!((pool.free(), sequence.table()), (4, BlockTable::default()));
    }

    /// A hundred thousand random operations: every page is free or held, never both, and tables never lie.
    #[test]
    fn random_operations_lose_no_page() {
        let pool = PagePool::new(24);
        let mut live: Vec<Sequence> = Vec::new();
        let mut state = 1u64;
        let mut random = move |n: usize| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 33) as usize % n
        };
        for _ in 0..100_000 {
            match random(6) {
                0 if live.len() < 6 => live.push(Sequence::new(&pool, 4)),
                1 if !live.is_empty() => {
                    let pick = random(live.len());
                    live.swap_remove(pick);
                }
                2 if !live.is_empty() && live.len() < 6 => {
                    let fork = live[random(live.len())].fork();
                    live.push(fork);
                }
                3 if !live.is_empty() => {
                    let pick = random(live.len());
                    let len = random(live[pick].len() + 1);
                    live[pick].truncate(len);
                }
                _ if !live.is_empty() => {
                    let pick = random(live.len());
                    let (start, more) = (live[pick].len(), 1 + random(6));
                    if live[pick].reserve(start, start + more).is_ok() {
                        live[pick].append(&vec![3; more]).unwrap();
                        let writable = live[pick].pages().iter().skip(start / 4);
                        assert!(writable.into_iter().all(|page| !page.is_shared()));
                    }
                }
                _ => {}
            }
            let held: std::collections::BTreeSet<u32> =
                live.iter().flat_map(|s| s.table().pages).collect();
            assert_eq!(held.len() + pool.free(), pool.total());
        }
    }
}
