//! Recurrent state of a sequence: its layers' slots and its row of logits, all that a step replaces as a whole.
//!
//! A sequence has two states. A call reads the committed one and writes the spare one; success swaps them, failure leaves the
//! committed one alone. A mark, a fork or a snapshot is one more holder of a committed state, which nobody writes while
//! it is shared. So all of them are exact and cost nothing until the next call needs a new spare.
//!
//! On a device a state lies there as a whole; the row of logits is copied to the host when somebody looks at it.
#![allow(unsafe_code)] // states are handed to operations as raw pointers; see `SequenceState::pointers`

use super::memory::{Home, Memory};
use crate::backend::cpu::arena::Buffer;
use crate::error::{Error, Kind, Result, reserve, vec_filled};
use crate::ops::{SlotSpec, StatePointers};
use crate::runtime::Class;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Where each slot and the row of logits lie in a state, in floats.
#[derive(Clone, Debug)]
pub struct StateLayout {
    slots: Arc<[Range<usize>]>,
    logits: Range<usize>,
}

/// Slots start on a cache line.
const ALIGN: usize = 16;

impl StateLayout {
    /// Places slots and a row of `vocab` logits.
    pub fn new(slots: &[SlotSpec], vocab: usize) -> Result<StateLayout> {
        let too_large = |name: &str, n: usize| {
            Error::new(Kind::TooLarge, format!("{name}: {n} floats of recurrent state for each sequence")).named(name)
        };
        let mut end = 0usize;
        let mut place = |name: &str, n: usize| {
            let start = end;
            end = start
                .checked_add(n)
                .and_then(|e| e.checked_next_multiple_of(ALIGN))
                .filter(|e| *e < isize::MAX as usize / 8)
                .ok_or_else(|| too_large(name, n))?;
            Ok(start..start + n)
        };
        let slots = slots.iter().map(|s| place(&s.name, s.elements)).collect::<Result<_>>()?;
        Ok(StateLayout { slots, logits: place("logits", vocab)? })
    }

    /// Where each slot lies.
    pub fn slots(&self) -> &Arc<[Range<usize>]> {
        &self.slots
    }

    /// Floats before the row of logits.
    pub fn slot_floats(&self) -> usize {
        self.logits.start
    }

    /// Floats in all.
    pub fn floats(&self) -> usize {
        self.logits.end
    }
}

/// States of one model: their memory is used again.
pub struct StatePool {
    home: Home,
    layout: StateLayout,
    free: Mutex<Vec<Memory>>,
}

impl StatePool {
    /// No state yet; states will lie in the host's memory.
    pub fn new(layout: StateLayout) -> Arc<StatePool> {
        StatePool::at(&Home::Host, layout)
    }

    /// As [`StatePool::new`], wherever states are to lie.
    pub fn at(home: &Home, layout: StateLayout) -> Arc<StatePool> {
        Arc::new(StatePool { home: home.clone(), layout, free: Mutex::default() })
    }

    /// The layout.
    pub fn layout(&self) -> &StateLayout {
        &self.layout
    }

    /// The state before any token: zeros.
    pub fn zero(self: &Arc<Self>) -> Result<Arc<State>> {
        Ok(Arc::new(State::new(self.memory()?, self)))
    }

    fn memory(&self) -> Result<Memory> {
        self.home.memory(self.layout.floats() * 4, "a recurrent state")
    }

    /// Gives up states that nobody uses.
    pub fn trim(&self) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.clear();
        free.shrink_to_fit();
    }

    /// A state with the given floats, as many as the layout has.
    pub fn filled(self: &Arc<Self>, floats: impl Iterator<Item = f32>) -> Result<Arc<State>> {
        let mut state = self.take()?;
        match Arc::get_mut(&mut state).and_then(|s| s.memory.as_mut()).expect("a state just taken has one holder") {
            Memory::Host(buffer) => buffer.as_mut_slice_of::<f32>().iter_mut().zip(floats).for_each(|(to, from)| *to = from),
            Memory::Device(block) => {
                let mut bytes = vec_filled(self.layout.floats() * 4, 0u8, "a recurrent state")?;
                bytes.as_chunks_mut::<4>().0.iter_mut().zip(floats).for_each(|(to, from)| *to = from.to_ne_bytes());
                let to = std::ptr::without_provenance_mut(block.address() as usize);
                // SAFETY: the block is as long, and nobody else knows it yet.
                unsafe { self.home.write(to, &bytes) }?;
            }
        }
        Ok(state)
    }

    /// A state with anything in it.
    fn take(self: &Arc<Self>) -> Result<Arc<State>> {
        let used = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let memory = match used {
            Some(memory) => memory,
            None => self.memory()?,
        };
        Ok(Arc::new(State::new(memory, self)))
    }
}

/// The slots and logits after some token; its memory goes back to the pool with its last holder.
pub struct State {
    /// There until it is dropped.
    memory: Option<Memory>,
    /// Of a state on a device: the row of logits, once somebody has looked at it, and room for one.
    row: OnceLock<Buffer>,
    room: Mutex<Option<Buffer>>,
    /// The token of the highest logit, where the device found it.
    best: Option<i32>,
    /// The highest logits with their tokens, where the device found them, and what probabilities are shares of; empty for none.
    candidates: Vec<(u32, f32)>,
    sum: f64,
    pool: Arc<StatePool>,
}

impl Drop for State {
    fn drop(&mut self) {
        if let Some(memory) = self.memory.take() {
            let mut free = self.pool.free.lock().unwrap_or_else(PoisonError::into_inner);
            // Without room for one more, the memory goes back to the system instead.
            if free.len() < KEPT && reserve(&mut free, 1, "a list of states").is_ok() {
                free.push(memory);
            }
        }
    }
}

/// Unused states a pool keeps: enough for marks that come and go with each step.
const KEPT: usize = 4;

impl State {
    fn new(memory: Memory, pool: &Arc<StatePool>) -> State {
        State {
            memory: Some(memory),
            row: OnceLock::new(),
            room: Mutex::default(),
            best: None,
            candidates: Vec::new(),
            sum: 0.0,
            pool: Arc::clone(pool),
        }
    }

    /// Number of all floats.
    pub fn floats(&self) -> usize {
        self.pool.layout.floats()
    }

    /// Appends all floats, little-endian.
    pub fn write_to(&self, out: &mut Vec<u8>) -> Result<()> {
        match self.memory() {
            Memory::Host(buffer) => {
                buffer.as_slice_of::<f32>()[..self.floats()].iter().for_each(|v| out.extend_from_slice(&v.to_le_bytes()))
            }
            Memory::Device(_) => {
                let start = out.len();
                reserve(out, self.bytes(), "a recurrent state")?;
                out.resize(start + self.bytes(), 0);
                // SAFETY: the memory is as long; it is not written while it is shared or committed.
                unsafe { self.pool.home.read(self.first().cast(), &mut out[start..]) }?;
                out[start..].as_chunks_mut::<4>().0.iter_mut().for_each(|b| *b = f32::from_ne_bytes(*b).to_le_bytes());
            }
        }
        Ok(())
    }

    /// Bytes of memory.
    pub fn bytes(&self) -> usize {
        self.pool.layout.floats() * 4
    }

    /// The row of logits.
    pub fn logits(&self) -> Result<&[f32]> {
        let range = self.pool.layout.logits.clone();
        if let Memory::Host(buffer) = self.memory() {
            return Ok(&buffer.as_slice_of::<f32>()[range]);
        }
        if self.row.get().is_none() {
            let mut room = self.room.lock().unwrap_or_else(PoisonError::into_inner);
            if self.row.get().is_none() {
                let mut row = match room.take() {
                    Some(row) => row,
                    None => Buffer::of(Class::Cache, range.len() * 4, "a row of logits")?,
                };
                // SAFETY: the range lies in the memory; it is not written while it is shared or committed.
                let copied = unsafe { self.pool.home.read(self.first().wrapping_add(range.start).cast(), row.as_mut_slice()) };
                if let Err(e) = copied {
                    *room = Some(row);
                    return Err(e);
                }
                let _ = self.row.set(row);
            }
        }
        Ok(&self.row.get().expect("set above").as_slice_of::<f32>()[..range.len()])
    }

    /// Forgets what was copied from the device: the memory is about to be written.
    fn refresh(&mut self) {
        self.best = None;
        self.candidates.clear();
        if let Some(row) = self.row.take() {
            *self.room.get_mut().unwrap_or_else(PoisonError::into_inner) = Some(row);
        }
    }

    fn memory(&self) -> &Memory {
        self.memory.as_ref().expect("memory is taken by drop alone")
    }

    fn first(&self) -> *mut f32 {
        self.memory().first().cast()
    }
}

/// The two states of a sequence.
pub struct SequenceState {
    pool: Arc<StatePool>,
    zero: Arc<State>,
    committed: Arc<State>,
    /// Written by the next call; before that, it may still hold what `committed` was before the last one.
    spare: Option<Arc<State>>,
    /// Tokens that `spare` is the state after.
    before: Option<usize>,
    stamp: u64,
}

/// No two stamps of a process are the same.
static STAMPS: AtomicU64 = AtomicU64::new(1);

impl SequenceState {
    /// The state before any token.
    pub fn new(pool: &Arc<StatePool>, zero: &Arc<State>) -> SequenceState {
        SequenceState { pool: Arc::clone(pool), zero: Arc::clone(zero), committed: Arc::clone(zero), spare: None, before: None, stamp: 0 }
    }

    /// Makes the spare state writable. On error nothing changed.
    pub fn begin(&mut self) -> Result<()> {
        if self.spare.as_mut().is_none_or(|s| Arc::get_mut(s).is_none()) {
            self.spare = Some(self.pool.take()?);
        }
        self.spare().refresh();
        self.before = None;
        self.renew();
        Ok(())
    }

    /// A number that names the sequence and everything done to its state so far: as long as it is the same, what a call
    /// that was begun has written is still there.
    pub fn stamp(&self) -> u64 {
        self.stamp
    }

    /// Makes a call that was begun count as lost.
    pub fn renew(&mut self) {
        self.stamp = STAMPS.fetch_add(1, Ordering::Relaxed);
    }

    fn spare(&mut self) -> &mut State {
        self.spare.as_mut().and_then(Arc::get_mut).expect("begin() made the spare state this sequence's own")
    }

    /// For a run: from the committed state, or further from what this call wrote before.
    pub fn pointers(&self, further: bool) -> StatePointers {
        let len = self.pool.layout.slot_floats();
        let spare = self.spare.as_ref().filter(|spare| Arc::strong_count(spare) == 1);
        let write = spare.expect("begin() made the spare state this sequence's own").first();
        let read = if further { write } else { self.committed.first() };
        StatePointers::new(read, write, len)
    }

    /// Where the call's row of logits goes; `None` on a device, whose run puts it behind the slots itself.
    pub fn next_logits(&mut self) -> Option<&mut [f32]> {
        let range = self.pool.layout.logits.clone();
        match self.spare().memory.as_mut().expect("memory is taken by drop alone") {
            Memory::Host(buffer) => Some(&mut buffer.as_mut_slice_of::<f32>()[range]),
            Memory::Device(_) => None,
        }
    }

    /// Says which token of the call's row has the highest logit.
    pub fn set_next_best(&mut self, token: Option<i32>) {
        self.spare().best = token;
    }

    /// Says which logits of the call's row are the highest, in order, and the sum of e^(logit - highest) over all of it. Without memory for them
    /// they are not kept.
    pub fn set_next_candidates(&mut self, sum: f64, candidates: impl ExactSizeIterator<Item = (u32, f32)>) {
        let spare = self.spare();
        spare.candidates.clear();
        if reserve(&mut spare.candidates, candidates.len(), "the highest logits").is_ok() {
            spare.candidates.extend(candidates);
            spare.sum = sum;
        }
    }

    /// The highest logits with their tokens, in order, and the sum, where the device found them.
    pub fn candidates(&self) -> Option<(&[(u32, f32)], f64)> {
        let state = &self.committed;
        (!state.candidates.is_empty()).then_some((&state.candidates, state.sum))
    }

    /// The token of the highest logit, the lowest of several, where the device found it.
    pub fn best(&self) -> Option<i32> {
        self.committed.best
    }

    /// What the call wrote becomes the state; `before` tokens were there when it began, if it can be undone.
    pub fn commit(&mut self, before: Option<usize>) {
        self.renew();
        if let Some(spare) = &mut self.spare {
            std::mem::swap(&mut self.committed, spare);
            self.before = before;
        }
    }

    /// The row of logits after the last token.
    pub fn logits(&self) -> Result<&[f32]> {
        self.committed.logits()
    }

    /// One more holder of the committed state.
    pub fn share(&self) -> Arc<State> {
        Arc::clone(&self.committed)
    }

    /// Takes up a state of the same model.
    pub fn set(&mut self, state: &Arc<State>) {
        self.renew();
        let old = std::mem::replace(&mut self.committed, Arc::clone(state));
        self.before = None;
        if self.spare.is_none() {
            self.spare = Some(old);
        }
    }

    /// Makes [`SequenceState::undo`] go back to `state`, the one after `len` tokens.
    pub fn undo_to(&mut self, state: Arc<State>, len: usize) {
        self.spare = Some(state);
        self.before = Some(len);
    }

    /// The states it holds besides the one before any token, each once: the state and how often it is held here.
    pub fn held<'a>(&'a self, marks: impl Iterator<Item = &'a Arc<State>> + Clone) -> impl Iterator<Item = (&'a Arc<State>, usize)> {
        let all = [&self.committed].into_iter().chain(&self.spare).chain(marks);
        let others = all.clone().filter(|state| !Arc::ptr_eq(state, &self.zero));
        others.enumerate().filter_map(move |(index, state)| {
            let same = all.clone().filter(|other| !Arc::ptr_eq(other, &self.zero)).enumerate().filter(|(_, o)| Arc::ptr_eq(o, state));
            let (first, count) = same.fold((usize::MAX, 0), |(first, count), (i, _)| (first.min(i), count + 1));
            (first == index).then_some((state, count))
        })
    }

    /// Back to before any token.
    pub fn reset(&mut self) {
        let zero = Arc::clone(&self.zero);
        self.set(&zero);
    }

    /// Back to the state before the last call, if that was after `len` tokens and is still there.
    pub fn undo(&mut self, len: usize) -> bool {
        self.renew();
        match &mut self.spare {
            Some(spare) if self.before == Some(len) => {
                std::mem::swap(&mut self.committed, spare);
                self.before = None;
                true
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state() -> SequenceState {
        let slots = [3, 20].map(|elements| SlotSpec { name: "s".into(), elements });
        let pool = StatePool::new(StateLayout::new(&slots, 5).unwrap());
        let zero = pool.zero().unwrap();
        SequenceState::new(&pool, &zero)
    }

    fn step(s: &mut SequenceState, value: f32, before: usize) {
        s.begin().unwrap();
        s.next_logits().unwrap().fill(value);
        s.commit(Some(before));
    }

    #[test]
    fn slots_and_logits_do_not_overlap() {
        let s = state();
        let layout = s.pool.layout();
        assert_eq!(&layout.slots()[..], [0..3, 16..36]);
        assert_eq!((layout.slot_floats(), layout.floats()), (48, 53));
        let huge = SlotSpec { name: "x".into(), elements: usize::MAX / 2 };
        assert_eq!(StateLayout::new(&[huge], 1).unwrap_err().kind(), Kind::TooLarge);
    }

    #[test]
    fn a_shared_state_is_never_written() {
        let mut s = state();
        step(&mut s, 1.0, 0);
        let mark = s.share();
        for i in 2..9 {
            step(&mut s, i as f32, i - 1);
        }
        assert_eq!((mark.logits().unwrap()[0], s.logits().unwrap()[0]), (1.0, 8.0));
        s.set(&mark);
        assert_eq!(s.logits().unwrap()[0], 1.0);
        s.reset();
        step(&mut s, 4.0, 0);
        assert_eq!((mark.logits().unwrap()[0], s.logits().unwrap()[0], s.zero.logits().unwrap()[0]), (1.0, 4.0, 0.0));
    }

    #[test]
    fn the_last_call_can_be_undone_once_and_a_begun_one_not() {
        let mut s = state();
        step(&mut s, 1.0, 0);
        step(&mut s, 2.0, 7);
        assert!(!s.undo(6) && s.undo(7) && !s.undo(7));
        assert_eq!(s.logits().unwrap()[0], 1.0);
        step(&mut s, 3.0, 7);
        s.begin().unwrap();
        assert!(!s.undo(7));
        assert_eq!(s.logits().unwrap()[0], 3.0);
    }

    #[test]
    fn steady_steps_take_no_new_memory() {
        let mut s = state();
        step(&mut s, 1.0, 0);
        step(&mut s, 2.0, 1);
        let known = [s.committed.first(), s.spare.as_ref().unwrap().first()];
        for i in 3..6 {
            step(&mut s, i as f32, i - 1);
            assert!(known.contains(&s.committed.first()));
        }
    }
}
