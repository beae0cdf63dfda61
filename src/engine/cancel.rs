//! Cancelling: from any thread, at any moment, without waiting for anything.
//!
//! A cancel is a number that grows. A call notes the numbers of its sequences when it begins and is cancelled once one of
//! them has changed; a running program only looks at the one alarm that every cancel of the model rings, and the call then
//! sees whether it was meant. A cancel that finds no call running and nothing begun does nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// What all cancels of one model share.
#[derive(Default)]
pub(super) struct Alarm {
    /// Cancels of anything: what running programs look at.
    rings: AtomicU64,
    /// Cancels of the whole model.
    all: AtomicU64,
}

impl Alarm {
    /// The number that grows with each cancel of anything.
    pub(super) fn rings(&self) -> &AtomicU64 {
        &self.rings
    }

    /// Cancels every sequence.
    pub(super) fn cancel_all(&self) {
        self.all.fetch_add(1, Ordering::SeqCst);
        self.rings.fetch_add(1, Ordering::SeqCst);
    }
}

/// Cancels what one sequence is doing. Any thread, beside everything; it may outlive the sequence.
pub struct Canceller {
    own: AtomicU64,
    alarm: Arc<Alarm>,
}

impl Canceller {
    pub(super) fn new(alarm: &Arc<Alarm>) -> Arc<Canceller> {
        Arc::new(Canceller { own: AtomicU64::new(0), alarm: Arc::clone(alarm) })
    }

    /// A call that is running on the sequence ends with `Cancelled` and leaves it as before; what [`super::step`] has begun
    /// and tokens that wait in its queue are dropped.
    pub fn cancel(&self) {
        self.own.fetch_add(1, Ordering::SeqCst);
        self.alarm.rings.fetch_add(1, Ordering::SeqCst);
    }

    /// Grows with each cancel that concerns the sequence.
    pub(super) fn count(&self) -> u64 {
        self.own.load(Ordering::SeqCst).wrapping_add(self.alarm.all.load(Ordering::SeqCst))
    }
}
