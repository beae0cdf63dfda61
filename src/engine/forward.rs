//! Running tokens through the model: prompts in slices, one token for each of many sequences together.

use super::cancel::Canceller;
use super::counters::Counters;
use super::load::Engine;
use super::runner::{Runner, Work};
use super::sequence::Sequence;
use crate::backend::cpu::pause::Control;
use crate::bail;
use crate::circuit::Outcome;
use crate::ensure;
use crate::error::{Error, Kind, Result};
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::Instant;

/// Appends one token to each sequence and computes their rows together. On error all sequences are as before.
pub fn forward(sequences: &mut [&mut Sequence], tokens: &[i32]) -> Result<()> {
    ensure!(sequences.len() == tokens.len(), InvalidArgument, "{} sequences and {} tokens", sequences.len(), tokens.len());
    let Some(first) = sequences.first() else { return Ok(()) };
    let engine = Arc::clone(first.engine());
    if let Some(index) = sequences.iter().position(|s| !Arc::ptr_eq(s.engine(), &engine)) {
        return Err(
            Error::new(Kind::InvalidArgument, format!("sequence {index} belongs to another model than sequence 0")).at(index as u64)
        );
    }
    let mut parts: Vec<(&mut Sequence, &[i32])> = sequences.iter_mut().map(|s| &mut **s).zip(tokens.chunks(1)).collect();
    let cancels: Vec<(Arc<Canceller>, u64)> = parts.iter().map(|(s, _)| (Arc::clone(s.canceller()), s.canceller().count())).collect();
    append_unless(&engine, &mut parts, true, &|| cancels.iter().any(|(canceller, count)| canceller.count() != *count))
}

/// Appends tokens, chosen or read, to sequences of one engine, unless that is cancelled; all or nothing.
pub(super) fn append_unless(
    engine: &Engine,
    parts: &mut [(&mut Sequence, &[i32])],
    chosen: bool,
    cancelled: &dyn Fn() -> bool,
) -> Result<()> {
    for (sequence, tokens) in parts.iter() {
        check(engine, sequence, tokens, 0)?;
    }
    let started = Instant::now();
    // Until the state is known to be sound again, nobody may share it.
    let before: Vec<(usize, usize, Counters)> = parts.iter_mut().map(|(s, _)| (s.len(), s.set_exact(0), s.counters)).collect();
    let done = run(engine, parts, cancelled);
    let spent = started.elapsed();
    for ((sequence, tokens), (before, exact, counters)) in parts.iter_mut().zip(before) {
        match &done {
            Ok(()) if sequence.len() > before => {
                sequence.state.commit(Some(before));
                sequence.counters.note(tokens.len(), chosen, spent);
            }
            Ok(()) => {}
            Err(e) => {
                sequence.drop_to(before);
                let cancelled = counters.cancelled + u64::from(e.kind() == Kind::Cancelled);
                sequence.counters = Counters { cancelled, ..counters };
            }
        }
        sequence.set_exact(exact);
    }
    done
}

/// Computes the row after token `len` again: same position and earlier keys, so the same bits as when it was new. For models
/// without recurrent slots. On error the sequence is as before; the keys written are the ones that were there.
pub(super) fn recompute(engine: &Engine, sequence: &mut Sequence, len: usize) -> Result<()> {
    let position = len - 1;
    sequence.reserve_between(position, len)?;
    sequence.state.begin()?;
    let token = [sequence.tokens[position]];
    let work = Work { tokens: &token, position, source: sequence.source(), pages: sequence.kv(), state: sequence.state.pointers(false) };
    let mut runner = engine.runner()?;
    runner.begin();
    while runner.run(std::slice::from_ref(&work), engine, Control::none())? == Outcome::Suspended {}
    runner.logits(0, &mut sequence.state);
    sequence.state.commit(None);
    Ok(())
}

/// Runs one batch to its end, unless it is cancelled; the runner holds its logits.
fn finish<'a>(engine: &'a Engine, work: &[Work<'_>], cancelled: &dyn Fn() -> bool) -> Result<MutexGuard<'a, Runner>> {
    until_done(engine, cancelled, |runner, control| runner.run(work, engine, control))
}

/// Calls `run` until what it runs is done, unless that is cancelled.
pub(super) fn until_done<'a>(
    engine: &'a Engine,
    cancelled: &dyn Fn() -> bool,
    mut run: impl FnMut(&mut Runner, Control<'_>) -> Result<Outcome>,
) -> Result<MutexGuard<'a, Runner>> {
    let rings = engine.alarm().rings();
    let Some(mut runner) = engine.runner_unless(cancelled)? else { bail!(Cancelled, "the call was cancelled") };
    runner.begin();
    loop {
        // Read before the look: a cancel after it is a ring that the run notices.
        let seen = rings.load(Ordering::SeqCst);
        ensure!(!cancelled(), Cancelled, "the call was cancelled");
        if run(&mut runner, Control::new(rings, seen, None))? == Outcome::Done {
            return Ok(runner);
        }
    }
}

/// Whether tokens could be appended after `waiting` others.
pub(super) fn check(engine: &Engine, sequence: &Sequence, tokens: &[i32], waiting: usize) -> Result<()> {
    let room = (sequence.capacity() - sequence.len()).saturating_sub(waiting);
    if tokens.len() > room {
        let text = format!(
            "{} tokens do not fit: the sequence holds {} of {}, {room} more fit",
            tokens.len(),
            sequence.len(),
            sequence.capacity()
        );
        return Err(Error::new(Kind::ContextFull, text).sizes(tokens.len() as u64, room as u64));
    }
    if engine.has_encoder() && sequence.source() == 0 && !tokens.is_empty() {
        bail!(InvalidState, "the model translates a source, and the sequence has read none yet; encode one first");
    }
    engine.check_tokens(tokens)
}

impl Engine {
    /// Checks that tokens are in the vocabulary.
    pub(super) fn check_tokens(&self, tokens: &[i32]) -> Result<()> {
        let vocab = self.info().vocab;
        if let Some(index) = tokens.iter().position(|&t| t < 0 || t as usize >= vocab) {
            let text = format!("token {} at index {index} is outside the vocabulary of {vocab}", tokens[index]);
            return Err(Error::new(Kind::InvalidToken, text).at(index as u64));
        }
        Ok(())
    }
}

/// Runs everything; sequences grow as slices succeed.
fn run(engine: &Engine, parts: &mut [(&mut Sequence, &[i32])], cancelled: &dyn Fn() -> bool) -> Result<()> {
    for group in parts.chunks_mut(engine.shapes().most_sequences()) {
        let mut done = vec![0usize; group.len()];
        loop {
            // Each sequence gets its next slice; slices of one batch share the rows there are.
            let mut rows = engine.shapes().most_rows();
            let mut slices: Vec<(usize, usize)> = Vec::with_capacity(group.len());
            for (index, (sequence, tokens)) in group.iter_mut().enumerate() {
                let count = (tokens.len() - done[index]).min(rows);
                if count > 0 {
                    sequence.reserve(count)?;
                    if done[index] == 0 {
                        sequence.state.begin()?;
                    }
                    rows -= count;
                    slices.push((index, count));
                }
            }
            if slices.is_empty() {
                break;
            }
            let work: Vec<Work<'_>> = slices
                .iter()
                .map(|&(index, count)| {
                    let (sequence, tokens) = &mut group[index];
                    let tokens: &[i32] = tokens;
                    let state = sequence.state.pointers(done[index] > 0);
                    let (position, source) = (sequence.len(), sequence.source());
                    Work { tokens: &tokens[done[index]..done[index] + count], position, source, pages: sequence.kv(), state }
                })
                .collect();
            let mut runner = finish(engine, &work, cancelled)?;
            for (row, &(index, count)) in slices.iter().enumerate() {
                let (sequence, tokens) = &mut group[index];
                let piece = &tokens[done[index]..done[index] + count];
                sequence.tokens.extend_from_slice(piece);
                sequence.counters.passes += 1;
                done[index] += count;
                if done[index] == tokens.len() {
                    runner.logits(row, &mut sequence.state);
                }
            }
        }
    }
    Ok(())
}
