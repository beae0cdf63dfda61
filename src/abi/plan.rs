//! Looking before loading: what a file is, and how much memory it would take.

use std::ffi::c_char;

use super::guard::{guard, guard_status};
use super::handle;
use super::load::load_options;
use super::pointer;
use super::status::metrale_status;
use super::types::{metrale_error, metrale_load_options, metrale_memory_plan, metrale_source};
use super::versioned;
use crate::engine;
use crate::error::{Error, Kind, Result};

/// What a model file or folder holds, from its headers alone, as a JSON object: `format`, `model_type`, `parameters`,
/// `bytes`, `context`, `vocab`, `tensors` and more. The text, without a NUL, goes to `out` and its length to
/// `*out_len`; when `capacity` is too small, only `*out_len` is written and the status is `METRALE_MORE`. Any thread.
///
/// Statuses: as for `metrale_load`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_model_probe(
    path: *const c_char,
    out: *mut u8,
    capacity: usize,
    out_len: *mut usize,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard_status(err, || {
        let len = pointer::out(out_len, "out_len")?;
        told(&engine::probe(pointer::path(path, "path")?)?, out, capacity, len)
    })
}

/// As `metrale_model_probe`, of a source. Of what a host's function reads only the headers are asked for, a few megabytes,
/// by calls of this function and on its thread. Any thread.
///
/// Statuses: as for `metrale_load_source`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_source_probe(
    source: *const metrale_source,
    out: *mut u8,
    capacity: usize,
    out_len: *mut usize,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard_status(err, || {
        let len = pointer::out(out_len, "out_len")?;
        told(&engine::probe_from(handle::get(source)?.input())?, out, capacity, len)
    })
}

fn told(probe: &engine::Probe, out: *mut u8, capacity: usize, len: pointer::Out<usize>) -> Result<metrale_status> {
    let text = serde_json::to_string(probe).map_err(|e| Error::new(Kind::Internal, format!("probe: {e}")))?;
    pointer::sized(text.as_bytes(), out, capacity, len)
}

/// Bytes that loading this model with these options and making `sequences` sequences of its full context would take.
/// Reads headers, no weights. The plan is met within 5 % (and 1 MiB, which matters for models of toy size) and not
/// exceeded; mapped files, which the system can drop at any time, and grammars are not in it. `options` may be NULL; its callback is not used. `out->struct_size` must be set. Any
/// thread.
///
/// Statuses: as for `metrale_load`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_plan(
    path: *const c_char,
    options: *const metrale_load_options,
    sequences: usize,
    out: *mut metrale_memory_plan,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || {
        let out = versioned::out(out)?;
        let options = load_options(&versioned::read(options)?)?;
        out.set(&as_host(&engine::plan(pointer::path(path, "path")?, &options, sequences)?));
        Ok(())
    })
}

/// As `metrale_plan`, of a source: its read or copied bytes are among those planned. Any thread.
///
/// Statuses: as for `metrale_load_source`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_source_plan(
    source: *const metrale_source,
    options: *const metrale_load_options,
    sequences: usize,
    out: *mut metrale_memory_plan,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || {
        let out = versioned::out(out)?;
        let options = load_options(&versioned::read(options)?)?;
        out.set(&as_host(&engine::plan_from(handle::get(source)?.input(), &options, sequences)?));
        Ok(())
    })
}

fn as_host(plan: &engine::Plan) -> metrale_memory_plan {
    metrale_memory_plan {
        struct_size: size_of::<metrale_memory_plan>(),
        weights: plan.weights,
        kv: plan.kv,
        state: plan.state,
        scratch: plan.scratch,
        other: plan.other,
        total: plan.total(),
        source: plan.source,
        device_weights: plan.device.weights,
        device_kv: plan.device.kv,
        device_state: plan.device.state,
        device_scratch: plan.device.scratch,
        device_total: plan.device.total(),
        device_layers: plan.device.layers,
        host_experts: plan.device.host_experts,
    }
}
