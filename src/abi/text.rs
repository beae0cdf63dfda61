//! Text streams: tokens in, text out that can be shown at once.

use std::sync::{Arc, Mutex, MutexGuard, TryLockError};

use super::guard::{guard, guard_status, guard_value};
use super::handle;
use super::pointer;
use super::status::{METRALE_DONE, METRALE_OK, metrale_status};
use super::types::*;
use super::versioned;
use crate::error::{Error, Kind, Result};
use crate::text::{StreamOptions, TextPiece, TextStream};

/// A stream and the piece it handed out last.
pub(super) struct TextObject {
    state: Mutex<TextState>,
}

struct TextState {
    stream: TextStream,
    last: TextPiece,
}

impl TextObject {
    fn exclusive(&self) -> Result<MutexGuard<'_, TextState>> {
        self.state.try_lock().map_err(|cause| match cause {
            TryLockError::WouldBlock => Error::new(Kind::Busy, "another call is using this text stream"),
            TryLockError::Poisoned(_) => {
                Error::new(Kind::Internal, "an earlier call on this text stream met a defect of this library; only freeing it is left")
            }
        })
    }
}

/// Makes a text stream: it takes the tokens of one sequence and gives text that is whole UTF-8 at every moment, and
/// ends before any of the stop strings. `options` may be NULL. On success `*out` is a handle for `metrale_text_free`.
/// The model's tokenizer stays in memory while the stream does. Any thread.
///
/// Statuses: `METRALE_INVALID_ARGUMENT` (an empty stop string, or one that is not UTF-8), `METRALE_UNKNOWN_OPTION`,
/// `METRALE_NOT_FOUND` when the model comes without a tokenizer.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_text_new(
    model: *const metrale_model,
    options: *const metrale_text_options,
    out: *mut *mut metrale_text,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || {
        let out = pointer::out(out, "out")?;
        let model = handle::get(model)?;
        let host = versioned::read(options)?;
        pointer::flags(host.flags, METRALE_TEXT_SPECIALS | METRALE_TEXT_RAW_BYTES, "metrale_text_options.flags")?;
        let stops = pointer::slice(host.stops, host.stops_len, "metrale_text_options.stops")?;
        // `split` of nothing gives one empty string; no stop string is meant.
        let stops: Vec<&[u8]> = if stops.is_empty() { Vec::new() } else { stops.split(|&b| b == 0).collect() };
        let options =
            StreamOptions { raw_bytes: host.flags & METRALE_TEXT_RAW_BYTES != 0, specials: host.flags & METRALE_TEXT_SPECIALS != 0 };
        let stream = TextStream::new(Arc::clone(model.engine().tokenizer()?), &stops, options)?;
        out.set(handle::insert(Arc::new(TextObject { state: Mutex::new(TextState { stream, last: TextPiece::default() }) }))?);
        Ok(())
    })
}

/// Takes one token and fills `*out` (whose `struct_size` must be set) with the text that became certain, which may be
/// none. Returns `METRALE_DONE` when a stop string was reached, else `METRALE_OK`. The bytes live until the next call
/// on this stream or its end. One call at a time.
///
/// Statuses: `METRALE_INVALID_TOKEN`, `METRALE_INVALID_STATE` (a stop string was reached before; reset the stream),
/// `METRALE_BUSY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_text_push(
    text: *mut metrale_text,
    token: metrale_token,
    out: *mut metrale_text_piece,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard_status(err, || {
        let out = versioned::out(out)?;
        let object = handle::get(text)?;
        let mut state = object.exclusive()?;
        let piece = state.stream.push(token)?;
        state.last = piece;
        Ok(hand_out(&state.last, out))
    })
}

/// Gives out what is held back: the beginning of a character (as U+FFFD) or of a stop string. Call it when the
/// sequence ends; the stream can go on afterwards, as if the text began there. Everything else is as in
/// `metrale_text_push`.
/// One call at a time on a stream.
///
/// Statuses: `METRALE_INVALID_STATE`, `METRALE_BUSY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_text_flush(
    text: *mut metrale_text,
    out: *mut metrale_text_piece,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard_status(err, || {
        let out = versioned::out(out)?;
        let object = handle::get(text)?;
        let mut state = object.exclusive()?;
        let piece = state.stream.flush();
        state.last = piece;
        Ok(hand_out(&state.last, out))
    })
}

/// Brings the stream back to its beginning; what was held back is dropped. One call at a time.
///
/// Statuses: `METRALE_BUSY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_text_reset(text: *mut metrale_text, err: *mut *mut metrale_error) -> metrale_status {
    guard(err, || {
        let object = handle::get(text)?;
        let mut state = object.exclusive()?;
        state.stream.reset();
        state.last = TextPiece::default();
        Ok(())
    })
}

/// Frees a text stream and ends the life of its last piece. NULL and handles that are none are ignored. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_text_free(text: *mut metrale_text) {
    guard_value((), || handle::remove(text).map(drop))
}

fn hand_out(piece: &TextPiece, out: versioned::OutStruct<metrale_text_piece>) -> metrale_status {
    let tokens = piece.tokens.clone().unwrap_or(0..0);
    let stop = piece.stopped.as_ref().map_or(-1, |s| s.index as i64);
    out.set(&metrale_text_piece {
        struct_size: size_of::<metrale_text_piece>(),
        bytes: piece.bytes.as_ptr(),
        len: piece.bytes.len(),
        first_token: tokens.start,
        end_token: tokens.end,
        stop,
    });
    if stop < 0 { METRALE_OK } else { METRALE_DONE }
}
