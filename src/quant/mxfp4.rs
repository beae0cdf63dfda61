//! MXFP4 as GGUF files hold it: an E8M0 scale byte and 32 E2M1 codes. Low nibbles are the first 16 elements.
//!
//! Codes are kept doubled (E2M1 counts in halves), so the scale is half of the power of two that the byte names.

use super::iq4_nl::nearest;
use super::{Block, Unpacked, fit};
use crate::tensor::DType;

pub(super) struct MXFP4;

/// Twice the E2M1 values, sign in the top bit.
pub(super) const TABLE: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

impl Block for MXFP4 {
    const DTYPE: DType = DType::MXFP4;
    const SUB_LEN: usize = 32;
    const CODES: (i8, i8) = (-12, 12);

    fn unpack(block: &[u8], out: &mut Unpacked) {
        out.scale[0] = scale(block[0]);
        for (i, &byte) in block[1..].iter().enumerate() {
            out.codes[i] = TABLE[usize::from(byte & 15)];
            out.codes[i + 16] = TABLE[usize::from(byte >> 4)];
        }
    }

    fn encode(values: &[f32], block: &mut [u8]) {
        // Smallest power of two under which the extreme does not pass the largest code.
        let top = f64::from(fit::extreme(values).abs()) / 12.0;
        let exponent = if top > 0.0 { top.log2().ceil() as i32 } else { -128 };
        block[0] = (exponent.clamp(-128, 126) + 128) as u8;
        let per_step = 1.0 / f64::from(scale(block[0]));
        let nibble = |x: f32| nearest(&TABLE, (f64::from(x) * per_step) as f32);
        for i in 0..16 {
            block[1 + i] = nibble(values[i]) | nibble(values[i + 16]) << 4;
        }
    }
}

/// `2^(byte - 128)`; the two smallest are subnormal.
fn scale(byte: u8) -> f32 {
    let bits = match byte {
        0 => 1 << 21,
        1 => 1 << 22,
        _ => u32::from(byte - 1) << 23,
    };
    f32::from_bits(bits)
}
