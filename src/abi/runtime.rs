//! Runtimes: what a host lends the library, and what the library has taken of it.

use std::ffi::c_void;
use std::sync::Arc;

use super::guard::{guard, guard_value};
use super::handle;
use super::pointer;
use super::status::metrale_status;
use super::types::*;
use super::versioned;
use super::workers::Workers;
use crate::bail;
use crate::engine;
use crate::error::{Error, Kind, Result};
use crate::runtime::{self, Hooks, Level, Runtime, Settings, Sink};

/// A runtime; what was made in it keeps it.
pub(super) struct RuntimeObject {
    pub(super) runtime: Runtime,
    pub(super) workers: Workers,
}

/// Makes a runtime: an allocator, a limit of memory, a place for log records and threads, for the models that are loaded
/// with it (`metrale_load_options.runtime`) and all that is made of them. `options` may be NULL: the system's memory,
/// counted, and own threads for all processors, which start with the first load. On success `*out` is a handle for
/// `metrale_runtime_free`. Any thread.
///
/// Statuses: `METRALE_INVALID_ARGUMENT` (one of `alloc` and `free` without the other, `parallel_for` without
/// `METRALE_WORKERS_HOST` or the other way round), `METRALE_UNKNOWN_OPTION`, `METRALE_TOO_LARGE` (more than 1,024
/// threads), `METRALE_OUT_OF_MEMORY`, `METRALE_UNSUPPORTED` (an allocator, in a build whose memory is not the library's
/// to direct).
#[unsafe(no_mangle)]
pub extern "C" fn metrale_runtime_new(
    options: *const metrale_runtime_options,
    out: *mut *mut metrale_runtime,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || {
        let out = pointer::out(out, "out")?;
        let host = versioned::read(options)?;
        pointer::flags(host.flags, 0, "metrale_runtime_options.flags")?;
        if host.reserved != 0 {
            bail!(UnknownOption, "metrale_runtime_options.reserved is {}; it must be 0", host.reserved);
        }
        let hooks = match (host.alloc, host.free) {
            (Some(alloc), Some(free)) => Some(Hooks { alloc, free, user: host.alloc_user }),
            (None, None) => None,
            _ => bail!(InvalidArgument, "metrale_runtime_options: alloc and free come together"),
        };
        if hooks.is_some() && !runtime::ALLOCATES {
            bail!(Unsupported, "this build leaves memory to the program it is linked into");
        }
        engine::warm()?;
        let sink = sink(host.log_level, host.log, host.log_user)?;
        let workers = Workers::new(&host)?;
        let Some(runtime) = Runtime::new(&Settings { hooks, cap: host.memory_cap }) else {
            bail!(OutOfMemory, "a runtime does not fit into what its allocator and memory_cap allow");
        };
        runtime.log_to(sink);
        runtime::adopt(&Some(runtime.clone()));
        out.set(handle::insert(Arc::new(RuntimeObject { runtime, workers }))?);
        Ok(())
    })
}

/// Gives up a runtime. Models loaded with it, and all that was made of them, keep it: the host's functions may be called
/// until the last of those, and of the errors their calls returned, is freed and no call is running. Lent threads go home
/// now, own ones end with the last model. NULL and handles that are none are ignored. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_runtime_free(runtime: *mut metrale_runtime) {
    guard_value((), || handle::remove(runtime).map(|object| object.workers.end()))
}

/// Fills `*out`, whose `struct_size` must be set, with what the runtime has taken of its allocator. Model files that are
/// mapped and stacks of threads are not counted. Any thread.
///
/// Statuses: `METRALE_INVALID_HANDLE`, `METRALE_INVALID_ARGUMENT`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_runtime_memory(
    runtime: *const metrale_runtime,
    out: *mut metrale_memory_usage,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || {
        let out = versioned::out(out)?;
        let usage = handle::get(runtime)?.runtime.usage();
        out.set(&metrale_memory_usage {
            struct_size: size_of::<metrale_memory_usage>(),
            live: usage.live,
            peak: usage.peak,
            cap: usage.cap,
            weights: usage.weights,
            cache: usage.cache,
            other: usage.live.saturating_sub(usage.weights).saturating_sub(usage.cache),
        });
        Ok(())
    })
}

/// Gives memory back that nothing needs now: pages of caches and recurrent states that no sequence holds, prompts kept for
/// later ones (`prefix_bytes`), experts that can be read again, and what the system's allocator keeps for later. Sequences go on as if nothing had happened; the
/// next ones pay for the memory anew. Any thread.
///
/// Statuses: only `METRALE_INVALID_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_runtime_trim(runtime: *mut metrale_runtime, err: *mut *mut metrale_error) -> metrale_status {
    guard(err, || {
        let runtime = handle::get(runtime)?;
        for model in handle::all_of::<metrale_model>(&runtime.runtime)? {
            model.engine().trim();
        }
        // A model whose own handles are gone lives on in its sequences; those that are busy are left alone.
        for sequence in handle::all_of::<metrale_seq>(&runtime.runtime)? {
            if let Ok(state) = sequence.shared() {
                state.sequence.engine().trim();
            }
        }
        give_to_system();
        Ok(())
    })
}

/// Asks the C library to return what it keeps.
fn give_to_system() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: glibc's function may be called at any time on any thread.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Changes where the runtime's log records go, and up to which level (`METRALE_LOG_*`; 0 is `METRALE_LOG_INFO`). NULL for
/// `log` is silence, as at first. A record that is being written on another thread may still reach the function that was
/// set before. Any thread.
///
/// Statuses: `METRALE_UNKNOWN_OPTION` (there is no such level).
#[unsafe(no_mangle)]
pub extern "C" fn metrale_runtime_log_set(
    runtime: *mut metrale_runtime,
    level: u32,
    log: metrale_log_fn,
    user: *mut c_void,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || {
        let runtime = handle::get(runtime)?;
        runtime.runtime.log_to(sink(level, log, user)?);
        Ok(())
    })
}

/// The host's log function with its level.
fn sink(level: u32, log: metrale_log_fn, user: *mut c_void) -> Result<Option<Sink>> {
    let level = match level {
        METRALE_LOG_ERROR => Level::Error,
        METRALE_LOG_WARNING => Level::Warning,
        METRALE_LOG_DEFAULT | METRALE_LOG_INFO => Level::Info,
        METRALE_LOG_DEBUG => Level::Debug,
        other => {
            let text = format!("the log level is {other}; it must be one of METRALE_LOG_*");
            return Err(Error::new(Kind::UnknownOption, text).named("log_level"));
        }
    };
    Ok(log.map(|write| Sink { write, user, level }))
}
