//! Buffers a worker keeps from one operation to the next: they grow once and are then used again, so a step allocates nothing.

use crate::backend::cpu::activations::Q8Block;
use std::cell::RefCell;

/// One thread's buffers. An operation may use any of them; nothing survives it.
#[derive(Default)]
pub struct Scratch {
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

/// Exchanges this thread's buffers for others: a thread of the host's must not keep what belongs to a model.
pub fn exchange(other: &mut Scratch) {
    SCRATCH.with(|s| {
        if let Ok(mut s) = s.try_borrow_mut() {
            std::mem::swap(&mut *s, other);
        }
    });
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
