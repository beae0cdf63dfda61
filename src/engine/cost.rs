//! What rows cost, learned from the runs of bounded work; decides how large a slice fits a budget.
//!
//! A run of `n` rows takes about `first + (n - 1) * more`: the first row pays for reading the weights. Only the size of slices
//! depends on this, and slices can leave off anywhere, so a poor estimate costs a little speed and never the budget.

use super::load::Engine;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Nanoseconds of the first row of a run and of each further one; 0 is not known yet.
#[derive(Default)]
pub(super) struct Cost {
    first: AtomicU64,
    more: AtomicU64,
}

impl Cost {
    /// Learns from a run.
    pub(super) fn learn(&self, rows: usize, spent: Duration) {
        let spent = spent.as_nanos().min(1 << 50) as u64;
        match (rows, self.first.load(Ordering::Relaxed)) {
            (1, _) => blend(&self.first, spent),
            (_, first) if rows > 1 => blend(&self.more, spent.saturating_sub(first) / (rows as u64 - 1)),
            _ => {}
        }
    }

    /// Time for `rows` rows in runs of at most `most`.
    pub(super) fn time(&self, engine: &Engine, rows: usize, most: usize) -> Duration {
        let (first, more) = self.known(engine);
        let runs = rows.div_ceil(most.max(1)) as u64;
        Duration::from_nanos(runs.saturating_mul(first).saturating_add((rows as u64 - runs).saturating_mul(more)))
    }

    /// Rows that fit.
    pub(super) fn rows(&self, engine: &Engine, time: Duration) -> usize {
        let (first, more) = self.known(engine);
        let time = time.as_nanos().min(1 << 50) as u64;
        if time < first { 0 } else { 1 + ((time - first) / more).min(1 << 20) as usize }
    }

    /// Before anything ran: 8 bytes of weights and 50 operations in a nanosecond, as on a few cores of an ordinary machine.
    fn known(&self, engine: &Engine) -> (u64, u64) {
        let or = |learned: &AtomicU64, guess: u64| match learned.load(Ordering::Relaxed) {
            0 => guess.max(1),
            known => known,
        };
        (or(&self.first, engine.step_bytes() / 8), or(&self.more, engine.token_flops() / 50))
    }
}

/// Moves a quarter of the way to a new value; threads that meet here lose at most one of their values.
fn blend(place: &AtomicU64, new: u64) {
    let old = place.load(Ordering::Relaxed);
    let value = if old == 0 { new } else { (3 * old + new) / 4 };
    place.store(value.max(1), Ordering::Relaxed);
}
