//! Q4_1: 32 codes of 4 bits, an f16 scale and an f16 base, `w = d * nibble + m`. Low nibbles are the first 16 elements.

use super::{Block, Unpacked, fit, half_at, put_half};
use crate::tensor::DType;

pub(super) struct Q4_1;

impl Block for Q4_1 {
    const DTYPE: DType = DType::Q4_1;
    const SUB_LEN: usize = 32;
    const CODES: (i8, i8) = (0, 15);

    fn unpack(block: &[u8], out: &mut Unpacked) {
        out.scale[0] = half_at(block, 0);
        out.min[0] = -half_at(block, 2);
        for (i, &byte) in block[4..].iter().enumerate() {
            out.codes[i] = (byte & 15) as i8;
            out.codes[i + 16] = (byte >> 4) as i8;
        }
    }

    fn encode(values: &[f32], block: &mut [u8]) {
        let (low, high) = fit::bounds(values);
        let per_step = fit::inverse(put_half(block, 0, (high - low) / 15.0));
        let base = put_half(block, 2, low);
        let nibble = |x: f32| fit::code((x - base) * per_step, 0, 15) as u8;
        for i in 0..16 {
            block[4 + i] = nibble(values[i]) | nibble(values[i + 16]) << 4;
        }
    }
}
