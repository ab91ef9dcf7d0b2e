//! From a name on the command line to a model that runs: which directory, which device, how much memory.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use tileinfer::backend::{Backend, ComputeType, ReferenceBackend};
use tileinfer::config::ModelConfig;
use tileinfer::engine::StepLoop;
use tileinfer::model::{DecoderLM, LoadOptions};
use tileinfer::plan::MemoryPlan;
use tileinfer::runner::{ModelRunner, Runner, RunnerOptions};
use tileinfer::weights::{Checkpoint, Dtype, HostModel};
use tileinfer_cpu::CpuBackend;

use crate::args::{DtypeArg, PlaceArgs};
use crate::voice::Voice;

/// Rows of one step on a CPU: more would not be faster.
const CPU_ROWS: usize = 512;

/// The directory that `model` names.
pub(crate) fn model_dir(model: &str) -> Result<PathBuf> {
    let path = Path::new(model);
    if model.ends_with(".gguf") {
        bail!(
            "{model} is a GGUF file, which is not supported yet: use a directory with config.json and safetensors"
        );
    }
    if path.is_dir() {
        return Ok(path.to_owned());
    }
    if path.exists() {
        bail!("{model} is a file: give the directory that holds config.json and the weights");
    }
    bail!("there is no directory {model}")
}

/// The kinds of device that a model can run on here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Device {
    Cpu,
    Reference,
}

impl Device {
    fn parse(text: &str) -> Result<Self> {
        match text {
            "auto" | "cpu" => Ok(Device::Cpu),
            "reference" => Ok(Device::Reference),
            _ if text == "cuda" || text.starts_with("cuda:") => {
                bail!("this tileinfer was built without CUDA: use --device cpu")
            }
            _ => bail!("there is no device '{text}': use auto, cpu or reference"),
        }
    }
}

/// What to open a model for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Purpose {
    /// Sequences that run at once.
    pub(crate) sequences: usize,
    /// Positions that one sequence needs; without a number, as many as the model allows and fit.
    pub(crate) length: Option<usize>,
}

/// A model on a device, ready to run.
pub(crate) struct Opened {
    pub(crate) config: ModelConfig,
    pub(crate) steps: StepLoop,
    pub(crate) weights_bytes: u64,
    pub(crate) load_seconds: f64,
    pub(crate) threads: usize,
}

/// Opens the model in `dir`.
pub(crate) fn open(
    dir: &Path,
    place: &PlaceArgs,
    purpose: Purpose,
    voice: &Voice,
) -> Result<Opened> {
    let start = Instant::now();
    let config = ModelConfig::from_dir(dir)?;
    let checkpoint = Checkpoint::open(dir)?;
    let compute = compute_type(place.dtype);
    let host = HostModel::load(&config, &checkpoint, compute)?;
    if compute == ComputeType::Bf16 {
        let stored = checkpoint
            .names()
            .filter_map(|name| checkpoint.tensor(name))
            .map(|tensor| tensor.dtype);
        if let Some(dtype) = stored
            .into_iter()
            .find(|dtype| matches!(dtype, Dtype::F16 | Dtype::F32))
        {
            voice.note(&format!(
                "{dtype:?} weights are rounded to bf16 (--dtype f32 keeps them)"
            ));
        }
    }
    let mut opened = place_model(config, &host, compute, place, purpose, voice)?;
    opened.load_seconds = start.elapsed().as_secs_f64();
    Ok(opened)
}

/// Makes a model of random weights in the shape of `config`.
pub(crate) fn open_random(
    config: ModelConfig,
    place: &PlaceArgs,
    purpose: Purpose,
    voice: &Voice,
) -> Result<Opened> {
    let start = Instant::now();
    let bytes = config.weights_bytes(2);
    let available = available_memory();
    if bytes > available {
        bail!(
            "random weights take {} and {} of memory are available",
            gigabytes(bytes),
            gigabytes(available)
        );
    }
    let host = HostModel::random(&config, 1);
    let mut opened = place_model(
        config,
        &host,
        compute_type(place.dtype),
        place,
        purpose,
        voice,
    )?;
    opened.load_seconds = start.elapsed().as_secs_f64();
    Ok(opened)
}

fn compute_type(dtype: DtypeArg) -> ComputeType {
    match dtype {
        DtypeArg::Auto | DtypeArg::Bf16 => ComputeType::Bf16,
        DtypeArg::F32 => ComputeType::F32,
    }
}

fn place_model(
    config: ModelConfig,
    host: &HostModel,
    compute: ComputeType,
    place: &PlaceArgs,
    purpose: Purpose,
    voice: &Voice,
) -> Result<Opened> {
    let threads = match place.threads {
        Some(0) => bail!("--threads 0: at least one thread has to work"),
        Some(threads) => threads,
        None => std::thread::available_parallelism().map_or(1, usize::from),
    };
    let weights_bytes = host.bytes();
    let plan = MemoryPlan::new(
        &config,
        weights_bytes,
        compute,
        4,
        CPU_ROWS,
        purpose.sequences,
    );
    let length = context_length(&config, &plan, place, purpose, voice)?;
    let per_sequence = length.div_ceil(tileinfer::kv::PAGE_SIZE);
    let options = RunnerOptions {
        pages: per_sequence * purpose.sequences,
        max_rows: CPU_ROWS.min(length).max(purpose.sequences),
        max_spans: purpose.sequences,
        ..RunnerOptions::for_length(length)
    };
    let runner: Box<dyn Runner> = match Device::parse(&place.device)? {
        Device::Cpu => runner(
            CpuBackend::new(compute, threads),
            &config,
            host,
            length,
            &options,
            voice,
        )?,
        Device::Reference => runner(
            ReferenceBackend::new(compute),
            &config,
            host,
            length,
            &options,
            voice,
        )?,
    };
    let steps = StepLoop::new(runner);
    voice.detail(&format!(
        "running on {}, a context of {length} tokens",
        steps.device()
    ));
    Ok(Opened {
        config,
        steps,
        weights_bytes,
        load_seconds: 0.0,
        threads,
    })
}

fn runner<B: Backend>(
    backend: B,
    config: &ModelConfig,
    host: &HostModel,
    length: usize,
    options: &RunnerOptions,
    voice: &Voice,
) -> Result<Box<dyn Runner>> {
    let bar = voice.bar("loading", config.layers.len() as u64);
    let load = LoadOptions { max_length: length };
    let model = DecoderLM::load(&backend, config, host, &load, &mut |done, _| {
        bar.set_position(done as u64)
    })?;
    bar.finish_and_clear();
    Ok(Box::new(ModelRunner::new(backend, model, options)?))
}

/// The context that is asked for, needed, or as long as the model allows and memory holds.
fn context_length(
    config: &ModelConfig,
    plan: &MemoryPlan,
    place: &PlaceArgs,
    purpose: Purpose,
    voice: &Voice,
) -> Result<usize> {
    let most = config.max_position_embeddings;
    if place.ctx_size == Some(0) {
        bail!("--ctx-size 0: a context needs at least one token");
    }
    let available = available_memory();
    let fits = plan.max_context(available) as usize / purpose.sequences.max(1);
    let wanted = place.ctx_size.or(purpose.length);
    if let Some(wanted) = wanted {
        if wanted > most && place.ctx_size.is_some() {
            voice.note(&format!(
                "a context of {wanted} tokens is longer than the {most} that the model was made for"
            ));
        }
        if wanted > fits {
            let kv = plan.kv_bytes_per_token * (wanted * purpose.sequences) as u64;
            let (weights, all) = (gigabytes(plan.weights_bytes), gigabytes(available));
            bail!(
                "a context of {wanted} tokens takes {} beside {weights} of weights, and {all} of memory are available: {fits} tokens fit (--ctx-size {fits})",
                gigabytes(kv)
            );
        }
        return Ok(wanted);
    }
    if fits == 0 {
        let (weights, all) = (gigabytes(plan.weights_bytes), gigabytes(available));
        bail!("the model's weights take {weights} and {all} of memory are available");
    }
    if fits < most {
        voice.note(&format!(
            "the context is lowered from {most} to {fits} tokens, which fit in memory"
        ));
    }
    Ok(most.min(fits))
}

/// Bytes that this process may still take: what the kernel calls available, or the address-space limit.
pub(crate) fn available_memory() -> u64 {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let available = meminfo.lines().find_map(|line| {
        line.strip_prefix("MemAvailable:")?
            .trim()
            .strip_suffix("kB")?
            .trim()
            .parse::<u64>()
            .ok()
    });
    available.map_or(u64::MAX, |kilobytes| kilobytes * 1024)
}

/// `bytes` for a person.
pub(crate) fn gigabytes(bytes: u64) -> String {
    if bytes >= 1_000_000_000 {
        format!("{:.1} GB", bytes as f64 / 1e9)
    } else {
        format!("{:.0} MB", bytes as f64 / 1e6)
    }
}

/// The text of `path`; `-` is standard input.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    if path == Path::new("-") {
        return std::io::read_to_string(std::io::stdin()).context("reading standard input");
    }
    std::fs::read_to_string(path).with_context(|| format!("reading {}", path.display()))
}

/// The JSON array of token ids in `path`.
pub(crate) fn read_ids(path: &Path) -> Result<Vec<u32>> {
    let text = read_text(path)?;
    serde_json::from_str(&text)
        .with_context(|| format!("{} is not a JSON array of token ids", path.display()))
}
