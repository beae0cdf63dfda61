//! What a core can do at most, for benchmarks to measure beside what they measure: loops that do nothing else, in registers as wide as the
//! processor has. Elsewhere they measure what plain code reaches, which is less than there is.
#![allow(unsafe_code, dead_code)] // Intrinsics; every user takes some of the loops.

#[cfg(target_arch = "x86_64")]
pub use x86::*;

#[cfg(not(target_arch = "x86_64"))]
pub use plain::*;

/// For the compiler to put into registers, whatever there are.
mod plain {
    use std::hint::black_box;

    /// Reads every byte.
    pub fn read(bytes: &[u8]) -> u64 {
        bytes.as_chunks::<8>().0.iter().fold(0, |a, b| a ^ u64::from_ne_bytes(*b))
    }

    /// Floating point operations done in `n` rounds of independent multiplications and additions.
    pub fn fma(n: usize) -> f64 {
        let (x, y) = (black_box(0.999f32), black_box(0.001));
        let mut sums = [1.0f32; 48];
        for _ in 0..n {
            sums.iter_mut().for_each(|s| *s = *s * x + y);
        }
        black_box(sums);
        (n * 48 * 2) as f64
    }

    /// None: 1 operation.
    pub fn pairs(_: usize) -> f64 {
        1.0
    }

    /// Integer operations done in `n` rounds of independent products of 16 bits and their sums.
    pub fn dot(n: usize) -> f64 {
        let mut sums = [1i16; 96];
        for _ in 0..n {
            let (x, y) = (black_box(3i16), black_box(5));
            sums.iter_mut().for_each(|s| *s = s.wrapping_mul(x).wrapping_add(y));
        }
        black_box(sums);
        (n * 96 * 2) as f64
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::plain;
    use std::arch::x86_64::*;
    use std::hint::black_box;

    fn wide() -> bool {
        is_x86_feature_detected!("avx512f") && is_x86_feature_detected!("avx512vnni")
    }

    fn half() -> bool {
        is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")
    }

    /// A loop in the widest registers there are.
    macro_rules! widest {
        ($wide:expr, $half:expr, $plain:expr) => {
            match () {
                // SAFETY: just detected.
                () if wide() => unsafe { $wide },
                // SAFETY: as above.
                () if half() => unsafe { $half },
                () => $plain,
            }
        };
    }

    /// `n` rounds of an operation on twelve registers, and on two that the compiler does not know.
    macro_rules! rounds {
        ($name:ident, $features:literal, $start:expr, [$x:expr, $y:expr], |$s:ident, $a:ident, $b:ident| $next:expr) => {
            #[target_feature(enable = $features)]
            fn $name(n: usize) {
                let ($a, $b) = (black_box($x), black_box($y));
                let mut sums = [$start; 12];
                for _ in 0..n {
                    for sum in &mut sums {
                        let $s = *sum;
                        *sum = $next;
                    }
                }
                black_box(sums);
            }
        };
    }

    /// Reads every byte.
    pub fn read(bytes: &[u8]) -> u64 {
        widest!(read_wide(bytes), read_half(bytes), plain::read(bytes))
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

    /// Floating point operations done in `n` rounds of independent multiply-adds.
    pub fn fma(n: usize) -> f64 {
        let per = |lanes: usize| (n * 12 * lanes * 2) as f64;
        widest!(
            {
                fma_wide(n);
                per(16)
            },
            {
                fma_half(n);
                per(8)
            },
            plain::fma(n)
        )
    }

    rounds!(fma_wide, "avx512f", _mm512_set1_ps(1.0), [_mm512_set1_ps(0.999), _mm512_set1_ps(0.001)], |s, x, y| _mm512_fmadd_ps(s, x, y));
    rounds!(fma_half, "avx2,fma", _mm256_set1_ps(1.0), [_mm256_set1_ps(0.999), _mm256_set1_ps(0.001)], |s, x, y| _mm256_fmadd_ps(s, x, y));

    /// Floating point operations done in `n` rounds of independent bfloat16 dot products; 1 where there are none.
    pub fn pairs(n: usize) -> f64 {
        if !wide() || !is_x86_feature_detected!("avx512bf16") {
            return plain::pairs(n);
        }
        // SAFETY: just detected.
        unsafe { pairs_wide(n) };
        (n * 12 * 64) as f64
    }

    rounds!(pairs_wide, "avx512f,avx512bf16", _mm512_set1_ps(1.0), [ones(), ones()], |s, x, y| _mm512_dpbf16_ps(s, x, y));

    fn ones() -> __m512bh {
        // SAFETY: plain bits.
        unsafe { std::mem::transmute([0x3f80_3f80i32; 16]) }
    }

    /// Integer operations done in `n` rounds of independent dot products of bytes. Without the instruction that adds them to 32 bits it is the one
    /// that makes 16, and an addition; products of 8 by 8 bits, of which 16 cannot hold two, reach half of that.
    pub fn dot(n: usize) -> f64 {
        let per = |bytes: usize| (n * 12 * bytes * 2) as f64;
        widest!(
            {
                dot_wide(n);
                per(64)
            },
            {
                dot_half(n);
                per(32)
            },
            plain::dot(n)
        )
    }

    rounds!(dot_wide, "avx512f,avx512vnni", _mm512_set1_epi32(1), [_mm512_set1_epi8(3), _mm512_set1_epi8(2)], |s, x, y| {
        _mm512_dpbusd_epi32(s, x, y)
    });
    // The sum is a factor, or the product would be made once for all.
    rounds!(dot_half, "avx2", _mm256_set1_epi16(1), [_mm256_set1_epi8(3), ()], |s, x, _y| _mm256_add_epi16(s, _mm256_maddubs_epi16(x, s)));
}
