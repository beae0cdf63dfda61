//! Log records: whole texts, handed to the host's function on the thread that has something to say. Without one nothing is made.

use super::current;
use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, PoisonError};

/// How much a record matters; a sink takes its own level and those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub enum Level {
    /// A call failed.
    Error = 1,
    /// Something works less well than it should.
    Warning,
    /// What is being done.
    Info,
    /// For the library's own developers.
    Debug,
}

/// A host's function and what it wants to hear.
#[derive(Clone, Copy)]
pub struct Sink {
    /// Gets the record: level, status (0 unless a call failed), `len` bytes of text.
    pub write: unsafe extern "C" fn(user: *mut c_void, level: u32, status: i32, text: *const u8, len: usize),
    /// Handed to it.
    pub user: *mut c_void,
    /// The last level it gets.
    pub level: Level,
}

// SAFETY: `user` is never followed here; the host's function takes calls on any thread.
unsafe impl Send for Sink {}

/// Where a runtime's records go.
#[derive(Default)]
pub(super) struct Log {
    /// The last level that goes anywhere; 0 for none.
    level: AtomicU32,
    sink: Mutex<Option<Sink>>,
}

thread_local! {
    /// Set inside the host's function: what it makes the library say is not for it.
    static WRITING: Cell<bool> = const { Cell::new(false) };
}

impl Log {
    pub(super) fn set(&self, sink: Option<Sink>) {
        let mut place = self.sink.lock().unwrap_or_else(PoisonError::into_inner);
        *place = sink;
        self.level.store(sink.map_or(0, |s| s.level as u32), Ordering::Relaxed);
    }
}

/// A record for the current runtime's host, if that wants it; `text` is made only then. `status` is 0 unless a call failed.
pub fn note<T: AsRef<str>>(level: Level, status: i32, text: impl FnOnce() -> T) {
    let Some(runtime) = current::current() else { return };
    let log = &runtime.inner().log;
    if (level as u32) > log.level.load(Ordering::Relaxed) || WRITING.get() {
        return;
    }
    // The lock is not held during the call, so that the host's function may change the sink.
    let sink = *log.sink.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(sink) = sink {
        let text = text();
        let text = text.as_ref();
        WRITING.set(true);
        // SAFETY: the host gave a function of this type, which does not unwind; the text lives through the call.
        unsafe { (sink.write)(sink.user, level as u32, status, text.as_ptr(), text.len()) };
        WRITING.set(false);
    }
}
