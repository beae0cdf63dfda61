//! Grammars: what a sequence's chosen tokens must follow.

use std::sync::Arc;

use super::guard::{guard, guard_value};
use super::handle;
use super::model::ModelObject;
use super::pointer;
use super::status::metrale_status;
use super::types::*;
use crate::error::{Error, Kind, Result};
use crate::sampling::grammar::MAX_SOURCE;
use crate::sampling::{Constraint, Grammar, Vocabulary};

/// A compiled grammar; sequences that follow it share it.
pub(super) struct GrammarObject {
    grammar: Arc<Grammar>,
}

/// Compiles a JSON schema (`len` bytes of UTF-8) for a model: a sequence that follows it says one JSON value that the schema allows.
/// Keys that are not understood are refused rather than ignored. On success `*out` is a handle for `metrale_grammar_free`. Any thread;
/// takes from milliseconds to seconds, the first grammar of a model some more.
///
/// Statuses: `METRALE_INVALID_GRAMMAR` with the byte offset where one is known, `METRALE_LIMIT_EXCEEDED` (longer than 1 MiB, nested deeper
/// than 127, or too complex), `METRALE_UNSUPPORTED` (a key that is not done), `METRALE_NOT_FOUND` (the model has no tokenizer),
/// `METRALE_OUT_OF_MEMORY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_grammar_json_schema(
    model: *const metrale_model,
    schema: *const u8,
    len: usize,
    out: *mut *mut metrale_grammar,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || compile(model, schema, len, "schema", out, Grammar::json_schema))
}

/// As `metrale_grammar_json_schema` for a grammar in GBNF: rules `name ::= ...`, the start is `root`. Where rules are recursive, parts
/// between them that are not take the longest text they can.
/// Any thread.
///
/// Statuses: as `metrale_grammar_json_schema`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_grammar_gbnf(
    model: *const metrale_model,
    source: *const u8,
    len: usize,
    out: *mut *mut metrale_grammar,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || compile(model, source, len, "source", out, Grammar::gbnf))
}

/// As `metrale_grammar_json_schema` for a grammar in Lark's notation: rules `name: ...`, terminals `NAME: ...`, the start is `start`.
/// Terminals take the longest text they can.
/// Any thread.
///
/// Statuses: as `metrale_grammar_json_schema`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_grammar_lark(
    model: *const metrale_model,
    source: *const u8,
    len: usize,
    out: *mut *mut metrale_grammar,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || compile(model, source, len, "source", out, Grammar::lark))
}

/// As `metrale_grammar_json_schema` for a regular expression, which the whole text matches. Unicode classes and counted repetitions are
/// fine; references back and look-around are not.
/// Any thread.
///
/// Statuses: as `metrale_grammar_json_schema`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_grammar_regex(
    model: *const metrale_model,
    pattern: *const u8,
    len: usize,
    out: *mut *mut metrale_grammar,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || compile(model, pattern, len, "pattern", out, Grammar::regex))
}

/// Frees a grammar; sequences that follow it keep it. NULL and handles that are none are ignored. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_grammar_free(grammar: *mut metrale_grammar) {
    guard_value((), || handle::remove(grammar).map(drop))
}

/// From now on the sequence's chosen tokens follow `grammar`, from its start; NULL lifts the grammar in force. Only tokens that
/// `metrale_decode_step` chooses count, so a prompt may come before or between. The grammar rules tokens out before the sampler's stages
/// run, and allows tokens that end generation only where it may end. Forks, marks and truncation carry it. The grammar may be freed
/// afterwards.
///
/// When a step finds no token that goes on it returns `METRALE_NO_VALID_TOKEN`, after the end `METRALE_GRAMMAR_DONE`; the sequence is then
/// as before and usable, for example after lifting the grammar.
/// One call at a time on a sequence.
///
/// Statuses: `METRALE_MISMATCH` (the grammar was compiled for another model), `METRALE_BUSY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_seq_grammar(
    seq: *mut metrale_seq,
    grammar: *const metrale_grammar,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || {
        let object = handle::get(seq)?;
        let mut state = object.exclusive()?;
        let constraint = match grammar.is_null() {
            true => None,
            false => {
                let grammar = Arc::clone(&handle::get(grammar)?.grammar);
                if !Arc::ptr_eq(grammar.vocabulary(), state.sequence.engine().grammar_vocabulary()?) {
                    return Err(Error::new(Kind::Mismatch, "the grammar was compiled for another model than the sequence's"));
                }
                Some(Constraint::new(grammar))
            }
        };
        state.chooser.constraint = constraint;
        Ok(())
    })
}

fn compile(
    model: *const metrale_model,
    source: *const u8,
    len: usize,
    name: &str,
    out: *mut *mut metrale_grammar,
    how: impl FnOnce(&Arc<Vocabulary>, &str) -> Result<Grammar>,
) -> Result<()> {
    let out = pointer::out(out, "out")?;
    let model: Arc<ModelObject> = handle::get(model)?;
    if len > MAX_SOURCE {
        let text = format!("{name} has {len} bytes; at most {MAX_SOURCE} are compiled");
        return Err(Error::new(Kind::LimitExceeded, text).named(name).sizes(len as u64, MAX_SOURCE as u64));
    }
    let source = pointer::utf8(source, len, name)?;
    let grammar = Arc::new(how(model.engine().grammar_vocabulary()?, source)?);
    out.set(handle::insert(Arc::new(GrammarObject { grammar }))?);
    Ok(())
}
