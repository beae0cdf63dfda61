//! Attention of queries over pages of keys and values, with a running maximum (online softmax; Milakov and Gimelshein, 2018).
//!
//! Positions come ascending, a page of 32 at a time, and each query's arithmetic is the same whether it shares a pass with other queries or
//! not: a score is one chain over the key's elements, a weighted value one chain over positions. So tiles of up to six queries
//! load each key and value once, as in a matrix product, and what only some of them see is added for each alone.
//!
//! What a query sees is cut into stretches that are gathered apart and merged (`stretch.rs`).
//!
//! Bound: for many queries the multiply-add rate; exponentials and rescaling take a fifth to a third beside it. For one row the bytes of the
//! pages: a call takes several key/value heads block by block, so that pages stream from start to end. (Runs of 4 to 8 KiB with gaps came at
//! 11 GB/s where one stream came at 30, with and without prefetching; runs of 32 KiB at 22.)
#![allow(unsafe_code)] // Reads pages through pointers that the caller vouches for.

use super::attend_ahead::{Ahead, Order};
use super::attend_elements::{Brain, Full, Half};
use super::attend_q8::Eight;
use super::lane::{Lanes, Registers, Tile};
use super::stretch::{self, SHORTEST, Total, stretch};
use super::vector;
use crate::backend::cpu::pack::LANES;
use std::marker::PhantomData;
use std::mem::MaybeUninit;

/// Positions in a page.
pub const PAGE: usize = 32;
/// Most queries of a call.
pub const QUERIES: usize = 32;
/// Most elements of a value; scratch lies on the stack.
pub const VALUE_DIM: usize = 512;
/// Positions that share a step of the running maximum; whole pages.
pub(super) const BLOCK: usize = PAGE;
/// Elements of weighted values that are gathered at a time.
const GATHERED: usize = 8 * VALUE_DIM;

/// Element type of cached keys and values.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum KvType {
    /// Exact.
    F32,
    /// Half the bytes; rounded to nearest.
    F16,
    /// As many bytes, the range of f32 and three bits less.
    Bf16,
    /// 8 bits and a scale: for each 32 elements of a key, and for each value.
    Q8,
}

impl KvType {
    /// Bytes of an element; of the numbers that go with elements of 8 bits, [`super::attend_q8`] knows.
    pub const fn bytes(self) -> usize {
        match self {
            KvType::F32 => 4,
            KvType::F16 | KvType::Bf16 => 2,
            KvType::Q8 => 1,
        }
    }
}

/// One query: where it reads and writes, and which positions it sees.
#[derive(Clone, Copy)]
pub struct Query {
    /// `key_dim` elements.
    pub q: *const f32,
    /// `value_dim` elements; of a part two more, see [`Attend::part`].
    pub y: *mut f32,
    /// First position it sees.
    pub first: usize,
    /// Last position it sees.
    pub last: usize,
    /// A score that takes weight and has no value.
    pub sink: Option<f32>,
}

/// A call: queries of one or several key/value heads of one sequence.
#[derive(Clone, Copy)]
pub struct Attend<'a> {
    /// 1 to [`QUERIES`], as many for each head, head by head. Those of several heads must be [`queries_at_once`].
    pub queries: &'a [Query],
    /// Key/value heads, one behind the other.
    pub heads: usize,
    /// Elements from one head of a page to the next; in 8 bits these three are bytes.
    pub stride: usize,
    /// By page number, up to the last page any query sees.
    pub pages: &'a [*mut u8],
    /// Element index of the first head's keys in a page: `[PAGE / 16][key_dim][16]`; in 8 bits as `attend_q8.rs` says.
    pub key_at: usize,
    /// Element index of the first head's values in a page: `[PAGE][value_dim]`; in 8 bits as above.
    pub value_at: usize,
    /// Elements of a key.
    pub key_dim: usize,
    /// Elements of a value, at most [`VALUE_DIM`].
    pub value_dim: usize,
    /// Element type.
    pub dtype: KvType,
    /// Factor on the scores.
    pub scale: f32,
    /// `cap * tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// Leaves results as they are gathered, to be merged: the largest score, the sum of weights, the weighted values; without sinks. What
    /// queries see lies in one stretch then.
    pub part: bool,
}

/// How pages keep keys and values.
pub(super) trait Store: Sized {
    /// What is made of the queries of a pass before it.
    type Queries;
    /// Makes it.
    unsafe fn queries<S: Lanes>(a: &Attend<'_>, queries: &[Query]) -> Self::Queries;
    /// Products of `R` queries, of which the pass has `first` before them, with keys of the block that begins at `start`: at least those of its
    /// positions `seen.0 .. seen.1`.
    unsafe fn scores<S: Lanes, const R: usize>(
        a: &Attend<'_>,
        queries: &[Query],
        made: &Self::Queries,
        ahead: &Ahead,
        first: usize,
        start: usize,
        seen: (usize, usize),
        weights: &mut [[f32; BLOCK]; R],
    );
    /// Adds the values of the block's positions that each query sees, times their weights (0 for others), to `R` rows of `y`.
    unsafe fn weigh<S: Lanes, const R: usize>(
        a: &Attend<'_>,
        ahead: &Ahead,
        start: usize,
        sees: &[(usize, usize); R],
        weights: &[[f32; BLOCK]; R],
        y: *mut f32,
    );
}

/// What queries have gathered: the weighted values, the maximum, the weights' sum. Rows of whole vectors lie in whole lines.
#[repr(C, align(64))]
struct State {
    /// Those of the pass's queries are there, the rest is nothing.
    values: [MaybeUninit<f32>; GATHERED],
    most: [f32; QUERIES],
    sum: [f32; QUERIES],
}

/// Queries of `value_dim` elements whose values fit the scratch, in whole tiles where one fits.
pub fn queries_at_once(value_dim: usize) -> usize {
    let fit = (GATHERED / value_dim.max(1)).min(QUERIES);
    if fit >= 6 { fit / 6 * 6 } else { fit }
}

/// # Safety
/// Needs the instruction set of `S`; pages, queries and outputs are good for what [`Attend`] says.
pub(super) unsafe fn attend<S: Lanes>(a: &Attend<'_>) {
    for queries in a.queries.chunks(queries_at_once(a.value_dim)) {
        // SAFETY: the caller's promise.
        unsafe {
            match a.dtype {
                KvType::F32 => S::call(Pass::<S, Full> { a, queries, _types: PhantomData }),
                KvType::F16 => S::call(Pass::<S, Half> { a, queries, _types: PhantomData }),
                KvType::Bf16 => S::call(Pass::<S, Brain> { a, queries, _types: PhantomData }),
                KvType::Q8 => S::call(Pass::<S, Eight> { a, queries, _types: PhantomData }),
            }
        }
    }
}

struct Pass<'a, S, T> {
    a: &'a Attend<'a>,
    queries: &'a [Query],
    _types: PhantomData<(S, T)>,
}

impl<S: Lanes, T: Store> Tile for Pass<'_, S, T> {
    #[inline(always)]
    unsafe fn run(self) {
        let Pass { a, queries, .. } = self;
        let mut state =
            State { values: [const { MaybeUninit::uninit() }; GATHERED], most: [f32::NEG_INFINITY; QUERIES], sum: [0.0; QUERIES] };
        state.values[..queries.len() * a.value_dim].fill(MaybeUninit::new(0.0));
        let order = Order::new(a);
        let first = queries.iter().map(|q| q.first).min().unwrap_or(0);
        let last = queries.iter().map(|q| q.last).max().unwrap_or(0);
        let each = queries.len() / a.heads;
        // SAFETY: queries hold `key_dim` elements.
        let made = &unsafe { T::queries::<S>(a, queries) };
        // Stretches that are done; their values are in `y`.
        let mut earlier: [Option<Total>; QUERIES] = [None; QUERIES];
        for (start, head) in (first / BLOCK * BLOCK..=last).step_by(BLOCK).flat_map(|start| (0..a.heads).map(move |head| (start, head))) {
            if start % SHORTEST == 0 && head == 0 && !a.part {
                for (r, q) in queries.iter().enumerate() {
                    if q.first < start && start <= q.last && start % stretch(q.last) == 0 {
                        // SAFETY: `y` holds `value_dim` elements.
                        earlier[r] = Some(unsafe { state.close::<S>(r, earlier[r], q.y, a.value_dim) });
                    }
                }
            }
            let ahead = &order.ahead(a, start / PAGE, head);
            let a = &Attend { key_at: a.key_at + head * a.stride, value_at: a.value_at + head * a.stride, ..*a };
            let (mut r, end) = (head * each, (head + 1) * each);
            while r < end {
                macro_rules! tile {
                    ($R:literal) => {{
                        // SAFETY: the caller's promise; there are this many queries from `r` on.
                        unsafe {
                            S::call(BlockTile::<S, T, $R> {
                                a,
                                queries: &queries[r..r + $R],
                                made,
                                ahead,
                                r,
                                state: &mut state,
                                start,
                                _types: PhantomData,
                            })
                        };
                        r += $R;
                    }};
                }
                // Small tiles wait for their own sums, so seven and eight make two alike.
                match end - r {
                    4 | 7 | 8 => tile!(4),
                    6.. => tile!(6),
                    3 | 5 => tile!(3),
                    2 => tile!(2),
                    _ => tile!(1),
                }
            }
        }
        for (r, q) in queries.iter().enumerate() {
            // SAFETY: `y` is good for `value_dim` elements, of a part for two more.
            unsafe {
                if a.part {
                    (*q.y, *q.y.add(1)) = (state.most[r], state.sum[r]);
                    std::ptr::copy_nonoverlapping(state.row(r, a.value_dim), q.y.add(2), a.value_dim);
                } else if earlier[r].is_none() {
                    let total = Total { most: state.most[r], sum: state.sum[r] };
                    stretch::finish::<S>(total, q.sink, state.row(r, a.value_dim), q.y, a.value_dim);
                } else {
                    let total = state.close::<S>(r, earlier[r], q.y, a.value_dim);
                    stretch::finish::<S>(total, q.sink, q.y, q.y, a.value_dim);
                }
            }
        }
    }
}

impl State {
    /// Values of query `r`, `dim` of them.
    #[inline(always)]
    fn row(&self, r: usize, dim: usize) -> *const f32 {
        self.values[r * dim..][..dim].as_ptr().cast()
    }

    /// The same to be changed, and those of later queries behind them.
    #[inline(always)]
    fn row_mut(&mut self, r: usize, dim: usize) -> *mut f32 {
        self.values[r * dim..].as_mut_ptr().cast()
    }

    /// Adds query `r`'s stretch to its earlier ones, whose values are in `y`, and begins the next.
    ///
    /// # Safety
    /// `y` holds `dim` elements; the caller has the instruction set.
    #[inline(always)]
    unsafe fn close<S: Lanes>(&mut self, r: usize, earlier: Option<Total>, y: *mut f32, dim: usize) -> Total {
        let found = Total { most: self.most[r], sum: self.sum[r] };
        (self.most[r], self.sum[r]) = (f32::NEG_INFINITY, 0.0);
        // SAFETY: the caller's promise.
        let total = unsafe { stretch::add::<S>(earlier, found, self.row(r, dim), y, dim) };
        self.values[r * dim..][..dim].fill(MaybeUninit::new(0.0));
        total
    }
}

/// `y = factor * x`, `n` elements.
#[inline(always)]
pub(super) unsafe fn times<S: Lanes>(factor: f32, x: *const f32, y: *mut f32, n: usize) {
    // SAFETY: both sides hold `n` elements.
    unsafe {
        let whole = n / LANES * LANES;
        for d in (0..whole).step_by(LANES) {
            S::store(y.add(d), S::mul(S::load(x.add(d)), S::splat(factor)));
        }
        for d in whole..n {
            *y.add(d) = *x.add(d) * factor;
        }
    }
}

/// `R` queries over the positions they see of the block that begins at `start`.
struct BlockTile<'a, S, T: Store, const R: usize> {
    a: &'a Attend<'a>,
    queries: &'a [Query],
    made: &'a T::Queries,
    ahead: &'a Ahead,
    /// Place of the first one in `state`.
    r: usize,
    state: &'a mut State,
    start: usize,
    _types: PhantomData<(S, T)>,
}

impl<S: Lanes, T: Store, const R: usize> Tile for BlockTile<'_, S, T, R> {
    #[inline(always)]
    unsafe fn run(self) {
        let BlockTile { a, queries, made, ahead, r: first, state, start, .. } = self;
        // What each query sees of the block; nothing is `lo == hi`.
        let mut sees = [(0, 0); R];
        for (sees, q) in sees.iter_mut().zip(queries) {
            let hi = (q.last + 1).saturating_sub(start).min(BLOCK);
            *sees = (q.first.saturating_sub(start).min(hi), hi);
        }
        let low = sees.iter().filter(|s| s.0 < s.1).map(|s| s.0).min().unwrap_or(BLOCK);
        let high = sees.iter().map(|s| s.1).max().unwrap_or(0);
        if low >= high {
            return;
        }
        let mut weights = [[0.0f32; BLOCK]; R];
        // SAFETY: the pages from `low` to `high` exist; queries hold `key_dim` elements.
        unsafe { T::scores::<S, R>(a, queries, made, ahead, first, start, (low, high), &mut weights) };
        let dim = a.value_dim;
        let mut falls = [f32::NEG_INFINITY; LANES];
        // SAFETY: whole vectors of weights, and of the rows of `dim` in `state`.
        unsafe {
            for r in 0..R {
                let (lo, hi) = sees[r];
                let (from, to) = (lo / LANES * LANES, hi.next_multiple_of(LANES));
                let w = &mut weights[r][from..to];
                if let Some(cap) = a.softcap {
                    vector::scale(a.scale, w);
                    vector::softcap::<S>(cap, w);
                }
                // Positions out of sight may hold anything; their scores are replaced, not multiplied away.
                let scale = S::splat(if a.softcap.is_some() { 1.0 } else { a.scale });
                let mut most = S::splat(f32::NEG_INFINITY);
                for at in (from..to).step_by(LANES) {
                    let place = w.as_mut_ptr().add(at - from);
                    let mut x = S::mul(S::load(place), scale);
                    if at < lo || at + LANES > hi {
                        let mut edge = [0.0f32; LANES];
                        S::store(edge.as_mut_ptr(), x);
                        for (i, x) in edge.iter_mut().enumerate() {
                            *x = if at + i >= lo && at + i < hi { *x } else { f32::NEG_INFINITY };
                        }
                        x = S::load(edge.as_ptr());
                    }
                    S::store(place, x);
                    most = S::max(x, most);
                }
                let (before, here) = (state.most[first + r], S::largest(most));
                let most = if here > before { here } else { before };
                state.most[first + r] = most;
                falls[r] = before - most;
            }
            let mut factors = [0.0f32; LANES];
            S::store(factors.as_mut_ptr(), S::exp_below(S::load(falls.as_ptr())));
            for r in 0..R {
                let (lo, hi) = sees[r];
                if lo == hi {
                    continue;
                }
                let most = S::splat(-state.most[first + r]);
                let mut sums = S::splat(0.0);
                for at in (lo / LANES * LANES..hi).step_by(LANES) {
                    let place = weights[r].as_mut_ptr().add(at);
                    let x = S::exp_below(S::add(S::load(place), most));
                    S::store(place, x);
                    sums = S::add(sums, x);
                }
                let mut lanes = [0.0f32; LANES];
                S::store(lanes.as_mut_ptr(), sums);
                state.sum[first + r] = state.sum[first + r] * factors[r] + vector::tree(lanes);
                if factors[r] != 1.0 {
                    let values = state.row_mut(first + r, dim);
                    times::<S>(factors[r], values, values, dim);
                }
            }
        }
        // SAFETY: positions that are seen have values; `state` holds `R` rows of `dim` from here on.
        unsafe { T::weigh::<S, R>(a, ahead, start, &sees, &weights, state.row_mut(first, dim)) };
    }
}

/// Whether tiles of four registers by six queries fit the register file.
pub(super) const fn wide<S: Lanes>() -> bool {
    S::REGISTERS.are(Registers::ThirtyTwo)
}
