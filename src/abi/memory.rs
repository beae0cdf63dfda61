//! A little memory for the moment when there is none.
//!
//! Rust ends the process when a small allocation fails, and a library must not. The first call through the C surface sets
//! an address range aside; from then on a small request that the system refuses is served from there. The call then ends
//! as it can: what is asked for in large pieces is asked for in ways that may fail, new handles are refused, and errors
//! that came of it are `METRALE_OUT_OF_MEMORY`. Before that first call, and so for Rust programs, this is the system's
//! allocator and nothing else.
//!
//! The range is mapped and not touched: it takes no memory until it is used, but counts against limits of address space
//! and strict overcommit, which are what makes the system refuse.

#![cfg_attr(not(feature = "reserve"), allow(dead_code))] // Without the feature only the two questions of `guard` are asked.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, Once, PoisonError};

/// Bytes set aside.
const RESERVE: usize = 16 << 20;
/// The largest request that is served from there. Larger ones are made in ways that may fail.
const LARGEST: usize = 64 << 10;

/// Where the reserve begins; 0 until the first call.
static START: AtomicUsize = AtomicUsize::new(0);
/// Requests served from it since the process began.
static SERVED: AtomicUsize = AtomicUsize::new(0);
static USED: Mutex<Used> = Mutex::new(Used { next: 0, live: 0 });

struct Used {
    /// Offset of the first byte never handed out; back to 0 when nothing is live.
    next: usize,
    /// Pieces that are handed out.
    live: usize,
}

struct Memory;

#[cfg(feature = "reserve")]
#[global_allocator]
static MEMORY: Memory = Memory;

thread_local! {
    /// `SERVED` when the newest call of this thread began; `None` before the first.
    static BEGAN: Cell<Option<usize>> = const { Cell::new(None) };
}

/// Notes the beginning of a call; the first one of all sets the reserve aside.
pub(super) fn begin() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| START.store(map(), Ordering::Release));
    let _ = BEGAN.try_with(|b| b.set(Some(SERVED.load(Ordering::Relaxed))));
}

/// Whether the system refused memory since this thread's call began, on any thread.
pub(super) fn ran_short() -> bool {
    BEGAN.try_with(|b| b.get().is_some_and(|began| began != SERVED.load(Ordering::Relaxed))).unwrap_or(false)
}

#[cfg(all(unix, feature = "reserve"))]
fn map() -> usize {
    let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANON);
    // SAFETY: a new mapping anywhere touches nothing that exists.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), RESERVE, access, kind, -1, 0) };
    if start == libc::MAP_FAILED { 0 } else { start.expose_provenance() }
}

#[cfg(not(all(unix, feature = "reserve")))]
fn map() -> usize {
    0
}

/// Whether the reserve owns an address.
fn ours(pointer: *mut u8) -> bool {
    let start = START.load(Ordering::Relaxed);
    start != 0 && pointer.addr().wrapping_sub(start) < RESERVE
}

/// A piece of the reserve, or NULL.
fn serve(layout: Layout) -> *mut u8 {
    let start = START.load(Ordering::Acquire);
    if start == 0 || layout.size() > LARGEST {
        return std::ptr::null_mut();
    }
    let mut used = USED.lock().unwrap_or_else(PoisonError::into_inner);
    // The start of a mapping is a multiple of every alignment that is asked for; a larger one finds no piece.
    let Some(offset) = used.next.checked_next_multiple_of(layout.align().max(16)) else { return std::ptr::null_mut() };
    if layout.align() > 4096 || offset + layout.size() > RESERVE {
        return std::ptr::null_mut();
    }
    used.next = offset + layout.size();
    used.live += 1;
    std::ptr::with_exposed_provenance_mut(start + offset)
}

/// What the system refused: from the reserve, and noted, or NULL.
fn rescue(layout: Layout) -> *mut u8 {
    let pointer = serve(layout);
    SERVED.fetch_add(usize::from(!pointer.is_null()), Ordering::Relaxed);
    pointer
}

/// Takes a piece back. The last piece handed out is used again at once, all of them when none is left.
fn take_back(pointer: *mut u8, size: usize) {
    let mut used = USED.lock().unwrap_or_else(PoisonError::into_inner);
    used.live -= 1;
    let offset = pointer.addr() - START.load(Ordering::Relaxed);
    if used.live == 0 {
        used.next = 0;
    } else if offset + size == used.next {
        used.next = offset;
    }
}

// SAFETY: what `System` gives goes back to `System`. A piece of the reserve is handed out once until it is taken back, is as large and as
// aligned as asked, and lies in a mapping that stays for good. Nothing here unwinds or allocates.
unsafe impl GlobalAlloc for Memory {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise is passed on.
        let pointer = unsafe { System.alloc(layout) };
        if pointer.is_null() { rescue(layout) } else { pointer }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise is passed on.
        let pointer = unsafe { System.alloc_zeroed(layout) };
        if !pointer.is_null() {
            return pointer;
        }
        let pointer = rescue(layout);
        if !pointer.is_null() {
            // SAFETY: the piece has that many bytes; it may have been used before.
            unsafe { pointer.write_bytes(0, layout.size()) };
        }
        pointer
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        if ours(pointer) {
            take_back(pointer, layout.size());
        } else {
            // SAFETY: it is none of ours, so `System` gave it.
            unsafe { System.dealloc(pointer, layout) }
        }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        let kept = ours(pointer);
        if !kept {
            // SAFETY: it is none of ours, so `System` gave it.
            let larger = unsafe { System.realloc(pointer, layout, size) };
            if !larger.is_null() {
                return larger;
            }
        }
        // SAFETY: the caller promises a size that fits a layout.
        let wanted = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        // SAFETY: `wanted` is not empty by the caller's promise.
        let place = if kept { unsafe { self.alloc(wanted) } } else { rescue(wanted) };
        if !place.is_null() {
            // SAFETY: both have that many bytes and are two places; the old one is given back where it came from, once.
            unsafe {
                std::ptr::copy_nonoverlapping(pointer, place, layout.size().min(size));
                self.dealloc(pointer, layout);
            }
        }
        place
    }
}

#[cfg(all(test, unix, feature = "reserve"))]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_apart_aligned_and_come_back() {
        begin();
        let layouts = [(1, 1), (100, 64), (LARGEST, 4096), (16, 16)].map(|(size, align)| Layout::from_size_align(size, align).unwrap());
        let pieces = layouts.map(serve);
        for (i, (piece, layout)) in pieces.iter().zip(layouts).enumerate() {
            assert!(ours(*piece) && piece.addr() % layout.align() == 0);
            assert!(pieces[..i].iter().zip(layouts).all(|(p, l)| p.addr() + l.size() <= piece.addr()), "piece {i} begins inside another");
        }
        assert!(!ran_short());
        assert!(serve(Layout::from_size_align(LARGEST + 1, 1).unwrap()).is_null());
        for (piece, layout) in pieces.iter().zip(layouts) {
            // SAFETY: each came from `serve` with this layout.
            unsafe { Memory.dealloc(*piece, layout) };
        }
        assert_eq!(serve(layouts[0]), pieces[0]);
        // SAFETY: as above; a small piece that moves keeps its bytes, and leaves the reserve as soon as the system has memory.
        unsafe {
            pieces[0].write(7);
            let moved = Memory.realloc(pieces[0], layouts[0], 50);
            assert!(!ours(moved) && moved.read() == 7);
            Memory.dealloc(moved, Layout::from_size_align(50, 1).unwrap());
        }
        let piece = rescue(layouts[0]);
        assert!(ran_short());
        // SAFETY: as above.
        unsafe { Memory.dealloc(piece, layouts[0]) };
        begin();
        assert!(!ran_short());
    }
}
