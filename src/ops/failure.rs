//! What went wrong inside a run. Operations return nothing and several threads are in them at once, so the first error is left
//! here; everybody then leaves the run, which returns it.

use crate::error::Error;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// The first error of a run, if there is one.
#[derive(Default)]
pub struct Failure {
    is_noted: AtomicBool,
    first: Mutex<Option<Error>>,
}

impl Failure {
    /// Notes an error; the first one stays.
    pub fn note(&self, error: Error) {
        self.first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        self.is_noted.store(true, Ordering::Release);
    }

    /// Whether an error was noted, so that what is computed now is of no use.
    pub fn is_noted(&self) -> bool {
        self.is_noted.load(Ordering::Relaxed)
    }

    /// The error, once the run is over.
    pub fn into_error(self) -> Option<Error> {
        self.first.into_inner().unwrap_or_else(PoisonError::into_inner)
    }
}
