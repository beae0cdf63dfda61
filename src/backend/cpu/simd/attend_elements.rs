//! Elements of keys and values that are floats.
#![allow(unsafe_code)] // Reads pages through pointers that the caller vouches for.

use super::lane::Lanes;

/// Element type of a page of floats.
pub(super) trait Element {
    /// Bytes of an element.
    const BYTES: usize;
    /// 16 elements from index `at`.
    unsafe fn load<S: Lanes>(page: *const u8, at: usize) -> S::F;
    /// One element.
    unsafe fn one(page: *const u8, at: usize) -> f32;
}

/// f32.
pub(super) struct Full;
/// Half floats.
pub(super) struct Half;
/// bfloat16.
pub(super) struct Brain;

impl Element for Full {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<S: Lanes>(page: *const u8, at: usize) -> S::F {
        // SAFETY: the caller's promise.
        unsafe { S::load(page.cast::<f32>().add(at)) }
    }
    #[inline(always)]
    unsafe fn one(page: *const u8, at: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe { *page.cast::<f32>().add(at) }
    }
}

/// An element of 16 bits: how 16 of them are loaded, and the type of one.
macro_rules! short_element {
    ($name:ident, $load:ident, $one:ty) => {
        impl Element for $name {
            const BYTES: usize = 2;
            #[inline(always)]
            unsafe fn load<S: Lanes>(page: *const u8, at: usize) -> S::F {
                // SAFETY: the caller's promise.
                unsafe { S::$load(page.add(at * 2)) }
            }
            #[inline(always)]
            unsafe fn one(page: *const u8, at: usize) -> f32 {
                // SAFETY: the caller's promise.
                <$one>::from_bits(unsafe { *page.cast::<u16>().add(at) }).to_f32()
            }
        }
    };
}
short_element!(Half, load_f16, half::f16);
short_element!(Brain, load_bf16, half::bf16);
