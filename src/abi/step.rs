//! Bounded work: steps within a budget of time, what they would take, what is left, and cancelling.

use std::time::Duration;

use super::guard::{guard, guard_status};
use super::handle;
use super::pointer;
use super::small::Small;
use super::status::{self, METRALE_AGAIN, METRALE_CANCELLED, METRALE_DONE, METRALE_OK, metrale_status};
use super::types::{metrale_error, metrale_model, metrale_seq, metrale_step_result, metrale_token};
use super::versioned;
use super::work::{at, together};
use crate::engine::{self, StepState, Stepped};

/// Puts `count` tokens at the end of the sequence's queue, which `metrale_step` reads. Nothing is computed yet, and other
/// calls leave the queue alone. The tokens are copied. On error nothing has changed.
/// One call at a time on a sequence.
///
/// Statuses: `METRALE_INVALID_TOKEN` with the index of the first token outside the vocabulary, `METRALE_CONTEXT_FULL` with
/// the number that still fits, `METRALE_OUT_OF_MEMORY`, `METRALE_BUSY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_seq_feed(
    seq: *mut metrale_seq,
    tokens: *const metrale_token,
    count: usize,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || {
        let object = handle::get(seq)?;
        let mut state = object.exclusive()?;
        state.sequence.feed(pointer::slice(tokens, count, "tokens")?)
    })
}

/// Works on `count` sequences of one model for about `budget_ns` nanoseconds, then returns with what is left undone; made for
/// hosts with a frame to draw. 0 is no limit. A sequence whose queue holds tokens reads them, until the queue is empty; one
/// with an empty queue produces one token, as `metrale_decode_step` would. So a prompt is read first, and the token after it
/// is produced by the next call. Results are the same bits as those of the blocking calls, however the work is cut.
///
/// `results` has a place for each sequence. Work is done in slices; each is appended to its sequences as a whole. A slice
/// that is not done in time stays with the model and is continued when the same sequences are stepped again; until then they
/// are as before it. If one of them is freed, cancelled, changed by another call or left out of the next step, the slice is
/// dropped, which costs its time and nothing else. So step all sequences of a model together, from one thread; a second
/// thread that steps gets no turn until the first returns. Blocking calls on other sequences may run meanwhile, and take
/// processor time from the step: one of their operations at a time is waited for, up to the budget.
/// One call at a time on a sequence.
///
/// Returns `METRALE_AGAIN` when the budget ran out before some sequence was done, `METRALE_DONE` when every sequence has just
/// produced a token that ends generation, else `METRALE_OK`. In these cases all results are written; one sequence that
/// cannot go on says so in its own result and does not stop the others. After an error no result is written; slices done
/// before it stay.
///
/// Statuses, with the index of the sequence: `METRALE_INVALID_ARGUMENT` (listed twice, or of another model),
/// `METRALE_INVALID_STATE` (called from a sampler's hook), `METRALE_OUT_OF_MEMORY`, `METRALE_BUSY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_step(
    seqs: *const *mut metrale_seq,
    count: usize,
    budget_ns: u64,
    results: *mut metrale_step_result,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard_status(err, || {
        let handles = pointer::slice(seqs, count, "seqs")?;
        let out = versioned::out_array(results, count)?;
        if count == 0 {
            return Ok(METRALE_OK);
        }
        together(handles, |sequences, choosers| {
            let mut stepped = Small::collect(count, "batch", |_| Ok(Stepped::default()))?;
            let budget = (budget_ns != 0).then(|| Duration::from_nanos(budget_ns));
            engine::step(sequences, choosers, budget, &mut stepped)?;
            out.set_with(|i| metrale_step_result {
                struct_size: size_of::<metrale_step_result>(),
                status: code(&stepped[i]),
                token: stepped[i].token.unwrap_or(-1),
                read: stepped[i].read as u64,
                queued: sequences[i].queued() as u64,
            });
            let mut codes = stepped.iter().map(code);
            if codes.clone().any(|code| code == METRALE_AGAIN) {
                return Ok(METRALE_AGAIN);
            }
            Ok(if codes.all(|code| code == METRALE_DONE) { METRALE_DONE } else { METRALE_OK })
        })
    })
}

fn code(stepped: &Stepped) -> metrale_status {
    match &stepped.state {
        StepState::Unfinished => METRALE_AGAIN,
        StepState::Complete => METRALE_OK,
        StepState::Ended => METRALE_DONE,
        StepState::Cancelled => METRALE_CANCELLED,
        StepState::Failed(e) => status::of(e.kind()),
    }
}

/// About how many nanoseconds a `metrale_step` without a limit would take on these sequences now, learned from earlier steps;
/// before the first, a guess. Does not wait.
/// Safe beside other calls that take a const sequence.
///
/// Statuses, with the index of the sequence: `METRALE_INVALID_ARGUMENT` (of another model), `METRALE_BUSY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_step_estimate(
    seqs: *const *mut metrale_seq,
    count: usize,
    out_ns: *mut u64,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || {
        let handles = pointer::slice(seqs, count, "seqs")?;
        let out = pointer::out(out_ns, "out_ns")?;
        let objects = Small::collect(count, "batch", |i| handle::get(handles[i]).map_err(|e| at(e, i)))?;
        let states = Small::collect(count, "batch", |i| objects[i].shared().map_err(|e| at(e, i)))?;
        let sequences = Small::collect(count, "batch", |i| Ok(&states[i].sequence))?;
        out.set(engine::step_estimate(&sequences)?.as_nanos().min(u64::MAX.into()) as u64);
        Ok(())
    })
}

/// Whether `metrale_step` has something left to do for the sequence: `METRALE_AGAIN` when tokens wait in its queue or a token
/// is under way, else `METRALE_OK`. The number that waits goes to `*out_queued`, which may be NULL. Never waits: while another
/// call changes the sequence, this is `METRALE_BUSY`. Safe beside other calls that take a const sequence.
///
/// Statuses: `METRALE_OK`, `METRALE_AGAIN`, `METRALE_BUSY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_poll(seq: *const metrale_seq, out_queued: *mut usize, err: *mut *mut metrale_error) -> metrale_status {
    guard_status(err, || {
        let out = if out_queued.is_null() { None } else { Some(pointer::out(out_queued, "out_queued")?) };
        let object = handle::get(seq)?;
        let state = object.shared()?;
        if let Some(out) = out {
            out.set(state.sequence.queued());
        }
        Ok(if state.sequence.is_busy() { METRALE_AGAIN } else { METRALE_OK })
    })
}

/// Cancels what the sequence is doing. A call that is running on it (`metrale_prefill`, `metrale_decode_step`) soon returns
/// `METRALE_CANCELLED` and leaves its sequences as before it (`metrale_decode`: as before the step that was cancelled); in `metrale_step` the sequence's own result says so. Tokens that
/// wait in the queue and a slice under way are dropped, which the next step reports. Where nothing is running, waiting or
/// under way, nothing happens: later calls are not affected. Does not wait. Any thread.
///
/// Statuses: only `METRALE_INVALID_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_cancel(seq: *mut metrale_seq, err: *mut *mut metrale_error) -> metrale_status {
    guard(err, || {
        handle::get(seq)?.cancel();
        Ok(())
    })
}

/// Cancels what every sequence of the model is doing, as `metrale_cancel` does for one. Any thread. A load is cancelled through
/// its progress callback.
///
/// Statuses: only `METRALE_INVALID_HANDLE`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_cancel_all(model: *mut metrale_model, err: *mut *mut metrale_error) -> metrale_status {
    guard(err, || {
        handle::get(model)?.engine().cancel();
        Ok(())
    })
}
