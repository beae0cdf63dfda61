//! Random weights in a config's shapes, so that any model size can be timed without its files.
//!
//! Values depend on seed, tensor and element alone, not on threads. Sizes keep activations near 1: matrices have a
//! standard deviation of `1 / sqrt(columns)`, vectors lie near 1.

use crate::error::Result;
use crate::options::Synthetic;

/// The generator.
pub(super) struct Random {
    pub options: Synthetic,
}

/// SplitMix64 (Steele et al., 2014).
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

impl Random {
    pub fn new(options: Synthetic) -> Random {
        Random { options }
    }

    fn state(&self, tensor: &str, row: usize) -> u64 {
        let mut state = self.options.seed ^ (row as u64).wrapping_mul(0x2545_f491_4f6c_dd1d);
        for byte in tensor.bytes() {
            state = (state ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
        }
        state
    }

    /// Values in `-a..a` with the variance of a matrix row.
    pub fn matrix_row(&self, tensor: &str, row: usize, out: &mut [f32]) {
        let mut state = self.state(tensor, row);
        let a = (3.0 / out.len() as f32).sqrt();
        for pair in out.chunks_mut(2) {
            let bits = next(&mut state);
            for (v, half) in pair.iter_mut().zip([bits as u32, (bits >> 32) as u32]) {
                *v = (half as f32 / u32::MAX as f32 * 2.0 - 1.0) * a;
            }
        }
    }

    /// Values in 0.9..1.1.
    pub fn vector(&self, tensor: &str, out: &mut [f32]) {
        let mut state = self.state(tensor, 0);
        for v in out {
            *v = 0.9 + 0.2 * (next(&mut state) >> 40) as f32 / (1 << 24) as f32;
        }
    }

    /// A BF16 table of rows near 1 in size.
    pub fn rows(&self, tensor: &str, rows: usize, cols: usize) -> Result<Vec<u8>> {
        let mut bytes = crate::error::vec_filled(rows * cols * 2, 0u8, "a table of random rows")?;
        let mut row = crate::error::vec_filled(cols, 0.0f32, "a random row")?;
        for (index, out) in bytes.chunks_mut(cols * 2).enumerate() {
            self.matrix_row(tensor, index, &mut row);
            let size = (cols as f32 / 3.0).sqrt();
            for (b, v) in out.chunks_mut(2).zip(&row) {
                b.copy_from_slice(&half::bf16::from_f32(v * size).to_le_bytes());
            }
        }
        Ok(bytes)
    }
}
