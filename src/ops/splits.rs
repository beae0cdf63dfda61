//! How the rows that a query meets are cut up on a GPU, where few queries would leave most of it idle; and how the pieces come together.
#![allow(unsafe_code)] // argument structs

use super::{Gpu, Value, View};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::ensure;
use crate::error::Result;

/// `Splits` of kernels/common/attend_rows.cuh.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct GpuSplits {
    data: u64,
    splits: u32,
    value_dim: u32,
    first: u32,
    rows: u32,
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
/// Splits of a query whose sums have one order.
const FIXED: usize = 8;
/// Warps of a block.
const BLOCK: usize = 8;

impl GpuSplits {
    /// For `rows` queries of `groups` warps each. How many splits depends on these and the device alone, so a graph can hold it.
    pub(super) fn new(gpu: &Gpu<'_>, rows: usize, heads: usize, groups: usize, value_dim: usize) -> GpuSplits {
        let splits = (WARPS * gpu.processors() / (rows * groups).max(1)).clamp(1, MOST);
        let (data, bytes) = gpu.scratch();
        let fits = splits > 1 && rows * heads * splits * (value_dim + 2) * 4 <= bytes;
        let (data, splits) = if fits { (data, splits as u32) } else { (0, 1) };
        GpuSplits { data, splits, value_dim: value_dim as u32, first: 0, rows: rows as u32 }
    }

    /// Calls `launch` with the queries that go together and how they are cut, until all `rows` are through. A query's splits may depend on how
    /// many there are, unless the order of its sums is to be fixed.
    pub(super) fn each(
        gpu: &Gpu<'_>,
        (rows, heads, groups): (usize, usize, usize),
        value_dim: usize,
        mut launch: impl FnMut(GpuSplits, Grid) -> Result<()>,
    ) -> Result<()> {
        if !gpu.fixed_order() {
            let splits = GpuSplits::new(gpu, rows, heads, groups, value_dim);
            return launch(splits, splits.grid(rows, groups));
        }
        let (data, bytes) = gpu.scratch();
        let most = bytes / (heads * FIXED * (value_dim + 2) * 4).max(1);
        ensure!(most > 0 || rows == 0, Internal, "{bytes} bytes for the splits of {heads} heads");
        for first in (0..rows).step_by(most.max(1)) {
            let splits = GpuSplits {
                data,
                splits: FIXED as u32,
                value_dim: value_dim as u32,
                first: first as u32,
                rows: most.min(rows - first) as u32,
            };
            launch(splits, splits.grid(splits.rows as usize, groups))?;
        }
        Ok(())
    }

    /// Bytes for up to `rows` queries: splits are only made while all of them together stay few.
    pub(super) fn scratch(rows: usize, heads: usize, value_dim: usize, processors: usize) -> usize {
        // A warp has up to four heads of one of the splits.
        (rows * heads * MOST).min(4 * WARPS * processors).max(heads * FIXED) * (value_dim + 2) * 4
    }

    /// A grid of (its rows, groups / warps, splits).
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
        gpu.launch(kernel, Grid::new([self.rows as usize, heads, 1], threads), &args)
    }
}
