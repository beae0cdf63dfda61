//! Q4_0: 32 codes of 4 bits and an f16 scale, `w = d * (nibble - 8)`. Low nibbles are the first 16 elements.

use super::{Block, Unpacked, fit, half_at, put_half};
use crate::tensor::DType;

pub(super) struct Q4_0;

impl Block for Q4_0 {
    const DTYPE: DType = DType::Q4_0;
    const SUB_LEN: usize = 32;
    const CODES: (i8, i8) = (-8, 7);

    fn unpack(block: &[u8], out: &mut Unpacked) {
        out.scale[0] = half_at(block, 0);
        for (i, &byte) in block[2..].iter().enumerate() {
            out.codes[i] = (byte & 15) as i8 - 8;
            out.codes[i + 16] = (byte >> 4) as i8 - 8;
        }
    }

    fn encode(values: &[f32], block: &mut [u8]) {
        // The extreme takes code -8, whatever its sign.
        let per_step = fit::inverse(put_half(block, 0, fit::extreme(values) / -8.0));
        let nibble = |x: f32| (fit::code(x * per_step, -8, 7) + 8) as u8;
        for i in 0..16 {
            block[2 + i] = nibble(values[i]) | nibble(values[i + 16]) << 4;
        }
    }
}
