//! The definition of the lanes, in plain code that every processor runs.
#![allow(unsafe_code)] // Implements a trait whose methods take pointers.

use super::lane::{Lanes, Registers, Tile};
use half::{bf16, f16};
use std::array::from_fn;

/// Plain arrays.
pub(super) struct Scalar;

/// SAFETY (of every block here): the caller's pointer is good for the bytes that the method's name promises.
impl Lanes for Scalar {
    type F = [f32; 16];
    type I = [i32; 16];
    type W = [[u8; 4]; 16];
    type N = [[u8; 4]; 16];
    type T = [u8; 16];
    const REGISTERS: Registers = Registers::None;
    const BIASED: bool = true;
    const FUSED: bool = false;

    unsafe fn call<T: Tile>(tile: T) {
        unsafe fn inside<T: Tile>(tile: T) {
            // SAFETY: the features are enabled here; the rest is the caller's promise.
            unsafe { tile.run() }
        }
        // SAFETY: the caller has the instruction set.
        unsafe { inside(tile) }
    }

    #[inline(always)]
    unsafe fn splat(x: f32) -> Self::F {
        [x; 16]
    }
    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self::F {
        // SAFETY: 64 readable bytes.
        unsafe { p.cast::<Self::F>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(p: *mut f32, x: Self::F) {
        // SAFETY: 64 writable bytes.
        unsafe { p.cast::<Self::F>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn add(a: Self::F, b: Self::F) -> Self::F {
        from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    unsafe fn mul(a: Self::F, b: Self::F) -> Self::F {
        from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // Not `mul_add`: without the instruction that is a library call, fifty times slower.
        from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    unsafe fn fnma(a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        from_fn(|i| c[i] - a[i] * b[i])
    }
    #[inline(always)]
    unsafe fn load_bf16_low(p: *const u8) -> Self::F {
        // SAFETY: 64 readable bytes.
        let pairs = unsafe { p.cast::<[[u16; 2]; 16]>().read_unaligned() };
        pairs.map(|pair| bf16::from_bits(pair[0]).to_f32())
    }
    #[inline(always)]
    unsafe fn load_bf16_high(p: *const u8) -> Self::F {
        // SAFETY: 64 readable bytes.
        let pairs = unsafe { p.cast::<[[u16; 2]; 16]>().read_unaligned() };
        pairs.map(|pair| bf16::from_bits(pair[1]).to_f32())
    }
    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self::F {
        // SAFETY: 32 readable bytes.
        let words = unsafe { p.cast::<[u16; 16]>().read_unaligned() };
        words.map(|bits| bf16::from_bits(bits).to_f32())
    }
    #[inline(always)]
    unsafe fn load_f16(p: *const u8) -> Self::F {
        // SAFETY: 32 readable bytes.
        let halves = unsafe { p.cast::<[u16; 16]>().read_unaligned() };
        halves.map(|h| f16::from_bits(h).to_f32_const())
    }
    #[inline(always)]
    unsafe fn load_f8(p: *const u8) -> (Self::F, Self::F) {
        // SAFETY: 32 readable bytes.
        let pairs = unsafe { p.cast::<[[u8; 2]; 16]>().read_unaligned() };
        // The fields of a half float.
        let float = |code: u8| f16::from_bits(u16::from(code & 0x80) << 8 | u16::from(code & 0x7f) << 7).to_f32_const();
        (pairs.map(|pair| float(pair[0])), pairs.map(|pair| float(pair[1])))
    }
    #[inline(always)]
    unsafe fn store_f16(p: *mut u8, x: Self::F) {
        let halves = x.map(|x| f16::from_f32_const(x).to_bits());
        // SAFETY: 32 writable bytes.
        unsafe { p.cast::<[u16; 16]>().write_unaligned(halves) }
    }
    #[inline(always)]
    unsafe fn splat_i32(x: i32) -> Self::I {
        [x; 16]
    }
    #[inline(always)]
    unsafe fn to_float(x: Self::I) -> Self::F {
        x.map(|x| x as f32)
    }
    #[inline(always)]
    unsafe fn load_weights(p: *const u8) -> Self::W {
        // SAFETY: 64 readable bytes.
        unsafe { p.cast::<Self::W>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_nibbles(p: *const u8) -> (Self::N, Self::N) {
        // SAFETY: 64 readable bytes.
        let bytes = unsafe { p.cast::<Self::N>().read_unaligned() };
        (bytes.map(|g| g.map(|b| b & 15)), bytes.map(|g| g.map(|b| b >> 4)))
    }
    #[inline(always)]
    unsafe fn load_table(table: &[i8; 16]) -> Self::T {
        table.map(|w| (w as u8) ^ 0x80)
    }
    #[inline(always)]
    unsafe fn look_up(table: Self::T, codes: Self::N) -> Self::W {
        codes.map(|g| g.map(|c| table[(c & 15) as usize]))
    }
    #[inline(always)]
    unsafe fn dot(acc: Self::I, w: Self::W, x: i32) -> Self::I {
        let x = x.to_le_bytes().map(|b| b as i8 as i32);
        from_fn(|i| acc[i] + w[i][0] as i32 * x[0] + w[i][1] as i32 * x[1] + w[i][2] as i32 * x[2] + w[i][3] as i32 * x[3])
    }
    #[inline(always)]
    unsafe fn dot_nibbles(acc: Self::I, codes: Self::N, x: i32) -> Self::I {
        // SAFETY: no pointer involved.
        unsafe { Self::dot(acc, codes, x) }
    }
    #[inline(always)]
    unsafe fn load_signed(p: *const u8) -> Self::N {
        // SAFETY: 64 readable bytes.
        unsafe { p.cast::<Self::N>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn dot_signed(acc: Self::I, codes: Self::N, x: i32) -> Self::I {
        let x = x.to_le_bytes().map(i32::from);
        from_fn(|i| acc[i] + (0..4).map(|k| i32::from(codes[i][k] as i8) * x[k]).sum::<i32>())
    }
    #[inline(always)]
    unsafe fn prefetch(_: *const u8) {}
    #[inline(always)]
    unsafe fn prefetch_second(_: *const u8) {}
}
