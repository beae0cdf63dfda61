//! Hashes of the last tokens by multiplication and exclusive or, as rows of n-gram embedding tables (Qwen 4 Exp's n-gram memory).
//!
//! Earlier tokens come from records of the sequence, one a position, which this batch's tokens were appended to before.
#![allow(unsafe_code)] // rows of outputs, disjoint by `Turn::each_row`

use super::tokens::bits;
use super::{Frame, Op, Port, Records, Rows, Shape, Shapes, StateId, Turn, Value, row_grain};
use crate::error::Result;
use crate::{ensure, op_common};

/// One table among those that lie one after another in a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HashTable {
    /// Rows of this table.
    pub rows: u32,
    /// Rows of those before it.
    pub offset: u32,
    /// Tokens its hash reads, the present one included.
    pub tokens: usize,
}

/// `y[r][i] = offset_i + (token[0] m_0 ^ token[-1] m_1 ^ ...) mod rows_i`. A token that an end of text stands before, or that is
/// before the sequence, counts as the end of text.
#[derive(Clone, Debug)]
pub struct NgramHash {
    /// Tokens of the sequence, one a position.
    pub history: Records,
    /// The end-of-text token.
    pub end: i32,
    /// `m_0, m_1, ...`.
    pub multipliers: Vec<u64>,
    /// The tables.
    pub tables: Vec<HashTable>,
    /// `[rows, tables]`, as bits.
    pub y: Value,
}

impl NgramHash {
    fn rows(&self, frame: &Frame<'_>, segment: usize, row: usize, y: &mut [f32]) {
        let position = frame.batch.positions[row] as usize;
        let pages = frame.pages(segment, self.history.state);
        for (table, y) in self.tables.iter().zip(y) {
            let mut ended = false;
            let mut hash = 0u64;
            for (d, multiplier) in self.multipliers[..table.tokens].iter().enumerate() {
                ended |= d > position;
                let token = if ended { self.end } else { self.history.read(&pages, position - d, &mut [0.0])[0] as i32 };
                ended |= d > 0 && token == self.end;
                hash ^= (token as u64).wrapping_mul(*multiplier);
            }
            // The remainder of a signed number, as the tables were trained with.
            *y = bits(table.offset + (hash as i64).rem_euclid(i64::from(table.rows)) as u32);
        }
    }
}

impl Op for NgramHash {
    op_common!("ngram_hash");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::Out, &mut self.y)]
    }

    fn states(&self) -> Vec<(Port, StateId)> {
        vec![(Port::In, self.history.state)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        self.history.check(shapes)?;
        let sound = |t: &HashTable| t.rows > 0 && t.offset.checked_add(t.rows).is_some() && t.tokens <= self.multipliers.len();
        ensure!(
            self.tables.iter().all(sound),
            Unsupported,
            "ngram_hash: a table of no rows, past 2^32, or of more tokens than multipliers"
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
