//! The other operand of a matrix product: rows of f32, or rows quantised to 8 bits in blocks of 32.
//!
//! A quantised block carries, beside its codes, the sums that packed weights need for their bias and minimum; it fills one cache line,
//! so a kernel touches one line per row and block.
#![allow(unsafe_code)] // Declares a plain-data type.

use super::arena::Plain;

/// Elements in a quantised block.
pub const Q8_BLOCK: usize = 32;

/// 32 activations as `scale * code`, with sums. One cache line.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C, align(64))]
pub struct Q8Block {
    /// In -127..=127.
    pub codes: [i8; Q8_BLOCK],
    /// Largest magnitude / 127; NaN where an element was not finite, so that the product shows it.
    pub scale: f32,
    /// `scale * sum(codes)`: what a weight minimum multiplies.
    pub sum: f32,
    /// `-128 * sum(codes)`: start value for weights stored with 128 added.
    pub offset: i32,
    /// `-8 * sum(codes)`: start value for 4-bit weights stored with 8 added.
    pub offset_nibble: i32,
    /// `scale * sum` of each half, for weights with a scale per 16.
    pub half_sum: [f32; 2],
    /// `-128 * sum` of each half.
    pub half_offset: [i32; 2],
}

const _: () = assert!(size_of::<Q8Block>() == 64);

// SAFETY: numbers only, 32 + 4 * 8 = 64 bytes, no padding.
unsafe impl Plain for Q8Block {}

impl Q8Block {
    /// All zeros.
    pub const ZERO: Q8Block =
        Q8Block { codes: [0; 32], scale: 0.0, sum: 0.0, offset: 0, offset_nibble: 0, half_sum: [0.0; 2], half_offset: [0; 2] };

    /// Fills in the sums of `codes` under `scale`.
    #[inline(always)]
    pub fn of(codes: [i8; Q8_BLOCK], scale: f32) -> Q8Block {
        let half = |h: usize| codes[h * 16..h * 16 + 16].iter().map(|&c| c as i32).sum::<i32>();
        Q8Block { codes, ..Q8Block::ZERO }.with_sums(scale, half(0), half(1))
    }

    /// The same codes with their scale, and the sums of each half of them.
    #[inline(always)]
    pub(super) fn with_sums(self, scale: f32, low: i32, high: i32) -> Q8Block {
        let sum = low + high;
        Q8Block {
            codes: self.codes,
            scale,
            sum: scale * sum as f32,
            offset: -128 * sum,
            offset_nibble: -8 * sum,
            half_sum: [scale * low as f32, scale * high as f32],
            half_offset: [-128 * low, -128 * high],
        }
    }
}

/// Input rows of a product. Integer weight layouts take `Q8`, float layouts take `F32`; `Bf16` and `F8` also take `Pairs` where the table has
/// them.
#[derive(Clone, Copy)]
pub enum Activations<'a> {
    /// Row `r` is `x[r * stride ..][..k]`.
    F32 {
        /// The elements.
        x: &'a [f32],
        /// Elements from one row to the next.
        stride: usize,
    },
    /// Row `r` is `blocks[r * stride ..][..k / 32]`.
    Q8 {
        /// The blocks.
        blocks: &'a [Q8Block],
        /// Blocks from one row to the next.
        stride: usize,
    },
    /// Row `r` is `x[r * stride ..][..k.div_ceil(2)]`, rounded to bfloat16; see [`Table::round_row`](super::simd::Table::round_row).
    Pairs {
        /// Two elements each, the even one in the low half; the last high half is zero where k is odd.
        x: &'a [u32],
        /// Pairs from one row to the next.
        stride: usize,
    },
}

/// What happens to a finished sum before it is stored.
#[derive(Clone, Copy, Default)]
pub struct Epilogue<'a> {
    /// One value per output feature, added first.
    pub bias: Option<&'a [f32]>,
    /// `y += result` instead of `y = result`.
    pub add: bool,
}
