//! Silence: a panic that the wall catches must not print through Rust's default hook.
//!
//! The hook belongs to the standard library inside `libmetrale.so`, so a C host has no other. Where the crate is linked into a Rust program
//! and somebody calls the C functions, panics outside of them still go to the program's own hook.

use std::cell::Cell;
use std::panic;
use std::sync::Once;

thread_local! {
    static DEPTH: Cell<u32> = const { Cell::new(0) };
}

/// Marks this thread as inside the library until dropped.
pub(super) struct Inside;

impl Inside {
    pub(super) fn enter() -> Inside {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let before = panic::take_hook();
            panic::set_hook(Box::new(move |info| {
                if !ours() {
                    before(info);
                }
            }));
        });
        let _ = DEPTH.try_with(|d| d.set(d.get() + 1));
        Inside
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        let _ = DEPTH.try_with(|d| d.set(d.get() - 1));
    }
}

/// Whether this thread is inside an exported function, or one of our own.
fn ours() -> bool {
    let inside = DEPTH.try_with(|d| d.get() > 0).unwrap_or(true);
    inside || crate::runtime::is_ours()
}
