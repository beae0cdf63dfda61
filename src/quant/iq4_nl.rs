//! IQ4_NL: 32 indices of 4 bits into a fixed table that is denser near zero, and an f16 scale: `w = d * table[nibble]`.
//! Low nibbles are the first 16 elements.

use super::{Block, Unpacked, fit, half_at, put_half};
use crate::tensor::DType;

pub(super) struct IQ4NL;

/// Part of the format.
pub(super) const TABLE: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

impl Block for IQ4NL {
    const DTYPE: DType = DType::IQ4NL;
    const SUB_LEN: usize = 32;
    const CODES: (i8, i8) = (-127, 113);

    fn unpack(block: &[u8], out: &mut Unpacked) {
        out.scale[0] = half_at(block, 0);
        for (i, &byte) in block[2..].iter().enumerate() {
            out.codes[i] = TABLE[usize::from(byte & 15)];
            out.codes[i + 16] = TABLE[usize::from(byte >> 4)];
        }
    }

    fn encode(values: &[f32], block: &mut [u8]) {
        // The extreme takes the table's longer end, whatever its sign.
        let per_step = fit::inverse(put_half(block, 0, fit::extreme(values) / -127.0));
        let nibble = |x: f32| nearest(&TABLE, x * per_step);
        for i in 0..16 {
            block[2 + i] = nibble(values[i]) | nibble(values[i + 16]) << 4;
        }
    }
}

/// Index of the table value closest to `x`; the first one for NaN.
pub(super) fn nearest(table: &[i8; 16], x: f32) -> u8 {
    let distance = |i: u8| (f32::from(table[usize::from(i)]) - x).abs();
    (1..16).fold(0, |best, i| if distance(i) < distance(best) { i } else { best })
}
