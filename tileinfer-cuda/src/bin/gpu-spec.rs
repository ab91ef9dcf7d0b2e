//! What a round of speculation costs over a plain step, at a real shape with random weights: through the runner and
//! the decode loop as they are, with drafts of which as many are right as a script says. Plain decoding tells what is
//! right, so every text must come out as plain decoding's.
//!
//! `gpu-spec [--toolkit DIR] [--golden DIR] [--contexts N,N] PACK_FOLDER [MODEL_FOLDER]`, or
//! `gpu-spec --device cpu MODEL_FOLDER` for a look at the logic with a tiny model; the model's folder holds a
//! `config.json`. With `--golden`, the folder of DFlash's reference numbers, drafters are held against those first.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use tileinfer::backend::{Backend, ComputeType, ReferenceBackend};
use tileinfer::config::{DFlashConfig, ModelConfig};
use tileinfer::engine::{GenerationOptions, StepLoop};
use tileinfer::generate::{Generated, generate};
use tileinfer::kv::{PAGE_SIZE, Sequence};
use tileinfer::model::{DFlashDrafter, DecoderLM, LoadOptions};
use tileinfer::runner::{ModelRunner, Runner, RunnerOptions};
use tileinfer::sampling::Sampled;
use tileinfer::spec::{Ask, DFlashProposer, Drafts, NgramProposer, Proposer, Speculation};
use tileinfer::testing::{DFLASH_DRAFTERS, golden_dflash, random_dflash};
use tileinfer::weights::{HostDFlash, HostModel};
use tileinfer::{Error, Result};
use tileinfer_cuda::{CudaBackend, CudaOptions};

/// Layers of the drafter, and tokens of its blocks.
const LAYERS: usize = 5;
const BLOCK: usize = 16;

/// What is asked of a round, in plain steps, by who drafts.
const GOALS: [(Who, f64); 2] = [(Who::Ngram, 1.15), (Who::DFlash, 1.45)];

/// With so many drafts right a round, text comes so many times as fast as plain decoding's.
const RIGHT: usize = 6;
const GAIN: f64 = 4.1;

const USAGE: &str = "usage: gpu-spec [--toolkit DIR] [--golden DIR] [--contexts N,N] PACK_FOLDER [MODEL_FOLDER], or gpu-spec --device cpu [--golden DIR] [--contexts N,N] [MODEL_FOLDER]";

fn main() {
    if let Err(error) = run(std::env::args().skip(1)) {
        println!("error: {error}");
        std::process::exit(1);
    }
}

fn run(arguments: impl Iterator<Item = String>) -> Result<()> {
    let mut arguments = arguments.peekable();
    let mut options = CudaOptions::default();
    let mut plan = Plan::default();
    let (mut on_gpu, mut golden) = (true, None);
    while let Some(flag) = arguments.next_if(|argument| argument.starts_with("--")) {
        let value = arguments.next().ok_or_else(|| Error::usage(USAGE))?;
        match (flag.as_str(), value.as_str()) {
            ("--toolkit", _) => options.kernels.toolkit = Some(PathBuf::from(value)),
            ("--golden", _) => golden = Some(PathBuf::from(value)),
            ("--device", "cpu") => on_gpu = false,
            ("--contexts", _) => {
                let contexts = value.split(',').map(str::parse).collect::<Result<_, _>>();
                plan.contexts = contexts.map_err(|_| Error::usage(USAGE))?;
            }
            _ => return Err(Error::usage(USAGE)),
        }
    }
    if on_gpu {
        options
            .kernels
            .pack_folders
            .extend(arguments.next().map(PathBuf::from));
    }
    let model = arguments.next().map(PathBuf::from);
    if model.is_none() && golden.is_none() {
        return Err(Error::usage(USAGE));
    }
    let (golden, model) = (golden.as_deref(), model.as_deref());
    if on_gpu {
        let opened = CudaBackend::open(ComputeType::Bf16, &options)?;
        let make = |compute| CudaBackend::with_ops(compute, opened.ops().clone());
        check_and_bench(&make, golden, model, &plan)
    } else {
        check_and_bench(&ReferenceBackend::new, golden, model, &plan)
    }
}

/// Holds drafters against the reference numbers in `golden`, whose first difference is a panic, and times rounds.
fn check_and_bench<B: Backend>(
    make: &dyn Fn(ComputeType) -> B,
    golden: Option<&Path>,
    model: Option<&Path>,
    plan: &Plan,
) -> Result<()> {
    if let Some(golden) = golden {
        for name in DFLASH_DRAFTERS {
            golden_dflash(make, golden, name, 2e-3);
            println!("ok {name}");
        }
    }
    if let Some(model) = model {
        let rows = bench(&|| make(ComputeType::Bf16), model, plan)?;
        println!("{}", table(&rows));
    }
    Ok(())
}

/// What is measured.
struct Plan {
    /// Tokens of the prompts.
    contexts: Vec<usize>,
    /// Drafts a round.
    drafts: Vec<usize>,
    /// Rounds before those that count: what comes for the first time is launched, then recorded, and there are two
    /// buffers of steps.
    warm: usize,
    /// Rounds that count.
    rounds: usize,
}

impl Default for Plan {
    fn default() -> Self {
        Plan {
            contexts: vec![512, 4096],
            drafts: vec![7, 15],
            warm: 8,
            rounds: 24,
        }
    }
}

impl Plan {
    /// Tokens that plain decoding has to tell: all that the longest rounds bring, and the drafts after them.
    fn answer(&self) -> usize {
        let most = self.drafts.iter().max().map_or(0, |&most| most);
        (self.warm + self.rounds + 2) * (most + 1)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Who {
    Ngram,
    DFlash,
}

/// One line of the table.
struct Row {
    context: usize,
    who: Who,
    drafts: usize,
    /// Drafts that the script makes right; none: the drafter's own are verified.
    right: Option<usize>,
    /// Seconds of a plain step and of a round, medians.
    plain: f64,
    round: f64,
    /// Tokens a second over plain decoding's, all rounds together.
    gain: f64,
}

/// All that is measured of the model whose configuration is in `folder`.
fn bench<B: Backend>(make: &dyn Fn() -> B, folder: &Path, plan: &Plan) -> Result<Vec<Row>> {
    let config = ModelConfig::from_dir(folder)?;
    let started = Instant::now();
    let host = HostModel::random(&config, 1);
    let drafter = random_dflash(&config, LAYERS, BLOCK, 2);
    let seconds = started.elapsed().as_secs_f64();
    println!("{}: made in {seconds:.1} s", folder.display());
    let most = plan.contexts.iter().max().map_or(0, |&most| most);
    let length = most + plan.answer() + 1;
    // What is cached of every text is kept.
    let pages = plan.contexts.len() * length.div_ceil(PAGE_SIZE);
    let runner = |drafter| runner(make(), &config, &host, drafter, [length, pages]);
    let mut rows = Vec::new();

    let plainly = runner(None)?;
    println!("{}", plainly.device());
    let mut steps = StepLoop::new(plainly);
    let mut texts = Vec::new();
    for &context in &plan.contexts {
        let mut text = Text::decode(&mut steps, &config, context, plan)?;
        println!("{context:5}: a plain step {:.3} ms", 1e3 * text.step);
        for &k in &plan.drafts {
            let propose = || NgramProposer::new(k, 3, 1);
            for right in [0, RIGHT.min(k), k] {
                let row = text.rounds(&mut steps, propose()?, Who::Ngram, k, Some(right), plan)?;
                rows.push(row);
            }
        }
        texts.push(text);
    }
    drop(steps);

    let drafting = runner(Some(&drafter))?;
    let own: Vec<DFlashProposer> = plan
        .drafts
        .iter()
        .flat_map(|&k| [k; 4])
        .map(|k| DFlashProposer::new(drafting.as_ref(), Some(k), false))
        .collect::<Result<_>>()?;
    // One proposer a run; they hold nothing but numbers.
    let mut steps = StepLoop::new(drafting);
    for text in &mut texts {
        text.prefill(&mut steps)?;
        for (i, proposer) in own.iter().enumerate() {
            let k = plan.drafts[i / 4];
            let right = [None, Some(0), Some(RIGHT.min(k)), Some(k)][i % 4];
            let row = text.rounds(&mut steps, proposer.clone(), Who::DFlash, k, right, plan)?;
            rows.push(row);
        }
    }
    Ok(rows)
}

/// The model on `backend`, with a drafter or without.
fn runner<B: Backend>(
    backend: B,
    config: &ModelConfig,
    host: &HostModel,
    drafter: Option<&(DFlashConfig, HostDFlash)>,
    [length, pages]: [usize; 2],
) -> Result<Box<dyn Runner>> {
    let options = LoadOptions::new(length);
    let model = DecoderLM::load(&backend, config, host, &options, &mut |_, _| ())?;
    let options = RunnerOptions {
        pages,
        ..RunnerOptions::for_length(length)
    };
    let Some((dflash, weights)) = drafter else {
        return Ok(Box::new(ModelRunner::new(backend, model, &options)?));
    };
    let drafter = DFlashDrafter::load(
        &backend,
        dflash.clone(),
        weights,
        config,
        model.embedding.clone(),
        model.head.clone(),
        length,
    )?;
    let runner = ModelRunner::with_dflash(backend, model, drafter, &options)?;
    Ok(Box::new(runner))
}

/// A prompt and how plain decoding goes on.
struct Text {
    prompt: Vec<u32>,
    answer: Arc<[u32]>,
    /// What is cached of it, by the runner that runs now.
    sequence: Option<Sequence>,
    vocabulary: usize,
    /// Seconds of a plain step: the median, and all of them together over their number.
    step: f64,
    mean: f64,
}

impl Text {
    /// Decodes plainly after `context` tokens.
    fn decode(
        steps: &mut StepLoop,
        config: &ModelConfig,
        context: usize,
        plan: &Plan,
    ) -> Result<Self> {
        let token = |i: usize| (i * 7919 % config.output_vocab_size) as u32;
        let mut text = Text {
            prompt: (0..context.max(1)).map(token).collect(),
            answer: Arc::default(),
            sequence: Some(steps.new_sequence()),
            vocabulary: config.output_vocab_size,
            step: 0.0,
            mean: 0.0,
        };
        let mut times = Vec::new();
        let decoded = text.go_on(steps, plan.answer(), &mut |_| times.push(Instant::now()))?;
        text.answer = decoded.into();
        (text.step, text.mean) = spread(&times[plan.warm..]);
        Ok(text)
    }

    /// Reads the prompt with another runner.
    fn prefill(&mut self, steps: &mut StepLoop) -> Result<()> {
        self.sequence = Some(steps.new_sequence());
        self.go_on(steps, 1, &mut |_| ()).map(drop)
    }

    /// The next `tokens` tokens, greedily.
    fn go_on(
        &mut self,
        steps: &mut StepLoop,
        tokens: usize,
        on_token: &mut dyn FnMut(&Sampled),
    ) -> Result<Vec<u32>> {
        let sequence = self.sequence.take();
        let Generated {
            tokens, sequence, ..
        } = generate(
            steps,
            sequence.unwrap_or_else(|| steps.new_sequence()),
            &self.prompt,
            self.options(tokens),
            &mut |_| ControlFlow::Continue(()),
            &mut |token| {
                on_token(token);
                ControlFlow::Continue(())
            },
        )?;
        self.sequence = Some(sequence);
        Ok(tokens)
    }

    fn options(&self, tokens: usize) -> GenerationOptions {
        GenerationOptions {
            sampling: Arc::default(),
            seed: 0,
            max_tokens: Some(tokens),
            stop_ids: Arc::default(),
            vocabulary: self.vocabulary,
            top_logprobs: None,
        }
    }

    /// Times rounds of `k` drafts of which `right` are right, or of the drafts of `inner` as they are.
    fn rounds(
        &mut self,
        steps: &mut StepLoop,
        inner: impl Proposer + 'static,
        who: Who,
        k: usize,
        right: Option<usize>,
        plan: &Plan,
    ) -> Result<Row> {
        let rounds = Arc::new(Mutex::new(Vec::new()));
        let scripted = Scripted {
            inner,
            prompt: self.prompt.len(),
            answer: self.answer.clone(),
            right,
            rounds: rounds.clone(),
        };
        steps.set_speculation(Some(Speculation::new(scripted)));
        let wanted = (plan.warm + plan.rounds + 1) * (right.unwrap_or(2) + 1) + k + 1;
        let tokens = self.go_on(steps, wanted, &mut |_| ());
        steps.set_speculation(None);
        let tokens = tokens?;
        let what = format!("{who:?}, {k} drafts, {right:?} right");
        if tokens != self.answer[..tokens.len()] {
            return Err(Error::Bug(format!(
                "{what}: another text than plain decoding's"
            )));
        }
        let rounds = rounds.lock().unwrap_or_else(PoisonError::into_inner);
        // The last few have less room.
        let whole = rounds
            .iter()
            .take_while(|round| round.drafts == k)
            .skip(plan.warm);
        let (times, lengths): (Vec<Instant>, Vec<usize>) =
            whole.map(|round| (round.start, round.text)).unzip();
        if times.len() < plan.rounds {
            let found = times.len();
            return Err(Error::Bug(format!("{what}: only {found} whole rounds")));
        }
        let brought = lengths.windows(2).map(|pair| pair[1] - pair[0]);
        if let Some(right) = right
            && let Some(other) = brought.clone().find(|&tokens| tokens != right + 1)
        {
            return Err(Error::Bug(format!(
                "{what}: a round brought {other} tokens"
            )));
        }
        let tokens = brought.sum::<usize>() as f64 / (lengths.len() - 1) as f64;
        let (round, mean) = spread(&times);
        Ok(Row {
            context: self.prompt.len(),
            who,
            drafts: k,
            right,
            plain: self.step,
            round,
            gain: tokens * self.mean / mean,
        })
    }
}

/// The median of what passes between one time and the next, and the mean.
fn spread(times: &[Instant]) -> (f64, f64) {
    let mut between: Vec<f64> = times
        .windows(2)
        .map(|pair| (pair[1] - pair[0]).as_secs_f64())
        .collect();
    between.sort_by(f64::total_cmp);
    let mean = between.iter().sum::<f64>() / between.len() as f64;
    (between[between.len() / 2], mean)
}

/// Lets another proposer work, and proposes the right tokens and wrong ones in place of its own.
struct Scripted<P> {
    inner: P,
    prompt: usize,
    answer: Arc<[u32]>,
    right: Option<usize>,
    rounds: Arc<Mutex<Vec<Round>>>,
}

/// A round as it begins.
struct Round {
    start: Instant,
    /// Tokens of the text.
    text: usize,
    drafts: usize,
}

impl<P: Proposer> Proposer for Scripted<P> {
    fn most(&self) -> usize {
        self.inner.most()
    }

    fn propose(&mut self, runner: &mut dyn Runner, asks: &[Ask<'_>]) -> Result<Vec<Drafts>> {
        let start = Instant::now();
        let mut rounds = self.rounds.lock().unwrap_or_else(PoisonError::into_inner);
        rounds.extend(asks.iter().map(|ask| Round {
            start,
            text: ask.tokens.len(),
            drafts: ask.most,
        }));
        let drafts = self.inner.propose(runner, asks)?;
        let Some(right) = self.right else {
            return Ok(drafts);
        };
        let script = |ask: &Ask<'_>| {
            let next = &self.answer[ask.tokens.len() - self.prompt..];
            let drafts = next.iter().take(ask.most).enumerate();
            Drafts {
                tokens: drafts
                    .map(|(i, &token)| if i < right { token } else { wrong(token) })
                    .collect(),
                ..Drafts::default()
            }
        };
        Ok(asks.iter().map(script).collect())
    }

    fn forget(&mut self, id: u64) {
        self.inner.forget(id);
    }
}

/// Another token.
fn wrong(token: u32) -> u32 {
    token.checked_sub(1).unwrap_or(1)
}

/// The rows, and under them what was asked for.
fn table(rows: &[Row]) -> String {
    let mut text = format!(
        "{:>7} {:>6} {:>6} {:>5}  {:>8} {:>8}  {:>10}  {:>13}\n",
        "context", "drafts", "by", "right", "plain ms", "round ms", "round/plain", "tok/s / plain"
    );
    for row in rows {
        let who = format!("{:?}", row.who);
        let right = row
            .right
            .map_or("own".to_owned(), |right| right.to_string());
        text += &format!(
            "{:7} {:6} {who:>6} {right:>5}  {:8.3} {:8.3}  {:11.3}  {:13.2}\n",
            row.context,
            row.drafts,
            1e3 * row.plain,
            1e3 * row.round,
            row.round / row.plain,
            row.gain
        );
    }
    for (who, goal) in GOALS {
        let of = rows.iter().filter(|row| row.who == who);
        let most = of.clone().map(|row| row.round / row.plain);
        let most = most.fold(0.0, f64::max);
        let least = of
            .filter(|row| row.right == Some(RIGHT))
            .map(|row| row.gain)
            .fold(f64::INFINITY, f64::min);
        text += &format!(
            "{who:?}: a round takes {most:.3} plain steps at most (asked: {goal}), {RIGHT} right bring {least:.2} times plain at least (asked: {GAIN})\n"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_of_round_is_measured() {
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden/dflash/models");
        let plan = Plan {
            contexts: vec![5, 40],
            drafts: vec![7],
            warm: 1,
            rounds: 2,
        };
        let make = || ReferenceBackend::new(ComputeType::Bf16);
        let rows = bench(&make, &models.join("qwen3-6l"), &plan).unwrap();
        assert_eq!(rows.len(), 2 * (3 + 4));
        assert!(rows.iter().all(|row| row.round > 0.0 && row.plain > 0.0));
        // A context, six right drafts of a DFlash drafter's seven.
        let found = rows.iter().filter(|row| {
            (row.context, row.who, row.drafts, row.right) == (40, Who::DFlash, 7, Some(6))
        });
        assert_eq!(found.count(), 1);
        let table = table(&rows);
        println!("{table}");
        assert_eq!(table.lines().count(), 1 + rows.len() + 2, "{table}");
    }

    #[test]
    fn a_script_that_is_not_followed_is_an_error() {
        let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden/dflash/models");
        let config = ModelConfig::from_dir(models.join("qwen3-6l")).unwrap();
        let host = HostModel::random(&config, 1);
        let plan = Plan {
            contexts: vec![9],
            drafts: vec![3],
            warm: 1,
            rounds: 2,
        };
        let backend = ReferenceBackend::new(ComputeType::Bf16);
        let runner = runner(backend, &config, &host, None, [128, 2]).unwrap();
        let mut steps = StepLoop::new(runner);
        let mut text = Text::decode(&mut steps, &config, 9, &plan).unwrap();
        let propose = || NgramProposer::new(3, 3, 1).unwrap();
        let mut rounds = |text: &mut Text, right| {
            text.rounds(&mut steps, propose(), Who::Ngram, 3, Some(right), &plan)
        };
        rounds(&mut text, 2).unwrap();
        // What is told to be the answer is none.
        let mut other = text.answer.to_vec();
        other[5] = wrong(other[5]);
        text.answer = other.into();
        assert!(rounds(&mut text, 2).is_err());
    }
}
