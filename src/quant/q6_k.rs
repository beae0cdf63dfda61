//! Q6_K: 256 codes of 6 bits, `w = d * scale * (code - 32)`, runs of 16 with a signed 8-bit scale.
//!
//! Bytes: 128 of nibbles, 64 of top bit pairs, 16 of scales, `d`. In each half of the block, quarter `k` (32 elements)
//! takes its nibbles from bytes `32 * (k % 2)..` of the half's 64 (high halves for `k >= 2`) and its pair from bit
//! `2 * k` of the half's 32.

use super::{Block, Unpacked, fit, half_at};
use crate::tensor::DType;

pub(super) struct Q6K;

const HIGH_AT: usize = 128;
const SCALES_AT: usize = 192;
const D_AT: usize = 208;

impl Block for Q6K {
    const DTYPE: DType = DType::Q6K;
    const SUB_LEN: usize = 16;
    const CODES: (i8, i8) = (-32, 31);

    fn unpack(block: &[u8], out: &mut Unpacked) {
        let d = half_at(block, D_AT);
        for j in 0..16 {
            out.scale[j] = d * f32::from(block[SCALES_AT + j] as i8);
        }
        for run in 0..8 {
            let (half, quarter) = (run / 4, run % 4);
            let nibbles = &block[half * 64 + quarter % 2 * 32..][..32];
            let pairs = &block[HIGH_AT + half * 32..][..32];
            for l in 0..32 {
                let low = nibbles[l] >> (4 * (quarter / 2)) & 15;
                let high = pairs[l] >> (2 * quarter) & 3;
                out.codes[run * 32 + l] = (low | high << 4) as i8 - 32;
            }
        }
    }

    fn encode(values: &[f32], block: &mut [u8]) {
        let fit = fit::symmetric(values, -32, 127, block, D_AT);
        block[..SCALES_AT].fill(0);
        for (i, &code) in fit.codes.iter().enumerate() {
            let (half, quarter, l) = (i / 128, i / 32 % 4, i % 32);
            let stored = (code + 32) as u8;
            block[half * 64 + quarter % 2 * 32 + l] |= (stored & 15) << (4 * (quarter / 2));
            block[HIGH_AT + half * 32 + l] |= stored >> 4 << (2 * quarter);
        }
        for j in 0..16 {
            block[SCALES_AT + j] = fit.scales[j] as u8;
        }
    }
}
