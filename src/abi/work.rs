//! Work: reading a prompt, and producing tokens.

use std::sync::Arc;

use super::guard::{guard, guard_status};
use super::handle;
use super::pointer;
use super::sequence::{SequenceObject, SequenceState};
use super::small::Small;
use super::status::{METRALE_DONE, METRALE_OK, metrale_status};
use super::types::{metrale_error, metrale_seq, metrale_token};
use crate::engine::{self, Chooser, Sequence};
use crate::error::{Error, Kind, Result};

/// Appends `count` tokens to the sequence and computes what may follow them. Blocks until all are done; may be called
/// again to append more. No token is no change. On error the sequence is as before.
/// One call at a time on a sequence.
///
/// Statuses: `METRALE_INVALID_TOKEN` with the index of the first token outside the vocabulary,
/// `METRALE_CONTEXT_FULL` with the number that still fits, `METRALE_OUT_OF_MEMORY`, `METRALE_NUMERIC_FAULT`,
/// `METRALE_BUSY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_prefill(
    seq: *mut metrale_seq,
    tokens: *const metrale_token,
    count: usize,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || {
        let object = handle::get(seq)?;
        let mut state = object.exclusive()?;
        let tokens = pointer::slice(tokens, count, "tokens")?;
        match tokens {
            [] => Ok(()),
            _ => state.sequence.prefill(tokens),
        }
    })
}

/// One token for each of `count` sequences of one model, computed together. For each sequence a token is chosen from
/// the row of logits after the tokens it holds, appended to it and written to the same place of `out_tokens`; the row
/// after it is then computed. A sequence may be listed once. With `count` 0 nothing happens.
/// One call at a time on a sequence.
///
/// Returns `METRALE_DONE` when every sequence has just produced a token that ends generation, else `METRALE_OK`; in
/// both cases all tokens are written, and stepping on is allowed. On error every sequence (tokens, sampler) is as
/// before and nothing is written. In steady state a step of up to 16 sequences allocates nothing here.
///
/// Statuses, with the index of the sequence: `METRALE_INVALID_STATE` (it holds no token yet), `METRALE_CONTEXT_FULL`,
/// `METRALE_NUMERIC_FAULT`, `METRALE_NO_VALID_TOKEN`, `METRALE_GRAMMAR_DONE`, `METRALE_INVALID_ARGUMENT` (listed twice, or of another model),
/// `METRALE_OUT_OF_MEMORY`, `METRALE_BUSY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_decode_step(
    seqs: *const *mut metrale_seq,
    count: usize,
    out_tokens: *mut metrale_token,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard_status(err, || {
        let handles = pointer::slice(seqs, count, "seqs")?;
        let out = pointer::out_slice(out_tokens, count, "out_tokens")?;
        if count == 0 {
            return Ok(METRALE_OK);
        }
        together(handles, |sequences, choosers| {
            let mut tokens = Small::collect(count, "batch", |_| Ok(-1))?;
            let done = engine::decode_step(sequences, choosers, &mut tokens)?;
            out.set(&tokens);
            Ok(if done { METRALE_DONE } else { METRALE_OK })
        })
    })
}

/// Up to `steps` tokens for each of `count` sequences of one model: what as many calls of `metrale_decode_step` would do, with the same
/// tokens and the same bits. It ends behind the first step in which some sequence has produced a token that ends generation, so that
/// the sequence can be taken out. `*out_steps` is the number of steps done; the token of step `i` for sequence `j` is at
/// `out_tokens[i * count + j]`, which has places for all `steps`. On a GPU greedy sequences are computed faster this way than step by step,
/// since the device begins a step as soon as it has found the tokens of the one before. With `count` or `steps` 0 nothing is done.
/// A sequence may be listed once. One call at a time on a sequence; `metrale_cancel` ends the call between two steps at the latest.
///
/// Returns `METRALE_DONE` when every sequence has produced a token that ends generation in the last step, else `METRALE_OK`.
/// On error the steps before the one that failed stay: if there are any, they are counted in `*out_steps` and their tokens written; if not, nothing
/// is written, so set `*out_steps` to 0 before. The step that failed has changed nothing. The call allocates room for its tokens
/// when they are more than 16.
///
/// Statuses, with the index of the sequence: those of `metrale_decode_step`, and `METRALE_TOO_LARGE` (tokens that no memory could hold),
/// `METRALE_CANCELLED`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_decode(
    seqs: *const *mut metrale_seq,
    count: usize,
    steps: usize,
    out_tokens: *mut metrale_token,
    out_steps: *mut usize,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard_status(err, || {
        let handles = pointer::slice(seqs, count, "seqs")?;
        let places = count.checked_mul(steps).ok_or_else(|| too_large(count, steps))?;
        let out = pointer::out_slice(out_tokens, places, "out_tokens")?;
        let out_steps = pointer::out(out_steps, "out_steps")?;
        if places == 0 {
            out_steps.set(0);
            return Ok(METRALE_OK);
        }
        together(handles, |sequences, choosers| {
            // One more than fit shows that they are full, as it would step by step; more are not needed however many are asked for.
            let room = sequences.iter().map(|sequence| sequence.capacity() - sequence.len()).min().unwrap_or(0);
            let steps = steps.min(room.saturating_add(1));
            let mut tokens = Small::collect(steps * count, "tokens", |_| Ok(-1))?;
            let (done, ended) = engine::decode(sequences, choosers, steps, &mut tokens);
            if done > 0 || ended.is_ok() {
                out.set(&tokens[..done * count]);
                out_steps.set(done);
            }
            Ok(if ended? { METRALE_DONE } else { METRALE_OK })
        })
    })
}

fn too_large(count: usize, steps: usize) -> Error {
    Error::new(Kind::TooLarge, format!("out_tokens: {steps} steps of {count} tokens cannot exist"))
}

/// Calls `run` with the sequences behind the handles and what chooses their tokens, which are this call's alone until it returns.
pub(super) fn together<R>(
    handles: &[*mut metrale_seq],
    run: impl for<'a> FnOnce(&mut [&'a mut Sequence], &mut [&'a mut Chooser]) -> Result<R>,
) -> Result<R> {
    let count = handles.len();
    let objects = Small::collect(count, "batch", |i| handle::get(handles[i]).map_err(|e| at(e, i)))?;
    let mut states = Small::collect(count, "batch", |i| objects[i].exclusive().map_err(|e| at(twice(e, &objects, i), i)))?;
    let mut parts = states.iter_mut().map(|state| {
        let SequenceState { sequence, chooser, .. } = &mut **state;
        (Some(sequence), Some(chooser))
    });
    let mut parts = Small::collect(count, "batch", |_| parts.next().ok_or_else(short))?;
    let mut sequences = Small::collect(count, "batch", |i| parts[i].0.take().ok_or_else(short))?;
    let mut choosers = Small::collect(count, "batch", |i| parts[i].1.take().ok_or_else(short))?;
    run(&mut sequences, &mut choosers)
}

/// Names the sequence an error is about.
pub(super) fn at(e: Error, index: usize) -> Error {
    e.context(format!("sequence {index}")).at(index as u64)
}

/// A sequence listed twice is busy with itself, which needs other words.
fn twice(e: Error, objects: &[Arc<SequenceObject>], index: usize) -> Error {
    match objects[..index].iter().position(|other| Arc::ptr_eq(other, &objects[index])) {
        Some(first) => Error::new(Kind::InvalidArgument, format!("it is listed before, at {first}")),
        None => e,
    }
}

fn short() -> Error {
    Error::new(Kind::Internal, "a batch became shorter while it was taken apart")
}
