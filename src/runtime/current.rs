//! Which runtime a thread is in, and how its call fares with memory.

use super::thread::{Ended, run_on_stack};
use super::{Inner, Runtime, reserve};
use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;

thread_local! {
    /// The runtime entered; it holds a reference. NULL outside of any.
    static CURRENT: Cell<*mut Inner> = const { Cell::new(std::ptr::null_mut()) };
    /// Whether the call has found its runtime.
    static ADOPTED: Cell<bool> = const { Cell::new(true) };
    /// Whether a refused allocation ends in an error and may be reported as refused.
    static FALLIBLE: Cell<bool> = const { Cell::new(false) };
    /// Whether the call was served from the reserve.
    static SHORT: Cell<bool> = const { Cell::new(false) };
}

/// The runtime this thread is in.
pub fn current() -> Option<Runtime> {
    let inner = NonNull::new(CURRENT.get())?;
    // SAFETY: `CURRENT` holds a reference.
    Some(Runtime::clone(unsafe { &*(&raw const inner).cast::<Runtime>() }))
}

/// As `current`, without counting: for use on this thread at once.
pub(super) fn current_inner() -> *mut Inner {
    CURRENT.get()
}

fn set_current(runtime: Option<Runtime>) -> *mut Inner {
    let inner = runtime.map_or(std::ptr::null_mut(), |r| ManuallyDrop::new(r).0.as_ptr());
    CURRENT.replace(inner)
}

fn put_back(before: *mut Inner) {
    // The reference goes after the thread has left the runtime.
    drop(NonNull::new(CURRENT.replace(before)).map(Runtime));
}

/// This thread is in a runtime until this is dropped.
pub struct Scope {
    before: *mut Inner,
}

/// Enters a runtime, or leaves all.
pub fn enter(runtime: Option<Runtime>) -> Scope {
    Scope { before: set_current(runtime) }
}

/// Leaves all runtimes: for what outlives them.
pub fn outside() -> Scope {
    enter(None)
}

impl Drop for Scope {
    fn drop(&mut self) {
        put_back(self.before);
    }
}

/// A call from outside, until dropped. It begins in no runtime, [`adopt`]s one, and knows whether memory ran short in it.
pub struct Call {
    before: *mut Inner,
    adopted: bool,
    short: bool,
    fallible: bool,
}

impl Call {
    /// Begins.
    pub fn begin() -> Call {
        reserve::prepare();
        Call { before: set_current(None), adopted: ADOPTED.replace(false), short: SHORT.replace(false), fallible: FALLIBLE.replace(false) }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        put_back(self.before);
        ADOPTED.set(self.adopted);
        SHORT.set(self.short);
        FALLIBLE.set(self.fallible);
    }
}

/// Makes `runtime` the present call's, unless it has one: the first object a call is about decides.
pub fn adopt(runtime: &Option<Runtime>) {
    if !ADOPTED.replace(true) {
        put_back(runtime.clone().map_or(std::ptr::null_mut(), |r| ManuallyDrop::new(r).0.as_ptr()));
    }
}

/// Whether memory was refused during this thread's call that could not be done without, and came from the reserve instead.
/// Long work then stops at the next place where it can.
pub fn ran_short() -> bool {
    SHORT.get()
}

/// Notes that memory ran short on a thread that works for this one; gives what the note was.
pub fn set_short(short: bool) -> bool {
    SHORT.replace(short)
}

/// Runs `work` on a fresh stack of `bytes` bytes, in this thread's runtime, and waits; memory that runs short there has run short here. `None`: no
/// such thread could be made.
pub fn with_stack<T: Send>(name: &str, bytes: usize, work: impl FnOnce() -> T + Send) -> Option<Ended<T>> {
    let runtime = current();
    let work = move || {
        let _scope = enter(runtime);
        let result = work();
        (result, ran_short())
    };
    let ended = run_on_stack(name, bytes, work)?;
    Some(ended.map(|(result, short)| {
        set_short(short || ran_short());
        result
    }))
}

/// Runs `f`, whose allocations may be refused: only for requests that report it.
pub fn fallible<T>(f: impl FnOnce() -> T) -> T {
    struct Before(bool);
    impl Drop for Before {
        fn drop(&mut self) {
            FALLIBLE.set(self.0);
        }
    }
    let _before = Before(FALLIBLE.replace(true));
    f()
}

pub(super) fn may_fail() -> bool {
    FALLIBLE.get()
}
