//! Buffers a worker keeps from one operation to the next: they grow once and are then used again, so a step allocates nothing.

use crate::backend::cpu::activations::Q8Block;
use std::cell::RefCell;
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
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

/// Runs `f` with this thread's buffers.
pub(super) fn with<R>(f: impl FnOnce(&mut Scratch) -> R) -> R {
    SCRATCH.with(|s| match s.try_borrow_mut() {
        Ok(mut s) => f(&mut s),
        // An operation inside an operation: it gets buffers of its own.
        Err(_) => f(&mut Scratch::default()),
    })
}

/// Where the buffers of a run's participants are between runs: no thread keeps what belongs to a model.
#[derive(Default)]
pub struct Shelf {
    leader: Mutex<Scratch>,
    helpers: Mutex<Vec<Scratch>>,
}

/// Buffers that this thread has in place of its own, until dropped.
pub struct Borrowed<'a> {
    shelf: &'a Shelf,
    leader: bool,
    own: Scratch,
}

impl Shelf {
    /// Buffers for this thread: always the same for the leader.
    pub fn borrow(&self, leader: bool) -> Borrowed<'_> {
        let buffers = match leader {
            true => std::mem::take(&mut *lock(&self.leader)),
            false => lock(&self.helpers).pop().unwrap_or_default(),
        };
        Borrowed { shelf: self, leader, own: exchange(buffers) }
    }
}

impl Drop for Borrowed<'_> {
    fn drop(&mut self) {
        let buffers = exchange(std::mem::take(&mut self.own));
        match self.leader {
            true => *lock(&self.shelf.leader) = buffers,
            false => lock(&self.shelf.helpers).push(buffers),
        }
    }
}

/// Exchanges this thread's buffers for others.
fn exchange(buffers: Scratch) -> Scratch {
    SCRATCH.with(|s| match s.try_borrow_mut() {
        Ok(mut s) => std::mem::replace(&mut *s, buffers),
        Err(_) => buffers,
    })
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Buffers mean nothing between operations, so a panic does not spoil them.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
