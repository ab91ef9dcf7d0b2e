//! Each operation of each level against plain scalar code.

use super::{Isa, Kernel, Level};

fn each_level<K: Kernel + Clone>(kernel: &K) {
    for level in Level::all() {
        level.dispatch(kernel.clone());
    }
}

/// Values of all magnitudes and signs, the same every time.
fn values(n: usize) -> Vec<f32> {
    let mut state = 0x9e37_79b9_u32;
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let x = f32::from_bits(state);
            if x.is_finite() { x } else { 1.5 }
        })
        .collect()
}

/// The fold that every level must follow.
fn tree(v: &[f32]) -> f32 {
    let mut v = v.to_vec();
    while v.len() > 1 {
        let half = v.len() / 2;
        v = (0..half).map(|i| v[i] + v[i + half]).collect();
    }
    v[0]
}

#[derive(Clone)]
struct Reductions;
impl Kernel for Reductions {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let n = I::LANES;
        let all: Vec<f32> = values(4 * n).iter().map(|x| x.sin()).collect();
        // SAFETY: each load reads one of the four chunks of LANES.
        let v = [0, 1, 2, 3].map(|i| unsafe { isa.load(all.as_ptr().add(i * n)) });
        let want = [0, 1, 2, 3].map(|i| tree(&all[i * n..(i + 1) * n]));
        assert_eq!(isa.reduce_add4(v), want);
        for i in 0..4 {
            assert_eq!(isa.reduce_add(v[i]), want[i]);
            let max = all[i * n..(i + 1) * n]
                .iter()
                .copied()
                .fold(f32::MIN, f32::max);
            assert_eq!(isa.reduce_max(v[i]), max);
        }
    }
}

#[test]
fn reductions_follow_the_tree() {
    each_level(&Reductions);
}

#[derive(Clone)]
struct Rounding;
impl Kernel for Rounding {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let mut cases = values(4096);
        cases.extend([
            0.0,
            -0.0,
            f32::INFINITY,
            f32::NEG_INFINITY,
            f32::MAX,
            f32::MIN,
        ]);
        cases.extend([
            f32::MIN_POSITIVE,
            1e-40,
            -1e-42,
            f32::NAN,
            f32::from_bits(0xffff_ffff),
        ]);
        cases.extend([0x3f80_8000, 0x3f81_8000, 0x3f80_8001, 0x3f80_7fff].map(f32::from_bits));
        cases.resize(cases.len().next_multiple_of(I::LANES), 1.0);
        for chunk in cases.chunks(I::LANES) {
            let mut got = vec![0.0; I::LANES];
            // SAFETY: both hold LANES values.
            unsafe { isa.store(got.as_mut_ptr(), isa.round_bf16(isa.load(chunk.as_ptr()))) };
            for (x, got) in chunk.iter().zip(got) {
                let want = half::bf16::from_f32(*x).to_f32();
                if x.is_nan() {
                    assert!(got.is_nan());
                } else {
                    assert_eq!(got.to_bits(), want.to_bits(), "{x:e}");
                }
            }
        }
    }
}

#[test]
fn rounding_to_bf16_is_to_nearest_even() {
    each_level(&Rounding);
}

#[derive(Clone)]
struct Pairs;
impl Kernel for Pairs {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let n = 2 * I::LANES;
        let x = values(n);
        let mut back = vec![0.0; n];
        let (mut first, mut second) = (vec![0.0; I::LANES], vec![0.0; I::LANES]);
        // SAFETY: every buffer holds what is read or written: n values, or LANES.
        unsafe {
            let (even, odd) = isa.load_deinterleaved(x.as_ptr());
            isa.store(first.as_mut_ptr(), even);
            isa.store(second.as_mut_ptr(), odd);
            isa.store_interleaved(back.as_mut_ptr(), even, odd);
        }
        for i in 0..I::LANES {
            assert_eq!((first[i], second[i]), (x[2 * i], x[2 * i + 1]));
        }
        assert_eq!(back, x);

        // One byte in, to be sure that no alignment is assumed.
        let narrow: Vec<half::bf16> = x.iter().map(|&x| half::bf16::from_f32(x)).collect();
        let mut bytes = vec![0_u8];
        bytes.extend(narrow.iter().flat_map(|x| x.to_le_bytes()));
        // SAFETY: n bf16 follow the first byte.
        unsafe {
            let (even, odd) = isa.load_bf16_pair(bytes.as_ptr().add(1));
            isa.store_interleaved(back.as_mut_ptr(), even, odd);
        }
        assert_eq!(back, narrow.iter().map(|x| x.to_f32()).collect::<Vec<_>>());

        let bytes: Vec<i8> = (0..=I::LANES).map(|i| (i * 37 % 256) as i8).collect();
        // SAFETY: LANES bytes follow the first.
        unsafe {
            let v = isa.load_i8(bytes.as_ptr().add(1).cast());
            isa.store(first.as_mut_ptr(), v);
        }
        assert!(
            first
                .iter()
                .zip(&bytes[1..])
                .all(|(&x, &b)| x == f32::from(b))
        );

        let narrow: Vec<half::f16> = x.iter().map(|&x| half::f16::from_f32(x.sin())).collect();
        let mut bytes = vec![0_u8];
        bytes.extend(narrow.iter().flat_map(|x| x.to_le_bytes()));
        // SAFETY: n f16 follow the first byte.
        unsafe {
            let (first, second) = isa.load_f16_pair(bytes.as_ptr().add(1));
            isa.store(back.as_mut_ptr(), first);
            isa.store(back.as_mut_ptr().add(I::LANES), second);
        }
        assert_eq!(back, narrow.iter().map(|x| x.to_f32()).collect::<Vec<_>>());
    }
}

#[test]
fn pairs_are_loaded_and_stored_in_the_stated_order() {
    each_level(&Pairs);
}

#[derive(Clone)]
struct Lanewise;
impl Kernel for Lanewise {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let n = I::LANES;
        let all: Vec<f32> = values(3 * n).iter().map(|x| 3.0 * x.cos()).collect();
        let (a, b, c) = (&all[..n], &all[n..2 * n], &all[2 * n..]);
        let mut got = vec![0.0; n];
        // SAFETY: a, b, c and got hold LANES values each.
        let (x, y, z) = unsafe {
            (
                isa.load(a.as_ptr()),
                isa.load(b.as_ptr()),
                isa.load(c.as_ptr()),
            )
        };
        let mut check = |v: I::V, want: &dyn Fn(f32, f32, f32) -> f32| {
            // SAFETY: got holds LANES values.
            unsafe { isa.store(got.as_mut_ptr(), v) };
            for i in 0..n {
                assert_eq!(got[i], want(a[i], b[i], c[i]));
            }
        };
        check(isa.add(x, y), &|a, b, _| a + b);
        check(isa.sub(x, y), &|a, b, _| a - b);
        check(isa.mul(x, y), &|a, b, _| a * b);
        check(isa.div(x, y), &|a, b, _| a / b);
        check(isa.max(x, y), &|a, b, _| a.max(b));
        check(isa.min(x, y), &|a, b, _| a.min(b));
        check(isa.select_positive(x, y, z), &|a, b, c| {
            if a > 0.0 { b } else { c }
        });
        let magic = isa.splat(12_582_912.0 + 3.0);
        check(isa.add_exponent(x, magic), &|a, _, _| a * 8.0);
        // SAFETY: got holds LANES values.
        unsafe { isa.store(got.as_mut_ptr(), isa.mul_add(x, y, z)) };
        for i in 0..n {
            let (fused, plain) = (a[i].mul_add(b[i], c[i]), a[i] * b[i] + c[i]);
            assert!(got[i] == fused || got[i] == plain);
        }
    }
}

#[test]
fn lanewise_operations_are_those_of_f32() {
    each_level(&Lanewise);
}
