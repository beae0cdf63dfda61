//! Tokens that differ only in case, accents or white space under one small id: the alphabet that n-gram memories hash.

use super::Tokenizer;
use super::bytes::char_of;
use crate::error::{Error, Kind, Result};
use std::collections::HashMap;
use tokenizers::normalizers::{Lowercase, NFD, NFKC, StripAccents};
use tokenizers::{NormalizedString, Normalizer};

/// The folded id of every token, counted in order of first appearance.
pub fn folded_ids(tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    let mut ids: HashMap<String, u32> = HashMap::new();
    let mut out = crate::error::vec_with_capacity(tokenizer.vocab_len(), "folded ids of a vocabulary")?;
    for token in 0..tokenizer.vocab_len() {
        let bytes = if tokenizer.is_token(token as i32) { tokenizer.token_bytes(token as i32)? } else { &[] };
        let key = match std::str::from_utf8(bytes) {
            Ok(text) if !text.contains('\u{fffd}') => fold(text)?,
            // Pieces of characters stand for themselves, as vocabularies spell them.
            _ => bytes.iter().map(|b| char_of(*b)).collect(),
        };
        let next = ids.len() as u32;
        out.push(*ids.entry(key).or_insert(next));
    }
    Ok(out)
}

/// Compatibility forms united, accents dropped, lower case, white space as single blanks and none at the ends; a text of nothing
/// but blanks is one blank, and a text of which nothing would be left stays as it is.
fn fold(text: &str) -> Result<String> {
    let failed = |e: tokenizers::Error| Error::new(Kind::Internal, format!("folding {text:?}: {e}"));
    let mut s = NormalizedString::from(text);
    NFKC.normalize(&mut s).map_err(failed)?;
    NFD.normalize(&mut s).map_err(failed)?;
    StripAccents.normalize(&mut s).map_err(failed)?;
    Lowercase.normalize(&mut s).map_err(failed)?;
    let mut blanked = String::with_capacity(s.get().len());
    for c in s.get().chars() {
        match c {
            ' ' | '\t' | '\r' | '\n' if blanked.ends_with(' ') => {}
            ' ' | '\t' | '\r' | '\n' => blanked.push(' '),
            c => blanked.push(c),
        }
    }
    let trimmed = if blanked == " " { " " } else { blanked.trim() };
    Ok(if trimmed.is_empty() { text.to_string() } else { trimmed.to_string() })
}

#[cfg(test)]
mod tests {
    use super::fold;

    #[test]
    fn case_accents_and_blanks_fall_together() {
        for (text, folded) in
            [("Café", "cafe"), (" THE\n", "the"), ("\t \n", " "), ("ﬁ", "fi"), ("a \t b", "a b"), ("\u{301}", "\u{301}"), ("", "")]
        {
            assert_eq!(fold(text).unwrap(), folded, "{text:?}");
        }
    }
}
