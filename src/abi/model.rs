//! Models: sharing, freeing, facts.

use std::ffi::{CString, c_char};
use std::sync::{Arc, OnceLock};

use serde_json::Value;

use super::c_string;
use super::guard::{guard, guard_status, guard_value};
use super::handle;
use super::pointer;
use super::status::metrale_status;
use super::types::{metrale_error, metrale_model};
use crate::engine::Engine;
use crate::error::{Error, Kind, Result};

/// A loaded model. The handles of one model share it, and so do its sequences and text streams.
pub(super) struct ModelObject {
    engine: Arc<Engine>,
    /// The facts as JSON, made when first asked for.
    facts: OnceLock<Facts>,
}

struct Facts {
    tree: Value,
    text: CString,
}

impl ModelObject {
    pub(super) fn new(engine: Arc<Engine>) -> ModelObject {
        ModelObject { engine, facts: OnceLock::new() }
    }

    pub(super) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    fn facts(&self) -> Result<&Facts> {
        if let Some(facts) = self.facts.get() {
            return Ok(facts);
        }
        let tree = serde_json::to_value(self.engine.info()).map_err(|e| Error::new(Kind::Internal, format!("model facts: {e}")))?;
        let text = c_string(&tree.to_string());
        Ok(self.facts.get_or_init(|| Facts { tree, text }))
    }

    /// One fact: a name of the top level, else a key of the file's own metadata.
    fn fact(&self, key: &str) -> Result<String> {
        let tree = &self.facts()?.tree;
        let value = tree.get(key).or_else(|| tree.get("metadata")?.get(key));
        match value {
            Some(Value::String(text)) => Ok(text.clone()),
            Some(other) => Ok(other.to_string()),
            None => Err(Error::new(Kind::NotFound, format!("the model has no fact called {key:?}")).named(key)),
        }
    }
}

/// Gives up a handle of a model. The memory goes once the model's other handles, sequences, text streams and running
/// calls are gone too. NULL and handles that are none (freed before, for example) are ignored. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_free(model: *mut metrale_model) {
    guard_value((), || handle::remove(model).map(drop))
}

/// Makes another handle of the same model, for another owner; each is freed once. Any thread.
///
/// Statuses: `METRALE_INVALID_HANDLE`, `METRALE_OUT_OF_MEMORY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_model_retain(
    model: *const metrale_model,
    out: *mut *mut metrale_model,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || {
        let out = pointer::out(out, "out")?;
        let model = handle::get(model)?;
        out.set(handle::insert(model)?);
        Ok(())
    })
}

/// What the model is, as a JSON object: `model_type`, `architecture`, `parameters`, `layers`, `hidden`, `vocab`,
/// `context`, `compute`, `threads`, `bos`, `end_tokens` and more. `*out_json` is NUL-terminated; `out_len`, which may
/// be NULL, gets its length without the NUL. The text lives until this handle is freed. Any thread.
///
/// Statuses: only `METRALE_INVALID_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_model_info(
    model: *const metrale_model,
    out_json: *mut *const c_char,
    out_len: *mut usize,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || {
        let out = pointer::out(out_json, "out_json")?;
        let len = if out_len.is_null() { None } else { Some(pointer::out(out_len, "out_len")?) };
        let model = handle::get(model)?;
        let text = &model.facts()?.text;
        out.set(text.as_ptr());
        if let Some(len) = len {
            len.set(text.as_bytes().len());
        }
        Ok(())
    })
}

/// One fact of the model by its name in `metrale_model_info`, or one value of the file's own metadata by its key:
/// text as it is, everything else as JSON. `key` is NUL-terminated UTF-8. The value, without a NUL, goes to `out` and
/// its length to `*out_len`; when `capacity` is too small, only `*out_len` is written and the status is
/// `METRALE_MORE`. `METRALE_NOT_FOUND` for an unknown key. Any thread.
///
/// Statuses: `METRALE_MORE`, `METRALE_NOT_FOUND`, `METRALE_INVALID_ARGUMENT`, `METRALE_OUT_OF_MEMORY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_model_meta(
    model: *const metrale_model,
    key: *const c_char,
    out: *mut u8,
    capacity: usize,
    out_len: *mut usize,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard_status(err, || {
        let len = pointer::out(out_len, "out_len")?;
        let model = handle::get(model)?;
        let key = pointer::string(key, "key")?;
        let key = pointer::utf8(key.as_ptr().cast(), key.count_bytes(), "key")?;
        pointer::sized(model.fact(key)?.as_bytes(), out, capacity, len)
    })
}

/// What tells this model from others, as 32 hexadecimal digits without a NUL: of its shapes, of how it computes (`compute`) and of rows of
/// each weight, so that models with the same fingerprint can take up each other's saved sequences. It does not protect against
/// somebody who makes two models agree on purpose. The digits go to `out` and their number to `*out_len`; when `capacity` is
/// too small, only `*out_len` is written and the status is `METRALE_MORE`. The first call looks at the weights, later ones do
/// not. Any thread.
///
/// Statuses: `METRALE_MORE`, `METRALE_OUT_OF_MEMORY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_model_fingerprint(
    model: *const metrale_model,
    out: *mut u8,
    capacity: usize,
    out_len: *mut usize,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard_status(err, || {
        let len = pointer::out(out_len, "out_len")?;
        let fingerprint = handle::get(model)?.engine().fingerprint()?;
        pointer::sized(fingerprint.to_string().as_bytes(), out, capacity, len)
    })
}
