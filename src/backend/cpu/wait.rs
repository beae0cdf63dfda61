//! Waiting for another thread: first with the processor, then beside others, then asleep.

use std::hint::spin_loop;
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

/// A number alone on its cache lines (two, because the prefetcher fetches pairs).
#[repr(align(128))]
#[derive(Default)]
pub(super) struct Padded<T>(pub T);

/// Waits for `ready`: `spins` looks with the processor, then yielding it, then in short naps. So more threads than processors, or a
/// peer that lost its processor, still make progress, and nobody spins without bound.
pub(crate) fn wait_until(spins: u32, ready: impl Fn() -> bool) {
    for _ in 0..spins {
        if ready() {
            return;
        }
        spin_loop();
    }
    for _ in 0..YIELDS {
        if ready() {
            return;
        }
        std::thread::yield_now();
    }
    while !ready() {
        std::thread::sleep(NAP);
    }
}

/// Waits for a lock in short naps, until `give_up` says that it is too late.
pub(crate) fn lock_unless<'a, T>(mutex: &'a Mutex<T>, give_up: &dyn Fn() -> bool) -> Option<MutexGuard<'a, T>> {
    let mut rounds = 0;
    loop {
        match mutex.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) if give_up() => return None,
            // Short work is over within a few looks; for the rest the processor is better used by others.
            Err(TryLockError::WouldBlock) if rounds < 20 => std::thread::yield_now(),
            Err(TryLockError::WouldBlock) => std::thread::sleep(NAP),
        }
        rounds += 1;
    }
}

/// A lock whose data is valid at every moment, so a panic elsewhere does not spoil it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Yields before the first nap: some milliseconds where nobody else wants the core.
const YIELDS: u32 = 5_000;
/// Between two looks.
const NAP: Duration = Duration::from_micros(50);
