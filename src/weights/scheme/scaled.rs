//! A matrix stored as codes with scales: `w = scale * (code - zero)`, the scale (and zero) shared by a block of elements.
//!
//! Every scheme of quantised safetensors comes down to this, so decoding is written once. Schemes differ in how codes lie in
//! bytes ([`Element`]), in the grid of scales, and in whether there are zero points, an order of groups or a factor for
//! the whole tensor.

use super::grid::Grid;
use super::piece::Piece;
use super::{CodeForm, Form};
use crate::backend::cpu::pack::F8_RUN;
use crate::error::Result;
use crate::quant;
use crate::tensor::DType;

/// How codes lie in a row's bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Element {
    /// 8-bit floats.
    Float(DType),
    /// Two E2M1 codes in a byte, the first in the low half.
    E2M1,
    /// Signed integers of `bits` bits with half their range added, `32 / bits` in a 32-bit word, lowest first.
    Words {
        /// 1 to 8.
        bits: usize,
    },
    /// Signed bytes.
    Bytes,
}

/// The code that stands for zero in each block.
pub(super) enum Zero {
    /// As `Element::Words`, but packed along the rows: one number for each row and column of the grid.
    Words {
        piece: Piece,
        bits: usize,
        /// Columns of the grid.
        cols: usize,
    },
    /// Signed bytes, one for each row and column of the grid.
    Bytes {
        piece: Piece,
        /// Columns of the grid.
        cols: usize,
    },
}

/// A factor for a whole matrix.
pub(super) struct Gain {
    /// One for each matrix, or one for all.
    pub values: Vec<f32>,
    /// Whether it divides (compressed-tensors) or multiplies (ModelOpt).
    pub divides: bool,
}

/// Codes and what turns them into numbers.
pub(super) struct Scaled {
    /// `[count, rows, cols]` of the matrices.
    pub of: [usize; 3],
    pub codes: Piece,
    /// Bytes of a row of codes.
    pub row_bytes: usize,
    pub element: Element,
    pub scale: Grid,
    pub zero: Option<Zero>,
    pub gain: Option<Gain>,
    /// Block of each column, where columns were reordered before they were grouped.
    pub order: Option<Vec<u32>>,
}

/// Twice the E2M1 values, by code.
const E2M1_DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

impl Element {
    /// Bytes of a row of `cols` elements.
    pub fn row_bytes(self, cols: usize) -> usize {
        match self {
            Element::Float(_) | Element::Bytes => cols,
            Element::E2M1 => cols.div_ceil(2),
            Element::Words { bits } => cols.div_ceil(32 / bits) * 4,
        }
    }
}

/// Code `i` of a sequence packed in words.
fn word_code(bytes: &[u8], i: usize, bits: usize) -> i8 {
    let per = 32 / bits;
    let at = i / per * 4;
    let word = u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let code = word >> (i % per * bits) & ((1u32 << bits) - 1);
    (code as i32 - (1 << (bits - 1))) as i8
}

impl Zero {
    fn of(&self, row: usize, group: usize) -> f32 {
        match self {
            Zero::Words { piece, bits, cols } => {
                let per = 32 / bits;
                let at = (row / per * cols + group) * 4;
                f32::from(word_code(&piece.bytes()[at..at + 4], row % per, *bits))
            }
            Zero::Bytes { piece, cols } => f32::from(piece.bytes()[row * cols + group] as i8),
        }
    }
}

impl Scaled {
    fn row_codes(&self, row: usize) -> &[u8] {
        &self.codes.bytes()[row * self.row_bytes..][..self.row_bytes]
    }

    /// Scale and zero of every block of a row.
    fn blocks(&self, row: usize) -> (Vec<f32>, Vec<f32>) {
        let (matrix, within) = (row / self.of[1].max(1), row % self.of[1].max(1));
        let mut scale = vec![0.0f32; self.scale.cols];
        self.scale.row(matrix, within, &mut scale);
        let zero = self.zero.as_ref().map_or_else(Vec::new, |z| (0..scale.len()).map(|g| z.of(row, g)).collect());
        (scale, zero)
    }

    /// The factor of a row's matrix, and whether it divides.
    fn gain(&self, row: usize) -> (f32, bool) {
        let Some(gain) = &self.gain else { return (1.0, false) };
        let matrix = if gain.values.len() > 1 { row / self.of[1].max(1) } else { 0 };
        (gain.values[matrix], gain.divides)
    }

    /// Row `row`, counted through all matrices, as numbers: the definition.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        let bytes = self.row_codes(row);
        match self.element {
            Element::Float(dtype) => quant::decode(dtype, bytes, out).expect("one byte an element, of a type that is decoded"),
            Element::E2M1 => {
                for (k, v) in out.iter_mut().enumerate() {
                    *v = 0.5 * f32::from(E2M1_DOUBLED[usize::from(bytes[k / 2] >> (k % 2 * 4) & 15)]);
                }
            }
            Element::Words { bits } => out.iter_mut().enumerate().for_each(|(k, v)| *v = f32::from(word_code(bytes, k, bits))),
            Element::Bytes => out.iter_mut().zip(bytes).for_each(|(v, b)| *v = f32::from(*b as i8)),
        }
        let (mut scale, zero) = self.blocks(row);
        match self.gain(row) {
            (gain, true) => scale.iter_mut().for_each(|s| *s /= gain),
            (gain, false) => scale.iter_mut().for_each(|s| *s *= gain),
        }
        let zero = |block: usize| zero.get(block).copied().unwrap_or(0.0);
        match &self.order {
            Some(order) => out.iter_mut().zip(order).for_each(|(v, &block)| *v = (*v - zero(block as usize)) * scale[block as usize]),
            None => {
                for (block, run) in out.chunks_mut(self.scale.col_block).enumerate() {
                    run.iter_mut().for_each(|v| *v = (*v - zero(block)) * scale[block]);
                }
            }
        }
    }

    /// The form a row's codes take in panels, or `Real` where scales do not fit their blocks.
    pub fn form(&self) -> Form {
        let run = self.scale.col_block;
        let block = match run {
            _ if self.element == Element::Float(DType::F8E4M3) => F8_RUN,
            _ if run.is_multiple_of(32) || self.scale.cols == 1 => 32,
            _ if run.is_multiple_of(16) => 16,
            _ => return Form::Real,
        };
        if self.order.is_some() || !self.of[2].is_multiple_of(32) {
            return Form::Real;
        }
        if block == F8_RUN {
            let fits = run.is_multiple_of(F8_RUN) || self.scale.cols == 1;
            return if fits && self.zero.is_none() { Form::F8 } else { Form::Real };
        }
        let min = self.zero.is_some();
        Form::Codes(match self.element {
            Element::Float(_) => return Form::Real,
            Element::E2M1 => CodeForm { bits: 4, block, min, table: Some(E2M1_DOUBLED) },
            Element::Words { bits } => CodeForm { bits: if bits <= 4 { 4 } else { 8 }, block, min, table: None },
            Element::Bytes => CodeForm { bits: 8, block, min, table: None },
        })
    }

    /// A row's codes, and their scales by run of a panel of 8-bit floats.
    pub fn f8_row(&self, row: usize, scale: &mut [f32]) -> &[u8] {
        let (stored, _) = self.blocks(row);
        let (gain, divides) = self.gain(row);
        for (j, s) in scale.iter_mut().enumerate() {
            let block = stored[(j * F8_RUN / self.scale.col_block).min(stored.len() - 1)];
            *s = if divides { block / gain } else { block * gain };
        }
        self.row_codes(row)
    }

    /// A row's codes as [`Scaled::form`] says, `w = gain * (scale * code - min)`; gives back the gain.
    pub fn code_row(&self, row: usize, form: CodeForm, codes: &mut [i8], scale: &mut [f32], min: &mut [f32]) -> Result<f32> {
        let bytes = self.row_codes(row);
        // Four-bit codes with a minimum count from 0, so half the range moves from the code into the minimum.
        let shift = if form.bits == 4 && form.min { 8i8 } else { 0 };
        match self.element {
            Element::E2M1 => codes.iter_mut().enumerate().for_each(|(k, c)| *c = (bytes[k / 2] >> (k % 2 * 4) & 15) as i8),
            Element::Words { bits } => codes.iter_mut().enumerate().for_each(|(k, c)| *c = word_code(bytes, k, bits) + shift),
            Element::Bytes => codes.iter_mut().zip(bytes).for_each(|(c, b)| *c = *b as i8),
            Element::Float(_) => crate::bail!(Internal, "{}: 8-bit floats are no integer codes", self.codes.name),
        }
        let (stored, zero) = self.blocks(row);
        let halves = if form.table.is_some() { 0.5 } else { 1.0 };
        for (j, s) in scale.iter_mut().enumerate() {
            let block = (j * form.block / self.scale.col_block).min(stored.len() - 1);
            *s = stored[block] * halves;
            if form.min {
                min[j] = stored[block] * (zero[block] + f32::from(shift));
            }
        }
        let (gain, divides) = self.gain(row);
        Ok(if divides { 1.0 / gain } else { gain })
    }
}
