//! Helpers and the runs they look for: threads of our own, threads lent by the host, or both.
//!
//! A crew has a few posts. A leader puts its run up at a free one and begins; idle helpers see the number of runs change, look
//! through the posts and join what they find. Nobody waits for a helper that has not joined, so it does not matter how many there
//! are, or whether they sleep. Helpers spin for about 50 us after a run, since decode calls come back to back, and then sleep.
#![allow(unsafe_code)] // Puts up functions that borrow from the leader's stack.

use super::post::{self, Job, Post};
use super::processors::{Processors, available_threads};
use super::wait::{Padded, lock};
use super::worker::{Away, Worker};
use crate::error::Result;
use crate::runtime::Thread;
use crate::{bail, ensure};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

/// Helpers for the runs of any number of models. Dropping it ends its own threads; lent ones must have been released.
pub struct Crew {
    shared: Arc<Shared>,
    own: Vec<Thread>,
    seats: Mutex<Seats>,
    /// Lent threads beyond the processors there are wait here until others go.
    bench: Condvar,
    ended: AtomicBool,
}

/// Lent threads that look for runs.
#[derive(Default)]
struct Seats {
    taken: usize,
    processors: Processors,
}

struct Shared {
    posts: [Post; POSTS],
    /// Changes with each run that is put up, and when helpers are called away.
    epoch: Padded<AtomicU32>,
    /// How often helpers were called away.
    away: [AtomicU32; 2],
    spins: u32,
    /// Helpers there are, asleep or not.
    helpers: AtomicUsize,
    /// Helpers asleep (or about to be) on `wake`.
    sleepers: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
}

/// Index into `Shared::away`.
const OWN: usize = 0;
const LENT: usize = 1;

/// Runs that can be helped at once; further ones are run by their leaders alone.
const POSTS: usize = 8;
/// Most threads a crew may be told to have: far above any machine this runs on, far below what exhausts the system.
pub const MAX_THREADS: usize = super::meeting::MOST;
/// Helpers call kernels with small frames; the largest scratch arrays are tens of kilobytes.
const STACK: usize = 1 << 20;
/// Looks before yielding: about 50 us, the time within which the next decode step usually begins.
pub(super) const SPINS: u32 = 1_500;

impl Crew {
    /// Without helpers, until threads are lent.
    pub fn empty() -> Crew {
        Crew::new(SPINS)
    }

    /// For `threads` threads in all, the leader counted, so one less of its own, but none beyond the processors there are: it could
    /// only be in the way. 0 takes all processors.
    pub fn own(threads: usize) -> Result<Crew> {
        ensure!(threads <= MAX_THREADS, TooLarge, "{threads} threads were asked for; at most {MAX_THREADS} are possible");
        let available = available_threads();
        Crew::exactly(if threads == 0 { available } else { threads.min(available) })
    }

    /// As [`Crew::own`], however few processors there are: for tests.
    pub fn exactly(threads: usize) -> Result<Crew> {
        // With more threads than processors a spinning thread keeps the one it waits for from running.
        let mut crew = Crew::new(if threads > available_threads() { SPINS / 50 } else { SPINS });
        for index in 1..threads {
            let shared = Arc::clone(&crew.shared);
            let help = move || shared.help_until(Away(&shared.away[OWN], 0), index);
            let Some(helper) = Thread::start(&format!("metrale-{index}"), STACK, help) else {
                bail!(OutOfMemory, "helper thread {index} of {threads} could not be started");
            };
            crew.own.push(helper);
        }
        crew.shared.helpers.fetch_add(crew.own.len(), Ordering::SeqCst);
        Ok(crew)
    }

    fn new(spins: u32) -> Crew {
        let shared = Arc::new(Shared {
            posts: [const { Post::new() }; POSTS],
            epoch: Padded::default(),
            away: [AtomicU32::new(0), AtomicU32::new(0)],
            spins,
            helpers: AtomicUsize::new(0),
            sleepers: AtomicUsize::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
        });
        let mut seats = Seats::default();
        seats.processors.add_own();
        Crew { shared, own: Vec::new(), seats: Mutex::new(seats), bench: Condvar::new(), ended: AtomicBool::new(false) }
    }

    /// Threads of its own.
    pub fn own_threads(&self) -> usize {
        self.own.len()
    }

    /// Lends the calling thread: it helps until [`Crew::release`] is called, or has ended the crew. Of more threads than processors
    /// some sleep.
    pub fn lend(&self) -> Result<()> {
        ensure!(!post::inside(), Busy, "this thread is computing already; lend one that has nothing to do");
        let away = Away(&self.shared.away[LENT], self.shared.away[LENT].load(Ordering::SeqCst));
        let is_called = || away.is_called() || self.ended.load(Ordering::SeqCst);
        let mut seats = lock(&self.seats);
        let before = seats.processors.count();
        seats.processors.add_own();
        if seats.processors.count() > before {
            self.bench.notify_all();
        }
        // One processor is the leader's.
        while !is_called() && seats.taken + self.own.len() + 1 >= seats.processors.count() {
            seats = self.bench.wait(seats).unwrap_or_else(PoisonError::into_inner);
        }
        if is_called() {
            return Ok(());
        }
        seats.taken += 1;
        let index = seats.taken;
        drop(seats);
        self.shared.helpers.fetch_add(1, Ordering::SeqCst);
        self.shared.help_until(away, index);
        self.shared.helpers.fetch_sub(1, Ordering::SeqCst);
        lock(&self.seats).taken -= 1;
        self.bench.notify_one();
        Ok(())
    }

    /// Sends all lent threads home; those in the middle of a run leave at the end of its section. Threads may be lent again.
    pub fn release(&self) {
        self.shared.away[LENT].fetch_add(1, Ordering::SeqCst);
        self.shared.next_epoch();
        let _seats = lock(&self.seats);
        self.bench.notify_all();
    }

    /// Sends all lent threads home and takes no more.
    pub fn end(&self) {
        self.ended.store(true, Ordering::SeqCst);
        self.release();
    }

    /// Runs `job` on the calling thread, with up to `limit - 1` helpers.
    pub(super) fn run(&self, job: &Job<'_>, start: usize, limit: usize) -> Result<()> {
        let shared = &*self.shared;
        let post = if limit > 1 { shared.posts.iter().find(|post| post.take()) } else { None };
        let Some(post) = post else { return alone(job, start) };
        // SAFETY: `lead` closes the run before this function, which borrows the job, returns; it does not unwind.
        let seat = unsafe { post.open(job, start, limit) };
        if shared.helpers.load(Ordering::Relaxed) > 0 {
            shared.next_epoch();
        }
        post.lead(seat, shared.spins);
        let outcome = post.outcome();
        post.give_back();
        outcome
    }
}

/// Runs `job` on the calling thread.
pub(super) fn alone(job: &Job<'_>, start: usize) -> Result<()> {
    match post::run_alone(&Worker::alone(start), job) {
        Ok(()) => Ok(()),
        Err(text) => bail!(Internal, "a computation panicked: {text}"),
    }
}

impl Drop for Crew {
    fn drop(&mut self) {
        self.shared.away[OWN].fetch_add(1, Ordering::SeqCst);
        self.shared.next_epoch();
        for helper in self.own.drain(..) {
            helper.join();
        }
    }
}

impl Shared {
    /// Announces a run, or a call away, and wakes who sleeps.
    fn next_epoch(&self) {
        self.epoch.0.fetch_add(1, Ordering::SeqCst);
        // A helper counts itself among the sleepers before it looks at the epoch for the last time: either it is seen here, or it
        // sees the new epoch. The lock makes sure that it is really waiting when the notification comes.
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            let _asleep = lock(&self.sleep);
            self.wake.notify_all();
        }
    }

    /// Waits for an epoch other than `seen`: spinning first, then asleep.
    fn await_epoch(&self, seen: u32) -> u32 {
        for _ in 0..self.spins {
            let now = self.epoch.0.load(Ordering::Acquire);
            if now != seen {
                return now;
            }
            std::hint::spin_loop();
        }
        let mut guard = lock(&self.sleep);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let now = loop {
            let now = self.epoch.0.load(Ordering::SeqCst);
            if now != seen {
                break now;
            }
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        now
    }

    /// A helper's life. `index` spreads helpers over the runs there are.
    fn help_until(&self, away: Away<'_>, index: usize) {
        let mut seen = self.epoch.0.load(Ordering::Acquire);
        while !away.is_called() {
            for post in 0..POSTS {
                self.posts[(index + post) % POSTS].help(Some(away), self.spins);
            }
            seen = self.await_epoch(seen);
        }
    }
}
