//! Panels that are filled when a product meets them for the second time.
//!
//! Memory that nobody used yet is what a load waits for most: the system clears it, and a hypervisor may have to fetch it first. A matrix whose
//! rows can be had again therefore stays where it is stored. The first product with a group of panels fills them into a small buffer that stays
//! in the cache, and multiplies there; the second fills them for good. The panels are the same, and so are the bits.
#![allow(unsafe_code)] // Panels are written while other panels of the same buffer are read.

use super::arena::Buffer;
use std::ops::Range;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Panels that are filled together; pieces of work are multiples of it.
pub const GROUP: usize = 4;

/// Where a matrix has its rows.
pub trait Rows: Send + Sync {
    /// Fills one panel.
    fn fill(&self, panel: usize, out: &mut [u8]);
    /// Says that these panels are filled for good.
    fn filled(&self, panels: Range<usize>);
}

/// The buffers that groups are filled into for the time being, shared by the matrices of a model.
pub struct Desk {
    buffers: Mutex<Vec<Buffer>>,
    /// Groups that no product has met.
    unmet: AtomicUsize,
}

impl Desk {
    /// With these buffers, each as large as any group. They are given up when every group has been met.
    pub fn new(buffers: Vec<Buffer>) -> Desk {
        Desk { buffers: Mutex::new(buffers), unmet: AtomicUsize::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Buffer>> {
        self.buffers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn put_back(&self, buffer: Buffer) {
        let mut buffers = self.lock();
        // Room is there: it was taken from here.
        buffers.push(buffer);
        if self.unmet.load(Ordering::Relaxed) == 0 {
            buffers.clear();
        }
    }
}

/// What has happened to a group.
const UNMET: u8 = 0;
const MET: u8 = 1;
const FILLING: u8 = 2;
const FILLED: u8 = 3;

/// How far a matrix is.
pub(super) struct Late {
    rows: Box<dyn Rows>,
    groups: Vec<AtomicU8>,
    /// Groups that are not [`FILLED`].
    left: AtomicUsize,
    desk: Arc<Desk>,
}

/// The panels of a matrix, in memory that belongs to it.
pub(super) struct Panels<'a> {
    pub data: &'a Buffer,
    pub panel_bytes: usize,
    pub count: usize,
}

impl Panels<'_> {
    /// Bytes of a panel.
    ///
    /// # Safety
    /// Nobody writes to it now.
    pub unsafe fn bytes(&self, panel: usize) -> &[u8] {
        assert!((panel + 1) * self.panel_bytes <= self.data.len(), "panel {panel} is inside");
        // SAFETY: the panel lies inside the buffer; the rest is the caller's promise.
        unsafe { std::slice::from_raw_parts(self.data.as_ptr().add(panel * self.panel_bytes), self.panel_bytes) }
    }
}

impl Late {
    pub fn new(rows: Box<dyn Rows>, groups: Vec<AtomicU8>, desk: &Arc<Desk>) -> Late {
        desk.unmet.fetch_add(groups.len(), Ordering::Relaxed);
        Late { rows, left: AtomicUsize::new(groups.len()), groups, desk: Arc::clone(desk) }
    }

    /// Calls `look` with a panel, wherever it is filled.
    pub fn panel<R>(&self, own: &Panels<'_>, panel: usize, look: impl FnOnce(&[u8]) -> R) -> R {
        if !self.has(panel) {
            let buffer = self.desk.lock().pop();
            if let Some(mut buffer) = buffer {
                let bytes = &mut buffer.as_mut_slice()[..own.panel_bytes];
                self.rows.fill(panel, bytes);
                let result = look(bytes);
                self.desk.put_back(buffer);
                return result;
            }
            self.finish(own, panel / GROUP);
        }
        // SAFETY: the panel is filled, so nobody writes to it any more.
        look(unsafe { own.bytes(panel) })
    }

    /// Whether a panel is filled for good.
    fn has(&self, panel: usize) -> bool {
        self.groups[panel / GROUP].load(Ordering::Acquire) == FILLED
    }

    /// Calls `product` with all of `panels`, some at a time. Without a second argument they are in their place; with one that holds nothing but them.
    pub fn each(&self, own: &Panels<'_>, panels: Range<usize>, mut product: impl FnMut(Range<usize>, Option<&Buffer>)) {
        if self.left.load(Ordering::Acquire) == 0 {
            return product(panels, None);
        }
        let mut start = panels.start;
        while start < panels.end {
            let group = start / GROUP;
            let these = start..((group + 1) * GROUP).min(panels.end);
            start = these.end;
            match self.buffer_of(group) {
                Some(mut buffer) => {
                    for (place, panel) in these.clone().enumerate() {
                        self.rows.fill(panel, &mut buffer.as_mut_slice()[place * own.panel_bytes..][..own.panel_bytes]);
                    }
                    product(these, Some(&buffer));
                    self.desk.put_back(buffer);
                }
                None => {
                    self.finish(own, group);
                    product(these, None);
                }
            }
        }
    }

    /// A buffer for a group that is met for the first time, or that another thread is just filling.
    fn buffer_of(&self, group: usize) -> Option<Buffer> {
        let state = &self.groups[group];
        match state.load(Ordering::Acquire) {
            MET | FILLED => None,
            FILLING => self.desk.lock().pop(),
            _ => {
                let buffer = self.desk.lock().pop();
                if state.compare_exchange(UNMET, MET, Ordering::Relaxed, Ordering::Relaxed).is_ok() {
                    self.desk.unmet.fetch_sub(1, Ordering::Relaxed);
                }
                buffer
            }
        }
    }

    /// Fills what is not filled yet.
    pub fn finish_all(&self, own: &Panels<'_>) {
        if self.left.load(Ordering::Acquire) > 0 {
            (0..self.groups.len()).for_each(|group| self.finish(own, group));
        }
    }

    /// Comes back when the group is filled.
    fn finish(&self, own: &Panels<'_>, group: usize) {
        let state = &self.groups[group];
        loop {
            let before = state.load(Ordering::Acquire);
            match before {
                FILLED => return,
                // Another thread's, for well below a millisecond.
                FILLING => std::thread::yield_now(),
                _ if state.compare_exchange(before, FILLING, Ordering::Acquire, Ordering::Relaxed).is_ok() => {
                    if before == UNMET {
                        self.desk.unmet.fetch_sub(1, Ordering::Relaxed);
                    }
                    return self.fill(own, group);
                }
                _ => {}
            }
        }
    }

    fn fill(&self, own: &Panels<'_>, group: usize) {
        let panels = group * GROUP..((group + 1) * GROUP).min(own.count);
        // Should a row be out of reach after all, the next one that asks tries again.
        struct Undo<'a>(&'a AtomicU8);
        impl Drop for Undo<'_> {
            fn drop(&mut self) {
                self.0.store(MET, Ordering::Release);
            }
        }
        let undo = Undo(&self.groups[group]);
        for panel in panels.clone() {
            assert!((panel + 1) * own.panel_bytes <= own.data.len(), "panel {panel} is inside");
            // SAFETY: the panel lies inside the buffer, and nobody reads or writes it: others see a group that is not filled, and this thread alone
            // took it from that.
            let out = unsafe { std::slice::from_raw_parts_mut(own.data.as_ptr().add(panel * own.panel_bytes), own.panel_bytes) };
            self.rows.fill(panel, out);
        }
        std::mem::forget(undo);
        self.groups[group].store(FILLED, Ordering::Release);
        self.left.fetch_sub(1, Ordering::AcqRel);
        self.rows.filled(panels);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Panels of 64 bytes that hold their number; counts how often each is filled.
    struct Numbers(Arc<Vec<AtomicUsize>>, Arc<AtomicUsize>);

    impl Rows for Numbers {
        fn fill(&self, panel: usize, out: &mut [u8]) {
            self.0[panel].fetch_add(1, Ordering::SeqCst);
            out.fill(panel as u8 + 1);
        }
        fn filled(&self, panels: Range<usize>) {
            self.1.fetch_add(panels.len(), Ordering::SeqCst);
        }
    }

    fn late(count: usize, buffers: usize) -> (Late, Arc<Vec<AtomicUsize>>, Arc<AtomicUsize>, Arc<Desk>) {
        let fills: Arc<Vec<AtomicUsize>> = Arc::new((0..count).map(|_| AtomicUsize::new(0)).collect());
        let filled = Arc::new(AtomicUsize::new(0));
        let desk = Arc::new(Desk::new((0..buffers).map(|_| Buffer::new(GROUP * 64, "test").unwrap()).collect()));
        let groups = (0..count.div_ceil(GROUP)).map(|_| AtomicU8::new(UNMET)).collect();
        (Late::new(Box::new(Numbers(Arc::clone(&fills), Arc::clone(&filled))), groups, &desk), fills, filled, desk)
    }

    /// Numbers of the panels that a product over `panels` sees, and whether each was in its place.
    fn seen(late: &Late, own: &Panels<'_>, panels: Range<usize>) -> Vec<(u8, bool)> {
        let mut seen = Vec::new();
        late.each(own, panels, |these, apart| {
            for (place, panel) in these.enumerate() {
                let bytes = match apart {
                    Some(buffer) => &buffer.as_slice()[place * 64..][..64],
                    // SAFETY: nobody fills a panel that is in its place.
                    None => unsafe { own.bytes(panel) },
                };
                assert!(bytes.iter().all(|b| *b == bytes[0]));
                seen.push((bytes[0] - 1, apart.is_none()));
            }
        });
        seen
    }

    #[test]
    fn panels_are_in_their_place_from_the_second_product_on() {
        let data = Buffer::new(10 * 64, "test").unwrap();
        let own = Panels { data: &data, panel_bytes: 64, count: 10 };
        let (late, fills, filled, desk) = late(10, 1);
        let all = |there: bool| (0..10).map(|i| (i, there)).collect::<Vec<_>>();
        assert_eq!(seen(&late, &own, 2..7), (2..7).map(|i| (i, false)).collect::<Vec<_>>());
        assert!(data.as_slice().iter().all(|b| *b == 0) && !late.has(2));
        assert!(late.panel(&own, 5, |bytes| bytes == [6; 64]) && !late.has(5), "a look does not count");
        // Groups 0 and 1 for the second time, group 2 for the first.
        let expected: Vec<_> = (0..10).map(|i| (i, i < 8)).collect();
        assert_eq!(seen(&late, &own, 0..10), expected);
        assert!(late.has(7) && !late.has(8) && filled.load(Ordering::SeqCst) == 8);
        assert!(desk.lock().is_empty(), "every group was met");
        assert_eq!((seen(&late, &own, 0..10), seen(&late, &own, 0..10)), (all(true), all(true)));
        let counts: Vec<usize> = fills.iter().map(|n| n.load(Ordering::SeqCst)).collect();
        assert_eq!(counts, [1, 1, 2, 2, 2, 3, 2, 1, 2, 2]);
        assert_eq!(filled.load(Ordering::SeqCst), 10);
    }

    #[test]
    fn without_a_buffer_and_at_once_panels_go_to_their_place() {
        let data = Buffer::new(10 * 64, "test").unwrap();
        let own = Panels { data: &data, panel_bytes: 64, count: 10 };
        let (late, fills, ..) = late(10, 0);
        assert_eq!(seen(&late, &own, 0..3), [(0, true), (1, true), (2, true)]);
        assert!(late.panel(&own, 9, |bytes| bytes == [10; 64]) && late.has(9));
        late.finish_all(&own);
        late.finish_all(&own);
        assert!(late.panel(&own, 6, |bytes| bytes == [7; 64]));
        assert!((0..10).all(|panel| late.has(panel) && data.as_slice()[panel * 64] == panel as u8 + 1));
        assert!(fills.iter().all(|n| n.load(Ordering::SeqCst) == 1));
    }

    #[test]
    fn threads_that_meet_the_same_panels_see_them_whole() {
        let count = 64;
        for _ in 0..20 {
            let data = Buffer::new(count * 64, "test").unwrap();
            let (late, _, filled, _) = late(count, 2);
            std::thread::scope(|scope| {
                for first in 0..4 {
                    let (late, data) = (&late, &data);
                    scope.spawn(move || {
                        let own = Panels { data, panel_bytes: 64, count };
                        for _ in 0..3 {
                            for start in (0..count).cycle().skip(first * 16).step_by(GROUP).take(count / GROUP) {
                                let numbers: Vec<u8> = seen(late, &own, start..start + GROUP).into_iter().map(|s| s.0).collect();
                                assert_eq!(numbers, (start as u8..(start + GROUP) as u8).collect::<Vec<_>>());
                            }
                        }
                    });
                }
            });
            assert_eq!(filled.load(Ordering::SeqCst), count);
        }
    }
}
