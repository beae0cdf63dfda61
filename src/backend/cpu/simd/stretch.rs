//! Stretches of what a query sees, so that several threads can share one far query.
//!
//! A query's positions are cut by its own position alone. Each stretch is gathered from nothing, and the results are merged in ascending order,
//! whether one pass went over all of them or each was a piece of work of its own: the same bits. A stretch is read from its first
//! page's first byte to its last page's last, which heads shared out among threads are not.
#![allow(unsafe_code)] // Reads and writes through pointers that the caller vouches for.

use super::attend::times;
use super::lane::{Lanes, Tile};
use super::vector;
use crate::backend::cpu::pack::LANES;
use std::marker::PhantomData;

/// Most stretches of a query.
pub const STRETCHES: usize = 16;
/// Fewest positions in a stretch; whole blocks.
pub const SHORTEST: usize = 512;

/// Positions in a stretch of what a query at `position` sees: stretch `i` begins at `i` times as many.
pub fn stretch(position: usize) -> usize {
    (position / STRETCHES + 1).next_power_of_two().max(SHORTEST)
}

/// Parts of a query to be merged.
pub struct Join {
    /// `count` times `value_dim + 2` elements, as [`Attend::part`](super::attend::Attend::part) leaves them.
    pub parts: *const f32,
    /// At least one.
    pub count: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// A score that takes weight and has no value.
    pub sink: Option<f32>,
    /// `value_dim` elements.
    pub y: *mut f32,
}

/// What was gathered beside the values: the largest score and the sum of weights.
#[derive(Clone, Copy)]
pub(super) struct Total {
    pub most: f32,
    pub sum: f32,
}

/// # Safety
/// Needs the instruction set of `S`; parts and output are good for what [`Join`] says.
pub(super) unsafe fn join<S: Lanes>(join: &Join) {
    // SAFETY: the caller's promise.
    unsafe { S::call(Merge::<S> { join, _lanes: PhantomData }) }
}

struct Merge<'a, S> {
    join: &'a Join,
    _lanes: PhantomData<S>,
}

impl<S: Lanes> Tile for Merge<'_, S> {
    #[inline(always)]
    unsafe fn run(self) {
        let Join { parts, count, value_dim, sink, y } = *self.join;
        // SAFETY: there are `count` parts, at least one, and `y` is good for their values.
        unsafe {
            let mut earlier = None;
            for i in 0..count {
                let part = parts.add(i * (value_dim + 2));
                let found = Total { most: *part, sum: *part.add(1) };
                earlier = Some(add::<S>(earlier, found, part.add(2), y, value_dim));
            }
            if let Some(total) = earlier {
                finish::<S>(total, sink, y, y, value_dim);
            }
        }
    }
}

/// Adds a stretch with its `values` to the earlier ones, whose values stand in `y`; `n` of each.
///
/// # Safety
/// `y` and `values` hold `n` elements and are apart; the caller has the instruction set.
#[inline(always)]
pub(super) unsafe fn add<S: Lanes>(earlier: Option<Total>, found: Total, values: *const f32, y: *mut f32, n: usize) -> Total {
    // SAFETY: the caller's promise.
    unsafe {
        let Some(total) = earlier else {
            std::ptr::copy_nonoverlapping(values, y, n);
            return found;
        };
        let most = if found.most > total.most { found.most } else { total.most };
        let (before, here) = (vector::exp::<S>(total.most - most), vector::exp::<S>(found.most - most));
        let whole = n / LANES * LANES;
        for d in (0..whole).step_by(LANES) {
            let earlier = S::mul(S::load(y.add(d)), S::splat(before));
            S::store(y.add(d), S::fma(S::load(values.add(d)), S::splat(here), earlier));
        }
        for d in whole..n {
            *y.add(d) = vector::fma::<S>(*values.add(d), here, *y.add(d) * before);
        }
        Total { most, sum: vector::fma::<S>(found.sum, here, total.sum * before) }
    }
}

/// Takes a sink's weight away and divides by the sum.
///
/// # Safety
/// `values` and `y`, which may be the same, hold `n` elements; the caller has the instruction set.
#[inline(always)]
pub(super) unsafe fn finish<S: Lanes>(total: Total, sink: Option<f32>, values: *const f32, y: *mut f32, n: usize) {
    let Total { mut most, mut sum } = total;
    let mut factor = 1.0;
    if let Some(sink) = sink {
        let new = if sink > most { sink } else { most };
        factor = vector::exp::<S>(most - new);
        sum = sum * factor + vector::exp::<S>(sink - new);
        most = new;
    }
    let factor = if most == f32::NEG_INFINITY { f32::NAN } else { factor / sum };
    // SAFETY: the caller's promise.
    unsafe { times::<S>(factor, values, y, n) };
}

#[cfg(test)]
mod tests {
    use super::super::attend::{Attend, KvType, PAGE, Query};
    use super::super::tables;
    use super::*;
    use crate::backend::cpu::arena::Buffer;

    const DIM: usize = 40;
    const HEADS: usize = 2;

    #[test]
    fn stretches_are_whole_blocks_and_few() {
        for position in [0, 511, 512, 1535, 8191, 8192, 16_383, 16_384, 1 << 20, usize::MAX >> 4] {
            let length = stretch(position);
            assert!(length.is_multiple_of(SHORTEST) && position / length < STRETCHES, "{position}: {length}");
        }
        assert!(stretch(8191) == 512 && stretch(8192) == 1024);
    }

    /// Keys and values differ from page to page, and large scores stand in the middle.
    fn pages(dtype: KvType, count: usize) -> (Buffer, Vec<*mut u8>) {
        let elements = HEADS * PAGE * 2 * DIM;
        let mut memory = Buffer::new(count * elements * dtype.bytes(), "pages").unwrap();
        let value = |i: usize| {
            let size = if i / elements == count / 2 { 6.0 } else { 1.0 };
            ((i as u32).wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 23) as f32 * size - 0.5 * size
        };
        match dtype {
            KvType::F32 => memory.as_mut_slice_of::<f32>().iter_mut().enumerate().for_each(|(i, x)| *x = value(i)),
            _ => memory.as_mut_slice_of::<u16>().iter_mut().enumerate().for_each(|(i, x)| *x = half::f16::from_f32(value(i)).to_bits()),
        }
        let start = memory.as_ptr();
        (memory, (0..count).map(|page| start.wrapping_add(page * elements * dtype.bytes())).collect())
    }

    #[test]
    fn parts_that_are_joined_have_the_bits_of_the_whole() {
        let q: Vec<f32> = (0..2 * HEADS * DIM).map(|i| ((i * 7919) % 101) as f32 * 0.02 - 1.0).collect();
        for table in tables() {
            for dtype in [KvType::F32, KvType::F16] {
                let (_memory, pages) = pages(dtype, 80);
                for (first, position) in [(0, 400), (0, 511), (0, 512), (0, 1023), (3, 2111), (700, 2559), (512, 1900)] {
                    for sink in [None, Some(0.7)] {
                        let run = |first: usize, last: usize, part: bool, y: &mut [f32], each: usize| {
                            let query =
                                |i: usize| Query { q: q[i * DIM..].as_ptr(), y: y[i * each..].as_ptr().cast_mut(), first, last, sink };
                            let call = Attend {
                                queries: &[query(0), query(1), query(2), query(3)],
                                heads: HEADS,
                                stride: PAGE * DIM,
                                pages: &pages,
                                key_at: 0,
                                value_at: HEADS * PAGE * DIM,
                                key_dim: DIM,
                                value_dim: DIM,
                                dtype,
                                scale: 0.7,
                                softcap: None,
                                part,
                            };
                            // SAFETY: the pages hold what the call says, and `y` is this call's own.
                            unsafe { table.attend(&call) };
                        };
                        let mut whole = vec![0.0f32; 2 * HEADS * DIM];
                        run(first, position, false, &mut whole, DIM);
                        let length = stretch(position);
                        let (begin, count) = (first / length, position / length + 1 - first / length);
                        let mut parts = vec![vec![0.0f32; 2 * HEADS * (DIM + 2)]; count];
                        for (i, part) in parts.iter_mut().enumerate() {
                            let start = (begin + i) * length;
                            run(first.max(start), position.min(start + length - 1), true, part, DIM + 2);
                        }
                        for i in 0..2 * HEADS {
                            let mine: Vec<f32> = parts.iter().flat_map(|part| part[i * (DIM + 2)..][..DIM + 2].to_vec()).collect();
                            let mut y = vec![0.0f32; DIM];
                            // SAFETY: `count` parts, and room for a value.
                            unsafe { table.join(&Join { parts: mine.as_ptr(), count, value_dim: DIM, sink, y: y.as_mut_ptr() }) };
                            let bits = |y: &[f32]| y.iter().map(|y| y.to_bits()).collect::<Vec<_>>();
                            let what = format!("{} {dtype:?} {first}..={position}, query {i}", table.name());
                            assert!(y.iter().all(|y| y.is_finite()), "{what}");
                            assert_eq!(bits(&y), bits(&whole[i * DIM..][..DIM]), "{what}");
                        }
                    }
                }
            }
        }
    }
}
