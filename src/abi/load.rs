//! Loading a model, with progress and cancellation.

use std::ffi::{c_char, c_void};
use std::ops::ControlFlow;
use std::sync::Arc;

use super::guard::guard;
use super::handle;
use super::model::ModelObject;
use super::pointer;
use super::status::metrale_status;
use super::types::{
    METRALE_COMPUTE_DEFAULT, METRALE_COMPUTE_F32, METRALE_COMPUTE_FAST, METRALE_KV_BF16, METRALE_KV_DEFAULT, METRALE_KV_F16,
    METRALE_KV_F32, METRALE_KV_Q8, METRALE_LOAD_DETERMINISTIC, METRALE_LOAD_LOW_PRIORITY, METRALE_LOAD_PACKED, metrale_error,
    metrale_load_options, metrale_model, metrale_progress_fn,
};
use super::versioned;
use crate::backend::cpu::Pool;
use crate::engine::{self, Progress};
use crate::error::{Error, Kind, Result};
use crate::options::{Compute, KvChoice, LoadOptions, Precision, Synthetic};
use crate::weights::{Access, Input};

/// Loads a model from a GGUF file or a folder with `config.json`. `path` is NUL-terminated, in the system's encoding;
/// `options` may be NULL. On success `*out` is a handle for `metrale_free`. Blocks until the model is ready; the
/// progress callback can cancel. Any thread; several loads may run at once.
///
/// Statuses: `METRALE_NOT_FOUND`, `METRALE_IO`, `METRALE_NOT_A_MODEL`, `METRALE_CORRUPT_FILE`, `METRALE_UNSUPPORTED`,
/// `METRALE_MISMATCH`, `METRALE_OUT_OF_MEMORY`, `METRALE_CANCELLED`, `METRALE_UNKNOWN_OPTION`; with another device than the processor also
/// `METRALE_DEVICE_UNSUPPORTED` and `METRALE_DEVICE_LOST`. Calls on a model whose device is lost fail with the latter; handles are freed as ever.
///
/// A file that somebody else shortens while a model made from it lives ends the process with SIGBUS.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_load(
    path: *const c_char,
    options: *const metrale_load_options,
    out: *mut *mut metrale_model,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || load(options, out, || Input::path(pointer::path(path, "path")?, Access::Map)))
}

/// Loads what `input` gives, from wherever it comes.
pub(super) fn load(
    options: *const metrale_load_options,
    out: *mut *mut metrale_model,
    input: impl FnOnce() -> Result<Input>,
) -> Result<()> {
    let out = pointer::out(out, "out")?;
    let host = versioned::read(options)?;
    let options = load_options(&host)?;
    let mut reporter = reporter(host.progress, host.user);
    let progress = reporter.as_mut().map(|r| r as &mut dyn FnMut(Progress) -> ControlFlow<()>);
    let engine = engine::load_with(input()?, &options, pool_of(&host)?, progress)?;
    out.set(handle::insert(Arc::new(ModelObject::new(engine)))?);
    Ok(())
}

/// The threads of the runtime that the options name, if they name one.
pub(super) fn pool_of(host: &metrale_load_options) -> Result<Option<Pool>> {
    if host.runtime.is_null() {
        return Ok(None);
    }
    handle::get(host.runtime)?.workers.pool(host.threads as usize).map(Some)
}

/// The host's options as the engine's. The call becomes one of the runtime they name, so this comes before other handles.
pub(super) fn load_options(host: &metrale_load_options) -> Result<LoadOptions> {
    if !host.runtime.is_null() {
        handle::get(host.runtime)?;
    }
    let flags = METRALE_LOAD_LOW_PRIORITY | METRALE_LOAD_DETERMINISTIC | METRALE_LOAD_PACKED;
    pointer::flags(host.flags, flags, "metrale_load_options.flags")?;
    let compute = match host.compute {
        METRALE_COMPUTE_DEFAULT => None,
        METRALE_COMPUTE_FAST => Some(Compute::Fast),
        METRALE_COMPUTE_F32 => Some(Compute::F32),
        other => {
            let text = format!("metrale_load_options.compute is {other}; it must be one of METRALE_COMPUTE_*");
            return Err(Error::new(Kind::UnknownOption, text).named("compute"));
        }
    };
    let kv_type = match host.kv_type {
        METRALE_KV_DEFAULT => None,
        METRALE_KV_F32 => Some(KvChoice::F32),
        METRALE_KV_F16 => Some(KvChoice::F16),
        METRALE_KV_BF16 => Some(KvChoice::Bf16),
        METRALE_KV_Q8 => Some(KvChoice::Q8),
        other => {
            let text = format!("metrale_load_options.kv_type is {other}; it must be one of METRALE_KV_*");
            return Err(Error::new(Kind::UnknownOption, text).named("kv_type"));
        }
    };
    let synthetic = match host.synthetic.is_null() {
        true => None,
        false => {
            let name = pointer::string(host.synthetic, "metrale_load_options.synthetic")?.to_string_lossy();
            Some(Synthetic::parse(&name, host.synthetic_seed)?)
        }
    };
    let precision = match host.precision.is_null() {
        true => Precision::default(),
        false => Precision::parse(&pointer::string(host.precision, "metrale_load_options.precision")?.to_string_lossy())?,
    };
    Ok(LoadOptions {
        threads: host.threads as usize,
        context: pointer::size(host.context, "metrale_load_options.context")?,
        compute,
        kv_type,
        expert_bytes: (host.expert_bytes > 0).then_some(host.expert_bytes),
        late_bytes: (host.flags & METRALE_LOAD_PACKED != 0).then_some(u64::MAX),
        precision,
        memory: host.memory,
        prefix_bytes: host.prefix_bytes,
        device: host.device as usize,
        device_bytes: host.device_bytes,
        device_layers: usize::try_from(host.device_layers).unwrap_or(usize::MAX),
        host_experts: usize::try_from(host.host_experts).unwrap_or(usize::MAX),
        low_priority: host.flags & METRALE_LOAD_LOW_PRIORITY != 0,
        deterministic: host.flags & METRALE_LOAD_DETERMINISTIC != 0,
        synthetic,
    })
}

/// The host's callback as a closure; `None` when there is no callback.
pub(super) fn reporter(callback: metrale_progress_fn, user: *mut c_void) -> Option<impl FnMut(Progress) -> ControlFlow<()>> {
    let callback = callback?;
    Some(move |progress: Progress| {
        // Phases are short words; a fixed buffer gives them their NUL.
        let mut phase = [0u8; 32];
        let len = progress.phase.len().min(phase.len() - 1);
        phase[..len].copy_from_slice(&progress.phase.as_bytes()[..len]);
        // SAFETY: the host gave a function of this type; `phase` ends with a NUL and lives through the call.
        match unsafe { callback(user, progress.done_bytes, progress.total_bytes, phase.as_ptr().cast()) } {
            0 => ControlFlow::Continue(()),
            _ => ControlFlow::Break(()),
        }
    })
}
