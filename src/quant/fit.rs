//! How encoders choose scales: the simplest rule that maps the largest value onto the largest code.
//!
//! Good enough for synthetic weights and tests. Files made to be used come from quantisers that search.

use super::put_half;

/// The value furthest from zero, with its sign.
pub(super) fn extreme(values: &[f32]) -> f32 {
    values.iter().copied().fold(0.0, |best, x| if x.abs() > best.abs() { x } else { best })
}

/// The smallest and the largest value.
pub(super) fn bounds(values: &[f32]) -> (f32, f32) {
    values.iter().fold((f32::MAX, f32::MIN), |(low, high), &x| (low.min(x), high.max(x)))
}

/// `1 / x`, or 0 where a scale of 0 leaves nothing to divide.
pub(super) fn inverse(x: f32) -> f32 {
    if x == 0.0 { 0.0 } else { 1.0 / x }
}

/// The nearest code in `low..=high`.
pub(super) fn code(x: f32, low: i8, high: i8) -> i8 {
    x.round_ties_even().clamp(f32::from(low), f32::from(high)) as i8
}

/// Integer scales and codes of a super-block whose runs have a scale and a minimum (`w = d*scale*code - dmin*min`).
pub(super) struct Affine {
    pub scales: [u8; 16],
    pub mins: [u8; 16],
    pub codes: [u8; 256],
}

/// Fits 256 values. Codes go up to `top_code`, integer scales and minima up to `top_scale`; the two f16 factors are
/// written to `block` at `d_at` and `d_at + 2`.
pub(super) fn affine(values: &[f32], sub_len: usize, top_code: i8, top_scale: u8, block: &mut [u8], d_at: usize) -> Affine {
    let mut fit = Affine { scales: [0; 16], mins: [0; 16], codes: [0; 256] };
    let (mut steps, mut floors) = ([0f32; 16], [0f32; 16]);
    for (j, run) in values.chunks(sub_len).enumerate() {
        let (low, high) = bounds(run);
        // The format subtracts a minimum that is never negative, so a run above zero starts at zero.
        floors[j] = (-low).max(0.0);
        steps[j] = (high + floors[j]).max(0.0) / f32::from(top_code);
    }
    let top = f32::from(top_scale);
    let d = put_half(block, d_at, bounds(&steps).1 / top);
    let d_min = put_half(block, d_at + 2, bounds(&floors).1 / top);
    for (j, run) in values.chunks(sub_len).enumerate() {
        fit.scales[j] = (steps[j] * inverse(d)).round_ties_even().min(top) as u8;
        fit.mins[j] = (floors[j] * inverse(d_min)).round_ties_even().min(top) as u8;
        let per_step = inverse(d * f32::from(fit.scales[j]));
        let floor = d_min * f32::from(fit.mins[j]);
        for (i, &x) in run.iter().enumerate() {
            fit.codes[j * sub_len + i] = code((x + floor) * per_step, 0, top_code) as u8;
        }
    }
    fit
}

/// Integer scales and codes of a super-block whose runs of 16 have a scale only (`w = d*scale*code`).
pub(super) struct Symmetric {
    pub scales: [i8; 16],
    pub codes: [i8; 256],
}

/// Fits 256 values. Codes lie in `low_code..-low_code`, integer scales in `-top_scale..=top_scale`; the f16 factor is
/// written to `block` at `d_at`.
pub(super) fn symmetric(values: &[f32], low_code: i8, top_scale: i8, block: &mut [u8], d_at: usize) -> Symmetric {
    let mut fit = Symmetric { scales: [0; 16], codes: [0; 256] };
    let mut steps = [0f32; 16];
    for (j, run) in values.chunks(16).enumerate() {
        // There is one more code below zero than above: the extreme takes it, whatever its sign.
        steps[j] = extreme(run) / f32::from(low_code);
    }
    let d = put_half(block, d_at, extreme(&steps).abs() / f32::from(top_scale));
    for (j, run) in values.chunks(16).enumerate() {
        fit.scales[j] = code(steps[j] * inverse(d), -top_scale, top_scale);
        let per_step = inverse(d * f32::from(fit.scales[j]));
        for (i, &x) in run.iter().enumerate() {
            fit.codes[j * 16 + i] = code(x * per_step, low_code, -1 - low_code);
        }
    }
    fit
}
