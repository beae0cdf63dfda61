//! Token ids as values, and rows of tables looked up by computed ids: what n-gram embeddings are made of.
//!
//! Computed ids travel as the bits of an f32 (see [`bits`]), because tables may have more rows than f32 counts.
#![allow(unsafe_code)] // rows of outputs, disjoint by `Turn::each_row`

use super::{Frame, Op, Port, Rows, Shape, Shapes, Turn, Value, WeightId};
use crate::error::Result;
use crate::{ensure, op_by_row, op_common};

/// An id as a value carries it.
pub(super) fn bits(id: u32) -> f32 {
    f32::from_bits(id)
}

/// `y[r]` is the token of row `r`, as a whole number.
#[derive(Clone, Debug)]
pub struct TokenIds {
    /// `[rows, 1]`.
    pub y: Value,
}

impl Op for TokenIds {
    op_common!("token_ids");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::Out, &mut self.y)]
    }

    fn check(&self, _: &dyn Shapes) -> Result<Vec<Shape>> {
        Ok(vec![Shape::f32(Rows::All, 1)])
    }

    fn solo(&self, _: &Frame<'_>) -> bool {
        true
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        for row in 0..y.rows() {
            // SAFETY: alone.
            let y = unsafe { y.row(row) };
            y[0] = frame.batch.tokens[row] as f32;
        }
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        if turn.worker.is_leader() {
            self.scalar(frame);
        }
    }
}

/// `y[r] = table[ids[r][column]]`.
#[derive(Clone, Debug)]
pub struct Lookup {
    /// `[rows, n]`, as bits.
    pub ids: Value,
    /// First of the ids to use.
    pub column: usize,
    /// How many; their rows stand side by side.
    pub count: usize,
    /// `[table rows, width]`.
    pub table: WeightId,
    /// `[rows, count * width]`.
    pub y: Value,
}

impl Lookup {
    fn row(&self, frame: &Frame<'_>, row: usize, y: &mut [f32]) {
        let ids = &frame.row(self.ids, row)[self.column..self.column + self.count];
        let width = y.len() / self.count;
        for (id, y) in ids.iter().zip(y.chunks_mut(width)) {
            frame.decode_row(self.table, id.to_bits() as usize, y);
        }
    }
}

impl Op for Lookup {
    op_common!("lookup");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.ids), (Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let (ids, (_, width)) = (shapes.value(self.ids), shapes.weight(self.table));
        ensure!(
            self.count > 0 && self.column + self.count <= ids.width,
            Internal,
            "lookup: columns {}+{} of {ids:?}",
            self.column,
            self.count
        );
        Ok(vec![Shape::f32(ids.rows, self.count * width)])
    }

    op_by_row!(1);
}
