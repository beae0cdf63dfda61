//! FP8: one 8-bit float an element, with scales in one of three places.
//!
//! `X.weight_scale_inv` (DeepSeek-V3 and many since; it multiplies, whatever its name says) and `X.scale` (DeepSeek-V4) hold one
//! for each block of `weight_block_size`, the last ones cut off; the table of DeepSeek-V4.1's engram has runs of a row instead.
//! `X.weight_scale` (compressed-tensors, ModelOpt) holds one for the tensor, a row, a run of a row, or a block.

use super::grid::{Blocks, Grid};
use super::scaled::{Element, Scaled};
use super::{Body, Lookup, Piece};
use crate::error::Result;
use crate::tensor::DType;

pub(super) fn find(at: &Lookup<'_>) -> Result<Option<Body>> {
    let Some(codes) = at.tensor().filter(|p| matches!(p.dtype, DType::F8E4M3 | DType::F8E5M2)) else { return Ok(None) };
    let block = at.settings.block(at.module());
    let (scale, blocks) = if let Some(scale) = at.suffixed("_scale_inv") {
        (scale, Blocks::Of(block))
    } else if let Some(scale) = at.stem("scale") {
        (scale, Blocks::Of(block))
    } else if let Some(scale) = at.suffixed("_scale") {
        let blocks = blocks_of_weight_scale(at, &codes, &scale, block);
        (scale, blocks)
    } else {
        return Ok(None);
    };
    let of = codes.matrices()?;
    let scale = Grid::new(scale, of, blocks)?;
    let element = Element::Float(codes.dtype);
    Ok(Some(Body::Scaled(Box::new(Scaled { of, row_bytes: of[2], codes, element, scale, zero: None, gain: None, order: None }))))
}

/// `weight_scale` is a grid of blocks where its group says so, and else runs of rows.
fn blocks_of_weight_scale(at: &Lookup<'_>, codes: &Piece, scale: &Piece, block: [usize; 2]) -> Blocks {
    let group = at.settings.group(at.module());
    let rows = codes.shape.len().checked_sub(2).map_or(0, |i| codes.shape[i]);
    let one_a_row = scale.elements() == 1 || scale.shape.contains(&rows);
    match group {
        Some(group) if group.block.is_some() => Blocks::Of(block),
        // MXFP8: exponents for runs of 32.
        _ if scale.dtype == DType::U8 => Blocks::Runs(Some(32)),
        Some(group) => Blocks::Runs(group.group_size),
        None if one_a_row || scale.shape.len() < 2 => Blocks::Runs(None),
        None => Blocks::Of(block),
    }
}
