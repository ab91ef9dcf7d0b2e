//! Prompt lookup: what followed the last time that the text ended like this. It knows token ids and nothing of
//! models.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use super::{Ask, Drafts, Proposer};
use crate::runner::Runner;
use crate::{Error, Result};

/// Proposes what followed the latest earlier occurrence of the last n tokens, n from `max_ngram` down to
/// `min_ngram`: the first n that occurred before decides. The occurrence may overlap the last n tokens.
#[derive(Debug)]
pub struct NgramProposer {
    k: usize,
    max_ngram: usize,
    min_ngram: usize,
    texts: HashMap<u64, Index>,
}

impl NgramProposer {
    /// Drafts that are proposed unless it is said otherwise.
    pub const K: usize = 4;
    /// The longest n-gram that is looked for unless it is said otherwise.
    pub const MAX_NGRAM: usize = 3;
    /// The shortest n-gram that is looked for unless it is said otherwise.
    pub const MIN_NGRAM: usize = 1;

    /// Up to `k` drafts after an n-gram of `min_ngram` to `max_ngram` tokens.
    ///
    /// # Errors
    /// [`Error::Usage`] if `min_ngram` is 0 or `max_ngram` is below it.
    pub fn new(k: usize, max_ngram: usize, min_ngram: usize) -> Result<Self> {
        if min_ngram == 0 || max_ngram < min_ngram {
            return Err(Error::usage(format!(
                "n-grams of {min_ngram} to {max_ngram} tokens: the shortest must be at least 1, and the longest no shorter"
            )));
        }
        Ok(NgramProposer {
            k,
            max_ngram,
            min_ngram,
            texts: HashMap::new(),
        })
    }

    /// Up to `k` tokens that may follow `tokens`. `id` names the text: when it has grown, only what is new of it
    /// is read.
    pub fn propose_after(&mut self, id: u64, tokens: &[u32], k: usize) -> Vec<u32> {
        let index = self.texts.entry(id).or_default();
        index.extend(tokens, self.min_ngram..=self.max_ngram);
        (self.min_ngram..=self.max_ngram)
            .rev()
            .find_map(|n| index.follows(tokens, n, n - self.min_ngram))
            .map_or(Vec::new(), |from| {
                tokens[from..].iter().copied().take(k).collect()
            })
    }
}

impl Proposer for NgramProposer {
    fn most(&self) -> usize {
        self.k
    }

    fn propose(&mut self, _runner: &mut dyn Runner, asks: &[Ask<'_>]) -> Result<Vec<Drafts>> {
        let propose = |ask: &Ask<'_>| Drafts {
            tokens: self.propose_after(ask.id, ask.tokens, ask.most.min(self.k)),
            ..Drafts::default()
        };
        Ok(asks.iter().map(propose).collect())
    }

    fn forget(&mut self, id: u64) {
        self.texts.remove(&id);
    }
}

/// Where the n-grams of one text last occurred.
#[derive(Debug, Default)]
struct Index {
    /// For each n, by hash, the position after the latest occurrence that has a token after it.
    after: Vec<HashMap<u64, usize, BuildHasherDefault<Hashed>>>,
    /// Positions whose n-grams, those that end there, are in it.
    read: usize,
}

impl Index {
    /// Takes in every n-gram that ends before the last token.
    fn extend(&mut self, tokens: &[u32], sizes: std::ops::RangeInclusive<usize>) {
        let end = tokens.len().saturating_sub(1);
        if end < self.read {
            // Not the text that it was.
            *self = Index::default();
        }
        self.after
            .resize_with(sizes.clone().count(), HashMap::default);
        for (n, after) in sizes.zip(&mut self.after) {
            let first = self.read.max(n - 1);
            for last in first..end {
                after.insert(hash(&tokens[last + 1 - n..=last]), last + 1);
            }
        }
        self.read = end;
    }

    /// Where the text goes on after the latest earlier occurrence of its last `n` tokens.
    fn follows(&self, tokens: &[u32], n: usize, table: usize) -> Option<usize> {
        let last = &tokens[tokens.len().checked_sub(n)?..];
        let &from = self.after.get(table)?.get(&hash(last))?;
        // Two n-grams may have one hash.
        (&tokens[from - n..from] == last).then_some(from)
    }
}

/// The finaliser of splitmix64 over the tokens.
fn hash(tokens: &[u32]) -> u64 {
    tokens.iter().fold(0x9e37_79b9_7f4a_7c15, |hash, &token| {
        let mixed = hash ^ (u64::from(token) + 1);
        let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    })
}

/// Keys that are hashes already.
#[derive(Debug, Default)]
struct Hashed(u64);

impl Hasher for Hashed {
    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0 << 8 ^ u64::from(byte);
        }
    }

    fn write_u64(&mut self, key: u64) {
        self.0 = key;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}
