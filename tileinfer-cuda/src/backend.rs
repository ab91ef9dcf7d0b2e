//! [`CudaBackend`]: the library's ops as launches. Tensors are plain arrays on the device; a step's layout
//! is a handful of integer arrays at fixed addresses, so that a recorded step can be replayed with another
//! layout of as many rows.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use half::bf16;
use tileinfer::backend::{
    Activation, AttentionShape, Backend, ComputeType, Element, HeadScratch, KEY_BLOCK, KvRows,
    Mask, QkNorms, RopeTable, StepLayout,
};
use tileinfer::kv::{KvElement, KvLayout};
use tileinfer::sampling::{Distribution, Draw, RowSampler, Sampled};
use tileinfer::weights::{Weight, WeightData};
use tileinfer::{Error, Result};

use crate::driver::{Address, Device, Event, Memory, Pinned, Recording};
use crate::kernels::Type;
use crate::ops::{
    self, AttentionPlan, Groups, HeadGroup, HeadInputs, LinearShape, Ops, Pools, Rows, StepArrays,
    Sums, Then,
};
use crate::passes::Spans;
use crate::sampling::{self, SamplePlan};
use crate::store::KernelOptions;

/// A window wider than any sequence.
const EVERYTHING: usize = 1 << 30;

/// Most scratch that attention split over keys may take before it is done whole.
const SPLIT_SCRATCH: usize = 256 << 20;

/// Bytes to leave for what attention allocates while a model runs, with up to `rows` rows a recorded step and
/// sequences of up to `longest` positions. Scratch grows in powers of two and none is freed, so that all of it
/// is less than twice the largest.
pub fn scratch_reserve(rows: usize, heads: usize, head_dim: usize, longest: usize) -> u64 {
    // Recordings are made for the longest sequence.
    let slots = longest.div_ceil(KEY_BLOCK) + 1;
    // What `Ops::split_scratch` says, for numbers that nobody has checked.
    let factors = [rows, heads, slots, 4 * (head_dim + 2)];
    let recorded = factors
        .into_iter()
        .fold(1, |bytes: u64, factor| bytes.saturating_mul(factor as u64));
    let largest = recorded.checked_next_power_of_two().unwrap_or(u64::MAX);
    largest.max(SPLIT_SCRATCH as u64).saturating_mul(2)
}

/// Bytes of each of the two buffers that weights pass through.
const LOAD_BUFFER: usize = 16 << 20;

/// What a backend is opened with.
#[derive(Debug, Clone, Default)]
pub struct CudaOptions {
    /// Which GPU, as the driver counts them.
    pub device: usize,
    /// Where its kernels are.
    pub kernels: KernelOptions,
}

/// See the module's first line.
#[derive(Debug)]
pub struct CudaBackend {
    ops: Arc<Ops>,
    compute: ComputeType,
    kind: Type,
    recording: AtomicBool,
    /// The step prepared last.
    prepared: Mutex<Recorded>,
    /// Heads of the last attention: what the next step's groups are likely made for.
    group: Mutex<HeadGroup>,
    loader: Mutex<Option<Loader>>,
    /// Whether a weight is int8: from then on activations have room for their bytes.
    int8: AtomicBool,
}

/// An array `[rows, width]` on the device.
#[derive(Debug)]
pub struct CudaTensor {
    memory: Memory,
    kind: Type,
    rows: usize,
    width: usize,
    capacity: usize,
    bytes: Option<Bytes>,
}

/// A tensor's rows as int8 weights take them.
#[derive(Debug)]
struct Bytes {
    values: Memory,
    scales: Memory,
    /// Whether they are those of what the tensor holds now.
    current: AtomicBool,
}

/// A weight `[rows, columns]` on the device, in the compute type, or in int8 with a scale a row.
#[derive(Debug, Clone)]
pub struct CudaWeight {
    memory: Arc<Memory>,
    scales: Option<Arc<Memory>>,
    rows: usize,
    columns: usize,
}

/// One layer's keys and values.
#[derive(Debug)]
pub struct CudaPages {
    layout: KvLayout,
    pages: usize,
    keys: Memory,
    values: Memory,
    int8: Option<Int8Pages>,
}

/// What an int8 cache has besides its bytes.
#[derive(Debug)]
struct Int8Pages {
    key_scales: Memory,
    value_scales: Memory,
    /// What keys are divided by.
    factors: Memory,
}

impl CudaPages {
    fn pools(&self) -> Pools {
        let scales =
            |of: fn(&Int8Pages) -> &Memory| self.int8.as_ref().map_or(0, |int8| of(int8).address());
        Pools {
            keys: Rows {
                values: self.keys.address(),
                scales: scales(|int8| &int8.key_scales),
            },
            values: Rows {
                values: self.values.address(),
                scales: scales(|int8| &int8.value_scales),
            },
            factors: scales(|int8| &int8.factors),
        }
    }
}

/// A RoPE table on the device.
#[derive(Debug)]
pub struct CudaRope {
    cos: Memory,
    sin: Memory,
    query_scale: Option<Memory>,
    pairs: usize,
}

/// A step's layout on the device and its samples.
#[derive(Debug)]
pub struct CudaStep {
    arrays: Memory,
    /// What the arrays have room for.
    most: Offsets,
    /// How they lie for the step at hand: packed, so that one copy takes them all to the device, and the same for
    /// all steps of as many rows, as a recording holds their addresses.
    offsets: Offsets,
    rows: usize,
    /// First row of each span and the number of rows.
    span_rows: Vec<usize>,
    /// Of each span: first position, end, first page.
    spans: Vec<[usize; 3]>,
    wanted: usize,
    /// Rows whose ids are drafts: they stand after so many others among those whose ids are taken from elsewhere.
    drafts: (usize, usize),
    staged: Mutex<Staged>,
    tokens: Memory,
    /// Tokens on their way to the host.
    read: Pinned,
    /// What the sampling kernels need besides logits, when rows ask for more than the largest one.
    sampling: Option<Sampling>,
    /// What drafts were drawn from, when they are drawn with noise.
    lists: Option<Memory>,
    sampled: Samples,
    done: Event,
}

/// Numbers for the sampling kernels on their way to the device.
#[derive(Debug)]
struct Sampling {
    staged: Pinned,
    words: Memory,
    copied: Event,
}

/// Host side of a step's arrays.
#[derive(Debug)]
struct Staged {
    words: Pinned,
    copied: Event,
    /// What the groups are made for, if they are.
    group: HeadGroup,
    /// Groups of each of [`ops::attention_tiles`].
    counts: [usize; 3],
}

/// What a step sampled.
#[derive(Debug, Default)]
struct Samples {
    /// The vocabulary of each row, and whether it draws a draft. Its token is in `read` once `done` has passed.
    rows: Vec<(usize, bool)>,
    /// Rows that the host has sampled, and their places among all.
    host: Vec<(usize, Sampled)>,
    /// Places of the drafts whose distributions are in the step's lists, and the width of their logits.
    lists: Vec<usize>,
    width: usize,
}

/// Where each array of a step begins, in words.
#[derive(Debug, Clone, Copy)]
struct Offsets {
    rows: usize,
    spans: usize,
    table_width: usize,
}

/// A recorded step. It can be replayed for steps of as many rows in no more spans: how many runs of rows
/// attention has to cover follows from the two.
#[derive(Debug)]
pub struct CudaGraph {
    recording: Recording,
    /// What it launches lives as long as it does: dropped after it.
    _ops: Arc<Ops>,
    step: Recorded,
}

/// What a recording depends on.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
struct Recorded {
    rows: usize,
    spans: usize,
}

/// Two pinned buffers that weights pass through in turn.
#[derive(Debug)]
struct Loader {
    buffers: [(Pinned, Event); 2],
    turn: usize,
}

impl Offsets {
    /// The arrays as (offset, words a row); rows and words of tokens to take, [`StepArrays::row_meta`], and
    /// [`Groups`] among them.
    const IDS: (usize, usize) = (0, 1);
    const POSITIONS: (usize, usize) = (1, 1);
    const SLOTS: (usize, usize) = (2, 1);
    const WANTED: (usize, usize) = (3, 1);
    const TAKE_ROWS: (usize, usize) = (4, 1);
    const TAKE_INDICES: (usize, usize) = (5, 1);
    const ROW_META: (usize, usize) = (6, 4);
    /// The last of the arrays.
    const GROUPS: [(usize, usize); 3] = [(10, 8), (18, 8), (26, 8)];

    /// Words a row over all arrays.
    const ROW: usize = 34;

    fn words(self) -> usize {
        self.rows * Self::ROW + self.spans * self.table_width
    }

    fn at(self, (offset, _): (usize, usize)) -> usize {
        offset * self.rows
    }

    fn tables(self) -> usize {
        self.rows * Self::ROW
    }
}

impl CudaBackend {
    /// Opens a GPU for activations of type `compute`.
    ///
    /// # Errors
    /// [`Error::Device`] if there is no usable GPU, with the reason.
    pub fn open(compute: ComputeType, options: &CudaOptions) -> Result<Self> {
        let ops = Arc::new(Ops::open(options.device, &options.kernels)?);
        Ok(Self::with_ops(compute, ops))
    }

    /// A backend on a device that is open already.
    pub fn with_ops(compute: ComputeType, ops: Arc<Ops>) -> Self {
        let kind = match compute {
            ComputeType::Bf16 => Type::Bf16,
            ComputeType::F32 => Type::F32,
        };
        CudaBackend {
            ops,
            compute,
            kind,
            recording: AtomicBool::new(false),
            prepared: Mutex::default(),
            group: Mutex::default(),
            loader: Mutex::new(None),
            int8: AtomicBool::new(false),
        }
    }

    /// The device and its kernels.
    pub fn ops(&self) -> &Arc<Ops> {
        &self.ops
    }

    fn device(&self) -> &Arc<Device> {
        self.ops.device()
    }

    /// Bytes of a number in the pages.
    fn page_value_bytes(&self, pages: &CudaPages) -> usize {
        match pages.int8 {
            Some(_) => 1,
            None => self.kind.bytes(),
        }
    }

    fn prepared(&self) -> MutexGuard<'_, Recorded> {
        self.prepared
            .lock()
            .expect("no thread panics with two numbers")
    }

    fn element(&self, element: Element) -> Type {
        match element {
            Element::Model => self.kind,
            Element::F32 => Type::F32,
        }
    }

    fn expect(&self, tensor: &CudaTensor, what: &str) -> Result<()> {
        if tensor.kind == self.kind {
            return Ok(());
        }
        Err(Error::Bug(format!(
            "{what} is {:?} on a backend of {:?}",
            tensor.kind, self.kind
        )))
    }

    fn floats(&self, what: &str, values: &[f32]) -> Result<Memory> {
        let memory = self.device().alloc(what, values.len() * 4)?;
        self.device()
            .upload(memory.address(), &encoded(Type::F32, values))?;
        Ok(memory)
    }

    fn linear_then(
        &self,
        out: &CudaTensor,
        weight: &CudaWeight,
        bias: Option<&CudaTensor>,
        x: &CudaTensor,
        then: Then,
    ) -> Result<()> {
        out.like(x.rows, weight.rows / then.halves())?;
        let (shape, operand) = self.linear_of(out.kind, weight, x)?;
        let bias = bias.map(CudaTensor::at);
        self.ops
            .linear(out.at(), operand, weight.at(), bias, &shape.then(then))
    }

    /// A linear layer's shape, to an output of type `out`, and its rows of activations.
    fn linear_of(
        &self,
        out: Type,
        weight: &CudaWeight,
        x: &CudaTensor,
    ) -> Result<(LinearShape, Rows)> {
        self.expect(x, "a linear's input")?;
        let shape = [x.rows, weight.rows, weight.columns];
        let int8 = weight.scales.is_some();
        let operand = if int8 { self.bytes(x)? } else { x.at().into() };
        let shape = LinearShape::new([self.kind, out], shape).int8(int8);
        Ok((shape, operand))
    }

    /// Norms and rotates the heads of a projection, writes queries to `queries` and the rest to its slots.
    fn heads(
        &self,
        queries: &mut CudaTensor,
        pages: &mut CudaPages,
        qkv: Sums,
        norms: &QkNorms<'_, Self>,
        rope: Option<&CudaRope>,
        step: &CudaStep,
        shape: &AttentionShape,
    ) -> Result<()> {
        let AttentionShape {
            heads,
            kv_heads,
            head_dim,
            ..
        } = *shape;
        queries.like(step.rows, heads * head_dim)?;
        self.expect(queries, "queries")?;
        let mut inputs = rope.map_or(HeadInputs::default(), |rope| rope.inputs(true));
        inputs.query_norm = norms.query.map_or(0, CudaTensor::at);
        inputs.key_norm = norms.key.map_or(0, CudaTensor::at);
        inputs.eps = norms.eps;
        let shape = [heads, kv_heads, head_dim, pages.layout.page_size];
        self.ops.split_norm_rope_store(
            queries.at(),
            &pages.pools(),
            qkv,
            &inputs,
            &step.step_arrays(),
            self.kind,
            shape,
        )
    }

    /// A tensor's rows as int8 weights take them, made now unless they are there.
    fn bytes(&self, x: &CudaTensor) -> Result<Rows> {
        let bytes = x.bytes.as_ref().ok_or_else(|| {
            Error::Bug("a tensor made before the first int8 weight meets one".to_owned())
        })?;
        if !bytes.current.swap(true, Ordering::Relaxed) {
            let shape = [x.rows, x.width];
            self.ops
                .round_activations(bytes.at(), x.at(), self.kind, shape)?;
        }
        Ok(bytes.at())
    }

    /// Queues bytes to the device through the pinned buffers.
    fn stream(&self, loader: &mut Loader, to: Address, bytes: &[u8]) -> Result<()> {
        for (part, chunk) in bytes.chunks(LOAD_BUFFER).enumerate() {
            let (buffer, passed) = &mut loader.buffers[loader.turn % 2];
            loader.turn += 1;
            passed.wait()?;
            copy_on_cores(&mut buffer.bytes_mut()[..chunk.len()], chunk);
            let to = to + (part * LOAD_BUFFER) as Address;
            self.device().queue_upload(to, buffer, 0, chunk.len())?;
            passed.record()?;
        }
        Ok(())
    }

    /// Queues what the sampling kernels need to the device, and says where.
    fn stage(&self, sampling: &mut Option<Sampling>, plan: &SamplePlan) -> Result<Address> {
        let bytes = plan.words() * 4;
        if sampling.as_ref().is_none_or(|s| s.words.bytes() < bytes) {
            if let Some(old) = sampling.take() {
                old.copied.wait()?;
            }
            let bytes = bytes.next_power_of_two().max(16 << 10);
            *sampling = Some(Sampling {
                staged: self.device().alloc_pinned(bytes)?,
                words: self.device().alloc("what a step samples with", bytes)?,
                copied: self.device().event()?,
            });
        }
        let Some(sampling) = sampling else {
            return Err(Error::Bug(
                "no room for what a step samples with".to_owned(),
            ));
        };
        // The copy of what was staged before may still be on its way.
        sampling.copied.wait()?;
        plan.write(sampling.staged.words());
        let to = sampling.words.address();
        self.device().queue_upload(to, &sampling.staged, 0, bytes)?;
        sampling.copied.record()?;
        Ok(to)
    }

    /// Memory for the lists that a plan asks for.
    fn room_for_lists(
        &self,
        lists: &mut Option<Memory>,
        plan: &SamplePlan,
        width: usize,
    ) -> Result<Address> {
        let count = plan.lists().len();
        let bytes = sampling::list_bytes(count, width);
        if count > 0 && lists.as_ref().is_none_or(|memory| memory.bytes() < bytes) {
            *lists = None;
            *lists = Some(self.device().alloc("what drafts are drawn from", bytes)?);
        }
        Ok(lists.as_ref().map_or(0, Memory::address))
    }

    /// Makes the groups of a step for such heads and queues them to the device.
    fn regroup(&self, step: &CudaStep, staged: &mut Staged, group: HeadGroup) -> Result<()> {
        step.fill_groups(self.kind, staged, group);
        let [first, ..] = Offsets::GROUPS;
        let (at, end) = (step.offsets.at(first) * 4, step.offsets.tables() * 4);
        let to = step.arrays.address() + at as Address;
        self.device()
            .queue_upload(to, &staged.words, at, end - at)?;
        staged.copied.record()
    }

    /// What the next step's groups are likely made for.
    fn group(&self) -> MutexGuard<'_, HeadGroup> {
        self.group.lock().expect("no thread panics with the heads")
    }

    /// The step's groups for such heads, and how many there are.
    fn groups<'a>(&self, step: &'a CudaStep, group: HeadGroup) -> Result<MutexGuard<'a, Staged>> {
        let mut staged = step.staged.lock().expect("no thread panics with a step");
        if staged.group != group {
            if self.recording.load(Ordering::Relaxed) && staged.group.queries != 0 {
                return Err(Error::Bug(
                    "layers of several group sizes cannot be recorded".to_owned(),
                ));
            }
            if !self.recording.load(Ordering::Relaxed) {
                staged.copied.wait()?;
            }
            self.regroup(step, &mut staged, group)?;
        }
        *self.group() = group;
        Ok(staged)
    }
}

/// Copies on several cores: one alone reads a mapped file slower than the bus to the device takes it.
fn copy_on_cores(to: &mut [u8], from: &[u8]) {
    const CORES: usize = 8;
    const LEAST: usize = 1 << 20;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let share = from.len().div_ceil(cores.min(CORES)).max(LEAST);
    std::thread::scope(|scope| {
        let mut shares = to.chunks_mut(share).zip(from.chunks(share));
        let mine = shares.next();
        for (to, from) in shares {
            scope.spawn(move || to.copy_from_slice(from));
        }
        if let Some((to, from)) = mine {
            to.copy_from_slice(from);
        }
    });
}

fn expect_f32(tensor: &CudaTensor, what: &str) -> Result<()> {
    if tensor.kind == Type::F32 {
        return Ok(());
    }
    Err(Error::Bug(format!("{what} is {:?}", tensor.kind)))
}

/// Values as the device keeps them.
fn encoded(kind: Type, values: &[f32]) -> Vec<u8> {
    match kind {
        Type::Bf16 => values
            .iter()
            .flat_map(|&value| bf16::from_f32(value).to_le_bytes())
            .collect(),
        Type::F32 => values
            .iter()
            .flat_map(|value| value.to_le_bytes())
            .collect(),
    }
}

fn decoded(kind: Type, bytes: &[u8]) -> Vec<f32> {
    match kind {
        Type::Bf16 => bytes
            .as_chunks()
            .0
            .iter()
            .map(|&two| bf16::from_le_bytes(two).to_f32())
            .collect(),
        Type::F32 => bytes
            .as_chunks()
            .0
            .iter()
            .map(|&four| f32::from_le_bytes(four))
            .collect(),
    }
}

impl Bytes {
    fn at(&self) -> Rows {
        Rows {
            values: self.values.address(),
            scales: self.scales.address(),
        }
    }
}

impl CudaWeight {
    fn at(&self) -> Rows {
        Rows {
            values: self.memory.address(),
            scales: self.scales.as_ref().map_or(0, |scales| scales.address()),
        }
    }
}

impl CudaTensor {
    fn at(&self) -> Address {
        self.memory.address()
    }

    /// An op is about to write other values.
    fn change(&self) {
        if let Some(bytes) = &self.bytes {
            bytes.current.store(false, Ordering::Relaxed);
        }
    }

    fn column(&self, column: usize) -> Address {
        self.at() + (column * self.kind.bytes()) as Address
    }

    /// Checks the size of what an op writes.
    fn like(&self, rows: usize, width: usize) -> Result<()> {
        self.change();
        if (self.rows, self.width) == (rows, width) {
            return Ok(());
        }
        Err(Error::Bug(format!(
            "an output is {} x {} and should be {rows} x {width}",
            self.rows, self.width
        )))
    }
}

impl CudaStep {
    fn address(&self, array: (usize, usize)) -> Address {
        self.arrays.address() + (self.offsets.at(array) * 4) as Address
    }

    fn step_arrays(&self) -> StepArrays {
        StepArrays {
            rows: self.rows,
            positions: self.address(Offsets::POSITIONS),
            slots: self.address(Offsets::SLOTS),
            row_meta: self.address(Offsets::ROW_META),
            tables: self.arrays.address() + (self.offsets.tables() * 4) as Address,
            table_width: self.offsets.table_width,
        }
    }

    /// Cuts every span into runs of rows whose query vectors a tile of attention holds.
    fn fill_groups(&self, kind: Type, staged: &mut Staged, group: HeadGroup) {
        let tiles = ops::attention_tiles(kind, group);
        for (i, tile) in tiles.into_iter().enumerate() {
            let at = self.offsets.at(Offsets::GROUPS[i]);
            let words = &mut staged.words.words()[at..at + 8 * self.rows];
            words.fill(0);
            let mut slots = words.as_chunks_mut::<8>().0.iter_mut();
            let most = (tile.queries / group.queries).max(1);
            let mut count = 0;
            for (span, &[start, end, first_page]) in self.spans.iter().enumerate() {
                let rows = self.span_rows[span]..self.span_rows[span + 1];
                for first in rows.clone().step_by(most) {
                    let position = start + first - rows.start;
                    let numbers = [
                        first,
                        most.min(rows.end - first),
                        span,
                        position,
                        end,
                        first_page,
                        0,
                        0,
                    ];
                    let slot = slots
                        .next()
                        .expect("no more groups than rows. This is a bug");
                    *slot = numbers.map(|number| number as i32);
                    count += 1;
                }
            }
            staged.counts[i] = count;
        }
        staged.group = group;
    }
}

impl Backend for CudaBackend {
    type Tensor = CudaTensor;
    type Weight = CudaWeight;
    type Pages = CudaPages;
    type Rope = CudaRope;
    type Step = CudaStep;
    type Graph = CudaGraph;

    fn name(&self) -> String {
        let info = self.device().info();
        let (major, minor) = (info.driver / 1000, info.driver % 1000 / 10);
        format!("{} (CUDA {major}.{minor})", info.name)
    }

    fn compute_type(&self) -> ComputeType {
        self.compute
    }

    fn alloc(&self, element: Element, capacity: usize, width: usize) -> Result<CudaTensor> {
        let kind = self.element(element);
        if capacity
            .checked_mul(width)
            .is_none_or(|values| values > i32::MAX as usize)
        {
            return Err(Error::usage(format!(
                "{capacity} x {width} values are more than an array can have here"
            )));
        }
        let device = self.device();
        let alloc = |bytes: usize| device.alloc("activations", bytes);
        let bytes = if element == Element::Model && self.int8.load(Ordering::Relaxed) {
            Some(Bytes {
                values: alloc(2 * capacity * width)?,
                scales: alloc(capacity * 4)?,
                current: AtomicBool::new(false),
            })
        } else {
            None
        };
        Ok(CudaTensor {
            memory: alloc(capacity * width * kind.bytes())?,
            kind,
            rows: 0,
            width,
            capacity,
            bytes,
        })
    }

    fn set_rows(&self, tensor: &mut CudaTensor, rows: usize) -> Result<()> {
        if rows > tensor.capacity {
            return Err(Error::Bug(format!(
                "{rows} rows in a tensor for {}",
                tensor.capacity
            )));
        }
        tensor.rows = rows;
        tensor.change();
        Ok(())
    }

    fn shape(&self, tensor: &CudaTensor) -> (usize, usize) {
        (tensor.rows, tensor.width)
    }

    fn upload(&self, tensor: &mut CudaTensor, first_row: usize, values: &[f32]) -> Result<()> {
        let start = first_row * tensor.width;
        if start + values.len() > tensor.rows * tensor.width {
            return Err(Error::Bug(format!(
                "{} values from row {first_row} on do not fit",
                values.len()
            )));
        }
        tensor.change();
        self.device()
            .upload(tensor.column(start), &encoded(tensor.kind, values))
    }

    fn download(&self, tensor: &CudaTensor) -> Result<Vec<f32>> {
        let mut bytes = vec![0; tensor.rows * tensor.width * tensor.kind.bytes()];
        self.device().download(tensor.at(), &mut bytes)?;
        Ok(decoded(tensor.kind, &bytes))
    }

    fn load_weight(&self, weight: &Weight) -> Result<CudaWeight> {
        let (rows, columns) = (weight.rows(), weight.cols());
        let int8 = weight.has_int8();
        // Parts of both kinds stand in one matrix: what is not int8 yet becomes it.
        let weight = &if int8 {
            weight.to_int8()
        } else {
            weight.clone()
        };
        let size = if int8 { 1 } else { self.kind.bytes() };
        let memory = self.device().alloc("weights", rows * columns * size)?;
        let mut scales = Vec::new();
        let mut loader = self
            .loader
            .lock()
            .expect("no thread panics with the loader");
        if loader.is_none() {
            let buffer = || {
                Ok((
                    self.device().alloc_pinned(LOAD_BUFFER)?,
                    self.device().event()?,
                ))
            };
            *loader = Some(Loader {
                buffers: [buffer()?, buffer()?],
                turn: 0,
            });
        }
        let loader = loader.as_mut().expect("just made");
        let mut to = memory.address();
        for part in weight.parts() {
            let elements = part.rows() * part.cols();
            match (self.kind, part.data()) {
                (Type::Bf16, WeightData::Bf16(bytes)) | (Type::F32, WeightData::F32(bytes)) => {
                    self.stream(loader, to, bytes)?;
                }
                (Type::Bf16, WeightData::OwnedBf16(values)) => {
                    self.stream(loader, to, cuda_core::bytemuck::cast_slice(values))?;
                }
                (Type::F32, WeightData::OwnedF32(values)) => {
                    self.stream(loader, to, cuda_core::bytemuck::cast_slice(values))?;
                }
                (_, data) if let Some((values, part_scales)) = data.int8() => {
                    scales.extend_from_slice(part_scales);
                    self.stream(loader, to, cuda_core::bytemuck::cast_slice(values))?;
                }
                _ => {
                    // Some rows at a time: widening is exact, and rounding is what the type asks for.
                    let some = (LOAD_BUFFER / 4 / part.cols().max(1)).clamp(1, part.rows().max(1));
                    let mut values = vec![0.0; some * part.cols()];
                    for first in (0..part.rows()).step_by(some) {
                        let count = some.min(part.rows() - first);
                        for (i, row) in values
                            .chunks_mut(part.cols().max(1))
                            .take(count)
                            .enumerate()
                        {
                            part.row_f32(first + i, row);
                        }
                        let to = to + (first * part.cols() * self.kind.bytes()) as Address;
                        self.stream(
                            loader,
                            to,
                            &encoded(self.kind, &values[..count * part.cols()]),
                        )?;
                    }
                }
            }
            to += (elements * size) as Address;
        }
        let scales = match int8 {
            true => {
                self.int8.store(true, Ordering::Relaxed);
                Some(Arc::new(self.floats("scales of a weight", &scales)?))
            }
            false => None,
        };
        Ok(CudaWeight {
            memory: Arc::new(memory),
            scales,
            rows,
            columns,
        })
    }

    fn load_rope(&self, table: &RopeTable) -> Result<CudaRope> {
        let query_scale = table
            .query_scale
            .as_ref()
            .map(|scale| self.floats("RoPE", scale))
            .transpose()?;
        let (cos, sin) = (
            self.floats("RoPE", &table.cos)?,
            self.floats("RoPE", &table.sin)?,
        );
        Ok(CudaRope {
            cos,
            sin,
            query_scale,
            pairs: table.pairs,
        })
    }

    fn alloc_pages(
        &self,
        layout: &KvLayout,
        smoothing: Option<&[f32]>,
        pages: usize,
    ) -> Result<CudaPages> {
        let size = match layout.element {
            KvElement::Int8 => 1,
            KvElement::Compute(kind) if kind == self.compute => self.kind.bytes(),
            KvElement::Compute(kind) => {
                return Err(Error::usage(format!(
                    "a cache of {kind:?} is not supported on the GPU with activations of {:?}",
                    self.compute
                )));
            }
        };
        let vectors = pages * layout.page_size * layout.kv_heads;
        let values = vectors * layout.head_dim;
        if values > i32::MAX as usize {
            let most = i32::MAX as usize / (layout.page_size * layout.kv_heads * layout.head_dim);
            return Err(Error::usage(format!(
                "{pages} pages of a layer are more than the {most} a GPU kernel can address"
            )));
        }
        let zeroed = |bytes: usize| {
            let memory = self.device().alloc("the KV cache", bytes)?;
            self.device().queue_fill(memory.address(), 0, bytes)?;
            Ok(memory)
        };
        let int8 = match layout.element {
            KvElement::Compute(_) => None,
            KvElement::Int8 => {
                let width = layout.kv_heads * layout.head_dim;
                let ones = vec![1.0; width];
                let factors = smoothing.unwrap_or(&ones);
                if factors.len() != width {
                    return Err(Error::Bug(format!(
                        "{} smoothing factors of a layer of {width} channels",
                        factors.len()
                    )));
                }
                Some(Int8Pages {
                    key_scales: zeroed(vectors * 4)?,
                    value_scales: zeroed(vectors * 4)?,
                    factors: self.floats("smoothing factors", factors)?,
                })
            }
        };
        Ok(CudaPages {
            layout: *layout,
            pages,
            keys: zeroed(values * size)?,
            values: zeroed(values * size)?,
            int8,
        })
    }

    fn copy_pages(&self, pages: &mut CudaPages, copies: &[(u32, u32)]) -> Result<()> {
        let vectors = pages.layout.page_size * pages.layout.kv_heads;
        let bytes = vectors * pages.layout.head_dim * self.page_value_bytes(pages);
        let scales = pages.int8.as_ref();
        let scales = scales.map(|int8| [&int8.key_scales, &int8.value_scales]);
        let pools = [(&pages.keys, bytes), (&pages.values, bytes)].into_iter();
        let scales = scales
            .into_iter()
            .flatten()
            .map(|memory| (memory, vectors * 4));
        for (memory, bytes) in pools.chain(scales) {
            let place = |page: u32| memory.address() + (page as usize * bytes) as Address;
            for &(from, to) in copies {
                self.device().queue_copy(place(to), place(from), bytes)?;
            }
        }
        Ok(())
    }

    fn read_slot(
        &self,
        pages: &CudaPages,
        page: usize,
        kv_head: usize,
        offset: usize,
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        let KvLayout {
            page_size,
            kv_heads,
            head_dim,
            ..
        } = pages.layout;
        let vector = (page * kv_heads + kv_head) * page_size + offset;
        let download = |memory: &Memory, first: usize, bytes: usize| {
            let mut read = vec![0; bytes];
            self.device()
                .download(memory.address() + first as Address, &mut read)?;
            Ok::<_, Error>(read)
        };
        let Some(int8) = &pages.int8 else {
            let bytes = head_dim * self.kind.bytes();
            let read = |memory: &Memory| {
                let read = download(memory, vector * bytes, bytes)?;
                Ok::<_, Error>(decoded(self.kind, &read))
            };
            return Ok((read(&pages.keys)?, read(&pages.values)?));
        };
        let floats = |memory: &Memory, first: usize, count: usize| {
            let read = download(memory, first * 4, count * 4)?;
            Ok::<_, Error>(decoded(Type::F32, &read))
        };
        let worth = |byte: u8, scale: f32| scale * f32::from(byte.cast_signed());
        let key_scale = floats(&int8.key_scales, vector, 1)?[0];
        let factors = floats(&int8.factors, kv_head * head_dim, head_dim)?;
        let keys = download(&pages.keys, vector * head_dim, head_dim)?;
        let keys = keys.iter().zip(factors);
        let keys = keys.map(|(&byte, factor)| factor * worth(byte, key_scale));
        let value_scale = floats(&int8.value_scales, vector, 1)?[0];
        let values = download(&pages.values, vector * head_dim, head_dim)?;
        let values = values.iter().map(|&byte| worth(byte, value_scale));
        Ok((keys.collect(), values.collect()))
    }

    fn read_keys(&self, pages: &CudaPages, layout: &KvLayout, page: usize) -> Result<Vec<f32>> {
        let (heads, slots) = (layout.kv_heads, layout.page_size);
        if pages.int8.is_none() {
            let mut bytes = vec![0; heads * slots * layout.head_dim * self.kind.bytes()];
            let first = (page * bytes.len()) as Address;
            self.device()
                .download(pages.keys.address() + first, &mut bytes)?;
            return Ok(decoded(self.kind, &bytes));
        }
        let mut keys = Vec::new();
        for (head, offset) in (0..heads).flat_map(|head| (0..slots).map(move |slot| (head, slot))) {
            keys.extend(self.read_slot(pages, page, head, offset)?.0);
        }
        Ok(keys)
    }

    fn alloc_step(&self, rows: usize, spans: usize, table_width: usize) -> Result<CudaStep> {
        let most = Offsets {
            rows,
            spans,
            table_width,
        };
        let device = self.device();
        Ok(CudaStep {
            arrays: device.alloc("a step's layout", most.words() * 4)?,
            most,
            offsets: most,
            rows: 0,
            span_rows: vec![0],
            spans: Vec::new(),
            wanted: 0,
            drafts: (0, 0),
            staged: Mutex::new(Staged {
                words: device.alloc_pinned(most.words() * 4)?,
                copied: device.event()?,
                group: HeadGroup::default(),
                counts: [0; 3],
            }),
            tokens: device.alloc("a step's tokens", rows * 4)?,
            read: device.alloc_pinned(rows * 4)?,
            sampling: None,
            lists: None,
            sampled: Samples::default(),
            done: device.event()?,
        })
    }

    fn prepare(
        &self,
        step: &mut CudaStep,
        layout: &StepLayout,
        previous: Option<&CudaStep>,
    ) -> Result<()> {
        let most = step.most;
        let (rows, spans) = (layout.rows(), layout.spans());
        if rows > most.rows || spans > most.spans || layout.table_width > most.table_width {
            return Err(Error::Bug(format!(
                "a step of {rows} rows, {spans} spans and tables of {} in one for {}, {} and {}",
                layout.table_width, most.rows, most.spans, most.table_width
            )));
        }
        let offsets = Offsets {
            rows,
            spans,
            ..most
        };
        step.offsets = offsets;
        step.rows = rows;
        step.span_rows = layout.span_rows.iter().map(|&row| row as usize).collect();
        step.spans = (0..spans)
            .map(|span| {
                let start = layout
                    .positions
                    .get(layout.span(span).start)
                    .map_or(0, |&position| position as usize);
                [
                    start,
                    start + layout.span(span).len(),
                    layout.first_pages[span] as usize,
                ]
            })
            .collect();
        *self.prepared() = Recorded { rows, spans };
        step.wanted = layout.wanted.len();
        step.drafts = (layout.previous.len(), layout.drafts.len());
        step.sampled = Samples::default();

        let mut guard = step.staged.lock().expect("no thread panics with a step");
        let staged = &mut *guard;
        // The copy of what was staged before may still be on its way.
        staged.copied.wait()?;
        let words = staged.words.words();
        let mut put = |array: (usize, usize), values: &mut dyn Iterator<Item = u32>| {
            let at = offsets.at(array);
            for (word, value) in words[at..].iter_mut().zip(values) {
                *word = value.cast_signed();
            }
        };
        put(Offsets::IDS, &mut layout.ids.iter().copied());
        put(Offsets::POSITIONS, &mut layout.positions.iter().copied());
        put(Offsets::SLOTS, &mut layout.slots.iter().copied());
        put(Offsets::WANTED, &mut layout.wanted.iter().copied());
        let taken = || layout.previous.iter().chain(&layout.drafts);
        put(Offsets::TAKE_ROWS, &mut taken().map(|taken| taken.0));
        put(Offsets::TAKE_INDICES, &mut taken().map(|taken| taken.1));
        let meta = |span: usize| {
            let [start, end, first_page] = step.spans[span];
            (start..end)
                .flat_map(move |position| [position as u32, end as u32, first_page as u32, 0])
        };
        put(Offsets::ROW_META, &mut (0..spans).flat_map(meta));
        let tables = &mut words[offsets.tables()..];
        for span in 0..spans {
            let table = &mut tables[span * offsets.table_width..][..offsets.table_width];
            table.fill(0);
            for (word, &page) in table.iter_mut().zip(layout.table(span)) {
                *word = page.cast_signed();
            }
        }
        let group = if staged.group.queries == 0 {
            *self.group()
        } else {
            staged.group
        };
        if group.queries != 0 {
            step.fill_groups(self.kind, staged, group);
        }

        let device = self.device();
        let bytes = offsets.words() * 4;
        device.queue_upload(step.arrays.address(), &staged.words, 0, bytes)?;
        staged.copied.record()?;
        if !layout.previous.is_empty() {
            let Some(previous) = previous else {
                return Err(Error::Bug("a row awaits the token of no step".to_owned()));
            };
            let (to, from) = (
                step.address(Offsets::TAKE_ROWS),
                step.address(Offsets::TAKE_INDICES),
            );
            let ids = step.address(Offsets::IDS);
            self.ops.take_tokens(
                ids,
                previous.tokens.address(),
                to,
                from,
                layout.previous.len(),
            )?;
        }
        Ok(())
    }

    fn take_drafts(&self, step: &mut CudaStep, from: &CudaStep) -> Result<()> {
        let (first, count) = step.drafts;
        let at = |array| step.address(array) + (4 * first) as Address;
        self.ops.take_tokens(
            step.address(Offsets::IDS),
            from.tokens.address(),
            at(Offsets::TAKE_ROWS),
            at(Offsets::TAKE_INDICES),
            count,
        )
    }

    fn embed(&self, out: &mut CudaTensor, table: &CudaWeight, step: &CudaStep) -> Result<()> {
        out.like(step.rows, table.columns)?;
        if table.scales.is_some() {
            return Err(Error::Bug("an int8 embedding table".to_owned()));
        }
        let shape = [step.rows, table.rows, table.columns];
        let ids = step.address(Offsets::IDS);
        self.ops.gather(
            out.at(),
            table.memory.address(),
            ids,
            [self.kind, out.kind],
            shape,
        )
    }

    fn rms_norm(
        &self,
        out: &mut CudaTensor,
        x: &CudaTensor,
        weight: &CudaTensor,
        eps: f32,
    ) -> Result<()> {
        out.like(x.rows, x.width)?;
        self.expect(out, "a norm's output")?;
        let shape = [x.rows, x.width];
        self.ops.rms_norm(
            out.at(),
            x.at(),
            None,
            weight.at(),
            [x.kind, out.kind],
            shape,
            eps,
        )
    }

    fn add(&self, x: &mut CudaTensor, delta: &CudaTensor) -> Result<()> {
        x.like(delta.rows, delta.width)?;
        self.ops
            .add(x.at(), delta.at(), [x.kind, delta.kind], x.rows * x.width)
    }

    fn linear(
        &self,
        out: &mut CudaTensor,
        weight: &CudaWeight,
        bias: Option<&CudaTensor>,
        x: &CudaTensor,
    ) -> Result<()> {
        self.linear_then(out, weight, bias, x, Then::Nothing)
    }

    fn head_norm(&self, x: &mut CudaTensor, weight: &CudaTensor, eps: f32) -> Result<()> {
        let shape = [x.rows * x.width / weight.width.max(1), weight.width];
        x.change();
        self.ops.rms_norm(
            x.at(),
            x.at(),
            None,
            weight.at(),
            [x.kind, x.kind],
            shape,
            eps,
        )
    }

    fn rope(
        &self,
        x: &mut CudaTensor,
        rope: &CudaRope,
        step: &CudaStep,
        queries: bool,
    ) -> Result<()> {
        self.expect(x, "what is rotated")?;
        x.change();
        let head_dim = 2 * rope.pairs;
        let inputs = rope.inputs(queries);
        self.ops.rotate(
            x.at(),
            &inputs,
            &step.step_arrays(),
            self.kind,
            [x.width / head_dim.max(1), head_dim],
        )
    }

    fn store_kv(
        &self,
        pages: &mut CudaPages,
        rows: &KvRows<CudaTensor>,
        step: &CudaStep,
    ) -> Result<()> {
        let KvLayout {
            page_size,
            kv_heads,
            head_dim,
            ..
        } = pages.layout;
        let pools = pages.pools();
        let factors = pools.int8().then_some(pools.factors);
        for (pool, factors, x) in [
            (pools.keys, factors, &rows.keys),
            (pools.values, None, &rows.values),
        ] {
            x.like(step.rows, kv_heads * head_dim)?;
            self.expect(x, "what is stored")?;
            let shape = [kv_heads, head_dim, page_size];
            let step = step.step_arrays();
            self.ops
                .store(pool, factors, x.at(), &step, self.kind, shape)?;
        }
        Ok(())
    }

    fn attention(
        &self,
        out: &mut CudaTensor,
        queries: &CudaTensor,
        pages: &CudaPages,
        step: &CudaStep,
        shape: &AttentionShape,
    ) -> Result<()> {
        let AttentionShape {
            heads,
            kv_heads,
            head_dim,
            scale,
            mask,
        } = *shape;
        out.like(step.rows, heads * head_dim)?;
        queries.like(step.rows, heads * head_dim)?;
        self.expect(queries, "queries")?;
        if step.rows == 0 {
            return Ok(());
        }
        let queries_together = heads / kv_heads;
        let group = HeadGroup {
            queries: queries_together,
            head_dim,
            int8: pages.pools().int8(),
        };
        let staged = self.groups(step, group)?;
        let recording = self.recording.load(Ordering::Relaxed);
        let page_size = pages.layout.page_size;
        let tiles = ops::attention_tiles(self.kind, group);
        // A recording may be replayed with its rows spread over its spans in another way: at worst each span
        // ends with a run that is not full.
        let spans = step.spans.len();
        let counts: [usize; 3] = std::array::from_fn(|i| {
            let most = (tiles[i].queries / queries_together).max(1);
            let count = if recording {
                spans + (step.rows - spans.min(step.rows)) / most
            } else {
                staged.counts[i]
            };
            count.min(step.rows)
        });
        drop(staged);
        let blocks = if recording {
            (step.offsets.table_width * page_size).div_ceil(KEY_BLOCK)
        } else {
            let blocks = |&[_, end, first]: &[usize; 3]| {
                end.div_ceil(KEY_BLOCK) - first * page_size / KEY_BLOCK
            };
            step.spans.iter().map(blocks).max().unwrap_or(0)
        };
        let (causal, window) = match mask {
            Mask::Causal => (true, EVERYTHING),
            Mask::Window(window) => (true, window as usize),
            Mask::BlockVisible => (false, EVERYTHING),
            Mask::BlockWindow(window) => (false, window as usize),
        };
        let plan = AttentionPlan {
            heads,
            kv_heads,
            head_dim,
            page_size,
            scale,
            causal,
            window,
            pages: pages.pages,
            blocks,
            block_slots: blocks + 1,
        };
        let splits = |rows| Ops::split_scratch(rows, heads, head_dim, blocks + 1) <= SPLIT_SCRATCH;
        let spans = Spans {
            first_rows: &step.span_rows,
            together: queries_together,
            head_dim,
            recording,
        };
        let fills = counts[2] * kv_heads >= self.device().info().multiprocessors as usize;
        for pass in spans.passes(&tiles, counts, fills, &splits) {
            let first = (pass.groups.start * 8 * 4) as Address;
            let groups = Groups {
                address: step.address(Offsets::GROUPS[pass.list]) + first,
                count: pass.groups.len(),
                tile: tiles[pass.list],
            };
            let arrays = StepArrays {
                rows: pass.rows,
                ..step.step_arrays()
            };
            let (out, queries, pools) = (out.at(), queries.at(), pages.pools());
            let whole = pass.whole;
            self.ops.attention(
                out, queries, &pools, &arrays, &groups, &plan, self.kind, whole,
            )?;
        }
        Ok(())
    }

    fn activation(
        &self,
        out: &mut CudaTensor,
        x: &CudaTensor,
        activation: &Activation,
    ) -> Result<()> {
        out.like(x.rows, activation.output_width(x.width))?;
        expect_f32(x, "an activation's input")?;
        match activation {
            Activation::SiluGated => {
                self.ops
                    .silu_gated(out.at(), x.at(), self.kind, [x.rows, out.width])
            }
            Activation::Xielu(xielu) => {
                let scalars = [xielu.alpha_p, xielu.alpha_n, xielu.beta, xielu.eps];
                self.ops
                    .xielu(out.at(), x.at(), self.kind, x.rows * x.width, scalars)
            }
        }
    }

    fn copy_columns(
        &self,
        out: &mut CudaTensor,
        to: usize,
        x: &CudaTensor,
        from: usize,
        columns: usize,
    ) -> Result<()> {
        if out.rows != x.rows || to + columns > out.width || from + columns > x.width {
            return Err(Error::Bug(format!(
                "{columns} columns from {from} of {} to {to} of {}",
                x.width, out.width
            )));
        }
        out.change();
        let (target, source) = ((out.column(to), out.width), (x.column(from), x.width));
        self.ops
            .copy_columns(target, source, [x.kind, out.kind], [x.rows, columns])
    }

    fn gather_wanted(&self, out: &mut CudaTensor, x: &CudaTensor, step: &CudaStep) -> Result<()> {
        out.like(step.wanted, x.width)?;
        let shape = [step.wanted, x.rows, x.width];
        self.ops.gather(
            out.at(),
            x.at(),
            step.address(Offsets::WANTED),
            [x.kind, out.kind],
            shape,
        )
    }

    fn sample(
        &self,
        step: &mut CudaStep,
        logits: &CudaTensor,
        rows: &[Option<RowSampler>],
    ) -> Result<()> {
        if rows.len() > logits.rows {
            return Err(Error::Bug(format!(
                "{} rows to sample of {} rows of logits",
                rows.len(),
                logits.rows
            )));
        }
        step.sampled = Samples::default();
        let plain = |sampler: &Option<RowSampler>| {
            sampler
                .as_ref()
                .is_some_and(|s| is_plain_argmax(s, logits.width))
        };
        let width = logits.width;
        let mut samples = Samples {
            width,
            ..Samples::default()
        };
        let samplers = rows.iter().flatten();
        let sampled = samplers.map(|s| (s.vocabulary.min(width), s.draw == Draw::Draft));
        samples.rows.extend(sampled);
        let tokens = step.tokens.address();
        if rows.iter().all(plain) {
            let shape = [rows.len(), logits.width];
            self.ops.argmax(tokens, logits.at(), shape)?;
        } else {
            let plan = SamplePlan::new(rows, width);
            if plan.rows() > 0 {
                let words = self.stage(&mut step.sampling, &plan)?;
                let lists = self.room_for_lists(&mut step.lists, &plan, width)?;
                let shape = [logits.rows, width];
                let to = [tokens, lists];
                self.ops.sample(to, logits.at(), shape, &plan, words)?;
            }
            samples.lists = plan.lists().to_vec();
            for &(row, place) in plan.host() {
                let mut bytes = vec![0; logits.width * logits.kind.bytes()];
                let from = logits.column(row * logits.width);
                self.device().download(from, &mut bytes)?;
                let Some(sampler) = &rows[row] else {
                    return Err(Error::Bug(format!("row {row} has no sampler")));
                };
                let sampled = sampler.sample(&decoded(logits.kind, &bytes))?;
                let to = tokens + (place * 4) as Address;
                self.device().upload(to, &sampled.token.to_le_bytes())?;
                samples.host.push((place, sampled));
            }
        }
        self.device()
            .queue_download(&step.read, 0, tokens, samples.rows.len() * 4)?;
        step.done.record()?;
        step.sampled = samples;
        Ok(())
    }

    fn read_samples(&self, step: &CudaStep) -> Result<Vec<Sampled>> {
        let samples = &step.sampled;
        step.done.wait()?;
        let mut host = samples.host.iter().peekable();
        let mut listed = Vec::new();
        if let Some(lists) = step.lists.as_ref().filter(|_| !samples.lists.is_empty()) {
            let count = samples.lists.len();
            listed = self.ops.read_lists(lists.address(), count, samples.width)?;
        }
        let mut listed = samples.lists.iter().zip(listed).peekable();
        let read = step.read.read_words().iter().zip(&samples.rows).enumerate();
        let sampled = read.map(|(place, (&code, &(limit, draft)))| {
            if let Some((_, sampled)) = host.next_if(|sampled| sampled.0 == place) {
                return Ok(sampled.clone());
            }
            let from = listed.next_if(|&(&listed, _)| listed == place);
            let token = sampling::token(code, limit)?;
            // The largest logit is drawn from itself alone.
            let from = match from {
                None if draft => Some(Distribution::one_hot(token)),
                from => from.map(|(_, distribution)| distribution),
            };
            Ok(Sampled {
                token,
                logprob: None,
                top: Vec::new(),
                drawn_from: from.map(Arc::new),
            })
        });
        sampled.collect()
    }

    fn add_rms_norm(
        &self,
        x: &mut CudaTensor,
        out: &mut CudaTensor,
        delta: &CudaTensor,
        weight: &CudaTensor,
        eps: f32,
    ) -> Result<()> {
        if delta.kind != x.kind {
            self.add(x, delta)?;
            return self.rms_norm(out, x, weight, eps);
        }
        out.like(x.rows, x.width)?;
        x.like(delta.rows, delta.width)?;
        let shape = [x.rows, x.width];
        self.ops.rms_norm(
            out.at(),
            x.at(),
            Some(delta.at().into()),
            weight.at(),
            [x.kind, out.kind],
            shape,
            eps,
        )
    }

    fn linear_add_rms_norm(
        &self,
        x: &mut CudaTensor,
        out: &mut CudaTensor,
        delta: &mut CudaTensor,
        (weight, bias): (&CudaWeight, Option<&CudaTensor>),
        y: &CudaTensor,
        norm: &CudaTensor,
        eps: f32,
    ) -> Result<()> {
        // Splits that stay apart could not be summed up over devices: there is one.
        let mut apart = None;
        if (x.kind, delta.kind) == (Type::F32, Type::F32) {
            x.like(y.rows, weight.rows)?;
            let (shape, y) = self.linear_of(delta.kind, weight, y)?;
            let bias = bias.map(CudaTensor::at);
            apart = self.ops.linear_apart(y, weight.at(), bias, &shape)?;
        }
        let Some(apart) = apart else {
            self.linear(delta, weight, bias, y)?;
            self.all_reduce(delta)?;
            return self.add_rms_norm(x, out, delta, norm, eps);
        };
        out.like(x.rows, x.width)?;
        self.ops.rms_norm(
            out.at(),
            x.at(),
            Some(apart),
            norm.at(),
            [x.kind, out.kind],
            [x.rows, x.width],
            eps,
        )
    }

    fn qk_norm_rope_store(
        &self,
        queries: &mut CudaTensor,
        pages: &mut CudaPages,
        _scratch: &mut HeadScratch<CudaTensor>,
        qkv: &CudaTensor,
        norms: QkNorms<'_, Self>,
        rope: Option<&CudaRope>,
        step: &CudaStep,
        shape: &AttentionShape,
    ) -> Result<()> {
        let AttentionShape {
            heads,
            kv_heads,
            head_dim,
            ..
        } = *shape;
        qkv.like(step.rows, (heads + 2 * kv_heads) * head_dim)?;
        expect_f32(qkv, "a projection")?;
        self.heads(queries, pages, qkv.at().into(), &norms, rope, step, shape)
    }

    fn linear_qk_norm_rope_store(
        &self,
        queries: &mut CudaTensor,
        pages: &mut CudaPages,
        scratch: &mut HeadScratch<CudaTensor>,
        qkv: &mut CudaTensor,
        (weight, bias): (&CudaWeight, Option<&CudaTensor>),
        x: &CudaTensor,
        norms: QkNorms<'_, Self>,
        rope: Option<&CudaRope>,
        step: &CudaStep,
        shape: &AttentionShape,
    ) -> Result<()> {
        let (linear, operand) = self.linear_of(qkv.kind, weight, x)?;
        // Splits of integers have their scales to be multiplied by: their sums are made where they are.
        if !linear.int8 && qkv.kind == Type::F32 {
            let bias = bias.map(CudaTensor::at);
            let apart = self.ops.linear_apart(operand, weight.at(), bias, &linear)?;
            if let Some(apart) = apart {
                qkv.like(x.rows, weight.rows)?;
                return self.heads(queries, pages, apart, &norms, rope, step, shape);
            }
        }
        self.linear(qkv, weight, bias, x)?;
        self.qk_norm_rope_store(queries, pages, scratch, qkv, norms, rope, step, shape)
    }

    fn linear_activation(
        &self,
        out: &mut CudaTensor,
        _wide: &mut CudaTensor,
        weight: &CudaWeight,
        bias: Option<&CudaTensor>,
        x: &CudaTensor,
        activation: &Activation,
    ) -> Result<()> {
        let then = match activation {
            Activation::SiluGated => Then::GatedSilu,
            Activation::Xielu(xielu) => {
                Then::Xielu([xielu.alpha_p, xielu.alpha_n, xielu.beta, xielu.eps])
            }
        };
        self.linear_then(out, weight, bias, x, then)
    }

    fn supports_graphs(&self) -> bool {
        true
    }

    fn capture(&self, body: &mut dyn FnMut() -> Result<()>) -> Result<CudaGraph> {
        let step = *self.prepared();
        self.recording.store(true, Ordering::Relaxed);
        let recording = self.device().record(body);
        self.recording.store(false, Ordering::Relaxed);
        Ok(CudaGraph {
            recording: recording?,
            _ops: self.ops.clone(),
            step,
        })
    }

    fn replay(&self, graph: &CudaGraph) -> Result<()> {
        let (now, then) = (*self.prepared(), graph.step);
        if now.rows != then.rows || now.spans > then.spans {
            return Err(Error::Bug(format!(
                "a recording of {then:?} was replayed for {now:?}"
            )));
        }
        self.device().replay(&graph.recording)
    }

    fn time(&self, body: &mut dyn FnMut() -> Result<()>) -> Result<Duration> {
        self.device().time(body)
    }
}

impl CudaRope {
    fn inputs(&self, queries: bool) -> HeadInputs {
        let query_scale = self
            .query_scale
            .as_ref()
            .filter(|_| queries)
            .map_or(0, Memory::address);
        HeadInputs {
            cos: self.cos.address(),
            sin: self.sin.address(),
            query_scale,
            ..HeadInputs::default()
        }
    }
}

/// Whether a row asks for nothing but the largest of all `width` logits.
fn is_plain_argmax(sampler: &RowSampler, width: usize) -> bool {
    let params = &sampler.params;
    params.temperature == 0.0
        && !params.has_penalties()
        && params.logit_bias.is_empty()
        && sampler.counts.is_none()
        && sampler.mask.is_none()
        && sampler.top_logprobs.is_none()
        && sampler.vocabulary >= width
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reserve_holds_all_scratch_that_attention_may_take() {
        // 64 sequences of up to 131072 positions, 32 heads of 128.
        let largest = Ops::split_scratch(64, 32, 128, 131_072 / KEY_BLOCK + 1);
        assert!(largest > SPLIT_SCRATCH);
        let reserve = scratch_reserve(64, 32, 128, 131_072);
        assert_eq!(reserve, 2 * largest.next_power_of_two() as u64);
        // A prefill takes up to so much whatever the length.
        assert_eq!(scratch_reserve(1, 1, 64, 1), 2 * SPLIT_SCRATCH as u64);
        assert_eq!(scratch_reserve(1 << 48, 64, 128, 1 << 48), u64::MAX);
    }
}
