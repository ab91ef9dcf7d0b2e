//! `tileinfer bench`: prefill and decode against the ceilings of the machine, measured in the same run.

use std::io::Write;
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use serde_json::json;
use tileinfer::backend::{Count, Profile};
use tileinfer::config::ModelConfig;
use tileinfer::engine::GenerationOptions;
use tileinfer::generate::generate;
use tileinfer::kv::Sequence;
use tileinfer::runner::{Batch, Input, Rows, Span, Want};
use tileinfer::spec::SpecStats;
use tileinfer::tokenizer::Tokenizer;

use crate::args::BenchArgs;
use crate::ceilings::Ceilings;
use crate::models;
use crate::open::{self, Opened, Purpose};
use crate::speculate::{self, Speculating};
use crate::usage;
use crate::voice::Voice;

/// Texts that repeat themselves: what n-grams are good at.
const REPEATING: [(&str, &str); 3] = [
    ("records", include_str!("../prompts/records.txt")),
    ("code", include_str!("../prompts/code.txt")),
    ("song", include_str!("../prompts/song.txt")),
];

/// Tokens that none of them is longer than.
const REPEATING_TOKENS: usize = 512;

pub(crate) fn bench(args: &BenchArgs) -> Result<()> {
    let voice = Voice::new(args.voice);
    let spec = Speculating::choose(&args.spec, args.hub, &voice)?;
    if spec.is_some() && args.random.is_some() {
        return Err(usage(
            "--spec needs a model whose texts make sense, not --random",
        ));
    }
    let profile = Profile::default();
    let depth = args.depth.unwrap_or(args.prompt_tokens);
    let mut length = (depth + args.gen_tokens).max(args.prompt_tokens) + 1;
    if spec.is_some() {
        length = length.max(REPEATING_TOKENS + args.gen_tokens);
    }
    let purpose = Purpose {
        sequences: args.batch,
        length: Some(length),
        profile: args.profile.then_some(&profile),
        spec: spec.as_ref(),
    };
    let mut tokenizer = None;
    // What is done while loading is no part of it.
    profile.pause();
    let mut opened = match (&args.model, &args.random) {
        (Some(model), _) => {
            let dir = models::dir(model, None, args.hub)?;
            if spec.is_some() {
                tokenizer = Some(Tokenizer::from_dir(&dir)?);
            }
            open::open(&dir, &args.place, purpose, &voice)?
        }
        (None, Some(name)) => {
            open::open_random(random_config(name)?, &args.place, purpose, &voice)?
        }
        (None, None) => bail!("give a model, or --random"),
    };

    let before = Ceilings::measure(&opened.device, opened.threads)?;
    let apart = args.profile && opened.device.queues();
    if !apart {
        profile.resume();
    }
    let mut phases = measure(&mut opened, args, depth, &voice, &profile)?;
    if apart {
        voice.note(
            "ops are timed one by one, launched and not recorded, in runs of their own: \
             together they take longer than a step",
        );
        profile.resume();
        phases.ops = measure(&mut opened, args, depth, &voice, &profile)?.ops;
    }
    profile.pause();
    let speculated = tokenizer.map(|tokenizer| speculated(&mut opened, args, &tokenizer, &voice));
    let speculated = speculated.transpose()?.unwrap_or_default();
    let ceilings = before.best(&Ceilings::measure(&opened.device, opened.threads)?);
    report(args, &opened, &phases, depth, &ceilings, &speculated)
}

/// The two things that are measured.
struct Phases {
    /// Seconds of a prefill.
    prefill: f64,
    /// Seconds of a decode step.
    decode: f64,
    /// What each op took in them, if a profile counts.
    ops: [(&'static str, Vec<(String, Count)>); 2],
}

fn measure(
    opened: &mut Opened,
    args: &BenchArgs,
    depth: usize,
    voice: &Voice,
    profile: &Profile,
) -> Result<Phases> {
    let prefill = prefill(opened, args, voice, profile)?;
    let prefill_ops = profile.take();
    let decode = decode(opened, args, depth, voice, profile)?;
    Ok(Phases {
        prefill,
        decode,
        ops: [("prefill", prefill_ops), ("decode", profile.take())],
    })
}

/// One repeating text, continued without drafts and with them.
struct Speculated {
    prompt: &'static str,
    /// Seconds a token, without and with.
    plain: f64,
    with_drafts: f64,
    stats: SpecStats,
}

impl Speculated {
    fn speedup(&self) -> f64 {
        self.plain / self.with_drafts
    }
}

/// Continues each text of [`REPEATING`] greedily, in turns without drafts and with them; medians of the runs.
fn speculated(
    opened: &mut Opened,
    args: &BenchArgs,
    tokenizer: &Tokenizer,
    voice: &Voice,
) -> Result<Vec<Speculated>> {
    let bar = voice.bar("speculation", (REPEATING.len() * (args.runs + 1)) as u64);
    let mut all = Vec::new();
    for (prompt, text) in REPEATING {
        let ids = tokenizer.encode_prompt(text)?;
        let ids = &ids[..ids.len().min(REPEATING_TOKENS)];
        let (mut plain, mut with_drafts) = (Vec::new(), Vec::new());
        let mut stats = SpecStats::default();
        for run in 0..=args.runs {
            let speculation = opened.steps.set_speculation(None);
            let (seconds, expected, _) = continued(opened, ids, args.gen_tokens, tokenizer)?;
            opened.steps.set_speculation(speculation);
            let (fast, found, spec) = continued(opened, ids, args.gen_tokens, tokenizer)?;
            if found != expected {
                bail!("speculation changed the text of {prompt}. This is a bug");
            }
            // The first is to get warm.
            if run > 0 {
                plain.push(seconds);
                with_drafts.push(fast);
                stats = spec.unwrap_or_default();
            }
            bar.inc(1);
        }
        all.push(Speculated {
            prompt,
            plain: median(plain),
            with_drafts: median(with_drafts),
            stats,
        });
    }
    bar.finish_and_clear();
    Ok(all)
}

/// Seconds a token after the first, the tokens, and what speculation did.
fn continued(
    opened: &mut Opened,
    ids: &[u32],
    tokens: usize,
    tokenizer: &Tokenizer,
) -> Result<(f64, Vec<u32>, Option<SpecStats>)> {
    let options = GenerationOptions {
        sampling: Arc::default(),
        seed: 0,
        max_tokens: Some(tokens),
        stop_ids: Arc::default(),
        vocabulary: tokenizer.vocab_size(),
        top_logprobs: None,
    };
    let sequence = opened.steps.new_sequence();
    let on_token = &mut |_: &_| ControlFlow::Continue(());
    let steps = &mut opened.steps;
    let generated = generate(
        steps,
        sequence,
        ids,
        options,
        &mut |_| ControlFlow::Continue(()),
        on_token,
    )?;
    let stats = generated.stats;
    let seconds = stats.after_first.as_secs_f64() / (generated.tokens.len() - 1).max(1) as f64;
    Ok((seconds, generated.tokens, stats.spec))
}

fn random_config(name: &str) -> Result<ModelConfig> {
    if let Some(config) = ModelConfig::builtin(name) {
        return Ok(config);
    }
    let path = Path::new(name);
    let text = std::fs::read_to_string(path).with_context(|| {
        let names: Vec<_> = ModelConfig::builtin_names().collect();
        format!(
            "{name} is neither a config.json nor one of {}",
            names.join(", ")
        )
    })?;
    Ok(ModelConfig::from_json(&text, path)?)
}

/// Some tokens, the same every time.
fn some_tokens(count: usize, vocabulary: usize) -> Vec<u32> {
    (0..count)
        .map(|i| ((i * 7919 + 13) % vocabulary) as u32)
        .collect()
}

/// Runs `ids` as new tokens of every sequence, in chunks; the logits of the last of them are computed.
fn extend(
    opened: &mut Opened,
    sequences: &mut [Sequence],
    ids: &[u32],
    on_chunk: &mut dyn FnMut(usize),
) -> Result<()> {
    let max_rows = opened.steps.limits().max_rows;
    let chunk = (max_rows / sequences.len()).max(1);
    let parts = ids.chunks(chunk);
    let last = parts.len() - 1;
    for (i, part) in parts.enumerate() {
        let mut batch = Batch::default();
        for sequence in sequences.iter_mut() {
            let start = sequence.len();
            sequence.reserve(start, start + part.len())?;
            let rows = if i == last { Rows::Last } else { Rows::None };
            // To take something out of a step is to wait for it.
            let want = Want {
                rows,
                hidden: i == last,
                ..Want::default()
            };
            batch.spans.push(Span {
                input: Input::Ids(part.to_vec()),
                start,
                table: sequence.table(),
                want,
            });
        }
        opened.steps.runner()?.step(&batch)?;
        for sequence in sequences.iter_mut() {
            sequence.append(part)?;
        }
        on_chunk(part.len());
    }
    Ok(())
}

/// Seconds of prefilling the prompt from an empty cache: the median.
fn prefill(opened: &mut Opened, args: &BenchArgs, voice: &Voice, profile: &Profile) -> Result<f64> {
    let bar = voice.bar("prefill", args.runs as u64 + 1);
    let ids = some_tokens(args.prompt_tokens, opened.steps.limits().vocabulary);
    let mut times = Vec::new();
    for run in 0..=args.runs {
        let mut sequences = vec![opened.steps.new_sequence()];
        let start = Instant::now();
        extend(opened, &mut sequences, &ids, &mut |_| ())?;
        bar.inc(1);
        if run > 0 {
            times.push(start.elapsed().as_secs_f64());
        } else {
            profile.take();
        }
    }
    bar.finish_and_clear();
    Ok(median(times))
}

/// Seconds of one decode step of all sequences: the median over runs of the mean of a run.
fn decode(
    opened: &mut Opened,
    args: &BenchArgs,
    depth: usize,
    voice: &Voice,
    profile: &Profile,
) -> Result<f64> {
    let ids = some_tokens(depth, opened.steps.limits().vocabulary);
    let mut sequences: Vec<Sequence> = (0..args.batch)
        .map(|_| opened.steps.new_sequence())
        .collect();
    let bar = voice.bar("filling the cache", depth as u64);
    if depth > 0 {
        extend(opened, &mut sequences, &ids, &mut |rows| {
            bar.inc(rows as u64)
        })?;
    }
    bar.finish_and_clear();
    let bar = voice.bar("decode", ((args.runs + 1) * args.gen_tokens) as u64);
    let mut times = Vec::new();
    for run in 0..=args.runs {
        let tokens = if run == 0 {
            args.gen_tokens.min(8)
        } else {
            args.gen_tokens
        };
        let start = Instant::now();
        for i in 0..tokens {
            extend(opened, &mut sequences, &[(i % 100) as u32], &mut |_| ())?;
            bar.inc(1);
        }
        if run > 0 {
            times.push(start.elapsed().as_secs_f64() / tokens as f64);
        } else {
            profile.take();
        }
        for sequence in &mut sequences {
            sequence.truncate(depth);
        }
    }
    bar.finish_and_clear();
    Ok(median(times))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn report(
    args: &BenchArgs,
    opened: &Opened,
    phases: &Phases,
    depth: usize,
    ceilings: &Ceilings,
    speculated: &[Speculated],
) -> Result<()> {
    let (prefill_seconds, step_seconds) = (phases.prefill, phases.decode);
    let config = &opened.config;
    let limits = opened.steps.limits();
    // What a step reads: every weight once (the embedding only where it is the head too) and the keys and
    // values of every sequence, half of the generated tokens on average.
    let embedding = (config.vocab_size * config.hidden_size) as u64;
    let read = config.parameter_count()
        - if config.tie_word_embeddings {
            0
        } else {
            embedding
        };
    let kv_bytes = (limits.layers * limits.kv.position_bytes()) as u64;
    let context = (depth + args.gen_tokens / 2) as u64;
    let step_bytes = opened.step_bytes + args.batch as u64 * context * kv_bytes;
    let gb_s = step_bytes as f64 / step_seconds / 1e9;

    // Twice the weights of the layers for each token, attention over half the prompt on average, and the head
    // for the last token.
    let head = (config.output_vocab_size * config.hidden_size) as u64;
    let tokens = args.prompt_tokens as u64;
    let attention =
        4 * config.layers.len() as u64 * (config.num_heads * config.head_dim) as u64 * tokens / 2;
    let flop = tokens * (2 * (read - head) + attention) + 2 * head;
    let tflop_s = flop as f64 / prefill_seconds / 1e12;

    let prefill = json!({
        "tok_s": tokens as f64 / prefill_seconds,
        "tflop_s": tflop_s,
        "fraction": tflop_s / ceilings.matmul_tflop_s,
    });
    let decode = json!({
        "tok_s": args.batch as f64 / step_seconds,
        "ms_per_token": step_seconds * 1e3,
        "bytes_per_token": step_bytes,
        "gb_s": gb_s,
        "fraction": gb_s / ceilings.read_gb_s,
    });
    let mut out = std::io::stdout().lock();
    if args.json {
        let mut object = json!({
            "prefill": prefill,
            "decode": decode,
            "ceilings": {
                "read_gb_s": ceilings.read_gb_s,
                "copy_gb_s": ceilings.copy_gb_s,
                "matmul_tflop_s": ceilings.matmul_tflop_s,
            },
            "device": opened.steps.device(),
            "threads": opened.threads,
            "prompt_tokens": args.prompt_tokens,
            "gen_tokens": args.gen_tokens,
            "depth": depth,
            "batch": args.batch,
            "runs": args.runs,
            "weights_bytes": opened.weights_bytes,
        });
        if !speculated.is_empty() {
            let texts = speculated.iter().map(|text| {
                let mut object = speculate::json(&text.stats);
                object["prompt"] = json!(text.prompt);
                object["plain_tok_s"] = json!(1.0 / text.plain);
                object["tok_s"] = json!(1.0 / text.with_drafts);
                object["speedup"] = json!(text.speedup());
                object
            });
            object["spec"] = texts.collect();
        }
        if args.profile {
            let phases = phases.ops.iter().map(|(phase, counts)| {
                let rows: Vec<_> = counts.iter().map(|row| op_json(row, ceilings)).collect();
                ((*phase).to_owned(), json!(rows))
            });
            object["profile"] = phases.collect::<serde_json::Map<_, _>>().into();
        }
        writeln!(out, "{object}")?;
        return Ok(());
    }
    writeln!(
        out,
        "{}, {} threads; medians of {} runs",
        opened.steps.device(),
        opened.threads,
        args.runs
    )?;
    writeln!(
        out,
        "ceilings  read {:.1} GB/s, copy {:.1} GB/s, product {:.3} TFLOP/s",
        ceilings.read_gb_s, ceilings.copy_gb_s, ceilings.matmul_tflop_s
    )?;
    writeln!(
        out,
        "prefill   {:8.1} tokens/s  {tflop_s:.3} TFLOP/s = {:.2} of the ceiling ({tokens} tokens)",
        tokens as f64 / prefill_seconds,
        tflop_s / ceilings.matmul_tflop_s
    )?;
    writeln!(
        out,
        "decode    {:8.1} tokens/s  {gb_s:.1} GB/s = {:.2} of the ceiling ({} sequences at {depth} tokens, {:.2} ms a step)",
        args.batch as f64 / step_seconds,
        gb_s / ceilings.read_gb_s,
        args.batch,
        step_seconds * 1e3
    )?;
    for text in speculated {
        writeln!(
            out,
            "{:9} {:8.1} tokens/s  {:.2} times plain; {:.2} tokens a step, {:.0} % of drafts accepted",
            text.prompt,
            1.0 / text.with_drafts,
            text.speedup(),
            text.stats.tokens_per_step(),
            100.0 * text.stats.acceptance_rate()
        )?;
    }
    for (phase, counts) in phases.ops.iter().filter(|_| args.profile) {
        let all: f64 = counts
            .iter()
            .map(|(_, count)| count.time.as_secs_f64())
            .sum();
        writeln!(
            out,
            "\n{phase:36}    calls  share   us a call    GB/s of read   GFLOP/s of product"
        )?;
        for (what, count) in counts {
            let op = Op::new(count, ceilings);
            writeln!(
                out,
                "{what:36} {:8} {:6.3} {:11.2} {:7.1}  {:5.2} {:9.1}  {:5.2}",
                count.calls,
                count.time.as_secs_f64() / all,
                op.us,
                op.gb_s,
                op.of_read,
                op.gflop_s,
                op.of_product
            )?;
        }
    }
    Ok(())
}

/// The speed of an op, and how near it comes to what the machine can do.
struct Op {
    us: f64,
    gb_s: f64,
    of_read: f64,
    gflop_s: f64,
    of_product: f64,
}

impl Op {
    fn new(count: &Count, ceilings: &Ceilings) -> Self {
        let seconds = count.time.as_secs_f64().max(1e-9);
        let (gb_s, gflop_s) = (
            count.bytes as f64 / seconds / 1e9,
            count.flop as f64 / seconds / 1e9,
        );
        Op {
            us: seconds * 1e6 / count.calls as f64,
            gb_s,
            of_read: gb_s / ceilings.read_gb_s,
            gflop_s,
            of_product: gflop_s / ceilings.matmul_tflop_s / 1e3,
        }
    }
}

fn op_json((what, count): &(String, Count), ceilings: &Ceilings) -> serde_json::Value {
    let op = Op::new(count, ceilings);
    json!({
        "op": what,
        "calls": count.calls,
        "us_per_call": op.us,
        "bytes_per_call": count.bytes / count.calls,
        "gb_s": op.gb_s,
        "read_fraction": op.of_read,
        "gflop_s": op.gflop_s,
        "product_fraction": op.of_product,
    })
}
