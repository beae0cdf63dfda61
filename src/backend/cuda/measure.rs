//! What a device's memory gives a plain read: the ceiling that steps are held against.

use super::launch::{Args, Grid, Kernel, Launch, bytes_of};
use super::{Block, Event, Stream};
use crate::error::Result;
use std::sync::Arc;

#[derive(Clone, Copy)]
#[repr(C)]
struct MeasureArgs {
    data: u64,
    out: u64,
    words: u64,
    seed: u32,
    spare: u32,
}

#[allow(unsafe_code)]
// SAFETY: the struct of kernels/measure.cu.
unsafe impl Args for MeasureArgs {}

/// Bytes a second of the best of `rounds` reads of `bytes` random bytes.
pub fn read_bandwidth(stream: &Arc<Stream>, bytes: usize, rounds: usize) -> Result<f64> {
    let device = stream.device();
    let (data, out) = (Block::new(device, bytes, "a block to read")?, Block::new(device, 256, "a result")?);
    let args = MeasureArgs { data: data.address(), out: out.address(), words: bytes as u64 / 16, seed: 1, spare: 0 };
    let (begin, end) = (Event::new(device, true)?, Event::new(device, true)?);
    let queue = stream.queue()?;
    let blocks = |each: usize| device.info().processors * each;
    let kernel = |name| Kernel { file: "measure", name };
    queue.launch(kernel("measure_fill"), Grid::new([blocks(8), 1, 1], 256), bytes_of(&args))?;
    let mut best = f32::INFINITY;
    for _ in 0..rounds {
        begin.record(stream)?;
        queue.launch(kernel("measure_read"), Grid::new([blocks(4), 1, 1], 512), bytes_of(&args))?;
        end.record(stream)?;
        stream.synchronize()?;
        best = best.min(end.since(&begin)?);
    }
    Ok(bytes as f64 / f64::from(best) * 1e3)
}
