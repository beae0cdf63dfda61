//! Row arithmetic: dot products, norms, activations, the pieces of a softmax, conversions.
//!
//! Written over arrays of 16 lanes, which the compiler turns into the vectors of whichever instruction set the function is compiled for.
//! A reduction of n elements always has the same shape: four accumulators of 16 lanes take turns, then a fixed tree. Its bits
//! depend on n and the elements only.
#![allow(unsafe_code)] // Half floats are loaded and stored by the lanes' instructions.

use super::lane::Lanes;

/// Lanes of a step.
const N: usize = 16;
type V = [f32; N];

/// Storage of a key or value element.
pub(super) trait Stored: Copy + Default {
    /// # Safety
    /// Needs the instruction set of `S`.
    unsafe fn widen<S: Lanes>(x: &[Self; N]) -> V;
}

/// A bfloat16 bit pattern.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub(super) struct B16(u16);

/// A half float bit pattern.
#[derive(Clone, Copy, Default)]
#[repr(transparent)]
pub(super) struct H16(u16);

impl Stored for f32 {
    #[inline(always)]
    unsafe fn widen<S: Lanes>(x: &V) -> V {
        *x
    }
}

impl Stored for B16 {
    #[inline(always)]
    unsafe fn widen<S: Lanes>(x: &[B16; N]) -> V {
        let mut out = [0.0; N];
        for i in 0..N {
            out[i] = f32::from_bits((x[i].0 as u32) << 16);
        }
        out
    }
}

impl Stored for H16 {
    #[inline(always)]
    unsafe fn widen<S: Lanes>(x: &[H16; N]) -> V {
        let mut out = [0.0; N];
        // SAFETY: the caller has the instruction set; both arrays hold 16 elements, and `H16` is a transparent u16.
        unsafe { S::store(out.as_mut_ptr(), S::load_f16(x.as_ptr().cast())) };
        out
    }
}

/// Views bit patterns as bfloat16.
#[inline(always)]
pub(super) fn as_b16(x: &[u16]) -> &[B16] {
    // SAFETY: `B16` is a transparent u16.
    unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), x.len()) }
}

/// Views bit patterns as half floats.
#[inline(always)]
pub(super) fn as_h16(x: &[u16]) -> &[H16] {
    // SAFETY: `H16` is a transparent u16.
    unsafe { std::slice::from_raw_parts(x.as_ptr().cast(), x.len()) }
}

/// `a * b + c`, rounded once where the instruction set can.
#[inline(always)]
pub(super) fn fma<S: Lanes>(a: f32, b: f32, c: f32) -> f32 {
    if S::FUSED { a.mul_add(b, c) } else { a * b + c }
}

/// Element by element.
#[inline(always)]
fn map2(a: &V, b: &V, f: impl Fn(f32, f32) -> f32) -> V {
    let mut out = [0.0; N];
    for i in 0..N {
        out[i] = f(a[i], b[i]);
    }
    out
}

/// Up to 16 elements, the rest zeros.
#[inline(always)]
fn padded<T: Copy + Default>(x: &[T]) -> [T; N] {
    let mut out = [T::default(); N];
    out[..x.len()].copy_from_slice(x);
    out
}

/// Sums 16 lanes by halves.
#[inline(always)]
pub(super) fn tree(v: V) -> f32 {
    // Written out: as a loop over halves the compiler adds number by number, with a branch at each.
    let v: [f32; 8] = std::array::from_fn(|i| v[i] + v[i + 8]);
    let v: [f32; 4] = std::array::from_fn(|i| v[i] + v[i + 4]);
    let v: [f32; 2] = std::array::from_fn(|i| v[i] + v[i + 2]);
    v[0] + v[1]
}

/// Sum of products; `b` may be stored in 16 bits. Lengths are equal.
///
/// # Safety
/// Needs the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn dot<S: Lanes, T: Stored>(a: &[f32], b: &[T]) -> f32 {
    let mut acc = [[0.0f32; N]; 4];
    let (a, a_rest) = a.as_chunks::<N>();
    let (b, b_rest) = b.as_chunks::<N>();
    let step = |acc: &mut V, a: &V, b: &[T; N]| {
        // SAFETY: the caller has the instruction set.
        let b = unsafe { T::widen::<S>(b) };
        for i in 0..N {
            acc[i] = fma::<S>(a[i], b[i], acc[i]);
        }
    };
    let (a4, a) = a.as_chunks::<4>();
    let (b4, b) = b.as_chunks::<4>();
    for (a, b) in a4.iter().zip(b4) {
        for i in 0..4 {
            step(&mut acc[i], &a[i], &b[i]);
        }
    }
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        step(&mut acc[i], a, b);
    }
    if !a_rest.is_empty() {
        step(&mut acc[3], &padded(a_rest), &padded(b_rest));
    }
    tree(map2(&map2(&acc[0], &acc[1], |x, y| x + y), &map2(&acc[2], &acc[3], |x, y| x + y), |x, y| x + y))
}

/// `y += a * x`; `x` may be stored in 16 bits. Lengths are equal.
///
/// # Safety
/// Needs the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn axpy<S: Lanes, T: Stored>(a: f32, x: &[T], y: &mut [f32]) {
    let (x, x_rest) = x.as_chunks::<N>();
    let (y, y_rest) = y.as_chunks_mut::<N>();
    for (x, y) in x.iter().zip(y) {
        // SAFETY: the caller has the instruction set.
        let x = unsafe { T::widen::<S>(x) };
        for i in 0..N {
            y[i] = fma::<S>(a, x[i], y[i]);
        }
    }
    if !y_rest.is_empty() {
        // SAFETY: as above.
        let x = unsafe { T::widen::<S>(&padded(x_rest)) };
        for (y, x) in y_rest.iter_mut().zip(x) {
            *y = fma::<S>(a, x, *y);
        }
    }
}

/// `out[i] = f(a[i], b[i])` for equal lengths.
#[inline(always)]
fn zip(a: &[f32], b: &[f32], out: &mut [f32], f: impl Fn(f32, f32) -> f32 + Copy) {
    let (a, a_rest) = a.as_chunks::<N>();
    let (b, b_rest) = b.as_chunks::<N>();
    let (out, out_rest) = out.as_chunks_mut::<N>();
    for ((a, b), out) in a.iter().zip(b).zip(out) {
        *out = map2(a, b, f);
    }
    if !out_rest.is_empty() {
        let v = map2(&padded(a_rest), &padded(b_rest), f);
        out_rest.copy_from_slice(&v[..out_rest.len()]);
    }
}

/// `x[i] = f(x[i])`.
#[inline(always)]
fn update(x: &mut [f32], f: impl Fn(f32) -> f32 + Copy) {
    let (x, rest) = x.as_chunks_mut::<N>();
    for x in x {
        *x = map2(x, x, |x, _| f(x));
    }
    if !rest.is_empty() {
        let v = padded(rest);
        let v = map2(&v, &v, |x, _| f(x));
        rest.copy_from_slice(&v[..rest.len()]);
    }
}

/// # Safety
/// Needs the instruction set of `S`. Lengths are equal.
#[inline(always)]
pub(super) unsafe fn rms_norm<S: Lanes>(x: &[f32], w: &[f32], eps: f32, out: &mut [f32]) {
    // SAFETY: the caller has the instruction set; whole vectors up to `whole`.
    unsafe {
        let scale = 1.0 / (dot::<S, _>(x, x) / x.len() as f32 + eps).sqrt();
        let (factor, whole) = (S::splat(scale), x.len() / N * N);
        for i in (0..whole).step_by(N) {
            let y = S::mul(S::mul(S::load(x.as_ptr().add(i)), factor), S::load(w.as_ptr().add(i)));
            S::store(out.as_mut_ptr().add(i), y);
        }
        for i in whole..x.len() {
            out[i] = x[i] * scale * w[i];
        }
    }
}

#[inline(always)]
pub(super) fn silu_mul<S: Lanes>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    zip(gate, up, out, |g, u| g / (1.0 + exp::<S>(-g)) * u);
}

#[inline(always)]
pub(super) fn sigmoid_mul<S: Lanes>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    zip(gate, up, out, |g, u| u / (1.0 + exp::<S>(-g)));
}

#[inline(always)]
pub(super) fn gelu_tanh_mul<S: Lanes>(gate: &[f32], up: &[f32], out: &mut [f32]) {
    // 0.5 (1 + tanh(u)) is the logistic function of 2u, which has no cancellation.
    const TWICE_ROOT: f32 = 1.595_769_2;
    zip(gate, up, out, |g, u| {
        let inner = TWICE_ROOT * fma::<S>(0.044715 * g * g, g, g);
        g / (1.0 + exp::<S>(-inner)) * u
    });
}

/// # Safety
/// Needs the instruction set of `S`. Lengths are equal.
#[inline(always)]
pub(super) unsafe fn add<S: Lanes>(x: &[f32], y: &mut [f32]) {
    let whole = x.len() / N * N;
    for i in (0..whole).step_by(N) {
        // SAFETY: the caller has the instruction set; whole vectors up to `whole`.
        unsafe { S::store(y.as_mut_ptr().add(i), S::add(S::load(x.as_ptr().add(i)), S::load(y.as_ptr().add(i)))) };
    }
    for i in whole..x.len() {
        y[i] += x[i];
    }
}

/// `y[c] += sum_j w[c][j] x[j][c]`, the sum in the order of `x`.
#[inline(always)]
pub(super) fn taps<S: Lanes>(w: &[f32], x: &[&[f32]], y: &mut [f32]) {
    #[inline(always)]
    fn of<S: Lanes, const TAPS: usize>(w: &[f32], x: [&[f32]; TAPS], y: &mut [f32]) {
        let whole = y.len() / N * N;
        let w = w.as_chunks::<TAPS>().0;
        let (blocks, rest) = y.as_chunks_mut::<N>();
        for (c, (w, y)) in w.as_chunks::<N>().0.iter().zip(blocks).enumerate() {
            for j in 0..TAPS {
                let x = &x[j].as_chunks::<N>().0[c];
                for i in 0..N {
                    y[i] = fma::<S>(w[i][j], x[i], y[i]);
                }
            }
        }
        for (c, y) in rest.iter_mut().enumerate() {
            for j in 0..TAPS {
                *y = fma::<S>(w[whole + c][j], x[j][whole + c], *y);
            }
        }
    }
    match *x {
        [a, b, c] => of::<S, 3>(w, [a, b, c], y),
        [a, b, c, d] => of::<S, 4>(w, [a, b, c, d], y),
        _ => {
            for (c, (y, w)) in y.iter_mut().zip(w.chunks(x.len())).enumerate() {
                *y = w.iter().zip(x).fold(*y, |y, (w, x)| fma::<S>(*w, x[c], y));
            }
        }
    }
}

#[inline(always)]
pub(super) fn scale(a: f32, x: &mut [f32]) {
    update(x, |x| a * x);
}

#[inline(always)]
pub(super) fn exp_row<S: Lanes>(x: &mut [f32]) {
    update(x, |x| exp::<S>(x));
}

#[inline(always)]
pub(super) fn softplus_row<S: Lanes>(x: &mut [f32]) {
    update(x, |x| softplus::<S>(x));
}

#[inline(always)]
pub(super) fn softcap<S: Lanes>(cap: f32, x: &mut [f32]) {
    update(x, |x| cap * tanh::<S>(x / cap));
}

/// The largest element; NaN if there is one, minus infinity for none.
#[inline(always)]
pub(super) fn max(x: &[f32]) -> f32 {
    let mut largest = [f32::NEG_INFINITY; N];
    let mut odd = [0u32; N];
    let (x, rest) = x.as_chunks::<N>();
    let mut step = |x: &V| {
        for i in 0..N {
            largest[i] = if x[i] > largest[i] { x[i] } else { largest[i] };
            odd[i] |= (x[i].to_bits() & 0x7fff_ffff > 0x7f80_0000) as u32;
        }
    };
    x.iter().for_each(&mut step);
    let mut last = [f32::NEG_INFINITY; N];
    last[..rest.len()].copy_from_slice(rest);
    step(&last);
    if odd.iter().any(|&o| o != 0) { f32::NAN } else { largest.iter().fold(f32::NEG_INFINITY, |m, &v| m.max(v)) }
}

/// [`exp`] of what is at most 0: the same bits, in fewer operations.
#[inline(always)]
pub(super) fn exp_below<S: Lanes>(x: f32) -> f32 {
    // A number below the least is replaced; NaN passes the comparison and goes through the series.
    let inside = if x < LEAST { LEAST } else { x };
    let shifted = fma::<S>(inside, std::f32::consts::LOG2_E, MAGIC);
    let n = shifted - MAGIC;
    let r = fma::<S>(n, -LN2_HIGH, inside);
    let p = series::<S>(fma::<S>(n, -LN2_LOW, r));
    let n = shifted.to_bits() as i32 - MAGIC.to_bits() as i32;
    let value = p * f32::from_bits((n.wrapping_add(127) << 23) as u32);
    if x < LEAST { 0.0 } else { value }
}

/// Replaces `x` by `exp(x - shift)` and returns the sum.
#[inline(always)]
pub(super) fn exp_sum<S: Lanes>(shift: f32, x: &mut [f32]) -> f32 {
    let mut acc = [0.0f32; N];
    let (x, rest) = x.as_chunks_mut::<N>();
    for x in x {
        *x = map2(x, x, |x, _| exp::<S>(x - shift));
        acc = map2(&acc, x, |a, x| a + x);
    }
    if !rest.is_empty() {
        let v = padded(rest);
        let v = map2(&v, &v, |x, _| exp::<S>(x - shift));
        rest.copy_from_slice(&v[..rest.len()]);
        acc = map2(&acc, &padded(rest), |a, x| a + x);
    }
    tree(acc)
}

/// Adding it rounds to an integer, which then stands in the low bits: 1.5 * 2^23.
pub(super) const MAGIC: f32 = 12_582_912.0;
/// ln 2 in two parts, of which the first has few enough bits for an exact product with a small integer.
pub(super) const LN2_HIGH: f32 = 0.693_359_4;
pub(super) const LN2_LOW: f32 = -2.121_944_4e-4;
/// Largest argument with a finite exponential, smallest with a normal one.
const MOST: f32 = 88.722_84;
pub(super) const LEAST: f32 = -87.336_54;

/// The series of exp to the seventh power, highest first: the next term is below 6e-9 for |r| <= ln 2 / 2.
pub(super) const SERIES: [f32; 8] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];

#[inline(always)]
fn series<S: Lanes>(r: f32) -> f32 {
    let mut p = SERIES[0];
    for c in &SERIES[1..] {
        p = fma::<S>(p, r, *c);
    }
    p
}

/// e to the x: within 2 units in the last place, 0 where the result would be subnormal, NaN for NaN.
#[inline(always)]
pub(super) fn exp<S: Lanes>(x: f32) -> f32 {
    // x = n ln 2 + r with |r| <= ln 2 / 2.
    // Comparisons in this order let NaN through as a number; it is put back at the end.
    let inside = if x > MOST { MOST } else { x };
    let inside = if inside > LEAST { inside } else { LEAST };
    let shifted = fma::<S>(inside, std::f32::consts::LOG2_E, MAGIC);
    let n = shifted - MAGIC;
    let r = fma::<S>(n, -LN2_HIGH, inside);
    let r = fma::<S>(n, -LN2_LOW, r);
    let p = series::<S>(r);
    // 2^n in two factors, since n reaches 128 and -126.
    let n = shifted.to_bits() as i32 - MAGIC.to_bits() as i32;
    let half = n >> 1;
    let power = |n: i32| f32::from_bits(((n + 127) << 23) as u32);
    let value = p * power(half) * power(n - half);
    let value = if x < LEAST { 0.0 } else { value };
    let value = if x > MOST { f32::INFINITY } else { value };
    if x.is_nan() { x } else { value }
}

/// `ln(1 + e^x)`.
#[inline(always)]
fn softplus<S: Lanes>(x: f32) -> f32 {
    // max(x, 0) + ln(1 + t), t = e^-|x|: the logarithm is twice the inverse hyperbolic tangent of t / (2 + t), which is at most a third.
    let t = exp::<S>(-x.abs());
    let s = t / (2.0 + t);
    let z = s * s;
    let mut p = 1.0 / 13.0;
    for c in [1.0 / 11.0, 1.0 / 9.0, 1.0 / 7.0, 1.0 / 5.0, 1.0 / 3.0] {
        p = fma::<S>(p, z, c);
    }
    2.0 * fma::<S>(p * z, s, s) + if x > 0.0 { x } else { 0.0 }
}

/// Hyperbolic tangent.
#[inline(always)]
fn tanh<S: Lanes>(x: f32) -> f32 {
    // Near zero the quotient cancels; there the series to the ninth power is exact enough.
    let s = x * x;
    let mut p = 62.0 / 2835.0;
    for c in [-17.0 / 315.0, 2.0 / 15.0, -1.0 / 3.0] {
        p = fma::<S>(p, s, c);
    }
    let near = fma::<S>(p * s, x, x);
    let far = 1.0 - 2.0 / (exp::<S>(2.0 * x) + 1.0);
    if x.abs() < 0.25 { near } else { far }
}

/// # Safety
/// Needs the instruction set of `S`. Lengths are equal.
#[inline(always)]
pub(super) unsafe fn widen<S: Lanes, T: Stored>(x: &[T], out: &mut [f32]) {
    let (x, x_rest) = x.as_chunks::<N>();
    let (out, out_rest) = out.as_chunks_mut::<N>();
    for (x, out) in x.iter().zip(out) {
        // SAFETY: the caller has the instruction set.
        *out = unsafe { T::widen::<S>(x) };
    }
    // SAFETY: as above.
    let last = unsafe { T::widen::<S>(&padded(x_rest)) };
    out_rest.copy_from_slice(&last[..out_rest.len()]);
}

/// Nearest bfloat16, ties to even; NaN stays NaN.
#[inline(always)]
pub(super) fn to_bf16(x: &[f32], out: &mut [u16]) {
    for (x, out) in x.iter().zip(out) {
        let bits = x.to_bits();
        let rounded = (bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16) as u16;
        *out = if bits & 0x7fff_ffff > 0x7f80_0000 { (bits >> 16) as u16 | 0x40 } else { rounded };
    }
}

/// Nearest half float, ties to even.
///
/// # Safety
/// Needs the instruction set of `S`. Lengths are equal.
#[inline(always)]
pub(super) unsafe fn to_f16<S: Lanes>(x: &[f32], out: &mut [u16]) {
    let (x, x_rest) = x.as_chunks::<N>();
    let (out, out_rest) = out.as_chunks_mut::<N>();
    for (x, out) in x.iter().zip(out) {
        // SAFETY: the caller has the instruction set; both sides hold 16 elements.
        unsafe { S::store_f16(out.as_mut_ptr().cast(), S::load(x.as_ptr())) };
    }
    let mut last = [0u16; N];
    // SAFETY: as above.
    unsafe { S::store_f16(last.as_mut_ptr().cast(), S::load(padded(x_rest).as_ptr())) };
    out_rest.copy_from_slice(&last[..out_rest.len()]);
}
