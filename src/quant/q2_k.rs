//! Q2_K: 256 codes of 2 bits; runs of 16 with a 4-bit scale and a 4-bit minimum, under two f16 factors.
//!
//! Bytes: 16 of scale (low nibble) and minimum (high nibble), 64 of codes, `d`, `dmin`. Each half of the block has 32
//! code bytes; byte `l` holds elements `l`, `l + 32`, `l + 64` and `l + 96` of its half, lowest bits first.

use super::{Block, Unpacked, fit, half_at};
use crate::tensor::DType;

pub(super) struct Q2K;

const CODES_AT: usize = 16;
const D_AT: usize = 80;

impl Block for Q2K {
    const DTYPE: DType = DType::Q2K;
    const SUB_LEN: usize = 16;
    const CODES: (i8, i8) = (0, 3);

    fn unpack(block: &[u8], out: &mut Unpacked) {
        let (d, d_min) = (half_at(block, D_AT), half_at(block, D_AT + 2));
        for j in 0..16 {
            out.scale[j] = d * f32::from(block[j] & 15);
            out.min[j] = d_min * f32::from(block[j] >> 4);
        }
        two_bits(&block[CODES_AT..D_AT], |i, bits| out.codes[i] = bits as i8);
    }

    fn encode(values: &[f32], block: &mut [u8]) {
        let fit = fit::affine(values, 16, 3, 15, block, D_AT);
        for j in 0..16 {
            block[j] = fit.scales[j] | fit.mins[j] << 4;
        }
        put_two_bits(&mut block[CODES_AT..D_AT], |i| fit.codes[i]);
    }
}

/// Hands each element's two bits to `element(i, bits)`.
pub(super) fn two_bits(bytes: &[u8], mut element: impl FnMut(usize, u8)) {
    for (at, &byte) in bytes.iter().enumerate() {
        let (half, l) = (at / 32, at % 32);
        for quarter in 0..4 {
            element(half * 128 + quarter * 32 + l, byte >> (2 * quarter) & 3);
        }
    }
}

/// Writes what [`two_bits`] reads; `code(i)` is below 4.
pub(super) fn put_two_bits(bytes: &mut [u8], code: impl Fn(usize) -> u8) {
    for (at, byte) in bytes.iter_mut().enumerate() {
        let first = at / 32 * 128 + at % 32;
        *byte = (0..4).fold(0, |bits, quarter| bits | code(first + quarter * 32) << (2 * quarter));
    }
}
