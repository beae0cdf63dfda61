//! Embeddings: a text as a vector.

use super::guard::guard_status;
use super::handle;
use super::pointer;
use super::status::{METRALE_MORE, metrale_status};
use super::types::*;
use super::versioned;
use crate::engine::Pooling;
use crate::ensure;
use crate::error::{Error, Kind, Result};

/// What the model makes of `count` tokens: the output of its last layer after the final norm, which its output matrix would turn into
/// logits; of a model that translates, the encoder's output. `options` may be NULL. `out` gets one row of the model's `hidden`
/// floats, or a row for each token with `METRALE_POOLING_NONE`; `*out_len` gets the number of floats. With too small a
/// `capacity`, in floats, the status is `METRALE_MORE`, only `*out_len` is written and nothing is computed.
///
/// Blocks until all is computed; `metrale_cancel_all` ends it. No sequence takes part, and prefixes are neither used nor kept. The same
/// bits for any number of threads. Any thread.
///
/// Statuses: `METRALE_MORE`, `METRALE_INVALID_ARGUMENT` (no tokens), `METRALE_INVALID_TOKEN` with the index,
/// `METRALE_CONTEXT_FULL`, `METRALE_UNKNOWN_OPTION`, `METRALE_NUMERIC_FAULT`, `METRALE_CANCELLED`, `METRALE_OUT_OF_MEMORY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_embed(
    model: *const metrale_model,
    tokens: *const metrale_token,
    count: usize,
    options: *const metrale_embed_options,
    out: *mut f32,
    capacity: usize,
    out_len: *mut usize,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard_status(err, || {
        let len = pointer::out(out_len, "out_len")?;
        let model = handle::get(model)?;
        let tokens = pointer::slice(tokens, count, "tokens")?;
        let host = versioned::read(options)?;
        pointer::flags(host.flags, METRALE_EMBED_NORMALIZE, "metrale_embed_options.flags")?;
        ensure!(host.reserved == 0, UnknownOption, "metrale_embed_options.reserved is {}, not 0", host.reserved);
        let engine = model.engine();
        let pooling = pooling(host.pooling, engine.has_encoder())?;
        engine.check_embedding(tokens)?;
        let needed = engine.embedding_len(tokens.len(), pooling);
        if capacity < needed {
            len.set(needed);
            return Ok(METRALE_MORE);
        }
        let place = pointer::out_slice(out, needed, "out")?;
        let values = engine.embed(tokens, pooling, host.flags & METRALE_EMBED_NORMALIZE != 0)?;
        place.set(&values);
        len.set(needed);
        Ok(super::status::METRALE_OK)
    })
}

fn pooling(host: u32, encoder: bool) -> Result<Pooling> {
    match host {
        METRALE_POOLING_DEFAULT => Ok(if encoder { Pooling::Mean } else { Pooling::Last }),
        METRALE_POOLING_NONE => Ok(Pooling::None),
        METRALE_POOLING_LAST => Ok(Pooling::Last),
        METRALE_POOLING_MEAN => Ok(Pooling::Mean),
        METRALE_POOLING_FIRST => Ok(Pooling::First),
        other => {
            let text = format!("metrale_embed_options.pooling is {other}; it must be one of METRALE_POOLING_*");
            Err(Error::new(Kind::UnknownOption, text).named("pooling"))
        }
    }
}
