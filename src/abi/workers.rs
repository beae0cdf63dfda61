//! Threads that compute: the library's own, lent ones, or those of the host's job system.

use std::ffi::c_void;
use std::ptr::without_provenance_mut;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::guard::{guard, guard_status, guard_value};
use super::handle;
use super::status::{METRALE_DONE, METRALE_OK, metrale_status};
use super::types::{
    METRALE_WORKERS_HOST, METRALE_WORKERS_LENT, METRALE_WORKERS_OWN, metrale_body_fn, metrale_error, metrale_runtime,
    metrale_runtime_options,
};
use crate::backend::cpu::crew::MAX_THREADS;
use crate::backend::cpu::{Crew, ParallelFor, Pool, Team, attend, available_threads};
use crate::error::{self, Error, Result};
use crate::runtime;
use crate::{bail, ensure};

/// The threads of a runtime.
pub(super) struct Workers {
    kind: Kind,
    limit: usize,
    crew: Mutex<Lent>,
}

enum Kind {
    Own,
    Lent,
    Host(Arc<dyn ParallelFor>),
}

/// Made when it is first needed.
#[derive(Default)]
struct Lent {
    crew: Option<Arc<Crew>>,
    ended: bool,
}

impl Workers {
    /// As the host wants it.
    pub(super) fn new(host: &metrale_runtime_options) -> Result<Workers> {
        let (limit, what) = (host.threads as usize, "metrale_runtime_options");
        let by_host = host.workers == METRALE_WORKERS_HOST;
        ensure!(by_host == host.parallel_for.is_some(), InvalidArgument, "{what}: parallel_for and METRALE_WORKERS_HOST come together");
        ensure!(limit <= MAX_THREADS, TooLarge, "{what}.threads is {limit}; at most {MAX_THREADS} are possible");
        let kind = match (host.workers, host.parallel_for) {
            (METRALE_WORKERS_OWN, _) => Kind::Own,
            (METRALE_WORKERS_LENT, _) => Kind::Lent,
            (METRALE_WORKERS_HOST, Some(call)) => Kind::Host(Arc::new(HostFor { call, user: host.parallel_user })),
            (other, _) => {
                let text = format!("{what}.workers is {other}; it must be one of METRALE_WORKERS_*");
                return Err(Error::new(error::Kind::UnknownOption, text).named("workers"));
            }
        };
        Ok(Workers { kind, limit, crew: Mutex::default() })
    }

    /// What a model computes with that wants at most `threads`; 0 takes what the runtime has.
    pub(super) fn pool(&self, threads: usize) -> Result<Pool> {
        let most = if self.limit == 0 { available_threads() } else { self.limit };
        let team = match &self.kind {
            Kind::Host(host) => Team::Host(Arc::clone(host)),
            _ => Team::Crew(self.crew()?),
        };
        Ok(Pool::of(team, if threads == 0 { most } else { threads.min(most) }))
    }

    /// The runtime's handle is gone: lent threads go home.
    pub(super) fn end(&self) {
        let mut lent = lock(&self.crew);
        lent.ended = true;
        if let Some(crew) = &lent.crew {
            crew.end();
        }
    }

    /// Where threads are lent.
    fn crew(&self) -> Result<Arc<Crew>> {
        let mut lent = lock(&self.crew);
        if let Some(crew) = &lent.crew {
            return Ok(Arc::clone(crew));
        }
        // It is the runtime's and not the call's that happens to need it first.
        let _outside = runtime::outside();
        let crew = Arc::new(match self.kind {
            Kind::Own => Crew::own(self.limit)?,
            Kind::Lent => Crew::empty(),
            Kind::Host(_) => bail!(InvalidState, "this runtime computes with the host's parallel_for, so threads cannot be lent"),
        });
        if lent.ended {
            crew.end();
        }
        lent.crew = Some(Arc::clone(&crew));
        Ok(crew)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // What it holds is whole at every moment.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
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
/// processors sleep. 64 KiB of stack are enough. Any thread.
///
/// Statuses: `METRALE_INVALID_HANDLE`, `METRALE_INVALID_STATE` (the runtime uses `parallel_for`), `METRALE_BUSY` (called
/// by a thread that is inside another call).
#[unsafe(no_mangle)]
pub extern "C" fn metrale_runtime_run_worker(runtime: *const metrale_runtime, err: *mut *mut metrale_error) -> metrale_status {
    guard_status(err, || {
        let object = handle::get(runtime)?;
        let crew = object.workers.crew()?;
        crew.lend()?;
        Ok(if handle::get(runtime).is_ok() { METRALE_OK } else { METRALE_DONE })
    })
}

/// Sends all lent threads home: every `metrale_runtime_run_worker` that is under way returns soon, and this call does not
/// wait for it. What is being computed goes on without them. Threads may be lent again afterwards, so one that was about to
/// be lent at this moment stays; freeing the runtime takes care of those. Any thread.
///
/// Statuses: only `METRALE_INVALID_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_runtime_release_workers(runtime: *const metrale_runtime, err: *mut *mut metrale_error) -> metrale_status {
    guard(err, || {
        if let Some(crew) = &lock(&handle::get(runtime)?.workers.crew).crew {
            crew.release();
        }
        Ok(())
    })
}
