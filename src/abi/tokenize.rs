//! Text to tokens and back, and messages to a prompt.

use serde_json::{Map, Value};

use super::guard::guard_status;
use super::handle;
use super::pointer;
use super::status::metrale_status;
use super::types::{
    METRALE_DETOKENIZE_SKIP_SPECIAL, METRALE_TOKENIZE_ADD_SPECIAL, METRALE_TOKENIZE_PARSE_SPECIAL, metrale_error, metrale_model,
    metrale_token,
};
use crate::error::{Error, Kind, Result};
use crate::{bail, ensure};

/// The tokens of a text of `len` bytes, which may hold NULs and need not be terminated. `flags`:
/// `METRALE_TOKENIZE_*`, or-ed. They go to `out` and their number to `*out_count`; when `capacity` is too small, only
/// `*out_count` is written and the status is `METRALE_MORE`. NULL with capacity 0 asks for the number. Any thread.
///
/// Statuses: `METRALE_INVALID_ARGUMENT` with the offset of the first byte that is not UTF-8, `METRALE_TOO_LARGE`,
/// `METRALE_UNKNOWN_OPTION`, `METRALE_NOT_FOUND` when the model comes without a tokenizer.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_tokenize(
    model: *const metrale_model,
    text: *const u8,
    len: usize,
    flags: u32,
    out: *mut metrale_token,
    capacity: usize,
    out_count: *mut usize,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard_status(err, || {
        let count = pointer::out(out_count, "out_count")?;
        let known = METRALE_TOKENIZE_ADD_SPECIAL | METRALE_TOKENIZE_PARSE_SPECIAL;
        pointer::flags(flags.into(), known.into(), "flags")?;
        let model = handle::get(model)?;
        limit(len, "text")?;
        let text = pointer::utf8(text, len, "text")?;
        let add_special = flags & METRALE_TOKENIZE_ADD_SPECIAL != 0;
        let parse_special = flags & METRALE_TOKENIZE_PARSE_SPECIAL != 0;
        let tokens = model.engine().tokenizer()?.encode(text, add_special, parse_special)?;
        pointer::sized(&tokens, out, capacity, count)
    })
}

/// The bytes of a whole text of tokens; they need not be UTF-8 where the tokens begin or end inside a character.
/// `flags`: `METRALE_DETOKENIZE_*`, or-ed. For tokens that arrive one by one use `metrale_text_new`. Output as in
/// `metrale_tokenize`. Any thread.
///
/// Statuses: `METRALE_INVALID_TOKEN` with the index of the first token outside the vocabulary, `METRALE_TOO_LARGE`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_detokenize(
    model: *const metrale_model,
    tokens: *const metrale_token,
    count: usize,
    flags: u32,
    out: *mut u8,
    capacity: usize,
    out_len: *mut usize,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard_status(err, || {
        let len = pointer::out(out_len, "out_len")?;
        pointer::flags(flags.into(), METRALE_DETOKENIZE_SKIP_SPECIAL.into(), "flags")?;
        let model = handle::get(model)?;
        limit(count, "tokens")?;
        let tokens = pointer::slice(tokens, count, "tokens")?;
        let bytes = model.engine().tokenizer()?.decode(tokens, flags & METRALE_DETOKENIZE_SKIP_SPECIAL != 0)?;
        pointer::sized(&bytes, out, capacity, len)
    })
}

/// Exactly the bytes that one token adds to a text; a special token gives its literal text. Output as in
/// `metrale_tokenize`. Any thread.
///
/// Statuses: `METRALE_MORE`, `METRALE_INVALID_TOKEN`, `METRALE_NOT_FOUND` when the model comes without a tokenizer.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_token_bytes(
    model: *const metrale_model,
    token: metrale_token,
    out: *mut u8,
    capacity: usize,
    out_len: *mut usize,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard_status(err, || {
        let len = pointer::out(out_len, "out_len")?;
        let model = handle::get(model)?;
        let bytes = model.engine().tokenizer()?.token_bytes(token)?;
        pointer::sized(bytes, out, capacity, len)
    })
}

/// The prompt that the model's chat template makes of a conversation. `request` is a JSON object of `request_len`
/// bytes: `messages` (array of objects with `role` and `content`), and if wanted `tools` (array),
/// `add_generation_prompt` (default true) and `variables` (object, handed to the template by name). Tokenize the
/// result with `METRALE_TOKENIZE_PARSE_SPECIAL` and without `METRALE_TOKENIZE_ADD_SPECIAL`: the template writes the
/// special tokens itself. Output as in `metrale_tokenize`. Any thread.
///
/// Statuses: `METRALE_INVALID_ARGUMENT` (malformed JSON, wrong types), `METRALE_UNKNOWN_OPTION` (another key),
/// `METRALE_TEMPLATE` with the template's own text, `METRALE_NOT_FOUND` when the model has no template,
/// `METRALE_LIMIT_EXCEEDED`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_chat_render(
    model: *const metrale_model,
    request: *const u8,
    request_len: usize,
    out: *mut u8,
    capacity: usize,
    out_len: *mut usize,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard_status(err, || {
        let len = pointer::out(out_len, "out_len")?;
        let model = handle::get(model)?;
        limit(request_len, "request")?;
        let request = ChatRequest::parse(pointer::utf8(request, request_len, "request")?)?;
        let template = model.engine().chat_template()?;
        let text = template.render(&request.messages, request.tools.as_ref(), request.add_generation_prompt, &request.variables, None)?;
        pointer::sized(text.as_bytes(), out, capacity, len)
    })
}

/// Sizes are counted in 31 bits further down; more than that is refused before it is looked at.
fn limit(len: usize, name: &str) -> Result<()> {
    ensure!(len < i32::MAX as usize, TooLarge, "{name} has {len} elements; fewer than {} can be handled", i32::MAX);
    Ok(())
}

struct ChatRequest {
    messages: Value,
    tools: Option<Value>,
    add_generation_prompt: bool,
    variables: Value,
}

impl ChatRequest {
    fn parse(text: &str) -> Result<ChatRequest> {
        let mut tree: Map<String, Value> = serde_json::from_str(text).map_err(|e| {
            // The parser counts depth for us and says so in words only.
            let kind = if e.to_string().starts_with("recursion limit") { Kind::LimitExceeded } else { Kind::InvalidArgument };
            Error::new(kind, format!("request is not the JSON object expected: {e}")).named("request")
        })?;
        let Some(messages) = tree.remove("messages") else { bail!(InvalidArgument, "request has no \"messages\"") };
        ensure!(messages.is_array(), InvalidArgument, "request.messages must be an array");
        let tools = tree.remove("tools").filter(|t| !t.is_null());
        ensure!(tools.as_ref().is_none_or(Value::is_array), InvalidArgument, "request.tools must be an array");
        let add_generation_prompt = match tree.remove("add_generation_prompt") {
            None | Some(Value::Null) => true,
            Some(Value::Bool(value)) => value,
            Some(other) => bail!(InvalidArgument, "request.add_generation_prompt is {other}; it must be true or false"),
        };
        let variables = match tree.remove("variables") {
            None | Some(Value::Null) => Value::Object(Map::new()),
            Some(map @ Value::Object(_)) => map,
            Some(_) => bail!(InvalidArgument, "request.variables must be an object"),
        };
        if let Some(key) = tree.keys().next() {
            let known = "messages tools add_generation_prompt variables";
            return Err(Error::new(Kind::UnknownOption, format!("request has the unknown key {key:?}; known are {known}")).named(key));
        }
        Ok(ChatRequest { messages, tools, add_generation_prompt, variables })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chat_requests() {
        let r = ChatRequest::parse(r#"{"messages":[{"role":"user"}],"tools":null,"variables":{"thinking":true}}"#).unwrap();
        assert!(r.add_generation_prompt && r.tools.is_none());
        assert_eq!(r.variables["thinking"], Value::Bool(true));
        assert_eq!(r.messages[0]["role"], "user");
        let kind = |text: &str| ChatRequest::parse(text).err().map(|e| e.kind());
        for bad in ["", "[]", "{}", "{\"messages\":1}", r#"{"messages":[],"tools":3}"#, r#"{"messages":[],"add_generation_prompt":1}"#] {
            assert_eq!(kind(bad), Some(Kind::InvalidArgument), "{bad}");
        }
        assert_eq!(kind(r#"{"messages":[],"tool":[]}"#), Some(Kind::UnknownOption));
        let deep = format!("{{\"messages\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
        assert_eq!(kind(&deep), Some(Kind::LimitExceeded));
    }
}
