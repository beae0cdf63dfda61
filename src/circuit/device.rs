//! Programs on a device: the workspace there, and runs that queue one operation after the other.

use super::program::Program;
use crate::backend::cuda::{Block, Device, Stream};
use crate::ensure;
use crate::error::{Result, reserve, vec_filled};
use crate::ops::{Batch, BatchPlaces, Gpu, GpuWeight, Place, Rows, Value, Weight, upload};
use std::sync::Arc;

/// What programs run in on a device; large enough for any program it is used with.
pub struct DeviceWorkspace {
    values: Block,
    /// The batch as kernels read it.
    batch: Block,
    scratch: Block,
    places: BatchPlaces,
    image: Vec<u8>,
}

impl DeviceWorkspace {
    /// For the largest of `programs` and batches with `kv_states` key/value states, whose sequences have at most `context` positions.
    pub fn new(device: &Arc<Device>, programs: &[&Program], kv_states: usize, context: usize) -> Result<DeviceWorkspace> {
        let most = |size: &dyn Fn(&Program) -> usize| programs.iter().map(|p| size(p)).max().unwrap_or(0);
        let (rows, segments) = (most(&|p| p.layout().max_rows), most(&|p| p.layout().max_sequences));
        let processors = device.info().processors;
        let places = BatchPlaces::new(rows, segments, kv_states);
        let pages = segments * kv_states * (context.div_ceil(crate::ops::PAGE) + 1);
        Ok(DeviceWorkspace {
            values: Block::new(device, most(&Program::workspace_bytes), "workspace")?,
            batch: Block::new(device, places.bytes(pages), "a batch for the device")?,
            scratch: Block::new(device, most(&|p| p.gpu_scratch_bytes(context, processors)), "scratch of operations")?,
            places,
            image: Vec::new(),
        })
    }

    /// Queues all of a program. Rows of its values are there once the stream has come so far.
    pub fn run(&mut self, program: &Program, stream: &Stream, batch: &Batch, weights: &[GpuWeight]) -> Result<()> {
        ensure!(self.values.len() >= program.workspace_bytes(), Internal, "the workspace is sized by the largest program");
        self.places.write(batch, self.batch.address(), &mut self.image)?;
        ensure!(self.image.len() <= self.batch.len(), Internal, "a batch of more pages than its sequences' context has");
        stream.write(self.batch.address(), &self.image)?;
        let queue = stream.queue()?;
        let gpu = Gpu {
            base: self.values.address(),
            slots: &program.layout().slots,
            rows: batch.tokens.len(),
            segments: batch.segments.len(),
            batch_at: self.batch.address(),
            batch,
            weights,
            rounds: program.rounds(),
            stream: &queue,
            scratch: (self.scratch.address(), self.scratch.len()),
        };
        program.launch(&gpu, 0, || false).map(|_| ())
    }

    /// Rows of a value after a run; `[rows, width]`. For values that were kept.
    pub fn read(&self, program: &Program, stream: &Stream, batch: &Batch, value: Value, out: &mut Vec<f32>) -> Result<()> {
        let slot = program.layout().slots[value.0 as usize];
        let rows = if slot.rows == Rows::All { batch.tokens.len() } else { batch.segments.len() };
        out.clear();
        reserve(out, rows * slot.width, "a copy of a value")?;
        let mut bytes = vec_filled(4 * rows.saturating_sub(1) * slot.stride + 4 * slot.width, 0u8, "a copy of a value")?;
        stream.read(self.values.address() + slot.offset as u64, &mut bytes)?;
        for row in 0..rows {
            let row = &bytes[4 * row * slot.stride..][..4 * slot.width];
            out.extend(row.as_chunks().0.iter().map(|b| f32::from_ne_bytes(*b)));
        }
        Ok(())
    }

    /// Sets every byte of the workspace: for tests, since values that nobody writes must not matter.
    pub fn poison(&self, stream: &Stream) -> Result<()> {
        let bytes = vec_filled(self.values.len(), 0xffu8, "poison")?;
        stream.write(self.values.address(), &bytes)
    }
}

/// Weights on a device, each in memory of its own.
pub struct DeviceWeights<'a> {
    stream: &'a Stream,
    /// As operations see them.
    pub weights: Vec<GpuWeight>,
    blocks: Vec<Block>,
}

impl<'a> DeviceWeights<'a> {
    /// Copies all of them.
    pub fn new(stream: &'a Stream, weights: &[Weight]) -> Result<DeviceWeights<'a>> {
        let mut made = DeviceWeights { stream, weights: Vec::new(), blocks: Vec::new() };
        for weight in weights {
            let put = upload(weight, &mut made)?;
            made.weights.push(put);
        }
        Ok(made)
    }
}

impl Place for DeviceWeights<'_> {
    fn put(&mut self, bytes: &[u8], what: &str) -> Result<u64> {
        let block = Block::new(self.stream.device(), bytes.len(), what)?;
        if !bytes.is_empty() {
            self.stream.write(block.address(), bytes)?;
        }
        let address = block.address();
        self.blocks.push(block);
        Ok(address)
    }
}
