//! Attention over pages of 8-bit keys and values: integer dot products on both sides of the softmax.
//!
//! A key has a scale for each 32 elements, and meets the query rounded to 8 bits in blocks of 32, as a row of weights meets activations. A
//! value has one scale. It is folded into the position's weight, and the weights of a page are rounded to 14 bits of their largest: two signed
//! bytes, so that values meet them by the same instruction, twice. Sums are exact integers; what a query sees alone and in a tile are the same
//! bits.
//!
//! A head's part of a page, in bytes: for each 16 positions, for each 32 elements, 16 scales (f32) and `[8][16][4]` codes (element, position,
//! element within four; the last block has as many groups of four as it needs); then 32 scales of values, and for each 16 elements
//! `[8][16][4]` codes (position, element, position within four). Codes are stored with 128 added, as `Lanes::load_weights` takes them. What is
//! asked of a page comes in the order in which it lies there.
#![allow(unsafe_code)] // Reads and writes pages through pointers that the caller vouches for.

use super::attend::{AHEAD, Attend, BLOCK, PAGE, QUERIES, Query, Store, wide};
use super::lane::{Lanes, Tile};
use super::quantize::{self, TINY, nearest};
use super::table::Table;
use crate::backend::cpu::activations::{Q8_BLOCK, Q8Block};
use crate::backend::cpu::pack::LANES;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// Elements of a key that share a scale.
pub const BLOCK_ELEMENTS: usize = Q8_BLOCK;
/// Elements of a group, which one lane of the dot instruction takes.
const GROUP: usize = 4;
/// Bytes of 16 groups, and of 16 scales.
const LINE: usize = 64;
/// Bytes of a block of 16 keys: scales and codes.
const KEY_BLOCK: usize = LINE + Q8_BLOCK / GROUP * LINE;
/// Panels of 16 keys in a page.
const PANELS: usize = PAGE / LANES;
/// Bytes of the values' scales, and of 16 elements of all values.
const SCALES: usize = 4 * PAGE;
const COLUMNS: usize = PAGE * LANES;
/// Blocks of queries that a pass has room for.
const BLOCKS: usize = 256;
/// The largest rounded weight: two times seven bits.
const MOST: f32 = 16383.0;

/// Bytes of 16 keys.
const fn panel_bytes(key_dim: usize) -> usize {
    key_dim.div_ceil(Q8_BLOCK) * LINE + key_dim.div_ceil(GROUP) * LINE
}

/// Bytes of a head's keys in a page.
pub const fn keys_bytes(key_dim: usize) -> usize {
    PAGE / LANES * panel_bytes(key_dim)
}

/// Bytes of a head's values in a page; none where values have no elements.
pub const fn values_bytes(value_dim: usize) -> usize {
    if value_dim == 0 { 0 } else { SCALES + value_dim.div_ceil(LANES) * COLUMNS }
}

/// Whether a pass of `queries` has room for their rounded copies.
pub const fn fits(queries: usize, key_dim: usize) -> bool {
    queries * key_dim.div_ceil(Q8_BLOCK) <= BLOCKS
}

/// First byte of the scale of block `block` of the key at place `at`, counted from the head's keys.
pub const fn key_scale(key_dim: usize, at: usize, block: usize) -> usize {
    at / LANES * panel_bytes(key_dim) + block * KEY_BLOCK + at % LANES * 4
}

/// Byte of element `d` of the key at place `at`; groups of four lie together.
pub const fn key_code(key_dim: usize, at: usize, d: usize) -> usize {
    key_scale(key_dim, at, d / Q8_BLOCK) + LINE + d % Q8_BLOCK / GROUP * LINE + d % GROUP
}

/// First byte of the scale of the value at place `at`, counted from the head's values.
pub const fn value_scale(at: usize) -> usize {
    at * 4
}

/// Byte of element `d` of the value at place `at`.
pub const fn value_code(at: usize, d: usize) -> usize {
    SCALES + d / LANES * COLUMNS + at / GROUP * LINE + d % LANES * GROUP + at % GROUP
}

/// Writes the key `x` at place `at` of a head's keys.
///
/// # Safety
/// `keys` is good for [`keys_bytes`], and nobody else touches this place now.
pub unsafe fn write_key(table: &Table, keys: *mut u8, at: usize, x: &[f32]) {
    for (block, part) in x.chunks(Q8_BLOCK).enumerate() {
        let rounded = rounded(table, part);
        // SAFETY: inside the keys by the caller's promise.
        unsafe {
            keys.add(key_scale(x.len(), at, block)).cast::<f32>().write(rounded.scale);
            for (group, codes) in rounded.codes.as_chunks::<GROUP>().0.iter().enumerate().take(part.len().div_ceil(GROUP)) {
                keys.add(key_code(x.len(), at, block * Q8_BLOCK + group * GROUP)).cast::<[u8; GROUP]>().write(codes.map(biased));
            }
        }
    }
}

/// Writes the value `x` at place `at` of a head's values.
///
/// # Safety
/// `values` is good for [`values_bytes`], and nobody else touches this place now.
pub unsafe fn write_value(values: *mut u8, at: usize, x: &[f32]) {
    let largest = quantize::largest(x);
    let (inverse, scale) = match largest {
        tiny if tiny < TINY => (0.0, 0.0),
        finite if finite.is_finite() => (127.0 / finite, finite / 127.0),
        _ => (0.0, f32::NAN),
    };
    // SAFETY: inside the values by the caller's promise.
    unsafe {
        values.add(value_scale(at)).cast::<f32>().write(scale);
        for (column, x) in x.chunks(LANES).enumerate() {
            let first = values.add(value_code(at, column * LANES));
            for (d, x) in x.iter().enumerate() {
                let code = if scale.is_nan() { 0 } else { nearest(x * inverse) as i8 };
                first.add(d * GROUP).write(biased(code));
            }
        }
    }
}

/// Element `d` of the key at place `at` of a head's keys.
///
/// # Safety
/// `keys` is good for [`keys_bytes`]; nobody writes this place now.
pub unsafe fn key(keys: *const u8, key_dim: usize, at: usize, d: usize) -> f32 {
    // SAFETY: the caller's promise.
    unsafe { value_of(*keys.add(key_code(key_dim, at, d)), keys.add(key_scale(key_dim, at, d / Q8_BLOCK)).cast::<f32>().read()) }
}

/// Element `d` of the value at place `at` of a head's values.
///
/// # Safety
/// `values` is good for [`values_bytes`]; nobody writes this place now.
pub unsafe fn value(values: *const u8, at: usize, d: usize) -> f32 {
    // SAFETY: the caller's promise.
    unsafe { value_of(*values.add(value_code(at, d)), values.add(value_scale(at)).cast::<f32>().read()) }
}

/// The query as keys meet it.
pub fn round_query(q: &mut [f32]) {
    for part in q.chunks_mut(Q8_BLOCK) {
        let mut x = [0.0; Q8_BLOCK];
        x[..part.len()].copy_from_slice(part);
        let block = quantize::block(&x);
        part.iter_mut().zip(block.codes).for_each(|(x, code)| *x = f32::from(code) * block.scale);
    }
}

const fn biased(code: i8) -> u8 {
    code as u8 ^ 0x80
}

fn value_of(byte: u8, scale: f32) -> f32 {
    f32::from((byte ^ 0x80) as i8) * scale
}

/// At most 32 elements as a block; zeros behind them.
fn rounded(table: &Table, part: &[f32]) -> Q8Block {
    let (mut x, mut out) = ([0.0; Q8_BLOCK], [Q8Block::ZERO]);
    x[..part.len()].copy_from_slice(part);
    table.quantize_row(&x, &mut out);
    let [block] = out;
    block
}

/// Pages of 8 bits.
pub(super) struct Eight;

/// The queries of a pass in blocks, one query after the other.
pub(super) struct Rounded([MaybeUninit<Q8Block>; BLOCKS]);

impl Rounded {
    /// # Safety
    /// The pass has this query, and the query this block.
    #[inline(always)]
    unsafe fn block(&self, key_dim: usize, query: usize, block: usize) -> &Q8Block {
        // SAFETY: `queries` made every block of every query of the pass.
        unsafe { self.0[query * key_dim.div_ceil(Q8_BLOCK) + block].assume_init_ref() }
    }
}

impl Store for Eight {
    type Queries = Rounded;

    #[inline(always)]
    unsafe fn queries<S: Lanes>(a: &Attend<'_>, queries: &[Query]) -> Rounded {
        let blocks = a.key_dim.div_ceil(Q8_BLOCK);
        let mut made = Rounded([MaybeUninit::uninit(); BLOCKS]);
        for (r, query) in queries.iter().enumerate() {
            for block in 0..blocks {
                let mut x = [0.0; Q8_BLOCK];
                let n = Q8_BLOCK.min(a.key_dim - block * Q8_BLOCK);
                // SAFETY: the query holds `key_dim` elements; the caller has the instruction set.
                unsafe {
                    std::ptr::copy_nonoverlapping(query.q.add(block * Q8_BLOCK), x.as_mut_ptr(), n);
                    made.0[r * blocks + block].write(S::quantize(&x));
                }
            }
        }
        made
    }

    #[inline(always)]
    unsafe fn scores<S: Lanes, const R: usize>(
        a: &Attend<'_>,
        _: &[Query],
        made: &Rounded,
        first: usize,
        start: usize,
        _: (usize, usize),
        weights: &mut [[f32; BLOCK]; R],
    ) {
        let page = a.pages[start / PAGE].cast_const();
        // SAFETY: the caller's promise.
        unsafe { S::call(Scores::<S, R, PANELS> { a, made, first, page, weights, _lanes: PhantomData }) };
    }

    #[inline(always)]
    unsafe fn weigh<S: Lanes, const R: usize>(
        a: &Attend<'_>,
        start: usize,
        sees: &[(usize, usize); R],
        weights: &[[f32; BLOCK]; R],
        y: *mut f32,
    ) {
        let page = a.pages[start / PAGE].cast_const();
        // SAFETY: the caller's promise.
        unsafe {
            if sees.iter().all(|(lo, hi)| lo < hi) {
                S::call(Values::<S, R> { a, page, sees, weights, y, _lanes: PhantomData });
                return;
            }
            for r in 0..R {
                if sees[r].0 < sees[r].1 {
                    let (sees, weights, y) = (&[sees[r]], &[weights[r]], y.add(r * a.value_dim));
                    S::call(Values::<S, 1> { a, page, sees, weights, y, _lanes: PhantomData });
                }
            }
        }
    }
}

/// Products of `R` queries with the `P` panels of keys of a page.
struct Scores<'a, S, const R: usize, const P: usize> {
    a: &'a Attend<'a>,
    made: &'a Rounded,
    first: usize,
    page: *const u8,
    weights: &'a mut [[f32; BLOCK]; R],
    _lanes: PhantomData<S>,
}

impl<S: Lanes, const R: usize, const P: usize> Tile for Scores<'_, S, R, P> {
    #[inline(always)]
    unsafe fn run(self) {
        let Scores { a, made, first, page, weights, .. } = self;
        let (panel, groups) = (panel_bytes(a.key_dim), a.key_dim.div_ceil(GROUP));
        // SAFETY: keys lie at `key_at`, in panels of blocks; the pass has these queries.
        unsafe {
            let keys = page.add(a.key_at);
            let mut acc = [[S::splat(0.0); P]; R];
            for block in 0..a.key_dim.div_ceil(Q8_BLOCK) {
                let mut x = [made.block(a.key_dim, first, block); R];
                unroll!(r < R { x[r] = made.block(a.key_dim, first + r, block); });
                let mut sums = [[S::splat_i32(0); P]; R];
                if S::BIASED {
                    unroll!(r < R { sums[r] = [S::splat_i32(x[r].offset); P]; });
                }
                let scales = keys.add(block * KEY_BLOCK);
                ask::<S>(keys.add(block * KEY_BLOCK * P), KEY_BLOCK * P);
                for group in 0..(groups - block * (Q8_BLOCK / GROUP)).min(Q8_BLOCK / GROUP) {
                    let line = scales.add(LINE + group * LINE);
                    let mut k = [S::load_weights(line); P];
                    unroll!(j < P { k[j] = S::load_weights(line.add(j * panel)); });
                    unroll!(r < R {
                        let q = x[r].codes.as_ptr().add(group * GROUP).cast::<i32>().read_unaligned();
                        unroll!(j < P { sums[r][j] = S::dot(sums[r][j], k[j], q); });
                    });
                }
                let mut scale = [S::splat(0.0); P];
                unroll!(j < P { scale[j] = S::load(scales.add(j * panel).cast()); });
                unroll!(r < R {
                    let factor = S::splat(x[r].scale);
                    unroll!(j < P { acc[r][j] = S::fma(S::mul(S::to_float(sums[r][j]), factor), scale[j], acc[r][j]); });
                });
            }
            unroll!(r < R {
                unroll!(j < P { S::store(weights[r].as_mut_ptr().add(LANES * j), acc[r][j]); });
            });
        }
    }
}

/// Asks memory for `n` bytes some way behind these; see `attend::ask`.
#[inline(always)]
unsafe fn ask<S: Lanes>(from: *const u8, n: usize) {
    for byte in (0..n).step_by(64) {
        // SAFETY: a prefetch may name any address.
        unsafe { S::prefetch(from.wrapping_add(AHEAD + byte)) };
    }
}

/// A page's weights for values, rounded: `gain * (128 * high + low)`.
#[derive(Clone, Copy)]
struct Weights {
    high: [i8; PAGE],
    low: [i8; PAGE],
    gain: f32,
    /// Where sums begin.
    starts: [i32; 2],
}

impl Weights {
    /// # Safety
    /// `scales` holds as many as a page.
    #[inline(always)]
    unsafe fn of(weights: &[f32; BLOCK], (lo, hi): (usize, usize), scales: *const f32, biased: bool) -> Weights {
        let mut w = [0.0f32; PAGE];
        for (i, w) in w.iter_mut().enumerate() {
            // Positions out of sight may hold anything; so may their scales.
            // SAFETY: the caller's promise.
            let scaled = weights[i] * unsafe { *scales.add(i) };
            *w = if (lo..hi).contains(&i) { scaled } else { 0.0 };
        }
        let largest = quantize::largest(&w);
        let mut out = Weights { high: [0; PAGE], low: [0; PAGE], gain: 0.0, starts: [0; 2] };
        if !(largest < f32::INFINITY) {
            out.gain = f32::NAN;
            return out;
        }
        if largest < TINY {
            return out;
        }
        let inverse = MOST / largest;
        out.gain = largest / MOST;
        for i in 0..PAGE {
            let code = nearest(w[i] * inverse);
            out.high[i] = (code >> 7) as i8;
            out.low[i] = (code & 127) as i8;
        }
        if biased {
            let sum = |codes: &[i8; PAGE]| codes.iter().map(|code| i32::from(*code)).sum::<i32>();
            out.starts = [-128 * sum(&out.high), -128 * sum(&out.low)];
        }
        out
    }
}

/// Weighted sums of a page's values for `R` queries.
struct Values<'a, S, const R: usize> {
    a: &'a Attend<'a>,
    page: *const u8,
    sees: &'a [(usize, usize); R],
    weights: &'a [[f32; BLOCK]; R],
    y: *mut f32,
    _lanes: PhantomData<S>,
}

impl<S: Lanes, const R: usize> Tile for Values<'_, S, R> {
    #[inline(always)]
    unsafe fn run(self) {
        let Values { a, page, sees, weights, y, .. } = self;
        let dim = a.value_dim;
        // SAFETY: values lie at `value_at`; `weights` and `y` hold `R` rows.
        unsafe {
            let values = page.add(a.value_at);
            let mut rounded = [Weights { high: [0; PAGE], low: [0; PAGE], gain: 0.0, starts: [0; 2] }; R];
            unroll!(r < R { rounded[r] = Weights::of(&weights[r], sees[r], values.cast(), S::BIASED); });
            let mut d = 0;
            while wide::<S>() && d + 2 * LANES <= dim {
                S::call(Columns::<S, R, 2> { values, rounded: &rounded, y, dim, d, _lanes: PhantomData });
                d += 2 * LANES;
            }
            while d < dim {
                S::call(Columns::<S, R, 1> { values, rounded: &rounded, y, dim, d, _lanes: PhantomData });
                d += LANES;
            }
        }
    }
}

/// `16 * P` elements, from `d` on, of `R` weighted sums; the last 16 may be fewer.
struct Columns<'a, S, const R: usize, const P: usize> {
    values: *const u8,
    rounded: &'a [Weights; R],
    y: *mut f32,
    dim: usize,
    d: usize,
    _lanes: PhantomData<S>,
}

impl<S: Lanes, const R: usize, const P: usize> Tile for Columns<'_, S, R, P> {
    #[inline(always)]
    unsafe fn run(self) {
        let Columns { values, rounded, y, dim, d, .. } = self;
        // SAFETY: the columns lie behind the scales; `y` holds `R` rows of `dim`.
        unsafe {
            let codes = values.add(SCALES + d * PAGE);
            ask::<S>(codes, P * COLUMNS);
            let mut high = [[S::splat_i32(0); P]; R];
            let mut low = [[S::splat_i32(0); P]; R];
            unroll!(r < R {
                high[r] = [S::splat_i32(rounded[r].starts[0]); P];
                low[r] = [S::splat_i32(rounded[r].starts[1]); P];
            });
            for group in 0..PAGE / GROUP {
                let mut v = [S::load_weights(codes.add(group * LINE)); P];
                unroll!(j < P { v[j] = S::load_weights(codes.add(j * COLUMNS + group * LINE)); });
                unroll!(r < R {
                    let at = |codes: &[i8; PAGE]| codes.as_ptr().add(group * GROUP).cast::<i32>().read_unaligned();
                    let (h, l) = (at(&rounded[r].high), at(&rounded[r].low));
                    unroll!(j < P {
                        high[r][j] = S::dot(high[r][j], v[j], h);
                        low[r][j] = S::dot(low[r][j], v[j], l);
                    });
                });
            }
            unroll!(r < R {
                let (coarse, fine) = (S::splat(rounded[r].gain * 128.0), S::splat(rounded[r].gain));
                unroll!(j < P {
                    let at = d + LANES * j;
                    let y = y.add(r * dim + at);
                    let add = |y| S::fma(S::to_float(high[r][j]), coarse, S::fma(S::to_float(low[r][j]), fine, y));
                    if at + LANES <= dim {
                        S::store(y, add(S::load(y)));
                    } else {
                        let mut edge = [0.0f32; LANES];
                        std::ptr::copy_nonoverlapping(y, edge.as_mut_ptr(), dim - at);
                        S::store(edge.as_mut_ptr(), add(S::load(edge.as_ptr())));
                        std::ptr::copy_nonoverlapping(edge.as_ptr(), y, dim - at);
                    }
                });
            });
        }
    }
}

const _: () = assert!(BLOCK == PAGE && fits(QUERIES, 8 * Q8_BLOCK));
