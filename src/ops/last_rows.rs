//! The last row of each sequence: what the next token is predicted from.
#![allow(unsafe_code)] // rows of outputs, disjoint by `Turn::each_row`

use super::{Frame, Op, Port, Rows, Shape, Shapes, Turn, Value, row_grain};
use crate::error::Result;
use crate::{ensure, op_common};

/// `y[s] = x[last row of sequence s]`.
#[derive(Clone, Debug)]
pub struct LastRows {
    /// `[rows, width]`.
    pub x: Value,
    /// `[sequences, width]`.
    pub y: Value,
}

impl Op for LastRows {
    op_common!("last_rows");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.x), (Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let x = shapes.value(self.x);
        ensure!(x.rows == Rows::All, Internal, "last_rows: {x:?} is cut already");
        Ok(vec![Shape::f32(Rows::Last, x.width)])
    }

    fn solo(&self, frame: &Frame<'_>) -> bool {
        frame.rows(self.y) <= row_grain(frame.slot(self.y).width)
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        for (row, segment) in frame.batch.segments.iter().enumerate() {
            // SAFETY: alone.
            unsafe { y.row(row) }.copy_from_slice(frame.row(self.x, segment.rows.end - 1));
        }
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let y = frame.output(self.y);
        turn.each_row(y.rows(), y.width(), |row| {
            // SAFETY: `each_row` gives a row to one worker.
            unsafe { y.row(row) }.copy_from_slice(frame.row(self.x, frame.batch.segments[row].rows.end - 1));
        });
    }
}
