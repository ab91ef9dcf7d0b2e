//! Which rows of a step are sampled on the device, and the numbers that the kernels of `kernels/draw.rs` need
//! for them. What it decides with is the row's sampler alone, so a step is planned without waiting for the
//! one before it. Log probabilities and draws that bring or need a whole distribution stay on the host.

use std::collections::HashSet;

use tileinfer::sampling::rng::Row;
use tileinfer::sampling::{Draw, RowSampler, Stream, broken_logit, no_token_allowed};
use tileinfer::{Error, Result};

use crate::driver::Address;
use crate::kernels::{self, Variant};
use crate::ops::Ops;

/// Logits a part, the block of the sums.
pub const PART: usize = 4096;

/// Words of a row of the table.
pub const WORDS: usize = 16;

/// Words of a row of the state.
pub const STATE: usize = 8;

/// Most rows that the kernels take at once: each has a ticket.
pub const MOST_ROWS: usize = 128;

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
            if is_for_device(sampler, width) {
                plan.push(sampler, [row, place], width);
            } else {
                plan.host.push((row, place));
            }
        }
        plan
    }

    /// Rows for the device.
    pub fn rows(&self) -> usize {
        self.table.len() / WORDS
    }

    /// Rows for the host: row of the logits, place of the token.
    pub fn host(&self) -> &[(usize, usize)] {
        &self.host
    }

    /// Whether logits change before a token is drawn from them.
    fn adjusts(&self) -> bool {
        !(self.biases.is_empty() && self.penalties.is_empty() && self.masks.is_empty())
    }

    fn asks(&self, word: Word) -> bool {
        self.table
            .chunks(WORDS)
            .any(|row| row[word as usize] != 0)
    }

    fn push(&mut self, sampler: &RowSampler, [source, place]: [usize; 2], width: usize) {
        let params = &sampler.params;
        let row = self.rows() as i32;
        let limit = sampler.vocabulary.min(width);
        let key = Row::new(sampler.seed, sampler.position, Stream::Target).key();
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

    /// All that goes to the device: table, entries, masks.
    fn arrays(&self) -> [&[i32]; 4] {
        [&self.table, &self.biases, &self.penalties, &self.masks]
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
        let all = self.arrays().concat();
        to[..all.len()].copy_from_slice(&all);
    }
}

/// Whether the kernels do what a row asks for. A row that cannot be sampled at all is the host's as well, which
/// says why.
fn is_for_device(sampler: &RowSampler, width: usize) -> bool {
    let params = &sampler.params;
    let limit = sampler.vocabulary.min(width);
    let mut biased = HashSet::new();
    sampler.draw == Draw::Token
        && sampler.top_logprobs.is_none()
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

fn choose_variant(vocab: usize) -> Variant {
    Variant::new(&kernels::CHOOSE, &[], &[parts(vocab).1])
}

impl Ops {
    /// Draws the tokens of a plan's rows from `rows` rows of `vocab` logits, which are not changed; `words` is
    /// where [`SamplePlan::write`]'s words are. A token goes to the place that its row names, see [`token`].
    pub fn sample(
        &self,
        tokens: Address,
        logits: Address,
        [rows, vocab]: [usize; 2],
        plan: &SamplePlan,
        words: Address,
    ) -> Result<()> {
        let (parts, _) = parts(vocab);
        let bytes = |words: usize| (words * 4).next_multiple_of(256);
        let copied = if plan.adjusts() { rows * vocab } else { 0 };
        let (some, all) = (plan.rows().min(MOST_ROWS), plan.rows());
        let sizes = [
            copied,
            some * parts,
            some * parts,
            some * parts,
            some * parts,
            some * parts,
            some * parts * 16,
            some * STATE,
        ];
        let mut at = self.scratch(sizes.iter().map(|&size| bytes(size)).sum())?;
        let [copy, maxima, broken, best, place, counts, partials, state] = sizes.map(|size| {
            let begin = at;
            at += bytes(size) as Address;
            begin
        });
        let [table, biases, penalties, _] = plan.arrays().map(<[i32]>::len);
        let after = |count: usize| words + (count * 4) as Address;
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
        for first in (0..all).step_by(MOST_ROWS) {
            let grid = [parts, (all - first).min(MOST_ROWS), 1];
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
            let arguments = [best, place, state, counts, source, maxima, table].map(Into::into);
            let arguments = [&arguments[..], &shape].concat();
            self.launch(&score_variant(vocab), grid, &arguments)?;
            let arguments = [tokens, best, place, maxima, broken, table].map(Into::into);
            let arguments = [&arguments[..], &[parts.into()]].concat();
            self.launch(&choose_variant(vocab), [grid[1], 1, 1], &arguments)?;
        }
        Ok(())
    }
}
