//! Which rows of a step are sampled on the device, and the numbers that the kernels of `kernels/draw.rs` need
//! for them. What it decides with is the row's sampler alone, so a step is planned without waiting for the
//! one before it. Log probabilities stay on the host.

use std::collections::HashSet;

use tileinfer::sampling::rng::Row;
use tileinfer::sampling::{Distribution, Draw, RowSampler, Stream, broken_logit, no_token_allowed};
use tileinfer::{Error, Result};

use crate::driver::Address;
use crate::kernels::{self, Variant};
use crate::ops::Ops;

/// Logits a part, the block of the sums.
pub const PART: usize = 4096;

/// Words of a row of the table.
pub const WORDS: usize = 24;

/// Words of a row of the state.
pub const STATE: usize = 8;

/// Most rows that the kernels take at once: each has a ticket.
pub const MOST_ROWS: usize = 128;

/// Most rows at once where some of them keep a number or two for each token of the vocabulary.
const MOST_KEEPING: usize = 32;

/// Words of a list for each token.
const LISTED: usize = 3;

/// Most bytes of distributions that a step lists, or that it brings along.
const MOST_BYTES: usize = 128 << 20;

/// Values of [`Word::Draw`].
const DRAFT: i32 = 1;
const VERIFY: i32 = 2;

/// What the words of a row of the table are. Floats are given by their bits; a filter that is off has a 0.
#[derive(Debug, Clone, Copy)]
enum Word {
    /// 1: the largest logit, without noise.
    Greedy,
    InverseTemperature,
    TopK,
    TopP,
    MinP,
    KeyLow,
    KeyHigh,
    /// Tokens of the vocabulary.
    Limit,
    /// Its row of logits.
    Source,
    /// Where its mask begins, −1 without one, and how many words it has.
    Mask,
    MaskWords,
    Repetition,
    /// Of the repetition penalty.
    Reciprocal,
    Presence,
    Frequency,
    /// Where its token goes.
    Token,
    /// [`DRAFT`]: a draft, and a list of what it is drawn from; [`VERIFY`]: what comes where a draft stands; 0: a token.
    /// Where the largest logit is wanted it is the same for all three.
    Draw,
    /// The draft that stands there, and the probability that it has to exceed.
    Draft,
    Least,
    /// What it was drawn from: the first pair and their number.
    Pairs,
    PairCount,
    /// The number of the draft's list.
    List,
}

/// A step's rows as the kernels take them.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SamplePlan {
    /// [`WORDS`] words a row.
    table: Vec<i32>,
    /// Row, token, bias, times in the output; each logit at most once.
    biases: Vec<i32>,
    /// The same for penalties, which come after.
    penalties: Vec<i32>,
    /// The masks, one after the other.
    masks: Vec<i32>,
    /// What drafts were drawn from: token, probability.
    pairs: Vec<i32>,
    /// Places of the tokens whose distributions the device lists.
    lists: Vec<usize>,
    /// Rows of the step that the host samples: row of the logits, place of the token.
    host: Vec<(usize, usize)>,
}

impl SamplePlan {
    /// The plan for samplers of the rows of logits of a width, none for rows that are skipped.
    pub fn new(rows: &[Option<RowSampler>], width: usize) -> Self {
        let mut plan = SamplePlan::default();
        let samplers = rows.iter().enumerate();
        let samplers = samplers.filter_map(|(row, sampler)| Some((row, sampler.as_ref()?)));
        for (place, (row, sampler)) in samplers.enumerate() {
            if is_for_device(sampler, width) && plan.has_room(&sampler.draw, width) {
                plan.push(sampler, [row, place], width);
            } else {
                plan.host.push((row, place));
            }
        }
        plan
    }

    /// Whether the distribution that a draw brings or needs is not too much.
    fn has_room(&self, draw: &Draw, width: usize) -> bool {
        let bytes = match draw {
            Draw::Token => 0,
            Draw::Draft => list_bytes(self.lists.len() + 1, width),
            Draw::Verify { from, .. } => (self.pairs.len() + 2 * from.ids.len()) * 4,
        };
        bytes <= MOST_BYTES
    }

    /// Rows for the device.
    pub fn rows(&self) -> usize {
        self.table.len() / WORDS
    }

    /// Rows for the host: row of the logits, place of the token.
    pub fn host(&self) -> &[(usize, usize)] {
        &self.host
    }

    /// Places of the tokens whose distributions the device lists, in the order of the lists.
    pub fn lists(&self) -> &[usize] {
        &self.lists
    }

    /// Whether logits change before a token is drawn from them.
    fn adjusts(&self) -> bool {
        !(self.biases.is_empty() && self.penalties.is_empty() && self.masks.is_empty())
    }

    fn asks(&self, word: Word) -> bool {
        self.table.chunks(WORDS).any(|row| row[word as usize] != 0)
    }

    fn draws(&self, draw: i32) -> bool {
        let mut rows = self.table.chunks(WORDS);
        rows.any(|row| row[Word::Draw as usize] == draw)
    }

    fn most_pairs(&self) -> usize {
        let rows = self.table.chunks(WORDS);
        let counts = rows.map(|row| row[Word::PairCount as usize] as usize);
        counts.max().unwrap_or(0)
    }

    fn push(&mut self, sampler: &RowSampler, [source, place]: [usize; 2], width: usize) {
        let params = &sampler.params;
        let row = self.rows() as i32;
        let limit = sampler.vocabulary.min(width);
        let stream = sampler.row().stream;
        let key = Row::new(sampler.seed, sampler.position, stream).key();
        let mut words = [0; WORDS];
        let mut set = |word: Word, value: i32| words[word as usize] = value;
        let bits = |value: f32| value.to_bits().cast_signed();
        set(Word::Limit, limit as i32);
        set(Word::Source, source as i32);
        set(Word::Token, place as i32);
        set(Word::Greedy, params.is_greedy().into());
        if !params.is_greedy() {
            set(Word::InverseTemperature, bits(1.0 / params.temperature));
            if params.top_k > 0 && (params.top_k as usize) < limit {
                set(Word::TopK, bits(params.top_k as f32));
            }
            if params.top_p < 1.0 {
                set(Word::TopP, bits(params.top_p));
            }
            set(Word::MinP, bits(params.min_p));
            set(Word::KeyLow, key[0].cast_signed());
            set(Word::KeyHigh, key[1].cast_signed());
            match &sampler.draw {
                Draw::Token => {}
                Draw::Draft => {
                    set(Word::Draw, DRAFT);
                    set(Word::List, self.lists.len() as i32);
                    self.lists.push(place);
                }
                Draw::Verify { draft, from } => {
                    let known = |id: u32| (id as usize) < limit;
                    let noise = Row::new(sampler.seed, sampler.position, Stream::Accept);
                    set(Word::Draw, VERIFY);
                    if known(*draft) {
                        set(Word::Draft, draft.cast_signed());
                        set(Word::Least, bits(noise.uniform() * from.prob(*draft)));
                    } else {
                        set(Word::Least, bits(f32::INFINITY));
                    }
                    set(Word::Pairs, (self.pairs.len() / 2) as i32);
                    let pairs = from.ids.iter().zip(&from.probs);
                    let pairs = pairs.filter(|&(&id, _)| known(id));
                    let before = self.pairs.len();
                    self.pairs
                        .extend(pairs.flat_map(|(id, &prob)| [id.cast_signed(), bits(prob)]));
                    set(Word::PairCount, ((self.pairs.len() - before) / 2) as i32);
                }
            }
        }
        set(Word::Mask, -1);
        if let Some(mask) = &sampler.mask {
            let used = limit.div_ceil(32).min(mask.words().len());
            set(Word::Mask, self.masks.len() as i32);
            set(Word::MaskWords, used as i32);
            let used = mask.words()[..used].iter().map(|word| word.cast_signed());
            self.masks.extend(used);
            if self.masks.is_empty() {
                // A mask of no words is still one.
                self.masks.push(0);
            }
        }
        for &(id, bias) in &params.logit_bias {
            self.biases.extend([row, id.cast_signed(), bits(bias), -1]);
        }
        if let Some(counts) = sampler.counts.as_ref().filter(|_| params.has_penalties()) {
            set(Word::Repetition, bits(params.repetition_penalty));
            set(Word::Reciprocal, bits(1.0 / params.repetition_penalty));
            set(Word::Presence, bits(params.presence_penalty));
            set(Word::Frequency, bits(params.frequency_penalty));
            counts.each_with(&sampler.drafts, |id, times| {
                if (id as usize) < limit {
                    // Adding -0 changes nothing.
                    let entry = [row, id.cast_signed(), bits(-0.0), times.cast_signed()];
                    self.penalties.extend(entry);
                }
            });
        }
        self.table.extend(words);
    }

    /// All that goes to the device: table, entries, masks, pairs.
    fn arrays(&self) -> [&[i32]; 5] {
        let [table, biases, penalties] = [&self.table, &self.biases, &self.penalties];
        [table, biases, penalties, &self.masks, &self.pairs]
    }

    /// How many words go to the device.
    pub fn words(&self) -> usize {
        self.arrays().iter().map(|array| array.len()).sum()
    }

    /// Writes them, one array after the other.
    ///
    /// # Panics
    /// If `to` has not [`SamplePlan::words`] words.
    pub fn write(&self, to: &mut [i32]) {
        let mut at = 0;
        for array in self.arrays() {
            to[at..at + array.len()].copy_from_slice(array);
            at += array.len();
        }
    }
}

/// Whether the kernels do what a row asks for. A row that cannot be sampled at all is the host's as well, which
/// says why.
fn is_for_device(sampler: &RowSampler, width: usize) -> bool {
    let params = &sampler.params;
    let limit = sampler.vocabulary.min(width);
    let mut biased = HashSet::new();
    sampler.top_logprobs.is_none()
        && limit > 0
        && (!params.has_penalties() || sampler.counts.is_some())
        && params
            .logit_bias
            .iter()
            .all(|&(id, _)| (id as usize) < limit && biased.insert(id))
        && params.validate().is_ok()
}

/// The token that the kernels left, or what they say is wrong with its row, whose vocabulary ends at `limit`.
///
/// # Errors
/// Those of sampling on the host.
pub fn token(code: i32, limit: usize) -> Result<u32> {
    match code {
        // What argmax finds among NaN.
        i32::MAX => Err(Error::Bug(
            "a row of logits holds no number to choose".to_owned(),
        )),
        0.. => Ok(code.cast_unsigned()),
        -1 => Err(no_token_allowed(limit)),
        _ => {
            let broken = (-2 - code).cast_unsigned();
            let logit = if broken % 2 == 1 {
                f32::INFINITY
            } else {
                f32::NAN
            };
            Err(broken_logit(broken / 2, logit))
        }
    }
}

/// Bytes for `count` lists of distributions over `vocab` tokens: how long each is, then the lists.
pub fn list_bytes(count: usize, vocab: usize) -> usize {
    count * (1 + vocab * LISTED) * 4
}

/// The distribution that the kernels listed: for each token, in no order, its id, the bits of its probability and
/// the rank of its logit.
fn listed(words: &[i32]) -> Distribution {
    let tokens = words.as_chunks::<LISTED>().0;
    let mut probs = Vec::new();
    let mut order = Vec::with_capacity(tokens.len());
    for words in tokens {
        let [id, prob, rank] = words.map(i32::cast_unsigned);
        if id as usize >= probs.len() {
            probs.resize((id as usize + 1).next_power_of_two(), 0.0);
        }
        probs[id as usize] = f32::from_bits(prob);
        // Ranks have a sign. A key alone is sorted quicker than what goes with it.
        order.push(u64::from(!rank ^ 1 << 31) << 32 | u64::from(id));
    }
    order.sort_unstable();
    let ids: Vec<u32> = order.into_iter().map(|key| key as u32).collect();
    let probs = ids.iter().map(|&id| probs[id as usize]).collect();
    Distribution { ids, probs }
}

/// Parts of a row, and a power of two that is no less.
fn parts(vocab: usize) -> (usize, i32) {
    let parts = vocab.div_ceil(PART);
    (parts, parts.next_power_of_two().max(16) as i32)
}

fn survey_variant(masked: bool) -> Variant {
    let sizes = [PART as i32, i32::from(masked)];
    Variant::new(&kernels::SURVEY, &[], &sizes).hints(8, 2)
}

fn search_variant(vocab: usize, weighted: bool) -> Variant {
    let sizes = [parts(vocab).1, i32::from(weighted)];
    Variant::new(&kernels::SEARCH, &[], &sizes).hints(4, 4)
}

/// The kernels that sample rows of `vocab` logits, for a pack.
pub fn variants(vocab: usize) -> Vec<Variant> {
    vec![
        adjust_variant(),
        survey_variant(false),
        survey_variant(true),
        search_variant(vocab, false),
        search_variant(vocab, true),
        ties_variant(),
        score_variant(vocab),
        spread_variant(),
        total_variant(false),
        total_variant(true),
        redraw_variant(),
        list_variant(),
        choose_variant(vocab),
    ]
}

fn adjust_variant() -> Variant {
    Variant::new(&kernels::ADJUST, &[], &[])
}

fn ties_variant() -> Variant {
    Variant::new(&kernels::TIES, &[], &[PART as i32]).hints(8, 2)
}

fn score_variant(vocab: usize) -> Variant {
    Variant::new(&kernels::SCORE, &[], &[PART as i32, parts(vocab).1]).hints(8, 2)
}

fn spread_variant() -> Variant {
    Variant::new(&kernels::SPREAD, &[], &[])
}

fn total_variant(excess: bool) -> Variant {
    Variant::new(&kernels::TOTAL, &[], &[i32::from(excess)])
}

fn redraw_variant() -> Variant {
    Variant::new(&kernels::REDRAW, &[], &[PART as i32]).hints(8, 2)
}

fn list_variant() -> Variant {
    Variant::new(&kernels::LIST, &[], &[PART as i32]).hints(8, 2)
}

fn choose_variant(vocab: usize) -> Variant {
    Variant::new(&kernels::CHOOSE, &[], &[parts(vocab).1])
}

impl Ops {
    /// Draws the tokens of a plan's rows from `rows` rows of `vocab` logits, which are not changed; `words` is
    /// where [`SamplePlan::write`]'s words are. A token goes to the place that its row names, see [`token`]; `lists`
    /// is where [`Ops::read_lists`] finds what drafts were drawn from, [`list_bytes`] of memory.
    pub fn sample(
        &self,
        [tokens, lists]: [Address; 2],
        logits: Address,
        [rows, vocab]: [usize; 2],
        plan: &SamplePlan,
        words: Address,
    ) -> Result<()> {
        let (parts, _) = parts(vocab);
        let bytes = |words: usize| (words * 4).next_multiple_of(256);
        let copied = if plan.adjusts() { rows * vocab } else { 0 };
        let [drafts, verifies] = [DRAFT, VERIFY].map(|draw| plan.draws(draw));
        let keeps = drafts || verifies;
        let most = if keeps { MOST_KEEPING } else { MOST_ROWS };
        let (some, all) = (plan.rows().min(most), plan.rows());
        let each = some * parts;
        let kept = some * vocab;
        let sizes = [
            copied,
            each,
            each,
            each,
            each,
            each,
            each,
            each,
            each,
            each * 16,
            some * STATE,
            if keeps { kept } else { 0 },
            if verifies { kept } else { 0 },
        ];
        let mut at = self.scratch(sizes.iter().map(|&size| bytes(size)).sum())?;
        let [
            copy,
            maxima,
            broken,
            best,
            ranks,
            place,
            counts,
            totals,
            rests,
            partials,
            state,
            weights,
            drafted,
        ] = sizes.map(|size| {
            let begin = at;
            at += bytes(size) as Address;
            begin
        });
        let [table, biases, penalties, masks, _] = plan.arrays().map(<[i32]>::len);
        let after = |count: usize| words + (count * 4) as Address;
        let pairs = after(table + biases + penalties + masks);
        let masks = after(table + biases + penalties);
        let mut source = logits;
        if plan.adjusts() {
            self.device().queue_copy(copy, logits, rows * vocab * 4)?;
            source = copy;
            for (first, count) in [(table, biases), (table + biases, penalties)] {
                let count = count / 4;
                let arguments = [
                    source.into(),
                    after(first).into(),
                    words.into(),
                    vocab.into(),
                    count.into(),
                ];
                self.launch(&adjust_variant(), [count.div_ceil(128), 1, 1], &arguments)?;
            }
        }
        let entries = lists + (plan.lists.len() * 4) as Address;
        if drafts {
            self.device().queue_fill(lists, 0, plan.lists.len() * 4)?;
        }
        for first in (0..all).step_by(most) {
            let grid = [parts, (all - first).min(most), 1];
            let table = after(first * WORDS);
            let shape = [vocab.into(), parts.into()];
            let arguments = [maxima, broken, state, source, table, masks].map(Into::into);
            let arguments = [&arguments[..], &shape].concat();
            let masked = !plan.masks.is_empty();
            self.launch(&survey_variant(masked), grid, &arguments)?;
            let searches = [(Word::TopK, false), (Word::TopP, true)];
            for (_, weighted) in searches.into_iter().filter(|&(word, _)| plan.asks(word)) {
                let tickets = self.sampling_tickets();
                for shift in (0..32_usize).step_by(4).rev() {
                    let arguments =
                        [state, partials, tickets, source, maxima, table].map(Into::into);
                    let arguments = [&arguments[..], &shape, &[shift.into()]].concat();
                    self.launch(&search_variant(vocab, weighted), grid, &arguments)?;
                }
            }
            if plan.asks(Word::TopP) {
                let arguments = [counts, state, source, table].map(Into::into);
                let arguments = [&arguments[..], &shape].concat();
                self.launch(&ties_variant(), grid, &arguments)?;
            }
            let arguments = [
                best, ranks, place, weights, state, counts, source, maxima, table,
            ];
            let arguments = [&arguments.map(Into::into)[..], &shape].concat();
            self.launch(&score_variant(vocab), grid, &arguments)?;
            if keeps {
                let sum = |sums: Address, excess| {
                    let arguments = [sums, weights, drafted, totals, table].map(Into::into);
                    let arguments = [&arguments[..], &shape].concat();
                    self.launch(&total_variant(excess), grid, &arguments)
                };
                sum(totals, false)?;
                if verifies {
                    self.device().queue_fill(drafted, 0, kept * 4)?;
                    let arguments = [drafted, pairs, table].map(Into::into);
                    let arguments = [&arguments[..], &shape[..1]].concat();
                    let stretches = plan.most_pairs().div_ceil(1024);
                    self.launch(&spread_variant(), [stretches, grid[1], 1], &arguments)?;
                    sum(rests, true)?;
                    let arguments = [
                        best, ranks, place, weights, drafted, totals, rests, source, table,
                    ];
                    let arguments = [&arguments.map(Into::into)[..], &shape].concat();
                    self.launch(&redraw_variant(), grid, &arguments)?;
                }
                if drafts {
                    let arguments = [lists, entries, weights, totals, source, table];
                    let arguments = [&arguments.map(Into::into)[..], &shape].concat();
                    self.launch(&list_variant(), grid, &arguments)?;
                }
            }
            let arguments = [
                tokens, best, ranks, place, maxima, broken, weights, totals, table,
            ];
            let arguments = [&arguments.map(Into::into)[..], &shape].concat();
            self.launch(&choose_variant(vocab), [grid[1], 1, 1], &arguments)?;
        }
        Ok(())
    }

    /// The distributions in `count` lists over `vocab` tokens.
    pub fn read_lists(
        &self,
        lists: Address,
        count: usize,
        vocab: usize,
    ) -> Result<Vec<Distribution>> {
        let read = |word: usize, count: usize| -> Result<Vec<i32>> {
            let mut bytes = vec![0; count * 4];
            let from = lists + (word * 4) as Address;
            self.device().download(from, &mut bytes)?;
            let words = bytes.as_chunks().0.iter();
            Ok(words.map(|&word| i32::from_le_bytes(word)).collect())
        };
        let lengths = read(0, count)?.into_iter().enumerate();
        let lists = lengths.map(|(list, length)| {
            let length = (length.max(0) as usize).min(vocab);
            Ok(listed(&read(
                count + list * vocab * LISTED,
                length * LISTED,
            )?))
        });
        lists.collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tileinfer::sampling::math::{EXP_CUTOFF, SUM_LANES, exp, ln};
    use tileinfer::sampling::{SamplingParams, TokenCounts, TokenMask};

    use super::*;

    /// `exact::rank`.
    fn rank(x: f32) -> i32 {
        let bits = x.to_bits().cast_signed();
        if x == 0.0 {
            0
        } else {
            bits ^ ((bits >> 31) & i32::MAX)
        }
    }

    /// What `draw::search` leaves in the state of a row.
    #[derive(Clone, Copy)]
    struct Found {
        rank: i32,
        budget: f32,
        above: f32,
    }

    /// The sum of `term` of each of a row, part by part as the kernels do it.
    fn sum<T>(row: &[T], term: impl Fn(&T) -> f32) -> f32 {
        let parts = row.chunks(PART).map(|part| {
            let mut lanes = vec![0.0_f32; SUM_LANES];
            for terms in part.chunks(SUM_LANES) {
                let terms = terms.iter().map(&term);
                lanes.iter_mut().zip(terms).for_each(|(a, b)| *a += b);
            }
            while lanes.len() > 1 {
                let upper = lanes.split_off(lanes.len() / 2);
                lanes.iter_mut().zip(upper).for_each(|(a, b)| *a += b);
            }
            lanes[0]
        });
        parts.fold(0.0, |total, part| total + part)
    }

    /// The launches of `draw::search`: `terms` are rank and weight of each logit, 0 for those that are out.
    fn search(terms: &[(i32, f32)], factor: f32, weighted: bool) -> Found {
        let mut low = i32::MIN;
        let mut found = Found {
            rank: low,
            budget: factor,
            above: 0.0,
        };
        for shift in (0..32).step_by(4).rev() {
            let mut threshold: [i32; 16] = std::array::from_fn(|j| {
                let end = (j as i32 + 1).wrapping_shl(shift);
                low.wrapping_add(end).wrapping_sub(1)
            });
            if shift == 28 {
                threshold[15] = i32::MIN;
            }
            let total = threshold.map(|threshold| {
                sum(
                    terms,
                    |&(rank, weight)| {
                        if rank > threshold { weight } else { 0.0 }
                    },
                )
            });
            if shift == 28 && weighted {
                found.budget = factor * total[15];
            }
            let first = (0..15)
                .find(|&j| total[j] < found.budget)
                .unwrap_or(15_usize);
            found.above = total[first];
            low = low.wrapping_add((first as i32).wrapping_shl(shift));
        }
        found.rank = low;
        found
    }

    /// What the kernels leave for a row: its token's place, its token and what they list.
    type Left = (usize, i32, Option<Distribution>);

    /// All the kernels, step by step: what they leave for the rows of a plan.
    fn emulate(plan: &SamplePlan, rows: &[Option<RowSampler>], logits: &[f32]) -> Vec<Left> {
        let width = logits.len() / rows.len();
        let mut logits = logits.to_vec();
        for list in [&plan.biases, &plan.penalties] {
            for &[row, id, bias, seen] in list.as_chunks::<4>().0 {
                let words = &plan.table[row as usize * WORDS..][..WORDS];
                let float = |word: Word| f32::from_bits(words[word as usize].cast_unsigned());
                let place = words[Word::Source as usize] as usize * width + id as usize;
                let logit = &mut logits[place];
                *logit += f32::from_bits(bias.cast_unsigned());
                if seen >= 0 {
                    *logit *= match *logit > 0.0 {
                        true => float(Word::Reciprocal),
                        false => float(Word::Repetition),
                    };
                }
                if seen > 0 {
                    *logit -= float(Word::Frequency) * seen as f32 + float(Word::Presence);
                }
            }
        }
        let rows = plan.table.chunks(WORDS).map(|words| {
            let word = |word: Word| words[word as usize];
            let float = |word: Word| f32::from_bits(words[word as usize].cast_unsigned());
            let source = word(Word::Source) as usize;
            let logits = &mut logits[source * width..][..word(Word::Limit) as usize];
            let sampler = rows[source].as_ref().expect("rows of a plan have one");
            let mut broken = i32::MAX;
            let mut top = f32::NEG_INFINITY;
            for (id, logit) in logits.iter_mut().enumerate() {
                if logit.is_nan() || *logit == f32::INFINITY {
                    let infinite = i32::from(*logit == f32::INFINITY);
                    broken = broken.min(2 * id as i32 + infinite);
                    continue;
                }
                if word(Word::Mask) >= 0 {
                    let there = (id as i32) / 32 < word(Word::MaskWords);
                    let at = word(Word::Mask) as usize + id / 32;
                    if !(there && plan.masks[at] >> (id % 32) & 1 == 1) {
                        *logit = f32::NEG_INFINITY;
                    }
                }
                top = top.max(*logit);
            }
            let mut list = None;
            let code = if broken != i32::MAX {
                -2 - broken
            } else if top == f32::NEG_INFINITY {
                -1
            } else {
                let (token, weights) = draw(&word, &float, sampler, logits, top);
                let total = sum(&weights, |&weight| weight);
                let probs: Vec<f32> = weights.iter().map(|weight| weight / total).collect();
                if word(Word::Draw) == DRAFT {
                    let tokens = (0..logits.len()).rev().filter(|&id| weights[id] > 0.0);
                    let entry = |id| [id as i32, bits(probs[id]), rank(logits[id])];
                    list = Some(listed(&tokens.flat_map(entry).collect::<Vec<_>>()));
                    assert_eq!(
                        plan.lists[word(Word::List) as usize] as i32,
                        word(Word::Token)
                    );
                }
                if word(Word::Draw) == VERIFY {
                    let mut q = vec![0.0; logits.len()];
                    let (pairs, _) = plan.pairs.as_chunks::<2>();
                    let pairs = &pairs[word(Word::Pairs) as usize..];
                    for &[id, bits] in &pairs[..word(Word::PairCount) as usize] {
                        q[id as usize] = f32::from_bits(bits.cast_unsigned());
                    }
                    let draft = word(Word::Draft);
                    let stays = float(Word::Least) < probs[draft as usize];
                    let token = redraw(sampler, logits, &probs, &q);
                    if stays { draft } else { token }
                } else {
                    token
                }
            };
            (word(Word::Token) as usize, code, list)
        });
        rows.collect()
    }

    /// `total` of the excess, `redraw` and `choose`.
    fn redraw(sampler: &RowSampler, logits: &[f32], p: &[f32], q: &[f32]) -> i32 {
        let noise = Row::new(sampler.seed, sampler.position, Stream::Target);
        let excess: Vec<f32> = p.iter().zip(q).map(|(p, q)| (p - q).max(0.0)).collect();
        let rest = sum(&excess, |&excess| excess);
        let mut best = (f32::NEG_INFINITY, i32::MIN, i32::MAX);
        for (id, &logit) in logits.iter().enumerate() {
            let prob = if rest > 0.0 { excess[id] / rest } else { p[id] };
            if prob < f32::MIN_POSITIVE {
                continue;
            }
            let score = (ln(prob) + noise.gumbel(id as u32), rank(logit), id as i32);
            if score.0 > best.0 || (score.0 == best.0 && score.1 > best.1) {
                best = score;
            }
        }
        best.2
    }

    /// `search`, `ties`, `score` and `choose` for a row that is not broken: the token, and the weights that the filters
    /// leave.
    fn draw(
        word: &dyn Fn(Word) -> i32,
        float: &dyn Fn(Word) -> f32,
        sampler: &RowSampler,
        logits: &[f32],
        top: f32,
    ) -> (i32, Vec<f32>) {
        let noise = Row::new(sampler.seed, sampler.position, sampler.row().stream);
        let mut weights = vec![0.0; logits.len()];
        let scaled = |logit: f32| (logit - top) * float(Word::InverseTemperature);
        let mut floor = i32::MIN;
        if word(Word::TopK) != 0 {
            let ones: Vec<_> = logits.iter().map(|&logit| (rank(logit), 1.0)).collect();
            floor = search(&ones, float(Word::TopK), false).rank;
        }
        let mut cut = None;
        if word(Word::TopP) != 0 {
            let weight = |&logit: &f32| match rank(logit) >= floor {
                true => (rank(logit), exp(scaled(logit))),
                false => (rank(logit), 0.0),
            };
            let weights: Vec<_> = logits.iter().map(weight).collect();
            cut = Some(search(&weights, float(Word::TopP), true));
        }
        let (mut best, mut token, mut ties) = (f32::NEG_INFINITY, i32::MAX, 0_i32);
        for (id, &logit) in logits.iter().enumerate() {
            let weight = exp(scaled(logit));
            let mut stays =
                rank(logit) >= floor && scaled(logit) >= EXP_CUTOFF && weight >= float(Word::MinP);
            if let Some(cut) = cut {
                let equal = rank(logit) == cut.rank;
                let fits = ties == 0 || cut.above + ties as f32 * weight < cut.budget;
                stays &= rank(logit) > cut.rank || (equal && fits);
                ties += i32::from(equal);
            }
            if stays {
                weights[id] = weight;
            }
            let score = match (word(Word::Greedy) != 0, stays) {
                (true, _) => logit,
                (_, true) => scaled(logit) + noise.gumbel(id as u32),
                _ => f32::NEG_INFINITY,
            };
            if score > best {
                (best, token) = (score, id as i32);
            }
        }
        (token, weights)
    }

    fn bits(value: f32) -> i32 {
        value.to_bits().cast_signed()
    }

    /// A generator for the tests.
    struct Random(u64);

    impl Random {
        fn below(&mut self, n: u64) -> u64 {
            self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
            (self.0 >> 33) % n
        }

        fn of<T: Copy>(&mut self, values: &[T]) -> T {
            values[self.below(values.len() as u64) as usize]
        }

        fn logits(&mut self, width: usize) -> Vec<f32> {
            // Few values give ties, many give none.
            let steps = self.of(&[2, 7, 300, 1 << 24]);
            let scale = self.of(&[0.0, 1.0, 12.0, 400.0]);
            let hole = self.of(&[0, 0, 3, 90]);
            let logit = |random: &mut Random| {
                if random.below(100) < hole {
                    return f32::NEG_INFINITY;
                }
                (random.below(steps) as f32 / steps as f32 - 0.7) * scale
            };
            (0..width).map(|_| logit(self)).collect()
        }

        fn sampler(&mut self, width: usize) -> RowSampler {
            let width = width as u64;
            let mut params = SamplingParams {
                temperature: self.of(&[0.0, 1e-6, 0.1, 0.7, 1.0, 1.0, 3.0, 1e30, f32::MAX]),
                top_k: self.of(&[0, 0, 1, 2, 20, 1000, u32::MAX]),
                top_p: self.of(&[1.0, 1e-40, 0.1, 0.8, 0.95, 0.999, 0.999_999_94]),
                min_p: self.of(&[0.0, 0.0, 0.0, 0.05, 1.0]),
                ..SamplingParams::default()
            };
            let mut counts = None;
            if self.below(4) == 0 {
                params.repetition_penalty = self.of(&[1.0, 1.3, 0.5]);
                params.presence_penalty = self.of(&[0.0, 1.5]);
                params.frequency_penalty = self.of(&[0.0, -0.3]);
                let prompt: Vec<u32> = (0..9).map(|_| self.below(width + 2) as u32).collect();
                let mut seen = TokenCounts::new(&prompt);
                (0..9).for_each(|_| seen.push_output(self.below(width) as u32));
                counts = Some(Arc::new(seen));
            }
            let vocabulary = self.of(&[usize::MAX, width as usize, width as usize - 1]);
            if self.below(4) == 0 {
                let id = self.below(vocabulary.min(width as usize) as u64) as u32;
                params.logit_bias = vec![(id, self.of(&[-100.0, 3.5]))];
            }
            let mask = (self.below(4) == 0).then(|| {
                let len = self.of(&[0, 1, width.div_ceil(32) as usize]);
                let word = |_| (self.below(1 << 31) << 1) as u32;
                Arc::new(TokenMask::from_words((0..len).map(word).collect()))
            });
            RowSampler {
                params: Arc::new(params),
                counts,
                drafts: vec![0, 0],
                mask,
                seed: self.below(1 << 31) << 20,
                position: self.below(1 << 20),
                vocabulary,
                top_logprobs: None,
                draw: Draw::Token,
            }
        }
    }

    impl Random {
        /// What the token after `logits` is drawn for: itself, a draft, or where a draft stands, which was drawn from
        /// something close to the row's distribution, far from it, or the same.
        fn draw(&mut self, sampler: &RowSampler, logits: &[f32]) -> Draw {
            let width = logits.len() as u64;
            match self.below(4) {
                0 => return Draw::Token,
                1 => return Draw::Draft,
                _ => {}
            }
            let drafter = RowSampler {
                vocabulary: self.of(&[sampler.vocabulary, usize::MAX]),
                mask: sampler.mask.clone().filter(|_| self.below(2) == 0),
                draw: Draw::Draft,
                ..sampler.clone()
            };
            let other = self.logits(logits.len());
            let size = self.of(&[0.0, 0.0, 0.1, 2.0, 1000.0]);
            let mixed = |(a, b): (&f32, &f32)| if size == 0.0 { *a } else { a + b * size };
            let mixed: Vec<f32> = logits.iter().zip(&other).map(mixed).collect();
            let any = self.below(width + 3) as u32;
            let from = match drafter.sample(&mixed) {
                Ok(drafted) if self.below(8) > 0 => drafted.drawn_from.expect("a draft has one"),
                _ => Arc::new(Distribution::one_hot(any)),
            };
            let draft = match self.below(5) {
                0 => any,
                _ => from.ids[self.below(from.ids.len() as u64) as usize],
            };
            Draw::Verify { draft, from }
        }
    }

    #[test]
    fn the_kernels_steps_give_the_tokens_of_the_host() {
        let mut random = Random(5);
        let mut drawn = [0; 2];
        // Drafts, those that stay, those that do not.
        let mut drafts = [0; 3];
        for (width, times) in [(2, 300), (7, 2000), (300, 600), (4097, 60), (9000, 30)] {
            for _ in 0..times {
                let mut samplers = [
                    Some(random.sampler(width)),
                    None,
                    Some(random.sampler(width)),
                ];
                let mut logits = random.logits(3 * width);
                for (sampler, row) in samplers.iter_mut().zip(logits.chunks(width)) {
                    if let Some(sampler) = sampler {
                        sampler.draw = random.draw(sampler, row);
                    }
                }
                if random.below(20) == 0 {
                    let at = random.below(3 * width as u64) as usize;
                    logits[at] = random.of(&[f32::NAN, f32::INFINITY]);
                }
                let plan = SamplePlan::new(&samplers, width);
                assert_eq!(plan.rows(), 2, "{samplers:?}");
                let codes = emulate(&plan, &samplers, &logits);
                let rows = samplers.iter().zip(logits.chunks(width));
                let rows = rows.filter_map(|(sampler, row)| Some((sampler.as_ref()?, row)));
                for ((place, (sampler, row)), code) in rows.enumerate().zip(codes) {
                    assert_eq!(place, code.0);
                    let limit = sampler.vocabulary.min(width);
                    match (sampler.sample(row), token(code.1, limit)) {
                        (Ok(host), Ok(token)) => {
                            assert_eq!(host.token, token, "{width} logits, {sampler:?}");
                            drawn[0] += 1;
                            match &sampler.draw {
                                Draw::Token => {}
                                Draw::Draft => drafts[0] += 1,
                                Draw::Verify { draft, .. } => {
                                    drafts[1 + usize::from(token != *draft)] += 1;
                                }
                            }
                            let greedy = sampler.params.is_greedy();
                            if sampler.draw == Draw::Draft && !greedy {
                                assert_eq!(host.drawn_from, code.2.map(Arc::new));
                            }
                        }
                        (Err(host), Err(error)) => {
                            assert_eq!(host.to_string(), error.to_string());
                            drawn[1] += 1;
                        }
                        (host, token) => panic!("{host:?} on the host, {token:?}: {sampler:?}"),
                    }
                }
            }
        }
        assert!(drawn[0] > 3000 && drawn[1] > 100, "{drawn:?}");
        assert!(drafts.iter().all(|&count| count > 500), "{drafts:?}");
    }

    #[test]
    fn what_the_kernels_do_not_do_is_the_hosts() {
        let mut random = Random(1);
        let plain = RowSampler {
            params: Arc::default(),
            counts: None,
            mask: None,
            vocabulary: 50,
            ..random.sampler(50)
        };
        let with = |change: &dyn Fn(&mut SamplingParams)| {
            let mut params = SamplingParams::default();
            change(&mut params);
            RowSampler {
                params: Arc::new(params),
                ..plain.clone()
            }
        };
        let host = [
            RowSampler {
                top_logprobs: Some(0),
                ..plain.clone()
            },
            // These end in an error, which the host words.
            with(&|params| params.presence_penalty = 1.0),
            with(&|params| params.logit_bias = vec![(50, 1.0)]),
            with(&|params| params.temperature = f32::NAN),
        ];
        let count = host.len();
        let mut rows: Vec<_> = host.into_iter().map(Some).collect();
        rows.insert(0, None);
        rows.push(Some(plain));
        let plan = SamplePlan::new(&rows, 64);
        let expected: Vec<_> = (0..count).map(|i| (i + 1, i)).collect();
        assert_eq!(plan.host(), expected);
        assert_eq!(plan.rows(), 1);
        assert_eq!(plan.table[Word::Token as usize], count as i32);
        assert_eq!(plan.table[Word::Source as usize], count as i32 + 1);
        let mut words = vec![0; plan.words()];
        plan.write(&mut words);
        assert_eq!(words, plan.table);
    }

    #[test]
    fn what_is_too_much_for_a_step_is_the_hosts() {
        let mut random = Random(2);
        let params = SamplingParams {
            temperature: 1.0,
            ..SamplingParams::default()
        };
        let row = |draw: Draw| {
            let params = Arc::new(params.clone());
            Some(RowSampler {
                params,
                counts: None,
                mask: None,
                vocabulary: usize::MAX,
                draw,
                ..random.sampler(50)
            })
        };
        // 12 MiB a list, 8 MiB of pairs.
        let width = 1 << 20;
        let from = Arc::new(Distribution {
            ids: (0..1 << 20).collect(),
            probs: vec![0.0; width],
        });
        let draws = (0..30).map(|i| match i % 2 {
            0 => Draw::Draft,
            _ => Draw::Verify {
                draft: 3,
                from: from.clone(),
            },
        });
        let rows: Vec<_> = draws.map(row).collect();
        let plan = SamplePlan::new(&rows, width);
        let host: Vec<usize> = plan.host().iter().map(|&(row, _)| row).collect();
        assert_eq!(host, [20, 22, 24, 26, 28]);
        assert_eq!(plan.lists().len(), 10);
        assert_eq!(plan.pairs.len(), 15 * 2 * width);
    }
}
