//! The wall between C and Rust: every exported body runs behind it.
//!
//! A body returns a `Result`; the wall turns it into a status and an error object, and turns a panic into
//! `METRALE_INTERNAL` instead of letting it reach the host. A panic is a defect; its text is in the error, not on stderr
//! (see `quiet`).

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use super::error::ErrorObject;
use super::handle;
use super::quiet::Inside;
use super::status::{self, METRALE_OK, metrale_status};
use super::types::metrale_error;
use crate::error::{Error, Kind, Result};
use crate::runtime::{self, Level};

/// Runs `body`; its error, or panic, goes to `*err` unless `err` is NULL.
pub(super) fn guard(err: *mut *mut metrale_error, body: impl FnOnce() -> Result<()>) -> metrale_status {
    guard_status(err, || body().map(|()| METRALE_OK))
}

/// As `guard`, for bodies that succeed in more than one way.
pub(super) fn guard_status(err: *mut *mut metrale_error, body: impl FnOnce() -> Result<metrale_status>) -> metrale_status {
    let _inside = Inside::enter();
    let _call = runtime::Call::begin();
    // AssertUnwindSafe: what a panic may leave half-changed sits behind locks, which remember it.
    let error = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(status)) => return status,
        Ok(Err(error)) => error,
        Err(payload) => panicked(payload),
    };
    // Errors out of dependencies and defects that a lack of memory brought to light are a lack of memory.
    let hidden = matches!(error.kind(), Kind::Internal | Kind::Io) && runtime::ran_short();
    let error = if hidden { Error::new(Kind::OutOfMemory, format!("memory ran out: {}", error.message())) } else { error };
    let code = status::of(error.kind());
    runtime::note(Level::Error, code, || error.message());
    if !err.is_null() {
        let object = catch_unwind(|| handle::insert::<metrale_error>(Arc::new(ErrorObject::new(error))));
        let handle = object.unwrap_or_else(|payload| Err(panicked(payload))).unwrap_or(std::ptr::null_mut());
        // SAFETY: the caller passes NULL or a place for one pointer; unaligned, because C code may have packed it.
        unsafe { err.write_unaligned(handle) };
    }
    code
}

/// For functions without a status: `fallback` takes the place of a result that could not be had.
pub(super) fn guard_value<T>(fallback: T, body: impl FnOnce() -> Option<T>) -> T {
    let _inside = Inside::enter();
    let _call = runtime::Call::begin();
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(value) => value.unwrap_or(fallback),
        Err(payload) => {
            let _ = panicked(payload);
            fallback
        }
    }
}

/// What a panic said, as an error.
fn panicked(payload: Box<dyn Any + Send>) -> Error {
    let text = match (payload.downcast_ref::<&str>(), payload.downcast_ref::<String>()) {
        (Some(text), _) => (*text).to_owned(),
        (_, Some(text)) => text.clone(),
        _ => "no text".to_owned(),
    };
    // A payload may panic again while it is dropped.
    if let Err(second) = catch_unwind(AssertUnwindSafe(|| drop(payload))) {
        std::mem::forget(second);
    }
    Error::new(Kind::Internal, format!("a defect of this library: {text}"))
}

#[cfg(test)]
mod tests {
    use super::super::status::{METRALE_INTERNAL, METRALE_NOT_FOUND};
    use super::*;

    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("again");
        }
    }

    #[test]
    fn results_and_panics_become_statuses() {
        let mut err = std::ptr::null_mut();
        assert_eq!(guard(&mut err, || Ok(())), METRALE_OK);
        assert!(err.is_null());
        assert_eq!(guard(&mut err, || Err(Error::new(Kind::NotFound, "no"))), METRALE_NOT_FOUND);
        assert_eq!(handle::remove(err).unwrap().error().message(), "no");
        assert_eq!(guard(&mut err, || panic!("number {}", 7)), METRALE_INTERNAL);
        assert_eq!(handle::remove(err).unwrap().error().message(), "a defect of this library: number 7");
        assert_eq!(guard(std::ptr::null_mut(), || std::panic::panic_any(Bomb)), METRALE_INTERNAL);
        assert_eq!(guard_value(3, || panic!("x")), 3);
        assert_eq!(guard_value(3, || None), 3);
        assert_eq!(guard_value(3, || Some(4)), 4);
    }
}
