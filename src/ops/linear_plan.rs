//! How the kernels for 5 to 32 rows (kernels/linear_narrow.cu, and kernels/linear_stream.cu for capability 9.0) share a product among blocks and warps.
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
    stages: u32,
    gating: Gating,
    spare: u32,
}

// SAFETY: the struct of kernels/formats/narrow.cuh.
unsafe impl Args for NarrowArgs {}

/// How the blocks of a kernel for up to 32 rows share the work.
pub(super) struct Plan {
    /// Pairs of panels, of all parts and of a block.
    all_pairs: usize,
    pairs: usize,
    /// Warps of a pair.
    ways: usize,
    tiles: usize,
    /// Bytes of a block's ring in shared memory.
    ring: usize,
    /// Of the ring of kernels/linear_stream.cu; 0 for the other kernel.
    stages: usize,
    gating: Gating,
}

/// Warps of a block, and chunks of its ring: as in kernels/linear_narrow.cu.
const NARROW_WARPS: usize = 12;
const RING: usize = 3;
/// What it takes to begin a block, as bytes that a multiprocessor reads meanwhile.
const BLOCK_COST: usize = 32 << 10;

/// Stages of a ring of weights and activations: as in kernels/linear_stream.cu. Two are the fewest that anything is gained by.
const STAGES: std::ops::RangeInclusive<usize> = 2..=8;
/// Bytes of its barriers.
const FRONT: usize = 256;
/// Bytes that it leaves to the blocks of the next, small kernels, which begin early.
const SPARED: usize = 4 << 10;

impl Plan {
    /// The plan whose slowest multiprocessor reads least, when each of them has a block at a time.
    pub fn new(part: &Part, format: &Format, all_pairs: usize, tiles: usize, gating: Gating, gpu: &Gpu<'_>) -> Plan {
        let (steps, ahead) = (part.cols as usize / if format.integer { 32 } else { 16 }, ahead(part, tiles));
        // Bytes of a step: a pair's weights, and all activations.
        let weights = stage_bytes(part);
        let (words, chunk) = (step_bytes(format, tiles), chunk_bytes(part, format, tiles));
        let plan = |pairs: usize| {
            let streams = (1..=NARROW_WARPS / pairs).rev().find_map(|ways| {
                let ways = ways.min(steps.div_ceil(each(part, tiles) * products(part)));
                Some((ways, stages(part, format, tiles, pairs, ways, gpu)?))
            });
            if let Some((ways, stages)) = streams {
                return Plan {
                    all_pairs,
                    pairs,
                    ways,
                    tiles,
                    ring: FRONT + stages * stage(part, format, tiles, pairs, ways),
                    stages,
                    gating,
                };
            }
            let most = (gpu.shared() / (RING * chunk)).min(steps.div_ceil(ahead)).min(NARROW_WARPS / pairs);
            let ways = most.max(1);
            Plan { all_pairs, pairs, ways, tiles, ring: RING * chunk * ways, stages: 0, gating }
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
    pub fn for_tiles(self, part: &Part, format: &Format, tiles: usize, gpu: &Gpu<'_>) -> Plan {
        let (pairs, ways) = (self.pairs, self.ways);
        match stages(part, format, tiles, pairs, ways, gpu) {
            Some(stages) if self.stages != 0 => {
                Plan { tiles, ring: FRONT + stages * stage(part, format, tiles, pairs, ways), stages, ..self }
            }
            _ => Plan { tiles, ring: RING * chunk_bytes(part, format, tiles) * ways, stages: 0, ..self },
        }
    }

    /// `names`: the kernels of both files.
    pub fn launch(&self, gpu: &Gpu<'_>, [narrow, stream]: [&'static str; 2], product: TensorArgs) -> Result<()> {
        let warps = self.pairs * self.ways;
        let (kernel, front, more) = match self.stages {
            0 => (Kernel { file: "linear_narrow", name: narrow }, 0, 0),
            _ => (Kernel { file: "linear_stream", name: stream }, FRONT, 1),
        };
        let shared = self.ring.max(front + warps * self.tiles * 1152);
        let grid = Grid::new([self.all_pairs.div_ceil(self.pairs), 1, 1], 32 * (warps + more)).shared(shared).early();
        let (all_pairs, pairs, ways, stages) = (self.all_pairs as u32, self.pairs as u32, self.ways as u32, self.stages as u32);
        gpu.launch(kernel, grid, &NarrowArgs { product, all_pairs, pairs, ways, stages, gating: self.gating, spare: 0 })
    }
}

/// Stages that there is room for, where the device and the shape take kernels/linear_stream.cu.
fn stages(part: &Part, format: &Format, tiles: usize, pairs: usize, ways: usize, gpu: &Gpu<'_>) -> Option<usize> {
    let whole_steps = part.kind != LayoutKind::F8 || part.cols.is_multiple_of(16 * products(part) as u32);
    let stages = ((gpu.shared() - FRONT - SPARED) / stage(part, format, tiles, pairs, ways)).min(*STAGES.end());
    (gpu.has_groups() && whole_steps && STAGES.contains(&stages)).then_some(stages)
}

/// Bytes of a stage: of each panel what it holds of it, then activations.
fn stage(part: &Part, format: &Format, tiles: usize, pairs: usize, ways: usize) -> usize {
    let steps = each(part, tiles) * ways * products(part);
    let scales = if part.kind == LayoutKind::F8 { (steps * 16 / 128 + 2) * 64 } else { 0 };
    (2 * pairs * (steps.div_ceil(2) * stage_bytes(part) + scales) + steps * step_bytes(format, tiles)).next_multiple_of(128)
}

/// Products of 16 in a step of 8-bit floats.
fn products(part: &Part) -> usize {
    if part.kind == LayoutKind::F8 { 4 } else { 1 }
}

/// Steps of a warp in a stage: as in kernels/linear_stream.cu.
fn each(part: &Part, tiles: usize) -> usize {
    let by_tiles: [usize; 3] = match (part.kind, part.block) {
        (LayoutKind::F8, _) => [2, 2, 2],
        (_, 32) => [4, 4, 4],
        _ => [4, 4, 2],
    };
    by_tiles[tiles.ilog2() as usize]
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
