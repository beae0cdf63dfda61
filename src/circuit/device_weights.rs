//! Weights on a device: one block for most of them, and staging that they are copied from while the next bytes are made.
#![allow(unsafe_code)] // pinned copies

use crate::backend::cuda::{Block, Event, Pinned, Stream};
use crate::error::{Result, reserve};
use crate::ops::{GpuWeight, Place, Weight, upload};
use std::sync::Arc;

/// The weights, in the order in which they were put there.
pub struct DeviceWeights {
    stream: Arc<Stream>,
    /// As operations see them.
    pub weights: Vec<GpuWeight>,
    region: Block,
    used: usize,
    /// What did not fit the region.
    blocks: Vec<Block>,
    /// Bytes on their way, with the end of the copy that used them last.
    staging: Vec<(Pinned, Event)>,
    turn: usize,
}

/// Every weight starts on a multiple of this.
const ALIGN: usize = 256;
/// Buffers of staging: one is written, one is copied, and one is between the two.
const STAGES: usize = 3;

impl DeviceWeights {
    /// Bytes that go at once: enough for every worker to have a share, few enough to be on their way soon.
    pub const STAGE: usize = 16 << 20;
    /// Bytes of the host's memory that a load uses on the way.
    pub const STAGING: usize = STAGES * DeviceWeights::STAGE;

    /// None yet, with room for `bytes`.
    pub fn new(stream: &Arc<Stream>, bytes: usize) -> Result<DeviceWeights> {
        let region = Block::new(stream.device(), bytes, "packed weights")?;
        let stream = Arc::clone(stream);
        Ok(DeviceWeights { stream, weights: Vec::new(), region, used: 0, blocks: Vec::new(), staging: Vec::new(), turn: 0 })
    }

    /// What a weight of `len` bytes takes of the room.
    pub fn room(len: usize) -> usize {
        len.checked_next_multiple_of(ALIGN).unwrap_or(len)
    }

    /// Puts one more.
    pub fn push(&mut self, weight: &Weight) -> Result<()> {
        let put = upload(weight, self)?;
        self.push_sent(put)
    }

    /// Counts one whose bytes were sent.
    pub fn push_sent(&mut self, weight: GpuWeight) -> Result<()> {
        reserve(&mut self.weights, 1, "the list of weights")?;
        self.weights.push(weight);
        Ok(())
    }

    /// Counts one that is not put there, and that no operation there uses.
    pub fn push_none(&mut self) -> Result<()> {
        self.push_sent(GpuWeight::Vector { data: 0, len: 0 })
    }

    /// Room for `len` bytes of `what`; its address.
    pub fn take(&mut self, len: usize, what: &str) -> Result<u64> {
        if len <= self.region.len() - self.used {
            let address = self.region.address() + self.used as u64;
            self.used = (self.used + DeviceWeights::room(len)).min(self.region.len());
            return Ok(address);
        }
        let block = Block::new(self.stream.device(), len, what)?;
        let address = block.address();
        reserve(&mut self.blocks, 1, "the list of weights")?;
        self.blocks.push(block);
        Ok(address)
    }

    /// `STAGE` bytes to write, which [`DeviceWeights::send`] then sends; waits for the copy that used them last.
    pub fn stage(&mut self) -> Result<&mut [u8]> {
        while self.staging.len() < STAGES {
            let device = self.stream.device();
            self.staging.push((Pinned::new(device, DeviceWeights::STAGE, "staging of weights")?, Event::new(device, false)?));
        }
        let (pinned, end) = &mut self.staging[self.turn];
        end.wait()?;
        Ok(pinned.as_mut_slice())
    }

    /// Queues the copy of the first `len` bytes of what [`DeviceWeights::stage`] gave.
    pub fn send(&mut self, to: u64, len: usize) -> Result<()> {
        let Some((pinned, end)) = self.staging.get(self.turn) else { return Ok(()) };
        // SAFETY: the bytes are not touched before `end` was waited for.
        unsafe { self.stream.write_pinned(to, pinned, 0..len) }?;
        self.turn = (self.turn + 1) % STAGES;
        end.record(&self.stream)
    }

    /// Waits for the copies and gives up the staging.
    pub fn finish(&mut self) -> Result<()> {
        self.stream.synchronize()?;
        self.staging.clear();
        Ok(())
    }
}

impl Place for DeviceWeights {
    fn put(&mut self, bytes: &[u8], what: &str) -> Result<u64> {
        let address = self.take(bytes.len(), what)?;
        for (index, piece) in bytes.chunks(DeviceWeights::STAGE).enumerate() {
            self.stage()?[..piece.len()].copy_from_slice(piece);
            self.send(address + (index * DeviceWeights::STAGE) as u64, piece.len())?;
        }
        Ok(address)
    }
}

impl Drop for DeviceWeights {
    fn drop(&mut self) {
        // Copies may still read the staging.
        let _ = self.stream.synchronize();
    }
}
