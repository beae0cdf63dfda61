//! Attention of a few queries over pages of keys and values, with a running maximum (online softmax; Milakov and Gimelshein, 2018).
//!
//! Pages come ascending, 32 positions at a time, and each query's arithmetic is the same whether it shares a page with other queries or not:
//! pages that all queries see whole run for four queries at once, the pages at an edge run for each query alone over the positions it sees.
#![allow(unsafe_code)] // Reads pages through pointers that the caller vouches for.

use super::lane::{Lanes, Tile};
use super::vector;
use std::marker::PhantomData;

/// Positions in a page.
pub const PAGE: usize = 32;
/// Most queries of a call.
pub const QUERIES: usize = 8;
/// Most elements of a value; scratch lies on the stack.
pub const VALUE_DIM: usize = 512;

/// One query: where it reads and writes, and which positions it sees.
#[derive(Clone, Copy)]
pub struct Query {
    /// `key_dim` elements.
    pub q: *const f32,
    /// `value_dim` elements.
    pub y: *mut f32,
    /// First position it sees.
    pub first: usize,
    /// Last position it sees.
    pub last: usize,
    /// A score that takes weight and has no value.
    pub sink: Option<f32>,
}

/// A call: queries of one key/value head of one sequence.
pub struct Attend<'a> {
    /// 1 to [`QUERIES`].
    pub queries: &'a [Query],
    /// By page number, up to the last page any query sees.
    pub pages: &'a [*mut u8],
    /// Element index of the head's keys in a page: `[PAGE / 16][key_dim][16]`.
    pub key_at: usize,
    /// Element index of the head's values in a page: `[PAGE][value_dim]`.
    pub value_at: usize,
    /// Elements of a key.
    pub key_dim: usize,
    /// Elements of a value, at most [`VALUE_DIM`].
    pub value_dim: usize,
    /// Elements are half floats instead of f32.
    pub half: bool,
    /// Factor on the scores.
    pub scale: f32,
    /// `cap * tanh(score / cap)`.
    pub softcap: Option<f32>,
}

/// Element type of a page.
trait Element {
    /// 16 elements from index `at`.
    unsafe fn load<S: Lanes>(page: *const u8, at: usize) -> S::F;
    /// One element.
    unsafe fn one(page: *const u8, at: usize) -> f32;
}

struct Full;
struct Half;

impl Element for Full {
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

impl Element for Half {
    #[inline(always)]
    unsafe fn load<S: Lanes>(page: *const u8, at: usize) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { S::load_f16(page.add(at * 2)) }
    }
    #[inline(always)]
    unsafe fn one(page: *const u8, at: usize) -> f32 {
        // SAFETY: the caller's promise.
        half::f16::from_bits(unsafe { *page.cast::<u16>().add(at) }).to_f32()
    }
}

/// What a query has gathered: the maximum, the weights' sum, the weighted values.
struct State {
    most: [f32; QUERIES],
    sum: [f32; QUERIES],
    values: [f32; QUERIES * VALUE_DIM / 2],
}

/// # Safety
/// Needs the instruction set of `S`; pages, queries and outputs are good for what [`Attend`] says.
pub(super) unsafe fn attend<S: Lanes>(a: &Attend<'_>) {
    // Long values: fewer queries share the scratch.
    let group = if a.value_dim > VALUE_DIM / 2 { QUERIES / 2 } else { QUERIES };
    for queries in a.queries.chunks(group) {
        // SAFETY: the caller's promise.
        unsafe {
            if a.half {
                S::call(Pass::<S, Half> { a, queries, _types: PhantomData });
            } else {
                S::call(Pass::<S, Full> { a, queries, _types: PhantomData });
            }
        }
    }
}

struct Pass<'a, S, T> {
    a: &'a Attend<'a>,
    queries: &'a [Query],
    _types: PhantomData<(S, T)>,
}

impl<S: Lanes, T: Element> Tile for Pass<'_, S, T> {
    #[inline(always)]
    unsafe fn run(self) {
        let Pass { a, queries, .. } = self;
        let mut state = State { most: [f32::NEG_INFINITY; QUERIES], sum: [0.0; QUERIES], values: [0.0; QUERIES * VALUE_DIM / 2] };
        let first = queries.iter().map(|q| q.first).min().unwrap_or(0);
        let last = queries.iter().map(|q| q.last).max().unwrap_or(0);
        for index in first / PAGE..=last / PAGE {
            let (page, start) = (a.pages[index], index * PAGE);
            let whole = queries.iter().all(|q| q.first <= start && q.last >= start + PAGE - 1);
            let mut r = 0;
            while r < queries.len() {
                // SAFETY: the caller's promise; `start ..` overlaps what each query sees where it is used.
                unsafe {
                    if whole && queries.len() - r >= 4 {
                        S::call(PageTile::<S, T, 4> { a, queries, r, state: &mut state, page, lo: 0, hi: PAGE, _types: PhantomData });
                        r += 4;
                    } else if whole && queries.len() - r >= 2 {
                        S::call(PageTile::<S, T, 2> { a, queries, r, state: &mut state, page, lo: 0, hi: PAGE, _types: PhantomData });
                        r += 2;
                    } else {
                        let q = &queries[r];
                        let lo = q.first.saturating_sub(start);
                        let hi = (q.last + 1).saturating_sub(start).min(PAGE);
                        if lo < hi {
                            S::call(PageTile::<S, T, 1> { a, queries, r, state: &mut state, page, lo, hi, _types: PhantomData });
                        }
                        r += 1;
                    }
                }
            }
        }
        for (r, q) in queries.iter().enumerate() {
            let (mut most, mut sum) = (state.most[r], state.sum[r]);
            let mut factor = 1.0;
            if let Some(sink) = q.sink {
                let new = if sink > most { sink } else { most };
                factor = vector::exp::<S>(most - new);
                sum = sum * factor + vector::exp::<S>(sink - new);
                most = new;
            }
            let factor = if most == f32::NEG_INFINITY { f32::NAN } else { factor / sum };
            for (d, v) in state.values[r * a.value_dim..][..a.value_dim].iter().enumerate() {
                // SAFETY: `y` is good for `value_dim` elements.
                unsafe { *q.y.add(d) = v * factor };
            }
        }
    }
}

/// `R` queries over positions `lo .. hi` of one page.
struct PageTile<'a, S, T, const R: usize> {
    a: &'a Attend<'a>,
    queries: &'a [Query],
    r: usize,
    state: &'a mut State,
    page: *const u8,
    lo: usize,
    hi: usize,
    _types: PhantomData<(S, T)>,
}

impl<S: Lanes, T: Element, const R: usize> Tile for PageTile<'_, S, T, R> {
    #[inline(always)]
    unsafe fn run(self) {
        let PageTile { a, queries, r: first, state, page, lo, hi, .. } = self;
        let mut weights = [[0.0f32; PAGE]; R];
        // SAFETY: keys lie at `key_at`, two runs of `key_dim * 16` elements; queries hold `key_dim` elements.
        unsafe {
            let mut s = [[S::splat(0.0); 2]; R];
            for d in 0..a.key_dim {
                let k0 = T::load::<S>(page, a.key_at + d * 16);
                let k1 = T::load::<S>(page, a.key_at + (a.key_dim + d) * 16);
                for r in 0..R {
                    let q = S::splat(*queries[first + r].q.add(d));
                    s[r][0] = S::fma(q, k0, s[r][0]);
                    s[r][1] = S::fma(q, k1, s[r][1]);
                }
            }
            for r in 0..R {
                S::store(weights[r].as_mut_ptr(), s[r][0]);
                S::store(weights[r].as_mut_ptr().add(16), s[r][1]);
            }
        }
        let mut factors = [0.0f32; R];
        for r in 0..R {
            let w = &mut weights[r];
            w.iter_mut().for_each(|s| *s *= a.scale);
            if let Some(cap) = a.softcap {
                vector::softcap::<S>(cap, w);
            }
            // Positions out of sight may hold anything; their scores are replaced, not multiplied away.
            for (i, s) in w.iter_mut().enumerate() {
                *s = if i >= lo && i < hi { *s } else { f32::NEG_INFINITY };
            }
            let before = state.most[first + r];
            let here = vector::largest(w);
            let most = if here > before { here } else { before };
            factors[r] = vector::exp::<S>(before - most);
            let sum = vector::exp_sum::<S>(most, w);
            state.sum[first + r] = state.sum[first + r] * factors[r] + sum;
            state.most[first + r] = most;
        }
        const V: usize = 4;
        let dim = a.value_dim;
        let base = state.values.as_mut_ptr();
        // SAFETY: values lie at `value_at`, rows of `value_dim`; vectors stop at the last whole 16 elements of a row.
        unsafe {
            let at = |r: usize, d: usize| base.add((first + r) * dim + d);
            let mut d = 0;
            while d + 16 * V <= dim {
                let mut acc = [[S::splat(0.0); V]; R];
                for r in 0..R {
                    for v in 0..V {
                        acc[r][v] = S::mul(S::load(at(r, d + 16 * v)), S::splat(factors[r]));
                    }
                }
                for i in lo..hi {
                    let row = a.value_at + i * dim + d;
                    let mut x = [S::splat(0.0); V];
                    for v in 0..V {
                        x[v] = T::load::<S>(page, row + 16 * v);
                    }
                    for r in 0..R {
                        let w = S::splat(weights[r][i]);
                        for v in 0..V {
                            acc[r][v] = S::fma(w, x[v], acc[r][v]);
                        }
                    }
                }
                for r in 0..R {
                    for v in 0..V {
                        S::store(at(r, d + 16 * v), acc[r][v]);
                    }
                }
                d += 16 * V;
            }
            while d + 16 <= dim {
                for r in 0..R {
                    let mut acc = S::mul(S::load(at(r, d)), S::splat(factors[r]));
                    for i in lo..hi {
                        acc = S::fma(S::splat(weights[r][i]), T::load::<S>(page, a.value_at + i * dim + d), acc);
                    }
                    S::store(at(r, d), acc);
                }
                d += 16;
            }
            while d < dim {
                for r in 0..R {
                    let mut acc = *at(r, d) * factors[r];
                    for i in lo..hi {
                        acc = vector::fma::<S>(weights[r][i], T::one(page, a.value_at + i * dim + d), acc);
                    }
                    *at(r, d) = acc;
                }
                d += 1;
            }
        }
    }
}
