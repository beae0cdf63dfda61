//! A constant factor on every element (embedding scales, logit scales, residual multipliers).
#![allow(unsafe_code)] // rows of outputs, disjoint by `Turn::each_row`

use super::{Frame, Op, Port, Shape, Shapes, Turn, Value, row_grain};
use crate::error::Result;
use crate::op_common;

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
    fn row(&self, x: &[f32], y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(x) {
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

    fn solo(&self, frame: &Frame<'_>) -> bool {
        frame.rows(self.y) <= row_grain(frame.slot(self.y).width)
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        for row in 0..y.rows() {
            // SAFETY: alone.
            self.row(frame.row(self.x, row), unsafe { y.row(row) });
        }
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let y = frame.output(self.y);
        // SAFETY: `each_row` gives a row to one worker.
        turn.each_row(y.rows(), y.width(), |row| self.row(frame.row(self.x, row), unsafe { y.row(row) }));
    }
}
