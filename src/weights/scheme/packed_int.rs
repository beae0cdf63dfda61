//! compressed-tensors `pack-quantized`: integers of up to 8 bits in 32-bit words.
//!
//! `X.weight_packed` I32 `[rows, ceil(cols / per word)]`, `X.weight_scale` (one for a row or a run of it), `X.weight_shape`
//! `[rows, cols]`, and where zero is not in the middle `X.weight_zero_point`, packed along the rows. `X.weight_g_idx` gives each
//! column its run where columns were sorted first.

use super::grid::{Blocks, Grid};
use super::scaled::{Element, Scaled, Zero};
use super::{Body, Lookup};
use crate::error::{Error, Kind, Result};
use crate::tensor::DType;

pub(super) fn find(at: &Lookup<'_>) -> Result<Option<Body>> {
    let Some(codes) = at.stem("weight_packed").filter(|p| p.dtype == DType::I32) else { return Ok(None) };
    let [count, rows, words] = codes.matrices()?;
    let group = at.settings.group(at.module());
    let shape = at.stem("weight_shape");
    let cols = match &shape {
        None => None,
        Some(shape) => match shape.values()?[..] {
            [r, c] if r as usize == count * rows && c >= 1.0 && c as usize <= words.saturating_mul(32) => Some(c as usize),
            ref found => {
                return Err(Error::new(Kind::Mismatch, format!("{}: says {found:?}, {} has {:?}", shape.name, codes.name, codes.shape))
                    .named(&shape.name));
            }
        },
    };
    let fits = |bits: usize| cols.is_none_or(|cols| cols.div_ceil(32 / bits) == words);
    let bits = match group.and_then(|g| g.bits) {
        Some(bits @ 1..=8) if fits(bits) => bits,
        Some(bits) => return Err(codes.misfit(&format!("{bits}-bit codes (num_bits) of {cols:?} columns"))),
        None => [4, 8, 2, 3, 6].into_iter().find(|b| fits(*b)).ok_or_else(|| codes.misfit(&format!("codes of {cols:?} columns")))?,
    };
    let per = 32 / bits;
    let of = [count, rows, cols.unwrap_or(words * per)];
    let scale = at.need_stem("weight_scale", &codes)?;
    let index = at.stem("weight_g_idx").map(|index| index.values().map(|v| (index, v))).transpose()?;
    // Files that sort no columns may carry an index that was never set.
    let index = index.filter(|(_, values)| values.is_empty() || values.iter().any(|v| *v != -1.0));
    // Sorted columns leave no runs, so there the run's length says nothing.
    let scale = Grid::new(scale, of, Blocks::Runs(group.and_then(|g| g.group_size).filter(|_| index.is_none())))?;
    let order = index.map(|(piece, values)| order(&piece, values, of[2], scale.cols)).transpose()?;
    let zero = match at.stem("weight_zero_point") {
        None => None,
        Some(piece) if piece.dtype == DType::I32 && piece.elements() == (count * rows).div_ceil(per) * scale.cols => {
            Some(Zero::Words { piece, bits, cols: scale.cols })
        }
        Some(piece) if piece.dtype == DType::I8 && piece.elements() == count * rows * scale.cols => {
            Some(Zero::Bytes { piece, cols: scale.cols })
        }
        Some(piece) => return Err(piece.misfit(&format!("[{}, {}]", rows.div_ceil(per), scale.cols))),
    };
    let element = Element::Words { bits };
    Ok(Some(Body::Scaled(Box::new(Scaled { of, row_bytes: element.row_bytes(of[2]), codes, element, scale, zero, gain: None, order }))))
}

/// The run of each column.
fn order(index: &super::Piece, values: Vec<f32>, cols: usize, runs: usize) -> Result<Vec<u32>> {
    if values.len() != cols || values.iter().any(|v| *v < 0.0 || *v >= runs as f32) {
        return Err(index.misfit(&format!("[{cols}] numbers below {runs}")));
    }
    Ok(values.into_iter().map(|v| v as u32).collect())
}
