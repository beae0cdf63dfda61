//! Buffers a worker has from one operation to the next: they grow once and are then used again, so a step allocates nothing. They
//! belong to the workspace, not to the thread, which may be the host's and outlive the model.

#![allow(unsafe_code)] // what is lent is reached through a pointer of the thread

use crate::backend::cpu::activations::Q8Block;
use std::cell::Cell;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One thread's buffers. An operation may use any of them; nothing survives it.
#[derive(Default)]
pub(super) struct Scratch {
    pub(super) a: Vec<f32>,
    pub(super) b: Vec<f32>,
    pub(super) blocks: Vec<Q8Block>,
    pub(super) pairs: Vec<u32>,
    pub(super) groups: Vec<super::expert_linear::Group>,
}

thread_local! {
    /// What was lent to this thread and is not in use; NULL for nothing. Without a destructor, which a host's thread would run at its end.
    static LENT: Cell<*mut Scratch> = const { Cell::new(std::ptr::null_mut()) };
}

/// Puts back what was there before, also when a panic passes.
struct Before(*mut Scratch);

impl Drop for Before {
    fn drop(&mut self) {
        LENT.set(self.0);
    }
}

/// Runs `f`, whose operations on this thread use `scratch`.
fn lend<R>(scratch: &mut Scratch, f: impl FnOnce() -> R) -> R {
    let _before = Before(LENT.replace(scratch));
    f()
}

/// Where the buffers of a run's participants are between runs.
#[derive(Default)]
pub struct Shelf {
    leader: Mutex<Scratch>,
    helpers: Mutex<Vec<Scratch>>,
}

impl Shelf {
    /// Runs `f` with buffers: always the same for the leader.
    pub fn lend<R>(&self, leader: bool, f: impl FnOnce() -> R) -> R {
        if leader {
            return lend(&mut lock(&self.leader), f);
        }
        struct Borrowed<'a>(&'a Shelf, Scratch);
        impl Drop for Borrowed<'_> {
            fn drop(&mut self) {
                lock(&self.0.helpers).push(std::mem::take(&mut self.1));
            }
        }
        let buffers = lock(&self.helpers).pop().unwrap_or_default();
        lend(&mut Borrowed(self, buffers).1, f)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Buffers mean nothing between operations, so a panic does not spoil them.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs `f` with this thread's buffers.
pub(super) fn with<R>(f: impl FnOnce(&mut Scratch) -> R) -> R {
    let lent = LENT.replace(std::ptr::null_mut());
    if lent.is_null() {
        // An operation inside an operation, or outside of a program: it gets buffers of its own.
        return f(&mut Scratch::default());
    }
    let _before = Before(lent);
    // SAFETY: `lend` holds the only reference while this thread runs its closure, and nothing else here has the pointer meanwhile.
    f(unsafe { &mut *lent })
}

/// The first `n` elements of a buffer that is used again, whatever they hold.
pub(super) fn sized<T: Clone + Filler>(v: &mut Vec<T>, n: usize) -> &mut [T] {
    if v.len() < n {
        v.resize(n, T::FILLER);
    }
    &mut v[..n]
}

/// What fresh elements hold.
pub(super) trait Filler {
    const FILLER: Self;
}

impl Filler for f32 {
    const FILLER: f32 = 0.0;
}

impl Filler for u32 {
    const FILLER: u32 = 0;
}

impl Filler for Q8Block {
    const FILLER: Q8Block = Q8Block::ZERO;
}
