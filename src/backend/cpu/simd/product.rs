//! Matrix products over packed panels: `y[row][n] = sum over k of x[row][k] * w[n][k]`.
//!
//! A tile computes R rows by P panels with all its sums in registers, k ascending from start to end. Every sum is one chain of
//! fused multiply-adds, whatever R and P are, which is what makes one row and many rows agree bit for bit. One row is bound by memory:
//! four panels are in flight so that the chains overlap and four streams are read. Many rows are bound by arithmetic: the panels of a tile stay
//! in the second cache while all rows pass over them.
#![allow(unsafe_code)] // Raw loads and stores over shapes that `Table::matmul` has checked.

use super::super::activations::{Activations, Q8Block};
use super::super::pack::{GAINS, LANES, Layout, SUPER};
use super::lane::{Lanes, Registers, Tile};
use std::marker::PhantomData;
use std::mem::MaybeUninit;
use std::ops::Range;
use std::sync::atomic::{Ordering, compiler_fence};

/// A checked product: every pointer is good for what the ranges and strides reach.
pub(super) struct Product<'a> {
    pub layout: Layout,
    /// First byte of panel 0.
    pub weights: *const u8,
    pub panel_bytes: usize,
    pub cols: usize,
    /// Output features.
    pub features: usize,
    pub panels: Range<usize>,
    pub acts: Activations<'a>,
    pub rows: Range<usize>,
    pub bias: Option<&'a [f32]>,
    pub add: bool,
    pub y: *mut f32,
    /// Elements from one row of `y` to the next.
    pub y_stride: usize,
}

/// Kinds of float weights, as const arguments.
const F32: u8 = 0;
const BF16: u8 = 1;
const F16: u8 = 2;
/// Kinds of integer weights.
const I8: u8 = 0;
const I4: u8 = 1;
const TABLE: u8 = 2;

/// Groups of four k's in a block, and pairs of them.
const GROUPS: usize = 8;
const PAIRS: usize = 4;

/// Computes the product with the lanes `S`.
///
/// # Safety
/// The processor has the instruction set of `S`, `p` is checked, and nobody else touches the outputs meanwhile.
pub(super) unsafe fn product<S: Lanes>(p: &Product<'_>) {
    // SAFETY: handed on; the kind of activations was checked against the layout.
    unsafe {
        match (p.layout, p.acts) {
            (Layout::F32, Activations::F32 { x, stride }) => floats::<S, F32>(p, x.as_ptr(), stride),
            (Layout::Bf16, Activations::F32 { x, stride }) => floats::<S, BF16>(p, x.as_ptr(), stride),
            (Layout::F16, Activations::F32 { x, stride }) => floats::<S, F16>(p, x.as_ptr(), stride),
            (layout, Activations::Q8 { blocks, stride }) => {
                let (x, t) = (blocks.as_ptr(), &[0; 16]);
                match layout {
                    Layout::I8 { block: 32, min: false } => integers::<S, I8, false, false>(p, x, stride, t),
                    Layout::I8 { block: 32, min: true } => integers::<S, I8, false, true>(p, x, stride, t),
                    Layout::I8 { min: false, .. } => integers::<S, I8, true, false>(p, x, stride, t),
                    Layout::I8 { min: true, .. } => integers::<S, I8, true, true>(p, x, stride, t),
                    Layout::I4 { block: 32, min: false } => integers::<S, I4, false, false>(p, x, stride, t),
                    Layout::I4 { block: 32, min: true } => integers::<S, I4, false, true>(p, x, stride, t),
                    Layout::I4 { min: false, .. } => integers::<S, I4, true, false>(p, x, stride, t),
                    Layout::I4 { min: true, .. } => integers::<S, I4, true, true>(p, x, stride, t),
                    Layout::I4Table { block: 32, table } => integers::<S, TABLE, false, false>(p, x, stride, &table),
                    Layout::I4Table { table, .. } => integers::<S, TABLE, true, false>(p, x, stride, &table),
                    Layout::F32 | Layout::Bf16 | Layout::F16 => {}
                }
            }
            _ => {}
        }
    }
}

/// Rows of the next tile when `left` remain and tiles hold at most `most`.
#[inline(always)]
fn tile_rows(left: usize, most: usize) -> usize {
    match left {
        0..=4 if left <= most => left,
        5 if most >= 3 => 3,
        7 | 8 if most >= 4 => 4,
        _ => most,
    }
}

/// Runs the tile that `$make` gives for a row count known to the compiler.
macro_rules! with_rows {
    ($S:ty, $rows:expr, $make:ident, [$($R:literal)+]) => {
        match $rows {
            $($R => <$S>::call($make!($R)),)+
            _ => {}
        }
    };
}

/// Repeats a block for an index from 0 on, written out: the sums are registers only if every index is a constant. `r` counts rows, `j`
/// panels, `g` groups of four k's and `q` pairs of groups.
macro_rules! unroll {
    (r < $n:ident $body:block) => { unroll!(@ r $n $body 0 1 2 3 4 5) };
    (j < $n:ident $body:block) => { unroll!(@ j $n $body 0 1 2 3) };
    (q < $n:ident $body:block) => { unroll!(@ q $n $body 0 1 2 3) };
    (g < $n:ident $body:block) => { unroll!(@ g $n $body 0 1 2 3 4 5 6 7) };
    (@ $i:ident $n:ident $body:block $($at:literal)+) => {
        $(if $at < $n {
            #[allow(non_upper_case_globals)]
            const $i: usize = $at;
            $body
        })+
    };
}

unsafe fn floats<S: Lanes, const KIND: u8>(p: &Product<'_>, x: *const f32, stride: usize) {
    // SAFETY: `panel` stays inside `p.panels` and `row` inside `p.rows`, with the tile's size taken into account.
    unsafe {
        let mut panel = p.panels.start;
        while panel < p.panels.end {
            let four = p.panels.end - panel >= 4
                && (S::REGISTERS == Registers::ThirtyTwo || S::REGISTERS == Registers::Sixteen && p.rows.len() == 1);
            let mut row = p.rows.start;
            while row < p.rows.end {
                let x = x.add(row * stride);
                let left = p.rows.end - row;
                let rows = if S::REGISTERS == Registers::None { 1 } else { tile_rows(left, 6) };
                macro_rules! wide {
                    ($R:literal) => {
                        FloatTile::<S, KIND, $R, 4> { p, panel, row, x, stride, lanes: PhantomData }
                    };
                }
                macro_rules! narrow {
                    ($R:literal) => {
                        FloatTile::<S, KIND, $R, 1> { p, panel, row, x, stride, lanes: PhantomData }
                    };
                }
                match S::REGISTERS {
                    // Only a single row has a tile of one row: `tile_rows` never leaves one over.
                    Registers::ThirtyTwo if four => with_rows!(S, rows, wide, [1 2 3 4 6]),
                    Registers::Sixteen if four => with_rows!(S, rows, wide, [1]),
                    Registers::None => with_rows!(S, rows, narrow, [1]),
                    _ => with_rows!(S, rows, narrow, [1 2 3 4 6]),
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
                if KIND == BF16 {
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

unsafe fn integers<S: Lanes, const KIND: u8, const HALF: bool, const MIN: bool>(
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
            let width = match S::REGISTERS {
                // One row of 8-bit weights reads best in four streams, of 4-bit weights in one.
                Registers::ThirtyTwo if have >= 4 && p.rows.len() == 1 && KIND == I8 => 4,
                Registers::ThirtyTwo if have >= 2 && p.rows.len() > 1 => 2,
                _ => 1,
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
                let most = match S::REGISTERS {
                    Registers::ThirtyTwo if width > 1 => 6,
                    Registers::ThirtyTwo => 4,
                    Registers::Sixteen => 2,
                    Registers::None => 1,
                };
                let rows = tile_rows(p.rows.end - row, most);
                match (S::REGISTERS, width) {
                    (Registers::ThirtyTwo, 4) if KIND == I8 => with_rows!(S, rows, four, [1]),
                    (Registers::ThirtyTwo, 2) => with_rows!(S, rows, two, [2 3 4 6]),
                    (Registers::ThirtyTwo, _) => with_rows!(S, rows, one, [1 2 3 4]),
                    (Registers::Sixteen, _) => with_rows!(S, rows, one, [1 2]),
                    (Registers::None, _) => with_rows!(S, rows, one, [1]),
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
                // which the hardware's prefetcher loses a quarter of the bandwidth. Prefetching further ahead by hand made every case slower.
                if b % 2 == 0 {
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
            if KIND == I8 {
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

/// Adds bias and the old value, and stores the lanes that are real rows.
#[inline(always)]
unsafe fn finish<S: Lanes>(p: &Product<'_>, panel: usize, row: usize, sum: S::F) {
    let first = panel * LANES;
    // SAFETY: the outputs from `first` on, up to the last feature, belong to this row and panel; the bias covers all features.
    unsafe {
        let y = p.y.add(row * p.y_stride + first);
        if p.features - first < LANES {
            let mut values = [0.0f32; LANES];
            S::store(values.as_mut_ptr(), sum);
            return finish_last(p, first, y, &values);
        }
        let mut v = sum;
        if let Some(bias) = p.bias {
            v = S::add(v, S::load(bias.as_ptr().add(first)));
        }
        if p.add {
            v = S::add(S::load(y), v);
        }
        S::store(y, v);
    }
}

/// The same for the last panel when it is not full. Kept out of the tiles, where it would be most of the code.
#[cold]
#[inline(never)]
unsafe fn finish_last(p: &Product<'_>, first: usize, y: *mut f32, values: &[f32; LANES]) {
    for i in 0..p.features - first {
        let v = p.bias.map_or(values[i], |bias| values[i] + bias[first + i]);
        // SAFETY: `y` is good for the features from `first` on.
        unsafe { *y.add(i) = if p.add { *y.add(i) + v } else { v } };
    }
}
