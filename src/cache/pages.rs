//! Pages of the key/value cache: a pool for each page size, and the list of pages a layer of a sequence holds.
//!
//! Pages are shared by count, so a fork costs nothing until it writes. A page that nobody holds goes back to its pool;
//! the pool gives memory back when it is dropped or trimmed.
#![allow(unsafe_code)] // page memory is handed to operations as raw bytes; see `PageMemory`

use super::memory::{Home, Memory};
use crate::error::{Result, reserve};
use crate::ops::PAGE;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Pages of one size, allocated in slabs and used again.
pub struct PagePool {
    home: Home,
    page_bytes: usize,
    sizes: Sizes,
    inner: Mutex<Inner>,
}

#[derive(Default)]
struct Inner {
    slabs: Vec<Memory>,
    free: Vec<PageMemory>,
}

/// One page's bytes, inside a slab that lives as long as the pool.
#[derive(Clone, Copy)]
struct PageMemory(*mut u8);

// SAFETY: a page is plain memory; who may touch it is settled by `Page` (shared: read, sole owner: write).
unsafe impl Send for PageMemory {}

/// Most pages in one of the first slabs.
const SLAB: usize = 16;
/// Bytes of a large slab, at least. Slabs are large once as many bytes are taken: long contexts are read from huge pages, and short ones do not pay for
/// that.
const LARGE: usize = 2 << 20;

/// Pages in slabs.
#[derive(Clone, Copy)]
struct Sizes {
    /// In the first ones: no more than a sequence may hold.
    small: usize,
    /// In later ones, whole small ones.
    large: usize,
    /// In as many slabs as one sequence fills; no slab crosses a multiple of it.
    sequence: usize,
}

impl Sizes {
    fn new(page_bytes: usize, positions: usize, device: bool) -> Sizes {
        let pages = positions.div_ceil(PAGE).max(1);
        let small = pages.min(SLAB);
        let large = if device { small } else { LARGE.div_ceil(page_bytes.max(1)).next_multiple_of(small) };
        Sizes { small, large, sequence: pages.checked_next_multiple_of(small).unwrap_or(pages) }
    }

    /// Of the slab that follows `taken` pages.
    fn next(&self, taken: usize) -> usize {
        let next = if taken < self.large { self.small } else { self.large };
        next.min(self.sequence - taken % self.sequence)
    }

    /// Most pages of all slabs when `pages` are in use: a slab is added when none is left.
    fn most(&self, pages: usize) -> usize {
        let round = |to: usize| pages.checked_next_multiple_of(to).unwrap_or(usize::MAX);
        round(self.sequence).min(round(self.small).saturating_add(self.large - self.small))
    }
}

impl PagePool {
    /// A pool of pages of `page_bytes` in the host's memory, for sequences of at most `positions`.
    pub fn new(page_bytes: usize, positions: usize) -> Arc<PagePool> {
        PagePool::at(&Home::Host, page_bytes, positions)
    }

    /// As [`PagePool::new`], wherever the pages are to live.
    pub fn at(home: &Home, page_bytes: usize, positions: usize) -> Arc<PagePool> {
        let (home, page_bytes) = (home.clone(), page_bytes.next_multiple_of(64));
        let sizes = Sizes::new(page_bytes, positions, home.is_device());
        Arc::new(PagePool { home, page_bytes, sizes, inner: Mutex::default() })
    }

    /// Bytes that a pool in the host's memory, or on a device, holds once `sequences` sequences of `positions` positions are full and `kept` more
    /// pages are held.
    pub fn planned(device: bool, page_bytes: usize, positions: usize, sequences: usize, kept: usize) -> u64 {
        // The caller decides the number of sequences: sums stop at the largest number.
        let pages = positions.div_ceil(PAGE).saturating_mul(sequences).saturating_add(kept);
        let page_bytes = page_bytes.checked_next_multiple_of(64).unwrap_or(usize::MAX);
        (Sizes::new(page_bytes, positions, device).most(pages) as u64).saturating_mul(page_bytes as u64)
    }

    /// Most bytes of a device that such a pool may hold on top of what is planned.
    pub fn spare(page_bytes: usize, positions: usize) -> u64 {
        Home::spare(page_bytes.next_multiple_of(64).saturating_mul(Sizes::new(page_bytes, positions, true).small)) as u64
    }

    fn take(self: &Arc<Self>) -> Result<Page> {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        if inner.free.is_empty() {
            reserve(&mut inner.slabs, 1, "a list of cache pages")?;
            let taken = inner.pages(self.page_bytes);
            let count = self.sizes.next(taken);
            // Room for every page there is, so that giving one back never allocates.
            reserve(&mut inner.free, taken + count, "a list of cache pages")?;
            let slab = self.home.shared_memory(self.page_bytes * count, "a slab of cache pages")?;
            let base = slab.first();
            inner.slabs.push(slab);
            // Each page lies inside the slab just allocated.
            inner.free.extend((0..count).rev().map(|i| PageMemory(base.wrapping_add(i * self.page_bytes))));
        }
        let memory = inner.free.pop().expect("a slab was added when there was none");
        Ok(Page { memory, pool: Arc::clone(self), kept: AtomicUsize::new(0) })
    }

    /// Pages in use.
    #[cfg(test)]
    pub(super) fn taken(&self) -> usize {
        let inner = self.inner.lock().unwrap();
        inner.pages(self.page_bytes) - inner.free.len()
    }

    /// Gives up slabs of which no page is in use.
    pub fn trim(&self) {
        let mut inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        let Inner { slabs, free } = &mut *inner;
        free.sort_unstable_by_key(|page| page.0.addr());
        slabs.retain(|slab| {
            let start = slab.first().addr();
            let unused = free.partition_point(|p| p.0.addr() < start)..free.partition_point(|p| p.0.addr() < start + slab.len());
            if unused.len() < slab.len() / self.page_bytes {
                return true;
            }
            free.drain(unused);
            false
        });
    }

    /// Bytes of memory the pool holds.
    pub fn bytes(&self) -> usize {
        let inner = self.inner.lock().unwrap_or_else(PoisonError::into_inner);
        inner.slabs.iter().map(Memory::len).sum()
    }
}

impl Inner {
    /// Pages of all slabs.
    fn pages(&self, page_bytes: usize) -> usize {
        self.slabs.iter().map(|slab| slab.len() / page_bytes).sum()
    }
}

/// A page; goes back to its pool when the last holder lets go.
struct Page {
    memory: PageMemory,
    pool: Arc<PagePool>,
    /// Places in the prefix tree that hold it.
    kept: AtomicUsize,
}

impl Drop for Page {
    fn drop(&mut self) {
        self.pool.inner.lock().unwrap_or_else(PoisonError::into_inner).free.push(self.memory);
    }
}

// SAFETY: pages are written only through a sequence that is their sole holder (`reserve` copies shared ones first).
unsafe impl Sync for Page {}

/// A page held beside the sequences that use it.
#[derive(Clone)]
pub struct SharedPage(Arc<Page>);

impl SharedPage {
    /// Counts one more place that keeps the page; true for the first.
    pub fn keep(&self) -> bool {
        self.0.kept.fetch_add(1, Ordering::Relaxed) == 0
    }

    /// Takes back one [`SharedPage::keep`]; true for the last.
    pub fn let_go(&self) -> bool {
        self.0.kept.fetch_sub(1, Ordering::Relaxed) == 1
    }

    /// Bytes of the page.
    pub fn bytes(&self) -> usize {
        self.0.pool.page_bytes
    }

    #[cfg(test)]
    pub(super) fn pool(&self) -> Arc<PagePool> {
        Arc::clone(&self.0.pool)
    }
}

/// The pages of one layer of one sequence.
pub struct LayerPages {
    pool: Arc<PagePool>,
    pages: Vec<Arc<Page>>,
    pointers: Vec<*mut u8>,
}

// SAFETY: the pointers repeat what `pages` owns.
unsafe impl Send for LayerPages {}
// SAFETY: as above; `&LayerPages` gives no way to write.
unsafe impl Sync for LayerPages {}

impl LayerPages {
    /// No pages yet, with room for the numbers of `positions` positions, so that growing does not allocate.
    pub fn new(pool: &Arc<PagePool>, positions: usize) -> Result<LayerPages> {
        let most = positions.div_ceil(PAGE);
        Ok(LayerPages {
            pool: Arc::clone(pool),
            pages: crate::error::vec_with_capacity(most, "a list of cache pages")?,
            pointers: crate::error::vec_with_capacity(most, "a list of cache pages")?,
        })
    }

    /// Makes positions `from .. to` writable: pages exist, and those from the page of `from` on are held by nobody else.
    pub fn reserve(&mut self, from: usize, to: usize) -> Result<()> {
        for index in from / PAGE..to.div_ceil(PAGE) {
            if index < self.pages.len() {
                if Arc::get_mut(&mut self.pages[index]).is_none() {
                    let copy = self.pool.take()?;
                    // SAFETY: both are pages of this pool; the copy is new and so not shared.
                    unsafe { self.pool.home.copy(self.pages[index].memory.0, copy.memory.0, self.pool.page_bytes) }?;
                    self.pointers[index] = copy.memory.0;
                    self.pages[index] = Arc::new(copy);
                }
            } else {
                reserve(&mut self.pages, 1, "a list of cache pages")?;
                reserve(&mut self.pointers, 1, "a list of cache pages")?;
                let page = self.pool.take()?;
                self.pointers.push(page.memory.0);
                self.pages.push(Arc::new(page));
            }
        }
        Ok(())
    }

    /// Lets go of pages past position `len`.
    pub fn truncate(&mut self, len: usize) {
        // From the end on, so that they are taken again in the order in which they lie.
        while self.pages.len() > len.div_ceil(PAGE) {
            self.pages.pop();
        }
        self.pointers.truncate(len.div_ceil(PAGE));
    }

    /// Number of pages.
    pub fn count(&self) -> usize {
        self.pages.len()
    }

    /// Bytes of a page.
    pub fn page_bytes(&self) -> usize {
        self.pool.page_bytes
    }

    /// The bytes of page `index`; `None` where pages live on a device.
    pub fn bytes(&self, index: usize) -> Option<&[u8]> {
        // SAFETY: a page has `page_bytes` initialised bytes; it is written only through `&mut self` or by a run that borrows
        // its sequence exclusively, and not at all while it is shared.
        (!self.pool.home.is_device()).then(|| unsafe { std::slice::from_raw_parts(self.pages[index].memory.0, self.pool.page_bytes) })
    }

    /// The bytes of page `index`, which [`LayerPages::reserve`] made this list's own, to be changed; `None` where pages live on a device.
    pub fn bytes_mut(&mut self, index: usize) -> Option<&mut [u8]> {
        assert!(Arc::get_mut(&mut self.pages[index]).is_some(), "reserve() made the page writable");
        let host = !self.pool.home.is_device();
        // SAFETY: a page has `page_bytes` initialised bytes, and nobody else holds this one while `self` is borrowed.
        host.then(|| unsafe { std::slice::from_raw_parts_mut(self.pages[index].memory.0, self.pool.page_bytes) })
    }

    /// Appends the bytes of page `index`.
    pub fn append_page(&self, index: usize, out: &mut Vec<u8>) -> Result<()> {
        reserve(out, self.pool.page_bytes, "a copy of a page")?;
        if let Some(bytes) = self.bytes(index) {
            out.extend_from_slice(bytes);
            return Ok(());
        }
        let start = out.len();
        out.resize(start + self.pool.page_bytes, 0);
        // SAFETY: as `bytes`.
        unsafe { self.pool.home.read(self.pages[index].memory.0, &mut out[start..]) }
    }

    /// Writes page `index`, which [`LayerPages::reserve`] made this list's own.
    pub fn write_page(&mut self, index: usize, bytes: &[u8]) -> Result<()> {
        assert!(bytes.len() == self.pool.page_bytes && Arc::get_mut(&mut self.pages[index]).is_some(), "reserve() made the page writable");
        // SAFETY: the lengths are equal and nobody else holds the page.
        unsafe { self.pool.home.write(self.pages[index].memory.0, bytes) }
    }

    /// Page `index`, for another holder.
    pub fn share(&self, index: usize) -> SharedPage {
        SharedPage(Arc::clone(&self.pages[index]))
    }

    /// Takes up a shared page as page `index`, instead of the one there or after the last. There must be room for its number.
    pub fn adopt(&mut self, index: usize, page: SharedPage) {
        debug_assert!(Arc::ptr_eq(&page.0.pool, &self.pool) && index <= self.pages.len());
        let pointer = page.0.memory.0;
        if index < self.pages.len() {
            (self.pages[index], self.pointers[index]) = (page.0, pointer);
        } else {
            self.pages.push(page.0);
            self.pointers.push(pointer);
        }
    }

    /// Bytes of pages that this list alone holds, and of those it shares.
    pub fn shares(&self) -> (u64, u64) {
        let own = self.pages.iter().filter(|page| Arc::strong_count(page) == 1).count();
        ((own * self.pool.page_bytes) as u64, ((self.pages.len() - own) * self.pool.page_bytes) as u64)
    }

    /// First bytes of the pages, in order.
    pub fn pointers(&self) -> &[*mut u8] {
        &self.pointers
    }

    /// Shares all pages with a new list, which has room for the numbers of `positions` positions.
    pub fn fork(&self, positions: usize) -> Result<LayerPages> {
        let mut copy = LayerPages::new(&self.pool, positions.max(self.pages.len() * PAGE))?;
        copy.pages.extend(self.pages.iter().cloned());
        copy.pointers.extend_from_slice(&self.pointers);
        Ok(copy)
    }
}

impl Drop for LayerPages {
    fn drop(&mut self) {
        self.truncate(0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fork_shares_until_it_writes_and_pages_come_back() {
        let pool = PagePool::new(64, 256);
        let mut a = LayerPages::new(&pool, 256).unwrap();
        a.reserve(0, 3 * PAGE).unwrap();
        // SAFETY: page 2 has 64 bytes and `a` alone holds it.
        unsafe { a.pointers()[2].write(7) };
        let mut b = a.fork(256).unwrap();
        assert_eq!(a.pointers(), b.pointers());
        b.reserve(2 * PAGE + 1, 3 * PAGE).unwrap();
        assert_eq!(a.pointers()[..2], b.pointers()[..2]);
        assert_ne!(a.pointers()[2], b.pointers()[2]);
        // SAFETY: as above.
        assert_eq!(unsafe { b.pointers()[2].read() }, 7);
        drop((a, b));
        assert_eq!(pool.inner.lock().unwrap().free.len(), 8);
    }

    #[test]
    fn pages_come_in_the_order_in_which_they_lie_also_the_second_time() {
        let pool = PagePool::new(64, 256);
        for _ in 0..2 {
            let mut pages = LayerPages::new(&pool, 256).unwrap();
            pages.reserve(0, 256).unwrap();
            assert!(pages.pointers().is_sorted());
            pages.truncate(64);
            pages.reserve(64, 200).unwrap();
            assert!(pages.pointers().is_sorted());
        }
    }

    #[test]
    fn slabs_grow_with_the_context_and_stay_within_the_plan() {
        for (bytes, positions) in [(64, 40usize), (24 << 10, 4096), (24 << 10, 16384), (16 << 10, 5000), (4 << 20, 2048), (64, 32768)] {
            let pages = positions.div_ceil(PAGE);
            let pool = PagePool::new(bytes, positions);
            let mut all = Vec::new();
            for sequences in 1..4 {
                let mut one = LayerPages::new(&pool, positions).unwrap();
                one.reserve(0, positions).unwrap();
                all.push(one);
                let planned = PagePool::planned(false, bytes, positions, sequences, 0);
                assert!(pool.bytes() as u64 <= planned, "{sequences} of {positions}: {} of {planned}", pool.bytes());
                let least = (pages * sequences * bytes) as u64;
                assert!(planned <= least + least / 8 + (16 * bytes) as u64 * sequences as u64, "{planned} for {least}");
            }
            all.remove(1);
            pool.trim();
            let mut more = LayerPages::new(&pool, positions).unwrap();
            more.reserve(0, positions).unwrap();
            assert!(pool.bytes() as u64 <= PagePool::planned(false, bytes, positions, 3, 0));
        }
        let pool = PagePool::new(24 << 10, 16384);
        let mut pages = LayerPages::new(&pool, 16384).unwrap();
        pages.reserve(0, 3072).unwrap();
        assert_eq!(pool.bytes(), 96 * (24 << 10));
        pages.reserve(3072, 3073).unwrap();
        assert!(pool.bytes() >= 96 * (24 << 10) + LARGE);
    }
}
