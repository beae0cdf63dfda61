//! Error objects: everything a failed call knows, kept until the host has read it.

use std::ffi::{CString, c_char};
use std::sync::{Arc, OnceLock};

use serde_json::json;

use super::c_string;
use super::guard::guard_value;
use super::handle;
use super::status::{self, METRALE_INVALID_HANDLE, METRALE_OK, metrale_status};
use super::types::metrale_error;
use crate::error::Error;

/// An error with its texts as C strings.
pub(super) struct ErrorObject {
    error: Error,
    message: CString,
    name: Option<CString>,
    detail: OnceLock<CString>,
}

impl ErrorObject {
    pub(super) fn new(error: Error) -> ErrorObject {
        let message = c_string(error.message());
        let name = error.name().map(c_string);
        ErrorObject { error, message, name, detail: OnceLock::new() }
    }

    /// The error itself.
    #[cfg(test)]
    pub(super) fn error(&self) -> &Error {
        &self.error
    }

    fn detail(&self) -> &CString {
        self.detail.get_or_init(|| {
            let e = &self.error;
            let code = status::of(e.kind());
            c_string(
                &json!({
                    "code": code,
                    "status": status::name(code).to_string_lossy(),
                    "message": e.message(),
                    "name": e.name(),
                    "offset": e.offset(),
                    "wanted": e.wanted(),
                    "available": e.available(),
                    "retry": e.retry(),
                })
                .to_string(),
            )
        })
    }
}

/// A pointer into an object that its handle keeps alive.
fn borrow(err: *const metrale_error, text: impl FnOnce(&ErrorObject) -> Option<*const c_char>) -> Option<*const c_char> {
    let object: Arc<ErrorObject> = handle::get(err).ok()?;
    text(&object)
}

/// The status of the call that made the error. NULL is `METRALE_OK`, a handle that is none
/// `METRALE_INVALID_HANDLE`. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_error_code(err: *const metrale_error) -> metrale_status {
    if err.is_null() {
        return METRALE_OK;
    }
    guard_value(METRALE_INVALID_HANDLE, || Some(status::of(handle::get(err).ok()?.error.kind())))
}

/// What went wrong, what was expected and what helps, in English UTF-8. Never NULL: an empty string for NULL, a fixed
/// text for a handle that is none. The string lives until `metrale_error_free`. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_error_message(err: *const metrale_error) -> *const c_char {
    if err.is_null() {
        return c"".as_ptr();
    }
    guard_value(c"the error handle was freed or never existed".as_ptr(), || borrow(err, |e| Some(e.message.as_ptr())))
}

/// The whole error as one JSON object: `code`, `status`, `message`, `name`, `offset`, `wanted`, `available`, `retry`;
/// what does not apply is `null`. Never NULL: `{}` for NULL and for a handle that is none. The string lives until
/// `metrale_error_free`. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_error_detail(err: *const metrale_error) -> *const c_char {
    guard_value(c"{}".as_ptr(), || borrow(err, |e| Some(e.detail().as_ptr())))
}

/// The option, key, file or tensor that the error is about; NULL when there is none. The string lives until
/// `metrale_error_free`. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_error_name(err: *const metrale_error) -> *const c_char {
    guard_value(std::ptr::null(), || borrow(err, |e| e.name.as_ref().map(|n| n.as_ptr())))
}

/// Writes the byte offset in a file, or the index in an array, that the error is about, and returns true. Returns
/// false and writes nothing when there is none. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_error_offset(err: *const metrale_error, out: *mut u64) -> bool {
    number(err, out, Error::offset)
}

/// Writes how much was asked for, in the unit the message names, and returns true. Returns false and writes nothing
/// when the error is not about an amount. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_error_wanted(err: *const metrale_error, out: *mut u64) -> bool {
    number(err, out, Error::wanted)
}

/// Writes how much there is, in the unit the message names, and returns true. Returns false and writes nothing when
/// the error is not about an amount. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_error_available(err: *const metrale_error, out: *mut u64) -> bool {
    number(err, out, Error::available)
}

fn number(err: *const metrale_error, out: *mut u64, read: impl FnOnce(&Error) -> Option<u64>) -> bool {
    guard_value(false, || {
        let value = read(&handle::get(err).ok()?.error)?;
        super::pointer::out(out, "out").ok()?.set(value);
        Some(true)
    })
}

/// Whether the same call may succeed later without a change by the host (memory freed, another call finished). Any
/// thread.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_error_retry(err: *const metrale_error) -> bool {
    guard_value(false, || Some(handle::get(err).ok()?.error.retry()))
}

/// Frees an error and ends the life of its strings. NULL and handles that are none are ignored. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_error_free(err: *mut metrale_error) {
    guard_value((), || handle::remove(err).map(drop))
}
