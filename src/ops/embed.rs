//! Token embedding: a row of the table for each token.
#![allow(unsafe_code)] // rows of outputs, disjoint by `Turn::each_row`

use super::{Frame, Op, Port, Rows, Shape, Shapes, Turn, Value, WeightId, row_grain};
use crate::error::Result;
use crate::op_common;

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
        frame.weight(self.table).decode_row(frame.batch.tokens[row] as usize, y);
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

    fn solo(&self, frame: &Frame<'_>) -> bool {
        frame.rows(self.y) <= row_grain(frame.slot(self.y).width)
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        for row in 0..y.rows() {
            // SAFETY: alone.
            self.row(frame, row, unsafe { y.row(row) });
        }
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let y = frame.output(self.y);
        // SAFETY: `each_row` gives a row to one worker.
        turn.each_row(y.rows(), y.width(), |row| self.row(frame, row, unsafe { y.row(row) }));
    }
}
