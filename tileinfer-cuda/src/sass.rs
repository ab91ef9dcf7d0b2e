//! The machine code of the kernels that a step spends its time in, held against what it is meant to be: operands
//! fetched in bulk, weights before the wait, products by the tensor core's own instructions, nothing spilled. It reads what NVIDIA's
//! `nvdisasm` and `cuobjdump` print and needs no GPU; it does not know how fast anything is.

use crate::kernels::{self, Type, Variant};
use crate::ops::{self, HeadGroup, LinearShape, PAGE, Then};

/// Instructions of a kernel by what they do.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Products by whole warp groups: `HGMMA` and `IGMMA` of sm_90, `UTCHMMA` and `UTCIMMA` of sm_100.
    pub products: usize,
    /// Products by single warps, as older GPUs have them: `HMMA`, `IMMA`.
    pub warp_products: usize,
    /// Tiles fetched by the tensor memory accelerator: `UTMALDG`, `UBLKCP`.
    pub bulk: usize,
    /// Those of them that the warp which fetches for the others (it gives its registers away first: sm_90) asks for
    /// before it waits for anything.
    pub ahead: usize,
    /// Loads of 128 bits a thread, to registers or shared memory: `LDG` and `LDGSTS` with `.128`.
    pub wide: usize,
    /// Other loads of global memory.
    pub narrow: usize,
    /// Loads and stores of local memory: spilled registers.
    pub spills: usize,
}

/// What a kernel takes of a multiprocessor.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Resources {
    /// Registers a thread.
    pub registers: usize,
    /// Bytes of local memory a thread.
    pub stack: usize,
    /// Bytes of shared memory a block.
    pub shared: usize,
}

/// Counts the instructions that `nvdisasm -c` lists.
pub fn count(listing: &str) -> Counts {
    let mut counts = Counts::default();
    let mut fetching = None;
    for name in listing.lines().filter_map(instruction) {
        let is = |start: &str| name.starts_with(start);
        if is("USETMAXREG.DEALLOC") && fetching.is_none() {
            fetching = Some(true);
        } else if is("SYNCS.PHASECHK") && fetching.is_some() {
            fetching = Some(false);
        } else if is("UTMALDG") && fetching == Some(true) {
            counts.ahead += 1;
        }
        let to = if is("HGMMA") || is("IGMMA") || is("UTCHMMA") || is("UTCIMMA") {
            &mut counts.products
        } else if is("HMMA") || is("IMMA") {
            &mut counts.warp_products
        } else if is("UTMALDG") || is("UBLKCP") {
            &mut counts.bulk
        } else if is("LDL") || is("STL") {
            &mut counts.spills
        } else if is("LDG.") || is("LDGSTS.") {
            match name.split('.').any(|part| part == "128") {
                true => &mut counts.wide,
                false => &mut counts.narrow,
            }
        } else {
            continue;
        };
        *to += 1;
    }
    counts
}

/// The instruction's name in a line such as `/*0040*/ @!P0 LDG.E.128 R4, …`.
fn instruction(line: &str) -> Option<&str> {
    let (address, rest) = line.trim().strip_prefix("/*")?.split_once("*/")?;
    if address.is_empty() || !address.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        return None;
    }
    let mut words = rest.split_ascii_whitespace();
    let name = words.find(|word| !word.starts_with('@'))?;
    Some(name.trim_end_matches(';'))
}

/// What `cuobjdump -res-usage` says of the one kernel of a file.
pub fn resources(usage: &str) -> Option<Resources> {
    let number = |name: &str| {
        let mut words = usage.split_ascii_whitespace();
        words
            .find_map(|word| word.strip_prefix(name)?.strip_prefix(':'))?
            .parse()
            .ok()
    };
    Some(Resources {
        registers: number("REG")?,
        stack: number("STACK")?,
        shared: number("SHARED")?,
    })
}

/// The kernels that steps of a bf16 model of 8 billion weights spend their time in, int8 or not.
pub fn hot() -> Vec<Variant> {
    let mut all = Vec::new();
    let linears = [
        ([6144, 4096], Type::F32, Then::Nothing),
        ([4096, 4096], Type::F32, Then::Nothing),
        ([24_576, 4096], Type::Bf16, Then::GatedSilu),
        ([4096, 12_288], Type::F32, Then::Nothing),
        ([151_936, 4096], Type::F32, Then::Nothing),
    ];
    for ([n, k], out, then) in linears {
        for rows in [1, 8, 16, 32, 64, 128, 192, 256, 512, 4096] {
            let shape = LinearShape::new([Type::Bf16, out], [rows, n, k]).then(then);
            all.extend([shape, shape.int8(true)].map(|shape| ops::linear_plan(&shape).variant));
            if out == Type::F32 {
                all.extend(ops::apart_plan(&shape).map(|plan| plan.variant));
            }
        }
    }
    for (head_dim, int8) in [(64, false), (128, false), (128, true)] {
        let group = HeadGroup {
            queries: 4,
            head_dim,
            int8,
        };
        let [few, more, many] = ops::attention_tiles(Type::Bf16, group);
        for (whole, tile) in [(false, few), (false, more), (true, many)] {
            let kind = Type::Bf16;
            all.push(ops::attention_variant(
                kind, whole, tile, head_dim, PAGE, int8,
            ));
        }
    }
    let mut seen = std::collections::HashSet::new();
    all.retain(|variant| seen.insert(*variant));
    all
}

/// Kernels that are known to keep some registers in local memory, and how many bytes a thread at most: more is a
/// step back.
const KNOWN_STACKS: [(&str, &str, usize); 8] = [
    // The sums of a split and those of all before it do not fit together.
    (
        "sm_90",
        "linear_many<bf16,f32,256,64,128,4,0,1,256,1>-w8-o1-aligned",
        208,
    ),
    ("sm_90", "attend_whole<bf16,64,128,64,2,0>-w4-o2-aligned", 8),
    // Since blocks without keys leave early: 104 before.
    (
        "sm_100",
        "attend_split<bf16,32,128,64,2,0>-w4-o2-aligned",
        256,
    ),
    (
        "sm_100",
        "attend_whole<bf16,64,128,64,2,0>-w4-o2-aligned",
        240,
    ),
    // Int8 caches.
    (
        "sm_90",
        "attend_split_int8<bf16,16,128,64,2,32,64>-w4-o4-aligned",
        32,
    ),
    (
        "sm_90",
        "attend_whole_int8<bf16,64,128,64,2,128,64>-w4-o2-aligned",
        240,
    ),
    (
        "sm_100",
        "attend_split_int8<bf16,16,128,64,2,32,64>-w4-o4-aligned",
        112,
    ),
    (
        "sm_100",
        "attend_whole_int8<bf16,64,128,64,2,128,64>-w4-o2-aligned",
        648,
    ),
];

/// What is wrong with a kernel's machine code for `arch`; nothing if all is as it should be.
pub fn faults(
    arch: &str,
    variant: &Variant,
    counts: &Counts,
    resources: &Resources,
) -> Vec<String> {
    let mut faults = Vec::new();
    if counts.products == 0 {
        faults.push("no product by a whole warp group".to_owned());
    }
    if counts.warp_products > 0 {
        faults.push(format!("{} products by single warps", counts.warp_products));
    }
    if counts.bulk == 0 {
        faults.push("no tile is fetched by the tensor memory accelerator".to_owned());
    }
    let streams = [&kernels::LINEAR_FEW, &kernels::FEW_INT8]
        .iter()
        .any(|&few| std::ptr::eq(variant.kernel, few));
    if streams && arch == "sm_90" && counts.ahead == 0 {
        faults.push("its first weights are fetched after the wait".to_owned());
    }
    let name = variant.to_string();
    let known = KNOWN_STACKS
        .iter()
        .find(|(known_arch, known, _)| (*known_arch, *known) == (arch, &name));
    let most = known.map_or(0, |(_, _, bytes)| *bytes);
    if resources.stack > most {
        faults.push(format!(
            "{} bytes a thread of local memory, {most} at most",
            resources.stack
        ));
    }
    faults
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The forms that lines of a listing have.
    const LISTING: &str = "
	.target\tsm_90a
        .global         linear_few_entry
.text.linear_few_entry:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0040*/               @P0 BRA `(.L_x_1) ;
.L_x_55:
        /*0110*/                   UTMALDG.2D [UR8], [UR4], desc[UR6] ;
        /*0120*/             @!UP1 UBLKCP [UR8], [UR4], UR6 ;
        /*0130*/                   HGMMA.64x16x16.F32.BF16 R24, gdesc[UR4], R24 ;
        /*0140*/                   IGMMA.64x16x32.S8.S8 R24, gdesc[UR4], R24, gsb0 ;
        /*0150*/                   HMMA.16816.F32.BF16 R4, R8, R12, R4 ;
        /*0160*/              @!P2 LDG.E.128.CONSTANT R4, desc[UR4][R2.64] ;
        /*0170*/                   LDGSTS.E.BYPASS.128 [R5], desc[UR4][R2.64] ;
        /*0180*/                   LDG.E.U16 R4, desc[UR4][R2.64] ;
        /*0190*/                   LDGSTS.E.64 [R5], desc[UR4][R2.64] ;
        /*01a0*/                   LDGDEPBAR ;
        /*01b0*/                   STL.128 [R1+0x10], R4 ;
        /*01c0*/                   LDL R4, [R1] ;
        /*01d0*/                   EXIT;
        /*01e0*/                   USETMAXREG.DEALLOC.CTAPOOL 0x20 ;
        /*01f0*/                   UTMALDG.3D [UR32], [UR22], desc[URZ] ;
        /*0200*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR13+0x120f8], R3 ;
        /*0210*/                   UTMALDG.2D [UR32], [UR6], desc[URZ] ;
        // a note on HGMMA
";

    #[test]
    fn instructions_are_counted_by_what_they_do() {
        let counts = count(LISTING);
        let expected = Counts {
            products: 2,
            warp_products: 1,
            bulk: 4,
            ahead: 1,
            wide: 2,
            narrow: 2,
            spills: 2,
        };
        assert_eq!(counts, expected);
        assert_eq!(instruction("  /*01d0*/   EXIT;"), Some("EXIT"));
        assert_eq!(instruction("  /* a note */ EXIT;"), None);
        assert_eq!(count(""), Counts::default());
    }

    #[test]
    fn resources_are_read_and_missing_ones_are_not_made_up() {
        let usage = "
Resource usage:
 Common:
  GLOBAL:64 CONSTANT[4]:8
 Function linear_few_entry:
  REG:255 STACK:8 SHARED:230648 LOCAL:0 CONSTANT[0]:1152 TEXTURE:0 SURFACE:0 SAMPLER:0
";
        let expected = Resources {
            registers: 255,
            stack: 8,
            shared: 230_648,
        };
        assert_eq!(resources(usage), Some(expected));
        assert_eq!(resources("Resource usage:\n REG:255 STACK:8"), None);
    }

    #[test]
    fn a_rule_fails_where_it_should() {
        let good = Counts {
            products: 8,
            bulk: 4,
            ahead: 2,
            ..Counts::default()
        };
        let none = Resources::default();
        let shape = LinearShape::new([Type::Bf16; 2], [1, 4096, 4096]);
        let linear = ops::linear_plan(&shape).variant;
        let wrong = |counts, resources| faults("sm_90", &linear, &counts, &resources).len();
        assert_eq!(wrong(good, none), 0);
        assert_eq!(
            wrong(
                Counts {
                    products: 0,
                    ..good
                },
                none
            ),
            1
        );
        assert_eq!(
            wrong(
                Counts {
                    warp_products: 2,
                    ..good
                },
                none
            ),
            1
        );
        assert_eq!(wrong(Counts { bulk: 0, ..good }, none), 1);
        assert_eq!(wrong(Counts { ahead: 0, ..good }, none), 1);
        assert_eq!(wrong(good, Resources { stack: 8, ..none }), 1);
    }

    #[test]
    fn what_is_known_to_spill_is_hot_and_compiled() {
        let hot = hot();
        let names: Vec<String> = hot.iter().map(Variant::to_string).collect();
        for (arch, name, bytes) in KNOWN_STACKS {
            assert!(names.iter().any(|hot| hot == name), "{name}");
            assert!(arch.starts_with("sm_") && bytes > 0);
        }
        let catalog = ops::catalog();
        for variant in &hot {
            assert!(catalog.contains(variant), "{variant}");
        }
    }
}
