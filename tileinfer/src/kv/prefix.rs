//! Which pages hold which beginnings of texts, so that a prompt that starts like an earlier one need not be
//! run again. It knows whole pages of token ids and who holds a page; not requests, and no clock but its own
//! count of uses.

use std::collections::{BTreeMap, HashMap};

use super::pool::Page;

/// The prefix cache: a tree of full pages, each named by the page before it and its own tokens. It holds its
/// pages as a sequence does; those that nobody else holds can be evicted, the least recently used first.
#[derive(Debug)]
pub struct PrefixCache {
    page_size: usize,
    entries: HashMap<u64, Entry>,
    /// The entry after another (0: the beginning of a text) that holds these tokens. The map compares the
    /// tokens themselves, so two texts with one hash are still two.
    next: HashMap<(u64, Box<[u32]>), u64>,
    /// Entries that no other follows, by when they were last used.
    leaves: BTreeMap<u64, u64>,
    /// Names of entries and moments of use come from one count.
    count: u64,
}

#[derive(Debug)]
struct Entry {
    parent: u64,
    tokens: Box<[u32]>,
    page: Page,
    children: usize,
    used: u64,
}

/// The name of what stands before the first page.
const ROOT: u64 = 0;

impl PrefixCache {
    /// An empty cache of pages that hold `page_size` positions each.
    pub fn new(page_size: usize) -> Self {
        let (entries, next, leaves) = (HashMap::new(), HashMap::new(), BTreeMap::new());
        PrefixCache {
            page_size,
            entries,
            next,
            leaves,
            count: ROOT,
        }
    }

    /// Pages it holds.
    pub fn len(&self) -> usize {
        self.entries.len()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Pages that it holds alone.
    pub fn held_alone(&self) -> usize {
        self.entries
            .values()
            .filter(|entry| !entry.page.is_shared())
            .count()
    }

    /// The pages that hold the longest beginning of `tokens` known here.
    pub fn find(&mut self, tokens: &[u32]) -> Vec<Page> {
        let mut pages = Vec::new();
        let mut parent = ROOT;
        for page_tokens in tokens.chunks_exact(self.page_size) {
            let Some(&id) = self.next.get(&(parent, page_tokens.into())) else {
                break;
            };
            self.touch(id);
            pages.extend(self.entries.get(&id).map(|entry| entry.page.clone()));
            parent = id;
        }
        pages
    }

    /// Takes in the full pages of a sequence that holds `tokens` from its beginning on in `pages`. Where a
    /// page of the same text is here already, it stays and the sequence's own is not taken.
    pub fn insert(&mut self, tokens: &[u32], pages: &[Page]) {
        let mut parent = ROOT;
        for (tokens, page) in tokens.chunks_exact(self.page_size).zip(pages) {
            let key = (parent, Box::from(tokens));
            parent = match self.next.get(&key) {
                Some(&id) => id,
                None => self.add(key, page.clone()),
            };
            self.touch(parent);
        }
    }

    /// Gives back up to `count` pages that nobody else holds; how many it were. A page goes only after all
    /// that follow it, since they could not be found without it.
    pub fn evict(&mut self, count: usize) -> usize {
        let mut evicted = 0;
        while evicted < count {
            let mut oldest = self.leaves.values().copied();
            let alone = oldest.find(|id| {
                self.entries
                    .get(id)
                    .is_some_and(|entry| !entry.page.is_shared())
            });
            let Some(id) = alone else { break };
            self.remove(id);
            evicted += 1;
        }
        evicted
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        self.entries.clear();
        self.next.clear();
        self.leaves.clear();
    }

    fn add(&mut self, key: (u64, Box<[u32]>), page: Page) -> u64 {
        let id = self.tick();
        let (parent, tokens) = key.clone();
        if let Some(parent) = self.entries.get_mut(&parent) {
            parent.children += 1;
            self.leaves.remove(&parent.used);
        }
        self.entries.insert(
            id,
            Entry {
                parent,
                tokens,
                page,
                children: 0,
                used: id,
            },
        );
        self.leaves.insert(id, id);
        self.next.insert(key, id);
        id
    }

    fn touch(&mut self, id: u64) {
        let now = self.tick();
        if let Some(entry) = self.entries.get_mut(&id) {
            if entry.children == 0 {
                self.leaves.remove(&entry.used);
                self.leaves.insert(now, id);
            }
            entry.used = now;
        }
    }

    fn remove(&mut self, id: u64) {
        let Some(entry) = self.entries.remove(&id) else {
            return;
        };
        self.leaves.remove(&entry.used);
        self.next.remove(&(entry.parent, entry.tokens));
        if let Some(parent) = self.entries.get_mut(&entry.parent) {
            parent.children -= 1;
            if parent.children == 0 {
                self.leaves.insert(parent.used, entry.parent);
            }
        }
    }

    fn tick(&mut self) -> u64 {
        self.count += 1;
        self.count
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kv::{PagePool, Sequence};

    fn sequence(pool: &PagePool, tokens: &[u32]) -> Sequence {
        let mut sequence = Sequence::new(pool, 2);
        sequence.reserve(0, tokens.len()).unwrap();
        sequence.append(tokens).unwrap();
        sequence
    }

    fn ids(pages: &[Page]) -> Vec<u32> {
        pages.iter().map(Page::id).collect()
    }

    #[test]
    fn finds_the_longest_beginning_in_whole_pages() {
        let pool = PagePool::new(8);
        let mut cache = PrefixCache::new(2);
        let one = sequence(&pool, &[1, 2, 3, 4, 5]);
        cache.insert(one.tokens(), one.pages());
        assert_eq!(cache.len(), 2, "the third page is not full");
        assert_eq!(ids(&cache.find(&[1, 2, 3, 4, 5, 6])), [0, 1]);
        assert_eq!(ids(&cache.find(&[1, 2, 3])), [0]);
        assert_eq!(ids(&cache.find(&[1, 2, 9, 4])), [0]);
        assert!(
            cache.find(&[3, 4]).is_empty(),
            "the same tokens elsewhere in a text are another page"
        );
        assert!(cache.find(&[1]).is_empty() && cache.find(&[]).is_empty());
        drop(one);
        assert_eq!((pool.free(), cache.held_alone()), (6, 2));
    }

    #[test]
    fn a_second_copy_of_a_page_is_not_taken() {
        let pool = PagePool::new(8);
        let mut cache = PrefixCache::new(2);
        let (one, two) = (
            sequence(&pool, &[1, 2, 3, 4]),
            sequence(&pool, &[1, 2, 7, 7]),
        );
        cache.insert(one.tokens(), one.pages());
        cache.insert(two.tokens(), two.pages());
        assert_eq!(ids(&cache.find(&[1, 2, 7, 7])), [0, 3]);
        drop((one, two));
        assert_eq!((cache.len(), pool.free()), (3, 5));
    }

    #[test]
    fn evicts_the_least_recently_used_that_nobody_holds() {
        let pool = PagePool::new(8);
        let mut cache = PrefixCache::new(2);
        for tokens in [[1, 2, 3, 4], [1, 2, 5, 6], [7, 7, 8, 8]] {
            let sequence = sequence(&pool, &tokens);
            cache.insert(sequence.tokens(), sequence.pages());
        }
        let held = cache.find(&[7, 7, 8, 8]);
        cache.find(&[1, 2, 3, 4]);
        assert_eq!(cache.evict(1), 1);
        assert!(cache.find(&[1, 2, 5, 6]).len() == 1 && cache.find(&[1, 2, 3, 4]).len() == 2);
        assert_eq!(
            cache.evict(9),
            2,
            "what follows goes before what it follows, what is held stays"
        );
        assert_eq!((cache.len(), cache.held_alone()), (2, 0));
        drop(held);
        cache.clear();
        assert_eq!((pool.free(), cache.evict(1)), (8, 0));
    }

    /// A hundred thousand random operations over a two-token vocabulary: what is found holds the tokens asked
    /// for, and no page is lost.
    #[test]
    fn random_operations_find_the_truth() {
        let pool = PagePool::new(32);
        let mut cache = PrefixCache::new(2);
        // What each page holds, written when a sequence is made.
        let mut contents = vec![Vec::new(); 32];
        let mut live: Vec<Sequence> = Vec::new();
        let mut state = 7u64;
        let mut random = move |n: usize| {
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            (state >> 33) as usize % n
        };
        for _ in 0..100_000 {
            let tokens: Vec<u32> = (0..random(12)).map(|_| random(2) as u32).collect();
            match random(4) {
                0 if !live.is_empty() => drop(live.swap_remove(random(live.len()))),
                1 => {
                    let before = pool.free();
                    let evicted = cache.evict(random(4));
                    assert_eq!(evicted, pool.free() - before);
                }
                _ => {
                    let pages = cache.find(&tokens);
                    for (i, page) in pages.iter().enumerate() {
                        assert_eq!(
                            contents[page.id() as usize],
                            tokens[..2 * i + 2],
                            "all that a page can see"
                        );
                    }
                    let known = tokens[..2 * pages.len()].to_vec();
                    let mut sequence = Sequence::from_prefix(&pool, 2, pages, known).unwrap();
                    let start = sequence.len();
                    if sequence.reserve(start, tokens.len()).is_ok() {
                        sequence.append(&tokens[start..]).unwrap();
                        for (i, page) in sequence.pages().iter().enumerate().skip(start / 2) {
                            contents[page.id() as usize] =
                                tokens[..tokens.len().min(2 * i + 2)].to_vec();
                        }
                        cache.insert(sequence.tokens(), sequence.pages());
                        live.push(sequence);
                    }
                }
            }
            let mut held: Vec<u32> = live
                .iter()
                .flat_map(|sequence| sequence.table().pages)
                .collect();
            held.extend(cache.entries.values().map(|entry| entry.page.id()));
            held.sort_unstable();
            held.dedup();
            assert_eq!(held.len() + pool.free(), pool.total());
            assert_eq!(
                cache.leaves.len(),
                cache
                    .entries
                    .values()
                    .filter(|entry| entry.children == 0)
                    .count()
            );
        }
    }
}
