//! How each kernel is launched: the tile for the shape at hand, the grid, the arguments. An op takes device
//! addresses and sizes, checks nothing that its caller knows, and queues its launches in order.
//!
//! Tiles may depend on the number of rows, since sums do not (see `kernels/linear.rs`); what a sum's order
//! does depend on, [`splits`] and the 256-key block, depends on shapes alone.

use std::sync::{Arc, Mutex, MutexGuard};

use tileinfer::Result;

use crate::driver::{Address, Argument, Device, Event, Memory};
use crate::kernels::{self, Type, Variant};
use crate::sampling;
use crate::store::{KernelOptions, KernelStore};

/// Slots of a page that attention loads as one block; pages of other sizes are gathered, slowly.
pub const PAGE: usize = 64;

/// The largest row a norm takes.
pub const WIDEST_NORM: usize = 16384;

/// Most tiles of 64 weight rows, times splits, that a weight is cut into.
const MOST_SPLIT_TILES: usize = 192;

/// Most rows of a step whose layers leave sums of splits in memory.
const MOST_SPLIT_ROWS: usize = 512;

/// Room for sums of splits (see [`splits`]): so many tiles of 64 weight rows for so many rows of a step, or planes of them.
const PARTIAL_BYTES: usize = MOST_SPLIT_TILES * 64 * MOST_SPLIT_ROWS * 4;

/// Tiles of no fewer than 64 rows, or all rows in one.
const TICKETS: usize = MOST_SPLIT_TILES * MOST_SPLIT_ROWS / 64;

/// Multiprocessors of the device that tiles were chosen on.
const MULTIPROCESSORS: usize = 132;

/// Blocks that keep the device busy while attention waits for pages.
const ATTENTION_BLOCKS: usize = 528;

/// An open device with its kernels and the scratch they share.
#[derive(Debug)]
pub struct Ops {
    device: Arc<Device>,
    kernels: KernelStore,
    partials: Memory,
    tickets: Memory,
    sampling_tickets: Memory,
    /// Grown when a step needs more; older ones are kept, since a recording may use them.
    scratch: Mutex<Vec<Memory>>,
    /// The kernels of [`Ops::time_kernels`] so far.
    timed: Mutex<Option<Vec<(String, Event, Event)>>>,
}

/// How a linear layer is computed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LinearPlan {
    /// The kernel.
    pub variant: Variant,
    /// Its tile blocks.
    pub grid: [usize; 3],
    /// Columns of the weight a split.
    pub split_columns: usize,
    /// Whether the sums of splits stay apart, a plane each, for what comes next.
    pub apart: bool,
}

/// What is done to a layer's sums before they are rounded to the output's type.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub enum Then {
    /// Nothing.
    #[default]
    Nothing,
    /// The weight's first half gives gates, the second what they are for: `silu(gate) * up`.
    GatedSilu,
    /// xIELU with alpha_p, alpha_n, beta, eps.
    Xielu([f32; 4]),
}

impl Then {
    /// Weight rows an output.
    pub fn halves(self) -> usize {
        match self {
            Then::GatedSilu => 2,
            Then::Nothing | Then::Xielu(_) => 1,
        }
    }

    /// `ACT`, `HALVES` and `WIDTH` of a tile of so many weight rows.
    fn sizes(self, rows: i32) -> [i32; 3] {
        match self {
            Then::Nothing => [0, 1, rows],
            Then::GatedSilu => [1, 2, rows / 2],
            Then::Xielu(_) => [2, 1, rows],
        }
    }
}

/// A layer's output, or its splits still apart and its bias.
#[derive(Debug, Clone, Copy)]
pub struct Sums {
    /// One f32 plane `[rows, width]` a split.
    pub values: Address,
    /// Splits.
    pub splits: usize,
    /// Of an int8 weight, whose planes are pairs of integers, over `hi` and over `lo`: scales of activations and of weight
    /// rows.
    pub scales: Option<[Address; 2]>,
    /// What else is added.
    pub bias: Option<Address>,
}

impl From<Address> for Sums {
    fn from(values: Address) -> Self {
        Sums {
            values,
            splits: 1,
            scales: None,
            bias: None,
        }
    }
}

/// A linear layer: types, rows, weight rows, columns, and what follows.
#[derive(Debug, Clone, Copy)]
pub struct LinearShape {
    /// Of activations and, unless it is int8, of the weight.
    pub kind: Type,
    /// Of the output.
    pub out: Type,
    /// Rows of the step.
    pub rows: usize,
    /// Rows of the weight.
    pub n: usize,
    /// Its columns.
    pub k: usize,
    /// Whether the weight is int8.
    pub int8: bool,
    /// What follows the sum.
    pub then: Then,
}

impl LinearShape {
    /// `rows` rows of a weight `[n, k]`, with nothing after.
    pub fn new([kind, out]: [Type; 2], [rows, n, k]: [usize; 3]) -> Self {
        LinearShape {
            kind,
            out,
            rows,
            n,
            k,
            int8: false,
            then: Then::Nothing,
        }
    }

    /// The same with an int8 weight, or not.
    pub fn int8(mut self, int8: bool) -> Self {
        self.int8 = int8;
        self
    }

    /// The same with something after.
    pub fn then(mut self, then: Then) -> Self {
        self.then = then;
        self
    }

    /// Whether rows of the weight and of the output begin at multiples of 16 bytes.
    pub fn aligned(&self) -> bool {
        let together = if self.int8 { 16 } else { 8 };
        (self.n / self.then.halves()).is_multiple_of(8) && self.k.is_multiple_of(together)
    }
}

/// The rows of a matrix on the device; where they are int8, with a scale each.
#[derive(Debug, Clone, Copy)]
pub struct Rows {
    /// The values.
    pub values: Address,
    /// The scales, or 0.
    pub scales: Address,
}

impl From<Address> for Rows {
    fn from(values: Address) -> Self {
        Rows { values, scales: 0 }
    }
}

/// Into how many runs of columns a weight `[n, k]` is cut, and how many columns a run has: the fewest that
/// give most multiprocessors of a large GPU a block, no run under 512. (More blocks lose: those of the next
/// layer, which fetch weights while they wait, take their places.) Of the shape and the type alone: it is part
/// of the weight's reduction tree.
pub fn splits(kind: Type, n: usize, k: usize) -> (usize, usize) {
    let tiles = n.div_ceil(64);
    let enough = |splits: &usize| tiles * splits >= 96 || 2 * splits > k / 512;
    let splits = match kind {
        Type::Bf16 => [1, 2, 4].into_iter().find(enough).unwrap_or(8),
        Type::F32 => 1,
    };
    let columns = k.div_ceil(splits).next_multiple_of(256);
    (k.div_ceil(columns).max(1), columns)
}

/// A plan by which few rows stream the weight: `tile` is weight rows, columns and tokens a block and how far
/// ahead they are loaded, `first` how many columns are fetched before the kernel waits for its activations, `hints`
/// warps a block and blocks a multiprocessor.
pub fn few_plan(shape: &LinearShape, tile: [i32; 4], first: i32, hints: (i32, i32)) -> LinearPlan {
    let kernel = if shape.int8 {
        &kernels::FEW_INT8
    } else {
        &kernels::LINEAR_FEW
    };
    let mut plan = linear_plan_of(kernel, shape, tile, hints);
    // Every split begins with a whole tile of them.
    let most = match plan.grid[2] {
        1 => first,
        _ => first.min(1 << plan.split_columns.trailing_zeros()),
    };
    plan.variant = plan.variant.and_size(most.max(tile[1]));
    plan
}

/// A plan by which many rows fill the tensor cores; `tile` and `hints` as for [`few_plan`].
pub fn many_plan(shape: &LinearShape, tile: [i32; 4], hints: (i32, i32)) -> LinearPlan {
    let kernel = if shape.int8 {
        &kernels::MANY_INT8
    } else {
        &kernels::LINEAR_MANY
    };
    linear_plan_of(kernel, shape, tile, hints)
}

fn linear_plan_of(
    kernel: &'static kernels::Kernel,
    shape: &LinearShape,
    tile: [i32; 4],
    hints: (i32, i32),
) -> LinearPlan {
    let LinearShape {
        kind, out, rows, n, ..
    } = *shape;
    let (splits, split_columns) = splits(kind, n, shape.k);
    let width = n / shape.then.halves();
    let then = shape.then.sizes(tile[0]);
    let many = [&kernels::LINEAR_MANY, &kernels::MANY_INT8]
        .iter()
        .any(|&other| std::ptr::eq(kernel, other));
    let mut sizes = [&tile[..], &then].concat();
    match (shape.int8, many) {
        (true, _) => sizes.push(2 * tile[2]),
        (false, true) => sizes.push(i32::from(splits > 1)),
        (false, false) => {}
    }
    LinearPlan {
        variant: Variant::new(kernel, &[kind, out], &sizes)
            .hints(hints.0, hints.1)
            .aligned(shape.aligned()),
        grid: [
            rows.div_ceil(tile[2] as usize),
            width.div_ceil(then[2] as usize),
            if many { 1 } else { splits },
        ],
        split_columns,
        apart: false,
    }
}

/// The plan for `rows` rows of a weight. Tiles from whole steps of models of 0.6 to 14 billion on an H200 (see the log).
pub fn linear_plan(shape: &LinearShape) -> LinearPlan {
    let rows = shape.rows;
    let (splits, columns) = splits(shape.kind, shape.n, shape.k);
    let blocks = shape.n.div_ceil(64) * splits;
    // A block a multiprocessor where that takes all of them at once, so that no one has two while another has none;
    // what its memory has room for beside the tiles on their way is fetched before the wait.
    let alone = blocks <= MULTIPROCESSORS;
    match (shape.kind, shape.int8) {
        // Odd sizes, a vocabulary of 32001 for example, are right and not tuned: a pack has few kernels for them.
        (_, true) if !shape.aligned() => match rows {
            ..=8 => few_plan(shape, [64, 256, 8, 4], 256, (4, 3)),
            9..=16 => few_plan(shape, [64, 256, 16, 2], 512, (4, 3)),
            17..=64 => few_plan(shape, [64, 128, 64, 4], 256, (4, 1)),
            _ => many_plan(shape, [256, 128, 64, 3], (8, 1)),
        },
        (Type::Bf16, false) if !shape.aligned() => match rows {
            ..=8 => few_plan(shape, [64, 128, 8, 3], 128, (4, 3)),
            9..=16 => few_plan(shape, [64, 128, 16, 3], 128, (4, 3)),
            17..=64 => few_plan(shape, [64, 128, 64, 4], 256, (4, 1)),
            65..=128 => few_plan(shape, [64, 128, 128, 3], 128, (4, 1)),
            _ => many_plan(shape, [256, 64, 64, 3], (8, 1)),
        },
        // A row is two rows of bytes.
        (_, true) => match rows {
            ..=8 if alone => {
                // Every split begins with a whole tile.
                let (wide, first) = match columns {
                    ..=2048 => (256, 1024),
                    _ if columns.is_multiple_of(1024) => (512, 1024),
                    _ => (256, 512),
                };
                few_plan(shape, [64, wide, 8, 3], first, (4, 1))
            }
            ..=8 => few_plan(shape, [64, 256, 8, 4], 256, (4, 3)),
            9..=16 if alone => few_plan(shape, [64, 256, 16, 3], 1024, (4, 1)),
            9..=16 => few_plan(shape, [64, 256, 16, 2], 512, (4, 3)),
            17..=32 => few_plan(shape, [64, 256, 32, 3], 256, (4, 2)),
            33..=64 => few_plan(shape, [64, 128, 64, 4], 256, (4, 1)),
            _ => many_plan(shape, [256, 128, 64, 3], (8, 1)),
        },
        // One tile for all: plain multiplies and adds, whose order is the compiler's choice a tile.
        (Type::F32, false) => few_plan(shape, [64, 32, 16, 3], 32, (4, 2)),
        (Type::Bf16, false) => match rows {
            ..=8 if alone => {
                let first = if columns < 4096 { 512 } else { 1024 };
                few_plan(shape, [64, 128, 8, 3], first, (4, 1))
            }
            ..=8 => match blocks {
                ..=264 => few_plan(shape, [64, 128, 8, 3], 128, (4, 3)),
                397..=528 => few_plan(shape, [64, 128, 8, 3], 512, (4, 2)),
                _ => few_plan(shape, [64, 128, 8, 2], 256, (4, 3)),
            },
            9..=16 if alone => few_plan(shape, [64, 128, 16, 3], 512, (4, 1)),
            9..=16 => few_plan(shape, [64, 128, 16, 3], 128, (4, 3)),
            17..=32 if alone => few_plan(shape, [64, 128, 32, 3], 256, (4, 1)),
            17..=32 => few_plan(shape, [64, 128, 32, 3], 128, (4, 2)),
            33..=64 => few_plan(shape, [64, 128, 64, 4], 256, (4, 1)),
            65..=128 => few_plan(shape, [64, 128, 128, 3], 128, (4, 1)),
            // Too few large tiles leave multiprocessors idle, rows that do not fill a tile cost as if they did.
            129..=256 if splits > 1 => many_plan(shape, [64, 128, 64, 3], (4, 2)),
            129..=192 => many_plan(shape, [128, 64, 64, 4], (4, 2)),
            193..=256 => many_plan(shape, [128, 64, 128, 4], (8, 1)),
            257..=320 => many_plan(shape, [256, 64, 64, 3], (8, 1)),
            // 4096 rows: 704 to 773 TFLOP/s.
            _ if rows.div_ceil(128) * shape.n.div_ceil(256) >= 96 => {
                many_plan(shape, [256, 64, 128, 4], (8, 1))
            }
            _ => many_plan(shape, [256, 64, 64, 3], (8, 1)),
        },
    }
}

/// The plan by which a weight's splits stay apart, into f32; nothing where it has none, where there are blocks enough
/// without, and for odd sizes of more than 128 rows, which are not tuned.
pub fn apart_plan(shape: &LinearShape) -> Option<LinearPlan> {
    let (splits, _) = splits(shape.kind, shape.n, shape.k);
    if splits == 1 || shape.then != Then::Nothing {
        return None;
    }
    let plan = linear_plan(shape);
    if plan.grid[2] > 1 {
        return Some(LinearPlan {
            apart: true,
            ..plan
        });
    }
    let mut plan = match shape.rows {
        // Integers can be added in any order: no splits.
        _ if shape.int8 || !shape.aligned() => return None,
        ..=192 => many_plan(shape, [128, 64, 64, 4], (4, 2)),
        193..=256 => many_plan(shape, [128, 64, 128, 4], (8, 1)),
        257..=MOST_SPLIT_ROWS => many_plan(shape, [256, 64, 128, 4], (8, 1)),
        _ => return None,
    };
    // The last size of `linear_many` says what becomes of splits.
    let last = plan.variant.size_count - 1;
    plan.variant.sizes[last] = 2;
    plan.grid[2] = splits;
    plan.apart = true;
    Some(plan)
}

/// The kernel that rounds rows of activations of `width`, so many of them.
pub fn rounding_variant(kind: Type, [rows, width]: [usize; 2]) -> Variant {
    let tile = width.next_power_of_two().max(64) as i32;
    // Rounding takes longer than looking for the largest number; many rows keep all multiprocessors busy anyway.
    let part = if rows <= 64 { 1024 } else { 4096 };
    Variant::new(
        &kernels::ROUND_ACTIVATIONS,
        &[kind],
        &[tile, tile.min(part)],
    )
    .hints((tile / 1024).clamp(4, 16), 2)
    .aligned(width.is_multiple_of(8))
}

/// The norm kernel from rows of type `stream` and of `width` to rows of `kind`; `planes` of [`Sums`] that it adds
/// first, `int8` if they are those of an int8 weight.
pub fn norm_variant(stream: Type, kind: Type, width: usize, planes: usize, int8: bool) -> Variant {
    let tile = width.next_power_of_two().clamp(64, WIDEST_NORM) as i32;
    let rows = (1024 / tile).max(1);
    let planes = match planes {
        0 => 0,
        planes => planes.next_power_of_two() as i32,
    };
    // No more than 16 numbers a thread, and all the shared memory there is: with more of one or less of the other the
    // compiler lays out rows otherwise, and adds them up in another order, where there are more planes.
    let warps = if tile < 1024 {
        4
    } else {
        (tile / 512).clamp(8, 16)
    };
    let sizes = [rows, tile, planes, int8.into()];
    Variant::new(&kernels::RMS_NORM, &[stream, kind], &sizes)
        .hints(warps, 1)
        .aligned(width.is_multiple_of(8))
}

/// The kernels that work on values one by one or a row at a time, in stretches of `STRETCH`.
pub fn stretch_variant(kernel: &'static kernels::Kernel, types: &[Type], width: usize) -> Variant {
    Variant::new(kernel, types, &[STRETCH as i32]).aligned(width.is_multiple_of(8))
}

/// Values a block of the elementwise kernels.
const STRETCH: usize = 1024;

/// Logits a block of the first step of argmax.
const ARGMAX_STRETCH: usize = 4096;

/// The kernels between the projection and attention, for heads of `head_dim`.
pub fn head_variant(
    kernel: &'static kernels::Kernel,
    kind: Type,
    head_dim: usize,
    int8: bool,
    planes: usize,
) -> Variant {
    let half = (head_dim / 2).next_power_of_two().max(8);
    let mut sizes = vec![HEADS as i32, half as i32];
    if !std::ptr::eq(kernel, &kernels::ROTATE) {
        sizes.push(i32::from(int8));
    }
    if std::ptr::eq(kernel, &kernels::SPLIT_NORM_ROPE_STORE) {
        sizes.push(planes.next_power_of_two() as i32);
    }
    Variant::new(kernel, &[kind], &sizes).aligned(head_dim.is_multiple_of(16))
}

/// Heads a block of those kernels.
const HEADS: usize = 8;

/// How an attention kernel is cut and compiled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionTile {
    /// Query vectors a block.
    pub queries: usize,
    /// Warps a block.
    pub warps: i32,
    /// Blocks a multiprocessor.
    pub occupancy: i32,
    /// How far ahead pages are loaded.
    pub latency: i32,
}

/// How attention works out heads of `head_dim`: with its keys `whole` or split over blocks.
pub fn attention_variant(
    kind: Type,
    whole: bool,
    tile: AttentionTile,
    head_dim: usize,
    page_size: usize,
    int8: bool,
) -> Variant {
    let page = if page_size == PAGE { PAGE as i32 } else { 0 };
    let (queries, width) = (tile.queries as i32, head_width(head_dim));
    let mut sizes = vec![queries, width, page, tile.latency];
    let (kernel, together) = if bytes_meet(kind, int8, head_dim) {
        // Values are two products.
        sizes.extend([2 * queries, width / 2]);
        let kernel = [&kernels::SPLIT_INT8, &kernels::WHOLE_INT8];
        (kernel[usize::from(whole)], 16)
    } else {
        sizes.push(int8.into());
        let kernel = [&kernels::ATTEND_SPLIT, &kernels::ATTEND_WHOLE];
        (kernel[usize::from(whole)], 8)
    };
    Variant::new(kernel, &[kind], &sizes)
        .hints(tile.warps, tile.occupancy)
        .aligned(head_dim.is_multiple_of(together))
}

/// Whether scores are products of bytes: in bfloat16 over an int8 cache, for the heads that kernel was measured and
/// proved with. Of others bytes are widened, and so they are in f32, where queries stay as they are.
fn bytes_meet(kind: Type, int8: bool, head_dim: usize) -> bool {
    int8 && kind == Type::Bf16 && head_dim == 128
}

/// The kernel that folds what split attention leaves of so many query vectors.
pub fn fold_variant(kind: Type, head_dim: usize, vectors: usize) -> Variant {
    // Of many vectors one warp each: more of them fit on a multiprocessor. (H200, steps of an 8B model: 64 rows at 1024
    // 7.29 ms with four warps, 7.19 with one; one row at 131072 9.5 and 10.9.)
    let hints = if vectors >= 1024 { (1, 8) } else { (4, 2) };
    Variant::new(&kernels::FOLD, &[kind], &[head_width(head_dim), 16])
        .hints(hints.0, hints.1)
        .aligned(head_dim.is_multiple_of(8))
}

/// The tile's width for a head.
fn head_width(head_dim: usize) -> i32 {
    head_dim.next_power_of_two().max(16) as i32
}

/// What the tiles of attention depend on besides the type.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct HeadGroup {
    /// Query heads that share a kv head; 0: not known yet.
    pub queries: usize,
    /// Values a head.
    pub head_dim: usize,
    /// Whether the cache is int8.
    pub int8: bool,
}

/// Tiles of attention for kv heads that a group of query heads shares: for few query vectors and for more,
/// keys split over blocks, and for many, keys whole.
pub fn attention_tiles(kind: Type, group: HeadGroup) -> [AttentionTile; 3] {
    // Four warps always: with eight, tileiras 13.5.37 makes wrong code of these kernels for sm_90.
    let tile = |queries: usize, occupancy| AttentionTile {
        queries: queries.max(group.queries.next_power_of_two()),
        warps: 4,
        occupancy,
        latency: 2,
    };
    match kind {
        Type::F32 => [tile(16, 2); 3],
        // H200, 32 query and 8 kv heads of 128: one row at 32768 positions 22 us with 8 queries, 26 with 16, 51 with 32.
        Type::Bf16 if bytes_meet(kind, group.int8, group.head_dim) => {
            [tile(8, 4), tile(16, 4), tile(64, 2)]
        }
        // H200, 32 query and 8 kv heads of 128: one row at 4096 positions 11.6 us, at 32768 50 us.
        Type::Bf16 => [tile(16, 4), tile(32, 2), tile(64, 2)],
    }
}

/// The arrays of a step on the device, as attention and the rest need them.
#[derive(Debug, Clone, Copy)]
pub struct StepArrays {
    /// Rows of the step.
    pub rows: usize,
    /// Position of each row.
    pub positions: Address,
    /// Slot of each row.
    pub slots: Address,
    /// Four numbers a row: position, end of its span, first page of its table, 0.
    pub row_meta: Address,
    /// Block tables.
    pub tables: Address,
    /// Entries of a block table.
    pub table_width: usize,
}

/// Runs of rows of one span that a block of attention takes together, eight numbers each: first row, rows,
/// span, first position, end of the span, first page of its table, 0, 0.
#[derive(Debug, Clone, Copy)]
pub struct Groups {
    /// The array.
    pub address: Address,
    /// Groups in it; those of no rows are skipped by the kernels.
    pub count: usize,
    /// The tile, which also says how many query vectors a group holds at most.
    pub tile: AttentionTile,
}

/// The keys and values of a layer: in the compute type, or in int8 with a scale each.
#[derive(Debug, Clone, Copy)]
pub struct Pools {
    /// Of the compute type, or bytes.
    pub keys: Rows,
    /// The same.
    pub values: Rows,
    /// What int8 keys were divided by, or 0 where they are of the compute type.
    pub factors: Address,
}

impl Pools {
    /// Whether they are int8.
    pub fn int8(&self) -> bool {
        self.factors != 0
    }

    /// As kernels take them: keys, values, then keys, their scales, values, their scales, factors.
    fn arguments(&self) -> [Argument; 7] {
        [
            self.keys.values,
            self.values.values,
            self.keys.values,
            self.keys.scales,
            self.values.values,
            self.values.scales,
            self.factors,
        ]
        .map(Argument::from)
    }

    /// As the kernels for products of bytes take them: values as pairs of bytes, keys, their scales, values, their scales,
    /// factors.
    fn byte_arguments(&self) -> [Argument; 6] {
        [
            self.values.values,
            self.keys.values,
            self.keys.scales,
            self.values.values,
            self.values.scales,
            self.factors,
        ]
        .map(Argument::from)
    }
}

/// The geometry of an attention layer and who sees whom.
#[derive(Debug, Clone, Copy)]
pub struct AttentionPlan {
    /// Query heads.
    pub heads: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Values a head.
    pub head_dim: usize,
    /// Slots of a page.
    pub page_size: usize,
    /// Scores are multiplied by this.
    pub scale: f32,
    /// Whether later rows of the span are hidden.
    pub causal: bool,
    /// How near a position must be to be seen.
    pub window: usize,
    /// Pages of the pool.
    pub pages: usize,
    /// Blocks of 256 keys that the longest sequence has, or may get while a recording is replayed.
    pub blocks: usize,
    /// Blocks that a sequence can have at most.
    pub block_slots: usize,
}

/// What `split_norm_rope_store` is given besides its rows.
#[derive(Debug, Clone, Copy, Default)]
pub struct HeadInputs {
    /// Norm weight of queries, or 0.
    pub query_norm: Address,
    /// Norm weight of keys, or 0.
    pub key_norm: Address,
    /// Cosines, or 0.
    pub cos: Address,
    /// Sines, or 0.
    pub sin: Address,
    /// Scale of queries by position, or 0.
    pub query_scale: Address,
    /// Added to the mean square.
    pub eps: f32,
}

impl Ops {
    /// Opens a device and finds its kernels.
    ///
    /// # Errors
    /// Those of [`Device::open`] and [`KernelStore::open`].
    pub fn open(ordinal: usize, options: &KernelOptions) -> Result<Self> {
        let device = Device::open(ordinal)?;
        let kernels = KernelStore::open(&device, options)?;
        let partials = device.alloc("partial sums", PARTIAL_BYTES)?;
        let tickets = device.alloc("tickets of partial sums", TICKETS * 4)?;
        device.queue_fill(tickets.address(), 0, TICKETS * 4)?;
        let bytes = sampling::MOST_ROWS * 4;
        let sampling_tickets = device.alloc("tickets of sampled rows", bytes)?;
        device.queue_fill(sampling_tickets.address(), 0, bytes)?;
        Ok(Ops {
            device,
            kernels,
            partials,
            tickets,
            sampling_tickets,
            scratch: Mutex::default(),
            timed: Mutex::default(),
        })
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// The kernels.
    pub fn kernels(&self) -> &KernelStore {
        &self.kernels
    }

    pub(crate) fn launch(
        &self,
        variant: &Variant,
        grid: [usize; 3],
        arguments: &[Argument],
    ) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        let function = self.kernels.get(variant)?;
        let start = self.mark()?;
        // SAFETY: the ops below list the arguments as the entry points declare them, with addresses of
        // arrays of the sizes given; alignment is promised only where `Variant::aligned` was computed from
        // the sizes, and tensors begin at multiples of 256 bytes.
        unsafe { self.device.launch(&function, grid, arguments)? };
        if let (Some(start), Some(end)) = (start, self.mark()?) {
            let name = format!("{variant} {grid:?}");
            self.timed()
                .get_or_insert_default()
                .push((name, start, end));
        }
        Ok(())
    }

    fn timed(&self) -> MutexGuard<'_, Option<Vec<(String, Event, Event)>>> {
        self.timed.lock().expect("no thread panics with times")
    }

    /// A mark in the queue, while kernels are timed.
    fn mark(&self) -> Result<Option<Event>> {
        if self.timed().is_none() {
            return Ok(None);
        }
        let mark = self.device.event()?;
        mark.record()?;
        Ok(Some(mark))
    }

    /// Milliseconds that each kernel takes which `body` queues, by name and grid. The marks between them keep a kernel
    /// from starting while the one before it ends, so all together they take longer than without.
    pub fn time_kernels(&self, body: &mut dyn FnMut() -> Result<()>) -> Result<Vec<(String, f32)>> {
        *self.timed() = Some(Vec::new());
        let queued = body();
        let timed = self.timed().take().unwrap_or_default();
        queued?;
        self.device.synchronize()?;
        let times = timed.into_iter();
        times
            .map(|(name, start, end)| Ok((name, start.milliseconds_to(&end)?)))
            .collect()
    }

    /// `y = then(W x + bias)`, `W` `[n, k]`.
    pub fn linear(
        &self,
        y: Address,
        x: Rows,
        w: Rows,
        bias: Option<Address>,
        shape: &LinearShape,
    ) -> Result<()> {
        self.linear_by(&linear_plan(shape), y, x, w, bias, shape)
    }

    /// [`Ops::linear`] by a plan of one's own for that shape.
    pub fn linear_by(
        &self,
        plan: &LinearPlan,
        y: Address,
        x: Rows,
        w: Rows,
        bias: Option<Address>,
        shape: &LinearShape,
    ) -> Result<()> {
        let operands = match shape.int8 {
            true => vec![y, x.values, x.scales, w.values, w.scales],
            false => vec![y, x.values, w.values],
        };
        let mut arguments: Vec<Argument> = operands.into_iter().map(Argument::from).collect();
        arguments.push(bias.unwrap_or(0).into());
        arguments.push(i32::from(bias.is_some()).into());
        let few = [&kernels::LINEAR_FEW, &kernels::FEW_INT8]
            .iter()
            .any(|&few| std::ptr::eq(plan.variant.kernel, few));
        if few {
            arguments.extend([self.partials.address(), self.tickets.address()].map(Argument::from));
            arguments.push(i32::from(plan.apart).into());
        }
        let width = shape.n / shape.then.halves();
        arguments.extend([shape.rows, width, shape.k].map(Argument::from));
        if few || !shape.int8 {
            arguments.push(plan.split_columns.into());
        }
        let scalars = match shape.then {
            Then::Xielu(scalars) => scalars,
            Then::Nothing | Then::GatedSilu => [0.0; 4],
        };
        arguments.extend(scalars.map(Argument::from));
        self.launch(&plan.variant, plan.grid, &arguments)
    }

    /// [`Ops::linear`], but the sums of splits stay apart, for the next kernel alone. Nothing is done where there are none.
    pub fn linear_apart(
        &self,
        x: Rows,
        w: Rows,
        bias: Option<Address>,
        shape: &LinearShape,
    ) -> Result<Option<Sums>> {
        let Some(plan) = apart_plan(shape) else {
            return Ok(None);
        };
        let values = self.partials.address();
        self.linear_by(&plan, values, x, w, None, shape)?;
        Ok(Some(Sums {
            values,
            splits: plan.grid[2],
            scales: shape.int8.then_some([x.scales, w.scales]),
            bias,
        }))
    }

    /// Rounds rows of activations for int8 weights: bytes `[2, rows, width]` and a scale a row.
    pub fn round_activations(
        &self,
        out: Rows,
        x: Address,
        kind: Type,
        [rows, width]: [usize; 2],
    ) -> Result<()> {
        let addresses = [out.values, out.scales, x].map(Argument::from);
        let numbers = [rows.into(), width.into()];
        let arguments = [&addresses[..], &numbers].concat();
        let variant = rounding_variant(kind, [rows, width]);
        let parts = width.div_ceil(variant.sizes[1] as usize);
        self.launch(&variant, [parts, rows, 1], &arguments)
    }

    /// `out = rms_norm(x) * weight`, after `x += delta` if there is one.
    pub fn rms_norm(
        &self,
        out: Address,
        x: Address,
        delta: Option<Sums>,
        weight: Address,
        [stream, kind]: [Type; 2],
        [rows, width]: [usize; 2],
        eps: f32,
    ) -> Result<()> {
        let planes = delta.map_or(0, |delta| delta.splits);
        let delta = delta.unwrap_or(Sums::from(0));
        let variant = norm_variant(stream, kind, width, planes, delta.scales.is_some());
        let (floats, integers) = match delta.scales {
            None => (delta.values, 0),
            Some(_) => (0, delta.values),
        };
        let [row_scales, weight_scales] = delta.scales.unwrap_or_default();
        let arguments = [
            out.into(),
            x.into(),
            floats.into(),
            integers.into(),
            row_scales.into(),
            weight_scales.into(),
            delta.splits.into(),
            delta.bias.unwrap_or(0).into(),
            i32::from(delta.bias.is_some()).into(),
            weight.into(),
            rows.into(),
            width.into(),
            eps.into(),
        ];
        let grid = [rows.div_ceil(variant.sizes[0] as usize), 1, 1];
        self.launch(&variant, grid, &arguments)
    }

    /// `out = silu(gate) * up` of rows `[gate, up]`, each `width` wide.
    pub fn silu_gated(
        &self,
        out: Address,
        x: Address,
        kind: Type,
        [rows, width]: [usize; 2],
    ) -> Result<()> {
        let variant = stretch_variant(&kernels::SILU_GATED, &[kind], width);
        let arguments = [out.into(), x.into(), rows.into(), width.into()];
        self.launch(&variant, [width.div_ceil(STRETCH), rows, 1], &arguments)
    }

    /// xIELU of `count` values; `scalars` are alpha_p, alpha_n, beta, eps.
    pub fn xielu(
        &self,
        out: Address,
        x: Address,
        kind: Type,
        count: usize,
        scalars: [f32; 4],
    ) -> Result<()> {
        let variant = stretch_variant(&kernels::XIELU, &[kind], count);
        let mut arguments = vec![out.into(), x.into(), count.into()];
        arguments.extend(scalars.map(Argument::from));
        self.launch(&variant, [count.div_ceil(STRETCH), 1, 1], &arguments)
    }

    /// `x += delta` for `count` values of two types.
    pub fn add(&self, x: Address, delta: Address, types: [Type; 2], count: usize) -> Result<()> {
        let variant = stretch_variant(&kernels::ADD, &types, count);
        self.launch(
            &variant,
            [count.div_ceil(STRETCH), 1, 1],
            &[x.into(), delta.into(), count.into()],
        )
    }

    /// `out[r] = table[indices[r]]`, from one type to another.
    pub fn gather(
        &self,
        out: Address,
        table: Address,
        indices: Address,
        [from, to]: [Type; 2],
        [rows, table_rows, width]: [usize; 3],
    ) -> Result<()> {
        let variant = stretch_variant(&kernels::GATHER, &[from, to], width);
        let arguments = [
            out.into(),
            table.into(),
            indices.into(),
            rows.into(),
            table_rows.into(),
            width.into(),
        ];
        self.launch(&variant, [width.div_ceil(STRETCH), rows, 1], &arguments)
    }

    /// Copies `columns` columns of every row from one type to another. Addresses are those of the first
    /// column, widths those of whole rows.
    pub fn copy_columns(
        &self,
        (out, out_width): (Address, usize),
        (x, x_width): (Address, usize),
        [from, to]: [Type; 2],
        [rows, columns]: [usize; 2],
    ) -> Result<()> {
        let variant = Variant::new(&kernels::COPY_COLUMNS, &[from, to], &[STRETCH as i32]);
        let arguments = [
            out.into(),
            x.into(),
            rows.into(),
            columns.into(),
            out_width.into(),
            x_width.into(),
        ];
        self.launch(&variant, [columns.div_ceil(STRETCH), rows, 1], &arguments)
    }

    /// `ids[rows[i]] = sampled[indices[i]]`.
    pub fn take_tokens(
        &self,
        ids: Address,
        sampled: Address,
        rows: Address,
        indices: Address,
        count: usize,
    ) -> Result<()> {
        let variant = Variant::new(&kernels::TAKE_TOKENS, &[], &[]);
        let arguments = [
            ids.into(),
            sampled.into(),
            rows.into(),
            indices.into(),
            count.into(),
        ];
        self.launch(&variant, [count.div_ceil(128), 1, 1], &arguments)
    }

    /// Splits rows of q, k and v heads, norms and rotates them, writes queries and pages.
    pub fn split_norm_rope_store(
        &self,
        queries: Address,
        pools: &Pools,
        qkv: Sums,
        inputs: &HeadInputs,
        step: &StepArrays,
        kind: Type,
        [heads, kv_heads, head_dim, page_size]: [usize; 4],
    ) -> Result<()> {
        let flag = |address: Address, bit: i32| if address == 0 { 0 } else { bit };
        let flags = flag(inputs.query_norm, 1)
            + flag(inputs.key_norm, 2)
            + flag(inputs.cos, 4)
            + flag(inputs.query_scale, 8);
        let rest = [
            qkv.values.into(),
            qkv.splits.into(),
            qkv.bias.unwrap_or(0).into(),
            i32::from(qkv.bias.is_some()).into(),
            inputs.query_norm.into(),
            inputs.key_norm.into(),
            inputs.cos.into(),
            inputs.sin.into(),
            inputs.query_scale.into(),
            step.positions.into(),
            step.slots.into(),
            flags.into(),
            heads.into(),
            kv_heads.into(),
            head_dim.into(),
            page_size.into(),
            inputs.eps.into(),
        ];
        let blocks = heads.div_ceil(HEADS) + 2 * kv_heads.div_ceil(HEADS);
        let arguments = [&[queries.into()], &pools.arguments()[..], &rest].concat();
        let variant = head_variant(
            &kernels::SPLIT_NORM_ROPE_STORE,
            kind,
            head_dim,
            pools.int8(),
            qkv.splits,
        );
        self.launch(&variant, [blocks, step.rows, 1], &arguments)
    }

    /// Rotates `heads` heads of every row in place.
    pub fn rotate(
        &self,
        x: Address,
        inputs: &HeadInputs,
        step: &StepArrays,
        kind: Type,
        [heads, head_dim]: [usize; 2],
    ) -> Result<()> {
        let arguments = [
            x.into(),
            inputs.cos.into(),
            inputs.sin.into(),
            inputs.query_scale.into(),
            step.positions.into(),
            i32::from(inputs.query_scale != 0).into(),
            heads.into(),
            head_dim.into(),
        ];
        let variant = head_variant(&kernels::ROTATE, kind, head_dim, false, 1);
        self.launch(&variant, [heads.div_ceil(HEADS), step.rows, 1], &arguments)
    }

    /// Writes rows of kv heads to their slots of one pool; to int8 where there are scales: keys, divided by their
    /// `factors`, or values, which have none.
    pub fn store(
        &self,
        pool: Rows,
        factors: Option<Address>,
        x: Address,
        step: &StepArrays,
        kind: Type,
        [kv_heads, head_dim, page_size]: [usize; 3],
    ) -> Result<()> {
        let arguments = [
            pool.values.into(),
            pool.values.into(),
            pool.scales.into(),
            factors.unwrap_or(0).into(),
            i32::from(factors.is_some()).into(),
            x.into(),
            step.slots.into(),
            kv_heads.into(),
            head_dim.into(),
            page_size.into(),
        ];
        let variant = head_variant(&kernels::STORE, kind, head_dim, pool.scales != 0, 1);
        self.launch(
            &variant,
            [kv_heads.div_ceil(HEADS), step.rows, 1],
            &arguments,
        )
    }

    /// Attention of every row. `whole`: each block of threads folds all keys of its queries (enough queries to
    /// fill the device); else keys are split over blocks and folded after. The results are the same.
    pub fn attention(
        &self,
        out: Address,
        queries: Address,
        pools: &Pools,
        step: &StepArrays,
        groups: &Groups,
        plan: &AttentionPlan,
        kind: Type,
        whole: bool,
    ) -> Result<()> {
        let (head_dim, page_size) = (plan.head_dim, plan.page_size);
        let variant =
            attention_variant(kind, whole, groups.tile, head_dim, page_size, pools.int8());
        // exp2 in the kernel: the factor of the natural exponent goes into the scale.
        let scale = (f64::from(plan.scale) * std::f64::consts::LOG2_E) as f32;
        let shape = [
            Argument::from(step.table_width),
            plan.page_size.into(),
            plan.heads.into(),
            plan.kv_heads.into(),
            plan.head_dim.into(),
            plan.pages.into(),
            scale.into(),
            i32::from(plan.causal).into(),
            plan.window.min(1 << 30).into(),
        ];
        let lists = [step.tables, groups.address].map(Argument::from);
        let pools = if bytes_meet(kind, pools.int8(), head_dim) {
            pools.byte_arguments().to_vec()
        } else {
            pools.arguments().to_vec()
        };
        let sources = [&[queries.into()], &pools[..], &lists].concat();
        if whole {
            let arguments = [&[out.into()], &sources[..], &shape].concat();
            let grid = [groups.count, plan.kv_heads, 1];
            return self.launch(&variant, grid, &arguments);
        }
        let vectors = step.rows * plan.heads * plan.block_slots;
        let numbers = vectors.next_multiple_of(64);
        let scratch = self.scratch((numbers * plan.head_dim + 2 * numbers) * 4)?;
        let maxima = scratch + (numbers * plan.head_dim * 4) as Address;
        let weights = maxima + (numbers * 4) as Address;
        let partial = [scratch.into(), maxima.into(), weights.into()];
        let mut arguments = [&partial[..], &sources, &shape].concat();
        arguments.push(plan.block_slots.into());
        let workers = ATTENTION_BLOCKS
            .div_ceil(plan.kv_heads * groups.count.max(1))
            .min(plan.blocks.max(1));
        let grid = [workers, plan.kv_heads, groups.count];
        self.launch(&variant, grid, &arguments)?;
        let arguments = [
            out.into(),
            scratch.into(),
            maxima.into(),
            weights.into(),
            step.row_meta.into(),
            plan.heads.into(),
            plan.head_dim.into(),
            i32::from(plan.causal).into(),
            plan.window.min(1 << 30).into(),
            plan.page_size.into(),
            plan.block_slots.into(),
        ];
        let grid = [plan.heads, step.rows, 1];
        let variant = fold_variant(kind, head_dim, plan.heads * step.rows);
        self.launch(&variant, grid, &arguments)
    }

    /// Bytes of scratch that split attention needs.
    pub fn split_scratch(rows: usize, heads: usize, head_dim: usize, block_slots: usize) -> usize {
        (rows * heads * block_slots).next_multiple_of(64) * (head_dim + 2) * 4
    }

    /// The token with the largest logit of each row, the first among equals.
    pub fn argmax(
        &self,
        tokens: Address,
        logits: Address,
        [rows, vocab]: [usize; 2],
    ) -> Result<()> {
        let parts = vocab.div_ceil(ARGMAX_STRETCH);
        let best = self.scratch(rows * parts * 8)?;
        let place = best + (rows * parts * 4) as Address;
        let variant = argmax_parts_variant(vocab);
        let arguments = [
            best.into(),
            place.into(),
            logits.into(),
            rows.into(),
            vocab.into(),
        ];
        self.launch(&variant, [parts, rows, 1], &arguments)?;
        let arguments = [tokens.into(), best.into(), place.into(), parts.into()];
        self.launch(&argmax_variant(vocab), [rows, 1, 1], &arguments)
    }

    /// A zero for each row that is sampled at once.
    pub(crate) fn sampling_tickets(&self) -> Address {
        self.sampling_tickets.address()
    }

    /// Memory that is the current op's until the next op that asks for some.
    pub(crate) fn scratch(&self, bytes: usize) -> Result<Address> {
        let mut scratch = self
            .scratch
            .lock()
            .expect("no thread panics while it holds the scratch");
        if scratch.last().is_none_or(|memory| memory.bytes() < bytes) {
            scratch.push(self.device.alloc(
                "scratch of attention",
                bytes.next_power_of_two().max(1 << 20),
            )?);
        }
        Ok(scratch.last().expect("just pushed").address())
    }
}

/// The first step of argmax.
pub fn argmax_parts_variant(vocab: usize) -> Variant {
    let variant = Variant::new(&kernels::ARGMAX_PARTS, &[], &[ARGMAX_STRETCH as i32]);
    variant.aligned(vocab.is_multiple_of(8))
}

/// The second step of argmax.
pub fn argmax_variant(vocab: usize) -> Variant {
    let parts = vocab.div_ceil(ARGMAX_STRETCH).next_power_of_two().max(16);
    Variant::new(&kernels::ARGMAX, &[], &[parts as i32])
}

/// Every variant that the plans above give for the models we know of: what a pack holds.
pub fn catalog() -> Vec<Variant> {
    let mut all = Vec::new();
    for kind in [Type::Bf16, Type::F32] {
        for aligned in [true, false] {
            let odd = usize::from(!aligned);
            for (out, then) in [
                (kind, Then::Nothing),
                (Type::F32, Then::Nothing),
                (kind, Then::GatedSilu),
                (kind, Then::Xielu([0.0; 4])),
            ] {
                for rows in [1, 16, 32, 64, 128, 150, 200, 300, 4096] {
                    // Cut into splits, of many columns and of few, and not; few blocks and many.
                    for [n, k] in [
                        [4096, 4096],
                        [4096, 12288],
                        [1024, 2048],
                        [1024, 3072],
                        [4096, 1024],
                        [6144, 4096],
                        [4608, 3584],
                        [24576, 4096],
                        [28672, 4096],
                        [151_936, 4096],
                    ] {
                        let shape = [rows, n + 2 * odd, k];
                        let shape = LinearShape::new([kind, out], shape).then(then);
                        all.push(linear_plan(&shape).variant);
                        all.push(linear_plan(&shape.int8(true)).variant);
                        if out == Type::F32 {
                            all.extend(apart_plan(&shape).map(|plan| plan.variant));
                        }
                    }
                }
            }
            // Widths that are not multiples of 32 are for tests: there are no such models.
            let widths: &[usize] = if aligned {
                &[
                    56, 64, 120, 128, 256, 504, 512, 1016, 1024, 2048, 4096, 8192,
                ]
            } else {
                &[64, 128, 256]
            };
            for width in widths.iter().map(|width| width - odd) {
                all.push(norm_variant(kind, kind, width, 0, false));
                // What layers are cut into.
                let planes: &[usize] = match kind {
                    Type::Bf16 => &[0, 1, 2, 4, 8],
                    Type::F32 => &[0, 1],
                };
                for &planes in planes {
                    all.push(norm_variant(Type::F32, kind, width, planes, false));
                    if planes > 1 {
                        all.push(norm_variant(Type::F32, kind, width, planes, true));
                    }
                }
            }
            for width in [64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768] {
                all.extend([1, 100].map(|rows| rounding_variant(kind, [rows, width - odd])));
            }
            for kernel in [&kernels::SILU_GATED, &kernels::XIELU] {
                all.push(stretch_variant(kernel, &[kind], 1024 + odd));
            }
            for to in [kind, Type::F32] {
                all.push(stretch_variant(&kernels::GATHER, &[kind, to], 1024 + odd));
                all.push(stretch_variant(&kernels::ADD, &[to, kind], 1024 + odd));
                all.push(Variant::new(
                    &kernels::COPY_COLUMNS,
                    &[to, kind],
                    &[STRETCH as i32],
                ));
            }
            all.push(stretch_variant(&kernels::ADD, &[Type::F32; 2], 1024 + odd));
        }
        for head_dim in [14, 16, 30, 32, 64, 128, 256] {
            for int8 in [false, true] {
                for kernel in [&kernels::ROTATE, &kernels::STORE] {
                    all.push(head_variant(kernel, kind, head_dim, int8, 1));
                }
                let kernel = &kernels::SPLIT_NORM_ROPE_STORE;
                let planes = [1, 2, 4, 8]
                    .into_iter()
                    .filter(|&planes| planes == 1 || kind == Type::Bf16);
                all.extend(planes.map(|planes| head_variant(kernel, kind, head_dim, int8, planes)));
            }
        }
        for head_dim in [16, 32, 64, 128, 256] {
            let pages = [(PAGE, false), (PAGE, true), (4, false), (4, true)];
            for (page_size, int8) in pages
                .into_iter()
                .filter(|&(size, _)| size == PAGE || head_dim <= 128)
            {
                let group = HeadGroup {
                    queries: 1,
                    head_dim,
                    int8,
                };
                let [few, more, many] = attention_tiles(kind, group);
                let variant =
                    |whole, tile| attention_variant(kind, whole, tile, head_dim, page_size, int8);
                all.extend([
                    variant(false, few),
                    variant(false, more),
                    variant(true, many),
                ]);
            }
            all.extend([1, 4096].map(|vectors| fold_variant(kind, head_dim, vectors)));
        }
    }
    for vocab in [4096, 49152, 65536, 131_072, 151_936, 262_144] {
        all.extend([
            argmax_parts_variant(vocab),
            argmax_parts_variant(vocab + 1),
            argmax_variant(vocab),
        ]);
        all.extend(sampling::variants(vocab));
    }
    all.push(Variant::new(&kernels::TAKE_TOKENS, &[], &[]));
    let mut seen = std::collections::HashSet::new();
    all.retain(|variant| seen.insert(*variant));
    all
}

/// Tiles of attention that `gpu-check --sweep` tries at heads of 128 in bfloat16.
pub fn sweep_tiles() -> Vec<AttentionTile> {
    let tile = |(queries, warps, occupancy, latency)| AttentionTile {
        queries,
        warps,
        occupancy,
        latency,
    };
    [
        (16, 4, 4, 2),
        (32, 4, 2, 2),
        (64, 4, 2, 2),
        (64, 4, 1, 2),
        (64, 4, 2, 3),
        (64, 4, 3, 2),
        (128, 8, 1, 2),
        (128, 4, 1, 2),
    ]
    .map(tile)
    .into()
}

/// Layers whose plans `gpu-check --sweep` tries.
pub fn sweep_shapes() -> Vec<LinearShape> {
    let mut shapes = Vec::new();
    for int8 in [false, true] {
        let more = if int8 { &[][..] } else { &[192, 256] };
        for &rows in [1, 16, 64, 512].iter().chain(more) {
            for (n, k, then) in [
                (6144, 4096, Then::Nothing),
                (4096, 4096, Then::Nothing),
                (24576, 4096, Then::GatedSilu),
                (4096, 12288, Then::Nothing),
            ] {
                let shape = LinearShape::new([Type::Bf16; 2], [rows, n, k]);
                shapes.push(shape.int8(int8).then(then));
            }
        }
    }
    shapes
}

/// Plans that `gpu-check --sweep` tries at a shape.
pub fn sweep_plans(shape: &LinearShape) -> Vec<LinearPlan> {
    let few = |tile: [i32; 4], hints| few_plan(shape, tile, tile[1], hints);
    let many = |tile, hints| many_plan(shape, tile, hints);
    match (shape.int8, shape.rows) {
        (false, ..=16) => vec![
            few([64, 128, 16, 3], (4, 3)),
            few([64, 256, 16, 3], (4, 2)),
            few([64, 128, 16, 4], (4, 3)),
            few([64, 128, 16, 3], (4, 2)),
            few([128, 128, 16, 3], (4, 2)),
        ],
        (false, 17..=64) => vec![
            few([64, 128, 64, 3], (4, 2)),
            few([64, 64, 64, 4], (4, 3)),
            few([128, 64, 64, 3], (4, 2)),
            many([256, 64, 64, 3], (8, 1)),
        ],
        (false, 65..=320) => vec![
            many([128, 64, 128, 4], (8, 1)),
            many([128, 64, 64, 4], (4, 2)),
            many([256, 64, 64, 3], (8, 1)),
            many([256, 64, 128, 4], (8, 1)),
            many([64, 64, 128, 4], (4, 2)),
            many([64, 128, 64, 3], (4, 2)),
            few([64, 128, 128, 3], (4, 1)),
            few([64, 64, 128, 4], (4, 2)),
            few([64, 128, 64, 4], (4, 2)),
            few([128, 64, 128, 4], (8, 1)),
            few([128, 64, 64, 4], (4, 2)),
            few([64, 64, 256, 3], (8, 1)),
            few([128, 64, 256, 3], (8, 1)),
        ],
        (false, _) => vec![
            many([256, 64, 128, 4], (8, 1)),
            many([256, 64, 64, 3], (8, 1)),
            many([128, 64, 128, 4], (8, 1)),
            many([128, 64, 128, 3], (4, 2)),
        ],
        (true, ..=16) => {
            let tokens = if shape.rows > 8 { 16 } else { 8 };
            vec![
                few([64, 256, tokens, 3], (4, 4)),
                few([64, 256, tokens, 4], (4, 3)),
                few([64, 256, tokens, 2], (4, 4)),
                few([64, 256, tokens, 6], (4, 2)),
                few([64, 512, tokens, 2], (4, 2)),
                few([64, 512, tokens, 3], (4, 2)),
                few([64, 128, tokens, 4], (4, 4)),
                few([64, 128, tokens, 6], (4, 3)),
                few([128, 256, tokens, 3], (4, 2)),
            ]
        }
        (true, 17..=64) => vec![
            few([64, 128, 64, 3], (4, 2)),
            few([64, 256, 64, 2], (4, 1)),
            few([64, 256, 32, 3], (4, 2)),
            few([128, 128, 64, 3], (8, 1)),
            many([128, 128, 32, 3], (4, 2)),
            many([128, 128, 64, 3], (8, 1)),
            many([256, 128, 64, 3], (8, 1)),
        ],
        (true, _) => vec![
            many([256, 128, 64, 3], (8, 1)),
            many([256, 64, 64, 4], (8, 1)),
            many([128, 128, 64, 3], (8, 1)),
            many([128, 128, 64, 3], (4, 2)),
            many([128, 128, 128, 3], (8, 1)),
        ],
    }
}

/// What a sweep launches: a pack that holds it needs no toolkit.
pub fn sweep_catalog() -> Vec<Variant> {
    let shapes = sweep_shapes();
    let plans = shapes.iter().flat_map(sweep_plans);
    let linears = plans.map(|plan| plan.variant);
    let attention = sweep_tiles()
        .into_iter()
        .map(|tile| attention_variant(Type::Bf16, true, tile, 128, PAGE, false));
    linears.chain(attention).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn splits_cover_the_columns_and_fit_the_partial_sums() {
        for n in [1, 64, 1000, 1024, 4096, 6144, 8192, 24576, 151_936] {
            for k in [1, 8, 255, 256, 1000, 4096, 12288, 14336] {
                let (count, columns) = splits(Type::Bf16, n, k);
                assert!(
                    columns.is_multiple_of(256)
                        && count * columns >= k
                        && (count - 1) * columns < k,
                    "{n} x {k}"
                );
                let tiles = n.div_ceil(64) * count;
                assert!(count == 1 || tiles <= MOST_SPLIT_TILES, "{n} x {k}");
                // Planes as wide as the weight has rows, where splits stay apart.
                assert!(count == 1 || count * n * MOST_SPLIT_ROWS * 4 <= PARTIAL_BYTES);
                assert_eq!(splits(Type::F32, n, k).0, 1);
            }
        }
    }

    /// What plans leave in memory has room there, and every split begins with a whole tile.
    #[test]
    fn sums_of_splits_have_room() {
        for n in [
            1, 40, 64, 576, 1000, 1024, 1100, 2048, 3000, 3584, 4096, 5120, 6000, 6144, 24576,
        ] {
            for k in [
                1, 250, 520, 1030, 2048, 3072, 4096, 12288, 14336, 17408, 18944, 21504,
            ] {
                for rows in 1..=600 {
                    for int8 in [false, true] {
                        let shape = LinearShape::new([Type::Bf16, Type::F32], [rows, n, k]);
                        let shape = shape.int8(int8);
                        let apart = apart_plan(&shape);
                        assert!(apart.is_none() || rows <= MOST_SPLIT_ROWS);
                        let plan = linear_plan(&shape);
                        assert!(!plan.apart && apart.is_none_or(|plan| plan.apart));
                        let [bn, bk, bt] = [0, 1, 2].map(|i| plan.variant.sizes[i] as usize);
                        let [across, down, splits] = plan.grid;
                        if splits > 1 {
                            // An int8 row is two.
                            let sums = bn * bt * (1 + usize::from(int8));
                            assert!(across * down * splits * sums * 4 <= PARTIAL_BYTES);
                            assert!(across * down <= TICKETS, "{rows} x {n} x {k}");
                        }
                        for plan in apart.iter().chain([&plan]) {
                            let planes = plan.grid[2] * n * rows * 4 * (1 + usize::from(int8));
                            assert!(apart.is_none() || planes <= PARTIAL_BYTES);
                            assert!(plan.split_columns.is_multiple_of(bk));
                        }
                    }
                }
            }
        }
    }

    /// What the conformance suite launches is too.
    #[test]
    fn the_pack_holds_what_the_suite_attends_with() {
        let catalog: HashSet<Variant> = catalog().into_iter().collect();
        for (heads, kv_heads, head_dim) in tileinfer::testing::ATTENTION_HEADS {
            for kind in [Type::Bf16, Type::F32] {
                for (page_size, int8) in [(PAGE, false), (PAGE, true), (4, false), (4, true)] {
                    let group = HeadGroup {
                        queries: heads / kv_heads,
                        head_dim,
                        int8,
                    };
                    let tiles = attention_tiles(kind, group);
                    for (whole, tile) in [(false, tiles[0]), (false, tiles[1]), (true, tiles[2])] {
                        let variant =
                            attention_variant(kind, whole, tile, head_dim, page_size, int8);
                        assert!(catalog.contains(&variant), "{variant}");
                    }
                    assert!(catalog.contains(&fold_variant(kind, head_dim, heads)));
                }
            }
        }
    }

    #[test]
    fn the_pack_holds_the_norms_of_the_suite() {
        let catalog: HashSet<Variant> = catalog().into_iter().collect();
        for kind in [Type::Bf16, Type::F32] {
            let has = |planes, width, int8| {
                let variant = norm_variant(Type::F32, kind, width, planes, int8);
                assert!(catalog.contains(&variant), "{variant}");
            };
            for width in tileinfer::testing::NORM_WIDTHS {
                assert!(catalog.contains(&norm_variant(kind, kind, width, 0, false)));
                for planes in [0, 1] {
                    has(planes, width, false);
                }
            }
            for (n, k) in tileinfer::testing::RESIDUAL_LAYERS {
                let planes = splits(kind, n, k).0;
                has(planes, n, false);
                if planes > 1 {
                    has(planes, n, true);
                }
                for rows in tileinfer::testing::RESIDUAL_ROWS {
                    let rounding = rounding_variant(kind, [rows, k]);
                    assert!(catalog.contains(&rounding), "{rounding}");
                    let shape = LinearShape::new([kind, Type::F32], [rows, n, k]);
                    let plans = [Some(linear_plan(&shape)), apart_plan(&shape)];
                    let plans = plans.into_iter().flatten();
                    let int8 = shape.int8(true);
                    let plans = plans.chain([linear_plan(&int8)]).chain(apart_plan(&int8));
                    for plan in plans {
                        assert!(catalog.contains(&plan.variant), "{}", plan.variant);
                    }
                }
            }
        }
    }

    /// What steps of real models launch is in the pack, so a user needs no toolkit.
    #[test]
    fn the_pack_holds_what_real_models_launch() {
        let catalog: HashSet<Variant> = catalog().into_iter().collect();
        let has = |variant: Variant| assert!(catalog.contains(&variant), "{variant}");
        // Hidden, intermediate, heads, kv heads, head size, vocabulary: Qwen3 0.6B, 8B, 14B, Llama 3 1B, 8B,
        // Mistral Nemo, Qwen2.5 7B, Apertus 8B, SmolLM2 135M.
        for [hidden, wide, heads, kv_heads, head_dim, vocab] in [
            [1024, 3072, 16, 8, 128, 151_936],
            [4096, 12288, 32, 8, 128, 151_936],
            [5120, 17408, 40, 8, 128, 151_936],
            [2048, 8192, 32, 8, 64, 128_256],
            [4096, 14336, 32, 8, 128, 128_256],
            [5120, 14336, 32, 8, 128, 131_072],
            [3584, 18944, 28, 4, 128, 152_064],
            [4096, 21504, 32, 8, 128, 131_072],
            [576, 1536, 9, 3, 64, 49152],
        ] {
            for kind in [Type::Bf16, Type::F32] {
                let (q, kv) = (heads * head_dim, kv_heads * head_dim);
                for rows in [1, 8, 16, 17, 32, 64, 100, 129, 200, 300, 512, 700, 4096] {
                    for (out, n, k, then) in [
                        (Type::F32, q + 2 * kv, hidden, Then::Nothing),
                        (kind, 2 * wide, hidden, Then::GatedSilu),
                        (kind, wide, hidden, Then::Xielu([0.0; 4])),
                        (Type::F32, hidden, q, Then::Nothing),
                        (Type::F32, hidden, wide, Then::Nothing),
                        (Type::F32, vocab, hidden, Then::Nothing),
                    ] {
                        let shape = LinearShape::new([kind, out], [rows, n, k]).then(then);
                        has(linear_plan(&shape).variant);
                        has(linear_plan(&shape.int8(true)).variant);
                        if out == Type::F32 {
                            apart_plan(&shape).map(|plan| plan.variant).map(has);
                        }
                        has(rounding_variant(kind, [rows, k]));
                    }
                }
                let cut = [q, wide].map(|k| splits(kind, hidden, k).0);
                for planes in [0, 1].into_iter().chain(cut) {
                    has(norm_variant(Type::F32, kind, hidden, planes, false));
                    if planes > 1 {
                        has(norm_variant(Type::F32, kind, hidden, planes, true));
                    }
                }
                has(stretch_variant(
                    &kernels::GATHER,
                    &[kind, Type::F32],
                    hidden,
                ));
                has(stretch_variant(&kernels::GATHER, &[kind; 2], hidden));
                has(stretch_variant(&kernels::SILU_GATED, &[kind], wide));
                has(stretch_variant(&kernels::XIELU, &[kind], wide));
                for int8 in [false, true] {
                    let kernel = &kernels::SPLIT_NORM_ROPE_STORE;
                    for planes in [1, splits(kind, q + 2 * kv, hidden).0] {
                        has(head_variant(kernel, kind, head_dim, int8, planes));
                    }
                }
                for int8 in [false, true] {
                    let group = HeadGroup {
                        queries: heads / kv_heads,
                        head_dim,
                        int8,
                    };
                    let [few, more, many] = attention_tiles(kind, group);
                    let variant =
                        |whole, tile| attention_variant(kind, whole, tile, head_dim, PAGE, int8);
                    has(variant(false, few));
                    has(variant(false, more));
                    has(variant(true, many));
                }
                for rows in [1, 64, 128] {
                    has(fold_variant(kind, head_dim, rows * heads));
                }
            }
            has(argmax_parts_variant(vocab));
            has(argmax_variant(vocab));
            sampling::variants(vocab).into_iter().for_each(has);
        }
    }
}
