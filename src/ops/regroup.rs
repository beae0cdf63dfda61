//! Columns put in another order: checkpoints interleave by head what layers read side by side.

use super::{Frame, Op, Port, Shape, Shapes, Value};
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

    op_by_row!(1);
}
