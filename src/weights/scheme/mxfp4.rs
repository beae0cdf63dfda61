//! MXFP4: E2M1 codes in pairs and an exponent (E8M0) for each run of 32.
//!
//! compressed-tensors: `X.weight_packed` and `X.weight_scale` U8. DeepSeek-V4: `X.weight` I8 and `X.scale`. ModelOpt: `X.weight` and
//! `X.weight_scale`, both U8. gpt-oss: all experts of a projection in `Y_blocks` `[E, rows, cols / 32, 16]` and `Y_scales` `[E, rows,
//! cols / 32]`, output-major, while its unquantised `Y` is input-major.

use super::grid::{Blocks, Grid};
use super::scaled::{Element, Scaled};
use super::{Body, Lookup, Piece};
use crate::error::Result;
use crate::tensor::DType;

/// Elements that share a scale.
const RUN: usize = 32;

pub(super) fn find(at: &Lookup<'_>) -> Result<Option<Body>> {
    if let Some(codes) = at.stem("weight_packed").filter(super::is_pairs) {
        let scale = at.need_stem("weight_scale", &codes)?;
        return body(codes, scale).map(Some);
    }
    let Some(codes) = at.tensor().filter(super::is_pairs) else { return Ok(None) };
    let exponents = |s: &Piece| matches!(s.dtype, DType::U8 | DType::F8E8M0);
    match at.stem("scale").or_else(|| at.suffixed("_scale")).filter(exponents) {
        Some(scale) => body(codes, scale).map(Some),
        None => Ok(None),
    }
}

/// gpt-oss's form.
pub(super) fn find_blocks(at: &Lookup<'_>) -> Result<Option<Body>> {
    let Some(mut codes) = at.suffixed("_blocks").filter(|p| p.dtype == DType::U8) else { return Ok(None) };
    let scale = at.need_suffixed("_scales", &codes)?;
    let [count, rows, runs, 16] = codes.shape[..] else { return Err(codes.misfit("[experts, rows, columns / 32, 16]")) };
    codes.shape = vec![count, rows, runs * 16];
    body(codes, scale).map(Some)
}

fn body(codes: Piece, scale: Piece) -> Result<Body> {
    if !matches!(scale.dtype, DType::U8 | DType::F8E8M0) {
        return Err(scale.misfit("exponents (U8 or F8_E8M0)"));
    }
    let of = super::pairs_of(&codes)?;
    let scale = Grid::new(scale, of, Blocks::Runs(Some(RUN)))?;
    Ok(Body::Scaled(Box::new(Scaled {
        of,
        row_bytes: of[2] / 2,
        codes,
        element: Element::E2M1,
        scale,
        zero: None,
        gain: None,
        order: None,
    })))
}
