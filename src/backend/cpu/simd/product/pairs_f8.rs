//! Products of 8-bit floats with activations rounded to bfloat16. Every such weight is a bfloat16, so a table turns two codes into the pair that the
//! dot instruction takes.
//!
//! Few rows are bound by that turning (five shuffles for 64 bytes), many by the dot instruction: a run of four panels is turned once, into the
//! first cache, and meets all rows there. Each run's sum is one chain over ascending pairs, scaled at its end; the scaled sums are another.
#![allow(unsafe_code)] // Intrinsics, and raw loads over shapes that `Table::matmul` has checked.

use super::super::avx512::Avx512;
use super::{Product, finish, tile_rows};
use crate::backend::cpu::activations::Activations;
use crate::backend::cpu::pack::{F8_RUN, LANES};
use std::arch::x86_64::*;
use std::mem::{MaybeUninit, transmute};

/// Rows up to which weights are turned for each tile of them.
const FEW: usize = 3;
/// Rows whose sums are kept between the runs.
const MANY: usize = 96;
/// Panels that are taken together.
const PANELS: usize = 4;
/// Pairs in a run.
const PAIRS: usize = F8_RUN / 2;

/// The bfloat16 of each magnitude: low bytes, then high bytes.
static TURNED: [[u8; 128]; 2] = {
    let mut bytes = [[0; 128]; 2];
    let mut code = 0;
    while code < 128 {
        let (exponent, mantissa) = (code >> 3, code & 7);
        let bits: u16 = if exponent > 0 {
            ((exponent + 120) << 7 | mantissa << 4) as u16
        } else if mantissa > 0 {
            // `mantissa * 2^-9`: the first bit becomes the implied one.
            let first = (mantissa as u32).ilog2();
            ((127 - 9 + first) << 7 | (mantissa as u32 - (1 << first)) << (7 - first)) as u16
        } else {
            0
        };
        (bytes[0][code], bytes[1][code]) = (bits as u8, (bits >> 8) as u8);
        code += 1;
    }
    bytes
};

/// The table in registers.
#[derive(Clone, Copy)]
struct Turn {
    low: [__m512i; 2],
    high: [__m512i; 2],
    quads: __m512i,
    sign: __m512i,
}

impl Turn {
    #[inline(always)]
    unsafe fn new() -> Turn {
        // SAFETY: the caller has AVX-512 VBMI; each table is two registers long.
        unsafe {
            let load = |bytes: &[u8; 128]| [_mm512_loadu_si512(bytes.as_ptr().cast()), _mm512_loadu_si512(bytes.as_ptr().add(64).cast())];
            Turn {
                low: load(&TURNED[0]),
                high: load(&TURNED[1]),
                quads: _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7),
                sign: _mm512_set1_epi8(-128),
            }
        }
    }

    /// Twice 16 pairs of codes as pairs of bfloat16.
    #[inline(always)]
    unsafe fn load(&self, at: *const u8) -> (__m512i, __m512i) {
        // SAFETY: the caller has AVX-512 VBMI, and `at` is good for 64 bytes.
        unsafe {
            // In each quarter four lanes of the first pair, then those of the second.
            let codes = _mm512_permutexvar_epi64(self.quads, _mm512_loadu_si512(at.cast()));
            // Tables are entered by the seven low bits.
            let low = _mm512_permutex2var_epi8(self.low[0], codes, self.low[1]);
            let high = _mm512_permutex2var_epi8(self.high[0], codes, self.high[1]);
            // high | codes & sign
            let high = _mm512_ternarylogic_epi32::<0xf8>(high, codes, self.sign);
            (_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high))
        }
    }
}

/// Rows and panels of the product, tile by tile.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx512vbmi,avx2,fma,f16c")]
pub(super) unsafe fn matmul(p: &Product<'_>) {
    let Activations::Pairs { x, stride } = p.acts else { return };
    let mut panel = p.panels.start;
    while panel < p.panels.end {
        let four = p.panels.end - panel >= PANELS;
        // SAFETY: the panels and rows were checked against the weights and `x`.
        unsafe {
            if p.rows.len() > FEW {
                for first in p.rows.clone().step_by(MANY) {
                    let rows = MANY.min(p.rows.end - first);
                    let x = x.as_ptr().add(first * stride);
                    if four { block::<PANELS>(p, panel, first, rows, x, stride) } else { block::<1>(p, panel, first, rows, x, stride) }
                }
            } else {
                let (row, x) = (p.rows.start, x.as_ptr().add(p.rows.start * stride));
                match (p.rows.len(), four) {
                    (1, true) => few::<1, PANELS>(p, panel, row, x, stride),
                    (1, false) => few::<1, 1>(p, panel, row, x, stride),
                    (2, true) => few::<2, PANELS>(p, panel, row, x, stride),
                    (2, false) => few::<2, 1>(p, panel, row, x, stride),
                    (_, true) => few::<3, PANELS>(p, panel, row, x, stride),
                    (_, false) => few::<3, 1>(p, panel, row, x, stride),
                }
            }
        }
        panel += if four { PANELS } else { 1 };
    }
}

#[inline(always)]
unsafe fn dot(acc: __m512, w: __m512i, x: *const u32) -> __m512 {
    // SAFETY: the caller has AVX-512 BF16, and `x` is good for a pair.
    unsafe { _mm512_dpbf16_ps(acc, transmute::<__m512i, __m512bh>(w), transmute::<__m512i, __m512bh>(_mm512_set1_epi32(*x as i32))) }
}

/// R rows by P panels, straight from the codes; `x` is the first row.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx512vbmi,avx2,fma,f16c")]
unsafe fn few<const R: usize, const P: usize>(p: &Product<'_>, panel: usize, row: usize, x: *const u32, stride: usize) {
    let step = p.panel_bytes;
    // SAFETY: loads stay inside the panels and the rows of `x`; the outputs are the caller's promise.
    unsafe {
        let turn = Turn::new();
        let mut scales = p.weights.add(panel * step);
        let mut at = scales.add(p.cols.div_ceil(F8_RUN) * 4 * LANES);
        let mut total = [[_mm512_setzero_ps(); P]; R];
        for first in (0..p.cols).step_by(F8_RUN) {
            let x = x.add(first / 2);
            let mut acc = [[_mm512_setzero_ps(); P]; R];
            // Columns come in 32s.
            for i in (0..(p.cols - first).min(F8_RUN) / 2).step_by(2) {
                unroll!(j < P {
                    let (even, odd) = turn.load(at.add(j * step));
                    unroll!(r < R { acc[r][j] = dot(acc[r][j], even, x.add(r * stride + i)); });
                    unroll!(r < R { acc[r][j] = dot(acc[r][j], odd, x.add(r * stride + i + 1)); });
                });
                at = at.add(4 * LANES);
            }
            unroll!(j < P {
                let scale = _mm512_loadu_ps(scales.add(j * step).cast());
                unroll!(r < R { total[r][j] = _mm512_fmadd_ps(acc[r][j], scale, total[r][j]); });
            });
            scales = scales.add(4 * LANES);
        }
        unroll!(r < R {
            unroll!(j < P { finish::<Avx512>(p, panel + j, row + r, total[r][j]); });
        });
    }
}

/// Up to [`MANY`] rows by P panels, run by run; `x` is the first row.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx512vbmi,avx2,fma,f16c")]
unsafe fn block<const P: usize>(p: &Product<'_>, panel: usize, row: usize, rows: usize, x: *const u32, stride: usize) {
    let step = p.panel_bytes;
    let mut turned = [[MaybeUninit::<__m512i>::uninit(); P]; PAIRS];
    let mut totals = [[MaybeUninit::<__m512>::uninit(); P]; MANY];
    // SAFETY: loads stay inside the panels and the rows of `x`, and what is read of the two buffers was written; the outputs are the caller's promise.
    unsafe {
        let turn = Turn::new();
        totals[..rows].iter_mut().for_each(|total| *total = [MaybeUninit::new(_mm512_setzero_ps()); P]);
        let mut scales = p.weights.add(panel * step);
        let mut at = scales.add(p.cols.div_ceil(F8_RUN) * 4 * LANES);
        for first in (0..p.cols).step_by(F8_RUN) {
            let pairs = (p.cols - first).min(F8_RUN) / 2;
            // Columns come in 32s.
            for turned in turned[..pairs].chunks_exact_mut(2) {
                unroll!(j < P {
                    let (first, second) = turn.load(at.add(j * step));
                    (turned[0][j], turned[1][j]) = (MaybeUninit::new(first), MaybeUninit::new(second));
                });
                at = at.add(4 * LANES);
            }
            let mut scale = [_mm512_setzero_ps(); P];
            unroll!(j < P { scale[j] = _mm512_loadu_ps(scales.add(j * step).cast()); });
            scales = scales.add(4 * LANES);
            let mut r = 0;
            while r < rows {
                let x = x.add(r * stride + first / 2);
                let (turned, totals) = (turned.as_ptr().cast(), totals.as_mut_ptr().add(r).cast());
                let count = tile_rows(rows - r, 6);
                match count {
                    1 => tile::<1, P>(turned, pairs, x, stride, &scale, totals),
                    2 => tile::<2, P>(turned, pairs, x, stride, &scale, totals),
                    3 => tile::<3, P>(turned, pairs, x, stride, &scale, totals),
                    4 => tile::<4, P>(turned, pairs, x, stride, &scale, totals),
                    _ => tile::<6, P>(turned, pairs, x, stride, &scale, totals),
                }
                r += count;
            }
        }
        for (r, total) in totals[..rows].iter().enumerate() {
            unroll!(j < P { finish::<Avx512>(p, panel + j, row + r, total[j].assume_init()); });
        }
    }
}

/// Adds a run's scaled sums of R rows by P panels to `totals`.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx512vbmi,avx2,fma,f16c")]
unsafe fn tile<const R: usize, const P: usize>(
    turned: *const [__m512i; P],
    pairs: usize,
    x: *const u32,
    stride: usize,
    scale: &[__m512; P],
    totals: *mut [__m512; P],
) {
    // SAFETY: `turned` holds as many pairs, `x` R rows of them, and `totals` R rows.
    unsafe {
        let mut acc = [[_mm512_setzero_ps(); P]; R];
        let mut w = [_mm512_setzero_si512(); P];
        for i in 0..pairs {
            unroll!(j < P { w[j] = (*turned.add(i))[j]; });
            unroll!(r < R {
                let x = x.add(r * stride + i);
                unroll!(j < P { acc[r][j] = dot(acc[r][j], w[j], x); });
            });
        }
        unroll!(r < R {
            unroll!(j < P { (*totals.add(r))[j] = _mm512_fmadd_ps(acc[r][j], scale[j], (*totals.add(r))[j]); });
        });
    }
}
