//! Asking memory ahead for pages of floats.
//!
//! Tiles read two runs of keys, or strips of values, side by side, which the hardware's prefetching takes for no stream at all; asked for in
//! ascending order, in the midst of the arithmetic, pages are one. Into the second cache, because the first has too few requests under way for
//! what memory gives; and twice, half as far ahead again, because some of the requests are lost where arithmetic is the faster of the two.
#![allow(unsafe_code)] // A prefetch, which may name any address.

use super::attend::Attend;
use super::lane::Lanes;

/// Bytes ahead of the second request; the first is at twice as many. A tile begins as much as 14 KB further on than the stream is, in keys or
/// values of 256 elements.
const AHEAD: usize = 8192;

/// How a call reads: page by page, of each its heads, of a head keys and then values. All in bytes.
pub(super) struct Order {
    /// From the page's first byte to the first head's keys.
    first: usize,
    /// From one head to the next, and of all heads.
    head: usize,
    heads: usize,
    /// From a head's keys to its values.
    values: usize,
    /// Whole pages and bytes of one that both requests lie ahead.
    ahead: [(usize, usize); 2],
}

/// Addresses to ask for at a head's first key and at its first value, or null.
pub(super) struct Ahead {
    pub keys: [*const u8; 2],
    pub values: [*const u8; 2],
}

impl Order {
    #[inline(always)]
    pub(super) fn new(a: &Attend<'_>) -> Order {
        let bytes = a.dtype.bytes();
        let heads = a.heads * a.stride * bytes;
        let split = |ahead: usize| (ahead.checked_div(heads).unwrap_or(0), ahead.checked_rem(heads).unwrap_or(ahead));
        let values = a.value_at.saturating_sub(a.key_at) * bytes;
        Order { first: a.key_at * bytes, head: a.stride * bytes, heads, values, ahead: [split(2 * AHEAD), split(AHEAD)] }
    }

    /// For head `head` of the call, at page number `page`. Behind the last page there is nothing to ask for.
    #[inline(always)]
    pub(super) fn ahead(&self, a: &Attend<'_>, page: usize, head: usize) -> Ahead {
        let place = |(mut pages, bytes): (usize, usize), within: usize| {
            let mut at = bytes + head * self.head + within;
            if at >= self.heads {
                (pages, at) = (pages + 1, at - self.heads);
            }
            a.pages.get(page + pages).map_or(std::ptr::null(), |page| page.cast_const().wrapping_add(self.first + at))
        };
        let both = |within: usize| self.ahead.map(|ahead| place(ahead, within));
        Ahead { keys: both(0), values: both(self.values) }
    }
}

/// Asks for the lines of `n` bytes, a constant, `at` bytes behind the addresses.
///
/// # Safety
/// Needs the instruction set of `S`.
#[inline(always)]
pub(super) unsafe fn ask<S: Lanes>(ahead: [*const u8; 2], at: usize, n: usize) {
    // Half a line was asked for with the other half.
    if n < LINE && !at.is_multiple_of(LINE) {
        return;
    }
    for start in ahead {
        if !start.is_null() {
            for line in 0..n.div_ceil(LINE) {
                // SAFETY: a prefetch may name any address.
                unsafe { S::prefetch_second(start.wrapping_add(at + line * LINE)) };
            }
        }
    }
}

/// Bytes that memory gives at once.
const LINE: usize = 64;
