//! Attention over pages of floats: their elements, products with keys, and weighted sums of values.
//!
//! Bound for one row: bytes / read bandwidth, or a multiply-add for each query and 16 elements. Numbers of the query, and weights, are taken
//! from memory by the multiply-adds themselves: a register full of one costs the arithmetic as much as half a multiply-add does.
#![allow(unsafe_code)] // Reads pages through pointers that the caller vouches for.

use super::attend::{Attend, BLOCK, PAGE, Query, Store, wide};
use super::attend_ahead::{Ahead, ask};
use super::lane::{Lanes, Tile};
use super::vector;
use crate::backend::cpu::pack::LANES;
use std::marker::PhantomData;

/// Element type of a page of floats.
pub(super) trait Element {
    /// Bytes of an element.
    const BYTES: usize;
    /// 16 elements from index `at`.
    unsafe fn load<S: Lanes>(page: *const u8, at: usize) -> S::F;
    /// One element.
    unsafe fn one(page: *const u8, at: usize) -> f32;
}

/// f32.
pub(super) struct Full;
/// Half floats.
pub(super) struct Half;
/// bfloat16.
pub(super) struct Brain;

impl Element for Full {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Lanes>(page: *const u8, at: usize) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { S::load(page.cast::<f32>().add(at)) }
    }
    #[inline(always)]
    unsafe fn one(page: *const u8, at: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { *page.cast::<f32>().add(at) }
    }
}

/// An element of 16 bits: how 16 of them are loaded, and the type of one.
macro_rules! short_element {
    ($name:ident, $load:ident, $one:ty) => {
        impl Element for $name {
            const BYTES: usize = 2;
            #[inline(always)]
            unsafe fn load<S: Lanes>(page: *const u8, at: usize) -> S::F {
                // SAFETY: the caller's promise.
                unsafe { S::$load(page.add(at * 2)) }
            }
            #[inline(always)]
            unsafe fn one(page: *const u8, at: usize) -> f32 {
                // SAFETY: the caller's promise.
                <$one>::from_bits(unsafe { *page.cast::<u16>().add(at) }).to_f32()
            }
        }
    };
}
short_element!(Half, load_f16, half::f16);
short_element!(Brain, load_bf16, half::bf16);

impl<T: Element> Store for T {
    type Queries = ();

    #[inline(always)]
    unsafe fn queries<S: Lanes>(_: &Attend<'_>, _: &[Query]) {}

    #[inline(always)]
    unsafe fn scores<S: Lanes, const R: usize>(
        a: &Attend<'_>,
        queries: &[Query],
        _: &(),
        ahead: &Ahead,
        _: usize,
        start: usize,
        (low, high): (usize, usize),
        weights: &mut [[f32; BLOCK]; R],
    ) {
        let mut page = low / PAGE;
        while page * PAGE < high {
            let (pages, column) = (start / PAGE + page, page * PAGE);
            // SAFETY: the caller's promise.
            unsafe {
                if !wide::<S>() {
                    for run in 0..PAGE / LANES {
                        let column = column + run * LANES;
                        S::call(Scores::<S, T, R, 1> { a, queries, ahead, pages, run, column, weights, _types: PhantomData });
                    }
                    page += 1;
                } else if (page + 1) * PAGE < high {
                    S::call(Scores::<S, T, R, 4> { a, queries, ahead, pages, run: 0, column, weights, _types: PhantomData });
                    page += 2;
                } else {
                    S::call(Scores::<S, T, R, 2> { a, queries, ahead, pages, run: 0, column, weights, _types: PhantomData });
                    page += 1;
                }
            }
        }
    }

    #[inline(always)]
    unsafe fn weigh<S: Lanes, const R: usize>(
        a: &Attend<'_>,
        ahead: &Ahead,
        start: usize,
        sees: &[(usize, usize); R],
        weights: &[[f32; BLOCK]; R],
        y: *mut f32,
    ) {
        // What all see goes through the tile, the rest before and after it for each alone.
        let joint = (sees.iter().map(|s| s.0).max().unwrap_or(0), sees.iter().map(|s| s.1).min().unwrap_or(0));
        // SAFETY: the caller's promise.
        unsafe {
            let alone = |r: usize, lo: usize, hi: usize| {
                if lo < hi {
                    weigh::<S, T, 1>(a, ahead, start, lo, hi, &weights[r..], y.add(r * a.value_dim));
                }
            };
            if joint.0 < joint.1 {
                (0..R).for_each(|r| alone(r, sees[r].0, joint.0));
                weigh::<S, T, R>(a, ahead, start, joint.0, joint.1, weights, y);
                (0..R).for_each(|r| alone(r, joint.1, sees[r].1));
            } else {
                (0..R).for_each(|r| alone(r, sees[r].0, sees[r].1));
            }
        }
    }
}

/// Products of `R` queries with the keys of `16 * P` positions.
struct Scores<'a, S, T, const R: usize, const P: usize> {
    a: &'a Attend<'a>,
    queries: &'a [Query],
    ahead: &'a Ahead,
    /// The first page.
    pages: usize,
    /// Its first run of 16 positions.
    run: usize,
    /// Where the first position stands among the weights.
    column: usize,
    weights: &'a mut [[f32; BLOCK]; R],
    _types: PhantomData<(S, T)>,
}

impl<S: Lanes, T: Element, const R: usize, const P: usize> Tile for Scores<'_, S, T, R, P> {
    #[inline(always)]
    unsafe fn run(self) {
        let Scores { a, queries, ahead, pages, run, column, weights, .. } = self;
        // SAFETY: keys lie at `key_at`, two runs of `key_dim * 16` elements a page; queries hold `key_dim` elements.
        unsafe {
            let mut key = [(std::ptr::null::<u8>(), 0); P];
            unroll!(j < P { key[j] = (a.pages[pages + j / 2].cast_const(), a.key_at + (run + j % 2) * a.key_dim * 16); });
            let mut x = [std::ptr::null::<f32>(); R];
            unroll!(r < R { x[r] = queries[r].q; });
            let mut acc = [[S::splat(0.0); P]; R];
            let mut k = [S::splat(0.0); P];
            for d in 0..a.key_dim {
                ask::<S>(ahead.keys, (run * a.key_dim + d * P) * LANES * T::BYTES, LANES * P * T::BYTES);
                unroll!(j < P { k[j] = T::load::<S>(key[j].0, key[j].1 + d * 16); });
                unroll!(r < R {
                    unroll!(j < P { acc[r][j] = S::fma_from(x[r], d, k[j], acc[r][j]); });
                });
            }
            unroll!(r < R {
                unroll!(j < P { S::store(weights[r].as_mut_ptr().add(column + 16 * j), acc[r][j]); });
            });
        }
    }
}

/// Adds the values of positions `lo .. hi` of a block, times their weights, to `R` rows of `y`.
///
/// # Safety
/// The positions' values exist, `weights` and `y` hold `R` rows.
#[inline(always)]
unsafe fn weigh<S: Lanes, T: Element, const R: usize>(
    a: &Attend<'_>,
    ahead: &Ahead,
    start: usize,
    lo: usize,
    hi: usize,
    weights: &[[f32; BLOCK]],
    y: *mut f32,
) {
    let dim = a.value_dim;
    let mut d = 0;
    // SAFETY: vectors stop at the last whole 16 elements of a row.
    unsafe {
        macro_rules! piece {
            ($P:literal) => {{
                S::call(Values::<S, T, R, $P> { a, ahead, start, lo, hi, weights, y, d, _types: PhantomData });
                d += 16 * $P;
            }};
        }
        while d + 64 <= dim && wide::<S>() {
            piece!(4);
        }
        while d + 16 <= dim {
            piece!(1);
        }
        while d < dim {
            for r in 0..R {
                let y = &mut *y.add(r * dim + d);
                for i in lo..hi {
                    let page = a.pages[(start + i) / PAGE];
                    *y = vector::fma::<S>(weights[r][i], T::one(page, a.value_at + i % PAGE * dim + d), *y);
                }
            }
            d += 1;
        }
    }
}

/// `16 * P` elements, from `d` on, of `R` weighted sums.
struct Values<'a, S, T, const R: usize, const P: usize> {
    a: &'a Attend<'a>,
    ahead: &'a Ahead,
    start: usize,
    lo: usize,
    hi: usize,
    weights: &'a [[f32; BLOCK]],
    y: *mut f32,
    d: usize,
    _types: PhantomData<(S, T)>,
}

impl<S: Lanes, T: Element, const R: usize, const P: usize> Tile for Values<'_, S, T, R, P> {
    #[inline(always)]
    unsafe fn run(self) {
        let Values { a, ahead, start, lo, hi, weights, y, d, .. } = self;
        let dim = a.value_dim;
        // SAFETY: values lie at `value_at`, rows of `value_dim`; the positions are seen, `weights` and `y` hold `R` rows.
        unsafe {
            let mut acc = [[S::splat(0.0); P]; R];
            unroll!(r < R {
                unroll!(j < P { acc[r][j] = S::load(y.add(r * dim + d + 16 * j)); });
            });
            let w = weights.as_ptr().cast::<f32>();
            let mut x = [S::splat(0.0); P];
            let mut i = lo;
            while i < hi {
                let page = a.pages[(start + i) / PAGE].cast_const();
                let end = hi.min(i / PAGE * PAGE + PAGE);
                while i < end {
                    let row = a.value_at + i % PAGE * dim + d;
                    ask::<S>(ahead.values, (d * PAGE + i % PAGE * LANES * P) * T::BYTES, LANES * P * T::BYTES);
                    unroll!(j < P { x[j] = T::load::<S>(page, row + 16 * j); });
                    unroll!(r < R {
                        unroll!(j < P { acc[r][j] = S::fma_from(w.add(r * BLOCK), i, x[j], acc[r][j]); });
                    });
                    i += 1;
                }
            }
            unroll!(r < R {
                unroll!(j < P { S::store(y.add(r * dim + d + 16 * j), acc[r][j]); });
            });
        }
    }
}
