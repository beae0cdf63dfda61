//! Q4_K: 256 codes of 4 bits; runs of 32 with a 6-bit scale and a 6-bit minimum, under two f16 factors.
//!
//! Bytes: `d`, `dmin`, 12 of scales and minima, 128 of codes. Each 32 code bytes hold two runs: low nibbles the first,
//! high nibbles the second.

use super::{Block, Unpacked, fit, half_at, six_bit};
use crate::tensor::DType;

pub(super) struct Q4K;

const SCALES_AT: usize = 4;
const CODES_AT: usize = 16;

impl Block for Q4K {
    const DTYPE: DType = DType::Q4K;
    const SUB_LEN: usize = 32;
    const CODES: (i8, i8) = (0, 15);

    fn unpack(block: &[u8], out: &mut Unpacked) {
        scales(block, out);
        for (at, &byte) in block[CODES_AT..].iter().enumerate() {
            let first = at / 32 * 64 + at % 32;
            out.codes[first] = (byte & 15) as i8;
            out.codes[first + 32] = (byte >> 4) as i8;
        }
    }

    fn encode(values: &[f32], block: &mut [u8]) {
        let fit = fit::affine(values, 32, 15, 63, block, 0);
        six_bit::put(&mut block[SCALES_AT..CODES_AT], &fit.scales, &fit.mins);
        put_nibbles(&mut block[CODES_AT..], |i| fit.codes[i]);
    }
}

/// The eight scales and minima, which Q5_K keeps in the same place.
pub(super) fn scales(block: &[u8], out: &mut Unpacked) {
    let (d, d_min) = (half_at(block, 0), half_at(block, 2));
    for j in 0..8 {
        let (scale, min) = six_bit::get(&block[SCALES_AT..CODES_AT], j);
        out.scale[j] = d * f32::from(scale);
        out.min[j] = d_min * f32::from(min);
    }
}

/// Writes the low four bits of `code(i)` in the order above.
pub(super) fn put_nibbles(bytes: &mut [u8], code: impl Fn(usize) -> u8) {
    for (at, byte) in bytes.iter_mut().enumerate() {
        let first = at / 32 * 64 + at % 32;
        *byte = code(first) & 15 | (code(first + 32) & 15) << 4;
    }
}
