//! The barrier between the operations of a program, and the waiting that it shares with the pool.
//!
//! A step has some three hundred barriers, so one costs a tenth of a microsecond: arrivals are counted, the last one turns a
//! generation number over, the others spin on it. Spinning is bounded: a thread that waits longer yields the processor, and one that
//! waits for milliseconds naps, so more threads than cores, or a peer that lost its core, still make progress.

use std::hint::spin_loop;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

/// A number alone on its cache lines (two, because the prefetcher fetches pairs).
#[repr(align(128))]
#[derive(Default)]
pub(super) struct Padded<T>(pub T);

/// Meeting point of a fixed number of threads, reusable at once.
pub(super) struct Barrier {
    arrived: Padded<AtomicUsize>,
    generation: Padded<AtomicUsize>,
    poisoned: AtomicBool,
    count: usize,
    spins: u32,
}

/// Thrown (without the panic hook) out of the barrier on threads whose peer panicked.
pub(super) struct Poisoned;

impl Barrier {
    /// For `count` threads that spin `spins` times before they yield.
    pub(super) fn new(count: usize, spins: u32) -> Barrier {
        Barrier { arrived: Padded::default(), generation: Padded::default(), poisoned: AtomicBool::new(false), count, spins }
    }

    /// Returns when all threads have come. Unwinds with [`Poisoned`] when one of them will not.
    pub(super) fn wait(&self) {
        if self.count == 1 {
            return;
        }
        let generation = self.generation.0.load(Ordering::Acquire);
        if self.arrived.0.fetch_add(1, Ordering::AcqRel) + 1 == self.count {
            // Nobody arrives again before the generation turns, so the plain store cannot lose a count.
            self.arrived.0.store(0, Ordering::Relaxed);
            self.generation.0.store(generation.wrapping_add(1), Ordering::Release);
        } else {
            wait_until(self.spins, || self.generation.0.load(Ordering::Acquire) != generation || self.poisoned.load(Ordering::Acquire));
        }
        if self.poisoned.load(Ordering::Acquire) {
            resume_unwind(Box::new(Poisoned));
        }
    }

    /// Lets everybody out, now and at every later wait until `reset`.
    pub(super) fn poison(&self) {
        self.poisoned.store(true, Ordering::Release);
    }

    /// Makes the barrier usable again. Only while no thread is inside.
    pub(super) fn reset(&self) {
        self.arrived.0.store(0, Ordering::Relaxed);
        self.poisoned.store(false, Ordering::Release);
    }
}

/// Waits for `ready`: first with the processor, then beside others, then asleep in short naps.
pub(super) fn wait_until(spins: u32, ready: impl Fn() -> bool) {
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

/// Yields before the first nap: some milliseconds where nobody else wants the core.
const YIELDS: u32 = 5_000;
const NAP: Duration = Duration::from_micros(50);
