//! Q5_1: 32 codes of 5 bits, an f16 scale and an f16 base, `w = d * code + m`. Bits are laid out as in Q5_0.

use super::q5_0::{five_bits, put_five_bits};
use super::{Block, Unpacked, fit, half_at, put_half};
use crate::tensor::DType;

pub(super) struct Q5_1;

impl Block for Q5_1 {
    const DTYPE: DType = DType::Q5_1;
    const SUB_LEN: usize = 32;
    const CODES: (i8, i8) = (0, 31);

    fn unpack(block: &[u8], out: &mut Unpacked) {
        out.scale[0] = half_at(block, 0);
        out.min[0] = -half_at(block, 2);
        five_bits(&block[4..], &mut out.codes, 0);
    }

    fn encode(values: &[f32], block: &mut [u8]) {
        let (low, high) = fit::bounds(values);
        let per_step = fit::inverse(put_half(block, 0, (high - low) / 31.0));
        let base = put_half(block, 2, low);
        put_five_bits(&mut block[4..], |i| fit::code((values[i] - base) * per_step, 0, 31) as u8);
    }
}
