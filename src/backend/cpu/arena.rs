//! Memory for weights, caches and workspaces: zeroed, aligned for the widest vector, on huge pages where it is large.
//!
//! Huge pages are worth 10-15 % of read bandwidth. The system is only advised, so a machine without them works the same.
#![allow(unsafe_code)] // Memory comes from mmap or the allocator as a raw pointer.

use crate::error::{Error, Kind, Result};
use crate::runtime::{self, Charge, Class};
use std::alloc::Layout;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Alignment of every buffer: one cache line, one AVX-512 register.
pub const ALIGN: usize = 64;
/// Size of a huge page; buffers at least this large are mapped on their own, on such pages.
const HUGE: usize = 2 << 20;
/// Size of an ordinary page.
const PAGE: usize = 4096;
/// Buffers at least this large are mapped, so that zeroing them costs nothing until they are touched, a page at a time: an
/// allocator clears them at once, which is milliseconds for the cache pages of all layers together.
const LAZY: usize = 128 << 10;

/// A fixed run of bytes, zero at first. Owns its memory; may be read from any thread.
pub struct Buffer {
    ptr: NonNull<u8>,
    len: usize,
    kind: Origin,
    /// Its count on the runtime it came from.
    _charge: Charge,
}

enum Origin {
    Empty,
    Heap(Layout),
    /// Length of the mapping that starts at `ptr`.
    Mapped(usize),
    /// A piece of a region, which stays as long.
    Part {
        _region: Arc<Region>,
    },
}

/// One buffer for many: pieces of it are handed out one behind the other and nothing is taken back before the last of them is
/// gone. Small matrices lie on huge pages this way, and large ones do not waste the rest of their last.
pub struct Region {
    buffer: Buffer,
    used: AtomicUsize,
}

impl Region {
    /// Room for `len` bytes of `what`, counted for a purpose.
    pub fn new(class: Class, len: usize, what: &str) -> Result<Arc<Region>> {
        Ok(Arc::new(Region { buffer: Buffer::of(class, len, what)?, used: AtomicUsize::new(0) }))
    }

    /// What a piece of `len` bytes takes of the room.
    pub fn room(len: usize) -> usize {
        len.checked_next_multiple_of(ALIGN).unwrap_or(len)
    }

    /// The next `len` bytes, zeroed; `None` where they are not left.
    pub fn take(self: &Arc<Self>, len: usize) -> Option<Buffer> {
        let next = |used: usize| used.checked_add(Region::room(len)).filter(|&end| end <= self.buffer.len());
        let start = self.used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok()?;
        // SAFETY: `start` and the `len` bytes after it lie inside the buffer, and nobody else was given them.
        let ptr = unsafe { self.buffer.ptr.add(start) };
        // The region is counted as a whole.
        let charge = Charge::new(Class::Other, 0, 0)?;
        Some(Buffer { ptr, len, kind: Origin::Part { _region: Arc::clone(self) }, _charge: charge })
    }
}

// SAFETY: the buffer owns its memory alone, and hands it out only through `&self` (shared, read) and `&mut self`.
unsafe impl Send for Buffer {}
// SAFETY: as above; there is no interior mutability.
unsafe impl Sync for Buffer {}

impl Buffer {
    /// `len` zeroed bytes for `what`, or `OutOfMemory` naming it.
    pub fn new(len: usize, what: &str) -> Result<Buffer> {
        Buffer::of(Class::Other, len, what)
    }

    /// As `new`, counted for a purpose.
    pub fn of(class: Class, len: usize, what: &str) -> Result<Buffer> {
        let fail = || Error::new(Kind::OutOfMemory, format!("{what}: {len} bytes could not be allocated")).sizes(len as u64, 0).named(what);
        if len == 0 {
            let ptr = NonNull::new(std::ptr::without_provenance_mut(ALIGN)).ok_or_else(fail)?;
            return Ok(Buffer { ptr, len, kind: Origin::Empty, _charge: Charge::new(class, 0, 0).ok_or_else(fail)? });
        }
        // What a host's allocator gives may be of any size and is its own business.
        if len >= LAZY && !Charge::is_hosted() {
            // What is left of a last huge page stays with the system.
            let bytes = len.checked_next_multiple_of(PAGE).ok_or_else(fail)?;
            let charge = Charge::new(class, bytes, bytes).ok_or_else(fail)?;
            let ptr = if len >= HUGE { map_huge(bytes) } else { map(bytes) }.ok_or_else(fail)?;
            return Ok(Buffer { ptr, len, kind: Origin::Mapped(bytes), _charge: charge });
        }
        let layout = Layout::from_size_align(len, ALIGN).map_err(|_| fail())?;
        let charge = Charge::new(class, len, 0).ok_or_else(fail)?;
        // SAFETY: the layout's size is not zero.
        let ptr = NonNull::new(runtime::fallible(|| unsafe { std::alloc::alloc_zeroed(layout) })).ok_or_else(fail)?;
        Ok(Buffer { ptr, len, kind: Origin::Heap(layout), _charge: charge })
    }

    /// Has the system provide all of it now rather than at first use, when somebody may be in a hurry.
    pub fn touch(&mut self) {
        for place in self.as_mut_slice().iter_mut().step_by(PAGE) {
            // A plain store of the value that is there could be left out.
            // SAFETY: a reference is valid for writes.
            unsafe { std::ptr::write_volatile(place, 0) };
        }
    }

    /// Bytes in the buffer.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `ptr` covers `len` initialised bytes for as long as `self` lives.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }

    /// The bytes, to write.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }

    /// First byte. Valid while the buffer lives; who writes through it answers for the aliasing.
    pub fn as_ptr(&self) -> *mut u8 {
        self.ptr.as_ptr()
    }

    /// The buffer as `T`s (as many as fit).
    pub fn as_slice_of<T: Plain>(&self) -> &[T] {
        const { assert!(align_of::<T>() <= ALIGN) };
        // SAFETY: the start is 64-byte aligned, any bytes are a valid `T` (`Plain`), and the count fits in `len`.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr().cast(), self.len / size_of::<T>()) }
    }

    /// The buffer as `T`s, to write.
    pub fn as_mut_slice_of<T: Plain>(&mut self) -> &mut [T] {
        const { assert!(align_of::<T>() <= ALIGN) };
        // SAFETY: as above, and `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr().cast(), self.len / size_of::<T>()) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        match &self.kind {
            Origin::Empty | Origin::Part { .. } => {}
            // SAFETY: allocated with this layout in `new`.
            Origin::Heap(layout) => unsafe { std::alloc::dealloc(self.ptr.as_ptr(), *layout) },
            Origin::Mapped(bytes) => unmap(self.ptr, *bytes),
        }
    }
}

/// Types for which every bit pattern is a value and which have no padding.
///
/// # Safety
/// The implementor promises exactly that.
pub unsafe trait Plain: Copy + 'static {}
// SAFETY: numbers have no padding and no invalid patterns.
unsafe impl Plain for u8 {}
// SAFETY: as above.
unsafe impl Plain for u16 {}
// SAFETY: as above.
unsafe impl Plain for i8 {}
// SAFETY: as above.
unsafe impl Plain for i32 {}
// SAFETY: as above.
unsafe impl Plain for u32 {}
// SAFETY: as above.
unsafe impl Plain for f32 {}

/// A private zeroed mapping of `bytes`, whole pages.
#[cfg(unix)]
fn map(bytes: usize) -> Option<NonNull<u8>> {
    // SAFETY: an anonymous private mapping at an address of the kernel's choice touches nothing that exists.
    let raw = unsafe {
        libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    };
    if raw == libc::MAP_FAILED { None } else { NonNull::new(raw.cast()) }
}

/// A private zeroed mapping of `bytes`, whole pages, that starts on the boundary of a huge page.
#[cfg(unix)]
fn map_huge(bytes: usize) -> Option<NonNull<u8>> {
    let wide = bytes.checked_add(HUGE)?;
    // SAFETY: an anonymous private mapping at an address of the kernel's choice touches nothing that exists.
    let raw = unsafe {
        libc::mmap(std::ptr::null_mut(), wide, libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1, 0)
    };
    if raw == libc::MAP_FAILED {
        return None;
    }
    let raw = raw.cast::<u8>();
    let head = raw.align_offset(HUGE);
    // SAFETY: `head < HUGE`, so the aligned start lies inside the mapping of `bytes + HUGE` bytes; head and tail, which are cut off,
    // are whole pages of it that nobody else knows about.
    unsafe {
        let start = raw.add(head);
        if head > 0 {
            libc::munmap(raw.cast(), head);
        }
        if head < HUGE {
            libc::munmap(start.add(bytes).cast(), HUGE - head);
        }
        #[cfg(target_os = "linux")]
        libc::madvise(start.cast(), bytes, libc::MADV_HUGEPAGE);
        Some(NonNull::new_unchecked(start))
    }
}

#[cfg(unix)]
fn unmap(ptr: NonNull<u8>, bytes: usize) {
    // SAFETY: `ptr` and `bytes` are what `map_huge` kept of its mapping, and the owner is being dropped.
    unsafe { libc::munmap(ptr.as_ptr().cast(), bytes) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn zeroed_aligned_and_writable() {
        for len in [0, 1, 63, 4096, LAZY - 1, LAZY, LAZY + 5, HUGE - 1, HUGE, HUGE + 1, 5 * HUGE + 123] {
            let mut b = Buffer::new(len, "test").unwrap();
            assert_eq!((b.len(), b.as_slice().len()), (len, len));
            assert_eq!(b.as_ptr() as usize % if len >= HUGE { HUGE } else { ALIGN }, 0);
            assert!(b.as_slice().iter().all(|&x| x == 0));
            b.as_mut_slice().fill(7);
            assert_eq!(b.as_slice_of::<u32>().len(), len / 4);
            assert!(b.as_slice_of::<u32>().iter().all(|&x| x == 0x0707_0707));
        }
    }

    #[test]
    fn a_regions_pieces_are_apart_and_outlive_it() {
        let region = Region::new(Class::Other, 64 + 128 + 64, "test").unwrap();
        let mut pieces: Vec<Buffer> = [1, 65, 0, 64].iter().map(|&n| region.take(n).unwrap()).collect();
        assert!(region.take(1).is_none() && region.take(usize::MAX).is_none());
        drop(region);
        for (value, piece) in pieces.iter_mut().enumerate() {
            assert!(piece.as_slice().iter().all(|&x| x == 0) && (piece.as_ptr() as usize).is_multiple_of(ALIGN));
            piece.as_mut_slice().fill(value as u8 + 1);
        }
        let sums = pieces.iter().map(|p| p.as_slice().iter().map(|&x| x as usize).sum::<usize>());
        assert_eq!(sums.collect::<Vec<_>>(), [1, 130, 0, 256]);
    }

    #[test]
    fn impossible_sizes_are_errors() {
        for len in [usize::MAX, usize::MAX - HUGE, 1 << 62] {
            let e = Buffer::new(len, "weights").err().unwrap();
            assert_eq!((e.kind(), e.name(), e.wanted()), (Kind::OutOfMemory, Some("weights"), Some(len as u64)));
        }
    }
}
