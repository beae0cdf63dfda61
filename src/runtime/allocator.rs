//! The library's allocator: each piece goes back where it came from.
//!
//! In front of each piece lies the address of the runtime it came from, 0 for the system. What is refused, and cannot be
//! done without, comes from the reserve, whose pieces are known by their address.

#![cfg_attr(not(feature = "reserve"), allow(dead_code))] // Without the feature another allocator is in force.

use super::{Inner, current, reserve};
use std::alloc::{GlobalAlloc, Layout, System};

struct Allocator;

#[cfg(feature = "reserve")]
#[global_allocator]
static ALLOCATOR: Allocator = Allocator;

/// Bytes in front of a piece, of which the last eight hold the runtime's address. More where the piece is aligned to more.
const HEAD: usize = 16;

/// A piece with its head, and the length of the head.
fn whole(layout: Layout) -> Option<(Layout, usize)> {
    let align = layout.align().max(HEAD);
    Some((Layout::from_size_align(layout.size().checked_add(align)?, align).ok()?, align))
}

/// Memory from the current runtime or the system, or NULL.
fn take(layout: Layout, zeroed: bool) -> *mut u8 {
    let Some((whole, head)) = whole(layout) else { return std::ptr::null_mut() };
    let runtime = current::current_inner();
    let start = if runtime.is_null() {
        // SAFETY: the head makes the size more than 0.
        unsafe { if zeroed { System.alloc_zeroed(whole) } else { System.alloc(whole) } }
    } else {
        // SAFETY: the thread holds a reference.
        unsafe { (*runtime).alloc(whole) }
    };
    if start.is_null() {
        return start;
    }
    // SAFETY: the memory has `head + size` bytes and starts at a multiple of 16; `head` is at least 16.
    unsafe {
        let piece = start.add(head);
        piece.cast::<*mut Inner>().sub(1).write(runtime);
        if zeroed && !runtime.is_null() {
            piece.write_bytes(0, layout.size());
        }
        piece
    }
}

/// What was refused: from the reserve, and noted; NULL where the request reports it, or nothing is left.
fn rescue(layout: Layout) -> *mut u8 {
    if current::may_fail() {
        return std::ptr::null_mut();
    }
    let piece = reserve::take(layout);
    if !piece.is_null() {
        current::set_short(true);
    }
    piece
}

// SAFETY: what the system, a runtime or the reserve gives goes back there, which the address in front of it or its own tells. A piece is as
// large and as aligned as asked. Nothing here unwinds, or allocates by way of this allocator.
unsafe impl GlobalAlloc for Allocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let piece = take(layout, false);
        if piece.is_null() { rescue(layout) } else { piece }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        let piece = take(layout, true);
        if !piece.is_null() {
            return piece;
        }
        let piece = rescue(layout);
        if !piece.is_null() {
            // SAFETY: the piece has that many bytes; it may have been used before.
            unsafe { piece.write_bytes(0, layout.size()) };
        }
        piece
    }

    unsafe fn dealloc(&self, piece: *mut u8, layout: Layout) {
        if reserve::owns(piece) {
            return reserve::give_back(piece, layout);
        }
        let Some((whole, head)) = whole(layout) else { return };
        // SAFETY: `take` made the piece with this layout and wrote the address in front of it.
        unsafe {
            let start = piece.sub(head);
            let runtime = piece.cast::<*mut Inner>().sub(1).read();
            if runtime.is_null() { System.dealloc(start, whole) } else { Inner::free(runtime, start, whole) }
        }
    }

    unsafe fn realloc(&self, piece: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller promises a size that fits a layout.
        let wanted = unsafe { Layout::from_size_align_unchecked(size, layout.align()) };
        if !reserve::owns(piece)
            && let Some((old, head)) = whole(layout)
            && let Some((new, _)) = whole(wanted)
        {
            // SAFETY: `take` wrote the address in front of the piece.
            let (start, runtime) = unsafe { (piece.sub(head), piece.cast::<*mut Inner>().sub(1).read()) };
            if runtime.is_null() {
                // SAFETY: the system gave it with the layout `old`; the head moves with the rest.
                let moved = unsafe { System.realloc(start, old, new.size()) };
                if !moved.is_null() {
                    // SAFETY: it has `head + size` bytes.
                    return unsafe { moved.add(head) };
                }
            }
        }
        // What cannot grow in its place moves to where the thread is now.
        // SAFETY: `wanted` is not empty by the caller's promise.
        let place = unsafe { self.alloc(wanted) };
        if !place.is_null() {
            // SAFETY: both have that many bytes and are two places; the old one is given back where it came from, once.
            unsafe {
                std::ptr::copy_nonoverlapping(piece, place, layout.size().min(size));
                self.dealloc(piece, layout);
            }
        }
        place
    }
}
