//! What the machine can do: the read bandwidth and the rate of f32 multiply-adds, measured.
//!
//! Every speed is printed beside these, taken in the same run.

use std::sync::atomic::{AtomicU32, Ordering};

use crate::memory::Aligned;
use crate::pool::Pool;
use crate::simd::{Isa, Kernel, Level};

/// The best of `passes` plain reads of `bytes` of memory by all threads of the pool, in bytes a second of
/// `clock` (which gives seconds).
pub fn read_bandwidth(
    level: Level,
    pool: &Pool,
    bytes: usize,
    passes: usize,
    clock: &dyn Fn() -> f64,
) -> f64 {
    const CHUNK: usize = 1 << 18;
    let mut data = Aligned::new(bytes / 4, 0.0_f32);
    data.fill(1.0);
    let data = &data[..];
    let sink = AtomicU32::new(0);
    let mut best = f64::INFINITY;
    for _ in 0..passes {
        let start = clock();
        pool.run_chunks(data.len(), CHUNK, |range| {
            let sum = level.dispatch(Read(&data[range]));
            sink.fetch_xor(sum.to_bits(), Ordering::Relaxed);
        });
        best = best.min(clock() - start);
    }
    std::hint::black_box(sink.into_inner());
    (data.len() * 4) as f64 / best
}

struct Read<'a>(&'a [f32]);

impl Kernel for Read<'_> {
    type Output = f32;
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> f32 {
        let mut sums = [isa.splat(0.0); 8];
        for block in self.0.chunks_exact(8 * I::LANES) {
            for i in 0..8 {
                // SAFETY: the block holds eight vectors.
                unsafe {
                    let p = block.as_ptr().add(i * I::LANES);
                    isa.prefetch(p.wrapping_add(1024).cast());
                    sums[i] = isa.add(sums[i], isa.load(p));
                }
            }
        }
        let [a, b, c, d, e, f, g, h] = sums;
        isa.reduce_add4([isa.add(a, b), isa.add(c, d), isa.add(e, f), isa.add(g, h)])
            .iter()
            .sum()
    }
}

/// The best of `passes` copies of `bytes` of memory by all threads of the pool, in bytes read and written a
/// second of `clock`.
pub fn copy_bandwidth(pool: &Pool, bytes: usize, passes: usize, clock: &dyn Fn() -> f64) -> f64 {
    let from = vec![1_u8; bytes];
    let mut to = vec![0_u8; bytes];
    let share = bytes.div_ceil(pool.threads());
    let mut best = f64::INFINITY;
    for _ in 0..passes {
        let parts: Vec<_> = from
            .chunks(share)
            .zip(to.chunks_mut(share))
            .map(std::sync::Mutex::new)
            .collect();
        let start = clock();
        pool.run(parts.len(), |i| {
            if let Ok(mut part) = parts[i].lock() {
                let (from, to) = &mut *part;
                to.copy_from_slice(from);
            }
        });
        best = best.min(clock() - start);
    }
    std::hint::black_box(&to);
    2.0 * bytes as f64 / best
}

/// f32 operations a second (a multiply-add is two) of all threads of the pool: a register-tiled product of
/// operands that lie in the L1 cache, the best of `passes`, by `clock` (which gives seconds).
pub fn multiply_add_rate(level: Level, pool: &Pool, passes: usize, clock: &dyn Fn() -> f64) -> f64 {
    /// Steps of K of one product, and products of one pass and thread.
    const STEPS: usize = 64;
    const ROUNDS: usize = 4000;
    let sink = AtomicU32::new(0);
    let mut best = f64::INFINITY;
    for _ in 0..passes {
        let start = clock();
        pool.run(4 * pool.threads(), |_| {
            let sum = level.dispatch(Multiply {
                steps: STEPS,
                rounds: ROUNDS / 4,
            });
            sink.fetch_xor(sum.to_bits(), Ordering::Relaxed);
        });
        best = best.min(clock() - start);
    }
    std::hint::black_box(sink.into_inner());
    let flops = 2 * level.lanes() * 12 * STEPS * ROUNDS * pool.threads();
    flops as f64 / best
}

struct Multiply {
    steps: usize,
    rounds: usize,
}

impl Kernel for Multiply {
    type Output = f32;
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) -> f32 {
        let a = vec![0.5_f32; self.steps * 3 * I::LANES];
        let b = vec![0.25_f32; self.steps * 4 * I::LANES];
        let mut total = isa.splat(0.0);
        for _ in 0..self.rounds {
            let mut sums = [[isa.splat(0.0); 4]; 3];
            let (a, b) = (std::hint::black_box(&a), std::hint::black_box(&b));
            for s in 0..self.steps {
                // SAFETY: step `s` of `a` has 3 vectors, that of `b` 4.
                unsafe {
                    let b = b.as_ptr().add(4 * s * I::LANES);
                    let w = [
                        isa.load(b),
                        isa.load(b.add(I::LANES)),
                        isa.load(b.add(2 * I::LANES)),
                        isa.load(b.add(3 * I::LANES)),
                    ];
                    for r in 0..3 {
                        let x = isa.load(a.as_ptr().add((3 * s + r) * I::LANES));
                        for i in 0..4 {
                            sums[r][i] = isa.mul_add(w[i], x, sums[r][i]);
                        }
                    }
                }
            }
            for row in sums {
                for v in row {
                    total = isa.add(total, v);
                }
            }
        }
        isa.reduce_add(total)
    }
}
