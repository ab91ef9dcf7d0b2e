//! Teacher forcing: a model's logits along given tokens, and what follows from them.

use crate::engine::StepLoop;
use crate::runner::{Batch, Input, Rows, Span, Want};
use crate::sampling::broken_logits;
use crate::{Error, Result};

/// Rows whose logits are held at once.
const CHUNK: usize = 64;

/// Runs `ids` from an empty cache and hands the logits at every position, f32 `[head rows]`, to `visit`.
pub fn teacher_force(
    steps: &mut StepLoop,
    ids: &[u32],
    visit: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
) -> Result<()> {
    if ids.is_empty() {
        return Err(Error::usage("there are no tokens to score"));
    }
    let limit = steps.limits().max_length;
    if ids.len() > limit {
        return Err(Error::ContextFull {
            needed: ids.len(),
            limit,
        });
    }
    let mut sequence = steps.new_sequence();
    let width = steps.limits().head_rows;
    let chunk = CHUNK.min(steps.limits().max_rows);
    for part in ids.chunks(chunk) {
        let start = sequence.len();
        sequence.reserve(start, start + part.len())?;
        let want = Want {
            rows: Rows::All,
            logits: true,
            ..Want::default()
        };
        let span = Span {
            input: Input::Ids(part.to_vec()),
            start,
            table: sequence.table(),
            want,
        };
        let output = steps.runner()?.step(&Batch {
            spans: vec![span],
            copies: Vec::new(),
        })?;
        sequence.append(part)?;
        for (i, logits) in output.spans[0].logits.chunks_exact(width).enumerate() {
            visit(start + i, logits)?;
        }
    }
    Ok(())
}

/// The log of the sum of exponentials, in f64. NaN logits are an error.
pub fn log_sum_exp(logits: &[f32]) -> Result<f64> {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits
        .iter()
        .map(|&logit| f64::from(logit - max).exp())
        .sum();
    if sum.is_nan() || max == f32::INFINITY {
        let broken = logits
            .iter()
            .copied()
            .find(|logit| !logit.is_finite())
            .unwrap_or(f32::NAN);
        return Err(broken_logits(&format!("a logit is {broken}")));
    }
    Ok(f64::from(max) + sum.ln())
}

/// Natural log probability of each of `ids` but the first, given those before it.
pub fn log_probs(steps: &mut StepLoop, ids: &[u32]) -> Result<Vec<f64>> {
    let mut result = Vec::with_capacity(ids.len().saturating_sub(1));
    teacher_force(steps, ids, &mut |position, logits| {
        if let Some(&next) = ids.get(position + 1) {
            result.push(log_prob(logits, next)?);
        }
        Ok(())
    })?;
    Ok(result)
}

/// Natural log probability of `id` under `logits`; an id that the head has no row for has none.
pub fn log_prob(logits: &[f32], id: u32) -> Result<f64> {
    let norm = log_sum_exp(logits)?;
    Ok(logits
        .get(id as usize)
        .map_or(f64::NEG_INFINITY, |&logit| f64::from(logit) - norm))
}

/// The Kullback-Leibler divergence `Σ p (ln p - ln q)` in nats of the distribution of `model` logits from that
/// of `baseline` logits.
pub fn divergence(baseline: &[f32], model: &[f32]) -> Result<f64> {
    let norms = (log_sum_exp(baseline)?, log_sum_exp(model)?);
    Ok(divergence_of(baseline, model, norms))
}

/// [`divergence`] where both [`log_sum_exp`] are known.
fn divergence_of(baseline: &[f32], model: &[f32], (p_norm, q_norm): (f64, f64)) -> f64 {
    let terms = baseline.iter().zip(model).map(|(&p, &q)| {
        let (p, q) = (f64::from(p) - p_norm, f64::from(q) - q_norm);
        if p == f64::NEG_INFINITY {
            0.0
        } else {
            p.exp() * (p - q)
        }
    });
    terms.sum()
}

/// The index of the largest logit, the lowest among equals.
pub fn argmax(logits: &[f32]) -> usize {
    (1..logits.len()).fold(0, |best, i| if logits[i] > logits[best] { i } else { best })
}

/// How one text is predicted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Score {
    /// Tokens that were predicted.
    pub tokens: usize,
    /// Mean negative log probability.
    pub nats_per_token: f64,
}

impl Score {
    /// `exp(nats per token)`.
    pub fn perplexity(&self) -> f64 {
        self.nats_per_token.exp()
    }
}

/// How a model's predictions differ from a baseline's on the same tokens.
#[derive(Debug, Clone, PartialEq)]
pub struct Comparison {
    /// Mean divergence in nats a token.
    pub kl_mean: f64,
    /// Its 99th percentile.
    pub kl_p99: f64,
    /// Fraction of positions where both think the same token likeliest.
    pub top1_agreement: f64,
    /// Perplexity over the baseline's.
    pub perplexity_ratio: f64,
}

/// Scores `ids` in windows of `window` tokens, each from an empty cache; the first token of a window is not
/// predicted. `on_window` hears how many tokens are done.
pub fn score(
    steps: &mut StepLoop,
    ids: &[u32],
    window: usize,
    on_window: &mut dyn FnMut(usize),
) -> Result<Score> {
    let (mut sum, mut tokens) = (0.0, 0);
    for part in windows(ids, window)? {
        let log_probs = log_probs(steps, part)?;
        sum -= log_probs.iter().sum::<f64>();
        tokens += log_probs.len();
        on_window(tokens);
    }
    finish(sum, tokens)
}

/// [`score`] of `model`, and how it compares with `baseline` on the same windows.
pub fn compare(
    model: &mut StepLoop,
    baseline: &mut StepLoop,
    ids: &[u32],
    window: usize,
    on_window: &mut dyn FnMut(usize),
) -> Result<(Score, Comparison)> {
    if model.limits().head_rows != baseline.limits().head_rows {
        let (one, other) = (model.limits().head_rows, baseline.limits().head_rows);
        return Err(Error::usage(format!(
            "the models have different vocabularies: {one} and {other} logits"
        )));
    }
    let (mut sum, mut baseline_sum, mut same) = (0.0, 0.0, 0);
    let mut divergences = Vec::new();
    for part in windows(ids, window)? {
        let mut expected = Vec::new();
        teacher_force(baseline, part, &mut |_, logits| {
            expected.push(logits.to_vec());
            Ok(())
        })?;
        teacher_force(model, part, &mut |position, logits| {
            let Some(&next) = part.get(position + 1) else {
                return Ok(());
            };
            let expected = &expected[position];
            let norms = (log_sum_exp(expected)?, log_sum_exp(logits)?);
            let log_prob = |logits: &[f32], norm: f64| {
                let logit = logits.get(next as usize);
                logit.map_or(f64::NEG_INFINITY, |&logit| f64::from(logit) - norm)
            };
            sum -= log_prob(logits, norms.1);
            baseline_sum -= log_prob(expected, norms.0);
            same += usize::from(argmax(logits) == argmax(expected));
            divergences.push(divergence_of(expected, logits, norms));
            Ok(())
        })?;
        on_window(divergences.len());
    }
    let tokens = divergences.len();
    let score = finish(sum, tokens)?;
    let kl_mean = divergences.iter().sum::<f64>() / tokens as f64;
    divergences.sort_by(f64::total_cmp);
    let kl_p99 = divergences[((tokens - 1) as f64 * 0.99).round() as usize];
    let perplexity_ratio = ((sum - baseline_sum) / tokens as f64).exp();
    Ok((
        score,
        Comparison {
            kl_mean,
            kl_p99,
            top1_agreement: same as f64 / tokens as f64,
            perplexity_ratio,
        },
    ))
}

fn windows(ids: &[u32], window: usize) -> Result<impl Iterator<Item = &[u32]>> {
    if window < 2 {
        return Err(Error::usage(format!(
            "a window of {window} tokens predicts nothing: at least 2 are needed"
        )));
    }
    Ok(ids.chunks(window).filter(|part| part.len() > 1))
}

fn finish(sum: f64, tokens: usize) -> Result<Score> {
    if tokens == 0 {
        return Err(Error::usage(
            "the text is too short: nothing is predicted before the second token",
        ));
    }
    Ok(Score {
        tokens,
        nats_per_token: sum / tokens as f64,
    })
}
