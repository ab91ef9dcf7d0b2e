//! From logits to the tokens that are left after temperature, top-k, top-p and min-p. It does not know
//! how a token is drawn from them.
//!
//! Every decision is defined without a walk over sorted tokens, so that a device can make the same one:
//! - With m the largest logit and t the temperature, a token's scaled logit is (z − m) · (1 / t), one
//!   subtraction and one product by a reciprocal made once; its weight is [`math::exp`] of that.
//! - top-k keeps z >= the k-th largest z.
//! - top-p: with A(x) the sum ([`math::sum`], by id) of the weights of those left with z > x, and S that
//!   of all left, a value x stays if A(x) < `top_p` · S. A never grows as x grows, so there is a smallest
//!   value that stays, and it can be found by bisection. Of the tokens that have this very value, the one
//!   with r lower ids among them stays if A + r · weight < `top_p` · S. The best value's first always stays.
//! - min-p keeps weight >= `min_p`, the largest weight being exp(0) = 1.

use super::math::{self, SUM_LANES};
use crate::Result;

/// Logits whose maximum is kept, so that most of them need not be looked at twice.
const CHUNK: usize = 64;
/// Sets of up to this many tokens are simply sorted to find where top-p cuts.
const SORTED_WHOLE: usize = 1024;
/// Bins of scaled logits that find the neighbourhood of top-p's cut in larger sets.
const BINS: usize = 1024;

/// The bin of a token whose scaled logit is `below` under the best one's: 1/64 wide down to 12, then 1/3.
fn bin(below: f32) -> usize {
    let place = if below < 12.0 {
        below * 64.0
    } else {
        below * 3.0 + 732.0
    };
    (place as usize).min(BINS - 1)
}

/// The largest logit of all, and of each chunk of 64.
#[derive(Debug, Default)]
pub(super) struct Maxima {
    chunks: Vec<f32>,
    all: f32,
}

impl Maxima {
    /// One pass over the logits.
    ///
    /// # Errors
    /// [`Error::BadModel`] naming the token if a logit is NaN or +∞, [`Error::Usage`] if all are −∞.
    pub(super) fn scan(&mut self, logits: &[f32]) -> Result<()> {
        const LANES: usize = 16;
        self.chunks.clear();
        self.all = f32::NEG_INFINITY;
        let mut nan = [false; LANES];
        for chunk in logits.chunks(CHUNK) {
            let mut max = [f32::NEG_INFINITY; LANES];
            let rows = chunk.chunks_exact(LANES);
            for (lane, &x) in rows.remainder().iter().enumerate() {
                nan[lane] |= x.is_nan();
                max[lane] = x;
            }
            for row in rows {
                for lane in 0..LANES {
                    nan[lane] |= row[lane].is_nan();
                    max[lane] = if row[lane] > max[lane] {
                        row[lane]
                    } else {
                        max[lane]
                    };
                }
            }
            let max = max.into_iter().fold(f32::NEG_INFINITY, f32::max);
            self.chunks.push(max);
            self.all = self.all.max(max);
        }
        if nan.contains(&true) || self.all == f32::INFINITY {
            let broken = logits
                .iter()
                .position(|x| x.is_nan() || *x == f32::INFINITY);
            let id = broken.expect("a pass has just seen one");
            return Err(super::broken_logit(id as u32, logits[id]));
        }
        if self.all == f32::NEG_INFINITY {
            return Err(super::no_token_allowed(logits.len()));
        }
        Ok(())
    }

    /// The largest logit.
    pub(super) fn all(&self) -> f32 {
        self.all
    }

    /// The lowest id among those with the largest logit.
    pub(super) fn argmax(&self, logits: &[f32]) -> u32 {
        let chunk = self.chunks.iter().position(|&max| max == self.all);
        let first = chunk.expect("the maximum is that of a chunk") * CHUNK;
        let within = logits[first..].iter().position(|&x| x == self.all);
        (first + within.expect("the chunk holds its maximum")) as u32
    }

    /// The k-th largest logit, −∞ if there are no k. `buffer` is overwritten.
    pub(super) fn kth_largest(&self, k: usize, logits: &[f32], buffer: &mut Vec<f32>) -> f32 {
        if k == 0 || k >= logits.len() {
            return f32::NEG_INFINITY;
        }
        buffer.clear();
        buffer.extend_from_slice(&self.chunks);
        // k chunks have a maximum of at least this, so k logits are at least this.
        let floor = if k <= buffer.len() {
            nth_largest(k, buffer)
        } else {
            f32::NEG_INFINITY
        };
        buffer.clear();
        for (chunk, max) in logits.chunks(CHUNK).zip(&self.chunks) {
            if *max >= floor {
                buffer.extend(chunk.iter().filter(|&&x| x >= floor));
            }
        }
        nth_largest(k, buffer)
    }
}

/// The k-th largest value, counted from 1.
fn nth_largest(k: usize, values: &mut [f32]) -> f32 {
    *values
        .select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a))
        .1
}

/// Unsigned numbers in the order of the logits, the same one for 0 and −0.
fn ascending(logit: f32) -> u32 {
    let bits = (logit + 0.0).to_bits();
    if bits >> 31 == 0 {
        bits | 1 << 31
    } else {
        !bits
    }
}

fn from_ascending(key: u32) -> f32 {
    f32::from_bits(if key >> 31 == 1 {
        key & !(1 << 31)
    } else {
        !key
    })
}

/// A key whose ascending order is: larger logits first, lower ids first among equals (0 and −0 are).
pub(super) fn rank(logit: f32, id: u32) -> u64 {
    u64::from(!ascending(logit)) << 32 | u64::from(id)
}

/// The tokens that are left, in ascending order of id. The buffers are reused from row to row.
#[derive(Debug, Default)]
pub(super) struct Survivors {
    pub(super) ids: Vec<u32>,
    logits: Vec<f32>,
    /// Unnormalised probabilities; empty until [`Survivors::weigh`].
    weights: Vec<f32>,
    max: f32,
    inverse_temperature: f32,
    order: Vec<u64>,
    values: Vec<f32>,
}

impl Survivors {
    /// All tokens whose logit is at least `kth` and whose scaled logit is at least `cutoff`.
    pub(super) fn gather(
        &mut self,
        logits: &[f32],
        maxima: &Maxima,
        temperature: f32,
        kth: f32,
        cutoff: f32,
    ) {
        self.max = maxima.all;
        self.inverse_temperature = 1.0 / temperature;
        self.weights.clear();
        self.ids.resize(logits.len(), 0);
        self.logits.resize(logits.len(), 0.0);
        let (max, inverse) = (self.max, self.inverse_temperature);
        let stays = |logit: f32| (logit >= kth) & ((logit - max) * inverse >= cutoff);
        let mut len = 0;
        for (i, (chunk, &max)) in logits.chunks(CHUNK).zip(&maxima.chunks).enumerate() {
            if !stays(max) {
                continue;
            }
            for (j, &logit) in chunk.iter().enumerate() {
                self.ids[len] = (i * CHUNK + j) as u32;
                self.logits[len] = logit;
                len += usize::from(stays(logit));
            }
        }
        self.ids.truncate(len);
        self.logits.truncate(len);
    }

    /// Leaves only one token, with all of the mass.
    pub(super) fn only(&mut self, id: u32) {
        self.ids.clear();
        self.ids.push(id);
        self.logits.clear();
        self.logits.push(0.0);
        self.weights.clear();
        self.weights.push(1.0);
        self.max = 0.0;
        self.inverse_temperature = 1.0;
    }

    #[inline(always)]
    pub(super) fn scaled(&self, index: usize) -> f32 {
        (self.logits[index] - self.max) * self.inverse_temperature
    }

    /// Computes the weights, if they are not there yet.
    pub(super) fn weigh(&mut self) {
        if self.weights.len() == self.ids.len() {
            return;
        }
        let (max, inverse) = (self.max, self.inverse_temperature);
        self.weights.clear();
        self.weights.extend(
            self.logits
                .iter()
                .map(|logit| math::exp((logit - max) * inverse)),
        );
    }

    fn is_dense(&self) -> bool {
        self.ids
            .last()
            .is_some_and(|&last| last as usize + 1 == self.ids.len())
    }

    /// The sum of the weights of all tokens with a logit above `value`.
    fn weight_above(&self, value: f32) -> f32 {
        let masked = |weight: f32, logit: f32| if logit > value { weight } else { 0.0 };
        if self.is_dense() {
            return math::sum_rows(self.ids.len(), |first, lanes| {
                let (weights, logits) = (&self.weights[first..], &self.logits[first..]);
                if let (Some(weights), Some(logits)) = (
                    weights.first_chunk::<SUM_LANES>(),
                    logits.first_chunk::<SUM_LANES>(),
                ) {
                    // Known lengths let the compiler use vectors.
                    for lane in 0..SUM_LANES {
                        lanes[lane] += masked(weights[lane], logits[lane]);
                    }
                } else {
                    for (lane, (weight, logit)) in lanes.iter_mut().zip(weights.iter().zip(logits))
                    {
                        *lane += masked(*weight, *logit);
                    }
                }
            });
        }
        let terms = self.ids.iter().zip(&self.weights).zip(&self.logits);
        math::sum_sparse(
            terms
                .filter(|(_, logit)| **logit > value)
                .map(|((&id, &weight), _)| (id, weight)),
        )
    }

    /// Keeps the tokens for which `keep(logit, weight)` holds; it is asked in ascending order of id.
    fn retain(&mut self, mut keep: impl FnMut(f32, f32) -> bool) {
        let mut len = 0;
        for i in 0..self.ids.len() {
            let stays = keep(self.logits[i], self.weights[i]);
            self.ids[len] = self.ids[i];
            self.logits[len] = self.logits[i];
            self.weights[len] = self.weights[i];
            len += usize::from(stays);
        }
        self.ids.truncate(len);
        self.logits.truncate(len);
        self.weights.truncate(len);
    }

    /// Keeps the best tokens up to a probability of `top_p`. Needs the weights.
    pub(super) fn top_p(&mut self, top_p: f32) {
        if top_p >= 1.0 || self.ids.len() < 2 {
            return;
        }
        let budget = top_p * self.weight_above(f32::NEG_INFINITY);
        let cut = self.smallest_value_within(budget);
        let above = self.weight_above(cut);
        let mut earlier = 0;
        self.retain(|logit, weight| {
            if logit != cut {
                return logit > cut;
            }
            let stays = earlier == 0 || above + earlier as f32 * weight < budget;
            earlier += 1;
            stays
        });
    }

    /// The smallest logit x with `weight_above(x) < budget`, or the largest logit if there is none.
    ///
    /// The candidates come from an estimate in f64, which decides nothing but how many sums are needed:
    /// usually two.
    fn smallest_value_within(&mut self, budget: f32) -> f32 {
        let (mut values, guess) = self.values_near(f64::from(budget));
        let fits = |index: usize| self.weight_above(values[index]) < budget;
        // The last index that fits: gallop from the guess until it is enclosed, then bisect.
        let (mut low, mut high) = (None, values.len());
        let mut step = 1;
        if fits(guess) {
            low = Some(guess);
            while low.is_some_and(|low| low + step < high) {
                let next = low.unwrap_or(0) + step;
                if !fits(next) {
                    high = next;
                    break;
                }
                low = Some(next);
                step *= 2;
            }
        } else {
            high = guess;
            while high > 0 && low.is_none() {
                let next = high.saturating_sub(step);
                if fits(next) {
                    low = Some(next);
                } else {
                    high = next;
                    step *= 2;
                }
            }
        }
        while let Some(inside) = low.filter(|inside| inside + 1 < high) {
            let middle = inside + (high - inside) / 2;
            if fits(middle) {
                low = Some(middle);
            } else {
                high = middle;
            }
        }
        // The cut may lie outside of the values that the estimate found, most often not at all.
        let cut = match low {
            Some(low) if low + 1 < values.len() => values[low],
            Some(low) => match self.neighbour_below(values[low]) {
                Some(next) if self.weight_above(next) < budget => {
                    let least = self.logits.iter().copied().fold(next, f32::min);
                    self.bisect(least, next, budget)
                }
                _ => values[low],
            },
            None => self.bisect(values[0], self.max, budget),
        };
        values.clear();
        self.values = values;
        cut
    }

    /// Distinct logits around the place where the weights of the larger ones reach `budget`, in
    /// descending order, and the index of the last one before that by this estimate.
    fn values_near(&mut self, budget: f64) -> (Vec<f32>, usize) {
        let mut order = std::mem::take(&mut self.order);
        let mut values = std::mem::take(&mut self.values);
        order.clear();
        values.clear();
        let mut before = 0.0;
        let indices = 0..self.ids.len();
        let key = |i: usize| rank(self.logits[i], i as u32);
        if self.ids.len() <= SORTED_WHOLE {
            order.extend(indices.map(key));
        } else {
            let bin = |i: usize| bin(-self.scaled(i));
            let mut bins = [0.0_f64; BINS];
            let mut used = [false; BINS];
            for i in indices.clone() {
                bins[bin(i)] += f64::from(self.weights[i]);
                used[bin(i)] = true;
            }
            let mut cut = 0;
            let mut sum = 0.0;
            for (i, weight) in bins.into_iter().enumerate().filter(|&(i, _)| used[i]) {
                if sum >= budget {
                    break;
                }
                (cut, before) = (i, sum);
                sum += weight;
            }
            order.extend(indices.filter(|&i| bin(i) == cut).map(key));
        }
        order.sort_unstable();
        let mut guess = 0;
        for index in order.iter().map(|&key| key as u32 as usize) {
            if values.last() != Some(&self.logits[index]) {
                if before < budget {
                    guess = values.len();
                }
                values.push(self.logits[index]);
            }
            before += f64::from(self.weights[index]);
        }
        self.order = order;
        (values, guess)
    }

    fn neighbour_below(&self, value: f32) -> Option<f32> {
        self.logits
            .iter()
            .copied()
            .filter(|&x| x < value)
            .reduce(f32::max)
    }

    /// The smallest x in `low..=high` with `weight_above(x) < budget`, given that it holds for `high` or
    /// for nothing. That is a logit, or `low`: the weight above x changes at logits only.
    fn bisect(&self, low: f32, high: f32, budget: f32) -> f32 {
        let (mut low, mut high) = (ascending(low), ascending(high));
        while low < high {
            let middle = low + (high - low) / 2;
            if self.weight_above(from_ascending(middle)) < budget {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        from_ascending(high)
    }

    /// Keeps tokens with at least `min_p` times the largest probability. Needs the weights.
    pub(super) fn min_p(&mut self, min_p: f32) {
        if min_p > 0.0 {
            self.retain(|_, weight| weight >= min_p);
        }
    }

    /// Ids and probabilities, best first. Needs the weights.
    pub(super) fn probabilities(&mut self) -> (Vec<u32>, Vec<f32>) {
        let total = self.weight_above(f32::NEG_INFINITY);
        let mut order = std::mem::take(&mut self.order);
        order.clear();
        order.extend((0..self.ids.len()).map(|i| rank(self.logits[i], i as u32)));
        order.sort_unstable();
        let indices = order.iter().map(|&key| key as u32 as usize);
        let ids = indices.clone().map(|i| self.ids[i]).collect();
        let probs = indices.map(|i| self.weights[i] / total).collect();
        self.order = order;
        (ids, probs)
    }
}

#[cfg(test)]
mod tests {
    use super::math::EXP_CUTOFF;
    use super::*;
    use crate::Error;

    /// Logits with many ties, far apart values and a few −∞, from a small generator.
    fn logits(n: usize, seed: u32, steps: u32) -> Vec<f32> {
        let mut state = seed;
        (0..n)
            .map(|_| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                match state >> 28 {
                    0 => f32::NEG_INFINITY,
                    _ => ((state >> 8) % steps) as f32 * (20.0 / steps as f32) - 10.0,
                }
            })
            .collect()
    }

    #[test]
    fn kth_largest_is_that_of_a_sort() {
        let mut maxima = Maxima::default();
        let mut buffer = Vec::new();
        for (n, steps) in [
            (1, 5),
            (15, 3),
            (64, 9),
            (65, 1000),
            (1000, 7),
            (5000, 100_000),
        ] {
            let logits = logits(n, 3 + n as u32, steps);
            maxima.scan(&logits).unwrap();
            let mut sorted = logits.clone();
            sorted.sort_by(|a, b| b.total_cmp(a));
            for k in [1, 2, 3, 14, 15, 63, 64, 65, 77, 78, 79, 500, 999, 4999] {
                let got = maxima.kth_largest(k, &logits, &mut buffer);
                let expected = if k < n {
                    sorted[k - 1]
                } else {
                    f32::NEG_INFINITY
                };
                assert_eq!(got, expected, "{k} of {n}");
            }
            assert_eq!(
                maxima.kth_largest(0, &logits, &mut buffer),
                f32::NEG_INFINITY
            );
            let best = logits.iter().position(|&x| x == sorted[0]).unwrap();
            assert_eq!(maxima.argmax(&logits), best as u32);
        }
    }

    #[test]
    fn broken_logits_are_named() {
        let mut maxima = Maxima::default();
        for n in [1, 16, 63, 64, 65, 200] {
            for id in [0, n / 2, n - 1] {
                for broken in [f32::NAN, -f32::NAN, f32::INFINITY] {
                    let mut logits = logits(n, 8, 100);
                    logits[id] = broken;
                    let error = maxima.scan(&logits).unwrap_err();
                    assert!(
                        matches!(&error, Error::BadModel { reason, .. }
                            if reason.contains(&format!("token {id} "))),
                        "{error}"
                    );
                }
            }
            let error = maxima.scan(&vec![f32::NEG_INFINITY; n]).unwrap_err();
            assert!(matches!(error, Error::Usage(_)), "{error}");
        }
    }

    #[test]
    fn rank_orders_logits_down_and_ids_up() {
        let mut keys: Vec<(u64, usize)> = [
            (f32::NEG_INFINITY, 0),
            (-0.0, 4),
            (0.0, 3),
            (7.5, 9),
            (-2.0, 1),
            (7.5, 2),
            (0.0, 5),
            (1e-40, 6),
        ]
        .into_iter()
        .enumerate()
        .map(|(i, (logit, id))| (rank(logit, id), i))
        .collect();
        keys.sort_unstable();
        let order: Vec<usize> = keys.into_iter().map(|(_, i)| i).collect();
        assert_eq!(order, [5, 3, 7, 2, 1, 6, 4, 0]);
    }

    /// The definition of top-p by trying every value; ids that stay.
    fn plain_top_p(survivors: &Survivors, top_p: f32) -> Vec<u32> {
        let s = survivors;
        let budget = top_p * s.weight_above(f32::NEG_INFINITY);
        let fits = |&x: &f32| x == s.max || s.weight_above(x) < budget;
        let cut = s
            .logits
            .iter()
            .copied()
            .filter(fits)
            .reduce(f32::min)
            .unwrap();
        let equals: Vec<u32> = (0..s.ids.len())
            .filter(|&i| s.logits[i] == cut)
            .map(|i| s.ids[i])
            .collect();
        let weight = s.weights[s.logits.iter().position(|&x| x == cut).unwrap()];
        let above = s.weight_above(cut);
        (0..s.ids.len())
            .filter(|&i| {
                let r = equals.iter().position(|&id| id == s.ids[i]);
                s.logits[i] > cut || r.is_some_and(|r| r == 0 || above + r as f32 * weight < budget)
            })
            .map(|i| s.ids[i])
            .collect()
    }

    #[test]
    fn top_p_follows_its_definition() {
        let mut maxima = Maxima::default();
        let mut survivors = Survivors::default();
        for (n, steps) in [(2, 2), (40, 6), (300, 100_000), (1500, 50), (3000, 100_000)] {
            let logits = logits(n, 77 + n as u32, steps);
            maxima.scan(&logits).unwrap();
            for temperature in [0.3, 1.0, 8.0] {
                for top_p in [1e-9, 0.1, 0.5, 0.9, 0.99, 0.999_99, 0.999_999_94] {
                    survivors.gather(&logits, &maxima, temperature, f32::NEG_INFINITY, EXP_CUTOFF);
                    survivors.weigh();
                    let expected = plain_top_p(&survivors, top_p);
                    survivors.top_p(top_p);
                    assert_eq!(
                        survivors.ids, expected,
                        "{n} tokens, t {temperature}, p {top_p}"
                    );
                    assert!(survivors.ids.contains(&maxima.argmax(&logits)));
                }
            }
        }
    }

    /// A token that the sum leaves out anyway is taken away: the dense sum becomes a sparse one.
    #[test]
    fn dense_and_sparse_weights_above_agree() {
        let mut maxima = Maxima::default();
        let mut survivors = Survivors::default();
        let mut logits: Vec<f32> = logits(9000, 5, 1000)
            .into_iter()
            .map(|x| x.max(-10.0))
            .collect();
        let mut weigh_without = |logit: f32| {
            logits[4500] = logit;
            maxima.scan(&logits).unwrap();
            survivors.gather(&logits, &maxima, 1.0, f32::NEG_INFINITY, EXP_CUTOFF);
            survivors.weigh();
            (survivors.is_dense(), survivors.weight_above(-9.0).to_bits())
        };
        let (dense, sparse) = (weigh_without(-10.0), weigh_without(f32::NEG_INFINITY));
        assert!(dense.0 && !sparse.0);
        assert_eq!(dense.1, sparse.1);
    }
}
