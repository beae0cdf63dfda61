//! What a core can do at most, for benchmarks to measure beside what they measure: loops that do nothing else. Without AVX-512 they
//! measure what plain code reaches, which is no ceiling.
#![allow(unsafe_code, dead_code)] // Intrinsics; every user takes some of the loops.

#[cfg(target_arch = "x86_64")]
pub use x86::*;

#[cfg(not(target_arch = "x86_64"))]
pub use plain::*;

#[cfg(not(target_arch = "x86_64"))]
mod plain {
    pub fn read(bytes: &[u8]) -> u64 {
        bytes.as_chunks::<8>().0.iter().fold(0, |a, b| a ^ u64::from_ne_bytes(*b))
    }
    pub fn fma(_: usize) -> f64 {
        1.0
    }
    pub fn pairs(_: usize) -> f64 {
        1.0
    }
    pub fn dot(_: usize) -> f64 {
        1.0
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;
    use std::hint::black_box;

    fn wide() -> bool {
        is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vnni")
    }

    /// Reads every byte.
    pub fn read(bytes: &[u8]) -> u64 {
        if wide() {
            // SAFETY: just detected.
            return unsafe { read_wide(bytes) };
        }
        bytes.as_chunks::<8>().0.iter().fold(0, |a, b| a ^ u64::from_ne_bytes(*b))
    }

    #[target_feature(enable = "avx512f")]
    fn read_wide(bytes: &[u8]) -> u64 {
        let mut sums = [_mm512_setzero_si512(); 8];
        for line in bytes.as_chunks::<512>().0 {
            for (i, sum) in sums.iter_mut().enumerate() {
                // SAFETY: the chunk holds eight registers.
                unsafe {
                    _mm_prefetch::<_MM_HINT_T0>(line.as_ptr().wrapping_add(4096 + i * 64).cast());
                    *sum = _mm512_xor_si512(*sum, _mm512_loadu_si512(line.as_ptr().add(i * 64).cast()));
                }
            }
        }
        sums.iter().fold(0, |a, &s| a ^ _mm512_reduce_add_epi64(s) as u64)
    }

    /// Floating point operations done in `n` rounds of independent multiply-adds.
    pub fn fma(n: usize) -> f64 {
        if !wide() {
            return 1.0;
        }
        // SAFETY: just detected.
        unsafe { fma_wide(n) };
        (n * 12 * 32) as f64
    }

    #[target_feature(enable = "avx512f")]
    fn fma_wide(n: usize) {
        let (x, y) = (black_box(_mm512_set1_ps(0.999)), black_box(_mm512_set1_ps(0.001)));
        let mut sums = [_mm512_set1_ps(1.0); 12];
        for _ in 0..n {
            for s in &mut sums {
                *s = _mm512_fmadd_ps(*s, x, y);
            }
        }
        black_box(sums);
    }

    /// Floating point operations done in `n` rounds of independent bfloat16 dot products; 1 where there are none.
    pub fn pairs(n: usize) -> f64 {
        if !wide() || !is_x86_feature_detected!("avx512bf16") {
            return 1.0;
        }
        // SAFETY: just detected.
        unsafe { pairs_wide(n) };
        (n * 12 * 64) as f64
    }

    #[target_feature(enable = "avx512f,avx512bf16")]
    fn pairs_wide(n: usize) {
        // SAFETY: plain bits.
        let (x, y) = unsafe { std::mem::transmute::<[i32; 32], (__m512bh, __m512bh)>(black_box([0x3f80_3f80; 32])) };
        let mut sums = [_mm512_set1_ps(1.0); 12];
        for _ in 0..n {
            for s in &mut sums {
                *s = _mm512_dpbf16_ps(*s, x, y);
            }
        }
        black_box(sums);
    }

    /// Integer operations done in `n` rounds of independent dot products.
    pub fn dot(n: usize) -> f64 {
        if !wide() {
            return 1.0;
        }
        // SAFETY: just detected.
        unsafe { dot_wide(n) };
        (n * 12 * 128) as f64
    }

    #[target_feature(enable = "avx512f,avx512vnni")]
    fn dot_wide(n: usize) {
        let (x, y) = (black_box(_mm512_set1_epi8(3)), black_box(_mm512_set1_epi8(2)));
        let mut sums = [_mm512_set1_epi32(1); 12];
        for _ in 0..n {
            for s in &mut sums {
                *s = _mm512_dpbusd_epi32(*s, x, y);
            }
        }
        black_box(sums);
    }
}
