//! Products of integer weights with several rows on processors without AVX-512: four rows by one panel, whose sums and weights fit sixteen
//! registers of eight lanes.
//!
//! Bound: the two ports that multiply small integers. 8-bit weights and activations are widened to 16 bits, where `vpmaddwd` adds exactly: two
//! multiplications and two additions for 32 products, the same rate as by `vpmaddubsw` without the sign that each product would have to move. 4-bit
//! codes take `vpmaddubsw`: the 32 products of a block are at most 15 * 127, and 16 bits hold the sum of all that fall into a lane, so
//! that a block is widened once. Sums are exact and are scaled as in `integers.rs`: the same bits.
#![allow(unsafe_code)] // Intrinsics, and raw loads over shapes that `Table::matmul` has checked.

use super::super::avx2::Avx2;
use super::super::lane::Lanes;
use super::integers::{I4, I8, TABLE};
use super::{Product, finish, product};
use crate::backend::cpu::activations::{Activations, Q8Block};
use crate::backend::cpu::pack::{GAINS, LANES, Layout, SUPER};
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

/// Rows of a tile; what is left over, and fewer rows, take the tiles of `integers.rs`.
const ROWS: usize = 4;
/// Blocks whose widened activations are kept while panels pass: 16 KiB for a tile's rows.
const STRIP: usize = 64;
/// 32-bit words of a block's widened activations.
const WORDS: usize = 16;
/// Groups of four k's in a block.
const GROUPS: usize = 8;
/// Bytes ahead that memory is asked for weights.
const AHEAD: usize = 4096;

type Sums<const R: usize> = [[__m256i; 2]; R];

/// Any product; the ones of integers and several rows are made here.
pub(in super::super) unsafe fn matmul(p: &Product<'_>) {
    // SAFETY: handed on.
    unsafe {
        let Activations::Q8 { blocks, stride } = p.acts else { return product::<Avx2>(p) };
        let many = p.rows.start..p.rows.start + p.rows.len() / ROWS * ROWS;
        if !many.is_empty() {
            let (p, x, t) = (&p.with_rows(many.clone()), blocks.as_ptr(), &[0; 16]);
            match p.layout {
                Layout::I8 { block: 32, min: false } => tiles::<ROWS, I8, false, false>(p, x, stride, t),
                Layout::I8 { block: 32, min: true } => tiles::<ROWS, I8, false, true>(p, x, stride, t),
                Layout::I8 { min: false, .. } => tiles::<ROWS, I8, true, false>(p, x, stride, t),
                Layout::I8 { min: true, .. } => tiles::<ROWS, I8, true, true>(p, x, stride, t),
                Layout::I4 { block: 32, min: false } => tiles::<ROWS, I4, false, false>(p, x, stride, t),
                Layout::I4 { block: 32, min: true } => tiles::<ROWS, I4, false, true>(p, x, stride, t),
                Layout::I4 { min: false, .. } => tiles::<ROWS, I4, true, false>(p, x, stride, t),
                Layout::I4 { min: true, .. } => tiles::<ROWS, I4, true, true>(p, x, stride, t),
                Layout::I4Table { block: 32, ref table } => tiles::<ROWS, TABLE, false, false>(p, x, stride, table),
                Layout::I4Table { ref table, .. } => tiles::<ROWS, TABLE, true, false>(p, x, stride, table),
                Layout::F32 | Layout::Bf16 | Layout::F16 | Layout::F8 => {}
            }
        }
        if many.end < p.rows.end {
            product::<Avx2>(&p.with_rows(many.end..p.rows.end));
        }
    }
}

/// Rows, panels and strips of columns, tile by tile. `x` is row 0; rows come in whole tiles.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn tiles<const R: usize, const KIND: u8, const HALF: bool, const MIN: bool>(
    p: &Product<'_>,
    x: *const Q8Block,
    stride: usize,
    table: &[i8; 16],
) {
    let mut words = [MaybeUninit::<__m256i>::uninit(); ROWS * STRIP * WORDS / 8];
    let blocks = p.cols / 32;
    for row in p.rows.clone().step_by(R) {
        let mut widened = usize::MAX;
        for panel in p.panels.clone() {
            // SAFETY: blocks below `cols / 32` of rows that exist; the panel's bytes; the outputs are the caller's promise.
            unsafe {
                let x = x.add(row * stride);
                let base = p.weights.add(panel * p.panel_bytes);
                let mut acc = [Avx2::splat(0.0); R];
                for first in (0..blocks).step_by(STRIP) {
                    let count = STRIP.min(blocks - first);
                    if KIND != I4 && widened != first {
                        widen::<R>(x.add(first), stride, count, words.as_mut_ptr().cast());
                        widened = first;
                    }
                    let asks = KIND == I4 || row == p.rows.start;
                    let strip = Strip { x, stride, words: words.as_ptr().cast(), first, count, asks };
                    accumulate::<R, KIND, HALF, MIN>(base, &strip, table, &mut acc);
                }
                let gain = Avx2::load(base.cast());
                unroll!(r < R { finish::<Avx2>(p, panel, row + r, Avx2::mul(acc[r], gain)); });
            }
        }
    }
}

/// Activations of a tile's rows: `count` blocks from `first` on.
struct Strip {
    /// First block of the tile's first row.
    x: *const Q8Block,
    stride: usize,
    /// `[count][R][2][8]` words, as [`widen`] makes them; none for 4-bit codes.
    words: *const i32,
    first: usize,
    count: usize,
    /// Whether memory is asked for weights ahead. Later rows of 8-bit codes find them in the second cache.
    asks: bool,
}

/// Widens the codes of `count` blocks: for each row the elements 0 and 2 of its eight groups of four, then 1 and 3, two to a word.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn widen<const R: usize>(x: *const Q8Block, stride: usize, count: usize, words: *mut __m256i) {
    for block in 0..count {
        for r in 0..R {
            // SAFETY: the caller's promise: R rows of blocks, and as many words.
            unsafe {
                let codes = _mm256_loadu_si256((*x.add(r * stride + block)).codes.as_ptr().cast());
                let to = words.add((block * R + r) * 2);
                _mm256_storeu_si256(to, _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(codes)));
                _mm256_storeu_si256(to.add(1), _mm256_srai_epi16::<8>(codes));
            }
        }
    }
}

/// Adds the strip's blocks to `acc`, in ascending order.
#[target_feature(enable = "avx2,fma,f16c")]
unsafe fn accumulate<const R: usize, const KIND: u8, const HALF: bool, const MIN: bool>(
    base: *const u8,
    strip: &Strip,
    table: &[i8; 16],
    acc: &mut [[__m256; 2]; R],
) {
    // Bytes of codes and of scales in a stretch of 64 k's; minimums take as many as scales.
    let codes = if KIND == I8 { SUPER * LANES } else { SUPER * LANES / 2 };
    let scales = SUPER / if HALF { 16 } else { 32 } * LANES * 2;
    let stretch = codes + scales * if MIN { 2 } else { 1 };
    let parts = if HALF { 2 } else { 1 };
    // Else the compiler writes out the loop over groups, and unpacks all weights before it, onto the stack.
    let groups = std::hint::black_box(GROUPS / parts);
    // Biased, so that weights are unsigned as the stored ones are.
    let biased = table.map(|w| (w as u8) ^ 0x80);
    // SAFETY: loads stay inside the panel and the rows of `x`: block `b < cols / 32` has its codes and scales in stretch `b / 2`.
    unsafe {
        let table = _mm256_broadcastsi128_si256(_mm_loadu_si128(biased.as_ptr().cast()));
        for b in 0..strip.count {
            let at = strip.first + b;
            let start = base.add(GAINS + at / 2 * stretch);
            let scale = start.add(at % 2 * (scales / 2));
            let code = start.add(stretch - codes + at % 2 * (codes / 2));
            if strip.asks {
                for line in (0..codes / 2).step_by(64) {
                    Avx2::prefetch(code.wrapping_add(AHEAD + line));
                }
            }
            let x = strip.x.add(at);
            let words = strip.words.add(b * R * WORDS);
            for part in 0..parts {
                let code = code.add(part * (codes / 4));
                let sums = if KIND == I4 {
                    nibbles::<R, HALF, MIN>(code, x, strip.stride, part, groups)
                } else {
                    wide::<R, KIND, HALF>(code, x, strip.stride, words.add(part * groups), part, groups, table)
                };
                let scale = scale.add(part * 2 * LANES);
                let w = Avx2::load_f16(scale);
                unroll!(r < R {
                    let x = Avx2::splat((*x.add(r * strip.stride)).scale);
                    acc[r] = Avx2::fma(Avx2::to_float(sums[r]), Avx2::mul(w, x), acc[r]);
                });
                if MIN {
                    let m = Avx2::load_f16(scale.add(scales));
                    unroll!(r < R {
                        let x = &*x.add(r * strip.stride);
                        let sum = if HALF { x.half_sum[part] } else { x.sum };
                        acc[r] = Avx2::fnma(m, Avx2::splat(sum), acc[r]);
                    });
                }
            }
        }
    }
}

/// Sums of 8-bit weights times widened activations, over a block or half of one.
#[inline(always)]
unsafe fn wide<const R: usize, const KIND: u8, const HALF: bool>(
    code: *const u8,
    x: *const Q8Block,
    stride: usize,
    words: *const i32,
    part: usize,
    groups: usize,
    table: __m256i,
) -> Sums<R> {
    // SAFETY: the caller has AVX2, and made the words of R rows; `code` is good for the groups.
    unsafe {
        let mut sums = [[_mm256_setzero_si256(); 2]; R];
        unroll!(r < R {
            let x = &*x.add(r * stride);
            sums[r] = [_mm256_set1_epi32(if HALF { x.half_offset[part] } else { x.offset }); 2];
        });
        if KIND == I8 {
            for g in 0..groups {
                let at = code.add(g * 64).cast();
                sums = group(sums, [_mm256_loadu_si256(at), _mm256_loadu_si256(at.add(1))], words.add(g));
            }
        } else {
            let mask = _mm256_set1_epi8(15);
            for q in 0..groups / 2 {
                let at = code.add(q * 64).cast();
                let (a, b) = (_mm256_loadu_si256(at), _mm256_loadu_si256(at.add(1)));
                let low = [_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)];
                sums = group(sums, [_mm256_shuffle_epi8(table, low[0]), _mm256_shuffle_epi8(table, low[1])], words.add(2 * q));
                let high = [_mm256_and_si256(_mm256_srli_epi16::<4>(a), mask), _mm256_and_si256(_mm256_srli_epi16::<4>(b), mask)];
                sums = group(sums, [_mm256_shuffle_epi8(table, high[0]), _mm256_shuffle_epi8(table, high[1])], words.add(2 * q + 1));
            }
        }
        sums
    }
}

/// Adds a group of four k's of unsigned weights.
#[inline(always)]
unsafe fn group<const R: usize>(mut sums: Sums<R>, w: [__m256i; 2], words: *const i32) -> Sums<R> {
    // SAFETY: the caller has AVX2, and words of R rows.
    unsafe {
        let low = _mm256_set1_epi16(0xff);
        let even = [_mm256_and_si256(w[0], low), _mm256_and_si256(w[1], low)];
        let odd = [_mm256_srli_epi16::<8>(w[0]), _mm256_srli_epi16::<8>(w[1])];
        unroll!(r < R {
            let x = _mm256_set1_epi32(*words.add(r * WORDS));
            sums[r][0] = _mm256_add_epi32(sums[r][0], _mm256_madd_epi16(even[0], x));
            sums[r][1] = _mm256_add_epi32(sums[r][1], _mm256_madd_epi16(even[1], x));
        });
        unroll!(r < R {
            let x = _mm256_set1_epi32(*words.add(r * WORDS + GROUPS));
            sums[r][0] = _mm256_add_epi32(sums[r][0], _mm256_madd_epi16(odd[0], x));
            sums[r][1] = _mm256_add_epi32(sums[r][1], _mm256_madd_epi16(odd[1], x));
        });
        sums
    }
}

/// Sums of 4-bit codes times activations, over a block or half of one.
#[inline(always)]
unsafe fn nibbles<const R: usize, const HALF: bool, const MIN: bool>(
    code: *const u8,
    x: *const Q8Block,
    stride: usize,
    part: usize,
    groups: usize,
) -> Sums<R> {
    // SAFETY: the caller has AVX2; `code` is good for the groups, `x` for a block in each of R rows.
    unsafe {
        let mask = _mm256_set1_epi8(15);
        let mut sums = [[_mm256_setzero_si256(); 2]; R];
        for q in 0..groups / 2 {
            let at = code.add(q * 64).cast();
            let (a, b) = (_mm256_loadu_si256(at), _mm256_loadu_si256(at.add(1)));
            let low = [_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)];
            let high = [_mm256_and_si256(_mm256_srli_epi16::<4>(a), mask), _mm256_and_si256(_mm256_srli_epi16::<4>(b), mask)];
            let x = x.cast::<i8>().add(part * 16 + q * 8);
            macro_rules! add {
                ($w:expr, $k:expr) => {
                    unroll!(r < R {
                        let x = _mm256_set1_epi32(x.add(r * stride * size_of::<Q8Block>() + $k).cast::<i32>().read_unaligned());
                        sums[r][0] = _mm256_add_epi16(sums[r][0], _mm256_maddubs_epi16($w[0], x));
                        sums[r][1] = _mm256_add_epi16(sums[r][1], _mm256_maddubs_epi16($w[1], x));
                    });
                };
            }
            add!(low, 0);
            add!(high, 4);
        }
        let ones = _mm256_set1_epi16(1);
        unroll!(r < R {
            let x = &*x.add(r * stride);
            let start = _mm256_set1_epi32(match (MIN, HALF) {
                // Unsigned codes need no correction.
                (true, _) => 0,
                (_, true) => x.half_offset[part] >> 4,
                _ => x.offset_nibble,
            });
            sums[r] = [
                _mm256_add_epi32(start, _mm256_madd_epi16(sums[r][0], ones)),
                _mm256_add_epi32(start, _mm256_madd_epi16(sums[r][1], ones)),
            ];
        });
        sums
    }
}
