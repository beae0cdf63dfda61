//! Bytes counted by purpose, and those that come from the system in whole pages rather than from an allocator.

use super::{Inner, Runtime, current};
use std::sync::atomic::Ordering;

/// What memory is for, where that is counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(usize)]
pub enum Class {
    /// Packed weights.
    Weights,
    /// Pages of caches and recurrent states.
    Cache,
    /// Everything else.
    Other,
}

/// A count on the current runtime, taken back when dropped.
pub struct Charge {
    runtime: Option<Runtime>,
    class: Class,
    bytes: usize,
    /// Those of the bytes that no allocator counts.
    mapped: usize,
}

impl Charge {
    /// Counts `bytes` of memory for `class` on the current runtime, `mapped` of them as live too. `None`: the limit forbids it.
    pub fn new(class: Class, bytes: usize, mapped: usize) -> Option<Charge> {
        let runtime = current::current();
        if let Some(runtime) = &runtime {
            if mapped > 0 && !runtime.inner().charge(mapped) {
                return None;
            }
            runtime.inner().count(class, |n| n.wrapping_add(bytes));
        }
        Some(Charge { runtime, class, bytes, mapped })
    }

    /// Whether the current runtime's memory comes from the host.
    pub fn is_hosted() -> bool {
        current::current().is_some_and(|runtime| runtime.inner().hooks.is_some())
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        if let Some(runtime) = &self.runtime {
            runtime.inner().count(self.class, |n| n.wrapping_sub(self.bytes));
            runtime.inner().live.fetch_sub(self.mapped, Ordering::Relaxed);
        }
    }
}

impl Inner {
    fn count(&self, class: Class, change: impl Fn(usize) -> usize) {
        if let Some(counter) = self.classes.get(class as usize) {
            let _ = counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| Some(change(n)));
        }
    }
}
