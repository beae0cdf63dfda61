//! Runs a closure on a thread with a stack of known size.
//!
//! Parsers and template engines recurse, and the calling thread may have a stack of 64 KiB. Their depth is limited
//! elsewhere; here is the room that those limits assume. The caller waits, so nothing outlives the call, and a panic in
//! the closure comes back as an error.

use super::turns::Job;
use crate::bail;
use crate::error::{Error, Kind, Result, ensure_memory};
use crate::runtime::{self, Ended, Thread};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

/// Enough for loading: JSON is at most 128 deep, regular expressions at most 250.
pub(super) const LOAD_STACK: usize = 8 << 20;

/// Enough for work that takes such a stack where it needs one.
const BESIDE_STACK: usize = 1 << 20;

/// Runs `work` on a fresh stack of `bytes` bytes, in the caller's runtime and for its job. Pages that are not touched cost nothing. When memory ran
/// short, what was made is given up.
pub(crate) fn run<T: Send>(bytes: usize, what: &str, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let job = Job::current();
    let work = move || {
        let _job = job.enter();
        work()
    };
    match runtime::with_stack("metrale-text", bytes, work) {
        Some(Ok(result)) => {
            let result = result?;
            ensure_memory(what)?;
            Ok(result)
        }
        Some(Err(payload)) => bail!(Internal, "{what}: {}", panic_text(payload.as_ref())),
        None => Err(Error::new(Kind::OutOfMemory, format!("{what}: no thread with a stack of {bytes} bytes could be started"))
            .sizes(bytes as u64, 0)),
    }
}

/// Work that another thread does meanwhile, in the runtime of whoever started it. Dropping waits for it.
pub(crate) struct Beside<T> {
    thread: Option<Thread>,
    ended: Arc<Mutex<Option<Ended<(T, bool)>>>>,
}

impl<T: Send + 'static> Beside<T> {
    /// Starts `work`.
    pub(crate) fn start(what: &str, work: impl FnOnce() -> T + Send + 'static) -> Result<Beside<T>> {
        let (runtime, ended) = (runtime::current(), Arc::new(Mutex::new(None)));
        let place = Arc::clone(&ended);
        let work = move || {
            let _scope = runtime::enter(runtime);
            (work(), runtime::ran_short())
        };
        let thread = Thread::start("metrale-load", BESIDE_STACK, move || {
            let ended = catch_unwind(AssertUnwindSafe(work));
            *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(ended);
        });
        match thread {
            Some(thread) => Ok(Beside { thread: Some(thread), ended }),
            None => bail!(OutOfMemory, "{what}: no thread with a stack of {BESIDE_STACK} bytes could be started"),
        }
    }

    /// What it made.
    pub(crate) fn join(mut self, what: &str) -> Result<T> {
        self.wait();
        match self.ended.lock().unwrap_or_else(PoisonError::into_inner).take() {
            Some(Ok((made, short))) => {
                runtime::set_short(short || runtime::ran_short());
                Ok(made)
            }
            Some(Err(payload)) => bail!(Internal, "{what}: {}", panic_text(payload.as_ref())),
            None => bail!(Internal, "{what}: ended without a result"),
        }
    }
}

impl<T> Beside<T> {
    fn wait(&mut self) {
        if let Some(thread) = self.thread.take() {
            thread.join();
        }
    }
}

impl<T> Drop for Beside<T> {
    fn drop(&mut self) {
        self.wait();
    }
}

/// Runs `work` here and turns a panic into an error. For short work in a dependency that should not panic.
pub(crate) fn caught<T>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(result) => result,
        Err(payload) => bail!(Internal, "{what}: {}", panic_text(payload.as_ref())),
    }
}

fn panic_text(payload: &(dyn std::any::Any + Send)) -> &str {
    match payload.downcast_ref::<String>() {
        Some(text) => text,
        None => payload.downcast_ref::<&str>().copied().unwrap_or("panic without a text"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn depth(n: u32) -> u32 {
        let pad = std::hint::black_box([n; 64]);
        if n == 0 { 0 } else { 1 + depth(n - 1) + (pad[1] - n) }
    }

    #[test]
    fn gives_room_that_the_caller_lacks() {
        let caller = std::thread::Builder::new().stack_size(64 << 10);
        // 10,000 frames of at least 256 bytes do not fit into 64 KiB.
        let got = caller.spawn(|| run(LOAD_STACK, "test", || Ok(depth(10_000)))).unwrap().join().unwrap();
        assert_eq!(got.unwrap(), 10_000);
    }

    #[test]
    fn an_impossible_stack_is_an_error() {
        assert_eq!(run(isize::MAX as usize / 2, "test", || Ok(())).unwrap_err().kind(), Kind::OutOfMemory);
    }
}
