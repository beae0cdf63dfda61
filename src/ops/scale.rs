//! A constant factor on every element (embedding scales, logit scales, residual multipliers).

use super::{Frame, Op, Port, Shape, Shapes, Value};
use crate::error::Result;
use crate::{op_by_row, op_common};

/// `y = factor * x`.
#[derive(Clone, Debug)]
pub struct Scale {
    /// `[rows, width]`.
    pub x: Value,
    /// The factor.
    pub factor: f32,
    /// `[rows, width]`.
    pub y: Value,
}

impl Scale {
    fn row(&self, frame: &Frame<'_>, row: usize, y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(frame.row(self.x, row)) {
            *y = self.factor * x;
        }
    }
}

impl Op for Scale {
    op_common!("scale");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.x), (Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let x = shapes.value(self.x);
        Ok(vec![Shape::f32(x.rows, x.width)])
    }

    op_by_row!(1);
}
