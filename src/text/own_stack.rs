//! Runs a closure on a thread with a stack of known size.
//!
//! Parsers and template engines recurse, and the calling thread may have a stack of 64 KiB. Their depth is limited
//! elsewhere; here is the room that those limits assume. The caller waits, so nothing outlives the call, and a panic in
//! the closure comes back as an error.

use crate::bail;
use crate::error::{Error, Kind, Result, ensure_memory};
use crate::runtime;

/// Enough for loading: JSON is at most 128 deep, regular expressions at most 250.
pub(super) const LOAD_STACK: usize = 8 << 20;

/// Runs `work` on a fresh stack of `bytes` bytes, in the caller's runtime. Pages that are not touched cost nothing. When memory ran
/// short, what was made is given up.
pub(crate) fn run<T: Send>(bytes: usize, what: &str, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let runtime = runtime::current();
    let work = move || {
        let _scope = runtime::enter(runtime);
        let result = work();
        (result, runtime::ran_short())
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("metrale-text".into()).stack_size(bytes).spawn_scoped(scope, work);
        let Ok(thread) = thread else {
            return Err(Error::new(Kind::OutOfMemory, format!("{what}: no thread with a stack of {bytes} bytes could be started"))
                .sizes(bytes as u64, 0));
        };
        match thread.join() {
            Ok((result, short)) => {
                runtime::set_short(short || runtime::ran_short());
                let result = result?;
                ensure_memory(what)?;
                Ok(result)
            }
            Err(payload) => bail!(Internal, "{what}: {}", panic_text(payload.as_ref())),
        }
    })
}

/// Runs `work` here and turns a panic into an error. For short work in a dependency that should not panic.
pub(crate) fn caught<T>(what: &str, work: impl FnOnce() -> Result<T>) -> Result<T> {
    match std::panic::catch_unwind(std::panic::AssertUnwindSafe(work)) {
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
