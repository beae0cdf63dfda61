//! Groups of consecutive positions pooled into one row: a softmax over the members, element by element, weighs their values
//! (DeepSeek-V4's compressors, GLM-5's pooled index keys). And the rotation of such rows at their group's first position.
#![allow(unsafe_code)] // rows of outputs, disjoint by `Turn::each_row`

use super::records::GpuRecords;
use super::{Frame, Gpu, Op, Port, Records, Rows, Shape, Shapes, StateId, Turn, Value, View, WeightId};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_by_row, op_common};

/// At the row that completes a group of `every` positions: `y = sum_i softmax_i(gate_i + bias_i) value_i`, element by element.
/// Rows that complete none get zeros.
///
/// With `overlap`, values and gates are two series side by side, `[earlier | present]`: a pooled row weighs the group before by
/// the earlier series and its own group by the present one.
#[derive(Clone, Debug)]
pub struct PoolGroups {
    /// `[value | gate]` of each position.
    pub source: Records,
    /// `[every * series * dim]`, added to the gate of the group's members in turn.
    pub bias: Option<WeightId>,
    /// Positions of a group.
    pub every: usize,
    /// Elements of a pooled row.
    pub dim: usize,
    /// Two series.
    pub overlap: bool,
    /// `[rows, dim]`.
    pub y: Value,
}

impl PoolGroups {
    fn series(&self) -> usize {
        if self.overlap { 2 } else { 1 }
    }

    /// Calls `f` with value and gate (bias added) of element `d` of each member.
    fn members(&self, frame: &Frame<'_>, segment: usize, group: usize, mut f: impl FnMut(&[f32], &[f32], &[f32])) {
        let width = self.series() * self.dim;
        let zeros: &[f32] = &[];
        let bias = self.bias.map_or(zeros, |id| frame.weight(id).vector());
        let pages = frame.pages(segment, self.source.state);
        let mut visit = |group: usize, column: usize| {
            for i in 0..self.every {
                let record = self.source.read(&pages, group * self.every + i, &mut []);
                let (value, gate) = record.split_at(width);
                let bias = if bias.is_empty() { zeros } else { &bias[i * width + column..][..self.dim] };
                f(&value[column..column + self.dim], &gate[column..column + self.dim], bias);
            }
        };
        if self.overlap && group > 0 {
            visit(group - 1, 0);
        }
        visit(group, width - self.dim);
    }

    fn row(&self, frame: &Frame<'_>, segment: usize, row: usize, y: &mut [f32], most: &mut [f32], total: &mut [f32]) {
        let position = frame.batch.positions[row] as usize;
        y.fill(0.0);
        if !(position + 1).is_multiple_of(self.every) {
            return;
        }
        let group = position / self.every;
        let at = |gate: &[f32], bias: &[f32], d: usize| gate[d] + bias.get(d).copied().unwrap_or(0.0);
        most.fill(f32::NEG_INFINITY);
        self.members(frame, segment, group, |_, gate, bias| {
            for (d, most) in most.iter_mut().enumerate() {
                *most = most.max(at(gate, bias, d));
            }
        });
        total.fill(0.0);
        self.members(frame, segment, group, |value, gate, bias| {
            for d in 0..self.dim {
                let weight = (at(gate, bias, d) - most[d]).exp();
                total[d] += weight;
                y[d] += weight * value[d];
            }
        });
        for (y, total) in y.iter_mut().zip(&*total) {
            *y /= total;
        }
    }
}

const POOL_GROUPS: Kernel = Kernel { file: "pool_groups", name: "pool_groups" };
const GROUP_ROPE_TABLE: Kernel = Kernel { file: "pool_groups", name: "group_rope_table" };

#[derive(Clone, Copy)]
#[repr(C)]
struct PoolGroupsArgs {
    y: View,
    batch: u64,
    bias: u64,
    source: GpuRecords,
    every: u32,
    dim: u32,
    overlap: u32,
    spare: u32,
}

// SAFETY: the struct of kernels/pool_groups.cu.
unsafe impl Args for PoolGroupsArgs {}

impl Op for PoolGroups {
    op_common!("pool_groups");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::Out, &mut self.y)]
    }

    fn states(&self) -> Vec<(Port, StateId)> {
        vec![(Port::In, self.source.state)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let width = self.series() * self.dim;
        self.source.check(shapes)?;
        ensure!(
            self.source.width == 2 * width && self.source.every == 1 && self.every > 0,
            Internal,
            "pool_groups: {:?} for {} of {}",
            self.source,
            self.every,
            self.dim
        );
        ensure!(self.source.dtype == super::KvType::F32, Internal, "pool_groups: groups that are not complete are kept in f32");
        if let Some(bias) = self.bias {
            ensure!(
                shapes.weight(bias).1 == self.every * width,
                Internal,
                "pool_groups: a bias of {} for {} of {width}",
                shapes.weight(bias).1,
                self.every
            );
        }
        Ok(vec![Shape::f32(Rows::All, self.dim)])
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        for (index, segment) in frame.batch.segments.iter().enumerate() {
            for row in segment.rows.clone() {
                // SAFETY: alone.
                let y = unsafe { y.row(row) };
                let position = frame.batch.positions[row] as usize;
                y.fill(0.0);
                if (position + 1).is_multiple_of(self.every) {
                    for (d, y) in y.iter_mut().enumerate() {
                        let mut seen: Vec<(f64, f64)> = Vec::new();
                        self.members(frame, index, position / self.every, |value, gate, bias| {
                            seen.push((f64::from(gate[d]) + bias.get(d).map_or(0.0, |b| f64::from(*b)), f64::from(value[d])));
                        });
                        let most = seen.iter().map(|s| s.0).fold(f64::NEG_INFINITY, f64::max);
                        let total: f64 = seen.iter().map(|s| (s.0 - most).exp()).sum();
                        *y = seen.iter().map(|s| (s.0 - most).exp() / total * s.1).sum::<f64>() as f32;
                    }
                }
            }
        }
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let args = PoolGroupsArgs {
            y: gpu.view(self.y),
            batch: gpu.batch_at(),
            bias: gpu.vector(self.bias),
            source: self.source.gpu(gpu),
            every: self.every as u32,
            dim: self.dim as u32,
            overlap: u32::from(self.overlap),
            spare: 0,
        };
        gpu.launch(POOL_GROUPS, Grid::cells(gpu.rows(self.y), self.dim, 128), &args)
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let y = frame.output(self.y);
        turn.each(y.rows(), 1, |range| {
            super::scratch::with(|s| {
                let (most, total) = super::scratch::sized(&mut s.a, 2 * self.dim).split_at_mut(self.dim);
                for row in range {
                    // SAFETY: `each` gives a row to one worker.
                    self.row(frame, frame.segment_of(row), row, unsafe { y.row(row) }, most, total);
                }
            });
        });
    }
}

/// As [`super::RopeTable`], at the first position of the group each row's position is in.
#[derive(Clone, Debug)]
pub struct GroupRopeTable {
    /// `[rotary_dim / 2]`.
    pub frequencies: WeightId,
    /// Factor on cosines and sines.
    pub factor: f32,
    /// Positions of a group.
    pub every: usize,
    /// `[rows, rotary_dim]`.
    pub y: Value,
}

impl GroupRopeTable {
    fn row(&self, frame: &Frame<'_>, row: usize, y: &mut [f32]) {
        let position = (frame.batch.positions[row] as usize / self.every * self.every) as f32;
        let (cos, sin) = y.split_at_mut(y.len() / 2);
        for ((f, cos), sin) in frame.weight(self.frequencies).vector().iter().zip(cos).zip(sin) {
            let (s, c) = f64::from(position * f).sin_cos();
            (*cos, *sin) = (c as f32 * self.factor, s as f32 * self.factor);
        }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct GroupRopeTableArgs {
    y: View,
    batch: u64,
    frequencies: u64,
    factor: f32,
    every: u32,
}

// SAFETY: the struct of kernels/pool_groups.cu.
unsafe impl Args for GroupRopeTableArgs {}

impl Op for GroupRopeTable {
    op_common!("group_rope_table");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        ensure!(self.every > 0, Internal, "group_rope_table: groups of none");
        Ok(vec![Shape::f32(Rows::All, shapes.weight(self.frequencies).1 * 2)])
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let (y, batch, frequencies) = (gpu.view(self.y), gpu.batch_at(), gpu.vector(Some(self.frequencies)));
        let args = GroupRopeTableArgs { y, batch, frequencies, factor: self.factor, every: self.every as u32 };
        gpu.launch(GROUP_ROPE_TABLE, Grid::cells(gpu.rows(self.y), gpu.width(self.y) / 2, 128), &args)
    }

    op_by_row!(8);
}
