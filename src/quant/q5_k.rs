//! Q5_K: Q4_K with a fifth bit. Bytes: `d`, `dmin`, 12 of scales and minima, 32 of fifth bits, 128 of nibbles.
//!
//! Bit `j` of high byte `l` belongs to element `l` of run `j`.

use super::q4_k::{put_nibbles, scales};
use super::{Block, Unpacked, fit, six_bit};
use crate::tensor::DType;

pub(super) struct Q5K;

const SCALES_AT: usize = 4;
const HIGH_AT: usize = 16;
const CODES_AT: usize = 48;

impl Block for Q5K {
    const DTYPE: DType = DType::Q5K;
    const SUB_LEN: usize = 32;
    const CODES: (i8, i8) = (0, 31);

    fn unpack(block: &[u8], out: &mut Unpacked) {
        scales(block, out);
        let high = &block[HIGH_AT..CODES_AT];
        for (at, &byte) in block[CODES_AT..].iter().enumerate() {
            let (pair, l) = (at / 32, at % 32);
            let fifth = |run: usize| (high[l] >> run & 1) << 4;
            out.codes[pair * 64 + l] = (byte & 15 | fifth(2 * pair)) as i8;
            out.codes[pair * 64 + 32 + l] = (byte >> 4 | fifth(2 * pair + 1)) as i8;
        }
    }

    fn encode(values: &[f32], block: &mut [u8]) {
        let fit = fit::affine(values, 32, 31, 63, block, 0);
        six_bit::put(&mut block[SCALES_AT..HIGH_AT], &fit.scales, &fit.mins);
        for l in 0..32 {
            block[HIGH_AT + l] = (0..8).fold(0, |bits, j| bits | fit.codes[32 * j + l] >> 4 << j);
        }
        put_nibbles(&mut block[CODES_AT..], |i| fit.codes[i]);
    }
}
