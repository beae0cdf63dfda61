//! Sequences: making, freeing, looking at and shortening them.

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, TryLockError};

use super::guard::{guard, guard_value};
use super::handle;
use super::pointer;
use super::state::HostMark;
use super::status::metrale_status;
use super::types::*;
use super::versioned;
use crate::engine::{Canceller, Chooser, Sequence, SequenceOptions};
use crate::ensure;
use crate::error::{Error, Kind, Result};
use crate::sampling::Sampler;

/// A sequence behind its lock. Nobody ever waits for the lock: whoever comes second is told so.
pub(super) struct SequenceObject {
    state: RwLock<SequenceState>,
    /// The sequence's own, outside the lock: cancelling never waits.
    canceller: Arc<Canceller>,
}

/// The tokens with their cache, and how the next one is chosen.
pub(super) struct SequenceState {
    pub(super) sequence: Sequence,
    pub(super) chooser: Chooser,
    pub(super) marks: Vec<HostMark>,
    pub(super) next_mark: u64,
}

impl SequenceObject {
    /// Puts a sequence behind its lock.
    pub(super) fn new(state: SequenceState) -> SequenceObject {
        let canceller = Arc::clone(state.sequence.canceller());
        SequenceObject { state: RwLock::new(state), canceller }
    }

    /// Cancels what the sequence is doing.
    pub(super) fn cancel(&self) {
        self.canceller.cancel();
    }

    /// For calls that only look; several at once.
    pub(super) fn shared(&self) -> Result<RwLockReadGuard<'_, SequenceState>> {
        self.state.try_read().map_err(refused)
    }

    /// For calls that change it; one at a time.
    pub(super) fn exclusive(&self) -> Result<RwLockWriteGuard<'_, SequenceState>> {
        self.state.try_write().map_err(refused)
    }
}

fn refused<G>(cause: TryLockError<G>) -> Error {
    match cause {
        TryLockError::WouldBlock => Error::new(Kind::Busy, "another call is using this sequence"),
        // A defect struck in the middle of a change, so what the sequence holds is no longer known.
        TryLockError::Poisoned(PoisonError { .. }) => {
            Error::new(Kind::Internal, "an earlier call on this sequence met a defect of this library; only freeing it is left")
        }
    }
}

/// Makes an empty sequence. `options` may be NULL. On success `*out` is a handle for `metrale_seq_free`; the model
/// stays in memory while the sequence does. Any thread.
///
/// Statuses: `METRALE_OUT_OF_MEMORY`, `METRALE_LIMIT_EXCEEDED` (more context than the model was loaded for),
/// `METRALE_INVALID_ARGUMENT`, `METRALE_TOO_LARGE`, `METRALE_UNKNOWN_OPTION`,
/// `METRALE_INVALID_TOKEN` (the sampler names a token outside the vocabulary), `METRALE_INVALID_STATE` (its hook was not set).
#[unsafe(no_mangle)]
pub extern "C" fn metrale_seq_new(
    model: *mut metrale_model,
    options: *const metrale_seq_options,
    out: *mut *mut metrale_seq,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || {
        let out = pointer::out(out, "out")?;
        let model = handle::get(model)?;
        let host = versioned::read(options)?;
        pointer::flags(host.flags, METRALE_SEQ_IGNORE_END | METRALE_SEQ_LOGPROBS, "metrale_seq_options.flags")?;
        let context = pointer::size(host.context, "metrale_seq_options.context")?;
        let mut sampler = sampler(host.sampler, model.engine().info().vocab)?;
        if host.seed != 0 {
            sampler.reseed(host.seed);
        }
        let sequence = Sequence::new(model.engine(), &SequenceOptions { context })?;
        let mut chooser = Chooser::new(sampler);
        chooser.ignore_end = host.flags & METRALE_SEQ_IGNORE_END != 0;
        chooser.record_logprob = host.flags & METRALE_SEQ_LOGPROBS != 0;
        out.set(handle::insert(Arc::new(SequenceObject::new(SequenceState { sequence, chooser, marks: Vec::new(), next_mark: 1 })))?);
        Ok(())
    })
}

/// A copy of the host's sampler, or the greedy one.
fn sampler(host: *const metrale_sampler, vocab: usize) -> Result<Sampler> {
    if host.is_null() {
        return Ok(Sampler::greedy());
    }
    let sampler = handle::get(host)?.copy();
    sampler.check_vocab(vocab)?;
    ensure!(
        !sampler.wants_hook() || sampler.has_hook(),
        InvalidState,
        "the sampler has a stage METRALE_STAGE_HOOK, but metrale_sampler_set_hook was not called"
    );
    Ok(sampler)
}

/// Frees a sequence. A call that is using it on another thread finishes first, on its own. NULL and handles that are
/// none (freed before, for example) are ignored. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_seq_free(seq: *mut metrale_seq) {
    guard_value((), || handle::remove(seq).map(drop))
}

/// Fills `*out` with what the sequence is now; `out->struct_size` must be set. Safe beside other calls that take a
/// const sequence.
///
/// Statuses: `METRALE_BUSY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_seq_info(
    seq: *const metrale_seq,
    out: *mut metrale_sequence_info,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || {
        let out = versioned::out(out)?;
        let object = handle::get(seq)?;
        let state = object.shared()?;
        out.set(&metrale_sequence_info {
            struct_size: size_of::<metrale_sequence_info>(),
            length: state.sequence.len() as u64,
            capacity: state.sequence.capacity() as u64,
            last_token: state.sequence.tokens().last().copied().unwrap_or(-1),
            last_logprob: state.chooser.last_logprob.unwrap_or(f32::NAN),
        });
        Ok(())
    })
}

/// Keeps the first `length` tokens and forgets the rest, exactly: what follows is as if they had never been there.
/// The sampler's generator stays where it is, a grammar goes back with the tokens. Refused without a change where the model's state cannot go back
/// (`METRALE_UNSUPPORTED`) and when the sequence is shorter (`METRALE_INVALID_ARGUMENT`).
/// One call at a time on a sequence.
///
/// Statuses: `METRALE_BUSY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_seq_truncate(seq: *mut metrale_seq, length: usize, err: *mut *mut metrale_error) -> metrale_status {
    guard(err, || {
        let object = handle::get(seq)?;
        let mut state = object.exclusive()?;
        let held = state.sequence.len();
        if length > held {
            let text = format!("length is {length}, the sequence holds {held} tokens");
            return Err(Error::new(Kind::InvalidArgument, text).named("length").sizes(length as u64, held as u64));
        }
        state.sequence.truncate(length)?;
        if let Some(constraint) = &mut state.chooser.constraint {
            constraint.truncate(length);
        }
        state.marks.retain(|mark| mark.position() <= length);
        Ok(())
    })
}

/// Takes `count` tokens out, from index `from` on; those after them move to lower positions, which makes room at the end of a full sequence. What
/// is left keeps the values it was computed with, when the removed tokens could still be seen; its keys are turned back to their new
/// positions. So what follows is attention over the tokens that are left (StreamingLLM), not what a fresh run over them would
/// give: use a fresh sequence where that is wanted. Turning rounds once, and where the cache is not kept in
/// f32 (`kv_type`) the turned key is rounded to its type a second time. It takes about as long as copying what is moved.
///
/// The row of logits stays as it was computed, with all tokens. Where nothing follows the removed tokens, this is
/// `metrale_seq_truncate`. Marks past `from` end. A grammar keeps what was chosen under it, also of removed tokens. What the queue
/// holds stays. The sequence no longer shares its later tokens with prompts that begin alike. On error nothing has changed.
/// One call at a time on a sequence.
///
/// Statuses: `METRALE_INVALID_ARGUMENT` (the tokens are not all there), `METRALE_UNSUPPORTED` with the reason where the model's past does not
/// move: recurrent layers, latent or compressed caches, hashed tokens, absolute positions, translation.
/// `METRALE_OUT_OF_MEMORY` (pages shared with forks are copied), `METRALE_BUSY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_seq_shift(seq: *mut metrale_seq, from: usize, count: usize, err: *mut *mut metrale_error) -> metrale_status {
    guard(err, || {
        let object = handle::get(seq)?;
        let mut state = object.exclusive()?;
        let len = state.sequence.len();
        state.sequence.shift(from, count)?;
        let removed = state.sequence.len() < len;
        let cut = from + count == len;
        if let Some(constraint) = &mut state.chooser.constraint {
            match cut {
                true => constraint.truncate(from),
                false => constraint.shift(from, count),
            }
        }
        if removed {
            state.marks.retain(|mark| mark.position() <= from);
        }
        Ok(())
    })
}

/// Changes how the sequence's next tokens are chosen, starting from the sampler's seed. NULL is greedy. The sampler is
/// copied and may be freed afterwards.
/// One call at a time on a sequence.
///
/// Statuses: `METRALE_INVALID_TOKEN` (the sampler names a token outside the vocabulary), `METRALE_INVALID_STATE` (its hook was not
/// set), `METRALE_BUSY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_seq_sampling(
    seq: *mut metrale_seq,
    sampler: *const metrale_sampler,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || {
        let object = handle::get(seq)?;
        let mut state = object.exclusive()?;
        state.chooser.sampler = self::sampler(sampler, state.sequence.engine().info().vocab)?;
        Ok(())
    })
}
