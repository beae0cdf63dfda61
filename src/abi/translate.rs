//! Models that translate: the source text a sequence reads, and beam search.

use super::guard::{guard, guard_status};
use super::handle;
use super::pointer;
use super::status::{METRALE_OK, metrale_status};
use super::types::*;
use super::versioned::{self, Versioned};
use crate::engine::{self, BeamOptions};

/// How to search. Zeros are defaults.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct metrale_beam_options {
    /// `sizeof(metrale_beam_options)` as the host was compiled.
    pub struct_size: usize,
    /// Continuations kept at each step; 0 means 5, at most 1024.
    pub beams: u64,
    /// Most tokens of a continuation; 0 means what the sequence has room for.
    pub max_tokens: u64,
    /// Power of the length that scores are divided by; more favours long continuations. 0 means 1; for none at all set
    /// `METRALE_BEAM_PLAIN_SCORE`.
    pub length_penalty: f32,
    /// `METRALE_BEAM_*`, or-ed.
    pub flags: u32,
}

/// Scores are sums of log-probabilities, whatever the length.
pub const METRALE_BEAM_PLAIN_SCORE: u32 = 1;

// SAFETY: plain numbers; every bit pattern is a value, zeros are defaults.
unsafe impl Versioned for metrale_beam_options {
    const NAME: &'static str = "metrale_beam_options";
}

/// Reads the source text of an empty sequence of a model that translates (NLLB, M2M-100): `[language, text ..., end]` as tokens. Afterwards
/// prefill the decoder's first tokens (`[end, target language]`) and step or search. The source stays until the sequence
/// is freed or given another one while it is empty. On error the sequence is as before.
/// One call at a time on a sequence.
///
/// Statuses: `METRALE_UNSUPPORTED` (the model does not translate), `METRALE_INVALID_STATE` (the sequence holds tokens),
/// `METRALE_INVALID_ARGUMENT` (no token), `METRALE_INVALID_TOKEN`, `METRALE_CONTEXT_FULL`, `METRALE_OUT_OF_MEMORY`, `METRALE_BUSY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_seq_encode(
    seq: *mut metrale_seq,
    tokens: *const metrale_token,
    count: usize,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || {
        let object = handle::get(seq)?;
        let tokens = pointer::slice(tokens, count, "tokens")?;
        object.exclusive()?.sequence.encode(tokens)
    })
}

/// The likeliest continuation of a sequence by beam search, without the token that ended it. The sequence stays as it is. `options` may be
/// NULL. Tokens go to `out` and their number to `*out_count`; when `capacity` is too small, only `*out_count` is written and
/// the status is `METRALE_MORE`. `out_score`, which may be NULL, gets the score. Safe beside other calls that take a const sequence.
///
/// Statuses: `METRALE_INVALID_STATE` (the sequence holds no token), `METRALE_INVALID_ARGUMENT`, `METRALE_CONTEXT_FULL`,
/// `METRALE_NUMERIC_FAULT`, `METRALE_OUT_OF_MEMORY`, `METRALE_UNKNOWN_OPTION`, `METRALE_BUSY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_seq_beam(
    seq: *const metrale_seq,
    options: *const metrale_beam_options,
    out: *mut metrale_token,
    capacity: usize,
    out_count: *mut usize,
    out_score: *mut f32,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard_status(err, || {
        let count = pointer::out(out_count, "out_count")?;
        let place = if out_score.is_null() { None } else { Some(pointer::out(out_score, "out_score")?) };
        let host = versioned::read(options)?;
        pointer::flags(host.flags.into(), METRALE_BEAM_PLAIN_SCORE.into(), "metrale_beam_options.flags")?;
        let object = handle::get(seq)?;
        let state = object.shared()?;
        let room = state.sequence.capacity() - state.sequence.len() + 1;
        let or = |value: u64, absent: usize, name: &str| if value == 0 { Ok(absent) } else { pointer::size(value, name) };
        let plain = host.flags & METRALE_BEAM_PLAIN_SCORE != 0;
        let search = BeamOptions {
            beams: or(host.beams, 5, "metrale_beam_options.beams")?,
            max_tokens: or(host.max_tokens, room, "metrale_beam_options.max_tokens")?,
            length_penalty: if plain {
                0.0
            } else if host.length_penalty == 0.0 {
                1.0
            } else {
                host.length_penalty
            },
            ignore_end: state.chooser.ignore_end,
        };
        let found = engine::beam(&state.sequence, &search)?;
        let (tokens, score) = found.first().map_or((&[][..], f32::NEG_INFINITY), |best| (best.tokens.as_slice(), best.score));
        let status = pointer::sized(tokens, out, capacity, count)?;
        if let (METRALE_OK, Some(place)) = (status, place) {
            place.set(score);
        }
        Ok(status)
    })
}
