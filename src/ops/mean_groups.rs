//! Groups of consecutive positions, each pooled into the mean of its records (Qwen 4 Exp's index keys).
#![allow(unsafe_code)] // rows of outputs, disjoint by `Turn::each_row`

use super::records::GpuRecords;
use super::{Frame, Gpu, KvType, Op, Port, Records, Rows, Shape, Shapes, StateId, Turn, Value, View, row_grain};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_common};

/// At the row that completes a group of `every` positions: the mean of the group's records. Other rows get zeros.
#[derive(Clone, Debug)]
pub struct MeanGroups {
    /// A record of each position.
    pub source: Records,
    /// Positions of a group.
    pub every: usize,
    /// `[rows, width of a record]`.
    pub y: Value,
}

impl MeanGroups {
    /// Calls `f` with each record of the group that the row completes, if it completes one.
    fn members(&self, frame: &Frame<'_>, segment: usize, row: usize, mut f: impl FnMut(&[f32])) {
        let end = frame.batch.positions[row] as usize + 1;
        if end.is_multiple_of(self.every) {
            let pages = frame.pages(segment, self.source.state);
            (end - self.every..end).for_each(|p| f(self.source.read(&pages, p, &mut [])));
        }
    }

    fn row(&self, frame: &Frame<'_>, segment: usize, row: usize, y: &mut [f32]) {
        y.fill(0.0);
        self.members(frame, segment, row, |record| super::lanes::axpy(1.0, record, y));
        y.iter_mut().for_each(|y| *y /= self.every as f32);
    }
}

const MEAN_GROUPS: Kernel = Kernel { file: "mean_groups", name: "mean_groups" };

#[derive(Clone, Copy)]
#[repr(C)]
struct MeanGroupsArgs {
    y: View,
    batch: u64,
    source: GpuRecords,
    every: u32,
    spare: u32,
}

// SAFETY: the struct of kernels/mean_groups.cu.
unsafe impl Args for MeanGroupsArgs {}

impl Op for MeanGroups {
    op_common!("mean_groups");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::Out, &mut self.y)]
    }

    fn states(&self) -> Vec<(Port, StateId)> {
        vec![(Port::In, self.source.state)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        self.source.check(shapes)?;
        ensure!(self.source.every == 1 && self.every > 0, Internal, "mean_groups: {:?} in groups of {}", self.source, self.every);
        ensure!(self.source.dtype == KvType::F32, Internal, "mean_groups: groups that are not complete are kept in f32");
        Ok(vec![Shape::f32(Rows::All, self.source.width)])
    }

    fn solo(&self, frame: &Frame<'_>) -> bool {
        frame.rows(self.y) <= row_grain(frame.slot(self.y).width)
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        for (index, segment) in frame.batch.segments.iter().enumerate() {
            for row in segment.rows.clone() {
                let mut sum = vec![0.0f64; y.width()];
                self.members(frame, index, row, |record| sum.iter_mut().zip(record).for_each(|(s, r)| *s += f64::from(*r)));
                // SAFETY: alone.
                unsafe { y.row(row) }.iter_mut().zip(sum).for_each(|(y, s)| *y = (s / self.every as f64) as f32);
            }
        }
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let (source, every) = (self.source.gpu(gpu), self.every as u32);
        let args = MeanGroupsArgs { y: gpu.view(self.y), batch: gpu.batch_at(), source, every, spare: 0 };
        gpu.launch(MEAN_GROUPS, Grid::cells(gpu.rows(self.y), gpu.width(self.y), 256), &args)
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let y = frame.output(self.y);
        // SAFETY: `each_row` gives a row to one worker.
        turn.each_row(y.rows(), y.width(), |row| self.row(frame, frame.segment_of(row), row, unsafe { y.row(row) }));
    }
}
