//! Weights on a device: one block for most of them, and staging that they are copied from while the next bytes are made. What is packed there passes
//! through scratch: one stream orders the copies into it and the kernels that empty it, which take a few hundredths of a copy's time.
#![allow(unsafe_code)] // pinned copies, argument structs

use crate::backend::cpu::pack::{LANES, Layout};
use crate::backend::cuda::launch::{Args, Grid, Kernel, Launch, bytes_of};
use crate::backend::cuda::{Block, Event, Pinned, Stream};
use crate::ensure;
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
    /// Rows before they are packed, and the most bytes that it may have.
    scratch: Option<Block>,
    spare: usize,
}

/// What packs rows of 16-bit floats: kernels/pack.cu.
pub(super) const PACK: Kernel = Kernel { file: "pack", name: "pack_rows" };
/// A warp's share of a row, and warps of a block.
const PACK_COLS: usize = 64;
const PACK_WARPS: usize = 8;

#[derive(Clone, Copy)]
#[repr(C)]
struct PackArgs {
    rows: u64,
    panels: u64,
    stride: u32,
    count: u32,
    cols: u32,
    pairs: u32,
}

// SAFETY: the struct of kernels/pack.cu.
unsafe impl Args for PackArgs {}

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
        Ok(DeviceWeights {
            stream: Arc::clone(stream),
            weights: Vec::new(),
            region,
            used: 0,
            blocks: Vec::new(),
            staging: Vec::new(),
            turn: 0,
            scratch: None,
            spare: 0,
        })
    }

    /// With `bytes` of the device's memory that scratch may take until the load ends.
    pub fn with_spare(mut self, bytes: usize) -> DeviceWeights {
        self.spare = bytes.min(DeviceWeights::STAGE);
        self
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

    /// Bytes from one row of `cols` elements of 16 bits to the next, where rows are sent to be packed.
    pub fn stride(cols: usize) -> usize {
        cols.saturating_mul(2).checked_next_multiple_of(16).unwrap_or(usize::MAX)
    }

    /// Such rows that can go at once, whole panels of them; 0 where scratch has no room for one.
    pub fn most_rows(&self, cols: usize) -> usize {
        self.spare / DeviceWeights::stride(cols).max(1) / LANES * LANES
    }

    /// Queues the copy of the first `rows` rows of what [`DeviceWeights::stage`] gave, `stride` bytes apart, and the kernel that packs them at `to`.
    pub fn send_rows(&mut self, to: u64, layout: Layout, rows: usize, cols: usize) -> Result<()> {
        let (stride, most) = (DeviceWeights::stride(cols), self.most_rows(cols));
        let is_half = matches!(layout, Layout::Bf16 | Layout::F16);
        ensure!(is_half && (1..=most).contains(&rows), Internal, "{rows} rows as {layout:?}, {most} of 16 bits fit");
        let Some((pinned, end)) = self.staging.get(self.turn) else { return Ok(()) };
        let scratch = match &mut self.scratch {
            Some(scratch) => scratch,
            none => none.insert(Block::new(self.stream.device(), self.spare, "rows of weights")?),
        };
        // SAFETY: the bytes are not touched before `end` was waited for.
        unsafe { self.stream.write_pinned(scratch.address(), pinned, 0..rows * stride) }?;
        self.turn = (self.turn + 1) % STAGES;
        end.record(&self.stream)?;
        let pairs = u32::from(layout == Layout::Bf16);
        let args = PackArgs { rows: scratch.address(), panels: to, stride: stride as u32, count: rows as u32, cols: cols as u32, pairs };
        let steps = rows.div_ceil(LANES) * cols.div_ceil(PACK_COLS);
        self.stream.queue()?.launch(PACK, Grid::new([steps.div_ceil(PACK_WARPS), 1, 1], 32 * PACK_WARPS), bytes_of(&args))
    }

    /// Waits for the copies and gives up staging and scratch.
    pub fn finish(&mut self) -> Result<()> {
        self.stream.synchronize()?;
        self.staging.clear();
        self.scratch = None;
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
