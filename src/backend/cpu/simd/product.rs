//! Matrix products over packed panels: `y[row][n] = sum over k of x[row][k] * w[n][k]`.
//!
//! A tile computes R rows by P panels with all its sums in registers, k ascending from start to end. Every sum is one chain of
//! fused multiply-adds, whatever R and P are, which is what makes one row and many rows agree bit for bit. One row is bound by memory:
//! four panels are in flight so that the chains overlap and four streams are read. Many rows are bound by arithmetic: the panels of a tile stay
//! in the second cache while all rows pass over them.
#![allow(unsafe_code)] // Raw loads and stores over shapes that `Table::matmul` has checked.

use super::super::activations::{Activations, Q8Block};
use super::super::pack::{GAINS, LANES, Layout, SUPER};
use super::lane::{Lanes, Registers};
use std::ops::Range;

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

/// Bytes between the load that feeds the sums and the prefetch that runs ahead of it.
const AHEAD: usize = 2048;

/// Computes the product with the lanes `S`.
///
/// # Safety
/// The processor has the instruction set of `S`, `p` is checked, and nobody else touches the outputs meanwhile.
#[inline(always)]
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

/// Calls `$tile` with the row count as a constant.
macro_rules! with_rows {
    ($rows:expr, $R:ident => $call:expr) => {
        match $rows {
            1 => {
                const $R: usize = 1;
                $call
            }
            2 => {
                const $R: usize = 2;
                $call
            }
            3 => {
                const $R: usize = 3;
                $call
            }
            4 => {
                const $R: usize = 4;
                $call
            }
            _ => {
                const $R: usize = 6;
                $call
            }
        }
    };
}

#[inline(always)]
unsafe fn floats<S: Lanes, const KIND: u8>(p: &Product<'_>, x: *const f32, stride: usize) {
    // SAFETY: `panel` stays inside `p.panels` and `row` inside `p.rows`, with the tile's size taken into account.
    unsafe {
        let mut panel = p.panels.start;
        while panel < p.panels.end {
            let four = p.panels.end - panel >= 4;
            let mut row = p.rows.start;
            let mut width = 1;
            while row < p.rows.end {
                let left = p.rows.end - row;
                let rows;
                match S::REGISTERS {
                    Registers::None => {
                        rows = 1;
                        float_tile::<S, KIND, 1, 1>(p, panel, row, x.add(row * stride), stride);
                    }
                    Registers::Sixteen if four && p.rows.len() == 1 => {
                        (rows, width) = (1, 4);
                        float_tile::<S, KIND, 1, 4>(p, panel, row, x.add(row * stride), stride);
                    }
                    Registers::ThirtyTwo if four => {
                        width = 4;
                        rows = tile_rows(left, 6);
                        with_rows!(rows, R => float_tile::<S, KIND, R, 4>(p, panel, row, x.add(row * stride), stride));
                    }
                    _ => {
                        rows = tile_rows(left, 6);
                        with_rows!(rows, R => float_tile::<S, KIND, R, 1>(p, panel, row, x.add(row * stride), stride));
                    }
                }
                row += rows;
            }
            panel += width;
        }
    }
}

/// Sums of R rows and P panels of float weights.
#[inline(always)]
unsafe fn float_tile<S: Lanes, const KIND: u8, const R: usize, const P: usize>(
    p: &Product<'_>,
    panel: usize,
    row: usize,
    x: *const f32,
    stride: usize,
) {
    // Bytes of two k's; one 64-byte line of bf16 and f16, two lines of f32.
    let pair = if KIND == F32 { 8 * LANES } else { 4 * LANES };
    // SAFETY: loads stay inside the panels (whose pairs are padded for bf16; the others skip the missing k) and the rows of `x`.
    unsafe {
        let base = p.weights.add(panel * p.panel_bytes);
        let mut acc = [[S::splat(0.0); P]; R];
        let mut w = [S::splat(0.0); P];
        for i in 0..p.cols / 2 {
            let at = base.add(i * pair);
            for j in 0..P {
                let at = at.add(j * p.panel_bytes);
                S::prefetch(at.wrapping_add(AHEAD));
                if KIND == F32 {
                    S::prefetch(at.wrapping_add(AHEAD + 64));
                }
                w[j] = even::<S, KIND>(at);
            }
            for r in 0..R {
                let x = S::splat(*x.add(r * stride + 2 * i));
                for j in 0..P {
                    acc[r][j] = S::fma(x, w[j], acc[r][j]);
                }
            }
            for j in 0..P {
                w[j] = odd::<S, KIND>(at.add(j * p.panel_bytes));
            }
            for r in 0..R {
                let x = S::splat(*x.add(r * stride + 2 * i + 1));
                for j in 0..P {
                    acc[r][j] = S::fma(x, w[j], acc[r][j]);
                }
            }
        }
        if p.cols % 2 == 1 {
            let at = base.add(p.cols / 2 * pair);
            for j in 0..P {
                w[j] = even::<S, KIND>(at.add(j * p.panel_bytes));
            }
            for r in 0..R {
                let x = S::splat(*x.add(r * stride + p.cols - 1));
                for j in 0..P {
                    acc[r][j] = S::fma(x, w[j], acc[r][j]);
                }
            }
        }
        for r in 0..R {
            for j in 0..P {
                finish::<S>(p, panel + j, row + r, acc[r][j]);
            }
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

#[inline(always)]
unsafe fn integers<S: Lanes, const KIND: u8, const HALF: bool, const MIN: bool>(
    p: &Product<'_>,
    x: *const Q8Block,
    stride: usize,
    table: &[i8; 16],
) {
    // SAFETY: as in `floats`.
    unsafe {
        let table = S::load_table(table);
        let mut panel = p.panels.start;
        while panel < p.panels.end {
            let have = p.panels.end - panel;
            let mut row = p.rows.start;
            let mut width = 1;
            while row < p.rows.end {
                let left = p.rows.end - row;
                let at = x.add(row * stride);
                let rows;
                match S::REGISTERS {
                    Registers::None => {
                        rows = 1;
                        integer_tile::<S, KIND, HALF, MIN, 1, 1>(p, panel, row, at, stride, table);
                    }
                    Registers::ThirtyTwo if have >= 4 && p.rows.len() == 1 => {
                        (rows, width) = (1, 4);
                        integer_tile::<S, KIND, HALF, MIN, 1, 4>(p, panel, row, at, stride, table);
                    }
                    Registers::ThirtyTwo if have >= 2 => {
                        width = 2;
                        rows = tile_rows(left, 6);
                        with_rows!(rows, R => integer_tile::<S, KIND, HALF, MIN, R, 2>(p, panel, row, at, stride, table));
                    }
                    Registers::ThirtyTwo => {
                        rows = tile_rows(left, 4);
                        match rows {
                            1 => integer_tile::<S, KIND, HALF, MIN, 1, 1>(p, panel, row, at, stride, table),
                            2 => integer_tile::<S, KIND, HALF, MIN, 2, 1>(p, panel, row, at, stride, table),
                            3 => integer_tile::<S, KIND, HALF, MIN, 3, 1>(p, panel, row, at, stride, table),
                            _ => integer_tile::<S, KIND, HALF, MIN, 4, 1>(p, panel, row, at, stride, table),
                        }
                    }
                    Registers::Sixteen => {
                        rows = tile_rows(left, 2);
                        match rows {
                            1 => integer_tile::<S, KIND, HALF, MIN, 1, 1>(p, panel, row, at, stride, table),
                            _ => integer_tile::<S, KIND, HALF, MIN, 2, 1>(p, panel, row, at, stride, table),
                        }
                    }
                }
                row += rows;
            }
            panel += width;
        }
    }
}

/// Sums of R rows and P panels of integer weights.
#[inline(always)]
unsafe fn integer_tile<S: Lanes, const KIND: u8, const HALF: bool, const MIN: bool, const R: usize, const P: usize>(
    p: &Product<'_>,
    panel: usize,
    row: usize,
    x: *const Q8Block,
    stride: usize,
    table: S::T,
) {
    let codes = if KIND == I8 { SUPER * LANES } else { SUPER * LANES / 2 };
    let scales = SUPER / if HALF { 16 } else { 32 } * LANES * 2;
    let super_bytes = codes + scales * if MIN { 2 } else { 1 };
    // SAFETY: loads stay inside the panels and the rows of `x`: block `b < cols / 32` has its codes and scales in stretch `b / 2`.
    unsafe {
        let base = p.weights.add(panel * p.panel_bytes);
        let mut acc = [[S::splat(0.0); P]; R];
        for b in 0..p.cols / 32 {
            let stretch = base.add(GAINS + b / 2 * super_bytes);
            let at = stretch.add(b % 2 * (codes / 2));
            let scale = stretch.add(codes + b % 2 * (scales / 2));
            for j in 0..P {
                for line in 0..super_bytes.div_ceil(128) {
                    S::prefetch(at.wrapping_add(j * p.panel_bytes + AHEAD + line * 64));
                }
            }
            let x = x.add(b);
            if HALF {
                for h in 0..2 {
                    let sums = dots::<S, KIND, MIN, R, P>(at.add(h * (codes / 4)), p.panel_bytes, x, stride, h * 16, 16, h, table);
                    for j in 0..P {
                        let at = scale.add(j * p.panel_bytes + h * 2 * LANES);
                        let w = S::load_f16(at);
                        for r in 0..R {
                            let x = &*x.add(r * stride);
                            acc[r][j] = S::fma(S::to_float(sums[r][j]), S::mul(w, S::splat(x.scale)), acc[r][j]);
                        }
                        if MIN {
                            let m = S::load_f16(at.add(scales));
                            for r in 0..R {
                                acc[r][j] = S::fnma(m, S::splat((*x.add(r * stride)).half_sum[h]), acc[r][j]);
                            }
                        }
                    }
                }
            } else {
                let sums = dots::<S, KIND, MIN, R, P>(at, p.panel_bytes, x, stride, 0, 32, 2, table);
                for j in 0..P {
                    let at = scale.add(j * p.panel_bytes);
                    let w = S::load_f16(at);
                    for r in 0..R {
                        let x = &*x.add(r * stride);
                        acc[r][j] = S::fma(S::to_float(sums[r][j]), S::mul(w, S::splat(x.scale)), acc[r][j]);
                    }
                    if MIN {
                        let m = S::load_f16(at.add(scales));
                        for r in 0..R {
                            acc[r][j] = S::fnma(m, S::splat((*x.add(r * stride)).sum), acc[r][j]);
                        }
                    }
                }
            }
        }
        for j in 0..P {
            let gain = S::load(base.add(j * p.panel_bytes).cast());
            for r in 0..R {
                finish::<S>(p, panel + j, row + r, S::mul(acc[r][j], gain));
            }
        }
    }
}

/// Exact integer sums of `count` k's from `k` of a block; `part` says which stored offset belongs to them (0, 1: halves; 2: all).
#[inline(always)]
unsafe fn dots<S: Lanes, const KIND: u8, const MIN: bool, const R: usize, const P: usize>(
    at: *const u8,
    panel_bytes: usize,
    x: *const Q8Block,
    stride: usize,
    k: usize,
    count: usize,
    part: usize,
    table: S::T,
) -> [[S::I; P]; R] {
    // SAFETY: `at` is good for the codes of `count` k's in each of P panels, `x` for a block in each of R rows.
    unsafe {
        let mut sums = [[S::splat_i32(0); P]; R];
        for r in 0..R {
            let x = &*x.add(r * stride);
            let start = match KIND {
                // Unsigned codes need no correction.
                I4 if MIN => 0,
                I4 if part == 2 => x.offset_nibble,
                I4 => x.half_offset[part] >> 4,
                _ if !S::BIASED => 0,
                _ if part == 2 => x.offset,
                _ => x.half_offset[part],
            };
            sums[r] = [S::splat_i32(start); P];
        }
        let group = |r: usize, g: usize| (*x.add(r * stride)).codes.as_ptr().add(k + 4 * g).cast::<i32>().read_unaligned();
        if KIND == I8 {
            for g in 0..count / 4 {
                let w: [S::W; P] = std::array::from_fn(|j| S::load_weights(at.add(j * panel_bytes + g * 64)));
                for r in 0..R {
                    let x = group(r, g);
                    for j in 0..P {
                        sums[r][j] = S::dot(sums[r][j], w[j], x);
                    }
                }
            }
        } else {
            for q in 0..count / 8 {
                let n: [(S::N, S::N); P] = std::array::from_fn(|j| S::load_nibbles(at.add(j * panel_bytes + q * 64)));
                for high in 0..2 {
                    let n: [S::N; P] = n.map(|n| if high == 0 { n.0 } else { n.1 });
                    if KIND == I4 {
                        for r in 0..R {
                            let x = group(r, 2 * q + high);
                            for j in 0..P {
                                sums[r][j] = S::dot_nibbles(sums[r][j], n[j], x);
                            }
                        }
                    } else {
                        let w: [S::W; P] = n.map(|n| S::look_up(table, n));
                        for r in 0..R {
                            let x = group(r, 2 * q + high);
                            for j in 0..P {
                                sums[r][j] = S::dot(sums[r][j], w[j], x);
                            }
                        }
                    }
                }
            }
        }
        sums
    }
}

/// Adds bias and the old value, and stores the lanes that are real rows.
#[inline(always)]
unsafe fn finish<S: Lanes>(p: &Product<'_>, panel: usize, row: usize, sum: S::F) {
    let first = panel * LANES;
    let lanes = (p.features - first).min(LANES);
    // SAFETY: `lanes` outputs from `first` on belong to this row and panel, and the bias covers all features.
    unsafe {
        let y = p.y.add(row * p.y_stride + first);
        if lanes == LANES {
            let mut v = sum;
            if let Some(bias) = p.bias {
                v = S::add(v, S::load(bias.as_ptr().add(first)));
            }
            if p.add {
                v = S::add(S::load(y), v);
            }
            S::store(y, v);
        } else {
            let mut values = [0.0f32; LANES];
            S::store(values.as_mut_ptr(), sum);
            for (i, &v) in values[..lanes].iter().enumerate() {
                let v = p.bias.map_or(v, |bias| v + bias[first + i]);
                *y.add(i) = if p.add { *y.add(i) + v } else { v };
            }
        }
    }
}
