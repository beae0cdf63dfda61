//! Launches of products with matrices that are picked by row and slot: routed experts, or one matrix for each head.
//!
//! One row, or few, meet their matrices one by one: only what was routed to is read. Where there are more, pairs (row, slot) are sorted by matrix on
//! the device and those that share one meet it together. A product's bits are the same either way.
#![allow(unsafe_code)] // argument structs

use super::{Gpu, GpuWeight, LayoutKind, Part, Value, View, WeightId};
use crate::backend::cpu::activations::Q8_BLOCK;
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{bail, ensure};

/// What is multiplied.
pub(super) struct Routed {
    /// What float matrices meet, or none.
    pub x: Value,
    /// What integer ones meet, or none.
    pub q: Value,
    /// Elements of the input from slot to slot, tails left out; 0 where all share one.
    pub step: usize,
    /// See [`super::Route`], or none.
    pub route: Value,
    /// The matrices.
    pub weight: WeightId,
    /// `[matrices * outputs]`.
    pub bias: Option<WeightId>,
    /// Matrices a row meets.
    pub slots: usize,
    /// Elements behind each slot's inputs in `x` that are handed on.
    pub tail: usize,
    /// The output.
    pub y: Value,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct RoutedArgs {
    y: View,
    x: u64,
    x_stride: u32,
    x_step: u32,
    route: u64,
    route_stride: u32,
    slots: u32,
    table: u64,
    matrices: u32,
    parts: u32,
    part: u32,
    y_step: u32,
    bias: u64,
    sorted: u64,
    outputs: u32,
    tail: u32,
    handed: u64,
    handed_stride: u32,
    handed_step: u32,
}

// SAFETY: the struct of kernels/common/routed.cuh.
unsafe impl Args for RoutedArgs {}

#[derive(Clone, Copy)]
#[repr(C)]
struct WideArgs {
    routed: RoutedArgs,
    limbs: u32,
    spare: u32,
}

// SAFETY: the struct of kernels/expert_wide.cu.
unsafe impl Args for WideArgs {}

#[derive(Clone, Copy)]
#[repr(C)]
struct ExpertSortArgs {
    route: View,
    sorted: u64,
    slots: u32,
    experts: u32,
}

// SAFETY: the struct of kernels/expert_linear.cu.
unsafe impl Args for ExpertSortArgs {}

const SORT: Kernel = Kernel { file: "expert_linear", name: "expert_sort" };
/// Pairs that meet a weight together, without and with tensor cores; outputs of a block with them.
const TOGETHER: usize = 8;
const WIDE: usize = 32;
const WIDE_OUTPUTS: u32 = 256;
/// Pairs of a matrix, on average, from which on tensor cores pay.
const WIDE_FROM: usize = 4;
/// Parts of 8 bits that f32 activations are cut into for bfloat16 and 8-bit floats: all of them.
const LIMBS: u32 = 3;
/// Rows from which on pairs are sorted.
const SORTED_ROWS: usize = 4;
/// Matrices that scratch memory is reserved for; more of them are met one by one.
const MOST_MATRICES: usize = 4094;

/// Kernels for a kind of weights: for pairs met alone, and together.
fn kernels(kind: LayoutKind) -> (Kernel, Kernel) {
    let (alone, together) = match kind {
        LayoutKind::F32 => ("expert_linear_f32", "expert_linear_f32_together"),
        LayoutKind::Bf16 => ("expert_linear_bf16", "expert_linear_bf16_together"),
        LayoutKind::F16 => ("expert_linear_f16", "expert_linear_f16_together"),
        LayoutKind::F8 => ("expert_linear_f8", "expert_linear_f8_together"),
        LayoutKind::I8 => ("expert_linear_i8", "expert_linear_i8_together"),
        LayoutKind::I4 => ("expert_linear_i4", "expert_linear_i4_together"),
        LayoutKind::Table => ("expert_linear_table", "expert_linear_table_together"),
    };
    let kernel = |name| Kernel { file: "expert_linear", name };
    (kernel(alone), kernel(together))
}

impl Routed {
    /// Queues the product.
    pub(super) fn launch(&self, gpu: &Gpu<'_>, outputs: usize) -> Result<()> {
        let GpuWeight::Experts { parts, table } = gpu.weight(self.weight) else {
            bail!(Unsupported, "experts that stay in their file have no GPU kernel");
        };
        let Some(first) = parts.first() else { return Ok(()) };
        let (rows, matrices) = (gpu.rows(self.y), parts.len());
        let pairs = rows * self.slots;
        let sorted = self.sort(gpu, rows, matrices)?;
        let mut args = RoutedArgs {
            y: gpu.view(self.y),
            x: 0,
            x_stride: 0,
            x_step: 0,
            route: 0,
            route_stride: 0,
            slots: self.slots as u32,
            table: *table,
            matrices: matrices as u32,
            parts: first.len() as u32,
            part: 0,
            y_step: (outputs + self.tail) as u32,
            bias: gpu.vector(self.bias),
            sorted: sorted.unwrap_or(0),
            outputs: outputs as u32,
            tail: self.tail as u32,
            handed: 0,
            handed_stride: 0,
            handed_step: (self.step + self.tail) as u32,
        };
        if self.tail > 0 {
            let x = gpu.view(self.x);
            (args.handed, args.handed_stride) = (x.data + 4 * self.step as u64, x.stride);
        }
        if self.route.is_some() {
            let route = gpu.view(self.route);
            (args.route, args.route_stride) = (route.data, route.stride);
        }
        for (index, part) in first.iter().enumerate() {
            let (value, step) = if part.kind >= LayoutKind::I8 { (self.q, self.step / Q8_BLOCK) } else { (self.x, self.step + self.tail) };
            ensure!(value.is_some(), Internal, "a product's input for {:?} is not connected", part.kind);
            let x = gpu.view(value);
            (args.part, args.x, args.x_stride, args.x_step) = (index as u32, x.data, x.stride, step as u32);
            if let Some(kernel) = wide(part).filter(|_| !gpu.fixed_order() && self.fits_wide(part, x.stride, args.x_step, pairs, matrices))
            {
                let tiles = if sorted.is_some() { tiles(pairs, matrices, WIDE) } else { self.slots * rows.div_ceil(WIDE) };
                if sorted.is_some() || !self.route.is_some() {
                    let grid = Grid::new([tiles, part.rows.div_ceil(WIDE_OUTPUTS) as usize, 1], 256);
                    gpu.launch(kernel, grid, &WideArgs { routed: args, limbs: LIMBS, spare: 0 })?;
                    continue;
                }
            }
            let (alone, together) = kernels(part.kind);
            let (kernel, blocks) = if sorted.is_some() {
                (together, tiles(pairs, matrices, TOGETHER))
            } else if !self.route.is_some() && rows > 1 {
                (together, self.slots * rows.div_ceil(TOGETHER))
            } else {
                (alone, pairs)
            };
            gpu.launch(kernel, Grid::new([blocks, part.rows.div_ceil(16) as usize, 1], 128), &args)?;
        }
        Ok(())
    }

    /// Whether there is enough to do for tensor cores, in pieces that are aligned: widths in whole blocks, rows of sixteen bytes.
    fn fits_wide(&self, part: &Part, stride: u32, step: u32, pairs: usize, matrices: usize) -> bool {
        let integer = part.kind >= LayoutKind::I8;
        let aligned = part.cols.is_multiple_of(32) && (integer || (stride.is_multiple_of(4) && step.is_multiple_of(4)));
        aligned && pairs >= WIDE_FROM * matrices
    }

    /// Sorts pairs by matrix where that pays; the address of what came out.
    fn sort(&self, gpu: &Gpu<'_>, rows: usize, matrices: usize) -> Result<Option<u64>> {
        let (sorted, bytes) = gpu.scratch();
        if !self.route.is_some() || rows < SORTED_ROWS || (matrices + 2 + rows * self.slots) * 4 > bytes {
            return Ok(None);
        }
        let args = ExpertSortArgs { route: gpu.view(self.route), sorted, slots: self.slots as u32, experts: matrices as u32 };
        gpu.launch(SORT, Grid::new([matrices + 1, 1, 1], 256), &args)?;
        Ok(Some(sorted))
    }

    /// Bytes that sorting takes.
    pub(super) fn scratch(rows: usize, slots: usize) -> usize {
        (rows * slots + MOST_MATRICES + 2) * 4
    }
}

/// Tiles of `size` that hold `pairs` pairs of `matrices` matrices, and of those that have none.
fn tiles(pairs: usize, matrices: usize, size: usize) -> usize {
    pairs.min(pairs.div_ceil(size) + matrices + 1)
}

/// The kernel with tensor cores for weights of this format.
fn wide(part: &Part) -> Option<Kernel> {
    let name = match (part.kind, part.block == 16, part.min != 0) {
        (LayoutKind::F32 | LayoutKind::F16, ..) => return None,
        (LayoutKind::Bf16, ..) => "expert_wide_bf16",
        (LayoutKind::F8, ..) => "expert_wide_f8",
        (LayoutKind::I8, false, false) => "expert_wide_i8",
        (LayoutKind::I8, true, false) => "expert_wide_i8_half",
        (LayoutKind::I8, false, true) => "expert_wide_i8_min",
        (LayoutKind::I8, true, true) => "expert_wide_i8_half_min",
        (LayoutKind::I4, false, false) => "expert_wide_i4",
        (LayoutKind::I4, true, false) => "expert_wide_i4_half",
        (LayoutKind::I4, false, true) => "expert_wide_i4_min",
        (LayoutKind::I4, true, true) => "expert_wide_i4_half_min",
        (LayoutKind::Table, false, _) => "expert_wide_table",
        (LayoutKind::Table, true, _) => "expert_wide_table_half",
    };
    Some(Kernel { file: "expert_wide", name })
}
