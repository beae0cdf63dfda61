//! The lanes as one AVX-512 register; dot products by VNNI.
#![allow(unsafe_code)] // Intrinsics.

use super::attend::PAGE;
use super::avx2::halves_of_f8;
use super::lane::{Lanes, Registers, Tile};
use super::quantize::{self, MOST, Split, TINY};
use super::vector;
use crate::backend::cpu::activations::{Q8_BLOCK, Q8Block};
use std::arch::asm;
use std::arch::x86_64::*;

/// AVX-512 F, BW, VL, DQ and VNNI.
pub(super) struct Avx512;

/// SAFETY (of every block here): the caller has the instruction set, and its pointer is good for the bytes that the method's name
/// promises.
impl Lanes for Avx512 {
    type F = __m512;
    type I = __m512i;
    type W = __m512i;
    type N = __m512i;
    type T = __m512i;
    const REGISTERS: Registers = Registers::ThirtyTwo;
    const BIASED: bool = true;
    const FUSED: bool = true;

    unsafe fn call<T: Tile>(tile: T) {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
        unsafe fn inside<T: Tile>(tile: T) {
            // SAFETY: the features are enabled here; the rest is the caller's promise.
            unsafe { tile.run() }
        }
        // SAFETY: the caller has the instruction set.
        unsafe { inside(tile) }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        // SAFETY: see above.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F {
        // SAFETY: see above.
        unsafe { _mm512_loadu_ps(p) }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: Self::F) {
        // SAFETY: see above.
        unsafe { _mm512_storeu_ps(p, x) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: see above.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: see above.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // SAFETY: see above.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn fma_from(p: *const f32, at: usize, x: Self::F, c: Self::F) -> Self::F {
        // The compiler makes one register of the number for several uses.
        #[target_feature(enable = "avx512f")]
        #[inline]
        unsafe fn inside(p: *const f32, at: usize, x: __m512, mut c: __m512) -> __m512 {
            // SAFETY: reads `p[at]`, which the caller promises.
            unsafe {
                asm!("vfmadd231ps {c}, {x}, dword ptr [{p} + 4*{at}]{{1to16}}", c = inout(zmm_reg) c, x = in(zmm_reg) x, p = in(reg) p,
                    at = in(reg) at, options(pure, readonly, nostack, preserves_flags));
            }
            c
        }
        // SAFETY: see above.
        unsafe { inside(p, at, x, c) }
    }
    #[inline(always)]
    unsafe fn fnma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // SAFETY: see above.
        unsafe { _mm512_fnmadd_ps(a, b, c) }
    }
    #[inline(always)]
    unsafe fn load_bf16_low(p: *const u8) -> Self::F {
        // SAFETY: see above.
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_loadu_si512(p.cast()))) }
    }
    #[inline(always)]
    unsafe fn load_bf16_high(p: *const u8) -> Self::F {
        // SAFETY: see above.
        unsafe { _mm512_castsi512_ps(_mm512_and_si512(_mm512_loadu_si512(p.cast()), _mm512_set1_epi32(0xffff_0000u32 as i32))) }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self::F {
        // SAFETY: see above.
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(p.cast())))) }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self::F {
        // SAFETY: see above.
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())) }
    }
    #[inline(always)]
    unsafe fn load_f8(p: *const u8) -> (Self::F, Self::F) {
        // SAFETY: see above.
        unsafe {
            let (first, second) = halves_of_f8(_mm256_loadu_si256(p.cast()));
            (_mm512_cvtph_ps(first), _mm512_cvtph_ps(second))
        }
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u8, x: Self::F) {
        // SAFETY: see above.
        unsafe { _mm256_storeu_si256(p.cast(), _mm512_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x)) }
    }
    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: see above.
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    unsafe fn largest(x: Self::F) -> f32 {
        // SAFETY: see above.
        unsafe { _mm512_reduce_max_ps(x) }
    }
    #[inline(always)]
    unsafe fn exp_below(x: Self::F) -> Self::F {
        // SAFETY: see above.
        unsafe {
            // As `vector::exp_below`, bit for bit.
            let inside = _mm512_max_ps(_mm512_set1_ps(vector::LEAST), x);
            let magic = _mm512_set1_ps(vector::MAGIC);
            let n = _mm512_sub_ps(_mm512_fmadd_ps(inside, _mm512_set1_ps(std::f32::consts::LOG2_E), magic), magic);
            let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(vector::LN2_HIGH), inside);
            let r = _mm512_fnmadd_ps(n, _mm512_set1_ps(vector::LN2_LOW), r);
            let mut p = _mm512_set1_ps(vector::SERIES[0]);
            for c in &vector::SERIES[1..] {
                p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(*c));
            }
            let seen = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(vector::LEAST));
            _mm512_maskz_scalef_ps(seen, p, n)
        }
    }
    #[inline(always)]
    unsafe fn quantize(x: &[f32; Q8_BLOCK]) -> Q8Block {
        // SAFETY: see above; 32 elements, 32 codes.
        unsafe {
            let (low, high) = (_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x.as_ptr().add(16)));
            let magnitude = |x| _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7fff_ffff));
            let largest = f32::from_bits(_mm512_reduce_max_epi32(_mm512_max_epi32(magnitude(low), magnitude(high))) as u32);
            if !(largest.is_finite() && largest >= TINY) {
                return quantize::block(x);
            }
            let inverse = _mm512_set1_ps(127.0 / largest);
            let (low, high) = (_mm512_cvtps_epi32(_mm512_mul_ps(low, inverse)), _mm512_cvtps_epi32(_mm512_mul_ps(high, inverse)));
            let mut block = Q8Block::ZERO;
            _mm_storeu_si128(block.codes.as_mut_ptr().cast(), _mm512_cvtepi32_epi8(low));
            _mm_storeu_si128(block.codes.as_mut_ptr().add(16).cast(), _mm512_cvtepi32_epi8(high));
            block.with_sums(largest / 127.0, _mm512_reduce_add_epi32(low), _mm512_reduce_add_epi32(high))
        }
    }
    #[inline(always)]
    unsafe fn splat_i32(x: i32) -> Self::I {
        // SAFETY: see above.
        unsafe { _mm512_set1_epi32(x) }
    }
    #[inline(always)]
    unsafe fn to_float(x: Self::I) -> Self::F {
        // SAFETY: see above.
        unsafe { _mm512_cvtepi32_ps(x) }
    }
    #[inline(always)]
    unsafe fn load_weights(p: *const u8) -> Self::W {
        // SAFETY: see above.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> (Self::N, Self::N) {
        // SAFETY: see above.
        unsafe {
            let (bytes, mask) = (_mm512_loadu_si512(p.cast()), _mm512_set1_epi8(15));
            (_mm512_and_si512(bytes, mask), _mm512_and_si512(_mm512_srli_epi16::<4>(bytes), mask))
        }
    }
    #[inline(always)]
    unsafe fn load_table(table: &[i8; 16]) -> Self::T {
        let biased = table.map(|w| (w as u8) ^ 0x80);
        // SAFETY: see above; the array is 16 bytes.
        unsafe { _mm512_broadcast_i32x4(_mm_loadu_si128(biased.as_ptr().cast())) }
    }
    #[inline(always)]
    unsafe fn look_up(table: Self::T, codes: Self::N) -> Self::W {
        // SAFETY: see above.
        unsafe { _mm512_shuffle_epi8(table, codes) }
    }
    #[inline(always)]
    unsafe fn dot(acc: Self::I, w: Self::W, x: i32) -> Self::I {
        // SAFETY: see above.
        unsafe { _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(x)) }
    }
    #[inline(always)]
    unsafe fn dot_from(acc: Self::I, w: Self::W, p: *const i8, at: usize) -> Self::I {
        #[target_feature(enable = "avx512f,avx512vnni")]
        #[inline]
        unsafe fn inside(mut acc: __m512i, w: __m512i, p: *const i8, at: usize) -> __m512i {
            // SAFETY: reads four bytes, which the caller promises.
            unsafe {
                asm!("vpdpbusd {acc}, {w}, dword ptr [{p} + 4*{at}]{{1to16}}", acc = inout(zmm_reg) acc, w = in(zmm_reg) w, p = in(reg) p,
                    at = in(reg) at, options(pure, readonly, nostack, preserves_flags));
            }
            acc
        }
        // SAFETY: see above.
        unsafe { inside(acc, w, p, at) }
    }
    #[inline(always)]
    unsafe fn dot_nibbles(acc: Self::I, codes: Self::N, x: i32) -> Self::I {
        // SAFETY: see above.
        unsafe { Self::dot(acc, codes, x) }
    }
    #[inline(always)]
    unsafe fn split(x: &[f32; PAGE]) -> Split {
        // SAFETY: see above; 32 elements, 32 codes.
        unsafe {
            let (low, high) = (_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(x.as_ptr().add(16)));
            let largest = _mm512_max_epi32(_mm512_castps_si512(low), _mm512_castps_si512(high));
            let largest = f32::from_bits(_mm512_reduce_max_epi32(largest) as u32);
            if !(largest.is_finite() && largest >= TINY) {
                return quantize::split(x);
            }
            let mut split = Split::ZERO;
            split.gain = largest / MOST;
            let inverse = _mm512_set1_ps(MOST / largest);
            for (i, x) in [low, high].into_iter().enumerate() {
                let codes = _mm512_cvtps_epi32(_mm512_mul_ps(x, inverse));
                let low = _mm512_and_si512(codes, _mm512_set1_epi32(127));
                _mm_storeu_si128(split.high.as_mut_ptr().add(16 * i).cast(), _mm512_cvtepi32_epi8(_mm512_srli_epi32::<7>(codes)));
                _mm_storeu_si128(split.low.as_mut_ptr().add(16 * i).cast(), _mm512_cvtepi32_epi8(low));
            }
            split
        }
    }
    #[inline(always)]
    unsafe fn load_signed(p: *const u8) -> Self::N {
        // SAFETY: see above.
        unsafe { _mm512_loadu_si512(p.cast()) }
    }
    #[inline(always)]
    unsafe fn dot_signed(acc: Self::I, codes: Self::N, x: i32) -> Self::I {
        // SAFETY: see above.
        unsafe { _mm512_dpbusd_epi32(acc, _mm512_set1_epi32(x), codes) }
    }
    #[inline(always)]
    unsafe fn prefetch(p: *const u8) {
        // SAFETY: a prefetch may name any address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(p.cast()) }
    }
    #[inline(always)]
    unsafe fn prefetch_second(p: *const u8) {
        // SAFETY: a prefetch may name any address.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(p.cast()) }
    }
}
