//! What a core can do at most, for benchmarks to measure beside what they measure: loops that do nothing else, in registers as wide as the
//! processor has. Other processors than x86-64 have none yet: a rate of nothing, whose shares are none.
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

    fn half() -> bool {
        is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
    }

    /// Reads every byte.
    pub fn read(bytes: &[u8]) -> u64 {
        if wide() {
            // SAFETY: just detected.
            return unsafe { read_wide(bytes) };
        }
        if half() {
            // SAFETY: just detected.
            return unsafe { read_half(bytes) };
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

    #[target_feature(enable = "avx2")]
    fn read_half(bytes: &[u8]) -> u64 {
        let mut sums = [_mm256_setzero_si256(); 8];
        for line in bytes.as_chunks::<256>().0 {
            for (i, sum) in sums.iter_mut().enumerate() {
                // SAFETY: the chunk holds eight registers.
                *sum = _mm256_xor_si256(*sum, unsafe { _mm256_loadu_si256(line.as_ptr().add(i * 32).cast()) });
            }
        }
        sums.iter().fold(0, |a, &s| a ^ _mm256_extract_epi64::<0>(s) as u64)
    }

    /// Floating point operations done in `n` rounds of independent multiply-adds; 1 where there are none.
    pub fn fma(n: usize) -> f64 {
        if !wide() && !half() {
            return 1.0;
        }
        if !wide() {
            // SAFETY: just detected.
            unsafe { fma_half(n) };
            return (n * 12 * 16) as f64;
        }
        // SAFETY: just detected.
        unsafe { fma_wide(n) };
        (n * 12 * 32) as f64
    }

    #[target_feature(enable = "avx2,fma")]
    fn fma_half(n: usize) {
        let (x, y) = (black_box(_mm256_set1_ps(0.999)), black_box(_mm256_set1_ps(0.001)));
        let mut sums = [_mm256_set1_ps(1.0); 12];
        for _ in 0..n {
            for s in &mut sums {
                *s = _mm256_fmadd_ps(*s, x, y);
            }
        }
        black_box(sums);
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

    /// Integer operations done in `n` rounds of independent dot products of bytes; 1 where there are none. Without a dot instruction of 32 bits that is
    /// the one of 16 bits and its addition: products of 8 by 8 bits, which it cannot hold two of, reach half of that.
    pub fn dot(n: usize) -> f64 {
        if !wide() && !half() {
            return 1.0;
        }
        if !wide() {
            // SAFETY: just detected.
            unsafe { dot_half(n) };
            return (n * 12 * 64) as f64;
        }
        // SAFETY: just detected.
        unsafe { dot_wide(n) };
        (n * 12 * 128) as f64
    }

    #[target_feature(enable = "avx2")]
    fn dot_half(n: usize) {
        let mut sums = [_mm256_set1_epi16(1); 12];
        for _ in 0..n {
            // Anew in each round, or the products would be made once.
            let (x, y) = (black_box(_mm256_set1_epi8(3)), black_box(_mm256_set1_epi8(2)));
            for (i, s) in sums.iter_mut().enumerate() {
                *s = _mm256_add_epi16(*s, _mm256_maddubs_epi16(if i % 2 == 0 { x } else { y }, *s));
            }
        }
        black_box(sums);
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
