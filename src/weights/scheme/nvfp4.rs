//! NVFP4: E2M1 codes in pairs, an E4M3 scale for each run of 16, and a factor for the tensor.
//!
//! ModelOpt: `X.weight` U8 `[rows, cols / 2]`, `X.weight_scale`, `X.weight_scale_2`, which multiplies. compressed-tensors:
//! `X.weight_packed`, `X.weight_scale`, `X.weight_global_scale`, which divides.

use super::grid::{Blocks, Grid};
use super::scaled::{Element, Gain, Scaled};
use super::{Body, Lookup, Piece};
use crate::error::Result;
use crate::tensor::DType;

/// Elements that share a scale.
const RUN: usize = 16;

pub(super) fn find(at: &Lookup<'_>) -> Result<Option<Body>> {
    if let Some(codes) = at.stem("weight_packed").filter(super::is_pairs) {
        let scale = at.need_stem("weight_scale", &codes)?;
        if scale.dtype != DType::F8E4M3 {
            return Ok(None);
        }
        let gain = at.need_stem("weight_global_scale", &codes)?;
        return body(codes, scale, gain, true).map(Some);
    }
    let Some(codes) = at.tensor().filter(super::is_pairs) else { return Ok(None) };
    match at.suffixed("_scale").filter(|s| s.dtype == DType::F8E4M3) {
        Some(scale) => {
            let gain = at.need_suffixed("_scale_2", &codes)?;
            body(codes, scale, gain, false).map(Some)
        }
        None => Ok(None),
    }
}

fn body(codes: Piece, scale: Piece, gain: Piece, divides: bool) -> Result<Body> {
    let of = super::pairs_of(&codes)?;
    let scale = Grid::new(scale, of, Blocks::Runs(Some(RUN)))?;
    let values = gain.values()?;
    if values.len() != 1 && values.len() != of[0] {
        return Err(gain.misfit("one number for a matrix"));
    }
    if values.iter().any(|g| !g.is_normal()) {
        return Err(gain.misfit("factors that are finite and not 0"));
    }
    let gain = Some(Gain { values, divides });
    Ok(Body::Scaled(Box::new(Scaled { of, row_bytes: of[2] / 2, codes, element: Element::E2M1, scale, zero: None, gain, order: None })))
}
