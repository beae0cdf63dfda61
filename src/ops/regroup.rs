//! Columns put in another order: checkpoints interleave by head what layers read side by side.
#![allow(unsafe_code)] // argument structs

use super::{Frame, Gpu, Op, Port, Shape, Shapes, Value, View};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_by_row, op_common};

/// Runs of columns at regular distances: `first ..`, `first + stride ..`, and so on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First column of the first run.
    pub first: usize,
    /// Columns of a run.
    pub width: usize,
    /// Columns from one run to the next.
    pub stride: usize,
    /// Runs.
    pub count: usize,
}

/// `y` is the pieces of `x`, one after another, the runs of each packed.
#[derive(Clone, Debug)]
pub struct Regroup {
    /// `[rows, width]`.
    pub x: Value,
    /// What makes up a row of `y`.
    pub pieces: Vec<Piece>,
    /// `[rows, sum of pieces]`.
    pub y: Value,
}

impl Regroup {
    fn row(&self, frame: &Frame<'_>, row: usize, mut y: &mut [f32]) {
        let x = frame.row(self.x, row);
        for piece in &self.pieces {
            for run in 0..piece.count {
                let (to, rest) = y.split_at_mut(piece.width);
                to.copy_from_slice(&x[piece.first + run * piece.stride..][..piece.width]);
                y = rest;
            }
        }
    }
}

const REGROUP: Kernel = Kernel { file: "regroup", name: "regroup" };
/// Pieces of a launch.
const PIECES: usize = 16;

#[derive(Clone, Copy)]
#[repr(C)]
struct GpuPiece {
    first: u32,
    width: u32,
    stride: u32,
    count: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct RegroupArgs {
    x: View,
    y: View,
    start: u32,
    columns: u32,
    pieces: u32,
    spare: u32,
    piece: [GpuPiece; PIECES],
}

// SAFETY: the struct of kernels/regroup.cu.
unsafe impl Args for RegroupArgs {}

impl Op for Regroup {
    op_common!("regroup");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.x), (Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let x = shapes.value(self.x);
        for p in &self.pieces {
            let end = p.first + p.count.saturating_sub(1) * p.stride + p.width;
            ensure!(p.count > 0 && end <= x.width, Internal, "regroup: {p:?} of {x:?}");
        }
        Ok(vec![Shape::f32(x.rows, self.pieces.iter().map(|p| p.width * p.count).sum())])
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let mut start = 0;
        for pieces in self.pieces.chunks(PIECES) {
            let columns = pieces.iter().map(|p| p.width * p.count).sum::<usize>();
            let mut piece = [GpuPiece { first: 0, width: 0, stride: 0, count: 0 }; PIECES];
            for (to, p) in piece.iter_mut().zip(pieces) {
                *to = GpuPiece { first: p.first as u32, width: p.width as u32, stride: p.stride as u32, count: p.count as u32 };
            }
            let (x, y) = (gpu.view(self.x), gpu.view(self.y));
            let args = RegroupArgs { x, y, start: start as u32, columns: columns as u32, pieces: pieces.len() as u32, spare: 0, piece };
            gpu.launch(REGROUP, Grid::cells(gpu.rows(self.y), columns, 256), &args)?;
            start += columns;
        }
        Ok(())
    }

    op_by_row!(1);
}
