//! `tileinfer eval`: how likely a model thinks given tokens are.

use std::io::Write;

use anyhow::{Context, Result};
use serde_json::json;
use tileinfer::eval;
use tileinfer::tokenizer::Tokenizer;

use crate::args::{DtypeArg, EvalArgs, KvCacheArg, PlaceArgs};
use crate::files;
use crate::models;
use crate::open::{self, Opened, Purpose};
use crate::voice::Voice;

/// Tokens a window of `--text`, unless asked otherwise.
const WINDOW: usize = 2048;

pub(crate) fn eval(args: &EvalArgs) -> Result<()> {
    let voice = Voice::new(args.model.voice);
    let hub = args.model.name.hub;
    let dir = models::dir(&args.model.name.model, None, hub)?;
    match (&args.ids, &args.text) {
        (Some(file), _) => {
            let ids = files::read_ids(file)?;
            let purpose = Purpose::one(Some(ids.len().max(1)));
            let opened = open::open(&dir, &args.model.place, purpose, &voice)?;
            score_ids(args, opened, &ids, &voice)
        }
        (None, Some(file)) => {
            let text = files::read_text(file)?;
            let ids = Tokenizer::from_dir(&dir)?.encode_prompt(&text)?;
            let window = args
                .model
                .place
                .ctx_size
                .unwrap_or(WINDOW)
                .min(ids.len().max(2));
            let purpose = Purpose::one(Some(window));
            let opened = open::open(&dir, &args.model.place, purpose, &voice)?;
            let baseline = args.compare.as_deref().map(|compare| {
                let (dir, dtype) = match compare {
                    "bf16" => (dir.clone(), DtypeArg::Bf16),
                    other => (models::dir(other, None, hub)?, args.model.place.dtype),
                };
                // The baseline is as exact as it can be.
                let place = PlaceArgs {
                    dtype,
                    quant: None,
                    kv_cache_dtype: KvCacheArg::Auto,
                    kv_smoothing: None,
                    ..args.model.place.clone()
                };
                open::open(&dir, &place, purpose, &voice)
                    .context("opening the model to compare with")
            });
            score_text(args, opened, baseline.transpose()?, &ids, window, &voice)
        }
        (None, None) => unreachable!("one of the two is required. This is a bug"),
    }
}

fn score_ids(args: &EvalArgs, mut opened: Opened, ids: &[u32], voice: &Voice) -> Result<()> {
    let bar = voice.bar("scoring", ids.len() as u64);
    let mut logprobs = Vec::new();
    let mut top = Vec::new();
    eval::teacher_force(&mut opened.steps, ids, &mut |position, logits| {
        if let Some(&next) = ids.get(position + 1) {
            logprobs.push(eval::log_prob(logits, next)?);
        }
        if args.top > 0 {
            top.push(best(logits, args.top));
        }
        bar.set_position(position as u64);
        Ok(())
    })?;
    bar.finish_and_clear();
    let mut out = std::io::stdout().lock();
    if args.json {
        let top: Vec<Vec<_>> = top
            .iter()
            .map(|best| {
                best.iter()
                    .map(|&(id, logit)| json!({"id": id, "logit": logit}))
                    .collect()
            })
            .collect();
        writeln!(out, "{}", json!({"logprobs": logprobs, "top": top}))?;
        return Ok(());
    }
    writeln!(
        out,
        "position      id    log p{}",
        if args.top > 0 {
            "  best (id logit)"
        } else {
            ""
        }
    )?;
    for (position, &id) in ids.iter().enumerate() {
        let known = position
            .checked_sub(1)
            .map(|before| format!("{:8.4}", logprobs[before]))
            .unwrap_or_default();
        write!(out, "{position:8} {id:7} {known:>8}")?;
        for (id, logit) in top.get(position).into_iter().flatten() {
            write!(out, "  {id} {logit:.3}")?;
        }
        writeln!(out)?;
    }
    Ok(())
}

/// The `count` largest logits and their ids, best first, the lowest id first among equals.
fn best(logits: &[f32], count: usize) -> Vec<(usize, f32)> {
    let mut all: Vec<(usize, f32)> = logits.iter().copied().enumerate().collect();
    let order = |a: &(usize, f32), b: &(usize, f32)| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0));
    if count < all.len() {
        all.select_nth_unstable_by(count, order);
        all.truncate(count);
    }
    all.sort_by(order);
    all
}

fn score_text(
    args: &EvalArgs,
    mut opened: Opened,
    baseline: Option<Opened>,
    ids: &[u32],
    window: usize,
    voice: &Voice,
) -> Result<()> {
    let bar = voice.bar("scoring", ids.len() as u64);
    let mut on_window = |done: usize| bar.set_position(done as u64);
    let (score, comparison) = match baseline {
        None => (
            eval::score(&mut opened.steps, ids, window, &mut on_window)?,
            None,
        ),
        Some(mut other) => {
            let (score, comparison) = eval::compare(
                &mut opened.steps,
                &mut other.steps,
                ids,
                window,
                &mut on_window,
            )?;
            (score, Some(comparison))
        }
    };
    bar.finish_and_clear();
    let mut out = std::io::stdout().lock();
    if args.json {
        let mut object = json!({
            "perplexity": score.perplexity(),
            "tokens": score.tokens,
            "nats_per_token": score.nats_per_token,
        });
        if let Some(comparison) = comparison {
            object["kl_mean"] = json!(comparison.kl_mean);
            object["kl_p99"] = json!(comparison.kl_p99);
            object["top1_agreement"] = json!(comparison.top1_agreement);
            object["perplexity_ratio"] = json!(comparison.perplexity_ratio);
        }
        writeln!(out, "{object}")?;
        return Ok(());
    }
    writeln!(out, "perplexity       {:.4}", score.perplexity())?;
    writeln!(out, "nats per token   {:.5}", score.nats_per_token)?;
    writeln!(
        out,
        "tokens           {} in windows of {window}",
        score.tokens
    )?;
    if let Some(comparison) = comparison {
        writeln!(
            out,
            "divergence       {:.6} nats a token, 99th percentile {:.6}",
            comparison.kl_mean, comparison.kl_p99
        )?;
        writeln!(out, "same best token  {:.4}", comparison.top1_agreement)?;
        writeln!(out, "perplexity ratio {:.5}", comparison.perplexity_ratio)?;
    }
    Ok(())
}
