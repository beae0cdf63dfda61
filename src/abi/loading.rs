//! Loads from sources: at once, or a few milliseconds at a time.
//!
//! A load ends once, in one of three ways: a model, a cancel or an error. Who ends it is decided by one atomic exchange,
//! so that a cancel that comes with the last slice either wins, and there is no model, or is told that it came too late.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU8, Ordering};
use std::sync::{Arc, Mutex, TryLockError};
use std::time::{Duration, Instant};

use super::guard::{guard, guard_status, guard_value};
use super::handle;
use super::load::{load, load_options, pool_of, reporter};
use super::model::ModelObject;
use super::pointer;
use super::status::{METRALE_AGAIN, METRALE_DONE, METRALE_OK, metrale_status};
use super::types::{
    metrale_error, metrale_load_options, metrale_load_progress, metrale_loading, metrale_model, metrale_progress_fn, metrale_source,
};
use super::versioned;
use crate::bail;
use crate::engine::{Loader, Progress};
use crate::error::{Error, Kind, Result};

/// A load between its steps.
pub(super) struct LoadingObject {
    /// `RUNNING` until the load ends, then how it ended. Changed once.
    state: AtomicU8,
    work: Mutex<Work>,
}

const RUNNING: u8 = 0;
const CANCELLED: u8 = 1;
const DONE: u8 = 2;
const FAILED: u8 = 3;

struct Work {
    /// Gone once the load has ended, with everything it holds.
    loader: Option<Loader>,
    progress: Progress,
    callback: metrale_progress_fn,
    user: *mut c_void,
    failure: Option<Error>,
}

// SAFETY: `user` is never followed here; the header tells the host on which threads its function gets it.
unsafe impl Send for Work {}

impl LoadingObject {
    /// Ends the load, unless it has ended. Whether it was this call.
    fn end(&self, how: u8) -> bool {
        self.state.compare_exchange(RUNNING, how, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    /// The error of a step that comes after the end, or that a cancel caught.
    fn ended(&self, work: &mut Work) -> Error {
        work.loader = None;
        match (self.state.load(Ordering::Acquire), &work.failure) {
            (CANCELLED, _) => Error::new(Kind::Cancelled, "the load was cancelled"),
            (_, Some(failure)) => failure.clone(),
            _ => Error::new(Kind::InvalidState, "the load has ended and its model was handed out; begin another"),
        }
    }

    fn fail(&self, work: &mut Work, error: Error) -> Error {
        work.failure = Some(error);
        self.end(FAILED);
        self.ended(work)
    }

    /// Works for about `budget`. The model's handle, once there is one.
    fn step(&self, work: &mut Work, budget: Budget) -> Result<Option<*mut metrale_model>> {
        let begun = Instant::now();
        let mut left = match budget {
            Budget::Time(_) => u64::MAX,
            Budget::Bytes(bytes) => bytes,
        };
        loop {
            let slice = match budget {
                Budget::Time(ns) => usize::try_from(ns / SLICE_SHARE).unwrap_or(usize::MAX).clamp(SLICE_LEAST, SLICE_MOST),
                Budget::Bytes(_) => usize::try_from(left).unwrap_or(usize::MAX).clamp(1, SLICE_MOST),
            };
            let before = work.progress;
            if self.state.load(Ordering::Acquire) != RUNNING {
                return Err(self.ended(work));
            }
            let Some(loader) = &mut work.loader else { bail!(Internal, "a running load without its loader") };
            let time = match budget {
                Budget::Time(ns) => Some(Duration::from_nanos(ns).saturating_sub(begun.elapsed()).max(TIME_LEAST)),
                Budget::Bytes(_) => None,
            };
            let made = match loader.step_for(slice, time) {
                Ok(made) => made,
                Err(e) => return Err(self.fail(work, e)),
            };
            work.progress = loader.progress();
            if let Some(mut report) = reporter(work.callback, work.user)
                && report(work.progress).is_break()
            {
                self.end(CANCELLED);
                return Err(self.ended(work));
            }
            if let Some(engine) = made {
                // The handle comes first, since making one can fail and the end is final.
                let model: *mut metrale_model = match handle::insert(Arc::new(ModelObject::new(engine))) {
                    Ok(model) => model,
                    Err(e) => return Err(self.fail(work, e)),
                };
                if self.end(DONE) {
                    work.loader = None;
                    return Ok(Some(model));
                }
                drop(handle::remove(model));
                return Err(self.ended(work));
            }
            let spent = match budget {
                Budget::Time(ns) => begun.elapsed() >= Duration::from_nanos(ns),
                Budget::Bytes(_) => {
                    let now = work.progress;
                    let done = if now.phase == before.phase { now.done_bytes.saturating_sub(before.done_bytes) } else { 0 };
                    left = left.saturating_sub(done);
                    // What is not counted in bytes is a step's work by itself.
                    done == 0 || left == 0
                }
            };
            if spent {
                return Ok(None);
            }
        }
    }
}

/// How much a step does.
#[derive(Clone, Copy)]
enum Budget {
    /// Nanoseconds.
    Time(u64),
    /// Bytes read or packed.
    Bytes(u64),
}

/// Bytes of a slice: an eighth of the budget at a byte a nanosecond, between limits. The least is what a cancel waits for.
const SLICE_SHARE: u64 = 8;
const SLICE_LEAST: usize = 256 << 10;
const SLICE_MOST: usize = 8 << 20;
/// What the tokenizer gets at least, so that it comes to its end under any budget.
const TIME_LEAST: Duration = Duration::from_micros(250);

/// Loads a model from a source: like `metrale_load`, which is the same for a path. `options` may be NULL. On success `*out`
/// is a handle for `metrale_free`. Blocks until the model is ready; the progress callback can cancel. The source may be
/// freed afterwards. Any thread; several loads of one source may run at once.
///
/// Statuses: as for `metrale_load`; `METRALE_IO` names what a reader did not give, with its offset;
/// `METRALE_UNSUPPORTED` for a single safetensors file, or one part of a split GGUF, that comes neither by path nor in a folder
/// (`metrale_source_folder`).
#[unsafe(no_mangle)]
pub extern "C" fn metrale_load_source(
    source: *const metrale_source,
    options: *const metrale_load_options,
    out: *mut *mut metrale_model,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || load(options, out, || Ok(handle::get(source)?.input())))
}

/// Begins to load a model from a source without reading anything yet; `metrale_load_step` does the work. `options` may be
/// NULL. On success `*out` is a handle for `metrale_loading_free`. Each begin is a load of its own, also of the same
/// source, and the source may be freed at once. Any thread.
///
/// Statuses: `METRALE_INVALID_ARGUMENT`, `METRALE_INVALID_HANDLE`, `METRALE_UNKNOWN_OPTION`, `METRALE_OUT_OF_MEMORY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_load_begin(
    source: *const metrale_source,
    options: *const metrale_load_options,
    out: *mut *mut metrale_loading,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || {
        let out = pointer::out(out, "out")?;
        let host = versioned::read(options)?;
        let options = load_options(&host)?;
        let loader = Loader::new(handle::get(source)?.input(), &options).with_pool(pool_of(&host)?);
        let work = Work { progress: loader.progress(), loader: Some(loader), callback: host.progress, user: host.user, failure: None };
        out.set(handle::insert(Arc::new(LoadingObject { state: AtomicU8::new(RUNNING), work: Mutex::new(work) }))?);
        Ok(())
    })
}

/// Works on a load for about `budget_ns` nanoseconds and at least one slice: 0 is the least there is, `UINT64_MAX` does
/// all. Bytes are read and weights packed in slices of a fraction of a millisecond; the tokenizer is made on a thread of the load's
/// own, which rests between steps, and is waited for no longer than the budget lasts; headers, the memory plan and each program
/// are one slice that cannot be cut. `METRALE_AGAIN` while there is more to do. `METRALE_OK` once, with the
/// model in `*out`, a handle for `metrale_free`. `progress`, which may be NULL, is filled in both cases. Steps may come
/// from different threads, one at a time; the progress callback runs inside of them.
/// One call at a time on a load.
///
/// Statuses: as for `metrale_load_source`. After an error everything the load held is freed, and every further step
/// returns that error; after `METRALE_OK` a step is `METRALE_INVALID_STATE`. `METRALE_BUSY` while another thread steps.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_load_step(
    loading: *mut metrale_loading,
    budget_ns: u64,
    progress: *mut metrale_load_progress,
    out: *mut *mut metrale_model,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard_status(err, || stepped(loading, Budget::Time(budget_ns), progress, out))
}

/// As `metrale_load_step`, by amount of work instead of time, which does not depend on the machine: reads or packs
/// `budget_bytes` bytes and at most one panel of a matrix more, or makes one of the pieces that are not counted in bytes
/// (headers, the tokenizer, the workspace). 0 is the least there is. The bytes are those of `progress`.
/// One call at a time on a load.
///
/// Statuses: as for `metrale_load_step`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_load_step_bytes(
    loading: *mut metrale_loading,
    budget_bytes: u64,
    progress: *mut metrale_load_progress,
    out: *mut *mut metrale_model,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard_status(err, || stepped(loading, Budget::Bytes(budget_bytes), progress, out))
}

fn stepped(
    loading: *mut metrale_loading,
    budget: Budget,
    progress: *mut metrale_load_progress,
    out: *mut *mut metrale_model,
) -> Result<metrale_status> {
    let out = pointer::out(out, "out")?;
    let progress = if progress.is_null() { None } else { Some(versioned::out(progress)?) };
    let loading = handle::get(loading)?;
    let mut work = match loading.work.try_lock() {
        Ok(work) => work,
        Err(TryLockError::WouldBlock) => bail!(Busy, "another call is working on this load"),
        Err(TryLockError::Poisoned(_)) => bail!(Internal, "an earlier step met a defect of this library; only freeing the load is left"),
    };
    let model = loading.step(&mut work, budget)?;
    if let Some(progress) = progress {
        progress.set(&as_host(work.progress));
    }
    let Some(model) = model else { return Ok(METRALE_AGAIN) };
    out.set(model);
    Ok(METRALE_OK)
}

/// The host's form of a progress.
fn as_host(progress: Progress) -> metrale_load_progress {
    let phase = match progress.phase {
        "reading" => c"reading",
        "kernels" => c"kernels",
        "tokenizer" => c"tokenizer",
        "weights" => c"weights",
        _ => c"done",
    };
    metrale_load_progress {
        struct_size: size_of::<metrale_load_progress>(),
        done_bytes: progress.done_bytes,
        total_bytes: progress.total_bytes,
        phase: phase.as_ptr(),
    }
}

/// Cancels a load. `METRALE_OK`: there will be no model, every step from now on is `METRALE_CANCELLED`, and a step that is
/// running ends so after its slice; what the load held is freed then, or at once when none is running. `METRALE_DONE`: too
/// late, a step has handed out the model or is about to, and it is the host's. Cancelling again is `METRALE_OK`, and so is
/// cancelling a load that failed. Any thread, also inside a callback of the load.
///
/// Statuses: `METRALE_OK`, `METRALE_DONE`, `METRALE_INVALID_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_load_cancel(loading: *mut metrale_loading, err: *mut *mut metrale_error) -> metrale_status {
    guard_status(err, || {
        let loading = handle::get(loading)?;
        loading.end(CANCELLED);
        if loading.state.load(Ordering::Acquire) == DONE {
            return Ok(METRALE_DONE);
        }
        if let Ok(mut work) = loading.work.try_lock() {
            work.loader = None;
        }
        Ok(METRALE_OK)
    })
}

/// Gives up a load, finished or not, and frees what it holds; a model that was handed out stays. A step that is running
/// on another thread ends with `METRALE_CANCELLED`, or with the model. NULL and handles that are none are ignored. Any
/// thread.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_loading_free(loading: *mut metrale_loading) {
    guard_value((), || {
        let loading = handle::remove(loading)?;
        loading.end(CANCELLED);
        Some(())
    })
}
