//! How many drafts pay: what steps and drafting take ([`Costs`], measured over all requests), and what drafts
//! bring one request ([`Pace`]). It knows counts and seconds, no tokens and no devices.
//!
//! With c(r) the time of a step of r rows, d(k) that of drafting k tokens, n the texts that the step advances
//! and E(k) the tokens that a text with k drafts is expected to get from it, k drafts are worth having where
//! (n − 1 + E(k)) / (c(r + k) + d(k)) > n / c(r). E(k) = 1 + a + … + a^k, with a the share of drafts accepted
//! lately among those whose predecessors were (Leviathan et al. 2211.17192, with a measured as it goes).
//!
//! What was lost is kept in a ledger, in plain tokens' time. It may run a token into debt, and one more for
//! each hundred generated: no text costs more than that, and enough is tried to notice when a text changes.

use super::SpecStats;

/// Weight of a new measurement against what was known.
const NEW: f64 = 0.15;
/// A measurement counts as this many times what was known at most: a machine has other things to do at times.
const OUTLIER: f64 = 1.5;
/// Times that a step of some rows must have been seen before anything is concluded from it.
const SEEN: u32 = 3;
/// How much longer than a plain one a step takes for each row more than were ever seen, at best. At worst it is
/// as long as a plain step.
const HOPED_ROW: f64 = 0.15;
/// Debt that is allowed before any token.
const DEBT: f64 = 1.0;
/// Debt that is allowed for each token generated.
const DEBT_PER_TOKEN: f64 = 0.01;
/// Tokens after which drafts are tried again, whatever they cost.
const LONGEST_REST: f64 = 256.0;
/// What a text has gained is remembered up to so many tokens.
const CREDIT: f64 = 8.0;
/// What is remembered of earlier rounds' acceptance when a new one comes.
const MEMORY: f64 = 0.85;

/// An average of some seconds.
#[derive(Debug, Clone, Copy, Default)]
struct Mean {
    seconds: f64,
    count: u32,
}

impl Mean {
    fn observe(&mut self, seconds: f64) {
        self.count = self.count.saturating_add(1);
        if self.count <= SEEN {
            // The least of the first few: the very first time of anything is slow.
            let first = self.count == 1;
            self.seconds = if first {
                seconds
            } else {
                self.seconds.min(seconds)
            };
            return;
        }
        let seconds = seconds.min(OUTLIER * self.seconds);
        self.seconds += NEW * (seconds - self.seconds);
    }
}

/// What steps take by their rows, and drafting by the number of drafts.
#[derive(Debug, Default)]
pub(crate) struct Costs {
    steps: Vec<Mean>,
    drafting: Vec<Mean>,
}

impl Costs {
    /// A step of `rows` rows, all of them decode rows and drafts, took so long.
    pub(crate) fn step_took(&mut self, rows: usize, seconds: f64) {
        observe(&mut self.steps, rows, seconds);
    }

    /// To draft up to `drafts` tokens for each of some texts took so long a text.
    pub(crate) fn drafting_took(&mut self, drafts: usize, seconds: f64) {
        observe(&mut self.drafting, drafts, seconds);
    }

    /// Whether a step of so many rows was seen often enough.
    fn knows(&self, rows: usize) -> bool {
        self.steps.get(rows).is_some_and(|mean| mean.count >= SEEN)
    }

    /// The time of a step of `rows` rows: measured, or on the line between its neighbours. Beyond all that was
    /// measured, what may be hoped for, or what is to be feared.
    fn step(&self, rows: usize, hope: bool) -> f64 {
        estimate(&self.steps, rows).unwrap_or_else(|[before, last]| {
            let (known, seconds) = last;
            let row = seconds / known.max(1) as f64;
            let slope = match before {
                (0, _) => row,
                (fewer, less) => (seconds - less).max(0.0) / (known - fewer) as f64,
            };
            let slope = if hope {
                slope.min(HOPED_ROW * row)
            } else {
                slope
            };
            seconds + slope * (rows - known) as f64
        })
    }

    /// The time of drafting: measured, or that of fewer drafts. More may take no longer, as where a block is filled
    /// in at once, or each as long as those before.
    fn draft(&self, drafts: usize, hope: bool) -> f64 {
        estimate(&self.drafting, drafts).unwrap_or_else(|[_, (known, seconds)]| match hope {
            true => seconds,
            false => seconds * drafts as f64 / known.max(1) as f64,
        })
    }

    /// What it takes to draft and to verify `drafts` tokens of one text in a step that advances `texts`.
    fn price(&self, texts: usize, drafts: usize, hope: bool) -> f64 {
        self.step(texts + drafts, hope) - self.step(texts, hope) + self.draft(drafts, hope)
    }

    /// The time of one token of a plain step of `texts` rows, if that has been seen.
    pub(crate) fn plain_token(&self, texts: usize) -> Option<f64> {
        self.knows(texts)
            .then(|| self.step(texts, true) / texts.max(1) as f64)
    }
}

fn observe(means: &mut Vec<Mean>, index: usize, seconds: f64) {
    if index >= means.len() {
        means.resize(index + 1, Mean::default());
    }
    means[index].observe(seconds);
}

/// The value at `index`: measured, or on the line between its neighbours. Else the last two points before it,
/// zeros where there are none.
fn estimate(means: &[Mean], index: usize) -> Result<f64, [(usize, f64); 2]> {
    let known = |i: usize| Some((i, means.get(i).filter(|mean| mean.count > 0)?.seconds));
    let mut below = (0..=index).rev().filter_map(known);
    let last = below.next().unwrap_or_default();
    match (index..means.len()).find_map(known) {
        Some((high, to)) if high > last.0 => {
            let (low, from) = last;
            Ok(from + (to - from) * (index - low) as f64 / (high - low) as f64)
        }
        Some((_, exact)) => Ok(exact),
        None => Err([below.next().unwrap_or_default(), last]),
    }
}

/// A step that a request may have drafts in.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Moment {
    /// Texts that it advances, one row each without drafts.
    pub(crate) texts: usize,
    /// Drafts at most.
    pub(crate) most: usize,
    /// Tokens generated so far.
    pub(crate) generated: usize,
}

/// What drafts bring one request.
#[derive(Debug, Clone)]
pub(crate) struct Pace {
    pub(crate) stats: SpecStats,
    /// Drafts that were accepted lately, and those whose predecessors were.
    accepted: f64,
    tried: f64,
    /// Tokens' worth of time gained, or lost if negative.
    ledger: f64,
    /// Nothing is drafted before so many tokens are generated.
    rests_until: usize,
}

impl Pace {
    pub(crate) fn new() -> Self {
        // As if drafts had been accepted rather than not, so that they are tried.
        Pace {
            stats: SpecStats::default(),
            accepted: 0.7,
            tried: 1.0,
            ledger: 0.0,
            rests_until: 0,
        }
    }

    /// Whether the next token is waited for, to draft behind it, when so many are generated.
    pub(crate) fn waits(&self, generated: usize) -> bool {
        generated >= self.rests_until
    }

    /// How many drafts to ask for.
    pub(crate) fn choose(&mut self, moment: Moment, costs: &Costs) -> usize {
        let Moment {
            texts,
            most,
            generated,
        } = moment;
        if !self.waits(generated) || most == 0 {
            return 0;
        }
        let Some(token) = costs.plain_token(texts) else {
            // A plain step, to know what it takes.
            return 0;
        };
        let plain = token * texts as f64;
        let worst = |k: usize| costs.price(texts, k, false);
        let (mut best, mut best_rate) = (0, texts as f64 / plain);
        for k in 1..=most {
            let price = costs.price(texts, k, true);
            let rate = ((texts - 1) as f64 + self.expected(k)) / (plain + price);
            if rate > best_rate {
                (best, best_rate) = (k, rate);
            }
        }
        // What does not pay is tried with one draft, now and then.
        let pays = best > 0;
        let allowed = DEBT + DEBT_PER_TOKEN * generated as f64 + self.ledger;
        let affordable = |k: &usize| worst(*k) / token <= allowed;
        let chosen = (1..=best.max(1)).rev().find(affordable);
        if pays && chosen.is_some() {
            return chosen.unwrap_or(0);
        }
        // Until what this costs, or what is missing for it, may be owed again.
        let owed = match chosen {
            Some(k) => worst(k) / token,
            None => worst(1) / token - allowed,
        };
        let pause = (owed / DEBT_PER_TOKEN).ceil().clamp(1.0, LONGEST_REST);
        self.rests_until = generated + pause as usize;
        chosen.unwrap_or(0)
    }

    /// Tokens that a step with `k` drafts is expected to bring.
    fn expected(&self, k: usize) -> f64 {
        let a = self.accepted / self.tried;
        (0..=k).map(|i| a.powi(i as i32)).sum()
    }

    /// A step of the request brought tokens.
    pub(crate) fn observe(&mut self, round: Round, costs: &Costs) {
        let Round {
            drafted,
            accepted,
            tokens,
            generated,
            texts,
            seconds,
        } = round;
        if drafted > 0 {
            self.stats.steps += 1;
            self.stats.drafted += drafted;
            self.stats.accepted += accepted;
            let rejected = usize::from(accepted < drafted);
            self.accepted = self.accepted * MEMORY + accepted as f64;
            self.tried = self.tried * MEMORY + (accepted + rejected) as f64;
        }
        if drafted == 0 && !self.waits(generated) {
            self.stats.held_back += 1;
        }
        let Some((token, seconds)) = costs.plain_token(texts).zip(seconds) else {
            return;
        };
        self.stats.seconds += seconds;
        self.stats.plain_seconds += tokens as f64 * token;
        if drafted > 0 {
            let gained = accepted as f64 - costs.price(texts, drafted, true) / token;
            self.ledger = (self.ledger + gained).min(CREDIT);
        }
    }
}

/// What a step was for one request.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Round {
    /// Drafts verified.
    pub(crate) drafted: usize,
    /// Of these, those that became part of the text.
    pub(crate) accepted: usize,
    /// Tokens that it brought.
    pub(crate) tokens: usize,
    /// Tokens generated before it.
    pub(crate) generated: usize,
    /// Texts that it advanced.
    pub(crate) texts: usize,
    /// The request's share of the time it took, drafting included; none where other work was in it.
    pub(crate) seconds: Option<f64>,
}
