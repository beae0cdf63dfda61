//! Weights on a device, and the way there.
#![allow(unsafe_code)] // pinned copies

use crate::backend::cuda::{Block, Event, Pinned, Stream};
use crate::error::{Result, reserve};
use crate::ops::{GpuWeight, Place, Weight, upload};
use std::sync::Arc;

/// Weights on a device: one block for most of them, and staging to fill it.
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
/// Bytes that go at once.
const STAGE: usize = 8 << 20;

impl DeviceWeights {
    /// None yet, with room for `bytes`.
    pub fn new(stream: &Arc<Stream>, bytes: usize) -> Result<DeviceWeights> {
        let device = stream.device();
        Ok(DeviceWeights {
            stream: Arc::clone(stream),
            weights: Vec::new(),
            region: Block::new(device, bytes, "packed weights")?,
            used: 0,
            blocks: Vec::new(),
            staging: Vec::new(),
            turn: 0,
        })
    }

    /// Bytes of the host's memory that a load uses on the way.
    pub const STAGING: usize = 2 * STAGE;

    /// What a weight of `len` bytes takes of the room.
    pub fn room(len: usize) -> usize {
        len.checked_next_multiple_of(ALIGN).unwrap_or(len)
    }

    /// Puts one more.
    pub fn push(&mut self, weight: &Weight) -> Result<()> {
        let put = upload(weight, self)?;
        reserve(&mut self.weights, 1, "the list of weights")?;
        self.weights.push(put);
        Ok(())
    }

    /// Counts one that is not put there, and that no operation there uses.
    pub fn push_none(&mut self) -> Result<()> {
        reserve(&mut self.weights, 1, "the list of weights")?;
        self.weights.push(GpuWeight::Vector { data: 0, len: 0 });
        Ok(())
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
        let address = if bytes.len() <= self.region.len() - self.used {
            let address = self.region.address() + self.used as u64;
            self.used = (self.used + DeviceWeights::room(bytes.len())).min(self.region.len());
            address
        } else {
            let block = Block::new(self.stream.device(), bytes.len(), what)?;
            let address = block.address();
            self.blocks.push(block);
            address
        };
        if self.staging.is_empty() {
            for _ in 0..2 {
                let device = self.stream.device();
                self.staging.push((Pinned::new(device, STAGE, "staging of weights")?, Event::new(device, false)?));
            }
        }
        for (index, piece) in bytes.chunks(STAGE).enumerate() {
            let (pinned, end) = &mut self.staging[self.turn];
            self.turn = 1 - self.turn;
            end.wait()?;
            pinned.as_mut_slice()[..piece.len()].copy_from_slice(piece);
            // SAFETY: the bytes are not touched before `end` was waited for.
            unsafe { self.stream.write_pinned(address + (index * STAGE) as u64, pinned, 0..piece.len()) }?;
            end.record(&self.stream)?;
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
