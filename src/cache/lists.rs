//! The page lists of a sequence, one for each key/value state, and what is known of them without a look at each.
//!
//! A step of one token finds its page where the last one did, in every list. So the lists carry a stamp that names their contents, by which
//! whoever keeps a copy of them sees that it still holds; and they remember which positions were made writable, as long as nobody has looked
//! at them, since whoever looks may take up a page.

use super::LayerPages;
use crate::error::Result;
use crate::ops::PAGE;
use std::ops::{Deref, DerefMut, Range};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Page lists by key/value state.
pub struct PageLists {
    lists: Vec<LayerPages>,
    stamp: u64,
    /// Positions whose pages are the sequence's own in all lists of its own positions, unless somebody looked.
    own: Range<usize>,
    looked: AtomicBool,
}

/// No two contents share a stamp; 0 names none.
static STAMPS: AtomicU64 = AtomicU64::new(1);

fn stamp() -> u64 {
    STAMPS.fetch_add(1, Ordering::Relaxed)
}

impl PageLists {
    /// These lists.
    pub fn new(lists: Vec<LayerPages>) -> PageLists {
        PageLists { lists, stamp: stamp(), own: 0..0, looked: AtomicBool::new(false) }
    }

    /// Names the pages in the lists.
    pub fn stamp(&self) -> u64 {
        self.stamp
    }

    /// The lists, for a run over them: who calls takes up no page.
    pub fn for_run(&self) -> &[LayerPages] {
        &self.lists
    }

    /// Makes positions `from .. to` writable in the lists that `is_own` tells of: see [`LayerPages::reserve`].
    pub fn reserve(&mut self, from: usize, to: usize, is_own: impl Fn(usize) -> bool) -> Result<()> {
        if !*self.looked.get_mut() && self.own.start <= from && to <= self.own.end {
            return Ok(());
        }
        (self.stamp, self.own, *self.looked.get_mut()) = (stamp(), 0..0, false);
        self.lists.iter_mut().enumerate().filter(|(index, _)| is_own(*index)).try_for_each(|(_, pages)| pages.reserve(from, to))?;
        self.own = from / PAGE * PAGE..to.next_multiple_of(PAGE);
        Ok(())
    }
}

impl Deref for PageLists {
    type Target = [LayerPages];

    fn deref(&self) -> &[LayerPages] {
        self.looked.store(true, Ordering::Relaxed);
        &self.lists
    }
}

impl DerefMut for PageLists {
    fn deref_mut(&mut self) -> &mut [LayerPages] {
        (self.stamp, self.own) = (stamp(), 0..0);
        &mut self.lists
    }
}

#[cfg(test)]
mod tests {
    use super::super::PagePool;
    use super::*;

    #[test]
    fn a_page_that_was_taken_up_is_copied_before_the_next_write() {
        let pool = PagePool::new(64, 256);
        let mut lists = PageLists::new(vec![LayerPages::new(&pool, 256).unwrap(), LayerPages::new(&pool, 256).unwrap()]);
        lists.reserve(0, 3, |index| index == 0).unwrap();
        let (stamp, first) = (lists.stamp(), lists.for_run()[0].pointers()[0]);
        assert_eq!([lists.for_run()[0].count(), lists.for_run()[1].count()], [1, 0]);
        // The same page again: nothing is new.
        lists.reserve(3, 32, |_| true).unwrap();
        assert_eq!((lists.stamp(), lists.for_run()[0].pointers()[0]), (stamp, first));
        // The next page; then one that somebody else holds too.
        lists.reserve(32, 33, |index| index == 0).unwrap();
        assert!(lists.stamp() != stamp && lists.for_run()[0].count() == 2);
        let (stamp, second) = (lists.stamp(), lists.for_run()[0].pointers()[1]);
        let held = lists[0].share(1);
        lists.reserve(33, 34, |index| index == 0).unwrap();
        assert!(lists.stamp() != stamp && lists.for_run()[0].pointers()[1] != second);
        drop(held);
        // A cut gives pages back, so they are no longer there to be written.
        let stamp = lists.stamp();
        lists.iter_mut().for_each(|list| list.truncate(0));
        assert!(lists.stamp() != stamp);
        lists.reserve(0, 1, |index| index == 0).unwrap();
        assert_eq!(lists.for_run()[0].count(), 1);
    }
}
