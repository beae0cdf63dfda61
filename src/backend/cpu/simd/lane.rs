//! Sixteen lanes, one per output row of a panel: what the product kernels ask of an instruction set.
//!
//! The kernels are written once over this trait and compiled once per instruction set, inside functions that enable it. Everything is
//! `inline(always)`, since the vectors must not pass through a call of a function that lacks the feature.
#![allow(unsafe_code)] // The methods are unsafe: they need their instruction set, and pointers that are good for 16 lanes.

use super::super::activations::{Q8_BLOCK, Q8Block};
use super::attend::PAGE;
use super::quantize::Split;

/// Vectors of 16 lanes. Integer sums are exact, so only the float methods decide bits: each is one rounding per lane, except `fma`,
/// which the scalar set rounds twice.
///
/// # Safety
/// All methods need the instruction set of the implementing type. `load*` and `store` need a pointer that is good for the bytes
/// they name; no alignment is asked for.
pub(super) trait Lanes {
    /// 16 f32.
    type F: Copy;
    /// 16 i32.
    type I: Copy;
    /// 16 groups of four 8-bit weights, ready for `dot`.
    type W: Copy;
    /// 16 groups of four codes in bytes.
    type N: Copy;
    /// A table of 16 weights.
    type T: Copy;

    /// How much the tiles may hold in registers.
    const REGISTERS: Registers;
    /// Whether `dot` sees `weight + 128`; then sums start at `-128 * sum(activations)`.
    const BIASED: bool;
    /// Whether `fma` rounds once.
    const FUSED: bool;

    /// Runs the tile inside a function that has the instruction set.
    unsafe fn call<T: Tile>(tile: T);

    unsafe fn splat(x: f32) -> Self::F;
    unsafe fn load(p: *const f32) -> Self::F;
    unsafe fn store(p: *mut f32, x: Self::F);
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F;
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `p[at] * x + c`. Where an instruction takes the number from memory to all lanes itself, that is free, and a register full of it is not.
    #[inline(always)]
    unsafe fn fma_from(p: *const f32, at: usize, x: Self::F, c: Self::F) -> Self::F {
        // SAFETY: the caller's promise.
        unsafe { Self::fma(Self::splat(*p.add(at)), x, c) }
    }
    /// `c - a * b`
    unsafe fn fnma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// Low halves of 16 32-bit words as bfloat16.
    unsafe fn load_bf16_low(p: *const u8) -> Self::F;
    /// High halves of 16 32-bit words as bfloat16.
    unsafe fn load_bf16_high(p: *const u8) -> Self::F;
    /// 16 bfloat16.
    unsafe fn load_bf16(p: *const u8) -> Self::F;
    /// 16 half floats.
    unsafe fn load_f16(p: *const u8) -> Self::F;
    /// 16 pairs of 8-bit floats: the first of each, the second, all divided by 2^8.
    unsafe fn load_f8(p: *const u8) -> (Self::F, Self::F);

    /// Writes 16 half floats, nearest even.
    unsafe fn store_f16(p: *mut u8, x: Self::F);

    /// The larger of two; `b` where `a` is NaN.
    #[inline(always)]
    unsafe fn max(a: Self::F, b: Self::F) -> Self::F {
        let (mut x, mut y) = ([0.0f32; 16], [0.0f32; 16]);
        // SAFETY: the caller has the instruction set; arrays of 16.
        unsafe {
            Self::store(x.as_mut_ptr(), a);
            Self::store(y.as_mut_ptr(), b);
            for i in 0..16 {
                y[i] = if x[i] > y[i] { x[i] } else { y[i] };
            }
            Self::load(y.as_ptr())
        }
    }
    /// The largest of 16.
    #[inline(always)]
    unsafe fn largest(x: Self::F) -> f32 {
        let mut m = [0.0f32; 16];
        // SAFETY: the caller has the instruction set; an array of 16.
        unsafe { Self::store(m.as_mut_ptr(), x) };
        let larger = |a: f32, b: f32| if b > a { b } else { a };
        let m: [f32; 8] = std::array::from_fn(|i| larger(m[i], m[i + 8]));
        let m: [f32; 4] = std::array::from_fn(|i| larger(m[i], m[i + 4]));
        let m: [f32; 2] = std::array::from_fn(|i| larger(m[i], m[i + 2]));
        larger(m[0], m[1])
    }
    /// Exponentials of what is at most 0; NaN stays.
    #[inline(always)]
    unsafe fn exp_below(x: Self::F) -> Self::F
    where
        Self: Sized,
    {
        let mut y = [0.0f32; 16];
        // SAFETY: the caller has the instruction set; an array of 16.
        unsafe {
            Self::store(y.as_mut_ptr(), x);
            y = y.map(|x| super::vector::exp_below::<Self>(x));
            Self::load(y.as_ptr())
        }
    }

    /// A page's weights in two times seven bits.
    #[inline(always)]
    unsafe fn split(x: &[f32; PAGE]) -> Split {
        super::quantize::split(x)
    }

    /// A block of 8-bit activations.
    #[inline(always)]
    unsafe fn quantize(x: &[f32; Q8_BLOCK]) -> Q8Block {
        super::quantize::block(x)
    }

    unsafe fn splat_i32(x: i32) -> Self::I;
    unsafe fn to_float(x: Self::I) -> Self::F;
    /// 64 bytes of weights stored with 128 added.
    unsafe fn load_weights(p: *const u8) -> Self::W;
    /// 64 bytes of nibbles: the low ones, the high ones.
    unsafe fn load_nibbles(p: *const u8) -> (Self::N, Self::N);
    unsafe fn load_table(table: &[i8; 16]) -> Self::T;
    /// The weights the codes stand for.
    unsafe fn look_up(table: Self::T, codes: Self::N) -> Self::W;
    /// `acc[lane] += sum of w[lane][i] * x[i]` over the four signed bytes of `x`.
    unsafe fn dot(acc: Self::I, w: Self::W, x: i32) -> Self::I;
    /// The same with the four bytes `at` words behind `p`, from memory as in [`Lanes::fma_from`].
    #[inline(always)]
    unsafe fn dot_from(acc: Self::I, w: Self::W, p: *const i8, at: usize) -> Self::I {
        // SAFETY: the caller's promise.
        unsafe { Self::dot(acc, w, p.add(4 * at).cast::<i32>().read_unaligned()) }
    }
    /// The same for codes 0..=15.
    unsafe fn dot_nibbles(acc: Self::I, codes: Self::N, x: i32) -> Self::I;
    /// 64 signed bytes.
    unsafe fn load_signed(p: *const u8) -> Self::N;
    /// `acc[lane] += sum of codes[lane][i] * x[i]` over the four bytes of `x`, which are 0..=127.
    unsafe fn dot_signed(acc: Self::I, codes: Self::N, x: i32) -> Self::I;
    unsafe fn prefetch(p: *const u8);
    /// Into the second cache.
    unsafe fn prefetch_second(p: *const u8);
}

/// A piece of work made of lane methods. Each becomes one function, so that its sums are all there is to allocate registers for.
pub(super) trait Tile {
    /// # Safety
    /// Needs the instruction set that the tile's lanes are of, and whatever the maker of the tile promised.
    unsafe fn run(self);
}

/// Sizes of register files that matter to the tiles.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Registers {
    /// No vectors to speak of: one row, one panel.
    None,
    /// 16 registers of half a panel row.
    Sixteen,
    /// 32 registers of a panel row.
    ThirtyTwo,
}

impl Registers {
    /// Equality, for constants.
    pub(super) const fn are(self, other: Registers) -> bool {
        self as u8 == other as u8
    }
}
