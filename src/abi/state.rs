//! State of a sequence: forks, marks to come back to, and bytes that outlive the process.
//!
//! All of it is exact: keys and values, recurrent state, logits, and the generator that chooses tokens.

use std::sync::Arc;

use super::guard::{guard, guard_status};
use super::handle;
use super::pointer;
use super::sequence::{SequenceObject, SequenceState};
use super::status::{METRALE_MORE, metrale_status};
use super::types::*;
use crate::engine::{Chooser, Mark, SavedChooser, Snapshot};
use crate::error::{Error, Kind, Result};

/// A mark of the host's: its number, the engine's mark, and the chooser as it was.
pub(super) struct HostMark {
    number: u64,
    mark: Mark,
    chooser: Chooser,
}

impl HostMark {
    /// Tokens the sequence held.
    pub(super) fn position(&self) -> usize {
        self.mark.position()
    }
}

/// Makes a second sequence that holds the same tokens and will choose the same ones. Memory is shared page by page until one of
/// the two writes, so a fork costs a list of pages and one row of logits; `metrale_seq_stats` says how many bytes are shared. Marks stay with the original. `*out` is a handle for
/// `metrale_seq_free`. Safe beside other calls that take a const sequence.
///
/// Statuses: `METRALE_OUT_OF_MEMORY`, `METRALE_BUSY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_seq_fork(seq: *const metrale_seq, out: *mut *mut metrale_seq, err: *mut *mut metrale_error) -> metrale_status {
    guard(err, || {
        let out = pointer::out(out, "out")?;
        let object = handle::get(seq)?;
        let state = object.shared()?;
        let fork = SequenceState { sequence: state.sequence.fork()?, chooser: state.chooser.fork(), marks: Vec::new(), next_mark: 1 };
        out.set(handle::insert(Arc::new(SequenceObject::new(fork)))?);
        Ok(())
    })
}

/// Marks this point of the sequence. `*out_mark` is a number, never 0, for `metrale_seq_rollback` and `metrale_seq_commit`. A mark lasts
/// until it is committed or the sequence goes back to before it; meanwhile it keeps one recurrent state, where the model has one.
/// One call at a time on a sequence.
///
/// Statuses: `METRALE_OUT_OF_MEMORY`, `METRALE_BUSY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_seq_mark(seq: *mut metrale_seq, out_mark: *mut u64, err: *mut *mut metrale_error) -> metrale_status {
    guard(err, || {
        let out = pointer::out(out_mark, "out_mark")?;
        let object = handle::get(seq)?;
        let mut state = object.exclusive()?;
        let state = &mut *state;
        crate::error::reserve(&mut state.marks, 1, "a sequence's list of marks")?;
        let mark = HostMark { number: state.next_mark, mark: state.sequence.mark()?, chooser: state.chooser.fork() };
        state.next_mark += 1;
        out.set(mark.number);
        state.marks.push(mark);
        Ok(())
    })
}

fn find(state: &SequenceState, mark: u64) -> Result<usize> {
    state.marks.iter().position(|m| m.number == mark).ok_or_else(|| {
        let text = format!("mark {mark} is not this sequence's, was committed, or the sequence went back to before it");
        Error::new(Kind::InvalidArgument, text).named("mark")
    })
}

/// Goes back to a mark, as often as wanted: tokens, state, logits, grammar and the sampler's generator are bit for bit what they were. Later
/// marks end; this one stays.
/// One call at a time on a sequence.
///
/// Statuses: `METRALE_INVALID_ARGUMENT` (no such mark), `METRALE_BUSY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_seq_rollback(seq: *mut metrale_seq, mark: u64, err: *mut *mut metrale_error) -> metrale_status {
    guard(err, || {
        let object = handle::get(seq)?;
        let mut state = object.exclusive()?;
        let index = find(&state, mark)?;
        let engine_mark = state.marks[index].mark;
        state.sequence.rollback(engine_mark)?;
        state.chooser = state.marks[index].chooser.fork();
        state.marks.truncate(index + 1);
        Ok(())
    })
}

/// Keeps what came since a mark and gives the mark up.
/// One call at a time on a sequence.
///
/// Statuses: `METRALE_INVALID_ARGUMENT` (no such mark), `METRALE_BUSY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_seq_commit(seq: *mut metrale_seq, mark: u64, err: *mut *mut metrale_error) -> metrale_status {
    guard(err, || {
        let object = handle::get(seq)?;
        let mut state = object.exclusive()?;
        let index = find(&state, mark)?;
        let engine_mark = state.marks[index].mark;
        state.sequence.release(engine_mark)?;
        state.marks.remove(index);
        Ok(())
    })
}

/// Writes to `*out_count` how many of `tokens` the sequence begins with: what a prompt need not be computed for again. Safe beside other
/// calls that take a const sequence.
///
/// Statuses: `METRALE_BUSY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_seq_match(
    seq: *const metrale_seq,
    tokens: *const metrale_token,
    count: usize,
    out_count: *mut usize,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || {
        let out = pointer::out(out_count, "out_count")?;
        let object = handle::get(seq)?;
        let tokens = pointer::slice(tokens, count, "tokens")?;
        let state = object.shared()?;
        out.set(state.sequence.tokens().iter().zip(tokens).take_while(|(a, b)| a == b).count());
        Ok(())
    })
}

/// Writes the sequence's state as bytes: tokens, keys and values, recurrent state, logits, the sampler's state (generator, mirostat)
/// and how far its grammar was followed. They carry a version, fingerprints of the model, of how it was loaded and of the grammar,
/// and checksums. `*out_len` gets the size; with too small a `capacity` the status is `METRALE_MORE` and nothing else is written.
/// Marks are not saved, nor are the sampler's stages and the grammar itself, which the host sets on the sequence that it restores.
/// Safe beside other calls that take a const sequence.
///
/// Statuses: `METRALE_MORE`, `METRALE_OUT_OF_MEMORY`, `METRALE_BUSY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_seq_save(
    seq: *const metrale_seq,
    out: *mut u8,
    capacity: usize,
    out_len: *mut usize,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard_status(err, || {
        let len = pointer::out(out_len, "out_len")?;
        let object = handle::get(seq)?;
        let state = object.shared()?;
        let snapshot = state.sequence.snapshot()?;
        let needed = state.chooser.byte_len() + snapshot.byte_len();
        if capacity < needed {
            len.set(needed);
            return Ok(METRALE_MORE);
        }
        let mut bytes = crate::error::vec_with_capacity(needed, "a saved sequence")?;
        state.chooser.write_bytes(&mut bytes);
        bytes.extend_from_slice(&snapshot.to_bytes()?);
        pointer::sized(&bytes, out, capacity, len)
    })
}

/// Becomes what `metrale_seq_save` wrote, from a sequence of the same model loaded the same way. The stages of the sampler stay, its
/// state goes to where it was. Where the saved sequence followed a grammar, this one must have the same grammar set (compiled from
/// the same text; how far it was followed does not matter) and goes on in it from where it was saved; else a grammar in force is
/// lifted. Marks end. All or nothing: on error the sequence is as before.
/// One call at a time on a sequence.
///
/// Statuses: `METRALE_CORRUPT_FILE` (cut short or changed), `METRALE_VERSION_MISMATCH` (written by another version of the library),
/// `METRALE_MISMATCH` (another model or other load options, with both fingerprints in the error; or another grammar), `METRALE_CONTEXT_FULL` (more tokens than this sequence may hold), `METRALE_LIMIT_EXCEEDED` (the way through the grammar
/// takes more work than is allowed), `METRALE_OUT_OF_MEMORY`, `METRALE_BUSY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_seq_restore(seq: *mut metrale_seq, bytes: *const u8, len: usize, err: *mut *mut metrale_error) -> metrale_status {
    guard(err, || {
        let object = handle::get(seq)?;
        let bytes = pointer::slice(bytes, len, "bytes")?;
        let mut state = object.exclusive()?;
        let (saved, rest) = SavedChooser::from_bytes(bytes)?;
        let snapshot = Snapshot::from_bytes(state.sequence.engine(), rest)?;
        let constraint = saved.constraint(state.chooser.constraint.as_ref(), snapshot.tokens())?;
        state.sequence.restore(&snapshot)?;
        state.chooser.resume(&saved, constraint);
        state.marks.clear();
        Ok(())
    })
}
