//! Q3_K: 256 codes of 3 bits, `w = d * (scale - 32) * (code - 4)`, runs of 16 with a 6-bit scale.
//!
//! Bytes: 32 of high bits, 64 of low bit pairs (laid out as in Q2_K), 12 of scales, `d`. Bit `k` of high byte `l`
//! belongs to element `32 * k + l`. Scale `j` has its low nibble in byte `j % 8` (high half from 8 on) and its top two
//! bits in byte `8 + j % 4` at bit `2 * (j / 4)`.

use super::q2_k::{put_two_bits, two_bits};
use super::{Block, Unpacked, fit, half_at};
use crate::tensor::DType;

pub(super) struct Q3K;

const CODES_AT: usize = 32;
const SCALES_AT: usize = 96;
const D_AT: usize = 108;

impl Block for Q3K {
    const DTYPE: DType = DType::Q3K;
    const SUB_LEN: usize = 16;
    const CODES: (i8, i8) = (-4, 3);

    fn unpack(block: &[u8], out: &mut Unpacked) {
        let d = half_at(block, D_AT);
        let scales = &block[SCALES_AT..D_AT];
        for j in 0..16 {
            let low = scales[j % 8] >> (4 * (j / 8)) & 15;
            let high = scales[8 + j % 4] >> (2 * (j / 4)) & 3;
            out.scale[j] = d * f32::from((low | high << 4) as i8 - 32);
        }
        two_bits(&block[CODES_AT..SCALES_AT], |i, bits| {
            let high = block[i % 32] >> (i / 32) & 1;
            out.codes[i] = (bits | high << 2) as i8 - 4;
        });
    }

    fn encode(values: &[f32], block: &mut [u8]) {
        let fit = fit::symmetric(values, -4, 31, block, D_AT);
        let scale = |j: usize| (fit.scales[j] + 32) as u8;
        let code = |i: usize| (fit.codes[i] + 4) as u8;
        for l in 0..32 {
            block[l] = (0..8).fold(0, |bits, k| bits | code(32 * k + l) >> 2 << k);
        }
        put_two_bits(&mut block[CODES_AT..SCALES_AT], |i| code(i) & 3);
        for j in 0..8 {
            block[SCALES_AT + j] = scale(j) & 15 | (scale(j + 8) & 15) << 4;
        }
        for j in 0..4 {
            block[SCALES_AT + 8 + j] = (0..4).fold(0, |bits, k| bits | scale(j + 4 * k) >> 4 << (2 * k));
        }
    }
}
