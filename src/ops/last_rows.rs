//! The last row of each sequence: what the next token is predicted from.

use super::{Frame, Op, Port, Rows, Shape, Shapes, Value};
use crate::error::Result;
use crate::{ensure, op_by_row, op_common};

/// `y[s] = x[last row of sequence s]`.
#[derive(Clone, Debug)]
pub struct LastRows {
    /// `[rows, width]`.
    pub x: Value,
    /// `[sequences, width]`.
    pub y: Value,
}

impl LastRows {
    fn row(&self, frame: &Frame<'_>, row: usize, y: &mut [f32]) {
        y.copy_from_slice(frame.row(self.x, frame.batch.segments[row].rows.end - 1));
    }
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

    op_by_row!(1);
}
