//! Products with float weights: f32 fused multiply-adds, with 16-bit and 8-bit weights widened on the way.
//!
//! Bound for one row: bytes / read bandwidth. For many: the multiply-add rate; a tile of 6 rows by 4 panels needs 10 loads for 24 of them. The
//! bfloat16 dot instruction is not used: it rounds activations to 16 bits, and on several processors runs at half the speed.
#![allow(unsafe_code)] // Raw loads over shapes that `Table::matmul` has checked.

use super::super::lane::{Lanes, Registers, Tile};
use super::{Product, finish, tile_rows};
use crate::backend::cpu::pack::{F8_RUN, LANES};
use std::marker::PhantomData;
use std::sync::atomic::{Ordering, compiler_fence};

/// Kinds of weights, as const arguments.
pub(super) const F32: u8 = 0;
pub(super) const BF16: u8 = 1;
pub(super) const F16: u8 = 2;
pub(super) const F8: u8 = 3;

/// Bytes of a panel from which on one row reads four panels at a time. Below, the chain of sums, which one panel alone waits for, costs
/// less than the starts of streams.
const LONG: usize = 48 << 10;

/// Rows and panels of the product, tile by tile. `x` is row 0.
pub(super) unsafe fn floats<S: Lanes, const KIND: u8>(p: &Product<'_>, x: *const f32, stride: usize) {
    // SAFETY: `panel` stays inside `p.panels` and `row` inside `p.rows`, with the tile's size taken into account.
    unsafe {
        let wide = S::REGISTERS == Registers::ThirtyTwo || S::REGISTERS == Registers::Sixteen && p.rows.len() == 1;
        let mut panel = p.panels.start;
        while panel < p.panels.end {
            // One row reads short panels best as the one stream that they are: four streams end, and begin anew, too often.
            let four = wide && p.panels.end - panel >= 4 && !(p.streams() && p.panel_bytes < LONG);
            let most = match S::REGISTERS {
                Registers::None => 1,
                // Twelve sums, two weights and an activation fill sixteen registers; a mask besides would put a sum onto the stack.
                Registers::Sixteen if KIND == BF16 => 4,
                _ => 6,
            };
            let mut row = p.rows.start;
            while row < p.rows.end {
                let x = x.add(row * stride);
                let rows = tile_rows(p.rows.end - row, most);
                macro_rules! four {
                    ($R:literal) => {
                        FloatTile::<S, KIND, $R, 4> { p, panel, row, x, stride, lanes: PhantomData }
                    };
                }
                macro_rules! one {
                    ($R:literal) => {
                        FloatTile::<S, KIND, $R, 1> { p, panel, row, x, stride, lanes: PhantomData }
                    };
                }
                // Conditions are constants, so that an instruction set has only the tiles it uses.
                if const { S::REGISTERS.are(Registers::ThirtyTwo) } {
                    if four { with_rows!(S, rows, four, [1 2 3 4 6]) } else { with_rows!(S, rows, one, [1 2 3 4 6]) }
                } else if const { S::REGISTERS.are(Registers::Sixteen) } {
                    if four { with_rows!(S, rows, four, [1]) } else { with_rows!(S, rows, one, [1 2 3 4 6]) }
                } else {
                    with_rows!(S, rows, one, [1]);
                }
                row += rows;
            }
            panel += if four { 4 } else { 1 };
        }
    }
}

/// R rows by P panels of float weights.
struct FloatTile<'a, S, const KIND: u8, const R: usize, const P: usize> {
    p: &'a Product<'a>,
    panel: usize,
    row: usize,
    /// First element of the tile's first row.
    x: *const f32,
    stride: usize,
    lanes: PhantomData<S>,
}

impl<S: Lanes, const KIND: u8, const R: usize, const P: usize> Tile for FloatTile<'_, S, KIND, R, P> {
    #[inline(always)]
    unsafe fn run(self) {
        if const { KIND == F8 } {
            // SAFETY: handed on.
            return unsafe { self.runs() };
        }
        let FloatTile { p, panel, row, x, stride, .. } = self;
        // Bytes of two k's; one 64-byte line of bf16 and f16, two lines of f32.
        let pair = if KIND == F32 { 8 * LANES } else { 4 * LANES };
        let step = p.panel_bytes;
        // SAFETY: loads stay inside the panels (a missing odd k is not loaded) and the rows of `x`.
        unsafe {
            let mut at = p.weights.add(panel * step);
            let mut acc = [[S::splat(0.0); P]; R];
            let mut w = [S::splat(0.0); P];
            for i in 0..p.cols / 2 {
                let x = x.add(2 * i);
                unroll!(j < P {
                    w[j] = even::<S, KIND>(at.add(j * step));
                });
                unroll!(r < R {
                    let x = S::splat(*x.add(r * stride));
                    unroll!(j < P { acc[r][j] = S::fma(x, w[j], acc[r][j]); });
                });
                if const { KIND == BF16 } {
                    // Both halves come from one load, but a large tile has no registers to keep it in. The fence makes the compiler
                    // load again, from the first cache, instead of spilling sums.
                    compiler_fence(Ordering::SeqCst);
                }
                unroll!(j < P { w[j] = odd::<S, KIND>(at.add(j * step)); });
                unroll!(r < R {
                    let x = S::splat(*x.add(r * stride + 1));
                    unroll!(j < P { acc[r][j] = S::fma(x, w[j], acc[r][j]); });
                });
                at = at.add(pair);
            }
            if p.cols % 2 == 1 {
                let x = x.add(p.cols - 1);
                unroll!(j < P { w[j] = even::<S, KIND>(at.add(j * step)); });
                unroll!(r < R {
                    let x = S::splat(*x.add(r * stride));
                    unroll!(j < P { acc[r][j] = S::fma(x, w[j], acc[r][j]); });
                });
            }
            unroll!(r < R {
                unroll!(j < P { finish::<S>(p, panel + j, row + r, acc[r][j]); });
            });
        }
    }
}

impl<S: Lanes, const KIND: u8, const R: usize, const P: usize> FloatTile<'_, S, KIND, R, P> {
    /// The tile of 8-bit floats: each run's sum is one chain, scaled at its end; the scaled sums are another.
    #[inline(always)]
    unsafe fn runs(self) {
        let FloatTile { p, panel, row, x, stride, .. } = self;
        let step = p.panel_bytes;
        // SAFETY: loads stay inside the panels, whose columns are even in number, and the rows of `x`.
        unsafe {
            let mut scales = p.weights.add(panel * step);
            let mut at = scales.add(p.cols.div_ceil(F8_RUN) * 4 * LANES);
            let mut total = [[S::splat(0.0); P]; R];
            for first in (0..p.cols).step_by(F8_RUN) {
                let mut acc = [[S::splat(0.0); P]; R];
                for i in 0..(p.cols - first).min(F8_RUN) / 2 {
                    let x = x.add(first + 2 * i);
                    unroll!(j < P {
                        let (even, odd) = S::load_f8(at.add(j * step));
                        unroll!(r < R { acc[r][j] = S::fma(S::splat(*x.add(r * stride)), even, acc[r][j]); });
                        unroll!(r < R { acc[r][j] = S::fma(S::splat(*x.add(r * stride + 1)), odd, acc[r][j]); });
                    });
                    at = at.add(2 * LANES);
                }
                unroll!(j < P {
                    // Codes came divided by 2^8.
                    let scale = S::mul(S::load(scales.add(j * step).cast()), S::splat(256.0));
                    unroll!(r < R { total[r][j] = S::fma(acc[r][j], scale, total[r][j]); });
                });
                scales = scales.add(4 * LANES);
            }
            unroll!(r < R {
                unroll!(j < P { finish::<S>(p, panel + j, row + r, total[r][j]); });
            });
        }
    }
}

#[inline(always)]
unsafe fn even<S: Lanes, const KIND: u8>(at: *const u8) -> S::F {
    // SAFETY: the caller's pointer is good for the pair, or for its first half.
    unsafe {
        match KIND {
            F32 => S::load(at.cast()),
            BF16 => S::load_bf16_low(at),
            _ => S::load_f16(at),
        }
    }
}

#[inline(always)]
unsafe fn odd<S: Lanes, const KIND: u8>(at: *const u8) -> S::F {
    // SAFETY: the caller's pointer is good for the pair.
    unsafe {
        match KIND {
            F32 => S::load(at.add(4 * LANES).cast()),
            BF16 => S::load_bf16_high(at),
            _ => S::load_f16(at.add(2 * LANES)),
        }
    }
}
