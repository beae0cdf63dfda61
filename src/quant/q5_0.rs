//! Q5_0: 32 codes of 5 bits and an f16 scale, `w = d * (code - 16)`. Bytes 2-5 hold each element's fifth bit, in
//! order; in the nibbles after them the low halves are the first 16 elements.

use super::{Block, Unpacked, fit, half_at, put_half};
use crate::tensor::DType;

pub(super) struct Q5_0;

impl Block for Q5_0 {
    const DTYPE: DType = DType::Q5_0;
    const SUB_LEN: usize = 32;
    const CODES: (i8, i8) = (-16, 15);

    fn unpack(block: &[u8], out: &mut Unpacked) {
        out.scale[0] = half_at(block, 0);
        five_bits(&block[2..], &mut out.codes, 16);
    }

    fn encode(values: &[f32], block: &mut [u8]) {
        // The extreme takes code -16, whatever its sign.
        let per_step = fit::inverse(put_half(block, 0, fit::extreme(values) / -16.0));
        put_five_bits(&mut block[2..], |i| (fit::code(values[i] * per_step, -16, 15) + 16) as u8);
    }
}

/// Reads four bytes of high bits and 16 of nibbles; `zero` is the stored code that means 0.
pub(super) fn five_bits(bytes: &[u8], codes: &mut [i8; 256], zero: i8) {
    let high = u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]);
    let fifth = |i: usize| (high >> i & 1) as u8 * 16;
    for (i, &byte) in bytes[4..].iter().enumerate() {
        codes[i] = (byte & 15 | fifth(i)) as i8 - zero;
        codes[i + 16] = (byte >> 4 | fifth(i + 16)) as i8 - zero;
    }
}

/// Writes what [`five_bits`] reads; `code(i)` is below 32.
pub(super) fn put_five_bits(bytes: &mut [u8], code: impl Fn(usize) -> u8) {
    let high = (0..32).fold(0u32, |bits, i| bits | u32::from(code(i) >> 4) << i);
    bytes[..4].copy_from_slice(&high.to_le_bytes());
    for i in 0..16 {
        bytes[4 + i] = code(i) & 15 | (code(i + 16) & 15) << 4;
    }
}
