//! JSON as checkpoints really hold it: Python writes the bare tokens `Infinity`, `-Infinity` and `NaN`.

use crate::error::{Error, Kind, Result};
use serde_json::Value;
use std::borrow::Cow;

/// Parses JSON text. `Infinity` becomes the largest finite f64 (which is infinite again once it is cast to f32), `NaN`
/// becomes null. `label` names the file in errors.
pub fn parse(bytes: &[u8], label: &str) -> Result<Value> {
    match serde_json::from_slice(bytes) {
        Ok(value) => Ok(value),
        Err(first) => match without_bare_tokens(bytes) {
            Cow::Owned(text) => serde_json::from_slice(&text).map_err(|e| corrupt(label, &e)),
            Cow::Borrowed(_) => Err(corrupt(label, &first)),
        },
    }
}

fn corrupt(label: &str, e: &serde_json::Error) -> Error {
    Error::new(Kind::CorruptFile, format!("{label}: not valid JSON: {e}")).named(label)
}

/// Replaces the three tokens where they stand outside strings. A leading minus stays and belongs to the number.
fn without_bare_tokens(bytes: &[u8]) -> Cow<'_, [u8]> {
    const TOKENS: [(&[u8], &[u8]); 2] = [(b"Infinity", b"1.7976931348623157e308"), (b"NaN", b"null")];
    let mut out: Option<Vec<u8>> = None;
    let (mut at, mut in_string) = (0, false);
    while at < bytes.len() {
        let token = TOKENS.iter().find(|(token, _)| !in_string && bytes[at..].starts_with(token));
        let (taken, written): (usize, &[u8]) = match token {
            Some((token, number)) => {
                out.get_or_insert_with(|| bytes[..at].to_vec());
                (token.len(), number)
            }
            // A backslash takes the next byte with it, so that an escaped quote does not end the string.
            None if in_string && bytes[at] == b'\\' => (2.min(bytes.len() - at), &bytes[at..(at + 2).min(bytes.len())]),
            None => {
                in_string ^= bytes[at] == b'"';
                (1, &bytes[at..at + 1])
            }
        };
        if let Some(out) = &mut out {
            out.extend_from_slice(written);
        }
        at += taken;
    }
    out.map_or(Cow::Borrowed(bytes), Cow::Owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bare_tokens_are_numbers_outside_strings_only() {
        let value = parse(br#"{"a": [0.0, Infinity], "b": -Infinity, "c": NaN, "d": "NaN \" Infinity"}"#, "x").unwrap();
        assert_eq!(value["a"][1].as_f64().unwrap() as f32, f32::INFINITY);
        assert_eq!(value["b"].as_f64().unwrap() as f32, f32::NEG_INFINITY);
        assert!(value["c"].is_null());
        assert_eq!(value["d"], "NaN \" Infinity");
    }

    #[test]
    fn broken_text_names_the_file() {
        for text in ["", "{", "{\"a\": Infinit}", "\"\\", "[1,]", &"[".repeat(100_000)] {
            let error = parse(text.as_bytes(), "config.json").unwrap_err();
            assert_eq!(error.kind(), Kind::CorruptFile);
            assert!(error.message().contains("config.json"));
        }
    }
}
