//! The worker pool: a function that several threads run at once, with meetings between its parts.
//!
//! A whole program (hundreds of operations) is one [`Pool::run`]; forking per operation would cost more than small operations take.
//! The calling thread leads, unless the host's own job system runs everything; helpers come and go (see [`super::crew`] and
//! [`super::parallel_for`]). Nobody waits for helpers that are not there, so the function gets to its end on one thread as on many,
//! and its result must be the same: work is dealt out by counters, piece by piece. A panic in the function becomes an `Internal`
//! error.

use super::crew::{self, Crew};
use super::parallel_for::{self, ParallelFor};
use super::processors::available_threads;
use crate::ensure;
use crate::error::Result;
use std::sync::Arc;

pub use super::post::inside;
pub use super::worker::Worker;

/// Where the threads come from that compute.
#[derive(Clone)]
pub enum Team {
    /// The calling thread and helpers.
    Crew(Arc<Crew>),
    /// The host's own job system.
    Host(Arc<dyn ParallelFor>),
}

/// Threads that compute together.
pub struct Pool {
    team: Team,
    limit: usize,
}

impl Pool {
    /// The caller and own threads, `threads` in all but no more than there are processors (all of them for 0).
    pub fn new(threads: usize) -> Result<Pool> {
        let crew = Crew::own(threads)?;
        let limit = 1 + crew.own_threads();
        Ok(Pool { team: Team::Crew(Arc::new(crew)), limit })
    }

    /// Threads of `team`, which other pools may use as well: at most `threads`, the caller counted; as many as there are
    /// processors for 0.
    pub fn of(team: Team, threads: usize) -> Pool {
        Pool { team, limit: if threads == 0 { available_threads() } else { threads } }
    }

    /// Most threads, the caller included.
    pub fn count(&self) -> usize {
        self.limit
    }

    /// Runs `f` on the calling thread and, if they come before it is done, on others; returns when all are out. Subnormals are
    /// zero inside.
    ///
    /// A panic in `f` is an `Internal` error with its text. Calls from several threads run beside each other; a call from inside
    /// of `f` is refused as `Busy`.
    pub fn run(&self, f: &(dyn Fn(&Worker<'_>) + Sync)) -> Result<()> {
        self.run_from(0, f)
    }

    /// As [`Pool::run`]; the first section begins at `start`.
    pub fn run_from(&self, start: usize, f: &(dyn Fn(&Worker<'_>) + Sync)) -> Result<()> {
        ensure!(!inside(), Busy, "this thread is in the middle of a computation; another one cannot begin inside of it");
        match &self.team {
            _ if self.limit == 1 => crew::alone(f, start),
            Team::Crew(crew) => crew.run(f, start, self.limit),
            Team::Host(host) => parallel_for::run(&**host, f, start, self.limit),
        }
    }
}

#[cfg(test)]
#[path = "pool_tests.rs"]
mod tests;
