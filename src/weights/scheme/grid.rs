//! Scales (or other numbers) that blocks of a matrix share: one for a tensor, a row, a run of a row, or a rectangle.

use super::piece::Piece;
use crate::error::Result;
use crate::quant;
use crate::tensor::DType;

/// A grid of numbers laid over matrices `[count, rows, cols]`. Blocks start at the top left corner; the last ones may be cut off.
pub(super) struct Grid {
    piece: Piece,
    /// What the bytes mean; a `U8` scale is an exponent.
    dtype: DType,
    /// Grids stored: one for each matrix, or one for all.
    count: usize,
    rows: usize,
    /// Numbers along a row.
    pub cols: usize,
    row_block: usize,
    /// Elements of a row that share a number.
    pub col_block: usize,
}

/// Which grids a scheme allows.
#[derive(Clone, Copy)]
pub(super) enum Blocks {
    /// Rectangles of this size, or runs of its width in single rows.
    Of([usize; 2]),
    /// One for a tensor or a row; or runs of a row, of this length where it is known and else of equal length.
    Runs(Option<usize>),
}

impl Grid {
    /// Lays `piece` over matrices of shape `of`.
    pub fn new(piece: Piece, of: [usize; 3], blocks: Blocks) -> Result<Grid> {
        let dtype = match piece.dtype {
            DType::U8 | DType::F8E8M0 => DType::F8E8M0,
            DType::F32 | DType::F16 | DType::BF16 | DType::F8E4M3 => piece.dtype,
            _ => return Err(piece.misfit("floats or exponents")),
        };
        let [count, rows, cols] = of;
        let (stored, shape): (usize, &[usize]) = match piece.shape[..] {
            [e, ..] if e == count && (count > 1 || piece.shape.len() == 3) => (count, &piece.shape[1..]),
            _ => (1, &piece.shape),
        };
        let (grid_rows, grid_cols) = match *shape {
            [] => (1, 1),
            [r] => (r, 1),
            [r, c] => (r, c),
            _ => return Err(piece.misfit("at most one number for each element")),
        };
        let fits = |n: usize, len: usize, block: usize| len.div_ceil(block) == n;
        let (row_block, col_block) = match blocks {
            Blocks::Of([r, c]) if fits(grid_cols, cols, c) && fits(grid_rows, rows, r) => (r, c),
            Blocks::Of([_, c]) if fits(grid_cols, cols, c) && grid_rows == rows => (1, c),
            Blocks::Of([r, c]) => {
                let (r, c) = (rows.div_ceil(r), cols.div_ceil(c));
                return Err(piece.misfit(&format!("[{r}, {c}], one scale for each block of {blocks} of {of:?}", blocks = Sides(blocks))));
            }
            Blocks::Runs(length) => {
                let row_block = match grid_rows {
                    1 => rows.max(1),
                    n if n == rows => 1,
                    _ => return Err(piece.misfit(&format!("a scale for the tensor or for each of {rows} rows"))),
                };
                let col_block = match (grid_cols, length) {
                    (1, _) => cols.max(1),
                    (n, Some(length)) if fits(n, cols, length) => length,
                    (n, None) if n > 0 && cols.is_multiple_of(n) => cols / n,
                    _ => {
                        let wanted = length.map_or("equal runs".into(), |l| format!("{} runs of {l}", cols.div_ceil(l)));
                        return Err(piece.misfit(&format!("[{rows}, n] for rows of {cols} elements in {wanted}")));
                    }
                };
                (row_block, col_block)
            }
        };
        Ok(Grid { piece, dtype, count: stored, rows: grid_rows, cols: grid_cols, row_block, col_block })
    }

    /// The numbers of row `row` of matrix `matrix`, [`Grid::cols`] of them.
    pub fn row(&self, matrix: usize, row: usize, out: &mut [f32]) {
        let grid = if self.count > 1 { matrix } else { 0 };
        let bytes = self.dtype.bytes(self.cols).unwrap_or(0);
        let at = (grid * self.rows + row / self.row_block) * bytes;
        quant::decode(self.dtype, &self.piece.bytes()[at..at + bytes], out)
            .expect("new() took only types that are decoded, and `cols` numbers");
    }
}

/// Writes side lengths as people do.
struct Sides(Blocks);

impl std::fmt::Display for Sides {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.0 {
            Blocks::Of([r, c]) => write!(f, "{r} x {c}"),
            Blocks::Runs(_) => f.write_str("a run"),
        }
    }
}
