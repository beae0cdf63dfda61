//! compressed-tensors `naive-quantized` / `int-quantized`: one signed byte an element.
//!
//! `X.weight` I8 `[rows, cols]`, `X.weight_scale`, and where zero is not in the middle `X.weight_zero_point` I8.

use super::grid::{Blocks, Grid};
use super::scaled::{Element, Scaled, Zero};
use super::{Body, Lookup};
use crate::error::Result;
use crate::tensor::DType;

pub(super) fn find(at: &Lookup<'_>) -> Result<Option<Body>> {
    let Some(codes) = at.tensor().filter(|p| p.dtype == DType::I8) else { return Ok(None) };
    let Some(scale) = at.suffixed("_scale").filter(|s| s.dtype != DType::U8) else { return Ok(None) };
    let of = codes.matrices()?;
    let scale = Grid::new(scale, of, Blocks::Runs(at.settings.group(at.module()).and_then(|g| g.group_size)))?;
    let zero = match at.suffixed("_zero_point") {
        None => None,
        Some(piece) if piece.dtype == DType::I8 && piece.elements() == of[0] * of[1] * scale.cols => {
            Some(Zero::Bytes { piece, cols: scale.cols })
        }
        Some(piece) => return Err(piece.misfit(&format!("I8 [{}, {}]", of[1], scale.cols))),
    };
    Ok(Some(Body::Scaled(Box::new(Scaled { of, row_bytes: of[2], codes, element: Element::Bytes, scale, zero, gain: None, order: None }))))
}
