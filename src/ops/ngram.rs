//! Hashes of the last tokens, as rows of n-gram embedding tables (LongCat-Flash-Lite, 2025).
//!
//! Earlier tokens come from records of the sequence, one a position, which this batch's tokens were appended to before.
#![allow(unsafe_code)] // rows of outputs, disjoint by `Turn::each_row`

use super::tokens::bits;
use super::{Frame, Op, Port, Records, Rows, Shape, Shapes, StateId, Turn, Value, row_grain};
use crate::error::Result;
use crate::{ensure, op_common};

/// One table: its size and how many tokens its hash reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NgramTable {
    /// Rows.
    pub rows: u64,
    /// Tokens, the present one included.
    pub tokens: usize,
}

/// `y[r][i] = sum_d token[-d] * base^d mod rows_i`, `d` below the table's tokens, ended by an earlier end-of-text token.
#[derive(Clone, Debug)]
pub struct NgramRows {
    /// Tokens of the sequence, one a position.
    pub history: Records,
    /// The vocabulary's size.
    pub base: u64,
    /// Tokens that end a text; what stands before one is not seen past it.
    pub ends: Vec<i32>,
    /// The tables.
    pub tables: Vec<NgramTable>,
    /// `[rows, tables]`, as bits.
    pub y: Value,
}

impl NgramRows {
    fn rows(&self, frame: &Frame<'_>, segment: usize, row: usize, y: &mut [f32]) {
        let position = frame.batch.positions[row] as usize;
        let pages = frame.pages(segment, self.history.state);
        for (table, y) in self.tables.iter().zip(y) {
            let (mut sum, mut power) = (0u64, 1 % table.rows);
            for d in 0..table.tokens.min(position + 1) {
                let token = self.history.read(&pages, position - d, &mut [0.0])[0] as u64;
                if d > 0 && self.ends.contains(&(token as i32)) {
                    break;
                }
                // Sizes are below 2^32 and tokens below 2^31, so neither product overflows.
                sum = (sum + token % table.rows * power) % table.rows;
                power = power * (self.base % table.rows) % table.rows;
            }
            *y = bits(sum as u32);
        }
    }
}

impl Op for NgramRows {
    op_common!("ngram_rows");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::Out, &mut self.y)]
    }

    fn states(&self) -> Vec<(Port, StateId)> {
        vec![(Port::In, self.history.state)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        self.history.check(shapes)?;
        ensure!(
            self.tables.iter().all(|t| t.rows > 0 && t.rows < 1 << 32),
            Unsupported,
            "ngram_rows: a table of no rows, or of 2^32 and more"
        );
        Ok(vec![Shape::f32(Rows::All, self.tables.len())])
    }

    fn solo(&self, frame: &Frame<'_>) -> bool {
        frame.rows(self.y) <= row_grain(frame.slot(self.y).width * 8)
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        for (index, segment) in frame.batch.segments.iter().enumerate() {
            for row in segment.rows.clone() {
                // SAFETY: alone.
                self.rows(frame, index, row, unsafe { y.row(row) });
            }
        }
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let y = frame.output(self.y);
        turn.each_row(y.rows(), y.width() * 8, |row| {
            let segment = frame.segment_of(row);
            // SAFETY: `each_row` gives a row to one worker.
            self.rows(frame, segment, row, unsafe { y.row(row) });
        });
    }
}
