//! The lanes as two AVX registers, for processors without AVX-512.
//!
//! `vpmaddubsw` adds two products in 16 bits and saturates there, so 8-bit weights are taken as magnitude, with the sign moved
//! to the activation: 128 * 127 * 2 still fits. 4-bit codes fit as they are.
#![allow(unsafe_code)] // Intrinsics.

use super::super::activations::{Q8_BLOCK, Q8Block};
use super::attend::PAGE;
use super::lane::{Lanes, Registers, Tile};
use super::quantize::{self, MOST, Split, TINY};
use super::vector;
use std::arch::x86_64::*;

/// AVX2, FMA and F16C.
pub(super) struct Avx2;

/// Signed weights and their magnitudes.
#[derive(Clone, Copy)]
pub(super) struct Weights {
    signed: [__m256i; 2],
    magnitude: [__m256i; 2],
}

impl Avx2 {
    /// # Safety
    /// Needs AVX2.
    #[inline(always)]
    unsafe fn weights(signed: [__m256i; 2]) -> Weights {
        // SAFETY: the caller has AVX2.
        unsafe { Weights { signed, magnitude: [_mm256_abs_epi8(signed[0]), _mm256_abs_epi8(signed[1])] } }
    }

    /// As `vector::exp_below`, bit for bit.
    ///
    /// # Safety
    /// Needs AVX2 and FMA.
    #[inline(always)]
    unsafe fn exp_half(x: __m256) -> __m256 {
        // SAFETY: the caller has both.
        unsafe {
            let least = _mm256_set1_ps(vector::LEAST);
            let magic = _mm256_set1_ps(vector::MAGIC);
            // What is not a number stays one.
            let inside = _mm256_max_ps(least, x);
            let shifted = _mm256_fmadd_ps(inside, _mm256_set1_ps(std::f32::consts::LOG2_E), magic);
            let n = _mm256_sub_ps(shifted, magic);
            let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(vector::LN2_HIGH), inside);
            let r = _mm256_fnmadd_ps(n, _mm256_set1_ps(vector::LN2_LOW), r);
            let mut p = _mm256_set1_ps(vector::SERIES[0]);
            for c in &vector::SERIES[1..] {
                p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(*c));
            }
            // The integer stands in the low bits of `shifted`, and leaves those of `magic` behind when it moves to the exponent.
            let power = _mm256_slli_epi32::<23>(_mm256_add_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(127)));
            let value = _mm256_mul_ps(p, _mm256_castsi256_ps(power));
            _mm256_andnot_ps(_mm256_cmp_ps::<_CMP_LT_OQ>(x, least), value)
        }
    }

    /// # Safety
    /// Needs AVX2.
    #[inline(always)]
    unsafe fn quarters(x: &[f32; 32]) -> [__m256; 4] {
        let p = x.as_ptr();
        // SAFETY: the caller has AVX2; 32 elements.
        unsafe { [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8)), _mm256_loadu_ps(p.add(16)), _mm256_loadu_ps(p.add(24))] }
    }

    /// The largest magnitude; NaN if there is one, since without the sign floats order like their bits.
    ///
    /// # Safety
    /// Needs AVX2.
    #[inline(always)]
    unsafe fn largest_magnitude(x: &[__m256; 4]) -> f32 {
        // SAFETY: the caller has AVX2.
        unsafe {
            let mask = _mm256_set1_epi32(0x7fff_ffff);
            let mut m = _mm256_and_si256(_mm256_castps_si256(x[0]), mask);
            for x in &x[1..] {
                m = _mm256_max_epi32(m, _mm256_and_si256(_mm256_castps_si256(*x), mask));
            }
            let m = _mm_max_epi32(_mm256_castsi256_si128(m), _mm256_extracti128_si256::<1>(m));
            let m = _mm_max_epi32(m, _mm_shuffle_epi32::<0b01_00_11_10>(m));
            f32::from_bits(_mm_cvtsi128_si32(_mm_max_epi32(m, _mm_shuffle_epi32::<0b10_11_00_01>(m))) as u32)
        }
    }

    /// The nearest integers to `x * factor`.
    ///
    /// # Safety
    /// Needs AVX2.
    #[inline(always)]
    unsafe fn nearest(x: &[__m256; 4], factor: f32) -> [__m256i; 4] {
        // SAFETY: the caller has AVX2.
        unsafe {
            let factor = _mm256_set1_ps(factor);
            let mut codes = [_mm256_setzero_si256(); 4];
            for i in 0..4 {
                codes[i] = _mm256_cvtps_epi32(_mm256_mul_ps(x[i], factor));
            }
            codes
        }
    }

    /// The low bytes of 32 integers that fit one, in order.
    ///
    /// # Safety
    /// Needs AVX2.
    #[inline(always)]
    unsafe fn bytes(x: &[__m256i; 4]) -> __m256i {
        // SAFETY: the caller has AVX2.
        unsafe {
            // Packing works on halves of registers, so quarters come out of order.
            let packed = _mm256_packs_epi16(_mm256_packs_epi32(x[0], x[1]), _mm256_packs_epi32(x[2], x[3]));
            _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7))
        }
    }

    /// # Safety
    /// Needs AVX2.
    #[inline(always)]
    unsafe fn sum(x: __m256i) -> i32 {
        // SAFETY: the caller has AVX2.
        unsafe {
            let s = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x));
            let s = _mm_add_epi32(s, _mm_shuffle_epi32::<0b01_00_11_10>(s));
            _mm_cvtsi128_si32(_mm_add_epi32(s, _mm_shuffle_epi32::<0b10_11_00_01>(s)))
        }
    }

    /// `acc + the sums of four` of unsigned times signed bytes, where neighbours do not saturate.
    ///
    /// # Safety
    /// Needs AVX2.
    #[inline(always)]
    unsafe fn dot_bytes(acc: __m256i, unsigned: __m256i, signed: __m256i) -> __m256i {
        // SAFETY: the caller has AVX2.
        unsafe { _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(unsigned, signed), _mm256_set1_epi16(1))) }
    }
}

/// Pairs of 8-bit floats as half floats of the same fields, so divided by 2^8: the first of each, the second. The conversion from half floats
/// keeps what is subnormal, whatever the thread does with such numbers.
///
/// # Safety
/// Needs AVX2.
#[inline(always)]
pub(super) unsafe fn halves_of_f8(pairs: __m256i) -> (__m256i, __m256i) {
    // SAFETY: the caller has AVX2.
    unsafe {
        // A shift copies the sign beside itself, where the exponent's first bit is to be 0.
        let fields = _mm256_set1_epi16(0xbf80u16 as i16);
        let second = _mm256_and_si256(_mm256_srai_epi16::<1>(pairs), fields);
        (_mm256_and_si256(_mm256_srai_epi16::<1>(_mm256_slli_epi16::<8>(pairs)), fields), second)
    }
}

/// SAFETY (of every block here): the caller has the instruction set, and its pointer is good for the bytes that the method's name
/// promises, so also for its second half.
impl Lanes for Avx2 {
    type F = [__m256; 2];
    type I = [__m256i; 2];
    type W = Weights;
    type N = [__m256i; 2];
    type T = __m256i;
    const REGISTERS: Registers = Registers::Sixteen;
    const BIASED: bool = false;
    const FUSED: bool = true;

    unsafe fn call<T: Tile>(tile: T) {
        #[target_feature(enable = "avx2,fma,f16c")]
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
        unsafe { [_mm256_set1_ps(x); 2] }
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F {
        // SAFETY: see above.
        unsafe { [_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))] }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: Self::F) {
        // SAFETY: see above.
        unsafe {
            _mm256_storeu_ps(p, x[0]);
            _mm256_storeu_ps(p.add(8), x[1]);
        }
    }
    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: see above.
        unsafe { [_mm256_add_ps(a[0], b[0]), _mm256_add_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: see above.
        unsafe { [_mm256_mul_ps(a[0], b[0]), _mm256_mul_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // SAFETY: see above.
        unsafe { [_mm256_fmadd_ps(a[0], b[0], c[0]), _mm256_fmadd_ps(a[1], b[1], c[1])] }
    }
    #[inline(always)]
    unsafe fn fnma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // SAFETY: see above.
        unsafe { [_mm256_fnmadd_ps(a[0], b[0], c[0]), _mm256_fnmadd_ps(a[1], b[1], c[1])] }
    }
    #[inline(always)]
    unsafe fn load_bf16_low(p: *const u8) -> Self::F {
        // SAFETY: see above.
        unsafe {
            let half = |p: *const u8| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_loadu_si256(p.cast())));
            [half(p), half(p.add(32))]
        }
    }
    #[inline(always)]
    unsafe fn load_bf16_high(p: *const u8) -> Self::F {
        // SAFETY: see above.
        unsafe {
            let mask = _mm256_set1_epi32(0xffff_0000u32 as i32);
            let half = |p: *const u8| _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(p.cast()), mask));
            [half(p), half(p.add(32))]
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self::F {
        // SAFETY: see above.
        unsafe {
            let half = |p: *const u8| _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(_mm_loadu_si128(p.cast()))));
            [half(p), half(p.add(16))]
        }
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self::F {
        // SAFETY: see above.
        unsafe { [_mm256_cvtph_ps(_mm_loadu_si128(p.cast())), _mm256_cvtph_ps(_mm_loadu_si128(p.add(16).cast()))] }
    }
    #[inline(always)]
    unsafe fn load_f8(p: *const u8) -> (Self::F, Self::F) {
        // SAFETY: see above.
        unsafe {
            let (first, second) = halves_of_f8(_mm256_loadu_si256(p.cast()));
            let wide = |h| [_mm256_cvtph_ps(_mm256_castsi256_si128(h)), _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(h))];
            (wide(first), wide(second))
        }
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u8, x: Self::F) {
        // SAFETY: see above.
        unsafe {
            _mm_storeu_si128(p.cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x[0]));
            _mm_storeu_si128(p.add(16).cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x[1]));
        }
    }
    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: see above.
        unsafe { [_mm256_max_ps(a[0], b[0]), _mm256_max_ps(a[1], b[1])] }
    }
    #[inline(always)]
    unsafe fn largest(x: Self::F) -> f32 {
        // SAFETY: see above.
        unsafe {
            let m = _mm256_max_ps(x[1], x[0]);
            let m = _mm_max_ps(_mm256_extractf128_ps::<1>(m), _mm256_castps256_ps128(m));
            let m = _mm_max_ps(_mm_movehl_ps(m, m), m);
            _mm_cvtss_f32(_mm_max_ss(_mm_movehdup_ps(m), m))
        }
    }
    #[inline(always)]
    unsafe fn exp_below(x: Self::F) -> Self::F {
        // SAFETY: see above.
        unsafe { [Self::exp_half(x[0]), Self::exp_half(x[1])] }
    }
    #[inline(always)]
    unsafe fn quantize(x: &[f32; Q8_BLOCK]) -> Q8Block {
        // SAFETY: see above; 32 elements, 32 codes.
        unsafe {
            let v = Self::quarters(x);
            let largest = Self::largest_magnitude(&v);
            if !(largest.is_finite() && largest >= TINY) {
                return quantize::block(x);
            }
            let codes = Self::nearest(&v, 127.0 / largest);
            let mut block = Q8Block::ZERO;
            _mm256_storeu_si256(block.codes.as_mut_ptr().cast(), Self::bytes(&codes));
            let low = Self::sum(_mm256_add_epi32(codes[0], codes[1]));
            let high = Self::sum(_mm256_add_epi32(codes[2], codes[3]));
            block.with_sums(largest / 127.0, low, high)
        }
    }
    #[inline(always)]
    unsafe fn split(x: &[f32; PAGE]) -> Split {
        // SAFETY: see above; 32 elements, 32 codes.
        unsafe {
            let v = Self::quarters(x);
            // Weights are not negative.
            let largest = Self::largest_magnitude(&v);
            if !(largest.is_finite() && largest >= TINY) {
                return quantize::split(x);
            }
            let codes = Self::nearest(&v, MOST / largest);
            let mut split = Split::ZERO;
            split.gain = largest / MOST;
            let (mut high, mut low) = (codes, codes);
            for i in 0..4 {
                high[i] = _mm256_srli_epi32::<7>(codes[i]);
                low[i] = _mm256_and_si256(codes[i], _mm256_set1_epi32(127));
            }
            _mm256_storeu_si256(split.high.as_mut_ptr().cast(), Self::bytes(&high));
            _mm256_storeu_si256(split.low.as_mut_ptr().cast(), Self::bytes(&low));
            split
        }
    }
    #[inline(always)]
    unsafe fn splat_i32(x: i32) -> Self::I {
        // SAFETY: see above.
        unsafe { [_mm256_set1_epi32(x); 2] }
    }
    #[inline(always)]
    unsafe fn to_float(x: Self::I) -> Self::F {
        // SAFETY: see above.
        unsafe { [_mm256_cvtepi32_ps(x[0]), _mm256_cvtepi32_ps(x[1])] }
    }
    #[inline(always)]
    unsafe fn load_weights(p: *const u8) -> Self::W {
        // SAFETY: see above.
        unsafe {
            let bias = _mm256_set1_epi8(-128);
            let half = |p: *const u8| _mm256_xor_si256(_mm256_loadu_si256(p.cast()), bias);
            Self::weights([half(p), half(p.add(32))])
        }
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> (Self::N, Self::N) {
        // SAFETY: see above.
        unsafe {
            let mask = _mm256_set1_epi8(15);
            let (a, b) = (_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast()));
            let high = |x| _mm256_and_si256(_mm256_srli_epi16::<4>(x), mask);
            ([_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)], [high(a), high(b)])
        }
    }
    #[inline(always)]
    unsafe fn load_table(table: &[i8; 16]) -> Self::T {
        // SAFETY: see above; the array is 16 bytes.
        unsafe { _mm256_broadcastsi128_si256(_mm_loadu_si128(table.as_ptr().cast())) }
    }
    #[inline(always)]
    unsafe fn look_up(table: Self::T, codes: Self::N) -> Self::W {
        // SAFETY: see above.
        unsafe { Self::weights([_mm256_shuffle_epi8(table, codes[0]), _mm256_shuffle_epi8(table, codes[1])]) }
    }
    #[inline(always)]
    unsafe fn dot(acc: Self::I, w: Self::W, x: i32) -> Self::I {
        // SAFETY: see above.
        unsafe {
            let x = _mm256_set1_epi32(x);
            let half = |i: usize| Self::dot_bytes(acc[i], w.magnitude[i], _mm256_sign_epi8(x, w.signed[i]));
            [half(0), half(1)]
        }
    }
    #[inline(always)]
    unsafe fn dot_nibbles(acc: Self::I, codes: Self::N, x: i32) -> Self::I {
        // SAFETY: see above.
        unsafe {
            let x = _mm256_set1_epi32(x);
            [Self::dot_bytes(acc[0], codes[0], x), Self::dot_bytes(acc[1], codes[1], x)]
        }
    }
    #[inline(always)]
    unsafe fn load_signed(p: *const u8) -> Self::N {
        // SAFETY: see above.
        unsafe { [_mm256_loadu_si256(p.cast()), _mm256_loadu_si256(p.add(32).cast())] }
    }
    #[inline(always)]
    unsafe fn dot_signed(acc: Self::I, codes: Self::N, x: i32) -> Self::I {
        // SAFETY: see above. Neighbours do not saturate: 2 * 127 * 128.
        unsafe {
            let x = _mm256_set1_epi32(x);
            [Self::dot_bytes(acc[0], x, codes[0]), Self::dot_bytes(acc[1], x, codes[1])]
        }
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
