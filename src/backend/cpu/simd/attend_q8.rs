//! Attention over pages of 8-bit keys and values: integer dot products on both sides of the softmax.
//!
//! A key has a scale for each 32 elements, and meets the query rounded to 8 bits in blocks of 32, as a row of weights meets activations. A
//! value has one scale. It is folded into the position's weight, and the weights of a page are rounded to 14 bits of their largest: two signed
//! bytes, so that values meet them by the same instruction, twice. Sums are exact integers; what a query sees alone and in a tile are the same
//! bits.
//!
//! A head's part of a page lies in the order in which it is read: for each 32 elements of keys 32 scales (f32) and `[8][32][4]` codes
//! (element, position, element within four; the last block has as many groups of four as it needs), 128 added; then 32 scales of values, and for
//! each 32 elements `[8][32][4]` codes (position, element, position within four; where 16 or fewer are left, half as wide), signed. Pages are
//! one ascending stream for the hardware, and prefetching by hand makes it slower.
#![allow(unsafe_code)] // Reads and writes pages through pointers that the caller vouches for.

use super::attend::{Attend, BLOCK, PAGE, QUERIES, Query, Store, wide};
use super::attend_ahead::Ahead;
use super::lane::{Lanes, Tile};
use super::quantize::{self, Split, TINY, nearest};
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
/// Panels of 16 keys in a page.
const PANELS: usize = PAGE / LANES;
/// Bytes of a block of keys: scales and codes.
const KEY_BLOCK: usize = PANELS * (LINE + Q8_BLOCK / GROUP * LINE);
/// Bytes of the values' scales, and of 16 elements of all values.
const SCALES: usize = 4 * PAGE;
const COLUMNS: usize = PAGE * LANES;
/// Blocks of queries that a pass has room for.
const BLOCKS: usize = 256;

/// Bytes of a head's keys in a page.
pub const fn keys_bytes(key_dim: usize) -> usize {
    PANELS * (key_dim.div_ceil(Q8_BLOCK) + key_dim.div_ceil(GROUP)) * LINE
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
pub const fn key_scale(at: usize, block: usize) -> usize {
    block * KEY_BLOCK + at / LANES * LINE + at % LANES * 4
}

/// Byte of element `d` of the key at place `at`; groups of four lie together.
pub const fn key_code(at: usize, d: usize) -> usize {
    key_scale(at, d / Q8_BLOCK) + PANELS * (1 + d % Q8_BLOCK / GROUP) * LINE + d % GROUP
}

/// First byte of the scale of the value at place `at`, counted from the head's values.
pub const fn value_scale(at: usize) -> usize {
    at * 4
}

/// Byte of element `d` of the value at place `at`.
pub const fn value_code(value_dim: usize, at: usize, d: usize) -> usize {
    let (column, together) = (d / LANES, beside(value_dim, d));
    SCALES + column / 2 * 2 * COLUMNS + (at / GROUP * together + column % 2) * LINE + d % LANES * GROUP + at % GROUP
}

/// Columns of 16 elements whose groups alternate: two, or the last alone.
const fn beside(value_dim: usize, d: usize) -> usize {
    if d / (2 * LANES) * 2 + 1 < value_dim.div_ceil(LANES) { 2 } else { 1 }
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
            keys.add(key_scale(at, block)).cast::<f32>().write_unaligned(rounded.scale);
            for (group, codes) in rounded.codes.as_chunks::<GROUP>().0.iter().enumerate().take(part.len().div_ceil(GROUP)) {
                keys.add(key_code(at, block * Q8_BLOCK + group * GROUP)).cast::<[u8; GROUP]>().write(codes.map(biased));
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
        values.add(value_scale(at)).cast::<f32>().write_unaligned(scale);
        for (column, part) in x.chunks(LANES).enumerate() {
            let first = values.add(value_code(x.len(), at, column * LANES));
            for (d, x) in part.iter().enumerate() {
                let code = if scale.is_nan() { 0 } else { nearest(x * inverse) as i8 };
                first.add(d * GROUP).write(code as u8);
            }
        }
    }
}

/// Element `d` of the key at place `at` of a head's keys.
///
/// # Safety
/// `keys` is good for [`keys_bytes`]; nobody writes this place now.
pub unsafe fn key(keys: *const u8, at: usize, d: usize) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        let code = (*keys.add(key_code(at, d)) ^ 0x80) as i8;
        f32::from(code) * keys.add(key_scale(at, d / Q8_BLOCK)).cast::<f32>().read_unaligned()
    }
}

/// Element `d` of the value at place `at` of a head's values.
///
/// # Safety
/// `values` is good for [`values_bytes`]; nobody writes this place now.
pub unsafe fn value(values: *const u8, value_dim: usize, at: usize, d: usize) -> f32 {
    // SAFETY: the caller's promise.
    unsafe { f32::from(*values.add(value_code(value_dim, at, d)) as i8) * values.add(value_scale(at)).cast::<f32>().read_unaligned() }
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
        _: &Ahead,
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
        _: &Ahead,
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
        let groups = a.key_dim.div_ceil(GROUP);
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
                for group in 0..(groups - block * (Q8_BLOCK / GROUP)).min(Q8_BLOCK / GROUP) {
                    let line = scales.add((1 + group) * P * LINE);
                    let mut k = [S::load_weights(line); P];
                    unroll!(j < P { k[j] = S::load_weights(line.add(j * LINE)); });
                    unroll!(r < R {
                        unroll!(j < P { sums[r][j] = S::dot_from(sums[r][j], k[j], x[r].codes.as_ptr(), group); });
                    });
                }
                let mut scale = [S::splat(0.0); P];
                unroll!(j < P { scale[j] = S::load(scales.add(j * LINE).cast()); });
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

/// Weights of what a query sees of a page, each times its value's scale.
///
/// # Safety
/// `scales` holds as many as a page; the caller has the instruction set.
#[inline(always)]
unsafe fn rounded_weights<S: Lanes>(weights: &[f32; BLOCK], (lo, hi): (usize, usize), scales: *const f32) -> Split {
    let mut scaled = [0.0f32; PAGE];
    // SAFETY: the caller's promise; 32 elements.
    unsafe {
        for i in (0..PAGE).step_by(LANES) {
            S::store(scaled.as_mut_ptr().add(i), S::mul(S::load(weights.as_ptr().add(i)), S::load(scales.add(i))));
        }
    }
    // Positions out of sight may hold anything, and so may their scales.
    if lo > 0 || hi < PAGE {
        scaled[..lo].fill(0.0);
        scaled[hi..].fill(0.0);
    }
    // SAFETY: the caller has the instruction set.
    unsafe { S::split(&scaled) }
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
            let mut rounded = [Split::ZERO; R];
            unroll!(r < R { rounded[r] = rounded_weights::<S>(&weights[r], sees[r], values.cast()); });
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
    rounded: &'a [Split; R],
    y: *mut f32,
    dim: usize,
    d: usize,
    _lanes: PhantomData<S>,
}

impl<S: Lanes, const R: usize, const P: usize> Tile for Columns<'_, S, R, P> {
    #[inline(always)]
    unsafe fn run(self) {
        let Columns { values, rounded, y, dim, d, .. } = self;
        // Else the compiler writes the loop out and makes all broadcasts of weights before it, on the stack.
        let groups = std::hint::black_box(PAGE / GROUP);
        // SAFETY: the columns lie behind the scales; `y` holds `R` rows of `dim`.
        unsafe {
            let (codes, step) = (values.add(value_code(dim, 0, d)), beside(dim, d) * LINE);
            let mut high = [[S::splat_i32(0); P]; R];
            let mut low = [[S::splat_i32(0); P]; R];
            for group in 0..groups {
                let line = codes.add(group * step);
                let mut v = [S::load_signed(line); P];
                unroll!(j < P { v[j] = S::load_signed(line.add(j * LINE)); });
                unroll!(r < R {
                    let at = |codes: &[u8; PAGE]| codes.as_ptr().add(group * GROUP).cast::<i32>().read_unaligned();
                    let (h, l) = (at(&rounded[r].high), at(&rounded[r].low));
                    unroll!(j < P {
                        high[r][j] = S::dot_signed(high[r][j], v[j], h);
                        low[r][j] = S::dot_signed(low[r][j], v[j], l);
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

#[cfg(test)]
mod tests {
    use super::super::attend::KvType;
    use super::super::tables;
    use super::*;
    use crate::backend::cpu::arena::Buffer;

    #[test]
    fn places_are_apart_and_inside() {
        for dim in [4usize, 16, 20, 32, 40, 64, 80, 256] {
            let mut keys: Vec<usize> = Vec::new();
            let mut values: Vec<usize> = Vec::new();
            for at in 0..PAGE {
                keys.extend((0..dim.div_ceil(Q8_BLOCK)).flat_map(|block| key_scale(at, block)..key_scale(at, block) + 4));
                keys.extend((0..dim).map(|d| key_code(at, d)));
                values.extend(value_scale(at)..value_scale(at) + 4);
                values.extend((0..dim).map(|d| value_code(dim, at, d)));
            }
            for (mut places, bytes) in [(keys, keys_bytes(dim)), (values, values_bytes(dim))] {
                let count = places.len();
                places.sort_unstable();
                places.dedup();
                assert!(places.len() == count && places.last().is_some_and(|last| *last < bytes), "{dim}: {bytes} bytes");
            }
        }
    }

    const DIM: usize = 24;

    /// The result of a query that sees `first ..= last` of 40 positions, on memory that held `before`; position `odd` is not finite.
    fn result(table: &Table, before: u8, odd: Option<usize>, (first, last): (usize, usize)) -> Vec<u32> {
        let (keys, bytes) = (keys_bytes(DIM), keys_bytes(DIM) + values_bytes(DIM));
        let mut memory = Buffer::new(2 * bytes, "pages").unwrap();
        memory.as_mut_slice_of::<u8>().fill(before);
        let start = memory.as_ptr();
        let pages = [start, start.wrapping_add(bytes)];
        for at in 0..40 {
            let x: Vec<f32> =
                (0..DIM).map(|d| if odd == Some(at) { f32::INFINITY } else { ((at * 37 + d * 11) % 29) as f32 - 14.0 }).collect();
            let page = pages[at / PAGE];
            // SAFETY: both pages have their bytes, and this test alone.
            unsafe {
                write_key(table, page, at % PAGE, &x);
                write_value(page.add(keys), at % PAGE, &x);
            }
        }
        let (q, mut y) = ([0.01f32; DIM], [0.0f32; DIM]);
        let queries = [Query { q: q.as_ptr(), y: y.as_mut_ptr(), first, last, sink: None }];
        let call = Attend {
            queries: &queries,
            heads: 1,
            stride: 0,
            pages: &pages,
            key_at: 0,
            value_at: keys,
            key_dim: DIM,
            value_dim: DIM,
            dtype: KvType::Q8,
            scale: 1.0,
            softcap: None,
            part: false,
        };
        // SAFETY: pages, query and result are good for what they say.
        unsafe { table.attend(&call) };
        y.map(f32::to_bits).to_vec()
    }

    #[test]
    fn what_is_not_seen_does_not_count_and_what_is_not_finite_shows() {
        for table in tables() {
            for seen in [(0, 39), (0, 4), (3, 20), (17, 33), (31, 32)] {
                let clean = result(table, 0, None, seen);
                assert!(clean.iter().all(|bits| f32::from_bits(*bits).is_finite()), "{} {seen:?}", table.name());
                assert!(result(table, 0xff, None, seen) == clean, "{} {seen:?}: old bytes count", table.name());
                for odd in [2, 18, 32, 38] {
                    let found = result(table, 0, Some(odd), seen);
                    match (seen.0..=seen.1).contains(&odd) {
                        true => assert!(found.iter().all(|bits| f32::from_bits(*bits).is_nan()), "{} {seen:?} {odd}", table.name()),
                        false => assert!(found == clean, "{} {seen:?} {odd}: what is not seen counts", table.name()),
                    }
                }
            }
        }
    }
}
