//! From a name on the command line to a model that runs: which directory, which device, how much memory.

use std::path::Path;
use std::time::Instant;

use anyhow::{Result, bail};
use tileinfer::backend::{Backend, ComputeType, Profile, Profiled, ReferenceBackend};
use tileinfer::config::ModelConfig;
use tileinfer::engine::StepLoop;
use tileinfer::kv::{KeySmoothing, KvElement};
use tileinfer::model::{
    CALIBRATION_TEXT, CALIBRATION_TOKENS, DecoderLM, LoadOptions, Quant, calibrate,
};
use tileinfer::plan::MemoryPlan;
use tileinfer::runner::{ModelRunner, Runner, RunnerOptions};
use tileinfer::tokenizer::Tokenizer;
use tileinfer::weights::{Checkpoint, Dtype, HostModel};
use tileinfer_cpu::CpuBackend;

use crate::args::{DeviceArg, DtypeArg, KvCacheArg, PlaceArgs, QuantArg};
#[cfg(feature = "cuda")]
use crate::gpu::{self, Gpu};
use crate::memory::{self, readable};
use crate::voice::Voice;

/// Rows of one step on a CPU: more would not be faster.
const CPU_ROWS: usize = 512;

/// A device that a model can run on here.
#[derive(Debug, Clone)]
pub(crate) enum Device {
    Cpu,
    Reference,
    #[cfg(feature = "cuda")]
    Cuda(Gpu),
}

impl Device {
    /// What `--device` asks for.
    pub(crate) fn choose(asked: DeviceArg, voice: &Voice) -> Result<Self> {
        match asked {
            DeviceArg::Auto => Ok(Self::best(voice)),
            DeviceArg::Cpu => Ok(Device::Cpu),
            DeviceArg::Reference => Ok(Device::Reference),
            DeviceArg::Cuda(number) => Self::cuda(number),
        }
    }

    /// A GPU if there is one that is usable, else the CPU.
    #[cfg(feature = "cuda")]
    fn best(voice: &Voice) -> Self {
        match Gpu::open(0) {
            Ok(gpu) => {
                voice.note(&format!("running on {}", gpu.name()));
                Device::Cuda(gpu)
            }
            Err(error) => {
                voice.note(&format!("running on the CPU: {error}"));
                Device::Cpu
            }
        }
    }

    #[cfg(not(feature = "cuda"))]
    fn best(_: &Voice) -> Self {
        Device::Cpu
    }

    #[cfg(feature = "cuda")]
    fn cuda(number: usize) -> Result<Self> {
        Ok(Device::Cuda(Gpu::open(number)?))
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda(_: usize) -> Result<Self> {
        bail!("this tileinfer was built without CUDA: use --device cpu")
    }

    /// The word for it in `--json`.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Device::Cpu => "cpu",
            Device::Reference => "reference",
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => "cuda",
        }
    }

    /// Bytes that may still be taken of the memory that a model would be in.
    pub(crate) fn available(&self) -> Result<u64> {
        match self {
            Device::Cpu | Device::Reference => Ok(memory::available()),
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => Ok(gpu.available()?),
        }
    }

    /// Rows of one step: more would not be faster.
    fn rows(&self) -> usize {
        match self {
            Device::Cpu | Device::Reference => CPU_ROWS,
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => gpu::ROWS,
        }
    }

    /// The plan of a model whose matrices take `weights_bytes`.
    pub(crate) fn memory_plan(
        &self,
        config: &ModelConfig,
        weights_bytes: u64,
        place: &PlaceArgs,
        sequences: usize,
    ) -> MemoryPlan {
        let compute = compute_type(place.dtype);
        let element = match place.kv_cache_dtype {
            KvCacheArg::Auto => KvElement::Compute(compute),
            KvCacheArg::Int8 => KvElement::Int8,
        };
        let activation_bytes = match self {
            // Kept in f32 words, whatever they are rounded to.
            Device::Cpu | Device::Reference => 4,
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => compute.size(),
        };
        MemoryPlan::new(
            config,
            weights_bytes,
            element,
            activation_bytes,
            self.rows(),
            sequences,
        )
    }
}

/// What to open a model for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Purpose<'a> {
    /// Sequences that run at once.
    pub(crate) sequences: usize,
    /// Positions that one sequence needs; without a number, as many as the model allows and fit.
    pub(crate) length: Option<usize>,
    /// Where to count what each op takes, if that is wanted.
    pub(crate) profile: Option<&'a Profile>,
}

impl Purpose<'_> {
    /// One sequence of `length` positions.
    pub(crate) fn one(length: Option<usize>) -> Self {
        Purpose {
            sequences: 1,
            length,
            profile: None,
        }
    }
}

/// A model on a device, ready to run.
pub(crate) struct Opened {
    pub(crate) config: ModelConfig,
    pub(crate) steps: StepLoop,
    pub(crate) weights_bytes: u64,
    /// Bytes of the weights that every step reads.
    pub(crate) step_bytes: u64,
    pub(crate) load_seconds: f64,
    pub(crate) threads: usize,
    pub(crate) device: Device,
}

/// Opens the model in `dir`.
pub(crate) fn open(
    dir: &Path,
    place: &PlaceArgs,
    purpose: Purpose<'_>,
    voice: &Voice,
) -> Result<Opened> {
    let start = Instant::now();
    // Before the weights are mapped: they are part of the plan, and of what a limit on the address space counts.
    let device = Device::choose(place.device, voice)?;
    let available = device.available()?;
    let config = ModelConfig::from_dir(dir)?;
    let checkpoint = Checkpoint::open(dir)?;
    let compute = compute_type(place.dtype);
    let bar = voice.bar("reading the weights", 1);
    // What becomes int8 does so from what is stored, matrix by matrix: nothing is rounded to bf16 before.
    let keep = match quant(place) {
        Quant::Int8 => ComputeType::F32,
        Quant::None => compute,
    };
    let host = HostModel::load(&config, &checkpoint, keep)?;
    bar.finish_and_clear();
    if keep == ComputeType::Bf16 {
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
    // The text that keys are measured on, where that is needed.
    let calibration = || {
        let tokenizer = Tokenizer::from_dir(dir)?;
        Ok(tokenizer.encode_prompt(CALIBRATION_TEXT)?)
    };
    let mut opened = place_model(
        config,
        &host,
        device,
        place,
        &calibration,
        purpose,
        available,
        voice,
    )?;
    opened.load_seconds = start.elapsed().as_secs_f64();
    Ok(opened)
}

/// Makes a model of random weights in the shape of `config`.
pub(crate) fn open_random(
    config: ModelConfig,
    place: &PlaceArgs,
    purpose: Purpose<'_>,
    voice: &Voice,
) -> Result<Opened> {
    let start = Instant::now();
    let device = Device::choose(place.device, voice)?;
    let bytes = config.weights_bytes(2);
    let available = device.available()?;
    // They are made here, wherever they go.
    let here = memory::available();
    if bytes > here {
        bail!(
            "random weights take {} and {} of memory are available",
            readable(bytes),
            readable(here)
        );
    }
    let bar = voice.bar("making random weights", 1);
    let host = HostModel::random(&config, 1);
    bar.finish_and_clear();
    let vocabulary = config.vocab_size;
    let calibration = || {
        let ids = (0..CALIBRATION_TOKENS).map(|i| (i * 7919 % vocabulary) as u32);
        Ok(ids.collect())
    };
    let mut opened = place_model(
        config,
        &host,
        device,
        place,
        &calibration,
        purpose,
        available,
        voice,
    )?;
    opened.load_seconds = start.elapsed().as_secs_f64();
    Ok(opened)
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

/// What `--quant` asks for.
fn quant(place: &PlaceArgs) -> Quant {
    match place.quant {
        Some(QuantArg::Int8) => Quant::Int8,
        None => Quant::None,
    }
}

/// Whether matrices become int8, as [`HostModel::bytes_of`] wants to know.
pub(crate) fn int8(place: &PlaceArgs) -> bool {
    quant(place) == Quant::Int8
}

/// Token ids that keys are measured on.
type Calibration<'a> = dyn Fn() -> Result<Vec<u32>> + 'a;

fn place_model(
    config: ModelConfig,
    host: &HostModel,
    device: Device,
    place: &PlaceArgs,
    calibration: &Calibration<'_>,
    purpose: Purpose<'_>,
    available: u64,
    voice: &Voice,
) -> Result<Opened> {
    let (threads, compute) = (threads(place), compute_type(place.dtype));
    let weights_bytes = host.loaded_bytes(compute, int8(place));
    let step_bytes = host.step_bytes(compute, int8(place));
    let plan = device.memory_plan(&config, weights_bytes, place, purpose.sequences);
    let length = context_length(&config, &plan, place, purpose, available, voice)?;
    let per_sequence = length.div_ceil(tileinfer::kv::PAGE_SIZE);
    let options = RunnerOptions {
        pages: per_sequence * purpose.sequences,
        max_rows: device.rows().min(length).max(purpose.sequences),
        max_spans: purpose.sequences,
        ..RunnerOptions::for_length(length)
    };
    let load = Load {
        config: &config,
        host,
        place,
        calibration,
        options: &options,
        max_length: length,
        voice,
    };
    let runner = match &device {
        Device::Cpu => {
            let backend = CpuBackend::new(compute, threads);
            load.maybe_profiled(backend, purpose.profile)?
        }
        Device::Reference => {
            let backend = ReferenceBackend::new(compute);
            load.maybe_profiled(backend, purpose.profile)?
        }
        #[cfg(feature = "cuda")]
        Device::Cuda(_) if purpose.profile.is_some() => bail!(
            "--profile times ops that have ended when they return, as on the CPU; for a GPU use NVIDIA's nsys"
        ),
        #[cfg(feature = "cuda")]
        Device::Cuda(gpu) => load.runner(gpu.backend(compute))?,
    };
    let steps = StepLoop::new(runner);
    let running = format!(
        "running on {}, a context of {length} tokens",
        steps.device()
    );
    match place.device {
        DeviceArg::Auto => voice.note(&running),
        _ => voice.detail(&running),
    }
    Ok(Opened {
        config,
        steps,
        weights_bytes,
        step_bytes,
        load_seconds: 0.0,
        threads,
        device,
    })
}

/// What is loaded, and how.
struct Load<'a> {
    config: &'a ModelConfig,
    host: &'a HostModel,
    place: &'a PlaceArgs,
    calibration: &'a Calibration<'a>,
    options: &'a RunnerOptions,
    max_length: usize,
    voice: &'a Voice,
}

impl Load<'_> {
    fn maybe_profiled<B: Backend>(
        &self,
        backend: B,
        profile: Option<&Profile>,
    ) -> Result<Box<dyn Runner>> {
        match profile {
            Some(profile) => self.runner(Profiled::new(backend, profile)),
            None => self.runner(backend),
        }
    }

    fn runner<B: Backend>(&self, backend: B) -> Result<Box<dyn Runner>> {
        let bar = self.voice.bar("loading", self.config.layers.len() as u64);
        let load = LoadOptions {
            quant: quant(self.place),
            ..LoadOptions::new(self.max_length)
        };
        let on_layer = &mut |done, _| bar.set_position(done as u64);
        let model = DecoderLM::load(&backend, self.config, self.host, &load, on_layer)?;
        bar.finish_and_clear();
        let options = RunnerOptions {
            int8_cache: self.smoothing(&backend, &model)?,
            ..self.options.clone()
        };
        Ok(Box::new(ModelRunner::new(backend, model, &options)?))
    }

    /// What the keys of an int8 cache are divided by; none: the cache is not int8.
    fn smoothing<B: Backend>(
        &self,
        backend: &B,
        model: &DecoderLM<B>,
    ) -> Result<Option<KeySmoothing>> {
        let file = self.place.kv_smoothing.as_deref();
        match (self.place.kv_cache_dtype, file) {
            (KvCacheArg::Auto, None) => Ok(None),
            (KvCacheArg::Auto, Some(_)) => Err(crate::usage(
                "--kv-smoothing is for an int8 cache: add --kv-cache-dtype int8",
            )),
            (KvCacheArg::Int8, Some(file)) if file == Path::new("none") => {
                Ok(Some(KeySmoothing::none()))
            }
            (KvCacheArg::Int8, Some(file)) => Ok(Some(KeySmoothing::read(file)?)),
            (KvCacheArg::Int8, None) => {
                let bar = self.voice.bar("measuring keys", 1);
                let smoothing = calibrate(backend, model, &(self.calibration)()?)?;
                bar.finish_and_clear();
                Ok(Some(smoothing))
            }
        }
    }
}

/// The context that is asked for, needed, or as long as the model allows and memory holds.
fn context_length(
    config: &ModelConfig,
    plan: &MemoryPlan,
    place: &PlaceArgs,
    purpose: Purpose<'_>,
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
            let all = wanted.saturating_mul(purpose.sequences) as u64;
            let kv = plan.kv_bytes_per_token.saturating_mul(all);
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
