//! Panels filled from the bytes of a file, a vector at a time, for the formats that models come in.
//!
//! What a panel holds is said once, by `Layout::fill_*` over the fields of `quant`; these are other ways to the same bytes, and the
//! tests compare all of them. Nearly everything is one movement: 16 rows of four words become four stretches of 16 lanes. Whatever is
//! unusual (fewer than 16 rows, scales that are no numbers) is left to the definition.
#![allow(unsafe_code)] // Intrinsics.

use super::super::pack::{GAINS, LANES, Layout, MOST_SCALE, SUPER, gain_of};
use crate::tensor::DType;
use std::arch::x86_64::*;

/// Fills `panel` if this format is known here; whether it did. If not, the panel may hold anything.
///
/// # Safety
/// The processor has AVX2 and F16C. `rows` each hold `cols` elements of `dtype`, and `panel` is as large as `layout` says for as many.
pub(super) unsafe fn fill(dtype: DType, layout: Layout, cols: usize, rows: &[&[u8]; LANES], panel: &mut [u8]) -> bool {
    let from = rows.map(<[u8]>::as_ptr);
    let to = panel.as_mut_ptr();
    // SAFETY: the caller's promise; each function reads whole blocks of the rows and writes inside of the panel.
    unsafe {
        match (dtype, layout) {
            (DType::F32, Layout::F32) if cols.is_multiple_of(4) => words(&from, cols, to),
            (DType::BF16, Layout::Bf16) if cols.is_multiple_of(8) => words(&from, cols / 2, to),
            (DType::F16, Layout::F16) if cols.is_multiple_of(8) => halves(&from, cols, to),
            (DType::Q8_0, Layout::I8 { block: 32, min: false }) => q8_0(&from, cols, to),
            (DType::Q5_0, Layout::I8 { block: 32, min: false }) => q5_0(&from, cols, to),
            (DType::Q4_0, Layout::I4 { block: 32, min: false }) => q4::<18, false>(&from, cols, to),
            (DType::Q4_1, Layout::I4 { block: 32, min: true }) => q4::<20, true>(&from, cols, to),
            (DType::Q4K, Layout::I4 { block: 32, min: true }) => q4_k(&from, cols, to),
            (DType::Q6K, Layout::I8 { block: 16, min: false }) => q6_k(&from, cols, to),
            _ => false,
        }
    }
}

/// Where each row is.
type Rows = [*const u8; LANES];

/// Word `w` of 16 bytes of each row, lanes 0..8 and 8..16.
///
/// # Safety
/// AVX2; every row is good for 16 bytes from `at` on.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn turn(rows: &Rows, at: usize) -> [[__m256i; 2]; 4] {
    // SAFETY: the caller's promise.
    unsafe {
        let half = |first: usize| {
            let pair = |i: usize| {
                let low = _mm_loadu_si128(rows[first + i].add(at).cast());
                _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(low), _mm_loadu_si128(rows[first + i + 4].add(at).cast()))
            };
            let (a, b, c, d) = (pair(0), pair(1), pair(2), pair(3));
            let (ab, ab2) = (_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
            let (cd, cd2) = (_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
            [_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd), _mm256_unpacklo_epi64(ab2, cd2), _mm256_unpackhi_epi64(ab2, cd2)]
        };
        let (low, high) = (half(0), half(8));
        [[low[0], high[0]], [low[1], high[1]], [low[2], high[2]], [low[3], high[3]]]
    }
}

/// # Safety
/// AVX2; `to` is good for 64 bytes.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn put(to: *mut u8, lanes: [__m256i; 2]) {
    // SAFETY: the caller's promise.
    unsafe {
        _mm256_storeu_si256(to.cast(), lanes[0]);
        _mm256_storeu_si256(to.add(32).cast(), lanes[1]);
    }
}

/// # Safety
/// As [`fill`]; rows of `count` words, a multiple of 4.
#[target_feature(enable = "avx2")]
unsafe fn words(rows: &Rows, count: usize, to: *mut u8) -> bool {
    for at in (0..count).step_by(4) {
        // SAFETY: the caller's promise.
        unsafe { turn(rows, at * 4).into_iter().enumerate().for_each(|(w, lanes)| put(to.add((at + w) * 64), lanes)) };
    }
    true
}

/// # Safety
/// As [`fill`]; rows of `cols` halves, a multiple of 8.
#[target_feature(enable = "avx2")]
unsafe fn halves(rows: &Rows, cols: usize, to: *mut u8) -> bool {
    let low = _mm256_set1_epi32(0xffff);
    for k in (0..cols).step_by(8) {
        // SAFETY: the caller's promise.
        let pairs = unsafe { turn(rows, k * 2) };
        for (w, [a, b]) in pairs.into_iter().enumerate() {
            let even = _mm256_packus_epi32(_mm256_and_si256(a, low), _mm256_and_si256(b, low));
            let odd = _mm256_packus_epi32(_mm256_srli_epi32::<16>(a), _mm256_srli_epi32::<16>(b));
            // Packing goes by 128 bits; the order of lanes comes back with the quarters 0, 2, 1, 3.
            let lanes = [_mm256_permute4x64_epi64::<0xd8>(even), _mm256_permute4x64_epi64::<0xd8>(odd)];
            // SAFETY: two stretches of 32 bytes inside of the panel.
            unsafe { put(to.add((k + 2 * w) * 32), lanes) };
        }
    }
    true
}

/// # Safety
/// `to` is good for the gains.
unsafe fn put_gains(to: *mut u8, gain: &[f32; LANES]) {
    for (lane, gain) in gain.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { to.add(lane * 4).cast::<f32>().write_unaligned(*gain) };
    }
}

/// One 16-bit field of each row to a line of scales, signs turned by `flip`. False where one is not a number, or more than [`MOST_SCALE`].
///
/// # Safety
/// Every row is good for two bytes from `at` on, `to` for 32.
#[target_feature(enable = "avx2")]
#[inline]
unsafe fn put_fields(rows: &Rows, at: usize, flip: u16, to: *mut u8) -> bool {
    let mut largest = 0;
    for (lane, row) in rows.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe {
            let field = row.add(at).cast::<u16>().read_unaligned();
            largest = largest.max(field & 0x7fff);
            to.add(lane * 2).cast::<u16>().write_unaligned(field ^ flip);
        }
    }
    largest <= MOST_SCALE_BITS
}

/// [`MOST_SCALE`] as a half float.
const MOST_SCALE_BITS: u16 = 0x5c00;

/// Where stretch `block / 2` begins in a panel with `per` bytes of scales and minimums and `codes` bytes of codes.
fn stretch(block: usize, per: usize, codes: usize) -> usize {
    GAINS + block / 2 * (per + codes)
}

/// Clears the second half of the last stretch where `cols` fills only the first: fields `lines` and the codes.
///
/// # Safety
/// `to` is a panel of such stretches.
unsafe fn clear_rest(cols: usize, to: *mut u8, per: usize, codes: usize, lines: &[usize]) {
    if !cols.is_multiple_of(SUPER) {
        // SAFETY: the last stretch of the panel.
        unsafe {
            let start = to.add(stretch(cols / 32, per, codes));
            lines.iter().for_each(|line| start.add(line * 32).write_bytes(0, 32));
            start.add(per + codes / 2).write_bytes(0, codes / 2);
        }
    }
}

/// # Safety
/// As [`fill`].
#[target_feature(enable = "avx2")]
unsafe fn q8_0(rows: &Rows, cols: usize, to: *mut u8) -> bool {
    const CODES: usize = SUPER * LANES;
    let bias = _mm256_set1_epi8(-128);
    let mut numbers = true;
    // SAFETY: the caller's promise: blocks of 34 bytes, stretches of two blocks.
    unsafe {
        put_gains(to, &[1.0; LANES]);
        for block in 0..cols / 32 {
            let (from, start) = (block * 34, to.add(stretch(block, 64, CODES)));
            numbers &= put_fields(rows, from, 0, start.add(block % 2 * 32));
            let codes = start.add(64 + block % 2 * (CODES / 2));
            for part in 0..2 {
                for (w, lanes) in turn(rows, from + 2 + part * 16).into_iter().enumerate() {
                    put(codes.add((part * 4 + w) * 64), lanes.map(|l| _mm256_xor_si256(l, bias)));
                }
            }
        }
        clear_rest(cols, to, 64, CODES, &[1]);
    }
    numbers
}

/// # Safety
/// As [`fill`].
#[target_feature(enable = "avx2")]
unsafe fn q5_0(rows: &Rows, cols: usize, to: *mut u8) -> bool {
    const CODES: usize = SUPER * LANES;
    let mut unpacked = [[0u8; 32]; LANES];
    let mut numbers = true;
    // SAFETY: the caller's promise: blocks of 22 bytes, stretches of two blocks.
    unsafe {
        put_gains(to, &[1.0; LANES]);
        // Byte `i` of a register takes byte `i / 8` of the high bits, and of that the bit `i % 8`.
        let spread = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
        let bits = _mm256_set1_epi64x(0x8040201008040201u64 as i64);
        for block in 0..cols / 32 {
            let (from, start) = (block * 22, to.add(stretch(block, 64, CODES)));
            numbers &= put_fields(rows, from, 0, start.add(block % 2 * 32));
            for (row, out) in rows.iter().zip(&mut unpacked) {
                let high = _mm256_set1_epi32(row.add(from + 2).cast::<i32>().read_unaligned());
                let set = _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(high, spread), bits), bits);
                let bytes = _mm_loadu_si128(row.add(from + 6).cast());
                let both = _mm256_inserti128_si256::<1>(_mm256_castsi128_si256(bytes), _mm_srli_epi16::<4>(bytes));
                let code = _mm256_or_si256(_mm256_and_si256(both, _mm256_set1_epi8(15)), _mm256_and_si256(set, _mm256_set1_epi8(16)));
                // 16 taken off, 128 added.
                _mm256_storeu_si256(out.as_mut_ptr().cast(), _mm256_add_epi8(code, _mm256_set1_epi8(112)));
            }
            let unpacked: Rows = std::array::from_fn(|lane| unpacked[lane].as_ptr());
            let codes = start.add(64 + block % 2 * (CODES / 2));
            for part in 0..2 {
                turn(&unpacked, part * 16).into_iter().enumerate().for_each(|(w, lanes)| put(codes.add((part * 4 + w) * 64), lanes));
            }
        }
        clear_rest(cols, to, 64, CODES, &[1]);
    }
    numbers
}

/// Two words of codes in their low nibbles as one: the first stays low.
#[target_feature(enable = "avx2")]
#[inline]
fn join_low(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
    let low = _mm256_set1_epi8(15);
    let join = |a, b| _mm256_or_si256(_mm256_and_si256(a, low), _mm256_slli_epi32::<4>(_mm256_and_si256(b, low)));
    [join(a[0], b[0]), join(a[1], b[1])]
}

/// As `join_low`, of the high nibbles.
#[target_feature(enable = "avx2")]
#[inline]
fn join_high(a: [__m256i; 2], b: [__m256i; 2]) -> [__m256i; 2] {
    let low = _mm256_set1_epi8(15);
    let join = |a, b| _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi32::<4>(a), low), _mm256_andnot_si256(low, b));
    [join(a[0], b[0]), join(a[1], b[1])]
}

/// Q4_0 and Q4_1, whose block has `BYTES` bytes.
///
/// # Safety
/// As [`fill`].
#[target_feature(enable = "avx2")]
unsafe fn q4<const BYTES: usize, const MIN: bool>(rows: &Rows, cols: usize, to: *mut u8) -> bool {
    const CODES: usize = SUPER * LANES / 2;
    let per = if MIN { 128 } else { 64 };
    let mut numbers = true;
    // SAFETY: the caller's promise: 16 bytes of codes behind one or two fields, stretches of two blocks.
    unsafe {
        put_gains(to, &[1.0; LANES]);
        for block in 0..cols / 32 {
            let (from, start) = (block * BYTES, to.add(stretch(block, per, CODES)));
            numbers &= put_fields(rows, from, 0, start.add(block % 2 * 32));
            if MIN {
                // The file adds its field, a panel subtracts.
                numbers &= put_fields(rows, from + 2, 0x8000, start.add(64 + block % 2 * 32));
            }
            let [a, b, c, d] = turn(rows, from + BYTES - 16);
            let codes = start.add(per + block % 2 * (CODES / 2));
            put(codes, join_low(a, b));
            put(codes.add(64), join_low(c, d));
            put(codes.add(128), join_high(a, b));
            put(codes.add(192), join_high(c, d));
        }
        clear_rest(cols, to, per, CODES, if MIN { &[1, 3] } else { &[1] });
    }
    numbers
}

/// What decides a row's gain: whether f16 holds every factor, and the largest.
struct Extent {
    exact: __m256,
    largest: __m256,
    numbers: __m256,
}

impl Extent {
    #[target_feature(enable = "avx2")]
    fn new() -> Extent {
        let all = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
        Extent { exact: all, largest: _mm256_setzero_ps(), numbers: all }
    }

    #[target_feature(enable = "avx2,f16c")]
    fn add(&mut self, values: __m256) {
        let back = _mm256_cvtph_ps(_mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(values));
        self.exact = _mm256_and_ps(self.exact, _mm256_cmp_ps::<_CMP_EQ_OQ>(back, values));
        self.numbers = _mm256_and_ps(self.numbers, _mm256_cmp_ps::<_CMP_ORD_Q>(values, values));
        self.largest = _mm256_max_ps(self.largest, _mm256_andnot_ps(_mm256_set1_ps(-0.0), values));
    }

    /// The power of two that moves into the gain, as `common_gain` has it; `None` where a value is not a number.
    #[target_feature(enable = "avx2")]
    fn gain(&self) -> Option<f32> {
        if _mm256_movemask_ps(self.numbers) != 0xff {
            return None;
        }
        let mut lanes = [0f32; 8];
        // SAFETY: eight floats.
        unsafe { _mm256_storeu_ps(lanes.as_mut_ptr(), self.largest) };
        let largest = lanes.into_iter().fold(0.0f32, f32::max);
        let exact = _mm256_movemask_ps(self.exact) == 0xff && largest <= MOST_SCALE;
        Some(if exact || !largest.is_normal() { 1.0 } else { gain_of(largest) })
    }
}

/// Eight values divided by the gain, as f16 into lane `lane` of the lines of scales that `line` names.
///
/// # Safety
/// `line(j)` is good for 32 bytes for each of 8.
#[target_feature(enable = "avx2,f16c")]
unsafe fn put_factors(values: __m256, gain: f32, lane: usize, line: impl Fn(usize) -> *mut u8) {
    let mut fields = [0u16; 8];
    let scaled = _mm256_div_ps(values, _mm256_set1_ps(gain));
    // SAFETY: eight fields here; the lines are the caller's promise.
    unsafe {
        _mm_storeu_si128(fields.as_mut_ptr().cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(scaled));
        fields.iter().enumerate().for_each(|(j, field)| line(j).add(lane * 2).cast::<u16>().write_unaligned(*field));
    }
}

/// # Safety
/// `at` is good for two bytes.
#[target_feature(enable = "f16c,avx2")]
unsafe fn half(at: *const u8) -> __m256 {
    // SAFETY: the caller's promise.
    _mm256_cvtph_ps(_mm_set1_epi16(unsafe { at.cast::<i16>().read_unaligned() }))
}

/// The eight scales and minimums of a Q4_K block.
///
/// # Safety
/// `block` is good for 16 bytes.
#[target_feature(enable = "avx2,f16c")]
unsafe fn q4_k_factors(block: *const u8) -> (__m256, __m256) {
    // SAFETY: the caller's promise.
    let (word, d, d_min) = unsafe { (|i: usize| block.add(4 + 4 * i).cast::<u32>().read_unaligned(), half(block), half(block.add(2))) };
    let (a, b, c) = (word(0), word(1), word(2));
    // Six bits each: the first four of either kind in a word of their own, of the others four bits in the third and two above the first.
    let eight = |first: u32, low: u32| u64::from(first & 0x3f3f3f3f) | u64::from(low & 0x0f0f0f0f | first >> 6 << 4 & 0x30303030) << 32;
    let floats = |bytes: u64| _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(bytes as i64)));
    (_mm256_mul_ps(d, floats(eight(a, c))), _mm256_mul_ps(d_min, floats(eight(b, c >> 4))))
}

/// # Safety
/// As [`fill`].
#[target_feature(enable = "avx2,f16c")]
unsafe fn q4_k(rows: &Rows, cols: usize, to: *mut u8) -> bool {
    const BYTES: usize = 144;
    const CODES: usize = SUPER * LANES / 2;
    let blocks = cols / 256;
    let mut gains = [1.0; LANES];
    // SAFETY: the caller's promise: blocks of 144 bytes, each four stretches.
    unsafe {
        let stretch = |index: usize| to.add(GAINS + index * (128 + CODES));
        for (lane, row) in rows.iter().enumerate() {
            let mut extent = Extent::new();
            for block in 0..blocks {
                let (scale, min) = q4_k_factors(row.add(block * BYTES));
                extent.add(scale);
                extent.add(min);
            }
            let Some(gain) = extent.gain() else { return false };
            gains[lane] = gain;
            for block in 0..blocks {
                let (scale, min) = q4_k_factors(row.add(block * BYTES));
                put_factors(scale, gain, lane, |j| stretch(block * 4 + j / 2).add(j % 2 * 32));
                put_factors(min, gain, lane, |j| stretch(block * 4 + j / 2).add(64 + j % 2 * 32));
            }
        }
        put_gains(to, &gains);
        for index in 0..blocks * 4 {
            let from = index / 4 * BYTES + 16 + index % 4 * 32;
            let codes = stretch(index).add(128);
            let ([a, b, c, d], [e, f, g, h]) = (turn(rows, from), turn(rows, from + 16));
            for (at, (x, y)) in [(a, b), (c, d), (e, f), (g, h)].into_iter().enumerate() {
                put(codes.add(at * 64), join_low(x, y));
                put(codes.add(256 + at * 64), join_high(x, y));
            }
        }
    }
    true
}

/// # Safety
/// `block` is good for 210 bytes.
#[target_feature(enable = "avx2,f16c")]
unsafe fn q6_k_factors(block: *const u8) -> [__m256; 2] {
    // SAFETY: the caller's promise.
    unsafe {
        let (d, scales) = (half(block.add(208)), _mm_loadu_si128(block.add(192).cast()));
        [scales, _mm_srli_si128::<8>(scales)].map(|eight| _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight))))
    }
}

/// # Safety
/// As [`fill`].
#[target_feature(enable = "avx2,f16c")]
unsafe fn q6_k(rows: &Rows, cols: usize, to: *mut u8) -> bool {
    const BYTES: usize = 210;
    const CODES: usize = SUPER * LANES;
    let blocks = cols / 256;
    let mut gains = [1.0; LANES];
    let mut unpacked = [[0u8; 128]; LANES];
    // SAFETY: the caller's promise: blocks of 210 bytes, each four stretches.
    unsafe {
        let stretch = |index: usize| to.add(GAINS + index * (128 + CODES));
        for (lane, row) in rows.iter().enumerate() {
            let mut extent = Extent::new();
            (0..blocks).for_each(|block| q6_k_factors(row.add(block * BYTES)).into_iter().for_each(|eight| extent.add(eight)));
            let Some(gain) = extent.gain() else { return false };
            gains[lane] = gain;
            for block in 0..blocks {
                for (part, eight) in q6_k_factors(row.add(block * BYTES)).into_iter().enumerate() {
                    put_factors(eight, gain, lane, |j| stretch(block * 4 + part * 2 + j / 4).add(j % 4 * 32));
                }
            }
        }
        put_gains(to, &gains);
        let (low, two) = (_mm256_set1_epi8(15), _mm256_set1_epi8(0x30));
        for index in 0..blocks * 2 {
            for (row, out) in rows.iter().zip(&mut unpacked) {
                let from = row.add(index / 2 * BYTES);
                let load = |at: usize| _mm256_loadu_si256(from.add(at).cast());
                let (a, b, pairs) = (load(index % 2 * 64), load(index % 2 * 64 + 32), load(128 + index % 2 * 32));
                let runs = [
                    (a, _mm256_slli_epi16::<4>(pairs)),
                    (b, _mm256_slli_epi16::<2>(pairs)),
                    (_mm256_srli_epi16::<4>(a), pairs),
                    (_mm256_srli_epi16::<4>(b), _mm256_srli_epi16::<2>(pairs)),
                ];
                for (run, (nibbles, pairs)) in runs.into_iter().enumerate() {
                    let code = _mm256_or_si256(_mm256_and_si256(nibbles, low), _mm256_and_si256(pairs, two));
                    // 32 taken off, 128 added.
                    let biased = _mm256_add_epi8(code, _mm256_set1_epi8(96));
                    _mm256_storeu_si256(out.as_mut_ptr().add(run * 32).cast(), biased);
                }
            }
            let unpacked: Rows = std::array::from_fn(|lane| unpacked[lane].as_ptr());
            for part in 0..8 {
                let codes = stretch(index * 2 + part / 4).add(128 + part % 4 * 256);
                turn(&unpacked, part * 16).into_iter().enumerate().for_each(|(w, lanes)| put(codes.add(w * 64), lanes));
            }
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::super::super::pack::{CodeRow, LANES, Layout};
    use crate::quant::{self, Unpacked};
    use crate::tensor::DType;

    /// A panel by the definition.
    fn defined(dtype: DType, layout: Layout, cols: usize, rows: &[&[u8]]) -> Vec<u8> {
        let mut panel = vec![0x55; layout.panel_bytes(cols).unwrap()];
        match layout {
            Layout::F32 => {
                let rows: Vec<Vec<f32>> =
                    rows.iter().map(|row| row.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect()).collect();
                layout.fill_f32(cols, &mut panel, &rows.iter().map(Vec::as_slice).collect::<Vec<_>>()).unwrap();
            }
            Layout::Bf16 | Layout::F16 => {
                let rows: Vec<Vec<u16>> =
                    rows.iter().map(|row| row.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]])).collect()).collect();
                layout.fill_u16(cols, &mut panel, &rows.iter().map(Vec::as_slice).collect::<Vec<_>>()).unwrap();
            }
            _ => {
                let mut unpacked = Unpacked::new();
                let fields: Vec<(Vec<i8>, Vec<f32>, Vec<f32>)> = rows
                    .iter()
                    .map(|row| {
                        let mut fields = (Vec::new(), Vec::new(), Vec::new());
                        for block in row.chunks_exact(dtype.block_bytes()) {
                            quant::unpack(dtype, block, &mut unpacked).unwrap();
                            let subs = unpacked.len / unpacked.sub_len;
                            fields.0.extend_from_slice(&unpacked.codes[..unpacked.len]);
                            fields.1.extend_from_slice(&unpacked.scale[..subs]);
                            fields.2.extend_from_slice(&unpacked.min[..subs]);
                        }
                        fields
                    })
                    .collect();
                let row = |f: &'_ (Vec<i8>, Vec<f32>, Vec<f32>)| -> (Vec<i8>, Vec<f32>, Vec<f32>) {
                    (f.0.clone(), f.1.clone(), if layout.has_min() { f.2.clone() } else { Vec::new() })
                };
                let fields: Vec<_> = fields.iter().map(row).collect();
                let rows: Vec<CodeRow<'_>> = fields.iter().map(|(codes, scale, min)| CodeRow { codes, scale, min, gain: 1.0 }).collect();
                layout.fill_codes(cols, &mut panel, &rows).unwrap();
            }
        }
        panel
    }

    #[test]
    fn panels_are_those_of_the_definition() {
        let mut state = 9u64;
        let mut byte = move || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 56) as u8
        };
        let cases = [
            (DType::F32, Layout::F32, [4, 36, 640]),
            (DType::BF16, Layout::Bf16, [8, 72, 640]),
            (DType::F16, Layout::F16, [8, 72, 640]),
            (DType::Q8_0, Layout::I8 { block: 32, min: false }, [32, 64, 608]),
            (DType::Q5_0, Layout::I8 { block: 32, min: false }, [32, 64, 608]),
            (DType::Q4_0, Layout::I4 { block: 32, min: false }, [32, 64, 608]),
            (DType::Q4_1, Layout::I4 { block: 32, min: true }, [32, 64, 608]),
            (DType::Q4K, Layout::I4 { block: 32, min: true }, [256, 512, 1280]),
            (DType::Q6K, Layout::I8 { block: 16, min: false }, [256, 512, 1280]),
        ];
        for table in super::super::tables() {
            for (dtype, layout, widths) in cases {
                for cols in widths {
                    // Random bytes; the halves in front of blocks also as they are in models, tiny, huge, exact and not a number.
                    for (kind, field) in [None, Some(0x2211u16), Some(0x0003), Some(0x7bff), Some(0x3c00), Some(0x8000), Some(0x7e01)]
                        .into_iter()
                        .enumerate()
                    {
                        let row_bytes = dtype.bytes(cols).unwrap();
                        let mut rows: Vec<Vec<u8>> = (0..LANES).map(|_| (0..row_bytes).map(|_| byte()).collect()).collect();
                        let at: &[usize] = match dtype {
                            DType::Q6K => &[208],
                            DType::Q4_1 | DType::Q4K => &[0, 2],
                            _ => &[0],
                        };
                        // Of the last kind only one block of one row.
                        for (lane, row) in rows.iter_mut().enumerate() {
                            for (index, block) in row.chunks_mut(dtype.block_bytes().max(16)).enumerate() {
                                let field = if kind == 6 && (lane, index) != (11, 0) { Some(0x2a2a) } else { field };
                                let Some(field) = field.map(|f| f.wrapping_add(if kind == 1 { (lane * 37 + index) as u16 } else { 0 }))
                                else {
                                    // Nothing that is not a number, which panels by the definition keep as they like.
                                    continue;
                                };
                                at.iter().for_each(|&at| {
                                    if dtype.block_bytes() > 4 {
                                        block[at..at + 2].copy_from_slice(&field.to_le_bytes())
                                    }
                                });
                            }
                        }
                        let views: [&[u8]; LANES] = std::array::from_fn(|lane| rows[lane].as_slice());
                        let expected = defined(dtype, layout, cols, &views);
                        let mut panel = vec![0xAA; expected.len()];
                        let done = table.fill(dtype, layout, cols, &views, &mut panel);
                        // Random halves can be no number, and they and huge ones can be too large, so there it may decline.
                        assert!(
                            done || table.name() == "scalar" || [0, 3, 6].contains(&kind),
                            "{} {dtype} {cols} kind {kind}",
                            table.name()
                        );
                        assert!(!done || panel == expected, "{} {dtype} {cols} kind {kind}", table.name());
                    }
                }
            }
        }
    }
}
