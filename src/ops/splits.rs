//! How the rows that a query meets are cut up on a GPU, where few queries would leave most of it idle; and how the pieces come together.
#![allow(unsafe_code)] // argument structs

use super::{Gpu, Value, View};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;

/// `Splits` of kernels/common/attend_rows.cuh.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct GpuSplits {
    data: u64,
    splits: u32,
    value_dim: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct AttendMergeArgs {
    y: View,
    splits: GpuSplits,
    heads: u32,
    spare: u32,
}

// SAFETY: the struct of kernels/common/attend_rows.cuh.
unsafe impl Args for AttendMergeArgs {}

/// Warps that a multiprocessor is to have.
const WARPS: usize = 12;
/// Most splits of a query.
const MOST: usize = 64;
/// Warps of a block.
const BLOCK: usize = 8;

impl GpuSplits {
    /// For `rows` queries of `groups` warps each. How many splits depends on these and the device alone, so a graph can hold it.
    pub(super) fn new(gpu: &Gpu<'_>, rows: usize, heads: usize, groups: usize, value_dim: usize) -> GpuSplits {
        let splits = (WARPS * gpu.processors() / (rows * groups).max(1)).clamp(1, MOST);
        let (data, bytes) = gpu.scratch();
        let fits = splits > 1 && rows * heads * splits * (value_dim + 2) * 4 <= bytes;
        let (data, splits) = if fits { (data, splits as u32) } else { (0, 1) };
        GpuSplits { data, splits, value_dim: value_dim as u32 }
    }

    /// Bytes for up to `rows` queries: splits are only made while all of them together stay few.
    pub(super) fn scratch(rows: usize, heads: usize, value_dim: usize, processors: usize) -> usize {
        // A warp has up to four heads of one of the splits.
        (rows * heads * MOST).min(4 * WARPS * processors) * (value_dim + 2) * 4
    }

    /// A grid of (rows, groups / warps, splits).
    pub(super) fn grid(&self, rows: usize, groups: usize) -> Grid {
        let warps = groups.clamp(1, BLOCK);
        Grid::new([rows, groups.div_ceil(warps), self.splits as usize], 32 * warps)
    }

    /// Puts splits together where there are any.
    pub(super) fn merge(self, gpu: &Gpu<'_>, kernel: Kernel, y: Value, heads: usize) -> Result<()> {
        if self.data == 0 {
            return Ok(());
        }
        let args = AttendMergeArgs { y: gpu.view(y), splits: self, heads: heads as u32, spare: 0 };
        let threads = (self.value_dim as usize).next_multiple_of(32).min(128);
        gpu.launch(kernel, Grid::new([gpu.rows(y), heads, 1], threads), &args)
    }
}
