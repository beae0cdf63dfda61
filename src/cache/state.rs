//! Recurrent state of a sequence: its layers' slots and its row of logits, all that a step replaces as a whole.
//!
//! A sequence has two states. A call reads the committed one and writes the spare one; success swaps them, failure leaves the
//! committed one alone. A mark, a fork or a snapshot is one more holder of a committed state, which nobody writes while
//! it is shared. So all of them are exact and cost nothing until the next call needs a new spare.
//!
//! A slot lies where its layer runs; as bytes a state is the same wherever its slots lie. A row of logits on a device is copied to the host when
//! somebody looks at it.
#![allow(unsafe_code)] // states are handed to operations as raw pointers; see `SequenceState::pointers`

use super::memory::{Home, Memory};
use crate::backend::cpu::arena::Buffer;
use crate::error::{Error, Kind, Result, reserve, vec_filled};
use crate::ops::{SlotSpec, StatePointers};
use crate::runtime::Class;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

/// Where each slot and the row of logits lie in a state, in floats. A state has memory on the host, on a device, or on both: what belongs to a
/// layer lies where the layer runs.
#[derive(Clone, Debug)]
pub struct StateLayout {
    slots: Arc<[Range<usize>]>,
    logits: Range<usize>,
    /// Whether the row of logits lies on the device.
    logits_on_device: bool,
    /// All of a state, in the order of its slots: ranges of its memory on the host, or on the device where that is said.
    runs: Vec<(bool, Range<usize>)>,
    /// On the host, and on the device: floats of slots, and all floats.
    sizes: [(usize, usize); 2],
}

/// Slots start on a cache line.
const ALIGN: usize = 16;

impl StateLayout {
    /// Places slots and a row of `vocab` logits, all on the host.
    pub fn new(slots: &[SlotSpec], vocab: usize) -> Result<StateLayout> {
        StateLayout::apart(slots, vocab, |_| false, false)
    }

    /// As [`StateLayout::new`], where some slots or the row of logits lie on a device.
    pub fn apart(slots: &[SlotSpec], vocab: usize, on_device: impl Fn(usize) -> bool, logits_on_device: bool) -> Result<StateLayout> {
        let too_large = |name: &str, n: usize| {
            Error::new(Kind::TooLarge, format!("{name}: {n} floats of recurrent state for each sequence")).named(name)
        };
        let (mut ends, mut runs) = ([0usize; 2], Vec::<(bool, Range<usize>)>::new());
        let mut place = |name: &str, n: usize, there: bool, is_last: bool| {
            let start = ends[usize::from(there)];
            let end = start
                .checked_add(n)
                .and_then(|e| e.checked_next_multiple_of(ALIGN))
                .filter(|e| *e < isize::MAX as usize / 8)
                .ok_or_else(|| too_large(name, n))?;
            ends[usize::from(there)] = end;
            // What lies between slots goes along.
            let end = if is_last { start + n } else { end };
            match runs.last_mut() {
                Some((same, run)) if *same == there && run.end == start => run.end = end,
                _ => runs.push((there, start..end)),
            }
            Ok(start..start + n)
        };
        let placed = slots.iter().enumerate().map(|(index, slot)| place(&slot.name, slot.elements, on_device(index), false));
        let placed = placed.collect::<Result<_>>()?;
        let logits = place("logits", vocab, logits_on_device, true)?;
        let sizes = [false, true].map(|there| match (there == logits_on_device, ends[usize::from(there)]) {
            (true, _) => (logits.start, logits.end),
            (false, end) => (end, end),
        });
        Ok(StateLayout { slots: placed, logits, logits_on_device, runs, sizes })
    }

    /// Where each slot lies, on its side.
    pub fn slots(&self) -> &Arc<[Range<usize>]> {
        &self.slots
    }

    /// Floats of the slots of a side.
    pub fn slot_floats(&self, on_device: bool) -> usize {
        self.sizes[usize::from(on_device)].0
    }

    /// Floats of a side.
    pub fn floats_of(&self, on_device: bool) -> usize {
        self.sizes[usize::from(on_device)].1
    }

    /// Floats in all, as they are written and read: the same wherever they lie.
    pub fn floats(&self) -> usize {
        self.runs.iter().map(|(_, run)| run.len()).sum()
    }
}

/// A state's memory, where it has some.
struct Memories {
    host: Option<Memory>,
    device: Option<Memory>,
}

impl Memories {
    fn host(&self) -> *mut f32 {
        self.host.as_ref().map_or(std::ptr::null_mut(), |memory| memory.first().cast())
    }

    fn device(&self) -> *mut f32 {
        self.device.as_ref().map_or(std::ptr::null_mut(), |memory| memory.first().cast())
    }
}

/// States of one model: their memory is used again.
pub struct StatePool {
    /// Where the device's part of them lies.
    home: Home,
    layout: StateLayout,
    free: Mutex<Vec<Memories>>,
}

impl StatePool {
    /// No state yet; states will lie in the host's memory.
    pub fn new(layout: StateLayout) -> Arc<StatePool> {
        StatePool::at(&Home::Host, layout)
    }

    /// As [`StatePool::new`], with the home of what the layout puts on a device.
    pub fn at(home: &Home, layout: StateLayout) -> Arc<StatePool> {
        Arc::new(StatePool { home: home.clone(), layout, free: Mutex::default() })
    }

    /// The layout.
    pub fn layout(&self) -> &StateLayout {
        &self.layout
    }

    /// The state before any token: zeros.
    pub fn zero(self: &Arc<Self>) -> Result<Arc<State>> {
        Ok(Arc::new(State::new(self.memories()?, self)))
    }

    fn memories(&self) -> Result<Memories> {
        let of = |home: &Home, on_device: bool| match self.layout.floats_of(on_device) {
            0 => Ok(None),
            floats => home.memory(floats * 4, "a recurrent state").map(Some),
        };
        Ok(Memories { host: of(&Home::Host, false)?, device: of(&self.home, true)? })
    }

    /// Gives up states that nobody uses.
    pub fn trim(&self) {
        let mut free = self.free.lock().unwrap_or_else(PoisonError::into_inner);
        free.clear();
        free.shrink_to_fit();
    }

    /// A state with the given floats, as many as the layout has.
    pub fn filled(self: &Arc<Self>, mut floats: impl Iterator<Item = f32>) -> Result<Arc<State>> {
        let mut state = self.take()?;
        let memories = Arc::get_mut(&mut state).and_then(|s| s.memories.as_mut()).expect("a state just taken has one holder");
        for (on_device, run) in &self.layout.runs {
            if let (false, Some(Memory::Host(buffer))) = (on_device, &mut memories.host) {
                buffer.as_mut_slice_of::<f32>()[run.clone()].iter_mut().zip(&mut floats).for_each(|(to, from)| *to = from);
                continue;
            }
            let mut bytes = vec_filled(run.len() * 4, 0u8, "a recurrent state")?;
            bytes.as_chunks_mut::<4>().0.iter_mut().zip(&mut floats).for_each(|(to, from)| *to = from.to_ne_bytes());
            // SAFETY: the range lies in the memory, which nobody else knows yet.
            unsafe { self.home.write(memories.device().wrapping_add(run.start).cast(), &bytes) }?;
        }
        Ok(state)
    }

    /// A state with anything in it.
    fn take(self: &Arc<Self>) -> Result<Arc<State>> {
        let used = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let memories = match used {
            Some(memories) => memories,
            None => self.memories()?,
        };
        Ok(Arc::new(State::new(memories, self)))
    }
}

/// The slots and logits after some token; its memory goes back to the pool with its last holder.
pub struct State {
    /// There until it is dropped.
    memories: Option<Memories>,
    /// Where the logits are on a device: their row of logits, once somebody has looked at it, and room for one.
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
        if let Some(memories) = self.memories.take() {
            let mut free = self.pool.free.lock().unwrap_or_else(PoisonError::into_inner);
            // Without room for one more, the memory goes back to the system instead.
            if free.len() < KEPT && reserve(&mut free, 1, "a list of states").is_ok() {
                free.push(memories);
            }
        }
    }
}

/// Unused states a pool keeps: enough for marks that come and go with each step.
const KEPT: usize = 4;

impl State {
    fn new(memories: Memories, pool: &Arc<StatePool>) -> State {
        State {
            memories: Some(memories),
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
        let memories = self.memories();
        for (on_device, run) in &self.pool.layout.runs {
            if let (false, Some(Memory::Host(buffer))) = (on_device, &memories.host) {
                buffer.as_slice_of::<f32>()[run.clone()].iter().for_each(|v| out.extend_from_slice(&v.to_le_bytes()));
                continue;
            }
            let start = out.len();
            reserve(out, run.len() * 4, "a recurrent state")?;
            out.resize(start + run.len() * 4, 0);
            // SAFETY: the range lies in the memory, which is not written while it is shared or committed.
            unsafe { self.pool.home.read(memories.device().wrapping_add(run.start).cast(), &mut out[start..]) }?;
            out[start..].as_chunks_mut::<4>().0.iter_mut().for_each(|b| *b = f32::from_ne_bytes(*b).to_le_bytes());
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
        if let (false, Some(Memory::Host(buffer))) = (self.pool.layout.logits_on_device, &self.memories().host) {
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
                let copied = unsafe { self.pool.home.read(self.memories().device().wrapping_add(range.start).cast(), row.as_mut_slice()) };
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

    fn memories(&self) -> &Memories {
        self.memories.as_ref().expect("memory is taken by drop alone")
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
    /// Written by the call after the next, where a device begins that before the next is committed. There once it was needed.
    third: Option<Arc<State>>,
    stamp: u64,
}

/// No two stamps of a process are the same.
static STAMPS: AtomicU64 = AtomicU64::new(1);

impl SequenceState {
    /// The state before any token.
    pub fn new(pool: &Arc<StatePool>, zero: &Arc<State>) -> SequenceState {
        SequenceState {
            pool: Arc::clone(pool),
            zero: Arc::clone(zero),
            committed: Arc::clone(zero),
            spare: None,
            before: None,
            third: None,
            stamp: 0,
        }
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

    /// As [`SequenceState::begin`], and makes a third state writable for a call that a device begins by itself behind this one.
    pub fn begin_two(&mut self) -> Result<()> {
        if !self.has_third() {
            self.third = Some(self.pool.take()?);
        }
        self.begin()
    }

    /// Whether nobody else holds the state that the next call begun by the device writes.
    pub fn has_third(&mut self) -> bool {
        self.third.as_mut().is_some_and(|state| Arc::get_mut(state).is_some())
    }

    /// The call that a device began behind the one that was committed just now is the one under way: it writes the third state, and what was
    /// committed before is the third from now on, for the one behind it.
    pub fn begin_third(&mut self) {
        if let (Some(spare), Some(third)) = (&mut self.spare, &mut self.third) {
            std::mem::swap(spare, third);
        }
        self.spare().refresh();
        self.before = None;
        self.renew();
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
        let len = self.pool.layout.slot_floats(false);
        let spare = self.spare.as_ref().filter(|spare| Arc::strong_count(spare) == 1);
        let write = spare.expect("begin() made the spare state this sequence's own").memories();
        let read = if further { write } else { self.committed.memories() };
        StatePointers::new(read.host(), write.host(), len).and_device(read.device().addr() as u64, write.device().addr() as u64)
    }

    /// As [`SequenceState::pointers`], with the third state on the device.
    pub fn pointers_of_three(&self) -> StatePointers {
        let third = self.third.as_ref().expect("begin_two() made a third state");
        self.pointers(false).and_next(third.memories().device().addr() as u64)
    }

    /// Where the call's row of logits goes; `None` on a device, whose run puts it behind the slots itself.
    pub fn next_logits(&mut self) -> Option<&mut [f32]> {
        let (range, there) = (self.pool.layout.logits.clone(), self.pool.layout.logits_on_device);
        match &mut self.spare().memories.as_mut().expect("memory is taken by drop alone").host {
            Some(Memory::Host(buffer)) if !there => Some(&mut buffer.as_mut_slice_of::<f32>()[range]),
            _ => None,
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
        let all = [&self.committed].into_iter().chain(&self.spare).chain(&self.third).chain(marks);
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
#[path = "state_tests.rs"]
mod tests;
