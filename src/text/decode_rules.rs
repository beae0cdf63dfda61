//! What bytes a token's text stands for.
//!
//! `tokenizer.json` describes decoding as a chain of text operations over all tokens. Only a few chains exist in practice,
//! and all of them act token by token but for one thing: the space at the very beginning. So the chain is read once into
//! these rules, and each token's bytes are computed at load. What a chain does beyond that (WordPiece's clean-up of
//! punctuation, CTC) is not followed.

use std::borrow::Cow;

use serde_json::Value;

use super::bytes::byte_of;
use crate::bail;
use crate::error::Result;

/// How token texts become bytes.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct DecodeRules {
    /// Each character stands for a byte (GPT-2).
    pub(super) byte_level: bool,
    /// `<0x0A>` is the byte 10 (SentencePiece).
    pub(super) byte_fallback: bool,
    /// Replacements of text, such as U+2581 by a space.
    pub(super) replace: Vec<(String, String)>,
    /// A word's first piece has a space before it, pieces with this prefix follow directly (WordPiece).
    pub(super) continuing: Option<String>,
    /// This suffix ends a word and stands for a space (the first BPE models).
    pub(super) word_end: Option<String>,
    /// How many spaces a whole text loses at its beginning.
    pub(super) strip_start: usize,
}

impl DecodeRules {
    /// GPT-2's scheme.
    pub(super) fn byte_level() -> Self {
        DecodeRules { byte_level: true, ..Default::default() }
    }

    /// SentencePiece: U+2581 is a space, `<0x..>` a byte.
    pub(super) fn sentencepiece(space_prefix: bool) -> Self {
        let replace = vec![("\u{2581}".to_string(), " ".to_string())];
        DecodeRules { byte_fallback: true, replace, strip_start: usize::from(space_prefix), ..Default::default() }
    }

    /// The rules of the `decoder` entry of a `tokenizer.json`.
    pub(super) fn from_json(decoder: &Value) -> Result<Self> {
        let mut rules = DecodeRules::default();
        rules.read(decoder, 0)?;
        Ok(rules)
    }

    fn read(&mut self, decoder: &Value, depth: usize) -> Result<()> {
        let text = |key: &str| decoder.get(key).and_then(Value::as_str).map(str::to_string);
        let kind = decoder.get("type").and_then(Value::as_str);
        match kind {
            None if decoder.is_null() => {}
            Some("Sequence") => {
                if depth > 8 {
                    bail!(LimitExceeded, "tokenizer.json: decoder is nested more than 8 deep");
                }
                for part in decoder.get("decoders").and_then(Value::as_array).into_iter().flatten() {
                    self.read(part, depth + 1)?;
                }
            }
            Some("ByteLevel") => self.byte_level = true,
            Some("ByteFallback") => self.byte_fallback = true,
            Some("Fuse") => {}
            Some("Replace") => {
                let pattern = decoder.get("pattern").and_then(|p| p.get("String")).and_then(Value::as_str);
                let (Some(pattern), Some(content)) = (pattern, text("content")) else {
                    bail!(Unsupported, "tokenizer.json: decoder Replace without a String pattern: {decoder}");
                };
                self.replace.push((pattern.to_string(), content));
            }
            Some("Strip") => {
                let count = |key: &str| decoder.get(key).and_then(Value::as_u64).unwrap_or(0);
                if text("content").as_deref() != Some(" ") || count("stop") != 0 {
                    bail!(Unsupported, "tokenizer.json: decoder Strip of something else than leading spaces: {decoder}");
                }
                self.strip_start = count("start") as usize;
            }
            Some("Metaspace") => {
                self.replace.push((text("replacement").unwrap_or_else(|| "\u{2581}".to_string()), " ".to_string()));
                let never =
                    text("prepend_scheme").as_deref() == Some("never") || decoder.get("add_prefix_space") == Some(&Value::Bool(false));
                self.strip_start = usize::from(!never);
            }
            Some("WordPiece") => {
                self.continuing = Some(text("prefix").unwrap_or_else(|| "##".to_string()));
                self.strip_start = 1;
            }
            Some("BPEDecoder") => self.word_end = Some(text("suffix").unwrap_or_else(|| "</w>".to_string())),
            other => bail!(Unsupported, "tokenizer.json: decoder {} is not known", other.unwrap_or("without a type")),
        }
        Ok(())
    }

    /// Appends the bytes of an ordinary token with this text; the schemes of most models without a detour.
    pub(super) fn append(&self, text: &str, out: &mut Vec<u8>) {
        let start = out.len();
        match self.replace.as_slice() {
            _ if self.byte_level => {
                for c in text.chars() {
                    let Some(byte) = byte_of(c) else {
                        out.truncate(start);
                        return out.extend_from_slice(text.as_bytes());
                    };
                    out.push(byte);
                }
            }
            [(from, to)] if self.continuing.is_none() && self.word_end.is_none() && !from.is_empty() && !text.starts_with('<') => {
                let (mut rest, from) = (text.as_bytes(), from.as_bytes());
                while let Some((&byte, after)) = rest.split_first() {
                    rest = match rest.strip_prefix(from) {
                        Some(after) => {
                            out.extend_from_slice(to.as_bytes());
                            after
                        }
                        None => {
                            out.push(byte);
                            after
                        }
                    };
                }
            }
            _ => out.extend_from_slice(&self.bytes(text)),
        }
    }

    /// The bytes of an ordinary token with this text.
    pub(super) fn bytes<'a>(&self, text: &'a str) -> Cow<'a, [u8]> {
        if self.byte_level {
            // A text with a character outside the alphabet was added by hand and means itself.
            return match text.chars().map(byte_of).collect::<Option<Vec<u8>>>() {
                Some(bytes) => Cow::Owned(bytes),
                None => Cow::Borrowed(text.as_bytes()),
            };
        }
        if self.byte_fallback
            && let Some(byte) = fallback_byte(text)
        {
            return Cow::Owned(vec![byte]);
        }
        let mut text = Cow::Borrowed(text);
        if let Some(prefix) = &self.continuing {
            text = match text.strip_prefix(prefix.as_str()) {
                Some(rest) => Cow::Owned(rest.to_string()),
                None => Cow::Owned(format!(" {text}")),
            };
        }
        if let Some(rest) = self.word_end.as_ref().and_then(|suffix| text.strip_suffix(suffix.as_str())) {
            text = Cow::Owned(format!("{rest} "));
        }
        for (from, to) in &self.replace {
            if text.contains(from.as_str()) {
                text = Cow::Owned(text.replace(from.as_str(), to));
            }
        }
        match text {
            Cow::Borrowed(text) => Cow::Borrowed(text.as_bytes()),
            Cow::Owned(text) => Cow::Owned(text.into_bytes()),
        }
    }
}

/// The byte of a `<0x..>` token.
pub(super) fn fallback_byte(text: &str) -> Option<u8> {
    let digits = text.strip_prefix("<0x")?.strip_suffix('>')?;
    let plain = digits.len() == 2 && digits.bytes().all(|b| b.is_ascii_hexdigit());
    if plain { u8::from_str_radix(digits, 16).ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn tokens_by_scheme() {
        let llama = DecodeRules::from_json(&json!({"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}))
        .unwrap();
        assert_eq!(llama, DecodeRules::sentencepiece(true));
        let cases: [(&DecodeRules, &str, &[u8]); 9] = [
            (&llama, "▁▁a▁b", b"  a b"),
            (&llama, "<0xE2>", b"\xe2"),
            (&llama, "<0xE2", b"<0xE2"),
            (&llama, "<0x+2>", b"<0x+2>"),
            (&DecodeRules::byte_level(), "ĠaÃ", b" a\xc3"),
            (&DecodeRules::byte_level(), "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>".as_bytes()),
            (&DecodeRules { continuing: Some("##".into()), ..Default::default() }, "##ing", b"ing"),
            (&DecodeRules { continuing: Some("##".into()), ..Default::default() }, "walk", b" walk"),
            (&DecodeRules { word_end: Some("</w>".into()), ..Default::default() }, "walk</w>", b"walk "),
        ];
        for (rules, text, bytes) in cases {
            assert_eq!(rules.bytes(text).as_ref(), bytes, "{text}");
            let mut appended = b"x".to_vec();
            rules.append(text, &mut appended);
            assert_eq!(appended[1..], *bytes, "{text}");
        }
    }

    #[test]
    fn unknown_chains_are_refused() {
        for decoder in [json!({"type": "CTC"}), json!({}), json!({"type": "Replace", "pattern": {"Regex": "a"}, "content": ""})] {
            assert!(DecodeRules::from_json(&decoder).is_err(), "{decoder}");
        }
        assert_eq!(DecodeRules::from_json(&Value::Null).unwrap(), DecodeRules::default());
    }
}
