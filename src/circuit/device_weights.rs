//! Weights on a device: one block for most of them, and staging that they are copied from while the next bytes are made. What is packed there passes
//! through scratch. Of two streams each has a half of it, so that one copies while the other packs.
#![allow(unsafe_code)] // pinned copies, argument structs

use super::staging::{Pieces, Staging};
use crate::backend::cpu::pack::{LANES, Layout};
use crate::backend::cpu::pool::Pool;
use crate::backend::cuda::launch::{Args, Grid, Kernel, Launch, bytes_of};
use crate::backend::cuda::{Block, Stream};
use crate::bail;
use crate::error::{Result, reserve};
use crate::ops::{GpuWeight, Place, Weight, upload};
use std::ops::Range;
use std::sync::Arc;

/// The weights, in the order in which they were put there.
pub struct DeviceWeights {
    /// Full buffers go by turns.
    streams: [Arc<Stream>; 2],
    /// As operations see them.
    pub weights: Vec<GpuWeight>,
    region: Block,
    used: usize,
    /// What did not fit the region.
    blocks: Vec<Block>,
    staging: Staging,
    /// Rows before they are packed, and the most bytes that a stream may have of it.
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

/// Bytes of a worker's turn: some pages of a file.
const PIECE: usize = 128 << 10;
/// Every weight starts on a multiple of this.
const ALIGN: usize = 256;

impl DeviceWeights {
    /// Bytes of the host's memory that a load uses on the way.
    pub const STAGING: usize = Staging::BUFFERS * Staging::BYTES;

    /// None yet, with room for `bytes`.
    pub fn new(stream: &Arc<Stream>, bytes: usize) -> Result<DeviceWeights> {
        let region = Block::new(stream.device(), bytes, "packed weights")?;
        Ok(DeviceWeights {
            streams: [Arc::clone(stream), Arc::new(stream.another()?)],
            weights: Vec::new(),
            region,
            used: 0,
            blocks: Vec::new(),
            staging: Staging::default(),
            scratch: None,
            spare: 0,
        })
    }

    /// With `bytes` of the device's memory that scratch may take until the load ends.
    pub fn with_spare(mut self, bytes: usize) -> DeviceWeights {
        self.spare = (bytes / self.streams.len()).min(Staging::BYTES) / ALIGN * ALIGN;
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
        let block = Block::new(self.streams[0].device(), len, what)?;
        let address = block.address();
        reserve(&mut self.blocks, 1, "the list of weights")?;
        self.blocks.push(block);
        Ok(address)
    }

    /// Sends pieces to `to`, as `fill` makes them; `pass` sees them on their way, many together, with where they begin and end. `filled` is told
    /// which bytes were made.
    pub fn send<S: Default>(
        &mut self,
        to: u64,
        pieces: Pieces,
        pool: &Pool,
        fill: impl Fn(&mut S, usize, &mut [u8]) -> Result<()> + Sync,
        filled: impl Fn(Range<usize>) + Sync,
        mut pass: impl FnMut(Range<usize>, &[u8]) -> Result<()> + Send,
    ) -> Result<()> {
        let DeviceWeights { streams: [stream, _], staging, .. } = self;
        staging.run(stream.device(), pool, pieces, fill, filled, &mut |range, buffer, end| {
            let (to, len) = (to + range.start as u64, range.len());
            pass(range, &buffer.as_slice()[..len])?;
            // SAFETY: the buffer is not written before `end` was waited for.
            unsafe { stream.write_pinned(to, buffer, 0..len) }?;
            end.record(stream)
        })
    }

    /// Bytes from one row of `cols` elements of 16 bits to the next, where rows are sent to be packed.
    pub fn stride(cols: usize) -> usize {
        cols.saturating_mul(2).checked_next_multiple_of(16).unwrap_or(usize::MAX)
    }

    /// Such rows that can go at once, whole panels of them; 0 where scratch has no room for one.
    pub fn most_rows(&self, cols: usize) -> usize {
        self.spare / DeviceWeights::stride(cols).max(1) / LANES * LANES
    }

    /// Sends `rows` rows that are packed at `to`, as `fill` writes them, `stride` bytes apart; `filled` is told which were written.
    pub fn send_rows(
        &mut self,
        to: u64,
        layout: Layout,
        (rows, cols): (usize, usize),
        pool: &Pool,
        fill: impl Fn(Range<usize>, &mut [u8]) -> Result<()> + Sync,
        filled: impl Fn(Range<usize>) + Sync,
    ) -> Result<()> {
        let (stride, most) = (DeviceWeights::stride(cols), self.most_rows(cols));
        let is_half = matches!(layout, Layout::Bf16 | Layout::F16);
        let (Some(panel_bytes), true, true) = (layout.panel_bytes(cols), is_half, rows > 0 && most > 0) else {
            bail!(Internal, "{rows} rows as {layout:?}, {most} of 16 bits fit")
        };
        // A buffer has whole panels.
        let each = match PIECE / stride {
            few @ 0..LANES => few.max(1).next_power_of_two(),
            many => (many / LANES * LANES).min(most),
        };
        let pieces = Pieces { total: rows * stride, each: each * stride, together: most / each };
        let scratch = match &mut self.scratch {
            Some(scratch) => scratch.address(),
            none => none.insert(Block::new(self.streams[0].device(), self.spare * self.streams.len(), "rows of weights")?).address(),
        };
        let DeviceWeights { streams, staging, spare, .. } = self;
        let mut turn = 0;
        let fill = |_: &mut (), piece: usize, to: &mut [u8]| fill(piece * each..rows.min((piece + 1) * each), to);
        let of = |bytes: Range<usize>| bytes.start / stride..bytes.end / stride;
        staging.run(streams[0].device(), pool, pieces, fill, |bytes| filled(of(bytes)), &mut |bytes, buffer, end| {
            let (stream, scratch) = (&streams[turn % streams.len()], scratch + (turn % streams.len() * *spare) as u64);
            turn += 1;
            let rows = of(bytes);
            // SAFETY: the buffer is not written before `end` was waited for.
            unsafe { stream.write_pinned(scratch, buffer, 0..rows.len() * stride) }?;
            end.record(stream)?;
            let to = to + (rows.start / LANES * panel_bytes) as u64;
            let (count, pairs) = (rows.len() as u32, u32::from(layout == Layout::Bf16));
            let args = PackArgs { rows: scratch, panels: to, stride: stride as u32, count, cols: cols as u32, pairs };
            let steps = rows.len().div_ceil(LANES) * cols.div_ceil(PACK_COLS);
            stream.queue()?.launch(PACK, Grid::new([steps.div_ceil(PACK_WARPS), 1, 1], 32 * PACK_WARPS), bytes_of(&args))
        })
    }

    /// Waits for the copies and gives up staging and scratch.
    pub fn finish(&mut self) -> Result<()> {
        self.synchronize()?;
        self.staging = Staging::default();
        self.scratch = None;
        Ok(())
    }

    fn synchronize(&self) -> Result<()> {
        self.streams.iter().try_for_each(|stream| stream.synchronize())
    }
}

impl Place for DeviceWeights {
    fn put(&mut self, bytes: &[u8], what: &str) -> Result<u64> {
        let address = self.take(bytes.len(), what)?;
        let copy = |_: &mut (), piece: usize, to: &mut [u8]| {
            to.copy_from_slice(&bytes[piece * PIECE..][..to.len()]);
            Ok(())
        };
        self.send(address, Pieces::new(bytes.len(), PIECE), &Pool::new(1)?, copy, |_| {}, |_, _| Ok(()))?;
        Ok(address)
    }
}

impl Drop for DeviceWeights {
    fn drop(&mut self) {
        // Copies may still read the staging.
        let _ = self.synchronize();
    }
}
