//! Hashes of the last tokens, as rows of n-gram embedding tables (LongCat-Flash-Lite, 2025; Qwen 4 Exp's n-gram memory).
//!
//! Earlier tokens come from records of the sequence, one a position, which this batch's tokens were appended to before.
#![allow(unsafe_code)] // rows of outputs, disjoint by `Turn::each_row`

use super::records::GpuRecords;
use super::tokens::bits;
use super::{Frame, Gpu, Op, Port, Records, Rows, Shape, Shapes, StateId, Turn, Value, View, row_grain};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_common};

/// One table, which may be one of several that lie one after another in a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NgramTable {
    /// Rows of this table.
    pub rows: u32,
    /// Rows of those before it in the same matrix.
    pub offset: u32,
    /// Tokens its hash reads, the present one included.
    pub tokens: usize,
}

/// From tokens to a row, before the remainder by the table's rows. `token[0]` is the present one.
#[derive(Clone, Debug)]
pub enum NgramHash {
    /// `sum_d token[-d] * base^d`, up to an end-of-text token before the present one, or the sequence's start.
    Polynomial {
        /// The vocabulary's size.
        base: u64,
        /// Tokens that end a text.
        ends: Vec<i32>,
    },
    /// `token[0] m_0 ^ token[-1] m_1 ^ ...`. A token that an end of text stands before, or that is before the sequence, counts as the
    /// end of text.
    Xor {
        /// `m_0, m_1, ...`.
        multipliers: Vec<u64>,
        /// The end-of-text token.
        end: i32,
    },
}

impl NgramHash {
    /// The row in a table of `rows`, from `token(d)`, the token `d` before the present one; `None` before the sequence.
    fn row(&self, tokens: usize, rows: u32, token: impl Fn(usize) -> Option<i32>) -> u32 {
        let size = u64::from(rows);
        match self {
            NgramHash::Polynomial { base, ends } => {
                let (mut sum, mut power) = (0u64, 1 % size);
                for (d, token) in (0..tokens).map_while(|d| Some((d, token(d)?))) {
                    if d > 0 && ends.contains(&token) {
                        break;
                    }
                    // Sizes are below 2^32 and tokens below 2^31, so neither product overflows.
                    sum = (sum + token as u64 % size * power) % size;
                    power = power * (base % size) % size;
                }
                sum as u32
            }
            NgramHash::Xor { multipliers, end } => {
                let (mut ended, mut hash) = (false, 0u64);
                for (d, multiplier) in multipliers[..tokens].iter().enumerate() {
                    let token = if ended { *end } else { token(d).unwrap_or(*end) };
                    ended |= d > 0 && token == *end;
                    hash ^= (token as u64).wrapping_mul(*multiplier);
                }
                // The remainder of a signed number, as the tables were trained with.
                (hash as i64).rem_euclid(i64::from(rows)) as u32
            }
        }
    }
}

/// `y[r][i] = offset_i + hash(tokens up to row r) mod rows_i`.
#[derive(Clone, Debug)]
pub struct NgramRows {
    /// Tokens of the sequence, one a position.
    pub history: Records,
    /// The hash.
    pub hash: NgramHash,
    /// The tables.
    pub tables: Vec<NgramTable>,
    /// `[rows, tables]`, as bits.
    pub y: Value,
}

impl NgramRows {
    fn rows(&self, frame: &Frame<'_>, segment: usize, row: usize, y: &mut [f32]) {
        let position = frame.batch.positions[row] as usize;
        let pages = frame.pages(segment, self.history.state);
        let token = |d: usize| Some(self.history.read(&pages, position.checked_sub(d)?, &mut [0.0])[0] as i32);
        for (table, y) in self.tables.iter().zip(y) {
            *y = bits(table.offset + self.hash.row(table.tokens, table.rows, token));
        }
    }
}

const NGRAM_ROWS: Kernel = Kernel { file: "ngram", name: "ngram_rows" };
/// Tables of a launch; most tokens of an n-gram that is hashed by multipliers, most ends of text.
const TABLES: usize = 32;
const MOST: usize = 16;

#[derive(Clone, Copy)]
#[repr(C)]
struct GpuTable {
    rows: u32,
    offset: u32,
    tokens: u32,
    spare: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct NgramRowsArgs {
    y: View,
    batch: u64,
    history: GpuRecords,
    base: u64,
    exclusive: u32,
    end: i32,
    ends: u32,
    start: u32,
    tables: u32,
    spare: u32,
    end_of: [i32; MOST],
    multiplier: [u64; MOST],
    table: [GpuTable; TABLES],
}

// SAFETY: the struct of kernels/ngram.cu.
unsafe impl Args for NgramRowsArgs {}

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
        let longest = match &self.hash {
            NgramHash::Polynomial { .. } => usize::MAX,
            NgramHash::Xor { multipliers, .. } => multipliers.len(),
        };
        let sound = |t: &NgramTable| t.rows > 0 && t.offset.checked_add(t.rows).is_some() && t.tokens <= longest;
        ensure!(
            self.tables.iter().all(sound),
            Unsupported,
            "ngram_rows: a table of no rows, past 2^32, or of more tokens than multipliers"
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

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let mut args = NgramRowsArgs {
            y: gpu.view(self.y),
            batch: gpu.batch_at(),
            history: self.history.gpu(gpu),
            base: 0,
            exclusive: 0,
            end: 0,
            ends: 0,
            start: 0,
            tables: 0,
            spare: 0,
            end_of: [0; MOST],
            multiplier: [0; MOST],
            table: [GpuTable { rows: 1, offset: 0, tokens: 0, spare: 0 }; TABLES],
        };
        match &self.hash {
            NgramHash::Polynomial { base, ends } => {
                ensure!(ends.len() <= MOST, Unsupported, "ngram_rows: {} tokens end a text; a GPU knows at most {MOST}", ends.len());
                args.base = *base;
                args.ends = ends.len() as u32;
                args.end_of[..ends.len()].copy_from_slice(ends);
            }
            NgramHash::Xor { multipliers, end } => {
                let count = multipliers.len();
                ensure!(count <= MOST, Unsupported, "ngram_rows: n-grams of {count} tokens; a GPU knows at most {MOST}");
                (args.exclusive, args.end) = (1, *end);
                args.multiplier[..count].copy_from_slice(multipliers);
            }
        }
        for (index, tables) in self.tables.chunks(TABLES).enumerate() {
            (args.start, args.tables) = ((index * TABLES) as u32, tables.len() as u32);
            for (to, table) in args.table.iter_mut().zip(tables) {
                *to = GpuTable { rows: table.rows, offset: table.offset, tokens: table.tokens.min(u32::MAX as usize) as u32, spare: 0 };
            }
            gpu.launch(NGRAM_ROWS, Grid::new([gpu.rows(self.y).div_ceil(64), tables.len(), 1], 64), &args)?;
        }
        Ok(())
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
