//! The worker pool: every thread runs the same function once, with barriers between its parts.
//!
//! A whole program (hundreds of operations) runs inside one [`Pool::run`]; forking per operation would cost more than small operations
//! take. Workers spin for about 50 us after a run, since decode calls come back to back, and then sleep until the next. A panic in the
//! function becomes an `Internal` error: the barrier is poisoned, which lets the other threads out.
#![allow(unsafe_code)] // The function borrows from the caller's stack while other threads run it.

use super::barrier::{Barrier, Padded, Poisoned, wait_until};
use super::flush::FlushGuard;
use crate::error::{Error, Kind, Result};
use crate::{bail, ensure, runtime};
use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, TryLockError};
use std::thread::JoinHandle;

/// Threads that compute together: the caller of [`Pool::run`] and its workers.
pub struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// One run at a time; a second caller waits here.
    running: Mutex<()>,
}

/// What a thread inside [`Pool::run`] knows about itself.
pub struct Worker<'a> {
    index: usize,
    count: usize,
    barrier: &'a Barrier,
}

type Job = *const (dyn Fn(&Worker<'_>) + Sync);

struct Shared {
    /// Grows by one with each job; workers wait for the change.
    epoch: Padded<AtomicU32>,
    /// Workers that have not finished the present job.
    pending: Padded<AtomicUsize>,
    /// Written by the caller before `epoch` changes, read by workers after; null means stop.
    job: UnsafeCell<Option<Job>>,
    barrier: Barrier,
    count: usize,
    spins: u32,
    /// Some thread of the present job panicked; the first text wins.
    failed: AtomicBool,
    failure: Mutex<String>,
    /// Memory ran short on a worker during the present job.
    short: AtomicBool,
    /// Workers asleep (or about to be) on `wake`.
    sleepers: AtomicUsize,
    sleep: Mutex<()>,
    wake: Condvar,
}

// SAFETY: `job` is the only field that is not already Sync. The caller writes it while no worker reads (`pending` is zero), and publishes
// it through `epoch` (release/acquire).
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is used only while `run`, whose borrow it is, has not returned.
unsafe impl Send for Shared {}

/// Most threads a pool may have: far above any machine this runs on, far below what exhausts the system.
const MAX_THREADS: usize = 1024;
/// Workers call kernels with small frames; the largest scratch arrays are tens of kilobytes.
const STACK: usize = 1 << 20;
/// Spins before yielding: about 50 us, the time within which the next decode step usually begins.
const SPINS: u32 = 1_500;

thread_local! {
    /// Set while this thread runs a job: a second `run` from inside would wait for itself.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

impl Pool {
    /// A pool of `threads` threads, the caller counted; 0 and 1 make no thread at all.
    pub fn new(threads: usize) -> Result<Pool> {
        let count = threads.max(1);
        ensure!(count <= MAX_THREADS, TooLarge, "{threads} threads were asked for; at most {MAX_THREADS} are possible");
        // With more threads than processors a spinning thread keeps the one it waits for from running.
        let spins = if count > available_threads() { SPINS / 50 } else { SPINS };
        let shared = Arc::new(Shared {
            epoch: Padded::default(),
            pending: Padded::default(),
            job: UnsafeCell::new(None),
            barrier: Barrier::new(count, spins),
            count,
            spins,
            failed: AtomicBool::new(false),
            failure: Mutex::new(String::new()),
            short: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            sleep: Mutex::new(()),
            wake: Condvar::new(),
        });
        let mut pool = Pool { shared, workers: Vec::with_capacity(count - 1), running: Mutex::new(()) };
        // New threads inherit the mask, so a signal meant for the host never lands on a worker.
        let _masked = SignalMask::block();
        for index in 1..count {
            let shared = Arc::clone(&pool.shared);
            let runtime = runtime::current();
            let worker = std::thread::Builder::new()
                .name(format!("metrale-{index}"))
                .stack_size(STACK)
                .spawn(move || {
                    let _scope = runtime::enter(runtime);
                    work(&shared, index);
                })
                .map_err(|e| Error::new(Kind::OutOfMemory, format!("worker thread {index} of {count} could not be started: {e}")))?;
            pool.workers.push(worker);
        }
        Ok(pool)
    }

    /// Threads, the caller included.
    pub fn count(&self) -> usize {
        self.shared.count
    }

    /// Runs `f` once on every thread, the calling one as index 0, and returns when all are done. Subnormals are zero inside.
    ///
    /// A panic in `f` is an `Internal` error with its text. Calls from several threads take turns; a call from inside `f` is an error.
    pub fn run(&self, f: &(dyn Fn(&Worker<'_>) + Sync)) -> Result<()> {
        self.run_unless(&|| false, f).map(|_| ())
    }

    /// As [`Pool::run`], but where another call has the pool and `give_up` says so, returns false instead of waiting on.
    pub fn run_unless(&self, give_up: &dyn Fn() -> bool, f: &(dyn Fn(&Worker<'_>) + Sync)) -> Result<bool> {
        ensure!(!INSIDE.get(), Internal, "the worker pool was entered from inside one of its own jobs");
        let Some(_turn) = lock_unless(&self.running, give_up) else { return Ok(false) };
        let shared = &*self.shared;
        if shared.count > 1 {
            // SAFETY: only the lifetime changes. No worker touches the pointer after it has lowered `pending`, and this function does
            // not return, nor unwind (`perform` catches), before `pending` is zero.
            let job = unsafe { std::mem::transmute::<*const (dyn Fn(&Worker<'_>) + Sync + '_), Job>(f) };
            // SAFETY: `pending` is zero, so no worker reads the cell until the epoch changes.
            unsafe { *shared.job.get() = Some(job) };
            shared.pending.0.store(shared.count - 1, Ordering::Relaxed);
            shared.next_epoch();
        }
        shared.perform(0, f);
        if shared.count > 1 {
            wait_until(shared.spins, || shared.pending.0.load(Ordering::Acquire) == 0);
        }
        if shared.short.swap(false, Ordering::Relaxed) {
            runtime::set_short(true);
        }
        if shared.failed.load(Ordering::Relaxed) {
            shared.failed.store(false, Ordering::Relaxed);
            shared.barrier.reset();
            let text = std::mem::take(&mut *lock(&shared.failure));
            bail!(Internal, "a computation panicked: {text}");
        }
        Ok(true)
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: `&mut self` means that no run is in progress, so `pending` is zero and no worker reads the cell.
        unsafe { *self.shared.job.get() = None };
        self.shared.next_epoch();
        for worker in self.workers.drain(..) {
            // A worker catches every panic, so there is nothing to report.
            let _ = worker.join();
        }
    }
}

impl Worker<'_> {
    /// This thread's number, from 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// How many threads run the job.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Waits until every thread of the job has called this; what they wrote before is visible after.
    pub fn barrier(&self) {
        self.barrier.wait();
    }

    /// Calls `f` with pieces of `0..total`, each piece on one thread, `grain` at a time. `counter` is 0 at first and serves one loop.
    pub fn each(&self, counter: &AtomicUsize, total: usize, grain: usize, mut f: impl FnMut(Range<usize>)) {
        let grain = if self.count == 1 { total.max(1) } else { grain.max(1) };
        loop {
            // The first look keeps a counter from growing without end when idle threads come by again and again.
            if counter.load(Ordering::Relaxed) >= total {
                return;
            }
            let start = counter.fetch_add(grain, Ordering::Relaxed);
            if start >= total {
                return;
            }
            f(start..total.min(start.saturating_add(grain)));
        }
    }

    /// This thread's fixed share of `0..total` in whole multiples of `grain` (the last one cut short).
    pub fn share(&self, total: usize, grain: usize) -> Range<usize> {
        let grain = grain.max(1);
        let pieces = total.div_ceil(grain);
        let bound = |i: usize| (pieces / self.count * i + (pieces % self.count).min(i)).saturating_mul(grain).min(total);
        bound(self.index)..bound(self.index + 1)
    }
}

impl Shared {
    /// Publishes a change of `job` and wakes who sleeps.
    fn next_epoch(&self) {
        self.epoch.0.fetch_add(1, Ordering::SeqCst);
        // A worker counts itself among the sleepers before it looks at the epoch for the last time: either it is seen here, or it
        // sees the new epoch. The lock makes sure that it is really waiting when the notification comes.
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            let _asleep = lock(&self.sleep);
            self.wake.notify_all();
        }
    }

    /// Runs `f` as thread `index`; a panic is recorded and poisons the barrier.
    fn perform(&self, index: usize, f: &(dyn Fn(&Worker<'_>) + Sync)) {
        let worker = Worker { index, count: self.count, barrier: &self.barrier };
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let _flush = FlushGuard::new();
            let _inside = Inside::enter();
            f(&worker);
        }));
        if let Err(panic) = outcome {
            if !panic.is::<Poisoned>() && !self.failed.swap(true, Ordering::Relaxed) {
                *lock(&self.failure) = text_of(&*panic);
            }
            self.barrier.poison();
            // Dropping a payload may panic in turn; a leak is the lesser evil.
            std::mem::forget(panic);
        }
    }

    /// Waits for an epoch other than `seen`: spinning first, then asleep.
    fn await_epoch(&self, seen: u32) -> u32 {
        for _ in 0..self.spins {
            let now = self.epoch.0.load(Ordering::Acquire);
            if now != seen {
                return now;
            }
            std::hint::spin_loop();
        }
        let mut guard = lock(&self.sleep);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        let now = loop {
            let now = self.epoch.0.load(Ordering::SeqCst);
            if now != seen {
                break now;
            }
            guard = self.wake.wait(guard).unwrap_or_else(PoisonError::into_inner);
        };
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
        now
    }
}

/// A worker thread's life.
fn work(shared: &Shared, index: usize) {
    let mut seen = 0;
    loop {
        seen = shared.await_epoch(seen);
        // SAFETY: the epoch changed, so the caller has written the cell and leaves it alone until `pending` is zero.
        let Some(job) = (unsafe { *shared.job.get() }) else { return };
        // SAFETY: `run` keeps the function alive until `pending` is zero, and this thread lowers it after the last use.
        shared.perform(index, unsafe { &*job });
        if runtime::set_short(false) {
            shared.short.store(true, Ordering::Relaxed);
        }
        shared.pending.0.fetch_sub(1, Ordering::Release);
    }
}

/// Marks the thread as running a job until dropped.
struct Inside;

impl Inside {
    fn enter() -> Inside {
        INSIDE.set(true);
        Inside
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.set(false);
    }
}

/// Processors this process may use: its affinity mask, further limited by the quota of its control groups. At least 1.
pub fn available_threads() -> usize {
    // The standard library looks at sched_getaffinity and at cgroup v2 and v1 quotas.
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// Waits for a lock in short naps, until `give_up` says that it is too late.
pub(crate) fn lock_unless<'a, T>(mutex: &'a Mutex<T>, give_up: &dyn Fn() -> bool) -> Option<MutexGuard<'a, T>> {
    let mut rounds = 0;
    loop {
        match mutex.try_lock() {
            Ok(guard) => return Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => return Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) if give_up() => return None,
            // Short work is over within a few looks; for the rest the processor is better used by others.
            Err(TryLockError::WouldBlock) if rounds < 20 => std::thread::yield_now(),
            Err(TryLockError::WouldBlock) => std::thread::sleep(NAP),
        }
        rounds += 1;
    }
}

/// Between two looks at a lock.
const NAP: std::time::Duration = std::time::Duration::from_micros(40);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The data behind these locks is valid at every moment, so a panic elsewhere does not spoil it.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn text_of(panic: &(dyn Any + Send)) -> String {
    panic
        .downcast_ref::<&str>()
        .map(|s| (*s).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_else(|| "without a message".to_owned())
}

/// All signals but those of faults are blocked on this thread until the mask is dropped.
struct SignalMask {
    #[cfg(unix)]
    saved: Option<libc::sigset_t>,
}

impl SignalMask {
    fn block() -> SignalMask {
        #[cfg(unix)]
        {
            // SAFETY: `sigset_t` is plain memory that sigfillset initialises; the calls only read and write the two sets given.
            let saved = unsafe {
                let (mut all, mut saved) = (std::mem::zeroed::<libc::sigset_t>(), std::mem::zeroed::<libc::sigset_t>());
                libc::sigfillset(&mut all);
                for fault in [libc::SIGSEGV, libc::SIGBUS, libc::SIGFPE, libc::SIGILL, libc::SIGTRAP, libc::SIGABRT, libc::SIGSYS] {
                    libc::sigdelset(&mut all, fault);
                }
                (libc::pthread_sigmask(libc::SIG_SETMASK, &all, &mut saved) == 0).then_some(saved)
            };
            SignalMask { saved }
        }
        #[cfg(not(unix))]
        SignalMask {}
    }
}

impl Drop for SignalMask {
    fn drop(&mut self) {
        #[cfg(unix)]
        if let Some(saved) = &self.saved {
            // SAFETY: the set was filled by pthread_sigmask on this thread.
            unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, saved, std::ptr::null_mut()) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, Instant};

    fn add(counter: &AtomicUsize, n: usize) {
        counter.fetch_add(n, Ordering::Relaxed);
    }

    #[test]
    fn every_thread_runs_once_and_barriers_order_writes() {
        for threads in 0..=8 {
            let pool = Pool::new(threads).unwrap();
            let n = pool.count();
            assert_eq!(n, threads.max(1));
            let slots: Vec<AtomicUsize> = (0..n).map(|_| AtomicUsize::new(0)).collect();
            let bad = AtomicUsize::new(0);
            pool.run(&|w| {
                for round in 1..=200 {
                    slots[w.index()].store(round, Ordering::Relaxed);
                    w.barrier();
                    if slots.iter().any(|s| s.load(Ordering::Relaxed) != round) {
                        bad.fetch_add(1, Ordering::Relaxed);
                    }
                    w.barrier();
                }
            })
            .unwrap();
            assert_eq!(bad.into_inner(), 0);
            assert!(slots.iter().all(|s| s.load(Ordering::Relaxed) == 200));
        }
    }

    #[test]
    fn each_and_share_cover_everything_once() {
        for threads in [1, 2, 3, 5] {
            let pool = Pool::new(threads).unwrap();
            for (total, grain) in [(0, 1), (1, 1), (7, 3), (100, 7), (100, 1000), (64, 16), (5, 0)] {
                let hits: Vec<AtomicUsize> = (0..total).map(|_| AtomicUsize::new(0)).collect();
                let counter = AtomicUsize::new(0);
                pool.run(&|w| {
                    w.each(&counter, total, grain, |r| r.for_each(|i| add(&hits[i], 1)));
                    w.share(total, grain).for_each(|i| add(&hits[i], 10));
                })
                .unwrap();
                assert!(hits.iter().all(|h| h.load(Ordering::Relaxed) == 11), "{threads} threads, {total} by {grain}");
            }
        }
    }

    #[test]
    fn panics_are_errors_and_the_pool_lives_on() {
        let quiet = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        for threads in 1..=5 {
            let pool = Pool::new(threads).unwrap();
            for victim in 0..threads {
                for at in 0..3 {
                    let e = pool
                        .run(&|w| {
                            for round in 0..3 {
                                assert!(w.index() != victim || round != at, "victim {victim}");
                                w.barrier();
                            }
                        })
                        .unwrap_err();
                    assert_eq!(e.kind(), Kind::Internal);
                    assert!(e.message().contains(&format!("victim {victim}")), "{e}");
                    let sum = AtomicUsize::new(0);
                    pool.run(&|w| {
                        w.barrier();
                        sum.fetch_add(1, Ordering::Relaxed);
                        w.barrier();
                    })
                    .unwrap();
                    assert_eq!(sum.into_inner(), threads);
                }
            }
            let everybody = pool.run(&|_| panic!("all"));
            assert_eq!(everybody.unwrap_err().message(), "a computation panicked: all");
            // A destructor that panics while its thread unwinds would abort; a caught panic inside a job is the job's own affair.
            pool.run(&|w| {
                assert!(catch_unwind(|| panic!("inner")).is_err());
                w.barrier();
            })
            .unwrap();
        }
        std::panic::set_hook(quiet);
    }

    #[test]
    fn a_run_inside_a_run_is_refused() {
        let (pool, other) = (Pool::new(2).unwrap(), Pool::new(1).unwrap());
        let refused = AtomicUsize::new(0);
        pool.run(&|_| {
            refused.fetch_add(pool.run(&|_| {}).is_err() as usize, Ordering::Relaxed);
            refused.fetch_add(other.run(&|_| {}).is_err() as usize, Ordering::Relaxed);
        })
        .unwrap();
        assert_eq!(refused.into_inner(), 4);
        pool.run(&|_| {}).unwrap();
    }

    #[test]
    fn many_runs_from_many_threads() {
        let pool = Pool::new(3).unwrap();
        let total = AtomicUsize::new(0);
        std::thread::scope(|s| {
            for _ in 0..2 {
                s.spawn(|| {
                    for i in 0..5_000 {
                        pool.run(&|_| add(&total, 1)).unwrap();
                        if i % 1000 == 0 {
                            std::thread::sleep(Duration::from_millis(1)); // Long enough for the workers to fall asleep.
                        }
                    }
                });
            }
        });
        assert_eq!(total.into_inner(), 30_000);
    }

    #[test]
    fn oversubscription_makes_progress() {
        let pool = Pool::new(4 * available_threads()).unwrap();
        let start = Instant::now();
        pool.run(&|w| (0..200).for_each(|_| w.barrier())).unwrap();
        assert!(start.elapsed() < Duration::from_secs(10), "200 barriers took {:?}", start.elapsed());
    }

    #[test]
    fn subnormals_are_zero_inside_only() {
        let pool = Pool::new(3).unwrap();
        let product = |x: f32| std::hint::black_box(x) * std::hint::black_box(0.5f32);
        let zeros = AtomicUsize::new(0);
        pool.run(&|_| add(&zeros, (product(f32::MIN_POSITIVE) == 0.0) as usize)).unwrap();
        assert_eq!(zeros.into_inner(), if cfg!(target_arch = "x86_64") { 3 } else { 0 });
        assert_ne!(product(f32::MIN_POSITIVE), 0.0);
    }

    #[test]
    fn too_many_threads_is_an_error() {
        assert_eq!(Pool::new(usize::MAX).err().unwrap().kind(), Kind::TooLarge);
        assert!(available_threads() >= 1);
    }
}
