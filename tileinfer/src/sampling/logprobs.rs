//! Log probabilities of the model itself: the softmax of the logits as they are, before bias, penalties,
//! temperature and filters.

use serde::Serialize;

use super::filters::{Maxima, rank};
use super::math;
use crate::Result;

/// A token with its logit and the natural logarithm of its probability.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct TokenLogprob {
    /// The token.
    pub id: u32,
    /// Its logit.
    pub logit: f32,
    /// The logarithm of its probability; −∞ for a logit of −∞.
    pub logprob: f32,
}

/// The log probabilities of one row of logits, computed when asked for.
///
/// A logit z has (z − m) − ln(S), with m the largest and S the fixed-tree sum of exp(z − m).
#[derive(Debug)]
pub struct Logprobs<'a> {
    logits: &'a [f32],
    maxima: Maxima,
    log_sum: f32,
}

impl<'a> Logprobs<'a> {
    /// Takes the logits of the ids below `vocab_limit`; rows of the head beyond it are left out.
    ///
    /// # Errors
    /// As [`sample`](super::sample): a logit that is NaN or +∞, or none above −∞.
    pub fn new(logits: &'a [f32], vocab_limit: usize) -> Result<Self> {
        let logits = &logits[..logits.len().min(vocab_limit)];
        let mut maxima = Maxima::default();
        maxima.scan(logits)?;
        let max = maxima.all();
        let sum = math::sum_rows(logits.len(), |first, lanes| {
            for (lane, logit) in lanes.iter_mut().zip(&logits[first..]) {
                *lane += math::exp(logit - max);
            }
        });
        Ok(Logprobs {
            logits,
            maxima,
            log_sum: math::ln(sum),
        })
    }

    /// One token's, `None` for an id that the row does not have.
    pub fn get(&self, id: u32) -> Option<TokenLogprob> {
        let logit = *self.logits.get(id as usize)?;
        let logprob = (logit - self.maxima.all()) - self.log_sum;
        Some(TokenLogprob { id, logit, logprob })
    }

    /// The `n` best tokens (all, if there are fewer), best first, lower ids first among equals.
    pub fn top(&self, n: usize) -> Vec<TokenLogprob> {
        if n == 0 {
            return Vec::new();
        }
        let least = self.maxima.kth_largest(n, self.logits, &mut Vec::new());
        let mut best: Vec<u64> = (0_u32..)
            .zip(self.logits)
            .filter(|&(_, &logit)| logit >= least)
            .map(|(id, &logit)| rank(logit, id))
            .collect();
        best.sort_unstable();
        best.truncate(n);
        best.iter()
            .filter_map(|&key| self.get(key as u32))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn follows_f64() {
        let logits: Vec<f32> = (0..5000)
            .map(|i| ((i * 7919) % 4001) as f32 / 150.0 - 9.0)
            .collect();
        let sum: f64 = logits[..4990].iter().map(|&x| f64::from(x).exp()).sum();
        let rows = Logprobs::new(&logits, 4990).unwrap();
        for id in [0, 1, 17, 4989] {
            let got = rows.get(id).unwrap();
            let exact = f64::from(logits[id as usize]) - sum.ln();
            assert_eq!(got.logit, logits[id as usize]);
            assert!(
                (f64::from(got.logprob) - exact).abs() < 4e-6,
                "{got:?} {exact}"
            );
        }
        assert_eq!(rows.get(4990), None);
    }

    #[test]
    fn top_is_a_total_order() {
        let logits = [1.0, 3.0, f32::NEG_INFINITY, 3.0, 0.0, -0.0, 2.0];
        let rows = Logprobs::new(&logits, usize::MAX).unwrap();
        let top = |n| rows.top(n).iter().map(|t| t.id).collect::<Vec<_>>();
        assert_eq!(top(0), [0; 0]);
        assert_eq!(top(1), [1]);
        assert_eq!(top(5), [1, 3, 6, 0, 4]);
        assert_eq!(top(7), [1, 3, 6, 0, 4, 5, 2]);
        assert_eq!(top(100), top(7));
        assert_eq!(rows.get(2).unwrap().logprob, f32::NEG_INFINITY);
        let total: f32 = rows.top(7).iter().map(|t| t.logprob.exp()).sum();
        assert!((total - 1.0).abs() < 1e-6);
    }

    #[test]
    fn a_broken_row_is_an_error() {
        assert!(Logprobs::new(&[0.0, f32::NAN], 2).is_err());
        assert!(Logprobs::new(&[0.0, f32::NAN], 1).is_ok());
        assert!(Logprobs::new(&[], 5).is_err());
    }
}
