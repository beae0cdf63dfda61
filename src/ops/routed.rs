//! Launches of products with matrices that are picked by row and slot: routed experts, or one matrix for each head.
//!
//! One row, or few, meet their matrices one by one: only what was routed to is read. Where there are more, pairs (row, slot) are sorted by matrix on
//! the device and those that share one meet it together. A product's bits are the same either way.
#![allow(unsafe_code)] // argument structs

use super::{Gpu, GpuWeight, LayoutKind, Value, View, WeightId};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{bail, ensure};

/// What is multiplied.
pub(super) struct Routed {
    /// Elements of the input from slot to slot; 0 where all share one.
    pub step: usize,
    /// See [`super::Route`], or none.
    pub route: Value,
    /// The matrices.
    pub weight: WeightId,
    /// `[matrices * outputs]`.
    pub bias: Option<WeightId>,
    /// Matrices a row meets.
    pub slots: usize,
    /// Elements behind each slot's inputs that are handed on.
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
}

// SAFETY: the struct of kernels/common/routed.cuh.
unsafe impl Args for RoutedArgs {}

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
/// Pairs that meet a weight together.
const TOGETHER: usize = 8;
/// Rows from which on pairs are sorted.
const SORTED_ROWS: usize = 4;
/// Matrices that scratch memory is reserved for; more of them are met one by one.
const MOST_MATRICES: usize = 4094;

/// Kernels for a kind of weights: for pairs met alone, and together where there is one.
pub(super) type Kernels = fn(LayoutKind) -> (Kernel, Option<Kernel>);

impl Routed {
    /// Queues the product; `kernels` names them for a kind of weights, `input` says which form of the input it meets.
    pub(super) fn launch(&self, gpu: &Gpu<'_>, outputs: usize, kernels: Kernels, input: impl Fn(LayoutKind) -> Value) -> Result<()> {
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
        };
        if self.route.is_some() {
            let route = gpu.view(self.route);
            (args.route, args.route_stride) = (route.data, route.stride);
        }
        for (index, part) in first.iter().enumerate() {
            let value = input(part.kind);
            ensure!(value.is_some(), Internal, "a product's input for {:?} is not connected", part.kind);
            let (x, unit) = (gpu.view(value), if gpu.is_q8(value) { 32 } else { 1 });
            (args.part, args.x, args.x_stride, args.x_step) = (index as u32, x.data, x.stride, (self.step / unit) as u32);
            let (alone, together) = kernels(part.kind);
            let (kernel, blocks) = match together {
                Some(kernel) if sorted.is_some() => (kernel, pairs.min(pairs.div_ceil(TOGETHER) + matrices + 1)),
                Some(kernel) if !self.route.is_some() && rows > 1 => (kernel, self.slots * rows.div_ceil(TOGETHER)),
                _ => (alone, pairs),
            };
            gpu.launch(kernel, Grid::new([blocks, part.rows.div_ceil(16) as usize, 1], 128), &args)?;
        }
        Ok(())
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
