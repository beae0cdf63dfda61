//! A tensor that borrows its bytes: name, type, shape, data, and where each row really lies.

use super::DType;
use crate::ensure;
use crate::error::{Error, Kind, Result};

/// Which stored row holds a logical row. Blocks lie along a row, so rows move freely in every format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowMap {
    /// Row `r` is stored at `r`.
    Straight,
    /// Rotary halves are interleaved per head of `head_dim` rows (GGUF llama): logical row `h*d + half*d/2 + i`
    /// is stored at `h*d + 2*i + half`.
    Interleaved {
        /// Rows in one head.
        head_dim: usize,
    },
}

impl RowMap {
    /// The stored row that holds logical row `row`.
    pub fn stored(self, row: usize) -> usize {
        match self {
            RowMap::Straight => row,
            RowMap::Interleaved { head_dim } => {
                let (head, within) = (row / head_dim, row % head_dim);
                let half = head_dim / 2;
                head * head_dim + 2 * (within % half) + within / half
            }
        }
    }
}

/// A tensor inside a mapped file or a buffer. `shape` is outermost first; a row is the last dimension.
#[derive(Clone, Debug)]
pub struct TensorView<'a> {
    /// Name as the family knows it.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Dimensions, outermost first. A scalar has none.
    pub shape: Vec<usize>,
    /// Little-endian bytes, rows one after another, no padding.
    pub data: &'a [u8],
    /// Where logical rows are stored.
    pub row_map: RowMap,
    /// Added to every decoded element (gemma's GGUF norms hold `1 + w`, so -1 here gives back `w`). Vectors only.
    pub offset: f32,
}

impl<'a> TensorView<'a> {
    /// A view whose bytes must be exactly what type and shape ask for.
    pub fn new(name: impl Into<String>, dtype: DType, shape: Vec<usize>, data: &'a [u8]) -> Result<Self> {
        let name = name.into();
        let view = TensorView { name, dtype, shape, data, row_map: RowMap::Straight, offset: 0.0 };
        let wanted = dtype
            .bytes(view.cols())
            .zip(view.elements().map(|n| n / view.cols().max(1)))
            .and_then(|(row, rows)| row.checked_mul(rows))
            .ok_or_else(|| {
                Error::new(Kind::CorruptFile, format!("{}: {dtype} {:?} is no whole number of blocks", view.name, view.shape))
                    .named(&view.name)
            })?;
        if wanted != data.len() {
            return Err(Error::new(
                Kind::CorruptFile,
                format!("{}: {} bytes are stored, {dtype} {:?} takes {wanted}", view.name, data.len(), view.shape),
            )
            .named(&view.name)
            .sizes(wanted as u64, data.len() as u64));
        }
        Ok(view)
    }

    /// Number of elements, or `None` on overflow.
    pub fn elements(&self) -> Option<usize> {
        self.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d))
    }

    /// Elements in a row (the last dimension; 1 for a scalar).
    pub fn cols(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }

    /// Number of rows: all dimensions but the last.
    pub fn rows(&self) -> usize {
        self.shape.split_last().map_or(1, |(_, outer)| outer.iter().product())
    }

    /// Bytes of logical row `row`.
    pub fn row(&self, row: usize) -> &'a [u8] {
        let bytes = self.dtype.bytes(self.cols()).expect("new() checked that rows are whole blocks");
        let at = self.row_map.stored(row) * bytes;
        &self.data[at..at + bytes]
    }

    /// Checks the shape against what the config asks for.
    pub fn expect_shape(&self, shape: &[usize]) -> Result<()> {
        ensure!(self.shape == shape, Mismatch, "{}: the checkpoint holds {:?}, the config asks for {shape:?}", self.name, self.shape);
        Ok(())
    }
}
