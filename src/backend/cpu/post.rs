//! Where a run is put up for helpers to find: the function, the meetings of those who run it, and what became of it.
#![allow(unsafe_code)] // The function borrows from the leader's stack while other threads run it.

use super::flush::FlushGuard;
use super::meeting::{Meeting, Seat};
use super::wait::{Padded, lock, wait_until};
use super::worker::{Away, Worker};
use crate::bail;
use crate::error::Result;
use crate::runtime::{self, Runtime};
use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

/// What every participant of a run calls.
pub(super) type Job<'a> = dyn Fn(&Worker<'_>) + Sync + 'a;

/// One run at a time; whoever takes the post leads it, or has it led.
pub(super) struct Post {
    pub(super) meeting: Meeting,
    taken: AtomicBool,
    /// Helpers that are in the function, or about to look whether they may join. Who has left the meeting may still be on its way out
    /// of the function, and so use what the leader lent.
    inside: Padded<AtomicUsize>,
    /// Written before the meeting opens, read by those who have joined, forgotten after it is closed.
    job: UnsafeCell<Option<*const Job<'static>>>,
    /// The leader's runtime, in which helpers compute as well. Written and read as `job` is.
    runtime: UnsafeCell<Option<Runtime>>,
    /// Memory ran short on a participant.
    short: AtomicBool,
    /// A participant panicked: the leader ends the run at its next meeting.
    failed: AtomicBool,
    /// The first panic's text.
    failure: Mutex<String>,
}

// SAFETY: `job` and `runtime` are the only fields that are not already Sync. They are written by the one thread that took the post
// while the meeting is closed, so while nobody reads them, and opening the meeting publishes them.
unsafe impl Sync for Post {}
// SAFETY: the pointer in `job` is used only while a run is open, and so while the function it borrows lives.
unsafe impl Send for Post {}

thread_local! {
    /// Set while this thread runs a job, or waits for others who run one in its stead: a second run from inside might wait for itself.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

impl Post {
    pub(super) const fn new() -> Post {
        Post {
            meeting: Meeting::new(),
            taken: AtomicBool::new(false),
            inside: Padded(AtomicUsize::new(0)),
            job: UnsafeCell::new(None),
            runtime: UnsafeCell::new(None),
            short: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            failure: Mutex::new(String::new()),
        }
    }

    /// Takes a free post.
    pub(super) fn take(&self) -> bool {
        !self.taken.load(Ordering::Relaxed) && !self.taken.swap(true, Ordering::Acquire)
    }

    /// Gives the post back.
    pub(super) fn give_back(&self) {
        // SAFETY: this thread has the post and the meeting is closed, so nobody reads the cell.
        drop(unsafe { (*self.runtime.get()).take() });
        self.taken.store(false, Ordering::Release);
    }

    /// Puts up a run that begins at `start`, for the thread that took the post.
    ///
    /// # Safety
    /// `job` must live until the run is closed, by [`Post::lead`] or by its meeting's `close`, and that must happen.
    pub(super) unsafe fn open(&self, job: &Job<'_>, start: usize, limit: usize) -> Seat {
        // SAFETY: only the lifetime changes; the caller keeps the function alive until nobody uses it any more.
        let job = unsafe { std::mem::transmute::<*const Job<'_>, *const Job<'static>>(job) };
        // SAFETY: this thread has the post and the meeting is closed, so nobody reads the cell.
        unsafe { *self.job.get() = Some(job) };
        // SAFETY: as above.
        unsafe { *self.runtime.get() = runtime::current() };
        self.meeting.open(start, limit)
    }

    /// Runs the job as the leader and ends the run, once all helpers are out.
    pub(super) fn lead(&self, seat: Seat, spins: u32) {
        let worker = Worker::leader(self, seat, spins);
        self.perform(&worker);
        self.meeting.close(worker.section().unwrap_or(seat.section), spins);
        // Nobody joins any more, and whoever had joined was counted before.
        wait_until(spins, || self.inside.0.load(Ordering::Acquire) == 0);
    }

    /// Runs the job as a helper if one is put up and wants more. Whether it did.
    pub(super) fn help(&self, away: Option<Away<'_>>, spins: u32) -> bool {
        if !self.meeting.is_open() {
            return false;
        }
        self.inside.0.fetch_add(1, Ordering::AcqRel);
        let seat = self.meeting.join(spins);
        if let Some(seat) = seat {
            self.perform(&Worker::helper(self, seat, away, spins));
        }
        self.inside.0.fetch_sub(1, Ordering::Release);
        seat.is_some()
    }

    /// How the run ended that was closed: an error if a participant panicked.
    pub(super) fn outcome(&self) -> Result<()> {
        if self.short.swap(false, Ordering::Relaxed) {
            runtime::set_short(true);
        }
        if self.failed.swap(false, Ordering::Acquire) {
            bail!(Internal, "a computation panicked: {}", std::mem::take(&mut *lock(&self.failure)));
        }
        Ok(())
    }

    /// Whether a participant panicked.
    pub(super) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    fn perform(&self, worker: &Worker<'_>) {
        // SAFETY: this thread takes part, so the cell is not written.
        let runtime = unsafe { &*self.runtime.get() };
        let scope = (runtime::current() != *runtime).then(|| runtime::enter(runtime.clone()));
        let was_short = runtime::set_short(false);
        // SAFETY: this thread takes part, so the cell is not written.
        let job = unsafe { *self.job.get() };
        if let Some(job) = job {
            // SAFETY: the function lives until the run is closed, for which every participant has to be out.
            if let Err(text) = run_alone(worker, unsafe { &*job }) {
                let mut failure = lock(&self.failure);
                if !self.failed.swap(true, Ordering::Release) {
                    *failure = text;
                }
            }
        }
        if runtime::set_short(was_short) {
            self.short.store(true, Ordering::Relaxed);
        }
        drop(scope);
        worker.leave();
    }
}

/// Runs `job`; a panic becomes its text.
pub(super) fn run_alone(worker: &Worker<'_>, job: &Job<'_>) -> Result<(), String> {
    catch_unwind(AssertUnwindSafe(|| {
        let _flush = FlushGuard::new();
        let _inside = Inside::enter();
        job(worker);
    }))
    .map_err(|panic| {
        let text = text_of(&*panic);
        // Dropping a payload may panic in turn; a leak is the lesser evil.
        std::mem::forget(panic);
        text
    })
}

fn text_of(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|s| (*s).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "without a message".to_owned())
}

/// Marks the thread as taking part in a run until dropped.
pub(super) struct Inside(bool);

impl Inside {
    pub(super) fn enter() -> Inside {
        Inside(INSIDE.replace(true))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.set(self.0);
    }
}

/// Whether this thread takes part in a run, or is in the host's `parallel_for` on behalf of one: it must not begin another.
pub fn inside() -> bool {
    INSIDE.get()
}
