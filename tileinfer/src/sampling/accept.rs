//! Speculative sampling: which drafts stay, and what comes after them (Leviathan et al. 2211.17192, Chen
//! et al. 2302.01318). It works on distributions that were filtered already and does not know where they
//! come from.
//!
//! The emitted tokens follow the target's distributions p whatever the drafter's q are, as long as each
//! draft was drawn from its q with [`Stream::Draft`] noise. A position's noise may be used again after a
//! rejection before it: what the first use decided was thrown away, and no emitted token depends on it.
//!
//! Drafts that are not drawn (n-gram, greedy) need none of this: [`sample`](super::sample) each row and
//! compare. The tokens are then those of plain decoding.

use super::rng::{Row, Stream};
use super::{Distribution, gumbel_max, math};
use crate::{Error, Result};

/// Whether a draft from `q` stays, with probability min(1, p / q); `u` is uniform in [0, 1).
pub fn accept_draft(p: &Distribution, q: &Distribution, draft: u32, u: f32) -> bool {
    u * q.prob(draft) < p.prob(draft)
}

/// What to draw from after a rejection: max(p − q, 0), divided by its [fixed-tree sum](math::sum_sparse)
/// by id; `p` itself if that leaves nothing. The tokens keep p's order.
pub fn residual(p: &Distribution, q: &Distribution) -> Distribution {
    let mut drafted: Vec<(u32, f32)> = q.ids.iter().copied().zip(q.probs.iter().copied()).collect();
    drafted.sort_unstable_by_key(|&(id, _)| id);
    let mut rest = Distribution::default();
    for (&id, &prob) in p.ids.iter().zip(&p.probs) {
        let found = drafted.binary_search_by_key(&id, |&(id, _)| id);
        let excess = prob - found.map_or(0.0, |index| drafted[index].1);
        if excess > 0.0 {
            rest.ids.push(id);
            rest.probs.push(excess);
        }
    }
    if rest.ids.is_empty() {
        return p.clone();
    }
    let mut terms: Vec<(u32, f32)> = rest
        .ids
        .iter()
        .copied()
        .zip(rest.probs.iter().copied())
        .collect();
    terms.sort_unstable_by_key(|&(id, _)| id);
    let total = math::sum_sparse(terms.into_iter());
    for prob in &mut rest.probs {
        *prob /= total;
    }
    rest
}

/// What became of a chain of drafts.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    /// How many drafts stay.
    pub accepted: usize,
    /// The distribution of the token after them.
    pub next: Distribution,
}

/// Accepts drafts from the left until one is rejected. `p` has one row per draft and one more.
///
/// # Errors
/// [`Error::Bug`] if the lengths do not fit together.
pub fn accept_chain(
    p: &[Distribution],
    q: &[Distribution],
    drafts: &[u32],
    uniforms: &[f32],
) -> Result<Verdict> {
    let k = drafts.len();
    fit(p, q, drafts)?;
    if uniforms.len() != k {
        return Err(Error::Bug(format!(
            "{k} drafts came with {} uniforms",
            uniforms.len()
        )));
    }
    let stays = |i: usize| accept_draft(&p[i], &q[i], drafts[i], uniforms[i]);
    let accepted = (0..k).take_while(|&i| stays(i)).count();
    let next = if accepted < k {
        residual(&p[accepted], &q[accepted])
    } else {
        p[k].clone()
    };
    Ok(Verdict { accepted, next })
}

/// The token at `position`, where `draft` stands that was drawn from `q`: the draft with probability
/// min(1, p / q), else one from the [`residual`].
///
/// # Errors
/// [`Error::Bug`] if `p` is empty.
pub fn accept_token(
    p: &Distribution,
    q: &Distribution,
    draft: u32,
    seed: u64,
    position: u64,
) -> Result<u32> {
    let u = Row::new(seed, position, Stream::Accept).uniform();
    if accept_draft(p, q, draft, u) {
        return Ok(draft);
    }
    draw(&residual(p, q), seed, position, Stream::Target)
}

/// How many of `drafts`, the first of which stands at `position`, stay, and the token after them. `p` has one
/// row per draft and one more.
///
/// # Errors
/// [`Error::Bug`] if the lengths do not fit together.
pub fn verify(
    p: &[Distribution],
    q: &[Distribution],
    drafts: &[u32],
    seed: u64,
    position: u64,
) -> Result<(usize, u32)> {
    fit(p, q, drafts)?;
    for (i, &draft) in drafts.iter().enumerate() {
        let token = accept_token(&p[i], &q[i], draft, seed, position + i as u64)?;
        if token != draft {
            return Ok((i, token));
        }
    }
    let k = drafts.len();
    let token = draw(&p[k], seed, position + k as u64, Stream::Target)?;
    Ok((k, token))
}

/// Whether there is a row of `q` per draft, and of `p` one more.
fn fit(p: &[Distribution], q: &[Distribution], drafts: &[u32]) -> Result<()> {
    let k = drafts.len();
    if p.len() != k + 1 || q.len() != k {
        return Err(Error::Bug(format!(
            "{k} drafts came with {} target rows and {} draft rows",
            p.len(),
            q.len()
        )));
    }
    Ok(())
}

/// Draws from a distribution: the largest ln(prob) + Gumbel noise, in the distribution's order among
/// equals. Probabilities below the smallest normal number count as 0.
///
/// # Errors
/// [`Error::Bug`] if the distribution is empty.
pub fn draw(from: &Distribution, seed: u64, position: u64, stream: Stream) -> Result<u32> {
    if from.ids.is_empty() {
        return Err(Error::Bug("a draw from an empty distribution".to_owned()));
    }
    let noise = Row::new(seed, position, stream);
    Ok(gumbel_max(&noise, &from.ids, |index| {
        match from.probs[index] {
            prob if prob < f32::MIN_POSITIVE => f32::NEG_INFINITY,
            prob => math::ln(prob),
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dist(probs: &[f32]) -> Distribution {
        let (ids, probs) = (0..).zip(probs).filter(|(_, p)| **p > 0.0).unzip();
        Distribution { ids, probs }
    }

    #[test]
    fn the_residual_of_equals_is_p() {
        let p = dist(&[0.5, 0.0, 0.5]);
        assert_eq!(residual(&p, &p), p);
        assert_eq!(
            residual(&p, &Distribution::one_hot(0)),
            Distribution::one_hot(2)
        );
        assert_eq!(residual(&p, &Distribution::one_hot(1)), p);
    }

    #[test]
    fn lengths_must_fit() {
        let p = dist(&[0.5, 0.5]);
        let rows = [p.clone(), p.clone()];
        assert!(accept_chain(&rows, &rows[1..], &[0], &[0.5]).is_ok());
        for (p, q, u) in [(1, 1, 1), (2, 0, 1), (2, 1, 0), (2, 2, 1)] {
            let uniforms = [0.5, 0.5];
            let error = accept_chain(&rows[..p], &rows[..q], &[0], &uniforms[..u]).unwrap_err();
            assert!(matches!(error, Error::Bug(_)));
        }
        assert!(draw(&Distribution::default(), 0, 0, Stream::Target).is_err());
    }

    #[test]
    fn subnormal_probabilities_are_never_drawn() {
        let from = Distribution {
            ids: vec![4, 9],
            probs: vec![1e-40, 1.0],
        };
        assert!((0..1000).all(|i| draw(&from, 1, i, Stream::Target).unwrap() == 9));
    }
}
