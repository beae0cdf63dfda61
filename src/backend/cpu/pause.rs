//! When a run should leave off: an alarm somebody rang, or a deadline that has passed.
//!
//! Every worker looks after each piece of work. The first to notice writes down in which section (the stretch between two
//! barriers) it happened, and all workers leave at that section's barrier, each remembering its own place. Noting the
//! section is what makes them agree: a worker that is already one barrier further cannot be mistaken for one that leaves here.

use super::barrier::Padded;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
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

    /// Whether to leave off now.
    pub fn due(&self) -> bool {
        self.alarm.load(Ordering::Relaxed) != self.seen || self.deadline.is_some_and(|deadline| Instant::now() >= deadline)
    }
}

/// The pause of one run.
pub struct Pause<'a> {
    control: Control<'a>,
    due: Padded<AtomicBool>,
    /// The section at whose end all leave; sections count from 1.
    section: AtomicUsize,
}

impl<'a> Pause<'a> {
    /// Not due yet.
    pub fn new(control: Control<'a>) -> Pause<'a> {
        Pause { control, due: Padded::default(), section: AtomicUsize::new(0) }
    }

    /// Whether this worker should finish its piece and leave.
    pub fn due(&self) -> bool {
        if self.due.0.load(Ordering::Relaxed) {
            return true;
        }
        let due = self.control.due();
        if due {
            self.due.0.store(true, Ordering::Relaxed);
        }
        due
    }

    /// Notes, before its barrier, that all leave at the end of `section`.
    pub fn leave(&self, section: usize) {
        self.section.store(section, Ordering::Relaxed);
    }

    /// After the barrier at the end of `section`: whether all leave here.
    pub fn left(&self, section: usize) -> bool {
        self.section.load(Ordering::Relaxed) == section
    }
}
