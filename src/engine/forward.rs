//! Running tokens through the model: prompts in slices, one token for each of many sequences together.

use super::counters::Counters;
use super::load::Engine;
use super::runner::{MOST_SEQUENCES, Runner, Work};
use super::sequence::{Before, Sequence};
use crate::backend::cpu::pause::Control;
use crate::bail;
use crate::circuit::Outcome;
use crate::ensure;
use crate::error::{Error, Kind, Result};
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

/// Appends one token to each sequence and computes their rows together. On error all sequences are as before.
pub fn forward(sequences: &mut [&mut Sequence], tokens: &[i32]) -> Result<()> {
    sequences.iter_mut().for_each(|s| s.begin_call());
    append_for_all(sequences, tokens, false)
}

/// As [`forward`], in the call that began on the sequences; with `draws`, tokens will be drawn from the rows, so that a device hands out their
/// highest logits.
pub(super) fn append_for_all(sequences: &mut [&mut Sequence], tokens: &[i32], draws: bool) -> Result<()> {
    ensure!(sequences.len() == tokens.len(), InvalidArgument, "{} sequences and {} tokens", sequences.len(), tokens.len());
    let Some(first) = sequences.first() else { return Ok(()) };
    let engine = Arc::clone(first.engine());
    if let Some(index) = sequences.iter().position(|s| !Arc::ptr_eq(s.engine(), &engine)) {
        return Err(
            Error::new(Kind::InvalidArgument, format!("sequence {index} belongs to another model than sequence 0")).at(index as u64)
        );
    }
    append_for(&engine, sequences, tokens, true, draws)
}

/// Appends tokens, chosen or read, to sequences of one engine, the same number to each, unless the call that began on one of them
/// ([`Sequence::begin_call`]) is cancelled; all or nothing.
pub(super) fn append(engine: &Engine, sequences: &mut [&mut Sequence], tokens: &[i32], chosen: bool) -> Result<()> {
    append_for(engine, sequences, tokens, chosen, false)
}

fn append_for(engine: &Engine, sequences: &mut [&mut Sequence], tokens: &[i32], chosen: bool, draws: bool) -> Result<()> {
    let each = tokens.len() / sequences.len().max(1);
    if each == 0 {
        return Ok(());
    }
    for (sequence, tokens) in sequences.iter().zip(tokens.chunks(each)) {
        check(engine, sequence, tokens, 0)?;
    }
    let started = Instant::now();
    sequences.iter_mut().for_each(|sequence| sequence.note_before());
    let done = run(engine, sequences, tokens, each, draws);
    conclude(sequences, &done, each, chosen, started.elapsed());
    done
}

/// Ends what began with [`Sequence::note_before`]: the tokens are the sequences', or these are as before.
pub(super) fn conclude(sequences: &mut [&mut Sequence], done: &Result<()>, each: usize, chosen: bool, spent: Duration) {
    for sequence in sequences {
        let Before { len, exact, counters, .. } = sequence.before;
        match done {
            Ok(()) => {
                sequence.state.commit(Some(len));
                sequence.counters.note(each, chosen, spent);
            }
            Err(e) => {
                sequence.drop_to(len);
                let cancelled = counters.cancelled + u64::from(e.kind() == Kind::Cancelled);
                sequence.counters = Counters { cancelled, ..counters };
            }
        }
        sequence.set_exact(exact);
    }
}

/// Computes the row after token `len` again: same position and earlier keys, so the same bits as when it was new. For models
/// without recurrent slots. On error the sequence is as before; the keys written are the ones that were there.
pub(super) fn recompute(engine: &Engine, sequence: &mut Sequence, len: usize) -> Result<()> {
    let position = len - 1;
    sequence.reserve_between(position, len)?;
    sequence.state.begin()?;
    let token = [sequence.tokens[position]];
    let mut runner = engine.runner()?;
    runner.begin();
    let (source, pages, state) = (sequence.source(), sequence.pages.for_run(), sequence.state.pointers(false));
    runner.set([Work { tokens: &token, position, source, pages, stamp: sequence.pages.stamp(), state }]);
    while runner.run(engine, Control::none())? == Outcome::Suspended {}
    runner.logits(0, &mut sequence.state);
    sequence.state.commit(None);
    Ok(())
}

/// The runner of blocking calls, for a batch that begins, unless the call is cancelled while others have it.
pub(super) fn runner<'a>(engine: &'a Engine, cancelled: &dyn Fn() -> bool) -> Result<MutexGuard<'a, Runner>> {
    let Some(mut runner) = engine.runner_unless(cancelled)? else { bail!(Cancelled, "the call was cancelled") };
    runner.begin();
    Ok(runner)
}

/// Calls `run` until what it runs is done, unless that is cancelled.
pub(super) fn until_done(engine: &Engine, cancelled: &dyn Fn() -> bool, mut run: impl FnMut(Control<'_>) -> Result<Outcome>) -> Result<()> {
    let rings = engine.alarm().rings();
    loop {
        // Read before the look: a cancel after it is a ring that the run notices.
        let seen = rings.load(Ordering::SeqCst);
        ensure!(!cancelled(), Cancelled, "the call was cancelled");
        if run(Control::new(rings, seen, None))? == Outcome::Done {
            return Ok(());
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

/// Appends `each` tokens to every sequence; sequences grow as slices succeed. Allocates nothing here.
fn run(engine: &Engine, sequences: &mut [&mut Sequence], tokens: &[i32], each: usize, draws: bool) -> Result<()> {
    let (most_sequences, most_rows) = (engine.shapes().most_sequences(), engine.shapes().most_rows());
    for (group, tokens) in sequences.chunks_mut(most_sequences).zip(tokens.chunks(most_sequences.saturating_mul(each))) {
        let mut done = [0usize; MOST_SEQUENCES];
        loop {
            // Each sequence gets its next slice; slices of one batch share the rows there are.
            let mut rows = most_rows;
            let mut counts = [0usize; MOST_SEQUENCES];
            for (index, sequence) in group.iter_mut().enumerate() {
                let count = (each - done[index]).min(rows);
                if count > 0 {
                    sequence.reserve(count)?;
                    if done[index] == 0 {
                        sequence.state.begin()?;
                    }
                    rows -= count;
                    counts[index] = count;
                }
            }
            if rows == most_rows {
                break;
            }
            let piece = |index: usize| &tokens[index * each + done[index]..][..counts[index]];
            let cancelled = || group.iter().any(|sequence| sequence.is_call_cancelled());
            let mut runner = runner(engine, &cancelled)?;
            runner.expect_draws(draws);
            runner.set(group.iter().enumerate().filter(|(index, _)| counts[*index] > 0).map(|(index, sequence)| Work {
                tokens: piece(index),
                position: sequence.len(),
                source: sequence.source(),
                pages: sequence.pages.for_run(),
                stamp: sequence.pages.stamp(),
                state: sequence.state.pointers(done[index] > 0),
            }));
            until_done(engine, &cancelled, |control| runner.run(engine, control))?;
            for (row, index) in (0..group.len()).filter(|index| counts[*index] > 0).enumerate() {
                let sequence = &mut group[index];
                sequence.tokens.extend_from_slice(piece(index));
                sequence.counters.passes += 1;
                if done[index] + counts[index] == each {
                    runner.logits(row, &mut sequence.state);
                }
            }
            done.iter_mut().zip(counts).for_each(|(done, count)| *done += count);
        }
    }
    Ok(())
}
