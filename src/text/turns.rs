//! Work in turns: a job on a thread of its own that goes on only while its owner waits, for hosts that load a model between frames.
//!
//! The owner gives time and waits no longer than that, whatever the job is in the middle of. The job calls [`pass`] wherever little
//! work lies behind it, and rests there when its time is over; given up, it ends there. What is computed is the same as in one go.

use std::cell::RefCell;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::own_stack::Beside;
use crate::bail;
use crate::error::Result;

/// A job that is done in turns. Dropping it gives it up, and waits for its next [`pass`].
pub(crate) struct Turns<T> {
    shared: Arc<Shared>,
    thread: Option<Beside<Option<T>>>,
}

/// What owner and job share.
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
    /// Whether the state is `Work`, for a look without the lock.
    works: AtomicBool,
    /// Bytes passed.
    done: AtomicU64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    Work,
    Rest,
    GivenUp,
    Over,
}

thread_local! {
    /// The job that this thread works for. Without a destructor, which a host's thread would run at its end: [`Scope`] empties it.
    static JOB: ManuallyDrop<RefCell<Option<Arc<Shared>>>> = const { ManuallyDrop::new(RefCell::new(None)) };
}

/// The job that this thread works for, to be entered by a thread that works for this one.
pub(super) struct Job(Option<Arc<Shared>>);

/// This thread works for a job until this is dropped.
pub(super) struct Scope(());

impl Job {
    /// This thread's.
    pub(super) fn current() -> Job {
        Job(JOB.with(|job| job.borrow().clone()))
    }

    /// Makes it this thread's.
    pub(super) fn enter(self) -> Scope {
        JOB.with(|job| *job.borrow_mut() = self.0);
        Scope(())
    }
}

impl Drop for Scope {
    fn drop(&mut self) {
        JOB.with(|job| job.borrow_mut().take());
    }
}

/// A place where a job may rest; `bytes` of its input lie behind since the last one. An error where nobody wants the job any more.
/// On threads that work for no job, nothing.
pub(crate) fn pass(bytes: usize) -> Result<()> {
    JOB.with(|job| job.borrow().as_ref().map_or(Ok(()), |shared| shared.pass(bytes)))
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn set(&self, state: &mut State, now: State) {
        *state = now;
        self.works.store(now == State::Work, Ordering::Relaxed);
        self.changed.notify_all();
    }

    fn pass(&self, bytes: usize) -> Result<()> {
        self.done.fetch_add(bytes as u64, Ordering::Relaxed);
        if self.works.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mut state = self.state();
        while *state == State::Rest {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if *state == State::GivenUp {
            bail!(Cancelled, "nobody waits for this any more");
        }
        Ok(())
    }
}

impl<T: Send + 'static> Turns<T> {
    /// A job that begins when it is first given time.
    pub(crate) fn start(what: &str, work: impl FnOnce() -> T + Send + 'static) -> Result<Turns<T>> {
        let shared = Arc::new(Shared {
            state: Mutex::new(State::Rest),
            changed: Condvar::new(),
            works: AtomicBool::new(false),
            done: AtomicU64::new(0),
        });
        /// Tells the owner, also when a panic passes.
        struct Over(Arc<Shared>);
        impl Drop for Over {
            fn drop(&mut self) {
                self.0.set(&mut self.0.state(), State::Over);
            }
        }
        let job = Arc::clone(&shared);
        let thread = Beside::start(what, move || {
            let over = Over(job);
            let _scope = Job(Some(Arc::clone(&over.0))).enter();
            pass(0).ok().map(|()| work())
        })?;
        Ok(Turns { shared, thread: Some(thread) })
    }

    /// Lets it work for `time`, or to its end; what it made, once it has.
    pub(crate) fn give(&mut self, time: Option<Duration>, what: &str) -> Result<Option<T>> {
        let deadline = time.and_then(|time| Instant::now().checked_add(time));
        let mut state = self.shared.state();
        if *state == State::Rest {
            self.shared.set(&mut state, State::Work);
        }
        while *state == State::Work {
            let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            state = match left {
                None => self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(Duration::ZERO) => {
                    self.shared.set(&mut state, State::Rest);
                    return Ok(None);
                }
                Some(left) => self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0,
            };
        }
        drop(state);
        match self.thread.take().map(|thread| thread.join(what)) {
            Some(Ok(Some(made))) => Ok(Some(made)),
            Some(Err(e)) => Err(e),
            Some(Ok(None)) | None => bail!(Internal, "{what}: was given up or taken before"),
        }
    }

    /// Bytes of its input that it has passed.
    pub(crate) fn done(&self) -> u64 {
        self.shared.done.load(Ordering::Relaxed)
    }
}

impl<T> Drop for Turns<T> {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        if *state != State::Over {
            self.shared.set(&mut state, State::GivenUp);
        }
        // The thread is waited for by its own drop, once the lock is free.
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;
    use crate::text::own_stack;

    /// Counts to `most`, about a tenth of a millisecond each, on another stack as the tokenizer does.
    fn count(most: u32, at: Arc<AtomicU64>) -> Result<u32> {
        own_stack::run(own_stack::LOAD_STACK, "test", || {
            for i in 0..most {
                pass(1)?;
                let until = Instant::now() + Duration::from_micros(100);
                while Instant::now() < until {}
                at.store(u64::from(i) + 1, Ordering::SeqCst);
            }
            Ok(most)
        })
    }

    #[test]
    fn rests_between_turns_and_comes_to_the_same() {
        let at = Arc::new(AtomicU64::new(0));
        let theirs = Arc::clone(&at);
        let mut turns = Turns::start("test", move || count(200, theirs)).unwrap();
        let (mut given, mut made) = (0, None);
        while made.is_none() {
            made = turns.give(Some(Duration::from_millis(2)), "test").unwrap();
            given += 1;
            if made.is_none() {
                // The piece that it is in, and no more.
                let before = at.load(Ordering::SeqCst);
                std::thread::sleep(Duration::from_millis(5));
                assert!(at.load(Ordering::SeqCst) <= before + 1);
            }
        }
        assert_eq!((made.unwrap().unwrap(), turns.done()), (200, 200));
        assert!(given > 3, "{given} turns");
        assert_eq!(turns.give(None, "test").unwrap_err().kind(), Kind::Internal);
    }

    #[test]
    fn given_up_it_ends_at_the_next_pass() {
        for time in [None, Some(Duration::ZERO), Some(Duration::from_millis(1))] {
            let at = Arc::new(AtomicU64::new(0));
            let theirs = Arc::clone(&at);
            let mut turns = Turns::start("test", move || count(1_000_000, theirs)).unwrap();
            if let Some(time) = time {
                assert!(turns.give(Some(time), "test").unwrap().is_none());
            }
            drop(turns);
            assert_eq!(Arc::strong_count(&at), 1, "the thread is gone");
            assert!(at.load(Ordering::SeqCst) < 1000);
        }
        let mut turns = Turns::<()>::start("test", || panic!("planted")).unwrap();
        assert!(turns.give(None, "test").unwrap_err().message().contains("planted"));
    }
}
