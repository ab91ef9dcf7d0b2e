//! The kernels: device code in Rust, one module a subject, and [`Variant`]s: kernels with their types and
//! tile sizes filled in, the unit that is compiled, packed and launched.
//!
//! Entry points take raw pointers and sizes, so that a launch is a list of numbers and the compiled code
//! needs nothing but the driver. What a launch promises beyond that (16-byte aligned pointers, sizes that
//! are multiples of 8) is part of the variant, since the compiler uses it for wide loads.

// Device code is one unsafe block from its first line to its last: the contract of an entry point
// (pointers, sizes, alignment) covers its body, and the launches in `ops` uphold it.
#![allow(unsafe_op_in_unsafe_fn)]

// The kernel compiler finds the helpers of another module by their `pub`: hence the exceptions.
#[allow(unreachable_pub)]
mod activation;
// Values that only one of two constant branches writes are written before as well.
#[allow(unused_assignments)]
#[allow(unreachable_pub)]
mod attention;
// The same.
#[allow(unused_assignments)]
mod attention_int8;
#[allow(unreachable_pub)]
mod bytes;
// Values that only one of two constant branches writes are written before as well.
#[allow(unused_assignments)]
mod draw;
#[allow(unreachable_pub)]
mod exact;
#[allow(unreachable_pub)]
mod linear;
mod linear_int8;
// Values that only one of two constant branches writes are written before as well.
#[allow(unused_assignments)]
mod norm;
mod rope;
mod rows;
mod sample;
#[allow(unreachable_pub)]
mod views;

use std::fmt;

use cutile_compiler::ast::Module;

/// An element type of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Type {
    /// bfloat16.
    Bf16,
    /// IEEE single precision.
    F32,
}

impl Type {
    /// Its name in a kernel's generic arguments.
    pub fn name(self) -> &'static str {
        match self {
            Type::Bf16 => "bf16",
            Type::F32 => "f32",
        }
    }

    /// Bytes of a value.
    pub fn bytes(self) -> usize {
        match self {
            Type::Bf16 => 2,
            Type::F32 => 4,
        }
    }
}

/// An entry point: where its source is and what its pointers and sizes may promise.
#[derive(Debug)]
pub struct Kernel {
    /// Name of the entry point and of the compiled function, less `_entry`.
    pub name: &'static str,
    /// Name of its module.
    pub module: &'static str,
    /// The module's source, as the compiler wants it.
    pub source: fn() -> Module,
    /// Arguments that an aligned variant promises: pointers at multiples of 16 bytes, sizes that are
    /// multiples of 8.
    pub aligned: &'static [&'static str],
    /// Pointers that are aligned in every variant: beginnings of allocations.
    pub bases: &'static [&'static str],
}

macro_rules! kernels {
    ($($constant:ident = $module:ident :: $name:ident ( $($aligned:ident)* ; $($base:ident)* );)*) => {
        $(
            #[doc = concat!("`", stringify!($module), "::", stringify!($name), "`.")]
            pub static $constant: Kernel = Kernel {
                name: stringify!($name),
                module: stringify!($module),
                source: $module::$module::__module_ast_self,
                aligned: &[$(stringify!($aligned)),*],
                bases: &[$(stringify!($base)),*],
            };
        )*
    };
}

kernels! {
    LINEAR_FEW = linear::linear_few(y x bias width k; w partials tickets);
    LINEAR_MANY = linear::linear_many(y x bias width k; w);
    ROUND_ACTIVATIONS = linear_int8::round_activations(x width; out scales);
    FEW_INT8 = linear_int8::few_int8(y bias width depth; x x_scales w w_scales partials tickets);
    MANY_INT8 = linear_int8::many_int8(y bias width depth; x x_scales w w_scales);
    RMS_NORM = norm::rms_norm(out x delta bias weight width; sums row_scales weight_scales);
    SILU_GATED = activation::silu_gated(out x width; );
    XIELU = activation::xielu(out x count; );
    GATHER = rows::gather(out table width; );
    COPY_COLUMNS = rows::copy_columns(out x columns out_width x_width; );
    ADD = rows::add(x delta count; );
    TAKE_TOKENS = rows::take_tokens(; );
    SPLIT_NORM_ROPE_STORE = rope::split_norm_rope_store(queries keys values key_bytes value_bytes qkv bias head_dim; key_scales value_scales factors);
    ROTATE = rope::rotate(x head_dim; );
    STORE = rope::store(pool bytes x head_dim; scales factors);
    ATTEND_SPLIT = attention::attend_split(queries head_dim; outputs keys values key_bytes value_bytes key_scales value_scales factors);
    FOLD = attention::fold(out head_dim; outputs);
    SPLIT_INT8 = attention_int8::attend_split_int8(queries head_bytes; outputs pairs keys values key_scales value_scales factors);
    WHOLE_INT8 = attention_int8::attend_whole_int8(out queries head_bytes; pairs keys values key_scales value_scales factors);
    ATTEND_WHOLE = attention::attend_whole(out queries head_dim; keys values key_bytes value_bytes key_scales value_scales factors);
    ARGMAX_PARTS = sample::argmax_parts(vocab; logits);
    ARGMAX = sample::argmax(; );
    ADJUST = draw::adjust(; logits entries table);
    SURVEY = draw::survey(; maxima broken state logits table masks);
    SEARCH = draw::search(; state partials tickets logits maxima table);
    TIES = draw::ties(; counts state logits table);
    SCORE = draw::score(; best ranks place weights state counts logits maxima table);
    SPREAD = draw::spread(; drafted table);
    TOTAL = draw::total(; sums weights drafted totals table);
    REDRAW = draw::redraw(; best ranks place weights drafted totals rests logits table);
    LIST = draw::list(; listed weights totals logits table);
    CHOOSE = draw::choose(; best ranks place maxima broken weights totals table);
}

/// Everything the compiled code depends on that is not in a [`Variant`]: the text of the kernels.
const SOURCES: &[&str] = &[
    include_str!("mod.rs"),
    include_str!("activation.rs"),
    include_str!("attention.rs"),
    include_str!("attention_int8.rs"),
    include_str!("bytes.rs"),
    include_str!("draw.rs"),
    include_str!("exact.rs"),
    include_str!("linear.rs"),
    include_str!("linear_int8.rs"),
    include_str!("norm.rs"),
    include_str!("rope.rs"),
    include_str!("rows.rs"),
    include_str!("sample.rs"),
    include_str!("views.rs"),
];

/// A number that changes when the text of a kernel does: packs and caches of other texts do not match.
pub fn fingerprint() -> u64 {
    // FNV-1a: this guards against mistakes, not against people.
    let bytes = SOURCES.iter().flat_map(|source| source.bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// A kernel with everything filled in that is compiled into it.
#[derive(Clone, Copy)]
pub struct Variant {
    /// The entry point.
    pub kernel: &'static Kernel,
    /// Its element types.
    pub types: [Option<Type>; 2],
    /// Its tile sizes, in the order of its generic arguments; as many as are not 0 from the right.
    pub sizes: [i32; 9],
    /// How many of `sizes` count.
    pub size_count: usize,
    /// Warps a block.
    pub warps: i32,
    /// Blocks that should fit on a multiprocessor.
    pub occupancy: i32,
    /// Whether the launch keeps the promises of [`Kernel::aligned`].
    pub aligned: bool,
}

impl Variant {
    /// A variant with 4 warps a block, two blocks a multiprocessor, and no promises.
    pub fn new(kernel: &'static Kernel, types: &[Type], sizes: &[i32]) -> Self {
        let mut variant = Variant {
            kernel,
            types: [None; 2],
            sizes: [0; 9],
            size_count: sizes.len(),
            warps: 4,
            occupancy: 2,
            aligned: false,
        };
        for (to, &from) in variant.types.iter_mut().zip(types) {
            *to = Some(from);
        }
        variant.sizes[..sizes.len()].copy_from_slice(sizes);
        variant
    }

    /// With one more tile size.
    pub fn and_size(mut self, size: i32) -> Self {
        self.sizes[self.size_count] = size;
        self.size_count += 1;
        self
    }

    /// With other launch hints.
    pub fn hints(mut self, warps: i32, occupancy: i32) -> Self {
        (self.warps, self.occupancy) = (warps, occupancy);
        self
    }

    /// With the promises of [`Kernel::aligned`] if `aligned`.
    pub fn aligned(mut self, aligned: bool) -> Self {
        self.aligned = aligned;
        self
    }

    /// The generic arguments, in order.
    pub fn generics(&self) -> Vec<String> {
        let types = self.types.iter().flatten().map(|t| t.name().to_owned());
        types
            .chain(self.sizes[..self.size_count].iter().map(i32::to_string))
            .collect()
    }

    /// A number of its own for each variant, quick to compare.
    fn identity(&self) -> (usize, [Option<Type>; 2], [i32; 9], i32, i32, bool) {
        let kernel = std::ptr::from_ref(self.kernel) as usize;
        (
            kernel,
            self.types,
            self.sizes,
            self.warps,
            self.occupancy,
            self.aligned,
        )
    }
}

impl PartialEq for Variant {
    fn eq(&self, other: &Self) -> bool {
        self.identity() == other.identity()
    }
}

impl Eq for Variant {}

impl std::hash::Hash for Variant {
    fn hash<H: std::hash::Hasher>(&self, state: &mut H) {
        self.identity().hash(state);
    }
}

/// The name that a variant has in packs, caches and messages.
impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let aligned = if self.aligned { "aligned" } else { "any" };
        let Variant {
            kernel,
            warps,
            occupancy,
            ..
        } = self;
        write!(
            f,
            "{}<{}>-w{warps}-o{occupancy}-{aligned}",
            kernel.name,
            self.generics().join(",")
        )
    }
}

impl fmt::Debug for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
