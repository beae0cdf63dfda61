//! Rows of f32 to 8-bit blocks.
//!
//! Every operation here is one correctly rounded IEEE operation per element, so all tables give the same bits.
#![allow(unsafe_code)] // Calls lane methods.

use super::super::activations::{Q8_BLOCK, Q8Block};
use super::attend::PAGE;
use super::lane::Lanes;

/// Below this the scale would become subnormal, and its inverse infinite; such a block is zeros.
pub(super) const TINY: f32 = 1e-30;

/// Quantises `x` into `out`, block by block.
///
/// # Safety
/// Needs the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn row<S: Lanes>(x: &[f32], out: &mut [Q8Block]) {
    for (x, out) in x.as_chunks::<Q8_BLOCK>().0.iter().zip(out) {
        // SAFETY: the caller has the instruction set.
        *out = unsafe { S::quantize(x) };
    }
}

/// The definition.
#[inline(always)]
pub(super) fn block(x: &[f32; Q8_BLOCK]) -> Q8Block {
    let largest = largest(x);
    if !largest.is_finite() {
        return Q8Block::of([0; Q8_BLOCK], f32::NAN);
    }
    if largest < TINY {
        return Q8Block::ZERO;
    }
    let inverse = 127.0 / largest;
    let mut codes = [0i8; Q8_BLOCK];
    for (code, v) in codes.iter_mut().zip(x) {
        *code = nearest(v * inverse) as i8;
    }
    Q8Block::of(codes, largest / 127.0)
}

/// A page's weights as `gain * (128 * high + low)`, both in 0..=127.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Split {
    pub high: [u8; PAGE],
    pub low: [u8; PAGE],
    /// NaN where a weight was not finite.
    pub gain: f32,
}

impl Split {
    pub const ZERO: Split = Split { high: [0; PAGE], low: [0; PAGE], gain: 0.0 };
}

/// The largest code of a weight: two times seven bits.
pub(super) const MOST: f32 = 16383.0;

/// The definition of [`Split`], for weights of which none is negative.
#[inline(always)]
pub(super) fn split(x: &[f32; PAGE]) -> Split {
    let largest = largest(x);
    if !largest.is_finite() {
        return Split { gain: f32::NAN, ..Split::ZERO };
    }
    if largest < TINY {
        return Split::ZERO;
    }
    let inverse = MOST / largest;
    let mut out = Split { gain: largest / MOST, ..Split::ZERO };
    for (i, x) in x.iter().enumerate() {
        let code = nearest(x * inverse);
        (out.high[i], out.low[i]) = ((code >> 7) as u8, (code & 127) as u8);
    }
    out
}

/// The largest magnitude; NaN if there is one.
#[inline(always)]
pub(super) fn largest(x: &[f32]) -> f32 {
    // Without the sign, floats order like their bits, and NaN is above infinity: one integer maximum finds both.
    f32::from_bits(x.iter().fold(0u32, |largest, v| largest.max(v.to_bits() & 0x7fff_ffff)))
}

/// The nearest integer, ties to even, for magnitudes below 2^22.
#[inline(always)]
pub(super) fn nearest(x: f32) -> i32 {
    // Adding 1.5 * 2^23 pushes the fraction out of the mantissa, rounding as the hardware does; the low bits are the integer.
    const MAGIC: f32 = 12_582_912.0;
    (x + MAGIC).to_bits() as i32 - MAGIC.to_bits() as i32
}

#[cfg(test)]
mod tests {
    use super::super::tables;
    use super::*;

    #[test]
    fn codes_are_nearest_and_equal_on_all_tables() {
        let mut seed = 7u64;
        let mut x = Vec::new();
        for block in 0..64 {
            for _ in 0..32 {
                seed = seed.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                x.push(((seed >> 40) as f32 / (1 << 23) as f32 - 1.0) * 10f32.powi(block % 20 - 10));
            }
        }
        let mut first = Vec::new();
        for table in tables() {
            let mut out = vec![Q8Block::ZERO; 64];
            table.quantize_row(&x, &mut out);
            for (b, x) in out.iter().zip(x.chunks(32)) {
                let amax = x.iter().fold(0f64, |m, v| m.max(v.abs() as f64));
                assert!((b.scale as f64 - amax / 127.0).abs() <= amax * 1e-7);
                let sums: Vec<i32> = b.codes.chunks(16).map(|h| h.iter().map(|&c| c as i32).sum()).collect();
                assert_eq!(b.half_offset, [-128 * sums[0], -128 * sums[1]]);
                assert_eq!((b.offset, b.offset_nibble), (-128 * (sums[0] + sums[1]), -8 * (sums[0] + sums[1])));
                assert_eq!(b.sum, b.scale * (sums[0] + sums[1]) as f32);
                assert_eq!(b.half_sum, [b.scale * sums[0] as f32, b.scale * sums[1] as f32]);
                for (&code, &v) in b.codes.iter().zip(x) {
                    let exact = v as f64 * 127.0 / amax;
                    assert!((code as f64 - exact).abs() <= 0.5 + 1e-4, "{v}: {code}, exactly {exact}");
                }
            }
            if first.is_empty() {
                first = out;
            } else {
                assert_eq!(first, out, "{}", table.name());
            }
        }
    }

    #[test]
    fn odd_values() {
        for table in tables() {
            let mut out = [Q8Block::ZERO];
            for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                let mut x = [1.0; 32];
                x[17] = bad;
                table.quantize_row(&x, &mut out);
                assert!(out[0].scale.is_nan() && out[0].sum.is_nan() && out[0].codes == [0; 32]);
            }
            for tiny in [0.0, -0.0, 1e-40, 1e-31] {
                table.quantize_row(&[tiny; 32], &mut out);
                assert_eq!(out[0], Q8Block::ZERO);
            }
            let mut x = [0.0; 32];
            x[..4].copy_from_slice(&[127.0, 0.5, 1.5, -2.5]);
            table.quantize_row(&x, &mut out);
            assert_eq!(out[0].codes[..4], [127, 0, 2, -2]);
            assert_eq!(out[0].scale, 1.0);
            table.quantize_row(&[f32::MAX; 32], &mut out);
            assert_eq!(out[0].codes, [127; 32]);
        }
    }
}
