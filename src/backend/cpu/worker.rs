//! What a thread knows that takes part in a run.

use super::meeting::{Arrival, Seat};
use super::post::Post;
use std::cell::Cell;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

/// A participant of a run: the leader, who is there from the beginning to the end, or a helper, who may come late and leave early.
pub struct Worker<'a> {
    leader: bool,
    start: usize,
    /// None where nobody else can take part.
    place: Option<Place<'a>>,
}

struct Place<'a> {
    post: &'a Post,
    spins: u32,
    /// The present section; `None` once out.
    section: Cell<Option<u64>>,
    away: Option<Away<'a>>,
}

/// A number that changes when helpers are called away, and what it was.
#[derive(Clone, Copy)]
pub(super) struct Away<'a>(pub &'a AtomicU32, pub u32);

impl Away<'_> {
    pub(super) fn is_called(&self) -> bool {
        self.0.load(Ordering::Relaxed) != self.1
    }
}

impl<'a> Worker<'a> {
    /// The only one.
    pub(super) fn alone(start: usize) -> Worker<'a> {
        Worker { leader: true, start, place: None }
    }

    pub(super) fn leader(post: &'a Post, seat: Seat, spins: u32) -> Worker<'a> {
        Worker::new(true, post, seat, None, spins)
    }

    pub(super) fn helper(post: &'a Post, seat: Seat, away: Option<Away<'a>>, spins: u32) -> Worker<'a> {
        Worker::new(false, post, seat, away, spins)
    }

    fn new(leader: bool, post: &'a Post, seat: Seat, away: Option<Away<'a>>, spins: u32) -> Worker<'a> {
        Worker { leader, start: seat.start, place: Some(Place { post, spins, section: Cell::new(Some(seat.section)), away }) }
    }

    /// Whether it is the one that every run has exactly one of.
    pub fn is_leader(&self) -> bool {
        self.leader
    }

    /// Where the section begins in which this participant joined: what the run was given, or the leader's last [`Worker::meet`].
    pub fn start(&self) -> usize {
        self.start
    }

    /// Ends a section: waits until every participant has called this; what they wrote before is visible after. `next` is where the
    /// next section begins, the same for all. False when this participant is out, because the run is over or it was called away:
    /// then it must return at once. The leader is out only when somebody panicked.
    #[must_use = "a participant that is out must return"]
    pub fn meet(&self, next: usize) -> bool {
        let Some(place) = &self.place else { return true };
        let Some(section) = place.section.get() else { return false };
        if self.leader {
            place.post.meeting.announce(section, next);
        } else if self.is_called_away() {
            self.leave();
            return false;
        }
        match place.post.meeting.arrive(section, place.spins, || self.is_called_away()) {
            Arrival::Next(next) => place.section.set(Some(next)),
            Arrival::Over => self.leave(),
            Arrival::Withdrawn => place.section.set(None),
        }
        place.section.get().is_some() && !(self.leader && place.post.has_failed())
    }

    /// Whether this helper is called away: it should finish its piece and return.
    pub fn is_called_away(&self) -> bool {
        self.place.as_ref().and_then(|place| place.away).is_some_and(|away| away.is_called())
    }

    /// Takes a helper out, if it still is in; the leader stays until it closes the run.
    pub(super) fn leave(&self) {
        if let Some(place) = self.place.as_ref().filter(|_| !self.leader)
            && let Some(section) = place.section.take()
        {
            place.post.meeting.leave(section);
        }
    }

    /// The section in which the run ended, for its leader.
    pub(super) fn section(&self) -> Option<u64> {
        self.place.as_ref()?.section.get()
    }

    /// Calls `f` with pieces of `0..total`, each piece on one participant, `grain` at a time. `counter` is 0 at first and serves one
    /// loop.
    pub fn each(&self, counter: &AtomicUsize, total: usize, grain: usize, mut f: impl FnMut(Range<usize>)) {
        let grain = grain.max(1);
        // The first look keeps a counter from growing without end when idle threads come by again and again.
        while counter.load(Ordering::Relaxed) < total {
            let start = counter.fetch_add(grain, Ordering::Relaxed);
            if start >= total {
                return;
            }
            f(start..total.min(start.saturating_add(grain)));
        }
    }
}
