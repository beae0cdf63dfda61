//! Products of integer weights and 8-bit activations: exact integer sums per block, scaled and added in f32.
//!
//! Bound for one row: bytes / read bandwidth. For many: the rate of the dot instruction, of which scaling takes a fifth (a third with scales per
//! 16). The order of k inside a block does not matter, since integer sums are exact; blocks are added in ascending order.
#![allow(unsafe_code)] // Raw loads over shapes that `Table::matmul` has checked.

use super::super::lane::{Lanes, Registers, Tile};
use super::{Product, finish, tile_rows};
use crate::backend::cpu::activations::Q8Block;
use crate::backend::cpu::pack::{GAINS, LANES, SUPER};
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// Kinds of weights, as const arguments.
pub(super) const I8: u8 = 0;
pub(super) const I4: u8 = 1;
pub(super) const TABLE: u8 = 2;
/// Most rows of a decode step's batch; more are a prompt's, and bound by arithmetic.
const FEW: usize = 16;
/// Columns from which on one row reads four panels of 8-bit weights at a time.
const LONG: usize = 4096;
/// Bytes of a panel beyond which one row in sixteen registers does.
const LONG_BYTES: usize = 16 << 10;
/// Bytes ahead that memory is asked for weights in one stream, and in each of four.
const AHEAD: usize = 4096;
const AHEAD_OF_FOUR: usize = 2048;
/// Groups of four k's in a block, and pairs of them.
const GROUPS: usize = 8;
const PAIRS: usize = 4;

/// Rows and panels of the product, tile by tile. `x` is row 0.
pub(super) unsafe fn integers<S: Lanes, const KIND: u8, const HALF: bool, const MIN: bool>(
    p: &Product<'_>,
    x: *const Q8Block,
    stride: usize,
    table: &[i8; 16],
) {
    // SAFETY: as in `floats`.
    unsafe {
        let mut panel = p.panels.start;
        while panel < p.panels.end {
            let have = p.panels.end - panel;
            let wide = S::REGISTERS == Registers::ThirtyTwo;
            // Few rows read the panels as the one stream that they are. Four streams, which the compiler has no registers for, only pay
            // where a panel is so long that the activations of its one row no longer stay in the first cache.
            // Half as wide registers take so many instructions to a line that one stream waits for memory; four do less.
            let is_long = match S::REGISTERS {
                Registers::ThirtyTwo => KIND == I8 && p.cols > LONG,
                Registers::Sixteen => p.panel_bytes > LONG_BYTES,
                Registers::None => false,
            };
            let width = if is_long && have >= 4 && p.rows.len() == 1 {
                4
            } else if wide && have >= 2 && p.rows.len() > FEW {
                2
            } else {
                1
            };
            let most = match S::REGISTERS {
                Registers::ThirtyTwo => {
                    if width == 2 {
                        6
                    } else {
                        8
                    }
                }
                Registers::Sixteen => 2,
                Registers::None => 1,
            };
            let mut row = p.rows.start;
            while row < p.rows.end {
                let x = x.add(row * stride);
                macro_rules! tile {
                    ($R:literal, $P:literal) => {
                        IntegerTile::<S, KIND, HALF, MIN, $R, $P> { p, panel, row, x, stride, table, lanes: PhantomData }
                    };
                }
                macro_rules! four {
                    ($R:literal) => {
                        tile!($R, 4)
                    };
                }
                macro_rules! two {
                    ($R:literal) => {
                        tile!($R, 2)
                    };
                }
                macro_rules! one {
                    ($R:literal) => {
                        tile!($R, 1)
                    };
                }
                let rows = tile_rows(p.rows.end - row, most);
                if const { S::REGISTERS.are(Registers::ThirtyTwo) } {
                    match width {
                        4 => {
                            if const { KIND == I8 } {
                                with_rows!(S, rows, four, [1])
                            }
                        }
                        2 => with_rows!(S, rows, two, [2 3 4 6]),
                        _ => with_rows!(S, rows, one, [1 2 3 4 6 8]),
                    }
                } else if const { S::REGISTERS.are(Registers::Sixteen) } {
                    match width {
                        4 => with_rows!(S, rows, four, [1]),
                        _ => with_rows!(S, rows, one, [1 2]),
                    }
                } else {
                    with_rows!(S, rows, one, [1]);
                }
                row += rows;
            }
            panel += width;
        }
    }
}

/// R rows by P panels of integer weights.
struct IntegerTile<'a, S, const KIND: u8, const HALF: bool, const MIN: bool, const R: usize, const P: usize> {
    p: &'a Product<'a>,
    panel: usize,
    row: usize,
    /// First block of the tile's first row.
    x: *const Q8Block,
    stride: usize,
    table: &'a [i8; 16],
    lanes: PhantomData<S>,
}

impl<S: Lanes, const KIND: u8, const HALF: bool, const MIN: bool, const R: usize, const P: usize> Tile
    for IntegerTile<'_, S, KIND, HALF, MIN, R, P>
{
    #[inline(always)]
    unsafe fn run(self) {
        let IntegerTile { p, panel, row, x, stride, .. } = self;
        let step = p.panel_bytes;
        // Bytes of the codes and of the scales of one 32-block; two of each make a stretch.
        let codes = Self::CODES / 2;
        let scales = Self::SCALES / 2;
        // SAFETY: loads stay inside the panels and the rows of `x`: block `b < cols / 32` has its codes and scales in stretch `b / 2`.
        unsafe {
            let table = S::load_table(self.table);
            let base = p.weights.add(panel * step);
            let mut acc = [[S::splat(0.0); P]; R];
            for b in 0..p.cols / 32 {
                let stretch = base.add(GAINS + b / 2 * Self::STRETCH);
                let at = stretch.add(Self::STRETCH - Self::CODES + b % 2 * codes);
                let scale = stretch.add(b % 2 * scales);
                let x = x.add(b);
                // Scales stand in front of their codes but are needed after them. Touching them first keeps each stream ascending, without
                // which the hardware's prefetcher loses a quarter of the bandwidth. One row needs no more: so few instructions go to a line that
                // loads far ahead are under way by themselves, and prefetching by hand costs a fifth. Several rows fill the window of
                // instructions with arithmetic, and wait for each line unless it was asked for before; so does one row in half as wide registers.
                let ahead = const { Self::ahead() };
                // Behind a panel's end it is the next one of this stream that comes.
                let next = if b / 2 * Self::STRETCH + ahead < step { ahead } else { ahead + (P - 1) * step };
                if ahead > 0 {
                    for line in (0..codes).step_by(64) {
                        unroll!(j < P { S::prefetch(at.wrapping_add(j * step + next + line)); });
                    }
                }
                if b % 2 == 0 {
                    if ahead > 0 {
                        for line in (0..Self::STRETCH - Self::CODES).step_by(64) {
                            unroll!(j < P { S::prefetch(stretch.wrapping_add(j * step + next + line)); });
                        }
                    }
                    unroll!(j < P {
                        for line in (0..Self::STRETCH - Self::CODES).step_by(64) {
                            S::prefetch(stretch.add(j * step + line));
                        }
                    });
                }
                if HALF {
                    let sums = Self::dots(at, step, x, stride, 0, 4, 0, table);
                    acc = Self::accumulate(acc, sums, scale, step, x, stride, 0);
                    let sums = Self::dots(at.add(codes / 2), step, x, stride, 16, 4, 1, table);
                    acc = Self::accumulate(acc, sums, scale.add(2 * LANES), step, x, stride, 1);
                } else {
                    let sums = Self::dots(at, step, x, stride, 0, 8, 2, table);
                    acc = Self::accumulate(acc, sums, scale, step, x, stride, 2);
                }
            }
            unroll!(j < P {
                let gain = S::load(base.add(j * step).cast());
                unroll!(r < R { finish::<S>(p, panel + j, row + r, S::mul(acc[r][j], gain)); });
            });
        }
    }
}

impl<S: Lanes, const KIND: u8, const HALF: bool, const MIN: bool, const R: usize, const P: usize>
    IntegerTile<'_, S, KIND, HALF, MIN, R, P>
{
    /// Bytes of codes in a stretch of 64 k's.
    const CODES: usize = if KIND == I8 { SUPER * LANES } else { SUPER * LANES / 2 };
    /// Bytes of scales in a stretch; minimums take as many again.
    const SCALES: usize = SUPER / if HALF { 16 } else { 32 } * LANES * 2;
    /// How far ahead weights are asked for; 0: they are not.
    const fn ahead() -> usize {
        match (R, P) {
            (1, 4) if S::REGISTERS.are(Registers::Sixteen) => AHEAD_OF_FOUR,
            (1, 1) if S::REGISTERS.are(Registers::Sixteen) => AHEAD,
            (2.., 1) => AHEAD,
            _ => 0,
        }
    }

    const STRETCH: usize = Self::CODES + Self::SCALES * if MIN { 2 } else { 1 };

    /// Exact integer sums of `groups` groups of four k's from `k` of a block; `part` says which of the stored sums belong to them
    /// (0, 1: the halves; 2: the whole block).
    #[inline(always)]
    unsafe fn dots(
        at: *const u8,
        step: usize,
        x: *const Q8Block,
        stride: usize,
        k: usize,
        groups: usize,
        part: usize,
        table: S::T,
    ) -> [[S::I; P]; R] {
        // SAFETY: `at` is good for the codes of the groups in each of P panels, `x` for a block in each of R rows.
        unsafe {
            let mut sums = [[S::splat_i32(0); P]; R];
            unroll!(r < R {
                let x = &*x.add(r * stride);
                let start = match KIND {
                    // Unsigned codes need no correction.
                    I4 if MIN => 0,
                    I4 if part == 2 => x.offset_nibble,
                    I4 => x.half_offset[part % 2] >> 4,
                    _ if !S::BIASED => 0,
                    _ if part == 2 => x.offset,
                    _ => x.half_offset[part % 2],
                };
                let start = S::splat_i32(start);
                unroll!(j < P { sums[r][j] = start; });
            });
            macro_rules! group {
                ($r:expr, $g:expr) => {
                    x.add($r * stride).cast::<i8>().add(k + 4 * $g).cast::<i32>().read_unaligned()
                };
            }
            if const { KIND == I8 } {
                unroll!(g < GROUPS {
                    if g < groups {
                        let mut w = [MaybeUninit::<S::W>::uninit(); P];
                        unroll!(j < P {
                            w[j].write(S::load_weights(at.add(j * step + g * 64)));
                        });
                        unroll!(r < R {
                            let x = group!(r, g);
                            unroll!(j < P { sums[r][j] = S::dot(sums[r][j], w[j].assume_init(), x); });
                        });
                    }
                });
            } else {
                unroll!(q < PAIRS {
                    if q < groups / 2 {
                        let mut low = [MaybeUninit::<S::N>::uninit(); P];
                        let mut high = [MaybeUninit::<S::N>::uninit(); P];
                        unroll!(j < P {
                            let (l, h) = S::load_nibbles(at.add(j * step + q * 64));
                            low[j].write(l);
                            high[j].write(h);
                        });
                        unroll!(r < R {
                            let x = group!(r, 2 * q);
                            unroll!(j < P { sums[r][j] = Self::dot_codes(sums[r][j], low[j].assume_init(), x, table); });
                        });
                        unroll!(r < R {
                            let x = group!(r, 2 * q + 1);
                            unroll!(j < P { sums[r][j] = Self::dot_codes(sums[r][j], high[j].assume_init(), x, table); });
                        });
                    }
                });
            }
            sums
        }
    }

    #[inline(always)]
    unsafe fn dot_codes(sum: S::I, codes: S::N, x: i32, table: S::T) -> S::I {
        // SAFETY: no pointer involved.
        unsafe { if KIND == I4 { S::dot_nibbles(sum, codes, x) } else { S::dot(sum, S::look_up(table, codes), x) } }
    }

    /// `acc + scale * x.scale * sums - min * x.sum`, with the scales of one block (or half) at `scale`.
    #[inline(always)]
    unsafe fn accumulate(
        mut acc: [[S::F; P]; R],
        sums: [[S::I; P]; R],
        scale: *const u8,
        step: usize,
        x: *const Q8Block,
        stride: usize,
        part: usize,
    ) -> [[S::F; P]; R] {
        // SAFETY: `scale` is good for 16 scales (and minimums) in each of P panels, `x` for a block in each of R rows.
        unsafe {
            unroll!(j < P {
                let at = scale.add(j * step);
                let w = S::load_f16(at);
                unroll!(r < R {
                    let x = S::splat((*x.add(r * stride)).scale);
                    acc[r][j] = S::fma(S::to_float(sums[r][j]), S::mul(w, x), acc[r][j]);
                });
                if MIN {
                    let m = S::load_f16(at.add(Self::SCALES));
                    unroll!(r < R {
                        let x = &*x.add(r * stride);
                        let sum = if part == 2 { x.sum } else { x.half_sum[part % 2] };
                        acc[r][j] = S::fnma(m, S::splat(sum), acc[r][j]);
                    });
                }
            });
            acc
        }
    }
}
