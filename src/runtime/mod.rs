//! What a host lends a part of the library: an allocator, a limit of memory, a place for log records.
//!
//! A [`Runtime`] is entered by a thread for the length of a call ([`current`]); what is allocated meanwhile comes from it, is counted on
//! it, and goes back to it from whichever thread frees it. Outside of any runtime, and so in Rust programs, memory is the system's and
//! nobody counts. Model files that are mapped and stacks of threads are the system's in either case.
#![allow(unsafe_code)] // A global allocator, and memory from a host's functions.

mod allocator;
mod charge;
mod current;
mod log;
mod reserve;
mod thread;

pub use charge::{Charge, Class};
pub use current::{Call, Scope, adopt, current, enter, fallible, outside, ran_short, set_short, with_stack};
pub use log::{Level, Sink, note};
pub use thread::{Ended, Thread, is_ours};

use log::Log;
use std::alloc::{GlobalAlloc, Layout, System};
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicUsize, Ordering, fence};

/// Whether memory comes through the allocator of this module.
pub const ALLOCATES: bool = cfg!(feature = "reserve");

/// A host's allocator. Both are called on any thread, also at once, and do not unwind.
#[derive(Clone, Copy)]
pub struct Hooks {
    /// `size` bytes at a multiple of `align`, or NULL.
    pub alloc: unsafe extern "C" fn(user: *mut c_void, size: usize, align: usize) -> *mut c_void,
    /// Takes back what `alloc` gave for this size and alignment.
    pub free: unsafe extern "C" fn(user: *mut c_void, pointer: *mut c_void, size: usize, align: usize),
    /// Handed to both.
    pub user: *mut c_void,
}

/// How to make a runtime.
#[derive(Clone, Copy, Default)]
pub struct Settings {
    /// The host's allocator; the system's without.
    pub hooks: Option<Hooks>,
    /// Most bytes that may be live; 0 for no limit.
    pub cap: u64,
}

/// Bytes of a runtime.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Taken from the allocator and not given back.
    pub live: u64,
    /// The most that were ever live.
    pub peak: u64,
    /// The limit; 0 for none.
    pub cap: u64,
    /// Of the live ones, packed weights.
    pub weights: u64,
    /// Of the live ones, pages of caches and recurrent states.
    pub cache: u64,
}

/// A counted reference. What is allocated counts as well, so a runtime lives as long as anything that came from it.
pub struct Runtime(NonNull<Inner>);

struct Inner {
    references: AtomicUsize,
    hooks: Option<Hooks>,
    cap: usize,
    live: AtomicUsize,
    peak: AtomicUsize,
    classes: [AtomicUsize; 2],
    log: Log,
}

// SAFETY: what changes in it is atomic or locked, and the host's functions take calls on any thread.
unsafe impl Send for Runtime {}
// SAFETY: as above.
unsafe impl Sync for Runtime {}

impl Runtime {
    /// A runtime, unless its allocator refuses even that.
    pub fn new(settings: &Settings) -> Option<Runtime> {
        let layout = Layout::new::<Inner>();
        let cap = match settings.cap {
            0 => usize::MAX,
            cap => usize::try_from(cap).unwrap_or(usize::MAX),
        };
        if layout.size() > cap {
            return None;
        }
        let place = NonNull::new(source_alloc(settings.hooks, layout).cast::<Inner>())?;
        let inner = Inner {
            references: AtomicUsize::new(1),
            hooks: settings.hooks,
            cap,
            live: AtomicUsize::new(layout.size()),
            peak: AtomicUsize::new(layout.size()),
            classes: Default::default(),
            log: Log::default(),
        };
        // SAFETY: the place is as large and aligned as asked, and nobody else knows it.
        unsafe { place.write(inner) };
        Some(Runtime(place))
    }

    fn inner(&self) -> &Inner {
        // SAFETY: this reference is counted.
        unsafe { self.0.as_ref() }
    }

    /// What is live now.
    pub fn usage(&self) -> Usage {
        let inner = self.inner();
        let read = |n: &AtomicUsize| n.load(Ordering::Relaxed) as u64;
        Usage {
            live: read(&inner.live),
            peak: read(&inner.peak),
            cap: if inner.cap == usize::MAX { 0 } else { inner.cap as u64 },
            weights: read(&inner.classes[Class::Weights as usize]),
            cache: read(&inner.classes[Class::Cache as usize]),
        }
    }

    /// Where records go from now on.
    pub fn log_to(&self, sink: Option<Sink>) {
        self.inner().log.set(sink);
    }
}

impl Clone for Runtime {
    fn clone(&self) -> Runtime {
        self.inner().references.fetch_add(1, Ordering::Relaxed);
        Runtime(self.0)
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        // SAFETY: this reference was counted, and is given up here.
        unsafe { Inner::release(self.0.as_ptr()) };
    }
}

impl PartialEq for Runtime {
    fn eq(&self, other: &Runtime) -> bool {
        self.0 == other.0
    }
}

impl Inner {
    /// Gives up one reference; the last one frees the runtime.
    ///
    /// # Safety
    /// `this` holds a reference that the caller gives up.
    unsafe fn release(this: *mut Inner) {
        // SAFETY: the reference keeps it alive until it is counted off.
        let hooks = unsafe {
            if (*this).references.fetch_sub(1, Ordering::Release) != 1 {
                return;
            }
            fence(Ordering::Acquire);
            let hooks = (*this).hooks;
            this.drop_in_place();
            hooks
        };
        // SAFETY: `new` got it for this layout from these hooks, and nobody is left who knows it.
        unsafe { source_free(hooks, this.cast(), Layout::new::<Inner>()) };
    }

    /// Counts `size` more bytes as live, unless the limit forbids it.
    fn charge(&self, size: usize) -> bool {
        let before = self.live.fetch_add(size, Ordering::Relaxed);
        match before.checked_add(size) {
            Some(live) if live <= self.cap => {
                if self.peak.load(Ordering::Relaxed) < live {
                    self.peak.fetch_max(live, Ordering::Relaxed);
                }
                true
            }
            _ => {
                self.live.fetch_sub(size, Ordering::Relaxed);
                false
            }
        }
    }

    /// Memory from the allocator, counted, or NULL. What is given holds a reference.
    fn alloc(&self, layout: Layout) -> *mut u8 {
        if !self.charge(layout.size()) {
            return std::ptr::null_mut();
        }
        let place = source_alloc(self.hooks, layout);
        if place.is_null() {
            self.live.fetch_sub(layout.size(), Ordering::Relaxed);
        } else {
            self.references.fetch_add(1, Ordering::Relaxed);
        }
        place
    }

    /// Takes back what `alloc` gave.
    ///
    /// # Safety
    /// `place` came from `alloc` of `this` with this layout, and goes back once.
    unsafe fn free(this: *mut Inner, place: *mut u8, layout: Layout) {
        // SAFETY: the piece holds a reference until the last line.
        unsafe {
            source_free((*this).hooks, place, layout);
            (*this).live.fetch_sub(layout.size(), Ordering::Relaxed);
            Inner::release(this);
        }
    }
}

/// Memory from the host's functions, or from the system. The size is not 0.
fn source_alloc(hooks: Option<Hooks>, layout: Layout) -> *mut u8 {
    let Some(hooks) = hooks else {
        // SAFETY: the size is not 0.
        return unsafe { System.alloc(layout) };
    };
    // SAFETY: the host gave functions of this type that may be called at any time.
    let place = unsafe { (hooks.alloc)(hooks.user, layout.size(), layout.align()) }.cast::<u8>();
    if place.addr().is_multiple_of(layout.align()) {
        return place;
    }
    // SAFETY: it was given for this size and alignment just now; what is not aligned is of no use.
    unsafe { (hooks.free)(hooks.user, place.cast(), layout.size(), layout.align()) };
    std::ptr::null_mut()
}

/// Gives memory back.
///
/// # Safety
/// `source_alloc` gave it for these hooks and this layout, and nobody uses it any more.
unsafe fn source_free(hooks: Option<Hooks>, place: *mut u8, layout: Layout) {
    match hooks {
        // SAFETY: the caller's promise.
        Some(hooks) => unsafe { (hooks.free)(hooks.user, place.cast(), layout.size(), layout.align()) },
        // SAFETY: as above.
        None => unsafe { System.dealloc(place, layout) },
    }
}

#[cfg(test)]
mod tests;
