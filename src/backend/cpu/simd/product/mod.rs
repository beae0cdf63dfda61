//! Matrix products over packed panels: `y[row][n] = sum over k of x[row][k] * w[n][k]`.
//!
//! A tile computes R rows by P panels with all its sums in registers, k ascending from start to end. Every sum is one chain of
//! fused multiply-adds, whatever R and P are, which is what makes one row and many rows agree bit for bit. One row of a large matrix is bound by
//! memory, which gives most to a single stream: one panel after the other, as long as its chain of sums keeps up. From a cache four panels are
//! in flight, so that their chains overlap. Many rows are bound by arithmetic: the panels of a tile stay in the second cache while all rows pass
//! over them.
#![allow(unsafe_code)] // Raw loads and stores over shapes that `Table::matmul` has checked.

use super::super::activations::Activations;
use super::super::pack::{LANES, Layout};
use super::lane::Lanes;
use std::ops::Range;

/// Bytes of a matrix from which on it comes from memory.
const LARGE: usize = 256 << 10;

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

impl<'a> Product<'a> {
    /// Whether it is one row of a matrix that comes from memory rather than from a cache of the core.
    fn streams(&self) -> bool {
        self.rows.len() == 1 && self.features / LANES * self.panel_bytes >= LARGE
    }

    /// The same of some of its rows.
    #[cfg(target_arch = "x86_64")]
    fn with_rows(&self, rows: Range<usize>) -> Product<'a> {
        Product { panels: self.panels.clone(), rows, ..*self }
    }
}

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
            (Layout::F8, Activations::F32 { x, stride }) => floats::<S, F8>(p, x.as_ptr(), stride),
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
                    Layout::F32 | Layout::Bf16 | Layout::F16 | Layout::F8 => {}
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
        6 if most >= 6 => 6,
        8 if most >= 8 => 8,
        7 | 8 if most >= 4 => 4,
        9 | 10 if most >= 8 => 6,
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

// After the macros that they use.
mod floats;
mod integers;
#[cfg(target_arch = "x86_64")]
mod narrow;
#[cfg(target_arch = "x86_64")]
mod pairs;
#[cfg(target_arch = "x86_64")]
mod pairs_f8;

use floats::{BF16, F8, F16, F32, floats};
use integers::{I4, I8, TABLE, integers};
#[cfg(target_arch = "x86_64")]
pub(super) use narrow::matmul as narrow;
#[cfg(target_arch = "x86_64")]
pub(super) use pairs::PAIRS;

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
