//! From a name on the command line to a model that runs: which directory, which device, how much memory.

use std::path::Path;
use std::time::Instant;

use anyhow::{Result, bail};
use tileinfer::backend::{Backend, ComputeType, ReferenceBackend};
use tileinfer::config::ModelConfig;
use tileinfer::engine::StepLoop;
use tileinfer::model::{DecoderLM, LoadOptions};
use tileinfer::plan::MemoryPlan;
use tileinfer::runner::{ModelRunner, Runner, RunnerOptions};
use tileinfer::weights::{Checkpoint, Dtype, HostModel};
use tileinfer_cpu::CpuBackend;

use crate::args::{DeviceArg, DtypeArg, PlaceArgs};
use crate::memory::{self, readable};
use crate::voice::Voice;

/// Rows of one step on a CPU: more would not be faster.
const CPU_ROWS: usize = 512;

/// The kinds of device that a model can run on here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Device {
    Cpu,
    Reference,
}

impl Device {
    /// What `--device` asks for.
    pub(crate) fn choose(asked: DeviceArg) -> Result<Self> {
        match asked {
            DeviceArg::Auto | DeviceArg::Cpu => Ok(Device::Cpu),
            DeviceArg::Reference => Ok(Device::Reference),
            DeviceArg::Cuda => bail!("this tileinfer was built without CUDA: use --device cpu"),
        }
    }

    /// The word for it in `--json`.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Device::Cpu => "cpu",
            Device::Reference => "reference",
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
    // Before the weights are mapped: they are part of the plan, and of what a limit on the address space counts.
    let available = memory::available();
    let device = Device::choose(place.device)?;
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
    let mut opened = place_model(
        config, &host, compute, device, place, purpose, available, voice,
    )?;
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
    let device = Device::choose(place.device)?;
    let bytes = config.weights_bytes(2);
    let available = memory::available();
    if bytes > available {
        bail!(
            "random weights take {} and {} of memory are available",
            readable(bytes),
            readable(available)
        );
    }
    let host = HostModel::random(&config, 1);
    let mut opened = place_model(
        config,
        &host,
        compute_type(place.dtype),
        device,
        place,
        purpose,
        available,
        voice,
    )?;
    opened.load_seconds = start.elapsed().as_secs_f64();
    Ok(opened)
}

/// The plan of a model whose matrices take `weights_bytes`.
pub(crate) fn memory_plan(
    config: &ModelConfig,
    weights_bytes: u64,
    compute: ComputeType,
    sequences: usize,
) -> MemoryPlan {
    // A CPU keeps activations in f32 words, whatever they are rounded to.
    MemoryPlan::new(config, weights_bytes, compute, 4, CPU_ROWS, sequences)
}

/// Threads that work, asked for or all that this process may use.
pub(crate) fn threads(place: &PlaceArgs) -> usize {
    let all = || std::thread::available_parallelism().map_or(1, usize::from);
    place.threads.unwrap_or_else(all)
}

/// What `--dtype` asks for.
pub(crate) fn compute_type(dtype: DtypeArg) -> ComputeType {
    match dtype {
        DtypeArg::Auto | DtypeArg::Bf16 => ComputeType::Bf16,
        DtypeArg::F32 => ComputeType::F32,
    }
}

fn place_model(
    config: ModelConfig,
    host: &HostModel,
    compute: ComputeType,
    device: Device,
    place: &PlaceArgs,
    purpose: Purpose,
    available: u64,
    voice: &Voice,
) -> Result<Opened> {
    let threads = threads(place);
    let weights_bytes = host.bytes();
    let plan = memory_plan(&config, weights_bytes, compute, purpose.sequences);
    let length = context_length(&config, &plan, place, purpose, available, voice)?;
    let per_sequence = length.div_ceil(tileinfer::kv::PAGE_SIZE);
    let options = RunnerOptions {
        pages: per_sequence * purpose.sequences,
        max_rows: CPU_ROWS.min(length).max(purpose.sequences),
        max_spans: purpose.sequences,
        ..RunnerOptions::for_length(length)
    };
    let runner: Box<dyn Runner> = match device {
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
    available: u64,
    voice: &Voice,
) -> Result<usize> {
    let most = config.max_position_embeddings;
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
            let (weights, all) = (readable(plan.weights_bytes), readable(available));
            bail!(
                "a context of {wanted} tokens takes {} beside {weights} of weights, and {all} of memory are available: {fits} tokens fit (--ctx-size {fits})",
                readable(kv)
            );
        }
        return Ok(wanted);
    }
    if fits == 0 {
        let (weights, all) = (readable(plan.weights_bytes), readable(available));
        bail!(
            "the model's weights take {weights} and {all} of memory are available: close other programs, or choose a smaller model"
        );
    }
    if fits < most {
        voice.note(&format!(
            "the context is lowered from {most} to {fits} tokens, which fit in memory"
        ));
    }
    Ok(most.min(fits))
}
