//! Threads that compute: the library's own, lent ones, or those of the host's job system.

use std::ffi::c_void;
use std::ptr::without_provenance_mut;
use std::sync::Arc;

use super::guard::{guard, guard_status, guard_value};
use super::handle;
use super::status::{METRALE_DONE, METRALE_OK, metrale_status};
use super::types::{
    METRALE_WORKERS_HOST, METRALE_WORKERS_LENT, METRALE_WORKERS_OWN, metrale_body_fn, metrale_error, metrale_runtime,
    metrale_runtime_options,
};
use crate::backend::cpu::{Crew, ParallelFor, Pool, Team, attend, available_threads};
use crate::error::{Error, Kind, Result};
use crate::{bail, ensure};

/// The threads of a runtime.
pub(super) struct Workers {
    team: Team,
    limit: usize,
}

impl Workers {
    /// As the host wants it; starts own threads.
    pub(super) fn new(host: &metrale_runtime_options) -> Result<Workers> {
        let (limit, what) = (host.threads as usize, "metrale_runtime_options");
        let by_host = host.workers == METRALE_WORKERS_HOST;
        ensure!(by_host == host.parallel_for.is_some(), InvalidArgument, "{what}: parallel_for and METRALE_WORKERS_HOST come together");
        let team = match (host.workers, host.parallel_for) {
            (METRALE_WORKERS_OWN, _) => Team::Crew(Arc::new(Crew::own(limit)?)),
            (METRALE_WORKERS_LENT, _) => Team::Crew(Arc::new(Crew::empty())),
            (METRALE_WORKERS_HOST, Some(call)) => Team::Host(Arc::new(HostFor { call, user: host.parallel_user })),
            (other, _) => {
                let text = format!("{what}.workers is {other}; it must be one of METRALE_WORKERS_*");
                return Err(Error::new(Kind::UnknownOption, text).named("workers"));
            }
        };
        Ok(Workers { team, limit: if limit == 0 { available_threads() } else { limit } })
    }

    /// What a model computes with that wants at most `threads`; 0 takes what the runtime has.
    pub(super) fn pool(&self, threads: usize) -> Pool {
        Pool::of(self.team.clone(), if threads == 0 { self.limit } else { threads.min(self.limit) })
    }

    /// The runtime's handle is gone: lent threads go home.
    pub(super) fn end(&self) {
        if let Team::Crew(crew) = &self.team {
            crew.end();
        }
    }

    fn crew(&self) -> Result<&Crew> {
        match &self.team {
            Team::Crew(crew) => Ok(crew),
            Team::Host(_) => bail!(InvalidState, "this runtime computes with the host's parallel_for, so threads cannot be lent"),
        }
    }
}

/// The host's `parallel_for`.
struct HostFor {
    call: unsafe extern "C" fn(*mut c_void, usize, metrale_body_fn, *mut c_void),
    user: *mut c_void,
}

// SAFETY: `user` is never followed here; the header tells the host on which threads its function gets it.
unsafe impl Send for HostFor {}
// SAFETY: as above.
unsafe impl Sync for HostFor {}

impl ParallelFor for HostFor {
    fn call(&self, count: usize, ticket: usize) {
        // SAFETY: the host gave a function of this type. The body's argument is a number that is never followed.
        unsafe { (self.call)(self.user, count, Some(body), without_provenance_mut(ticket)) };
    }
}

/// What the host's `parallel_for` calls.
unsafe extern "C" fn body(arg: *mut c_void, index: usize) {
    guard_value((), || {
        attend(arg.addr(), index);
        Some(())
    });
}

/// Lends the calling thread to the runtime: it helps whatever is computed with the runtime's models, sleeps when there is
/// nothing to do, and returns when `metrale_runtime_release_workers` is called (`METRALE_OK`) or the runtime's handle is
/// freed (`METRALE_DONE`). In the middle of a step it leaves when its piece of work is done, some microseconds to
/// milliseconds later. Results do not depend on who helps. Any number of threads may be lent; those beyond the number of
/// processors sleep. 64 KiB of stack are enough.
///
/// Statuses: `METRALE_INVALID_HANDLE`, `METRALE_INVALID_STATE` (the runtime uses `parallel_for`), `METRALE_BUSY` (called
/// by a thread that is inside another call).
#[unsafe(no_mangle)]
pub extern "C" fn metrale_runtime_run_worker(runtime: *const metrale_runtime, err: *mut *mut metrale_error) -> metrale_status {
    guard_status(err, || {
        let object = handle::get(runtime)?;
        object.workers.crew()?.lend()?;
        Ok(if handle::get(runtime).is_ok() { METRALE_OK } else { METRALE_DONE })
    })
}

/// Sends all lent threads home: every `metrale_runtime_run_worker` that is under way returns soon, and this call does not
/// wait for it. What is being computed goes on without them. Threads may be lent again afterwards, so one that was about to
/// be lent at this moment stays; freeing the runtime takes care of those. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_runtime_release_workers(runtime: *const metrale_runtime, err: *mut *mut metrale_error) -> metrale_status {
    guard(err, || {
        handle::get(runtime)?.workers.crew()?.release();
        Ok(())
    })
}
