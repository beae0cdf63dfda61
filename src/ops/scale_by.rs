//! A stored factor on every element: one number for the whole row (Gemma 4's layer scalar), or one for each column.
#![allow(unsafe_code)] // rows of outputs, disjoint by `Turn::each_row`

use super::{Frame, Op, Port, Shape, Shapes, Turn, Value, WeightId, row_grain};
use crate::error::Result;
use crate::{ensure, op_common};

/// `y = factor * x`.
#[derive(Clone, Debug)]
pub struct ScaleBy {
    /// `[rows, width]`.
    pub x: Value,
    /// `[1]` or `[width]`.
    pub factor: WeightId,
    /// `[rows, width]`.
    pub y: Value,
}

impl ScaleBy {
    fn row(&self, factor: &[f32], x: &[f32], y: &mut [f32]) {
        match factor {
            [factor] => y.iter_mut().zip(x).for_each(|(y, x)| *y = factor * x),
            _ => y.iter_mut().zip(x).zip(factor).for_each(|((y, x), factor)| *y = factor * x),
        }
    }
}

impl Op for ScaleBy {
    op_common!("scale_by");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.x), (Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let (x, factors) = (shapes.value(self.x), shapes.weight(self.factor).1);
        ensure!(factors == 1 || factors == x.width, Internal, "scale_by: {factors} factors for rows of {}", x.width);
        Ok(vec![Shape::f32(x.rows, x.width)])
    }

    fn solo(&self, frame: &Frame<'_>) -> bool {
        frame.rows(self.y) <= row_grain(frame.slot(self.y).width)
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        let factor = frame.weight(self.factor).vector();
        for row in 0..y.rows() {
            // SAFETY: alone.
            let out = unsafe { y.row(row) };
            for (i, (y, x)) in out.iter_mut().zip(frame.row(self.x, row)).enumerate() {
                *y = (f64::from(factor[i % factor.len()]) * f64::from(*x)) as f32;
            }
        }
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let y = frame.output(self.y);
        let factor = frame.weight(self.factor).vector();
        // SAFETY: `each_row` gives a row to one worker.
        turn.each_row(y.rows(), y.width(), |row| self.row(factor, frame.row(self.x, row), unsafe { y.row(row) }));
    }
}
