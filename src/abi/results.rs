//! What a sequence expects next: logits and log-probabilities.

use super::guard::guard;
use super::handle;
use super::pointer;
use super::status::metrale_status;
use super::types::{metrale_error, metrale_seq, metrale_token};
use crate::error;
use crate::sampling;

/// The logits of the token that follows all tokens the sequence holds: `*out_len` floats at `*out_row`, one for each
/// id. The row belongs to the sequence and lives until the next call that changes or frees it, from whatever thread.
/// Safe beside other calls that take a const sequence.
///
/// Statuses: `METRALE_INVALID_STATE` when the sequence holds no token, `METRALE_BUSY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_seq_logits(
    seq: *const metrale_seq,
    out_row: *mut *const f32,
    out_len: *mut usize,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || {
        let out = pointer::out(out_row, "out_row")?;
        let len = pointer::out(out_len, "out_len")?;
        let object = handle::get(seq)?;
        let state = object.shared()?;
        let row = state.sequence.logits()?;
        out.set(row.as_ptr());
        len.set(row.len());
        Ok(())
    })
}

/// Natural logarithms of the probabilities of the token that follows all tokens the sequence holds, before any sampler
/// stage: those of the `count` given `tokens` go to `out`, and the `top_count` likeliest, likeliest first and ties by
/// id, to `top_tokens` and `top_out`. Either count may be 0, its pointers NULL. Safe beside other calls that take a
/// const sequence.
///
/// Statuses: `METRALE_INVALID_TOKEN`, `METRALE_INVALID_ARGUMENT` (`top_count` above the vocabulary),
/// `METRALE_INVALID_STATE`, `METRALE_NUMERIC_FAULT`, `METRALE_BUSY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_seq_logprobs(
    seq: *const metrale_seq,
    tokens: *const metrale_token,
    count: usize,
    out: *mut f32,
    top_count: usize,
    top_tokens: *mut metrale_token,
    top_out: *mut f32,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || {
        let object = handle::get(seq)?;
        let tokens = pointer::slice(tokens, count, "tokens")?;
        let out = pointer::out_slice(out, count, "out")?;
        let top_tokens = pointer::out_slice(top_tokens, top_count, "top_tokens")?;
        let top_out = pointer::out_slice(top_out, top_count, "top_out")?;
        let state = object.shared()?;
        let row = state.sequence.logits()?;
        let mut values = error::vec_filled(count, 0.0, "log-probabilities")?;
        let located = |e| state.sequence.located(e);
        sampling::logprob(row, tokens, &mut values).map_err(located)?;
        let top = sampling::top_logprobs(row, top_count).map_err(located)?;
        out.set(&values);
        top_tokens.set_with(|i| top[i].token);
        top_out.set_with(|i| top[i].logprob);
        Ok(())
    })
}
