//! From a name on the command line to a model that runs: which directory, which device, how much memory.

use std::path::Path;
use std::time::Instant;

use anyhow::{Result, bail};
use tileinfer::backend::{Backend, ComputeType, Profile, Profiled, ReferenceBackend};
use tileinfer::config::ModelConfig;
use tileinfer::engine::StepLoop;
use tileinfer::kv::{KeySmoothing, KvElement, PAGE_SIZE};
use tileinfer::model::{
    CALIBRATION_TEXT, CALIBRATION_TOKENS, DFlashDrafter, DecoderLM, LoadOptions, Quant, calibrate,
};
use tileinfer::plan::MemoryPlan;
use tileinfer::runner::{ModelRunner, Runner, RunnerOptions};
use tileinfer::tokenizer::Tokenizer;
use tileinfer::weights::{Checkpoint, Dtype, HostModel, Int8Scheme};
use tileinfer_cpu::CpuBackend;

use crate::args::{DeviceArg, DtypeArg, KvCacheArg, PlaceArgs, QuantArg};
#[cfg(feature = "cuda")]
use crate::gpu::{self, Gpu};
use crate::memory::{self, readable};
use crate::speculate::{self, Drafter, Speculating};
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
    pub(crate) fn choose(place: &PlaceArgs, voice: &Voice) -> Result<Self> {
        let part = place.gpu_memory_utilization;
        match place.device {
            DeviceArg::Auto => Ok(Self::best(part, voice)),
            DeviceArg::Cpu => Ok(Device::Cpu),
            DeviceArg::Reference => Ok(Device::Reference),
            DeviceArg::Cuda(number) => Self::cuda(number, part),
        }
    }

    /// A GPU if there is one that is usable, else the CPU.
    #[cfg(feature = "cuda")]
    fn best(part: f64, voice: &Voice) -> Self {
        match Gpu::open(0, part) {
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
    fn best(_: f64, _: &Voice) -> Self {
        Device::Cpu
    }

    #[cfg(feature = "cuda")]
    fn cuda(number: usize, part: f64) -> Result<Self> {
        Ok(Device::Cuda(Gpu::open(number, part)?))
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda(_: usize, _: f64) -> Result<Self> {
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

    /// Whether ops return before they have run, so that to time each of them slows all of them down.
    pub(crate) fn queues(&self) -> bool {
        match self {
            Device::Cpu | Device::Reference => false,
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => true,
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

    /// How `available` bytes are said, and what to do if they do not do.
    fn memory_words(&self, available: u64) -> (String, &'static str) {
        let all = readable(available);
        match self {
            Device::Cpu | Device::Reference => (
                format!("{all} of memory are available"),
                "close other programs, or choose a smaller model",
            ),
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => (
                format!(
                    "{all} of the GPU's memory may be taken (--gpu-memory-utilization {})",
                    gpu.utilization
                ),
                "end other programs on the GPU, take --quant int8, or choose a smaller model",
            ),
        }
    }

    /// Whether many sequences share one pool of pages that takes all the memory that is left.
    fn shares_pool(&self) -> bool {
        match self {
            Device::Cpu | Device::Reference => false,
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => true,
        }
    }

    /// Sequences that it runs at once, if nobody says how many: on a CPU each has room of its own.
    fn sequences(&self) -> usize {
        match self {
            Device::Cpu | Device::Reference => 8,
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => 64,
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
            // Int8 weights want two rows of bytes beside each.
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => compute.size() + 2 * usize::from(int8(place)),
        };
        let scratch = match self {
            Device::Cpu | Device::Reference => 0,
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => {
                let longest = place.ctx_size.unwrap_or(config.max_position_embeddings);
                gpu::scratch(config, sequences, longest)
            }
        };
        let mut plan = MemoryPlan::new(
            config,
            weights_bytes,
            element,
            activation_bytes,
            self.rows(),
            sequences,
        );
        plan.workspace_bytes = plan.workspace_bytes.saturating_add(scratch);
        plan
    }
}

/// What to open a model for.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Purpose<'a> {
    /// Sequences that run at once; 0: as many as the device runs well.
    pub(crate) sequences: usize,
    /// Positions that one sequence needs; without a number, as many as the model allows and fit.
    pub(crate) length: Option<usize>,
    /// Where to count what each op takes, if that is wanted.
    pub(crate) profile: Option<&'a Profile>,
    /// Who drafts.
    pub(crate) spec: Option<&'a Speculating>,
}

impl<'a> Purpose<'a> {
    /// One sequence of `length` positions.
    pub(crate) fn one(length: Option<usize>) -> Self {
        Purpose {
            sequences: 1,
            length,
            profile: None,
            spec: None,
        }
    }

    /// The same with a number of sequences, if it had none.
    fn on(self, device: &Device) -> Self {
        match self.sequences {
            0 => Purpose {
                sequences: device.sequences(),
                ..self
            },
            _ => self,
        }
    }

    /// Whether its sequences take pages from one pool, so that not all can be at their longest.
    fn shares_pool(self, device: &Device) -> bool {
        self.sequences > 1 && self.length.is_none() && device.shares_pool()
    }

    /// The same with drafts.
    pub(crate) fn speculating(self, spec: Option<&'a Speculating>) -> Self {
        Purpose { spec, ..self }
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
    let device = Device::choose(place, voice)?;
    voice.took("opening the device", start);
    let purpose = purpose.on(&device);
    let available = device.available()?;
    let config = ModelConfig::from_dir(dir)?;
    let checkpoint = Checkpoint::open(dir)?;
    let compute = compute_type(place.dtype);
    // Before anything of the weights is read: the headers say how large they are.
    let foreseen = HostModel::bytes_of(&checkpoint.tensors(), compute, int8(place));
    let plan = device.memory_plan(&config, foreseen, place, purpose.sequences);
    fitting(&device, &plan, place, purpose, available)?;
    let bar = voice.bar("reading the weights", 1);
    // What becomes int8 does so from what is stored, matrix by matrix: nothing is rounded to bf16 before.
    let keep = match quant(place) {
        Quant::Int8 => ComputeType::F32,
        Quant::None => compute,
    };
    let drafter = purpose.spec.map(|spec| spec.read(dir, &config, keep));
    let drafter = drafter.transpose()?.flatten();
    let mapped = Instant::now();
    let host = HostModel::load(&config, &checkpoint, keep)?;
    bar.finish_and_clear();
    voice.took("finding the weights", mapped);
    if let Ok(Some(scheme)) = Int8Scheme::of(&config) {
        voice.note(&format!("the checkpoint holds {scheme}"));
    }
    if keep == ComputeType::Bf16 {
        let stored = checkpoint
            .names()
            .filter(|name| !name.ends_with("_scale"))
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
        drafter.as_ref(),
        device,
        place,
        &calibration,
        purpose,
        available,
        voice,
    )?;
    opened.load_seconds = start.elapsed().as_secs_f64();
    // Files stay mapped: where all of a large one was read, letting go of it holds everything up for tenths of a second,
    // in another thread too. Its pages are the system's to take back.
    drop((host, drafter));
    std::mem::forget(checkpoint);
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
    let device = Device::choose(place, voice)?;
    let bytes = config.weights_bytes(2);
    let available = device.available()?;
    let foreseen = config.weights_bytes(match int8(place) {
        true => 1,
        false => compute_type(place.dtype).size(),
    });
    let plan = device.memory_plan(&config, foreseen, place, purpose.sequences);
    fitting(&device, &plan, place, purpose, available)?;
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
        None,
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
    drafter: Option<&Drafter>,
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
    let mut plan = device.memory_plan(&config, weights_bytes, place, purpose.sequences);
    if let Some(drafter) = drafter {
        let (config, bytes) = drafter.size(compute, int8(place));
        // A DFlash drafter's cache is never int8.
        let kv_cache_dtype = match drafter {
            Drafter::Model { .. } => place.kv_cache_dtype,
            Drafter::DFlash { .. } => KvCacheArg::Auto,
        };
        let place = &PlaceArgs {
            kv_cache_dtype,
            ..place.clone()
        };
        let beside = device.memory_plan(config, bytes, place, purpose.sequences);
        plan = speculate::together(plan, beside);
    }
    let length = context_length(&config, &device, &plan, place, purpose, available, voice)?;
    let pages = match purpose.shares_pool(&device) {
        true => plan.shared_pages(available, purpose.sequences, length),
        false => length.div_ceil(PAGE_SIZE) * purpose.sequences,
    };
    if purpose.shares_pool(&device) {
        let tokens = pages * PAGE_SIZE;
        let bytes = readable(plan.context_bytes(tokens as u64));
        voice.note(&format!(
            "the cache holds {tokens} tokens ({bytes}), which up to {} sequences share",
            purpose.sequences
        ));
    }
    let options = RunnerOptions {
        pages,
        max_rows: device.rows().min(length).max(purpose.sequences),
        max_spans: purpose.sequences,
        ..RunnerOptions::for_length(length)
    };
    let load = Load {
        config: &config,
        host,
        drafter,
        place,
        calibration,
        options: &options,
        max_length: length,
        voice,
    };
    let bring = |load: Load<'_>| load.to(&device, compute, threads, purpose.profile);
    let runner = bring(load)?;
    let speculation = purpose.spec.map(|spec| {
        let draft = match drafter {
            Some(Drafter::Model { config, host }) => {
                // Smoothing factors in a file are those of the model itself.
                let place = &PlaceArgs {
                    kv_smoothing: None,
                    ..place.clone()
                };
                Some(bring(Load {
                    config,
                    host,
                    drafter: None,
                    place,
                    ..load
                })?)
            }
            _ => None,
        };
        spec.speculation(runner.as_ref(), draft)
    });
    let speculation = speculation.transpose()?;
    let mut steps = StepLoop::new(runner);
    steps.set_speculation(speculation);
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
#[derive(Clone, Copy)]
struct Load<'a> {
    config: &'a ModelConfig,
    host: &'a HostModel,
    /// A DFlash drafter goes beside the model; another one has a runner of its own.
    drafter: Option<&'a Drafter>,
    place: &'a PlaceArgs,
    calibration: &'a Calibration<'a>,
    options: &'a RunnerOptions,
    max_length: usize,
    voice: &'a Voice,
}

impl Load<'_> {
    /// Weights, pages and buffers on `device`.
    fn to(
        &self,
        device: &Device,
        compute: ComputeType,
        threads: usize,
        profile: Option<&Profile>,
    ) -> Result<Box<dyn Runner>> {
        match device {
            Device::Cpu => self.maybe_profiled(CpuBackend::new(compute, threads), profile),
            Device::Reference => self.maybe_profiled(ReferenceBackend::new(compute), profile),
            #[cfg(feature = "cuda")]
            Device::Cuda(gpu) => self.maybe_profiled(gpu.backend(compute), profile),
        }
    }

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
        let start = Instant::now();
        let model = DecoderLM::load(&backend, self.config, self.host, &load, on_layer)?;
        bar.finish_and_clear();
        self.voice.took("loading", start);
        let options = RunnerOptions {
            int8_cache: self.smoothing(&backend, &model)?,
            ..self.options.clone()
        };
        let Some(Drafter::DFlash { config, host }) = self.drafter else {
            return Ok(Box::new(ModelRunner::new(backend, model, &options)?));
        };
        let drafter = DFlashDrafter::load(
            &backend,
            config.clone(),
            host,
            self.config,
            model.embedding.clone(),
            model.head.clone(),
            self.max_length,
        )?;
        let runner = ModelRunner::with_dflash(backend, model, drafter, &options)?;
        Ok(Box::new(runner))
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

/// How long a context fits, if a context fits as it is asked for.
///
/// # Errors
/// What is too large, with the numbers.
fn fitting(
    device: &Device,
    plan: &MemoryPlan,
    place: &PlaceArgs,
    purpose: Purpose<'_>,
    available: u64,
) -> Result<usize> {
    let sharing = match purpose.shares_pool(device) {
        true => 1,
        false => purpose.sequences.max(1),
    };
    let fits = plan.max_context(available) as usize / sharing;
    let (has, remedy) = device.memory_words(available);
    let (weights, buffers) = (readable(plan.weights_bytes), readable(plan.workspace_bytes));
    if fits == 0 {
        bail!("the model's weights take {weights} and its buffers {buffers}, and {has}: {remedy}");
    }
    if let Some(wanted) = place
        .ctx_size
        .or(purpose.length)
        .filter(|&wanted| wanted > fits)
    {
        let kv = readable(plan.context_bytes(wanted.saturating_mul(sharing) as u64));
        bail!(
            "a context of {wanted} tokens takes {kv} beside {weights} of weights and {buffers} of buffers, and {has}: {fits} tokens fit (--ctx-size {fits})"
        );
    }
    Ok(fits)
}

/// The context that is asked for, needed, or as long as the model allows and memory holds.
fn context_length(
    config: &ModelConfig,
    device: &Device,
    plan: &MemoryPlan,
    place: &PlaceArgs,
    purpose: Purpose<'_>,
    available: u64,
    voice: &Voice,
) -> Result<usize> {
    let most = config.max_position_embeddings;
    let fits = fitting(device, plan, place, purpose, available)?;
    if let Some(wanted) = place.ctx_size.or(purpose.length) {
        if wanted > most {
            voice.note(&format!(
                "a context of {wanted} tokens is longer than the {most} that the model was made for"
            ));
        }
        return Ok(wanted);
    }
    if fits < most {
        voice.note(&format!(
            "the context is lowered from {most} to {fits} tokens, which fit in memory"
        ));
    }
    Ok(most.min(fits))
}
