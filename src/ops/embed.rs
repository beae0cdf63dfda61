//! Token embedding: a row of the table for each token.

use super::{Frame, Op, Port, Rows, Shape, Shapes, Value, WeightId};
use crate::error::Result;
use crate::{op_by_row, op_common};

/// `y[r] = factor * table[token of row r]`.
#[derive(Clone, Debug)]
pub struct Embed {
    /// `[vocabulary, width]`.
    pub table: WeightId,
    /// Gemma scales embeddings by `sqrt(width)`; others by 1.
    pub factor: f32,
    /// `[rows, width]`.
    pub y: Value,
}

impl Embed {
    fn row(&self, frame: &Frame<'_>, row: usize, y: &mut [f32]) {
        frame.decode_row(self.table, frame.batch.tokens[row] as usize, y);
        if self.factor != 1.0 {
            y.iter_mut().for_each(|v| *v *= self.factor);
        }
    }
}

impl Op for Embed {
    op_common!("embed");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        Ok(vec![Shape::f32(Rows::All, shapes.weight(self.table).1)])
    }

    op_by_row!(1);
}
