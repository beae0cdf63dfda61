//! Threads made without the standard library, whose own end the process when memory for their records is refused.
//!
//! A thread is named, has a stack of known size, and is joined. A panic in it goes to whoever joins, in silence.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

thread_local! {
    static OURS: Cell<bool> = const { Cell::new(false) };
}

/// Whether the library made this thread.
pub fn is_ours() -> bool {
    OURS.get()
}

/// What a thread ran to, or its panic.
pub type Ended<T> = Result<T, Box<dyn Any + Send>>;

/// A closure on its way to a thread, and its result on its way back.
struct Errand<T, F> {
    work: Option<F>,
    ended: Option<Ended<T>>,
}

impl<T, F: FnOnce() -> T> Errand<T, F> {
    fn run(&mut self) {
        OURS.set(true);
        if let Some(work) = self.work.take() {
            self.ended = Some(catch_unwind(AssertUnwindSafe(work)));
        }
    }
}

/// Runs `work` on a fresh stack of `bytes` bytes, and waits. `None`: no such thread could be made.
#[cfg(unix)]
pub fn run_on_stack<T: Send, F: FnOnce() -> T + Send>(name: &str, bytes: usize, work: F) -> Option<Ended<T>> {
    extern "C" fn start<T, F: FnOnce() -> T>(errand: *mut libc::c_void) -> *mut libc::c_void {
        // SAFETY: the caller waits in `join`, so its errand lives, and it does not look at it meanwhile.
        unsafe { &mut *errand.cast::<Errand<T, F>>() }.run();
        std::ptr::null_mut()
    }
    let mut errand = Errand { work: Some(work), ended: None };
    let thread = create(name, bytes, start::<T, F>, (&raw mut errand).cast())?;
    join(thread);
    errand.ended
}

/// As the other, where threads are the standard library's.
#[cfg(not(unix))]
pub fn run_on_stack<T: Send, F: FnOnce() -> T + Send>(name: &str, bytes: usize, work: F) -> Option<Ended<T>> {
    let mut errand = Errand { work: Some(work), ended: None };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name(name.into()).stack_size(bytes).spawn_scoped(scope, || errand.run());
        thread.ok().map(|thread| drop(thread.join()))
    })?;
    errand.ended
}

/// A thread that lives until it is joined.
pub struct Thread {
    #[cfg(unix)]
    id: libc::pthread_t,
    #[cfg(not(unix))]
    handle: std::thread::JoinHandle<()>,
}

impl Thread {
    /// Starts `work`, which does not panic, on a stack of `bytes` bytes. `None`: no such thread could be made.
    pub fn start<F: FnOnce() + Send + 'static>(name: &str, bytes: usize, work: F) -> Option<Thread> {
        let errand = Box::new(Errand::<(), F> { work: Some(work), ended: None });
        #[cfg(unix)]
        {
            extern "C" fn start<F: FnOnce()>(errand: *mut libc::c_void) -> *mut libc::c_void {
                // SAFETY: `Box::into_raw` below made it, for this thread alone.
                unsafe { Box::from_raw(errand.cast::<Errand<(), F>>()) }.run();
                std::ptr::null_mut()
            }
            let errand = Box::into_raw(errand);
            match create(name, bytes, start::<F>, errand.cast()) {
                Some(id) => Some(Thread { id }),
                None => {
                    // SAFETY: no thread was made that could have it.
                    drop(unsafe { Box::from_raw(errand) });
                    None
                }
            }
        }
        #[cfg(not(unix))]
        {
            let mut errand = errand;
            let handle = std::thread::Builder::new().name(name.into()).stack_size(bytes).spawn(move || errand.run()).ok()?;
            Some(Thread { handle })
        }
    }

    /// Waits for its end.
    pub fn join(self) {
        #[cfg(unix)]
        join(self.id);
        #[cfg(not(unix))]
        drop(self.handle.join());
    }
}

#[cfg(unix)]
type Start = extern "C" fn(*mut libc::c_void) -> *mut libc::c_void;

#[cfg(unix)]
fn create(name: &str, bytes: usize, start: Start, argument: *mut libc::c_void) -> Option<libc::pthread_t> {
    const PAGE: usize = 4096;
    let _masked = SignalMask::block();
    let bytes = bytes.max(16 * PAGE).checked_next_multiple_of(PAGE)?;
    let mut attributes = std::mem::MaybeUninit::<libc::pthread_attr_t>::uninit();
    let mut id = std::mem::MaybeUninit::<libc::pthread_t>::uninit();
    // SAFETY: attributes are initialised before use and destroyed after; `id` is written when the result is 0. The callers answer for
    // `start` and `argument`.
    unsafe {
        if libc::pthread_attr_init(attributes.as_mut_ptr()) != 0 {
            return None;
        }
        let made = libc::pthread_attr_setstacksize(attributes.as_mut_ptr(), bytes) == 0
            && libc::pthread_create(id.as_mut_ptr(), attributes.as_ptr(), start, argument) == 0;
        libc::pthread_attr_destroy(attributes.as_mut_ptr());
        if !made {
            return None;
        }
        let id = id.assume_init();
        #[cfg(target_os = "linux")]
        {
            // Names are at most 15 bytes and a NUL there. Only for those who look; it may fail.
            let mut text = [0u8; 16];
            let len = name.len().min(15);
            text[..len].copy_from_slice(&name.as_bytes()[..len]);
            libc::pthread_setname_np(id, text.as_ptr().cast());
        }
        #[cfg(not(target_os = "linux"))]
        let _ = name;
        Some(id)
    }
}

#[cfg(unix)]
fn join(thread: libc::pthread_t) {
    // SAFETY: `create` made it, and it is joined once.
    unsafe { libc::pthread_join(thread, std::ptr::null_mut()) };
}

/// All signals but those of faults are blocked on this thread until the mask is dropped. Threads made meanwhile inherit that, so a
/// signal meant for the host never lands on one of ours.
#[cfg(unix)]
struct SignalMask(Option<libc::sigset_t>);

#[cfg(unix)]
impl SignalMask {
    fn block() -> SignalMask {
        // SAFETY: `sigset_t` is plain memory that sigfillset initialises; the calls only read and write the two sets given.
        unsafe {
            let (mut all, mut saved) = (std::mem::zeroed::<libc::sigset_t>(), std::mem::zeroed::<libc::sigset_t>());
            libc::sigfillset(&mut all);
            for fault in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGABRT, libc::SIGSYS] {
                libc::sigdelset(&mut all, fault);
            }
            SignalMask((libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut saved) == 0).then_some(saved))
        }
    }
}

#[cfg(unix)]
impl Drop for SignalMask {
    fn drop(&mut self) {
        if let Some(saved) = &self.0 {
            // SAFETY: the set was filled by pthread_sigmask on this thread.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, saved, std::ptr::null_mut()) };
        }
    }
}
