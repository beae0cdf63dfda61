//! Pages of keys and values: their element types, and where a page keeps what.
#![allow(unsafe_code)] // elements of pages, which several workers write side by side

pub use crate::backend::cpu::simd::attend::{KvType, PAGE};

use crate::backend::cpu::simd::{Table, attend_q8};
use half::{bf16, f16};
use std::ops::Range;

/// Dims of one layer's key/value pages.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct KvSpec {
    /// Key/value heads.
    pub heads: usize,
    /// Elements of a key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// Element type.
    pub dtype: KvType,
}

/// Lanes of a run of keys.
const LANES: usize = 16;

impl KvSpec {
    /// Bytes of a page: for each head `PAGE` keys as `[PAGE/16][key_dim][16]` (lane = position, so that a query meets
    /// sixteen keys without a horizontal sum), then `PAGE` values as `[PAGE][value_dim]`; in 8 bits as `attend_q8.rs` says. A head's keys and
    /// values lie together, so that a pass over some of the heads reads long runs.
    pub const fn page_bytes(&self) -> usize {
        self.heads * self.head_stride() * self.dtype.bytes()
    }

    /// Elements from one head of a page to the next; in 8 bits, here and below, bytes.
    pub const fn head_stride(&self) -> usize {
        match self.dtype {
            KvType::Q8 => attend_q8::keys_bytes(self.key_dim) + attend_q8::values_bytes(self.value_dim),
            _ => PAGE * (self.key_dim + self.value_dim),
        }
    }

    /// Element index of head `head`'s keys in a page.
    pub const fn key_at(&self, head: usize) -> usize {
        head * self.head_stride()
    }

    /// Element index of head `head`'s values in a page.
    pub const fn value_at(&self, head: usize) -> usize {
        self.key_at(head)
            + match self.dtype {
                KvType::Q8 => attend_q8::keys_bytes(self.key_dim),
                _ => PAGE * self.key_dim,
            }
    }

    /// Element index of element `d` of head `head`'s key at place `at` of a page.
    const fn key_of(&self, head: usize, at: usize, d: usize) -> usize {
        self.key_at(head)
            + match self.dtype {
                KvType::Q8 => attend_q8::key_code(at, d),
                _ => at / LANES * LANES * self.key_dim + d * LANES + at % LANES,
            }
    }

    /// Element index of element `d` of head `head`'s value at place `at` of a page.
    const fn value_of(&self, head: usize, at: usize, d: usize) -> usize {
        self.value_at(head)
            + match self.dtype {
                KvType::Q8 => attend_q8::value_code(self.value_dim, at, d),
                _ => at * self.value_dim + d,
            }
    }

    /// Bytes of a head's key at a place of a page, in runs.
    pub fn key_runs(&self, head: usize, at: usize) -> impl Iterator<Item = Range<usize>> {
        let (spec, bytes) = (*self, self.dtype.bytes());
        let scales = if self.dtype == KvType::Q8 { self.key_dim.div_ceil(attend_q8::BLOCK_ELEMENTS) } else { 0 };
        let scales = (0..scales).map(move |block| spec.key_at(head) + attend_q8::key_scale(at, block)).map(|first| first..first + 4);
        scales.chain((0..self.key_dim).map(move |d| spec.key_of(head, at, d) * bytes).map(move |first| first..first + bytes))
    }

    /// Bytes of a head's value at a place of a page, in runs.
    pub fn value_runs(&self, head: usize, at: usize) -> impl Iterator<Item = Range<usize>> {
        let (spec, bytes) = (*self, self.dtype.bytes());
        let scale = (self.dtype == KvType::Q8).then(|| self.value_at(head) + attend_q8::value_scale(at)).map(|first| first..first + 4);
        scale.into_iter().chain((0..self.value_dim).map(move |d| spec.value_of(head, at, d) * bytes).map(move |first| first..first + bytes))
    }

    /// Bytes of a head's key and value at one place.
    pub const fn place_bytes(&self) -> usize {
        match self.dtype {
            KvType::Q8 => self.key_dim + self.key_dim.div_ceil(attend_q8::BLOCK_ELEMENTS) * 4 + self.value_dim + 4,
            _ => (self.key_dim + self.value_dim) * self.dtype.bytes(),
        }
    }

    /// Reads head `head`'s key at place `at` of a whole page.
    pub fn read_key(&self, page: &[u8], head: usize, at: usize, key: &mut [f32]) {
        assert!(page.len() >= self.page_bytes() && head < self.heads && at < PAGE && key.len() == self.key_dim);
        for (d, key) in key.iter_mut().enumerate() {
            // SAFETY: inside the page, which is borrowed.
            *key = unsafe { self.key(page.as_ptr(), head, at, d) };
        }
    }

    /// Writes head `head`'s key at place `at` of a whole page.
    pub fn write_key(&self, table: &Table, page: &mut [u8], head: usize, at: usize, key: &[f32]) {
        assert!(page.len() >= self.page_bytes() && head < self.heads && at < PAGE && key.len() == self.key_dim);
        // SAFETY: inside the page, which is borrowed alone.
        unsafe { self.store_key(table, page.as_mut_ptr(), head, at, key) }
    }

    /// Element `d` of head `head`'s key at place `at`.
    ///
    /// # Safety
    /// `page` is good for [`KvSpec::page_bytes`], the element is inside, and nobody writes it now.
    pub(super) unsafe fn key(&self, page: *const u8, head: usize, at: usize, d: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe {
            match self.dtype {
                KvType::Q8 => attend_q8::key(page.add(self.key_at(head)), at, d),
                _ => self.element(page, self.key_of(head, at, d)),
            }
        }
    }

    /// Element `d` of head `head`'s value at place `at`.
    ///
    /// # Safety
    /// As for [`KvSpec::key`].
    pub(super) unsafe fn value(&self, page: *const u8, head: usize, at: usize, d: usize) -> f32 {
        // SAFETY: the caller's promise.
        unsafe {
            match self.dtype {
                KvType::Q8 => attend_q8::value(page.add(self.value_at(head)), self.value_dim, at, d),
                _ => self.element(page, self.value_of(head, at, d)),
            }
        }
    }

    /// # Safety
    /// `at` is inside the page of floats, and nobody writes that element now.
    unsafe fn element(&self, page: *const u8, at: usize) -> f32 {
        // SAFETY: the caller's promise. A page on the host begins at a multiple of 64; a copy of one may begin anywhere.
        unsafe {
            match self.dtype {
                KvType::F16 => page.cast::<f16>().add(at).read_unaligned().to_f32(),
                KvType::Bf16 => page.cast::<bf16>().add(at).read_unaligned().to_f32(),
                _ => page.cast::<f32>().add(at).read_unaligned(),
            }
        }
    }

    /// Writes head `head`'s key at place `at`.
    ///
    /// # Safety
    /// `page` is good for [`KvSpec::page_bytes`], the place is inside, and nobody else touches this key now.
    pub(super) unsafe fn store_key(&self, table: &Table, page: *mut u8, head: usize, at: usize, key: &[f32]) {
        // SAFETY: the caller's promise.
        unsafe {
            match self.dtype {
                KvType::Q8 => attend_q8::write_key(table, page.add(self.key_at(head)), at, key),
                _ => self.store(table, page, self.key_of(head, at, 0), LANES, key),
            }
        }
    }

    /// Writes head `head`'s value at place `at`.
    ///
    /// # Safety
    /// As for [`KvSpec::store_key`].
    pub(super) unsafe fn store_value(&self, table: &Table, page: *mut u8, head: usize, at: usize, value: &[f32]) {
        // SAFETY: the caller's promise.
        unsafe {
            match self.dtype {
                KvType::Q8 => attend_q8::write_value(page.add(self.value_at(head)), at, value),
                _ => self.store(table, page, self.value_of(head, at, 0), 1, value),
            }
        }
    }

    /// Writes elements of a page of floats from `at` on, `step` apart.
    ///
    /// # Safety
    /// They are inside the page, and nobody else touches them now.
    unsafe fn store(&self, table: &Table, page: *mut u8, at: usize, step: usize, x: &[f32]) {
        const CHUNK: usize = 64;
        let mut words = [0u16; CHUNK];
        for (chunk, x) in x.chunks(CHUNK).enumerate() {
            let (at, words) = (at + chunk * CHUNK * step, &mut words[..x.len()]);
            match self.dtype {
                KvType::F16 => table.to_f16(x, words),
                KvType::Bf16 => table.to_bf16(x, words),
                _ => {
                    for (i, x) in x.iter().enumerate() {
                        // SAFETY: the caller's promise.
                        unsafe { page.cast::<f32>().add(at + i * step).write_unaligned(*x) };
                    }
                    continue;
                }
            }
            for (i, word) in words.iter().enumerate() {
                // SAFETY: as above.
                unsafe { page.cast::<u16>().add(at + i * step).write_unaligned(*word) };
            }
        }
    }
}
