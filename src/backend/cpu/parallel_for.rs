//! Runs on the threads of the host's own job system, through a function it gives us.
//!
//! The function is asked to call a body for each number below a count, on whatever threads it likes. The first body to be called
//! leads the run, others that are called meanwhile help, later ones find nothing to do. So it makes no difference to the result
//! whether bodies run at the same time or one after another, on the calling thread or on others.
//!
//! A body is known to the host by a ticket, a number that names a desk and the run it stood for. Desks are static and a ticket is
//! good for one run, so a host that calls a body too often, too late or with made-up numbers finds nobody there.
#![allow(unsafe_code)] // Puts up functions that borrow from the caller's stack.

use super::crew::SPINS;
use super::meeting::{MOST, Seat};
use super::post::{Inside, Job, Post};
use super::wait::wait_until;
use crate::error::{Error, Kind, Result};
use std::cell::UnsafeCell;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// The host's function.
pub trait ParallelFor: Send + Sync {
    /// Calls [`attend`] with `ticket` and each number below `count`, once, on any threads, and returns when all calls have returned.
    fn call(&self, count: usize, ticket: usize);
}

/// Where the bodies of one run report.
struct Desk {
    post: Post,
    /// The run's number, then 16 bits of bodies inside. Nobody enters with another run's number.
    door: AtomicU64,
    /// Written before the door opens.
    seat: UnsafeCell<Seat>,
    count: AtomicUsize,
    led: AtomicBool,
    /// A bit for each number that was called.
    called: [AtomicU64; MOST / 64],
    /// One more than a number that was called twice or is too large.
    wrong: AtomicUsize,
}

// SAFETY: `seat` is the only field that is not already Sync. It is written by the one thread that took the desk's post, before the
// door opens with a new number, and read by those who have entered with that number.
unsafe impl Sync for Desk {}

static DESKS: [Desk; 16] = [const { Desk::new() }; 16];

/// The lower bits of the door.
const INSIDE: u64 = (1 << 16) - 1;

/// Runs `job` on the threads of `host`, with at most `limit` participants.
pub(super) fn run(host: &dyn ParallelFor, job: &Job<'_>, start: usize, limit: usize) -> Result<()> {
    let limit = limit.min(MOST);
    let Some((index, desk)) = DESKS.iter().enumerate().find(|(_, desk)| desk.post.take()) else {
        return super::crew::alone(job, start);
    };
    // SAFETY: the run is closed below before this function, which borrows the job, returns; nothing between unwinds: `call` is C.
    let seat = unsafe { desk.post.open(job, start, limit) };
    // SAFETY: this thread has the desk and nobody is inside.
    unsafe { *desk.seat.get() = seat };
    desk.count.store(limit, Ordering::Relaxed);
    desk.led.store(false, Ordering::Relaxed);
    desk.wrong.store(0, Ordering::Relaxed);
    desk.called.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    let number = (desk.door.fetch_add(INSIDE + 1, Ordering::AcqRel) >> 16) + 1;
    {
        // The host may do other work on this thread while it waits, but not one that would wait for this run.
        let _inside = Inside::enter();
        host.call(limit, number as usize * DESKS.len() + index);
    }
    let late = desk.door.fetch_add(INSIDE + 1, Ordering::AcqRel) & INSIDE;
    wait_until(SPINS, || desk.door.load(Ordering::Acquire) & INSIDE == 0);
    if !desk.led.load(Ordering::Relaxed) {
        desk.post.meeting.close(seat.section, SPINS);
    }
    let verdict = desk.verdict(limit, late);
    let outcome = desk.post.outcome();
    desk.post.give_back();
    outcome.and(verdict)
}

/// A body: leads or helps the run that `ticket` stands for, if it still is there.
pub fn attend(ticket: usize, index: usize) {
    let (desk, number) = (&DESKS[ticket % DESKS.len()], ticket / DESKS.len());
    if !desk.enter(number as u64) {
        return;
    }
    if desk.is_first_call(index) {
        if desk.led.swap(true, Ordering::AcqRel) {
            desk.post.help(None, SPINS);
        } else {
            // SAFETY: this thread has entered, so the seat is not written.
            desk.post.lead(unsafe { *desk.seat.get() }, SPINS);
        }
    }
    desk.door.fetch_sub(1, Ordering::Release);
}

impl Desk {
    const fn new() -> Desk {
        Desk {
            post: Post::new(),
            door: AtomicU64::new(0),
            seat: UnsafeCell::new(Seat { section: 0, start: 0 }),
            count: AtomicUsize::new(0),
            led: AtomicBool::new(false),
            called: [const { AtomicU64::new(0) }; MOST / 64],
            wrong: AtomicUsize::new(0),
        }
    }

    /// Counts a body in, if its run is the present one. Odd numbers are runs under way, even ones the time between.
    fn enter(&self, number: u64) -> bool {
        let fits = |door: u64| door >> 16 == number && number % 2 == 1 && door & INSIDE < INSIDE;
        self.door.fetch_update(Ordering::AcqRel, Ordering::Relaxed, |door| fits(door).then(|| door + 1)).is_ok()
    }

    /// Notes the call of `index`.
    fn is_first_call(&self, index: usize) -> bool {
        let first = index < self.count.load(Ordering::Relaxed)
            && self.called[index / 64].fetch_or(1 << (index % 64), Ordering::Relaxed) & 1 << (index % 64) == 0;
        if !first {
            self.wrong.store(index.saturating_add(1), Ordering::Relaxed);
        }
        first
    }

    /// Whether every body was called once, and had returned when the host's function did.
    fn verdict(&self, limit: usize, late: u64) -> Result<()> {
        let called = |index: usize| self.called[index / 64].load(Ordering::Relaxed) >> (index % 64) & 1 == 1;
        let text = if late > 0 {
            format!("it returned while {late} of its bodies were running")
        } else if let Some(index) = self.wrong.load(Ordering::Relaxed).checked_sub(1) {
            match index < limit {
                true => format!("it called body {index} twice"),
                false => format!("it called body {index} of {limit}"),
            }
        } else if let Some(index) = (0..limit).find(|&index| !called(index)) {
            format!("it returned without having called body {index} of {limit}")
        } else {
            return Ok(());
        };
        Err(Error::new(Kind::InvalidArgument, format!("the host's parallel_for does not keep to its contract: {text}"))
            .named("parallel_for"))
    }
}
