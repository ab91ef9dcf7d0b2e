//! Times each operation on the shapes of a small model: `cargo run --release -p tileinfer-cpu --example ops`.
//!
//! Options: `--threads N`, `--level avx512|avx2|neon|portable`. With one thread the time is that of the
//! thread's own work, so a busy machine can be measured too; with more it is the wall clock's.

use std::time::Instant;

use tileinfer_cpu::linear::{Element, Matrix, Packed, linear_packed};
use tileinfer_cpu::{Level, Pool, Rounding, ceiling};

fn main() {
    let mut threads = 2;
    let mut level = Level::best();
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let value = args.next().unwrap_or_default();
        match arg.as_str() {
            "--threads" => threads = value.parse().expect("--threads takes a number"),
            "--level" => level = Level::named(&value).expect("a level of this machine"),
            other => panic!("unknown option {other}"),
        }
    }
    let pool = Pool::new(threads);
    let read = ceiling::read_bandwidth(level, &pool, 1 << 30, 4);
    let flops = ceiling::multiply_add_rate(level, &pool, 4);
    println!(
        "{} threads, {}: read {:.1} GB/s, multiply-add {:.1} GFLOP/s",
        threads,
        level.name(),
        read / 1e9,
        flops / 1e9
    );
    let bench = Bench {
        pool,
        level,
        read,
        flops,
        start: Instant::now(),
    };
    for (n, k) in [
        (960, 576),
        (576, 576),
        (3072, 576),
        (576, 1536),
        (49152, 576),
        (6144, 1024),
        (1024, 3072),
    ] {
        for rows in [1, 2, 4, 8, 512] {
            bench.linear(rows, n, k);
        }
    }
}

struct Bench {
    pool: Pool,
    level: Level,
    read: f64,
    flops: f64,
    start: Instant,
}

impl Bench {
    /// Seconds since some moment.
    fn clock(&self) -> f64 {
        if self.pool.threads() > 1 {
            return self.start.elapsed().as_secs_f64();
        }
        let mut now = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: `now` is a timespec that the call may write.
        unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut now) };
        now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
    }

    /// The best time of some passes over `copies` different operands, per operand.
    fn time(&self, copies: usize, mut f: impl FnMut(usize)) -> f64 {
        let mut best = f64::INFINITY;
        for _ in 0..5 {
            let start = self.clock();
            (0..copies).for_each(&mut f);
            best = best.min((self.clock() - start) / copies as f64);
        }
        best
    }

    fn linear(&self, rows: usize, n: usize, k: usize) {
        let bytes = n * k * 2;
        // Decode sees every weight once a step, from memory: more copies than the caches hold.
        let copies = if rows >= 64 {
            1
        } else {
            (200_000_000 / bytes).clamp(2, 300)
        };
        let weights: Vec<u8> = (0..bytes * copies)
            .map(|i| if i % 2 == 1 { 0x3c } else { i as u8 })
            .collect();
        let x = vec![0.5; rows * k];
        let mut y = vec![0.0; rows * n];
        let mut packed = Packed::default();
        let time = self.time(copies, |i| {
            let weight = Matrix::new(&weights[i * bytes..(i + 1) * bytes], Element::Bf16, n, k)
                .expect("sizes fit");
            packed.pack(self.level, &self.pool, &x, rows, k, &[weight]);
            linear_packed(
                self.level,
                &self.pool,
                &mut y,
                &packed,
                &[weight],
                None,
                Rounding::Bf16,
            );
        });
        let (gbs, gflops) = (bytes as f64 / time, 2.0 * (rows * n * k) as f64 / time);
        println!(
            "linear {rows:4} x {k:5} -> {n:6}: {:9.1} us  {:6.1} GB/s ({:.2})  {:6.1} GFLOP/s ({:.2})",
            time * 1e6,
            gbs / 1e9,
            gbs / self.read,
            gflops / 1e9,
            gflops / self.flops
        );
    }
}
