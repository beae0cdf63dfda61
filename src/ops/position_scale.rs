//! A factor that grows with the position, for queries past the trained length (Llama 4, 2025).

use super::{Frame, Op, Port, Shape, Shapes, Value};
use crate::error::Result;
use crate::{ensure, op_by_row, op_common};

/// `y = x * (1 + beta ln(1 + floor(position / original)))`.
#[derive(Clone, Debug)]
pub struct PositionScale {
    /// `[rows, width]`.
    pub x: Value,
    /// Strength.
    pub beta: f32,
    /// Trained length.
    pub original: usize,
    /// `[rows, width]`.
    pub y: Value,
}

impl PositionScale {
    fn row(&self, frame: &Frame<'_>, row: usize, y: &mut [f32]) {
        let turns = frame.batch.positions[row] as usize / self.original;
        let factor = (1.0 + f64::from(self.beta) * (1.0 + turns as f64).ln()) as f32;
        for (y, x) in y.iter_mut().zip(frame.row(self.x, row)) {
            *y = x * factor;
        }
    }
}

impl Op for PositionScale {
    op_common!("position_scale");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.x), (Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let x = shapes.value(self.x);
        ensure!(self.original > 0 && x.rows == super::Rows::All, Internal, "position_scale: {x:?}, original length {}", self.original);
        Ok(vec![Shape::f32(x.rows, x.width)])
    }

    op_by_row!(1);
}
