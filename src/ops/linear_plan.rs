//! How the kernel for 5 to 32 rows (kernels/linear_narrow.cu) shares a product among blocks and warps.
#![allow(unsafe_code)] // argument structs

use super::linear_launch::{Format, Gating, TensorArgs, stage_bytes};
use super::{Gpu, LayoutKind, Part};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;

#[derive(Clone, Copy)]
#[repr(C)]
struct NarrowArgs {
    product: TensorArgs,
    all_pairs: u32,
    pairs: u32,
    ways: u32,
    gating: Gating,
}

// SAFETY: the struct of kernels/linear_narrow.cu.
unsafe impl Args for NarrowArgs {}

/// How the blocks of the kernel for up to 32 rows share the work.
pub(super) struct Plan {
    /// Pairs of panels, of all parts and of a block.
    all_pairs: usize,
    pairs: usize,
    /// Warps of a pair.
    ways: usize,
    tiles: usize,
    /// Bytes of activations that a block has in shared memory.
    ring: usize,
    gating: Gating,
}

/// Warps of a block, and chunks of its ring: as in kernels/linear_narrow.cu.
const NARROW_WARPS: usize = 12;
const RING: usize = 3;
/// What it takes to begin a block, as bytes that a multiprocessor reads meanwhile.
const BLOCK_COST: usize = 32 << 10;

impl Plan {
    /// The plan whose slowest multiprocessor reads least, when each of them has a block at a time.
    pub fn new(part: &Part, format: &Format, all_pairs: usize, tiles: usize, gating: Gating, gpu: &Gpu<'_>) -> Plan {
        let (steps, ahead) = (part.cols as usize / if format.integer { 32 } else { 16 }, ahead(part, tiles));
        // Bytes of a step: a pair's weights, and all activations.
        let weights = stage_bytes(part);
        let (words, chunk) = (step_bytes(format, tiles), chunk_bytes(part, format, tiles));
        let plan = |pairs: usize| {
            let most = (gpu.shared() / (RING * chunk)).min(steps.div_ceil(ahead)).min(NARROW_WARPS / pairs);
            let ways = most.max(1);
            Plan { all_pairs, pairs, ways, tiles, ring: RING * chunk * ways, gating }
        };
        let cost = |plan: &Plan| {
            // Few warps leave some of the bandwidth unused.
            let warps = (plan.pairs * plan.ways).max(NARROW_WARPS / 2);
            let read = steps * (plan.pairs * weights + words / 2) * NARROW_WARPS / warps;
            all_pairs.div_ceil(plan.pairs).div_ceil(gpu.processors()) * (BLOCK_COST + read)
        };
        // A gate and its other factor are in one block.
        let fits = |plan: &Plan| gating.on == 0 || plan.pairs.is_multiple_of(2);
        [1, 2, 3, 4, 6].map(plan).into_iter().filter(fits).min_by_key(cost).expect("there are some")
    }

    /// The same shares of k for fewer rows, which take less room.
    pub fn for_tiles(self, part: &Part, format: &Format, tiles: usize) -> Plan {
        Plan { tiles, ring: RING * chunk_bytes(part, format, tiles) * self.ways, ..self }
    }

    pub fn launch(&self, gpu: &Gpu<'_>, name: &'static str, product: TensorArgs) -> Result<()> {
        let warps = self.pairs * self.ways;
        let shared = self.ring.max(warps * self.tiles * 1152);
        let grid = Grid::new([self.all_pairs.div_ceil(self.pairs), 1, 1], 32 * warps).shared(shared).early();
        let (all_pairs, pairs, ways) = (self.all_pairs as u32, self.pairs as u32, self.ways as u32);
        gpu.launch(Kernel { file: "linear_narrow", name }, grid, &NarrowArgs { product, all_pairs, pairs, ways, gating: self.gating })
    }
}

/// Bytes of a step's activations.
fn step_bytes(format: &Format, tiles: usize) -> usize {
    tiles * (256 * format.limbs + if format.integer { 64 } else { 0 })
}

/// Bytes of a warp's share of a chunk of the ring.
fn chunk_bytes(part: &Part, format: &Format, tiles: usize) -> usize {
    let ahead = ahead(part, tiles);
    step_bytes(format, tiles) * if ahead.is_multiple_of(2) { ahead / 2 } else { ahead }
}

/// Steps of weights that a lane of the kernel for up to 32 rows has on their way: as in kernels/linear_narrow.cu.
fn ahead(part: &Part, tiles: usize) -> usize {
    let by_tiles: [usize; 3] = match (part.kind, part.block) {
        (LayoutKind::F32 | LayoutKind::Bf16, _) => [8, 8, 8],
        (LayoutKind::F16, _) => [6, 6, 6],
        (LayoutKind::F8, _) => [12, 8, 8],
        (LayoutKind::I8, 32) => [6, 4, 3],
        (_, 32) => [8, 6, 3],
        _ => [4, 3, 3],
    };
    by_tiles[tiles.ilog2() as usize]
}
