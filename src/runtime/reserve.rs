//! A little memory for the moment when there is none.
//!
//! Rust ends the process when an allocation fails that cannot report it, and a library must not. The first call through the C
//! surface sets an address range aside; from then on such a request, when it is refused, is served from there, and the call ends in
//! an error as soon as it can. Before that first call, and so for Rust programs, nothing is set aside.
//!
//! The range is mapped and not touched: it takes no memory until it is used, but counts against limits of address space and strict
//! overcommit, which are what makes the system refuse. Pieces are powers of two; those given back are listed by size and used again,
//! and once none is left the memory goes back to the system.

use std::alloc::Layout;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, Once, PoisonError};

/// The start of a mapping is a multiple of this and perhaps of no more.
const PAGE: usize = 4096;
/// Sizes are 2^4 to 2^30.
const SMALLEST: u32 = 4;
const SIZES: usize = 27;

/// Where the reserve begins; 0 until the first call.
static START: AtomicUsize = AtomicUsize::new(0);
/// Its length; set before `START`.
static LENGTH: AtomicUsize = AtomicUsize::new(0);
static USED: Mutex<Used> = Mutex::new(Used { next: 0, live: 0, free: [0; SIZES] });

struct Used {
    /// Offset of the first byte never handed out; back to 0 when nothing is live.
    next: usize,
    /// Pieces that are handed out.
    live: usize,
    /// By size: the address of a piece given back, which holds the address of the next one; 0 ends the list.
    free: [usize; SIZES],
}

/// Sets the range aside, once.
pub(super) fn prepare() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        if let Some((start, length)) = map() {
            LENGTH.store(length, Ordering::Relaxed);
            START.store(start, Ordering::Release);
        }
    });
}

#[cfg(all(unix, feature = "reserve"))]
fn map() -> Option<(usize, usize)> {
    /// Bytes set aside where the system allows; less, down to `LEAST`, where it does not.
    const MOST: usize = 1 << 30;
    const LEAST: usize = 16 << 20;
    /// The reserve takes no more than this part of a limit on address space.
    const SHARE: usize = 16;
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: the limit is written to a place of its type.
    let limited = unsafe { libc::getrlimit(libc::RLIMIT_AS, &mut limit) } == 0 && limit.rlim_cur != libc::RLIM_INFINITY;
    let share = if limited { usize::try_from(limit.rlim_cur).unwrap_or(usize::MAX) / SHARE } else { usize::MAX };
    let mut length = MOST;
    while length > LEAST && length > share {
        length /= 2;
    }
    let (access, kind) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANON | libc::MAP_NORESERVE);
    loop {
        // SAFETY: a new mapping anywhere touches nothing that exists.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), length, access, kind, -1, 0) };
        if start != libc::MAP_FAILED {
            return Some((start.expose_provenance(), length));
        }
        length /= 2;
        if length < LEAST {
            return None;
        }
    }
}

#[cfg(not(all(unix, feature = "reserve")))]
fn map() -> Option<(usize, usize)> {
    None
}

/// Whether an address lies in the reserve.
pub(super) fn owns(piece: *const u8) -> bool {
    let start = START.load(Ordering::Relaxed);
    start != 0 && piece.addr().wrapping_sub(start) < LENGTH.load(Ordering::Relaxed)
}

/// The power of two that a piece takes.
fn power(layout: Layout) -> u32 {
    layout.size().max(layout.align()).max(1 << SMALLEST).checked_next_power_of_two().map_or(usize::BITS, usize::ilog2)
}

/// A piece, or NULL.
pub(super) fn take(layout: Layout) -> *mut u8 {
    let start = START.load(Ordering::Acquire);
    let power = power(layout);
    let list = (power - SMALLEST) as usize;
    if start == 0 || list >= SIZES || layout.align() > PAGE {
        return std::ptr::null_mut();
    }
    let size = 1usize << power;
    let mut used = USED.lock().unwrap_or_else(PoisonError::into_inner);
    let piece = match used.free[list] {
        0 => {
            let Some(offset) = used.next.checked_next_multiple_of(size.min(PAGE)) else { return std::ptr::null_mut() };
            // Only what is asked for is touched, so the last piece may end with the range.
            let Some(end) = offset.checked_add(size).filter(|&end| end <= LENGTH.load(Ordering::Relaxed)) else {
                return std::ptr::null_mut();
            };
            used.next = end;
            start + offset
        }
        piece => {
            // SAFETY: the piece was given back and holds the address of the next one.
            used.free[list] = unsafe { std::ptr::with_exposed_provenance::<usize>(piece).read() };
            piece
        }
    };
    used.live += 1;
    std::ptr::with_exposed_provenance_mut(piece)
}

/// Takes a piece back.
pub(super) fn give_back(piece: *mut u8, layout: Layout) {
    let list = (power(layout) - SMALLEST) as usize;
    let mut used = USED.lock().unwrap_or_else(PoisonError::into_inner);
    used.live -= 1;
    if used.live == 0 {
        release(used.next);
        used.next = 0;
        used.free = [0; SIZES];
        return;
    }
    // SAFETY: a piece has at least 16 bytes at a multiple of 16, and nobody uses it now.
    unsafe { piece.cast::<usize>().write(used.free[list]) };
    used.free[list] = piece.expose_provenance();
}

/// Gives the memory behind the first `length` bytes to the system; the range stays.
fn release(length: usize) {
    #[cfg(unix)]
    {
        let start = std::ptr::with_exposed_provenance_mut::<u8>(START.load(Ordering::Relaxed));
        // SAFETY: the range is ours, and no piece of it is handed out.
        unsafe { libc::madvise(start.cast(), length, libc::MADV_DONTNEED) };
    }
    #[cfg(not(unix))]
    let _ = length;
}
