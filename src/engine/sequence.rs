//! One timeline of tokens: its state, and the logits after its last token.
//!
//! What came before can be had again exactly, or the call is refused and nothing changes: [`Sequence::mark`] and
//! [`Sequence::rollback`] within the timeline, [`Sequence::fork`] for a second one, [`super::Snapshot`] for keeping.

use super::cancel::Canceller;
use super::counters::Counters;
use super::forward::{append, check, recompute};
use super::load::Engine;
use super::queue::Queue;
use crate::cache::{LayerPages, PageLists, SequenceState, SharedPage, State};
use crate::error::{Error, Kind, Result, vec_with_capacity};
use crate::ops::PAGE;
use crate::{bail, ensure};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Options of a sequence.
#[derive(Clone, Copy, Debug, Default)]
pub struct SequenceOptions {
    /// Most tokens it may hold; 0 takes the engine's limit.
    pub context: usize,
}

/// A point of one sequence that it can be rolled back to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mark {
    id: u64,
    len: usize,
}

impl Mark {
    /// Tokens the sequence held.
    pub fn position(&self) -> usize {
        self.len
    }
}

/// A mark's number; no two marks of a process share one, so that a mark of another sequence is told apart.
static MARKS: AtomicU64 = AtomicU64::new(1);

/// A sequence. Its logits are those after every token it holds.
pub struct Sequence {
    engine: Arc<Engine>,
    pub(super) tokens: Vec<i32>,
    pub(super) pages: PageLists,
    /// Tokens of the source that was read; 0 before, and where the model reads none.
    source: usize,
    /// Recurrent slots and logits.
    pub(super) state: SequenceState,
    /// In order of position. Keys and values of positions before a mark are never rewritten, so a state is all it keeps.
    marks: Vec<(Mark, Arc<State>)>,
    capacity: usize,
    pub(super) queue: Queue,
    canceller: Arc<Canceller>,
    /// Leading tokens whose state follows from them alone, as a fresh run would have it: what may be shared with others.
    exact: usize,
    /// Whether it is put in the prefix tree when it is freed.
    remembers: bool,
    pub(super) counters: Counters,
    /// What it was when the blocking call began that is under way.
    pub(super) before: Before,
}

/// What a call that fails brings back, and what tells that it was cancelled.
#[derive(Clone, Copy, Default)]
pub(super) struct Before {
    pub len: usize,
    pub exact: usize,
    pub counters: Counters,
    /// Cancels there had been.
    cancels: u64,
}

impl Drop for Sequence {
    fn drop(&mut self) {
        if self.remembers {
            self.keep_prefix();
        }
    }
}

impl Sequence {
    /// An empty sequence.
    pub fn new(engine: &Arc<Engine>, options: &SequenceOptions) -> Result<Sequence> {
        let limit = engine.info().context;
        let capacity = if options.context == 0 { limit } else { options.context };
        if capacity > limit {
            return Err(Error::new(
                Kind::LimitExceeded,
                format!("a sequence of {capacity} tokens was asked for; the model was loaded for {limit}"),
            )
            .named("context")
            .sizes(capacity as u64, limit as u64));
        }
        let pages = engine.pools().iter().map(|pool| LayerPages::new(pool, capacity)).collect::<Result<_>>()?;
        let (pool, zero) = engine.states();
        let mut state = SequenceState::new(pool, zero);
        // What a step needs is there before the first one.
        state.begin()?;
        Ok(Sequence {
            engine: Arc::clone(engine),
            tokens: vec_with_capacity(capacity, "a sequence's tokens")?,
            pages: PageLists::new(pages),
            source: 0,
            state,
            marks: Vec::new(),
            capacity,
            queue: Queue::default(),
            canceller: Canceller::new(engine.alarm()),
            exact: usize::MAX,
            remembers: true,
            counters: Counters::default(),
            before: Before::default(),
        })
    }

    /// Cancels what this sequence is doing, from any thread.
    pub fn canceller(&self) -> &Arc<Canceller> {
        &self.canceller
    }

    /// Tokens it holds.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Most tokens it may hold.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The tokens.
    pub fn tokens(&self) -> &[i32] {
        &self.tokens
    }

    /// Tokens of the source it translates; 0 where none was read.
    pub fn source(&self) -> usize {
        self.source
    }

    /// The model it runs on.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// The row of logits after the last token.
    pub fn logits(&self) -> Result<&[f32]> {
        ensure!(!self.tokens.is_empty(), InvalidState, "the sequence holds no token, so there are no logits yet; prefill first");
        self.state.logits()
    }

    /// Whether its state follows from its tokens alone, as a fresh run would have it.
    pub(super) fn is_exact(&self) -> bool {
        self.tokens.len() <= self.exact
    }

    /// How many leading tokens' state follows from them alone; all for `usize::MAX`.
    pub(super) fn exact(&self) -> usize {
        self.exact
    }

    /// As [`Sequence::exact`] from now on; what it was.
    pub(super) fn set_exact(&mut self, exact: usize) -> usize {
        std::mem::replace(&mut self.exact, exact)
    }

    /// Leaves nothing in the prefix tree when it is freed.
    pub(super) fn forget_when_freed(&mut self) {
        self.remembers = false;
    }

    /// The states that marks hold.
    pub(super) fn marked(&self) -> impl Iterator<Item = &Arc<State>> + Clone {
        self.marks.iter().map(|mark| &mark.1)
    }

    /// Appends tokens and computes their state, unless the prefix tree has it. On error the sequence is as before.
    pub fn prefill(&mut self, tokens: &[i32]) -> Result<()> {
        let engine = Arc::clone(&self.engine);
        check(&engine, self, tokens, 0)?;
        self.begin_call();
        let (before, state, counters) = (self.len(), self.state.share(), self.counters);
        let taken = self.take_prefix(tokens);
        if taken.count == 0 && taken.stop.is_none() {
            append(&engine, &mut [self], tokens, false)?;
        } else if let Err(e) = self.prefill_rest(&engine, &tokens[taken.count..], taken.stop) {
            self.state.set(&state);
            self.drop_to(before);
            self.counters = Counters { cancelled: self.counters.cancelled, ..counters };
            return Err(e);
        } else {
            self.state.undo_to(state, before);
        }
        self.keep_prompt(tokens.len());
        Ok(())
    }

    /// Computes what the prefix tree did not have, keeping what it should have on the way.
    fn prefill_rest(&mut self, engine: &Engine, mut tokens: &[i32], stop: Option<usize>) -> Result<()> {
        if let Some((first, rest)) = stop.and_then(|stop| tokens.split_at_checked(stop - self.len())) {
            append(engine, &mut [self], first, false)?;
            self.keep_prefix();
            tokens = rest;
        }
        append(engine, &mut [self], tokens, false)
    }

    /// Takes up shared pages, from the one that the next position lies on; tokens have to follow.
    pub(super) fn adopt_pages(&mut self, pages: &[SharedPage]) {
        let (held, kinds) = (self.tokens.len(), self.pages.len());
        for (kind, own) in self.pages.iter_mut().enumerate() {
            // What a step that was under way has reserved.
            own.truncate(held);
            pages.iter().skip(kind).step_by(kinds).enumerate().for_each(|(i, page)| own.adopt(held / PAGE + i, page.clone()));
        }
        self.state.renew();
    }

    /// Appends tokens whose pages were taken up.
    pub(super) fn append_taken(&mut self, tokens: &[i32]) {
        self.tokens.extend_from_slice(tokens);
        self.counters.reused += tokens.len() as u64;
        self.counters.read += tokens.len() as u64;
    }

    /// Takes up the state after all tokens, of which `before` were there earlier.
    pub(super) fn adopt_state(&mut self, state: &Arc<State>, before: usize) {
        let earlier = self.state.share();
        self.state.set(state);
        self.state.undo_to(earlier, before);
    }

    /// A second sequence with the same tokens and state, sharing all memory until one of them writes. Marks stay behind.
    pub fn fork(&self) -> Result<Sequence> {
        let mut fork = Sequence::new(&self.engine, &SequenceOptions { context: self.capacity })?;
        fork.take(&self.tokens, self.source, &self.pages, &self.state.share(), self.exact)?;
        fork.remembers = self.remembers;
        Ok(fork)
    }

    /// Marks this point, to come back to it any number of times. A mark lasts until it is released or the sequence is cut
    /// to before it; meanwhile it holds one recurrent state.
    pub fn mark(&mut self) -> Result<Mark> {
        crate::error::reserve(&mut self.marks, 1, "a sequence's list of marks")?;
        let mark = Mark { id: MARKS.fetch_add(1, Ordering::Relaxed), len: self.len() };
        self.marks.push((mark, self.state.share()));
        Ok(mark)
    }

    fn find(&self, mark: Mark) -> Result<usize> {
        self.marks.iter().position(|(m, _)| *m == mark).ok_or_else(|| {
            let text = format!("the mark at {} is not this sequence's, was released, or the sequence was cut to before it", mark.len);
            Error::new(Kind::InvalidState, text)
        })
    }

    /// Goes back to a mark: tokens, keys and values, recurrent state and logits are bit for bit what they were. Marks
    /// of later positions end; this one stays.
    pub fn rollback(&mut self, mark: Mark) -> Result<()> {
        let index = self.find(mark)?;
        let state = Arc::clone(&self.marks[index].1);
        self.state.set(&state);
        self.drop_to(mark.len);
        Ok(())
    }

    /// Gives up a mark and the memory it holds.
    pub fn release(&mut self, mark: Mark) -> Result<()> {
        let index = self.find(mark)?;
        self.marks.remove(index);
        Ok(())
    }

    /// Drops tokens from the end until `len` are left; the row of logits is the one after the last of them. Always exact: a
    /// model with recurrent slots can go to 0, to before the last call or to a mark, and refuses other places unchanged.
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        ensure!(len <= self.tokens.len(), InvalidArgument, "the sequence holds {} tokens, it cannot be cut to {len}", self.tokens.len());
        if len == self.tokens.len() {
            return Ok(());
        }
        if let Some(index) = self.marks.iter().position(|(mark, _)| mark.len == len) {
            let state = Arc::clone(&self.marks[index].1);
            self.state.set(&state);
        } else if len == 0 {
            self.state.reset();
        } else if !self.state.undo(len) {
            if self.engine.is_recurrent() {
                let marks: Vec<usize> = self.marks.iter().map(|(mark, _)| mark.len).collect();
                bail!(
                    Unsupported,
                    "the model's recurrent state at {len} of {} tokens is gone; it can be cut to 0, to before the last call, or to its marks {marks:?}",
                    self.tokens.len()
                );
            }
            let engine = Arc::clone(&self.engine);
            recompute(&engine, self, len)?;
        }
        self.drop_to(len);
        Ok(())
    }

    /// Takes up tokens and the state after them, which is a fresh run's for `exact` of them. On error the sequence is as before.
    pub(super) fn take(&mut self, tokens: &[i32], source: usize, pages: &[LayerPages], state: &Arc<State>, exact: usize) -> Result<()> {
        ensure!(tokens.len() <= self.capacity, ContextFull, "{} tokens do not fit a sequence of {}", tokens.len(), self.capacity);
        let pages = pages.iter().map(|pages| pages.fork(self.capacity)).collect::<Result<_>>()?;
        self.tokens.clear();
        self.tokens.extend_from_slice(tokens);
        self.pages = PageLists::new(pages);
        self.source = source;
        self.exact = exact;
        // A step that is under way may have pages past the end.
        self.own_pages().for_each(|pages| pages.truncate(tokens.len()));
        self.marks.clear();
        self.state.set(state);
        Ok(())
    }

    /// Takes up a source that was read into `fresh`; its other pages are not looked at.
    pub(super) fn take_source(&mut self, len: usize, fresh: Vec<LayerPages>) {
        let engine = Arc::clone(&self.engine);
        for ((own, fresh), of_source) in self.pages.iter_mut().zip(fresh).zip(engine.of_source()) {
            if *of_source {
                *own = fresh;
            }
        }
        self.source = len;
        self.state.renew();
        self.marks.clear();
    }

    /// The pages whose positions are the sequence's own.
    fn own_pages(&mut self) -> impl Iterator<Item = &mut LayerPages> {
        self.pages.iter_mut().zip(self.engine.of_source()).filter(|(_, of_source)| !**of_source).map(|(pages, _)| pages)
    }

    /// Forgets tokens past `len`; pages past it go back.
    pub(super) fn drop_to(&mut self, len: usize) {
        // A step that is under way may have written to them.
        self.state.renew();
        self.tokens.truncate(len);
        if self.tokens.len() <= self.exact {
            self.exact = usize::MAX;
        }
        self.own_pages().for_each(|pages| pages.truncate(len));
        self.marks.retain(|(mark, _)| mark.len <= len);
    }

    /// Gives back pages that were reserved for tokens which did not come.
    pub(super) fn give_back(&mut self) {
        let len = self.tokens.len();
        self.own_pages().for_each(|pages| pages.truncate(len));
    }

    /// Forgets `count` tokens from `from` on, whose later ones have moved already.
    pub(super) fn drop_middle(&mut self, from: usize, count: usize) {
        self.tokens.drain(from..from + count);
        self.exact = self.exact.min(from);
        self.marks.retain(|(mark, _)| mark.len <= from);
        let len = self.tokens.len();
        self.own_pages().for_each(|pages| pages.truncate(len));
        // The state before the last call is another timeline's.
        let state = self.state.share();
        self.state.set(&state);
    }

    /// Makes room for `count` more tokens in every layer.
    pub(super) fn reserve(&mut self, count: usize) -> Result<()> {
        self.reserve_between(self.tokens.len(), self.tokens.len() + count)
    }

    /// Makes positions `from .. to` of every layer writable.
    pub(super) fn reserve_between(&mut self, from: usize, to: usize) -> Result<()> {
        let of_source = self.engine.of_source();
        self.pages.reserve(from, to, |index| !of_source[index])
    }

    /// Cancels from now on mean the call that begins.
    pub(super) fn begin_call(&mut self) {
        self.before.cancels = self.canceller.count();
    }

    /// Whether the call that is under way was cancelled.
    pub(super) fn is_call_cancelled(&self) -> bool {
        self.canceller.count() != self.before.cancels
    }

    /// Remembers what a call that fails brings back. Until the state is known to be sound again, nobody may share it.
    pub(super) fn note_before(&mut self) {
        let exact = self.set_exact(0);
        self.before = Before { len: self.len(), exact, counters: self.counters, ..self.before };
    }
}
