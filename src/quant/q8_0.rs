//! Q8_0: 32 signed bytes and an f16 scale, `w = d * code`.

use super::{Block, Unpacked, fit, half_at, put_half};
use crate::tensor::DType;

pub(super) struct Q8_0;

impl Block for Q8_0 {
    const DTYPE: DType = DType::Q8_0;
    const SUB_LEN: usize = 32;
    const CODES: (i8, i8) = (-128, 127);

    fn unpack(block: &[u8], out: &mut Unpacked) {
        out.scale[0] = half_at(block, 0);
        for (code, &byte) in out.codes.iter_mut().zip(&block[2..]) {
            *code = byte as i8;
        }
    }

    fn encode(values: &[f32], block: &mut [u8]) {
        let per_step = fit::inverse(put_half(block, 0, fit::extreme(values).abs() / 127.0));
        for (byte, x) in block[2..].iter_mut().zip(values) {
            *byte = fit::code(x * per_step, -127, 127) as u8;
        }
    }
}
