//! What can be seen of a grammar's text before it is compiled: that it is well formed, and not too deep.

use serde_json::Value;

use super::{MAX_DEPTH, MAX_RULES};
use crate::error::{Error, Kind, Result};

/// Longest part of a foreign message that is passed on.
const MAX_MESSAGE: usize = 600;

/// Something is wrong at a byte of the text.
pub(super) fn wrong(offset: usize, text: impl std::fmt::Display) -> Error {
    Error::new(Kind::InvalidGrammar, format!("byte {offset}: {text}")).at(offset as u64)
}

/// The nesting is too deep at a byte of the text.
pub(super) fn too_deep(offset: usize, limit: usize) -> Error {
    let text = format!("byte {offset}: nested more than {limit} deep");
    Error::new(Kind::LimitExceeded, text).at(offset as u64).sizes(limit as u64 + 1, limit as u64)
}

/// There are too many of something.
pub(super) fn too_many(what: &str, found: usize) -> Error {
    Error::new(Kind::LimitExceeded, format!("{found} {what}; at most {MAX_RULES} are allowed")).sizes(found as u64, MAX_RULES as u64)
}

/// Parses a JSON schema.
pub(super) fn json(source: &str) -> Result<Value> {
    if let Some(offset) = json_depth(source) {
        return Err(too_deep(offset, MAX_DEPTH - 1));
    }
    let references = source.matches("\"$ref\"").count();
    if references > MAX_RULES {
        return Err(too_many("references", references));
    }
    let schema: Value = serde_json::from_str(source).map_err(|e| wrong(offset(source, e.line(), e.column().saturating_sub(1)), &e))?;
    match &schema {
        Value::Object(_) | Value::Bool(_) => patterns(&schema).map(|()| schema),
        _ => Err(wrong(0, "a JSON schema is an object or a boolean")),
    }
}

/// Where a JSON text becomes too deep.
fn json_depth(source: &str) -> Option<usize> {
    let (mut depth, mut quoted, mut escaped) = (0usize, false, false);
    for (at, byte) in source.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            b'{' | b'[' if !quoted => {
                depth += 1;
                if depth >= MAX_DEPTH {
                    return Some(at);
                }
            }
            b'}' | b']' if !quoted => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    None
}

/// Checks the regular expressions of a schema, whose own place in the text is not known: the error names the pattern.
fn patterns(schema: &Value) -> Result<()> {
    match schema {
        Value::Object(map) => map.iter().try_for_each(|(key, value)| match value {
            // Values, not schemas.
            _ if ["const", "enum", "default", "examples"].contains(&key.as_str()) => Ok(()),
            Value::String(pattern) if key == "pattern" => {
                regex(pattern).map_err(|e| e.context(format!("pattern {:?}", shortened(pattern))).named("pattern"))
            }
            _ => patterns(value),
        }),
        Value::Array(list) => list.iter().try_for_each(patterns),
        _ => Ok(()),
    }
}

/// Checks a regular expression.
pub(super) fn regex(pattern: &str) -> Result<()> {
    let parsed = regex_syntax::ast::parse::ParserBuilder::new().nest_limit(MAX_DEPTH as u32).build().parse(pattern);
    let Err(e) = parsed else { return Ok(()) };
    let at = e.span().start.offset;
    match e.kind() {
        regex_syntax::ast::ErrorKind::NestLimitExceeded(_) => Err(too_deep(at, MAX_DEPTH)),
        // Look-around is not of regular languages, but the compiler takes some of it in its own way.
        regex_syntax::ast::ErrorKind::UnsupportedLookAround => Ok(()),
        kind => Err(wrong(at, kind)),
    }
}

/// Checks the nesting of a Lark grammar and the number of its rules. Strings, regular expressions and comments are skipped.
pub(super) fn lark(source: &str) -> Result<()> {
    let rules = source.bytes().filter(|&b| b == b':').count();
    if rules > MAX_RULES {
        return Err(too_many("rules", rules));
    }
    let bytes = source.as_bytes();
    let (mut depth, mut prefixes, mut at) = (0usize, 0usize, 0);
    while at < bytes.len() {
        match bytes[at] {
            b'"' => at = quoted(bytes, at, b'"'),
            b'/' if bytes.get(at + 1) == Some(&b'/') => at = line_end(bytes, at),
            b'/' => at = quoted(bytes, at, b'/'),
            b'#' => at = line_end(bytes, at),
            b'(' | b'[' | b'{' => depth += 1,
            b')' | b']' | b'}' => depth = depth.saturating_sub(1),
            b'~' | b'&' | b'!' => prefixes += 1,
            b'\n' => prefixes = 0,
            _ => {}
        }
        if depth > MAX_DEPTH || prefixes > MAX_DEPTH {
            return Err(too_deep(at, MAX_DEPTH));
        }
        at += 1;
    }
    Ok(())
}

/// The closing mark of a quoted part that opens at `at`; it does not go past the line.
fn quoted(bytes: &[u8], at: usize, mark: u8) -> usize {
    let mut end = at + 1;
    while end < bytes.len() && bytes[end] != mark && bytes[end] != b'\n' {
        end += if bytes[end] == b'\\' { 2 } else { 1 };
    }
    end
}

fn line_end(bytes: &[u8], at: usize) -> usize {
    bytes[at..].iter().position(|&b| b == b'\n').map_or(bytes.len(), |n| at + n)
}

/// The byte offset of a column (bytes from 0) of a line (from 1).
fn offset(source: &str, line: usize, column: usize) -> usize {
    let before: usize = source.split_inclusive('\n').take(line.saturating_sub(1)).map(str::len).sum();
    (before + column).min(source.len())
}

/// The compiler's refusal as an error. It begins with `line(column):` where it knows the place.
pub(super) fn refused(text: &str, source: &str) -> Error {
    let text = text.split("\n<backtrace>").next().unwrap_or(text);
    let shown = shortened(text);
    let lower = text.to_ascii_lowercase();
    let limit = ["fuel", "too big", "too large", "too many", "too complex", "too long"].iter().any(|word| lower.contains(word));
    let kind = match () {
        () if text.starts_with("panic:") => Kind::Internal,
        () if limit => Kind::LimitExceeded,
        () if lower.starts_with("unimplemented") => Kind::Unsupported,
        () => Kind::InvalidGrammar,
    };
    let error = Error::new(kind, shown);
    match place(text, source) {
        Some(offset) => error.at(offset as u64),
        None => error,
    }
}

/// `at 3(7)` or `3(7):` in a message, as a byte offset.
fn place(text: &str, source: &str) -> Option<usize> {
    let open = text.find('(')?;
    let digits = text[..open].bytes().rev().take_while(u8::is_ascii_digit).count();
    let line: usize = text[open - digits..open].parse().ok()?;
    let column: usize = text[open + 1..].split_once(')')?.0.parse().ok()?;
    let row = source.split('\n').nth(line.checked_sub(1)?)?;
    let within = row.char_indices().nth(column.saturating_sub(1)).map_or(row.len(), |(at, _)| at);
    Some(offset(source, line, within))
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(MAX_MESSAGE) {
        Some((at, _)) => format!("{} ...", &text[..at]),
        None => text.to_string(),
    }
}
