//! What the GPU can do, measured: the yardstick of a benchmark. Reads and products are those of this crate's own
//! kernels, as nothing but the driver is there to be asked; it knows nothing about models.

use half::bf16;
use tileinfer::Result;

use crate::driver::Device;
use crate::kernels::Type;
use crate::ops::{LinearShape, Ops};

/// Columns of the weight that is read.
const COLUMNS: usize = 4096;

/// Rows of it, 4 GiB together, where there is room.
const ROWS: usize = 524_288;

/// Side of the product.
const SIDE: usize = 8192;

/// Random values that the product's operands repeat.
const RANDOM: usize = 1 << 20;

/// The best that was measured.
#[derive(Debug, Clone, Copy)]
pub struct Ceilings {
    /// Bytes read a second: a weight of several GB streamed for one row.
    pub read: f64,
    /// Bytes read and written a second: the driver's copy of as much.
    pub copy: f64,
    /// Operations a second: a bf16 product of 8192 cubed of normal random values, for two seconds.
    pub matmul: f64,
}

/// Measures for about three seconds.
///
/// # Errors
/// [`tileinfer::Error::OutOfMemory`] if less than a GB or so is free; those of a launch.
pub fn measure(ops: &Ops) -> Result<Ceilings> {
    let (free, _) = ops.device().memory()?;
    let room = free as usize / 3 / (2 * COLUMNS);
    let rows = (room / 64 * 64).clamp(64, ROWS);
    let (read, copy) = bandwidth(ops, rows)?;
    Ok(Ceilings {
        read,
        copy,
        matmul: product(ops)?,
    })
}

fn bandwidth(ops: &Ops, rows: usize) -> Result<(f64, f64)> {
    let device = ops.device();
    let bytes = rows * COLUMNS * 2;
    let what = "the array whose reading is timed";
    let (weight, other) = (device.alloc(what, bytes)?, device.alloc(what, bytes)?);
    let (x, y) = (
        device.alloc(what, COLUMNS * 2)?,
        device.alloc(what, rows * 2)?,
    );
    for (memory, bytes) in [(&weight, bytes), (&other, bytes), (&x, COLUMNS * 2)] {
        device.queue_fill(memory.address(), 0, bytes)?;
    }
    let read = shortest(device, &mut || {
        let shape = LinearShape::new([Type::Bf16; 2], [1, rows, COLUMNS]);
        let (y, x, w) = (y.address(), x.address(), weight.address());
        ops.linear(y, x.into(), w.into(), None, &shape)
    })?;
    let copy = shortest(device, &mut || {
        device.queue_copy(other.address(), weight.address(), bytes)
    })?;
    Ok((bytes as f64 / read, 2.0 * bytes as f64 / copy))
}

/// Seconds of the fastest of twenty runs.
fn shortest(device: &std::sync::Arc<Device>, body: &mut dyn FnMut() -> Result<()>) -> Result<f64> {
    let (start, end) = (device.event()?, device.event()?);
    let mut best = f64::INFINITY;
    for _ in 0..20 {
        start.record()?;
        body()?;
        end.record()?;
        end.wait()?;
        best = best.min(f64::from(start.milliseconds_to(&end)?) / 1e3);
    }
    Ok(best)
}

fn product(ops: &Ops) -> Result<f64> {
    let device = ops.device();
    let what = "the product that is timed";
    let bytes = SIDE * SIDE * 2;
    let arrays = [
        device.alloc(what, bytes)?,
        device.alloc(what, bytes)?,
        device.alloc(what, bytes)?,
    ];
    let values = normal(RANDOM);
    for memory in &arrays[..2] {
        for part in 0..(SIDE * SIDE / RANDOM) {
            let to = memory.address() + (part * RANDOM * 2) as u64;
            device.upload(to, &values)?;
        }
    }
    let shape = LinearShape::new([Type::Bf16; 2], [SIDE; 3]);
    let [w, x, y] = arrays.each_ref().map(|memory| memory.address());
    let (start, end) = (device.event()?, device.event()?);
    let (mut seconds, mut products) = (0.0, 0);
    let mut warm = false;
    while seconds < 2.0 {
        const AT_ONCE: usize = 50;
        start.record()?;
        for _ in 0..AT_ONCE {
            ops.linear(y, x.into(), w.into(), None, &shape)?;
        }
        end.record()?;
        end.wait()?;
        if warm {
            seconds += f64::from(start.milliseconds_to(&end)?) / 1e3;
            products += AT_ONCE;
        }
        warm = true;
    }
    Ok(products as f64 * 2.0 * (SIDE as f64).powi(3) / seconds)
}

/// Bytes of `count` normal random bf16 values (Box and Muller), the same every time.
pub fn normal(count: usize) -> Vec<u8> {
    let mut state = 1_u64;
    let mut uniform = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((state >> 40) as f32 + 0.5) / (1 << 24) as f32
    };
    (0..count)
        .flat_map(|_| {
            let (radius, angle) = ((-2.0 * uniform().ln()).sqrt(), uniform());
            bf16::from_f32(radius * (std::f32::consts::TAU * angle).cos()).to_le_bytes()
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn normal_values_are_normal() {
        let values: Vec<f64> = normal(RANDOM)
            .as_chunks()
            .0
            .iter()
            .map(|&two| f64::from(bf16::from_le_bytes(two)))
            .collect();
        let mean = values.iter().sum::<f64>() / RANDOM as f64;
        let square = values.iter().map(|value| value * value).sum::<f64>() / RANDOM as f64;
        assert!(
            mean.abs() < 0.01 && (square - 1.0).abs() < 0.01,
            "{mean} {square}"
        );
    }
}
