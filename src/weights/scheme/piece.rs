//! A stored tensor that owns a share of its file, so that a weight can go on reading it wherever it is kept.

use crate::error::{Error, Kind, Result, vec_filled};
use crate::quant;
use crate::tensor::{DType, RowMap};
use crate::weights::FileBytes;
use std::ops::Range;
use std::sync::Arc;

/// One tensor of a file.
#[derive(Clone)]
pub struct Piece {
    /// Its name.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Where logical rows are stored.
    pub row_map: RowMap,
    /// Added to every element (vectors only).
    pub offset: f32,
    pub(in crate::weights) file: Arc<FileBytes>,
    pub(in crate::weights) range: Range<usize>,
}

impl Piece {
    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.file.bytes()[self.range.clone()]
    }

    /// Bytes of row `row` of rows of `cols` elements; the row map applies.
    pub fn row(&self, row: usize, cols: usize) -> &[u8] {
        let bytes = self.dtype.bytes(cols).unwrap_or(0);
        &self.bytes()[self.row_map.stored(row) * bytes..][..bytes]
    }

    /// Number of elements; shapes of open files were checked against their sizes.
    pub fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// All elements in stored order, as f32.
    pub fn values(&self) -> Result<Vec<f32>> {
        let mut out = vec_filled(self.elements(), 0.0f32, &self.name)?;
        quant::decode(self.dtype, self.bytes(), &mut out).map_err(|e| e.context(&self.name))?;
        Ok(out)
    }

    /// The shape as matrices `[count, rows, cols]`; an error for anything but one or a stack of them.
    pub(super) fn matrices(&self) -> Result<[usize; 3]> {
        match self.shape[..] {
            [rows, cols] => Ok([1, rows, cols]),
            [count, rows, cols] => Ok([count, rows, cols]),
            _ => Err(self.misfit("[rows, columns] or [experts, rows, columns]")),
        }
    }

    /// The error for a shape or type that does not fit.
    pub(super) fn misfit(&self, expected: &str) -> Error {
        Error::new(Kind::Mismatch, format!("{}: found {} {:?}, expected {expected}", self.name, self.dtype, self.shape)).named(&self.name)
    }
}
