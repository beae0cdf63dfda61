//! Buffers a worker has from one operation to the next: they grow once and are then used again, so a step allocates nothing. They
//! belong to the workspace, not to the thread, which may be the host's and outlive the model.

#![allow(unsafe_code)] // what is lent is reached through a pointer of the thread

use crate::backend::cpu::activations::Q8Block;
use crate::runtime;
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

    /// Between runs: makes the buffers of everybody, the leader and up to `helpers`, as large as the largest ones. Every operation was
    /// run by somebody, so whoever runs it next time finds room, also a helper that comes for the first time. Without memory for that,
    /// buffers grow when they are used.
    pub fn level(&mut self, helpers: usize) {
        let leader = self.leader.get_mut().unwrap_or_else(PoisonError::into_inner);
        let others = self.helpers.get_mut().unwrap_or_else(PoisonError::into_inner);
        if others.len() < helpers && has_room(others, helpers) {
            others.resize_with(helpers, Scratch::default);
        }
        let most = others.iter().fold(leader.room(), |most, one| std::array::from_fn(|i| most[i].max(one.room()[i])));
        leader.grow(most);
        others.iter_mut().for_each(|one| one.grow(most));
    }
}

impl Scratch {
    /// Elements each buffer has room for.
    fn room(&self) -> [usize; 5] {
        [self.a.capacity(), self.b.capacity(), self.blocks.capacity(), self.pairs.capacity(), self.groups.capacity()]
    }

    /// Makes room for as many.
    fn grow(&mut self, room: [usize; 5]) {
        let [a, b, blocks, pairs, groups] = room;
        has_room(&mut self.a, a);
        has_room(&mut self.b, b);
        has_room(&mut self.blocks, blocks);
        has_room(&mut self.pairs, pairs);
        has_room(&mut self.groups, groups);
    }
}

/// Makes room for exactly `room` elements, so that buffers made alike stay alike. Whether it is there.
fn has_room<T>(v: &mut Vec<T>, room: usize) -> bool {
    v.capacity() >= room || runtime::fallible(|| v.try_reserve_exact(room - v.len())).is_ok()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_a_run_everybody_has_room_for_what_anybody_needed() {
        let mut shelf = Shelf::default();
        shelf.lend(true, || with(|s| sized(&mut s.a, 100).len()));
        shelf.lend(false, || with(|s| sized(&mut s.b, 70).len()));
        shelf.level(3);
        let room = lock(&shelf.leader).room();
        assert!(room[0] >= 100 && room[1] >= 70 && room[2] == 0);
        assert!(lock(&shelf.helpers).len() == 3 && lock(&shelf.helpers).iter().all(|one| one.room() == room));
        // And stays as it is.
        shelf.level(3);
        assert_eq!(lock(&shelf.leader).room(), room);
    }
}
