//! Who takes part in a run: joining, the meetings between its sections, leaving, the end.
//!
//! A run has one leader and any number of helpers. A helper may join while a section is under way and may leave at a section's end;
//! the leader stays, and alone it gets as far as with others. A meeting ends a section: it is over when everybody has come who has
//! joined and not left, so nobody is ever waited for who is not there. A step has some three hundred meetings, so one costs a
//! tenth of a microsecond: who comes counts itself, the last one turns the section's number over, the others spin on that.
//!
//! Section, participants and arrivals are one word, so each change is whole: who joins while the last one arrives is told to look
//! again. Where the next section begins is written by the leader before it arrives, in the one of two places that nobody who
//! joins the present section reads.

use super::wait::{Padded, wait_until};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

/// The meetings of one run after another.
pub(super) struct Meeting {
    /// From the lowest bit: 12 bits of arrivals, 12 of participants, whether helpers may join, the section.
    state: Padded<AtomicU64>,
    /// What those who wait look at: twice the section, plus one when the run is over.
    turn: Padded<AtomicU64>,
    /// Where the present section and the next one begin, by parity of the section.
    starts: [AtomicUsize; 2],
    /// Most participants.
    limit: AtomicUsize,
}

/// What a helper gets when it joins.
#[derive(Clone, Copy)]
pub(super) struct Seat {
    pub section: u64,
    /// Where the section begins.
    pub start: usize,
}

/// What became of an arrival.
pub(super) enum Arrival {
    /// The next section has begun.
    Next(u64),
    /// The run is over: only leaving is left.
    Over,
    /// The participant was called away while it waited, and is out.
    Withdrawn,
}

const ARRIVAL: u64 = 1;
const PARTICIPANT: u64 = 1 << 12;
const OPEN: u64 = 1 << 24;
const SECTION: u32 = 25;
/// Numbers of sections wrap around long after anybody could remember an old one.
const SECTIONS: u64 = (1 << (64 - SECTION)) - 1;

/// Most participants a run may have: the leader and helpers.
pub(super) const MOST: usize = 1 << 10;

fn arrivals(state: u64) -> u64 {
    state & (PARTICIPANT - 1)
}

fn participants(state: u64) -> u64 {
    (state & (OPEN - 1)) >> 12
}

impl Meeting {
    pub(super) const fn new() -> Meeting {
        Meeting {
            state: Padded(AtomicU64::new(0)),
            turn: Padded(AtomicU64::new(0)),
            starts: [AtomicUsize::new(0), AtomicUsize::new(0)],
            limit: AtomicUsize::new(0),
        }
    }

    /// Begins a run of at most `limit` participants, with a seat for its leader. Only while no run is under way; what was written
    /// before is visible to everybody who joins.
    pub(super) fn open(&self, start: usize, limit: usize) -> Seat {
        let section = (self.state.0.load(Ordering::Acquire) >> SECTION).wrapping_add(1) & SECTIONS;
        self.starts[(section & 1) as usize].store(start, Ordering::Release);
        self.limit.store(limit.min(MOST), Ordering::Relaxed);
        self.turn.0.store(section << 1, Ordering::Release);
        self.state.0.store(section << SECTION | OPEN | PARTICIPANT, Ordering::Release);
        Seat { section, start }
    }

    /// Whether a helper may find a run to join.
    pub(super) fn is_open(&self) -> bool {
        self.state.0.load(Ordering::Relaxed) & OPEN != 0
    }

    /// Takes a helper in, unless no run is under way or enough take part.
    pub(super) fn join(&self, spins: u32) -> Option<Seat> {
        loop {
            let state = self.state.0.load(Ordering::Acquire);
            if state & OPEN == 0 || participants(state) as usize >= self.limit.load(Ordering::Relaxed) {
                return None;
            }
            if arrivals(state) == participants(state) {
                // The last one is about to turn the section over.
                wait_until(spins, || self.state.0.load(Ordering::Relaxed) != state);
                continue;
            }
            let section = state >> SECTION;
            // Acquire: whoever wrote a later section's start here has changed `state` before, and then the exchange fails.
            let start = self.starts[(section & 1) as usize].load(Ordering::Acquire);
            let joined = self.state.0.compare_exchange(state, state + PARTICIPANT, Ordering::AcqRel, Ordering::Relaxed);
            if joined.is_ok() {
                // The number that is waited on follows `state` by a moment.
                wait_until(spins, || self.turn.0.load(Ordering::Acquire) >> 1 == section);
                return Some(Seat { section, start });
            }
        }
    }

    /// The leader's word, before it arrives at the end of `section`, where the next one begins.
    pub(super) fn announce(&self, section: u64, start: usize) {
        self.starts[(section & 1 ^ 1) as usize].store(start, Ordering::Release);
    }

    /// Arrives at the end of `section` and waits for the others; what they wrote before is visible after.
    pub(super) fn arrive(&self, section: u64, spins: u32, away: impl Fn() -> bool) -> Arrival {
        let state = self.state.0.fetch_add(ARRIVAL, Ordering::AcqRel);
        // Once the run is closed its leader does not come any more, so arrivals no longer mean anything.
        if state & OPEN != 0 && arrivals(state) + 1 == participants(state) {
            return Arrival::Next(self.turn_over(section, participants(state)));
        }
        let turned = || self.turn.0.load(Ordering::Acquire) != section << 1;
        wait_until(spins, || turned() || away());
        if !turned() && self.withdraw(section, spins) {
            return Arrival::Withdrawn;
        }
        wait_until(spins, turned);
        match self.turn.0.load(Ordering::Acquire) & 1 {
            0 => Arrival::Next(section.wrapping_add(1) & SECTIONS),
            _ => Arrival::Over,
        }
    }

    /// Takes an arrival and its participant back, unless the section is over.
    fn withdraw(&self, section: u64, spins: u32) -> bool {
        loop {
            let state = self.state.0.load(Ordering::Relaxed);
            if state & OPEN == 0 || state >> SECTION != section {
                return false;
            }
            if arrivals(state) == participants(state) {
                // The last one is about to turn the section over.
                wait_until(spins, || self.state.0.load(Ordering::Relaxed) != state);
                continue;
            }
            // Release: what was written in this section is handed on like an arrival's.
            let without = state - ARRIVAL - PARTICIPANT;
            if self.state.0.compare_exchange(state, without, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                return true;
            }
        }
    }

    /// Leaves for good, instead of arriving at the end of `section`.
    pub(super) fn leave(&self, section: u64) {
        let state = self.state.0.fetch_sub(PARTICIPANT, Ordering::AcqRel);
        if state & OPEN != 0 && arrivals(state) + 1 == participants(state) {
            self.turn_over(section, participants(state) - 1);
        }
    }

    /// Everybody has arrived, so nobody changes `state` until it is turned: helpers neither join nor leave meanwhile.
    fn turn_over(&self, section: u64, participants: u64) -> u64 {
        let next = section.wrapping_add(1) & SECTIONS;
        self.state.0.store((next << SECTION) | OPEN | (participants * PARTICIPANT), Ordering::Release);
        self.turn.0.store(next << 1, Ordering::Release);
        next
    }

    /// The leader's end of the run, in `section`: nobody joins any more, helpers leave, and are waited for.
    pub(super) fn close(&self, section: u64, spins: u32) {
        let state = self.state.0.fetch_and(!OPEN, Ordering::AcqRel);
        if participants(state) > 1 {
            self.turn.0.store(section << 1 | 1, Ordering::Release);
            wait_until(spins, || participants(self.state.0.load(Ordering::Acquire)) == 1);
        }
        self.state.0.store(section << SECTION, Ordering::Release);
    }
}
