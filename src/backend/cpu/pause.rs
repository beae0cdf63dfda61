//! When a run should leave off: an alarm somebody rang, or a deadline that has passed.
//!
//! Every participant looks after each piece of work. The first to notice tells the others through a flag; helpers then leave, and
//! the leader remembers its place and ends the run.

use super::wait::Padded;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Instant;

/// What may make a run leave off.
#[derive(Clone, Copy)]
pub struct Control<'a> {
    alarm: &'a AtomicU64,
    seen: u64,
    deadline: Option<Instant>,
}

impl<'a> Control<'a> {
    /// Leaves off once `alarm` is no longer `seen`, or after the deadline.
    pub fn new(alarm: &'a AtomicU64, seen: u64, deadline: Option<Instant>) -> Control<'a> {
        Control { alarm, seen, deadline }
    }

    /// Goes on to the end.
    pub fn none() -> Control<'static> {
        static SILENT: AtomicU64 = AtomicU64::new(0);
        Control { alarm: &SILENT, seen: 0, deadline: None }
    }

    /// Whether it has one.
    pub fn has_deadline(&self) -> bool {
        self.deadline.is_some()
    }

    /// Whether to leave off now.
    pub fn due(&self) -> bool {
        self.alarm.load(Ordering::Relaxed) != self.seen || self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }
}

/// The pause of one run.
pub struct Pause<'a> {
    control: Control<'a>,
    due: Padded<AtomicBool>,
}

impl<'a> Pause<'a> {
    /// Not due yet.
    pub fn new(control: Control<'a>) -> Pause<'a> {
        Pause { control, due: Padded::default() }
    }

    /// Whether this participant should leave, now that its piece is done.
    pub fn due(&self) -> bool {
        if self.is_noticed() {
            return true;
        }
        let due = self.control.due();
        if due {
            self.due.0.store(true, Ordering::Relaxed);
        }
        due
    }

    /// Whether some participant has found it due.
    pub fn is_noticed(&self) -> bool {
        self.due.0.load(Ordering::Relaxed)
    }
}
