//! Products of bfloat16 weights with activations rounded to bfloat16, by the dot instruction: two multiply-adds a lane at a time.
//!
//! Bound for many rows: the instruction's rate, twice that of f32 multiply-adds where this is used. For one: bytes / read bandwidth; a panel alone,
//! whose chain of sums takes a line every six cycles, keeps up with it, and is one stream. Each sum is one chain over ascending pairs of k,
//! whatever the tile.
#![allow(unsafe_code)] // Intrinsics, and raw loads over shapes that `Table::matmul` has checked.

use super::super::avx512::Avx512;
use super::super::table::PairFunctions;
use super::{Product, finish, pairs_f8, tile_rows};
use crate::backend::cpu::activations::Activations;
use crate::backend::cpu::pack::{LANES, Layout};
use std::arch::x86_64::*;
use std::mem::transmute;

pub(in super::super) const PAIRS: PairFunctions = PairFunctions { matmul: either, round };

/// The product with either kind of weights.
unsafe fn either(p: &Product<'_>) {
    // SAFETY: handed on.
    unsafe { if p.layout == Layout::F8 { pairs_f8::matmul(p) } else { matmul(p) } }
}

/// Rows and panels of the product, tile by tile.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")]
unsafe fn matmul(p: &Product<'_>) {
    let Activations::Pairs { x, stride } = p.acts else { return };
    let mut panel = p.panels.start;
    while panel < p.panels.end {
        let four = p.panels.end - panel >= 4 && !p.streams();
        let mut row = p.rows.start;
        while row < p.rows.end {
            let rows = tile_rows(p.rows.end - row, 6);
            macro_rules! tile {
                ($R:literal) => {
                    // SAFETY: the tile stays inside `p.panels` and `p.rows`, which were checked against the weights and `x`.
                    unsafe {
                        let x = x.as_ptr().add(row * stride);
                        if four { tile::<$R, 4>(p, panel, row, x, stride) } else { tile::<$R, 1>(p, panel, row, x, stride) }
                    }
                };
            }
            match rows {
                1 => tile!(1),
                2 => tile!(2),
                3 => tile!(3),
                4 => tile!(4),
                _ => tile!(6),
            }
            row += rows;
        }
        panel += if four { 4 } else { 1 };
    }
}

/// R rows by P panels; `x` is the first row.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")]
unsafe fn tile<const R: usize, const P: usize>(p: &Product<'_>, panel: usize, row: usize, x: *const u32, stride: usize) {
    let step = p.panel_bytes;
    // SAFETY: loads stay inside the panels and the rows of `x`; the outputs are the caller's promise.
    unsafe {
        let at = p.weights.add(panel * step);
        let mut acc = [[_mm512_setzero_ps(); P]; R];
        let mut w = [_mm512_setzero_si512(); P];
        for i in 0..p.cols.div_ceil(2) {
            unroll!(j < P { w[j] = _mm512_loadu_si512(at.add(j * step + i * 4 * LANES).cast()); });
            unroll!(r < R {
                let x = _mm512_set1_epi32(*x.add(r * stride + i) as i32);
                unroll!(j < P {
                    acc[r][j] = _mm512_dpbf16_ps(acc[r][j], transmute::<__m512i, __m512bh>(w[j]), transmute::<__m512i, __m512bh>(x));
                });
            });
        }
        unroll!(r < R {
            unroll!(j < P { finish::<Avx512>(p, panel + j, row + r, acc[r][j]); });
        });
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")]
unsafe fn round(x: &[f32], out: &mut [u32]) {
    let (chunks, rest) = x.as_chunks::<{ 2 * LANES }>();
    let (whole, last) = out.split_at_mut(chunks.len() * LANES);
    let one = |x: &[f32; 2 * LANES], out: &mut [u32; LANES]| {
        // SAFETY: both hold what is loaded and stored.
        unsafe {
            let both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(x.as_ptr().add(LANES)), _mm512_loadu_ps(x.as_ptr()));
            _mm512_storeu_si512(out.as_mut_ptr().cast(), transmute::<__m512bh, __m512i>(both));
        }
    };
    chunks.iter().zip(whole.as_chunks_mut::<LANES>().0).for_each(|(x, out)| one(x, out));
    if !rest.is_empty() {
        let (mut padded, mut words) = ([0.0; 2 * LANES], [0; LANES]);
        padded[..rest.len()].copy_from_slice(rest);
        one(&padded, &mut words);
        last.copy_from_slice(&words[..last.len()]);
    }
}
