//! The vocabulary of a GGUF file, rebuilt.
//!
//! A GGUF file lists tokens, their types, and either merges (byte-level BPE) or scores (SentencePiece), plus a name for
//! how text is cut into words. From these the same model is made that the original `tokenizer.json` would give. The
//! metadata arrives as a plain struct, so this file knows nothing of the file format.

use tokenizers::normalizers::{NFC, Prepend, Replace, Sequence};
use tokenizers::tokenizer::{AddedToken, NormalizerWrapper, PreTokenizerWrapper};

use super::bpe::{self, Bpe, BpeOptions, Merge, Merges};
use super::decode_rules::{DecodeRules, fallback_byte};
use super::pieces::{PieceKind, Pieces};
use super::pre_tokenizers::{self, Rule};
use super::sentencepiece::{self, Piece};
use super::texts::Texts;
use super::tokenizer::{Names, Parts, Tokenizer, Words, sorted};
use super::turns::pass;
use crate::error::{self, Error, Kind, Result};
use crate::{bail, ensure};
use std::borrow::Cow;

/// What `tokenizer.*` keys of a GGUF file say; the field names are the keys. Ids are wide, so that any number a file can
/// hold arrives here and is judged here.
#[derive(Clone, Debug, Default)]
pub struct GgufVocab<'a> {
    /// `tokenizer.ggml.model`: `gpt2`, `llama`, `gemma4`.
    pub model: String,
    /// `tokenizer.ggml.pre`; empty when missing.
    pub pre: String,
    /// `tokenizer.ggml.tokens`.
    pub tokens: Vec<Cow<'a, str>>,
    /// `tokenizer.ggml.scores`.
    pub scores: Option<Vec<f32>>,
    /// `tokenizer.ggml.token_type`.
    pub types: Option<Vec<i32>>,
    /// `tokenizer.ggml.merges`, each two texts with a space between.
    pub merges: Vec<Cow<'a, str>>,
    /// `tokenizer.ggml.bos_token_id`.
    pub bos: Option<i64>,
    /// `tokenizer.ggml.eos_token_id`.
    pub eos: Option<i64>,
    /// `tokenizer.ggml.eot_token_id`.
    pub eot: Option<i64>,
    /// `tokenizer.ggml.eom_token_id`.
    pub eom: Option<i64>,
    /// `tokenizer.ggml.unknown_token_id`.
    pub unk: Option<i64>,
    /// `tokenizer.ggml.padding_token_id`.
    pub pad: Option<i64>,
    /// `tokenizer.ggml.add_bos_token`.
    pub add_bos: Option<bool>,
    /// `tokenizer.ggml.add_eos_token`.
    pub add_eos: Option<bool>,
    /// `tokenizer.ggml.add_space_prefix`.
    pub add_space_prefix: Option<bool>,
    /// `tokenizer.chat_template`.
    pub chat_template: Option<String>,
    /// `tokenizer.chat_template.<name>`.
    pub named_templates: Vec<(String, String)>,
}

/// The values of `tokenizer.ggml.token_type` that matter here.
mod token_type {
    pub(super) const NORMAL: i32 = 1;
    pub(super) const UNKNOWN: i32 = 2;
    pub(super) const CONTROL: i32 = 3;
    pub(super) const USER_DEFINED: i32 = 4;
    pub(super) const UNUSED: i32 = 5;
    pub(super) const BYTE: i32 = 6;
}

/// Texts that end a turn where they are control tokens: files often name only one of several.
const TURN_ENDS: [&str; 9] =
    ["<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|endoftext|>", "<|end_of_text|>", "<end_of_turn>", "<|return|>", "<|call|>"];

/// What differs between the kinds of vocabulary.
struct Scheme {
    normalizer: Option<NormalizerWrapper>,
    pre_tokenizer: Option<PreTokenizerWrapper>,
    rules: DecodeRules,
    byte_fallback: bool,
    ignore_merges: bool,
    add_bos: bool,
}

pub(super) fn build(vocab: GgufVocab<'_>) -> Result<Tokenizer> {
    check_lengths(&vocab)?;
    let scheme = scheme(&vocab)?;
    let names = names(&vocab)?;
    let types = types(&vocab);
    let sentencepiece = scheme.byte_fallback;
    let mut texts = Texts::with_capacity(vocab.tokens.len())?;

    let mut added: Vec<(u32, AddedToken)> = Vec::new();
    let mut pieces = Pieces::with_capacity(vocab.tokens.len())?;
    for (id, (text, &kind)) in vocab.tokens.iter().zip(types.iter()).enumerate() {
        pass(text.len())?;
        let special = is_special(kind);
        match kind {
            token_type::UNUSED => pieces.push(PieceKind::Hole, &[])?,
            _ if special => pieces.push(PieceKind::Special, text.as_bytes())?,
            // SentencePiece writes a blank as U+2581, but a GGUF file has it as a blank in these.
            token_type::USER_DEFINED => pieces.push(PieceKind::Text, text.replace('\u{2581}', " ").as_bytes())?,
            _ => pieces.push_with(PieceKind::Text, |bytes| scheme.rules.append(text, bytes))?,
        }
        if (special || kind == token_type::USER_DEFINED) && !text.is_empty() {
            let written = if sentencepiece { text.replace(' ', "\u{2581}") } else { text.to_string() };
            added.push((id as u32, AddedToken::from(written, special).normalized(false)));
        }
        let own =
            if sentencepiece && kind == token_type::USER_DEFINED { text.replace(' ', "\u{2581}").into() } else { Cow::Borrowed(&**text) };
        // Byte-level words never merge into a control token; leaving those out keeps `ignore_merges` from finding one.
        let known = kind != token_type::UNUSED && !text.is_empty() && (sentencepiece || kind != token_type::CONTROL);
        texts.push(if known { &own } else { "" }, known)?;
    }

    let affix = |wanted: bool, id: Option<i32>| if wanted { id.map(|id| id as u32).into_iter().collect() } else { Vec::new() };
    let prefix = affix(vocab.add_bos.unwrap_or(scheme.add_bos), names.bos);
    let suffix = affix(vocab.add_eos.unwrap_or(false), names.eos);
    let strip_start = scheme.rules.strip_start;
    let texts = texts.done();
    let merges = merges(&vocab, &types, &texts)?;
    let options = BpeOptions {
        unk: names.unk.filter(|_| scheme.byte_fallback).map(|id| id as u32),
        fuse_unk: scheme.byte_fallback,
        byte_fallback: scheme.byte_fallback,
        ignore_merges: scheme.ignore_merges,
        ..Default::default()
    };
    Tokenizer::assemble(Parts {
        words: Words::Bpe(Bpe::new(texts, merges, options)),
        normalizer: scheme.normalizer,
        expansion: 3,
        pre_tokenizer: scheme.pre_tokenizer,
        added,
        prefix,
        suffix,
        pieces,
        strip_start,
        names,
    })
}

fn check_lengths(vocab: &GgufVocab<'_>) -> Result<()> {
    let count = vocab.tokens.len();
    ensure!(count > 0, CorruptFile, "tokenizer.ggml.tokens is missing or empty");
    ensure!(count <= 1 << 24, TooLarge, "tokenizer.ggml.tokens has {count} entries; at most {} are supported", 1 << 24);
    for (key, len) in [("scores", vocab.scores.as_ref().map(Vec::len)), ("token_type", vocab.types.as_ref().map(Vec::len))] {
        if let Some(len) = len.filter(|&len| len != count) {
            let text = format!("tokenizer.ggml.{key} has {len} entries, tokenizer.ggml.tokens has {count}");
            return Err(Error::new(Kind::CorruptFile, text).named(format!("tokenizer.ggml.{key}")).sizes(count as u64, len as u64));
        }
    }
    Ok(())
}

fn scheme(vocab: &GgufVocab<'_>) -> Result<Scheme> {
    match vocab.model.as_str() {
        "gpt2" => byte_level_scheme(&pre_tokenizers::rule(&vocab.pre)?),
        "llama" => {
            ensure!(vocab.scores.is_some(), CorruptFile, "tokenizer.ggml.scores is missing, a 'llama' vocabulary needs it");
            sentencepiece_scheme(vocab.add_space_prefix.unwrap_or(true))
        }
        "gemma4" => sentencepiece_scheme(vocab.add_space_prefix.unwrap_or(false)),
        other => {
            let text = format!("tokenizer.ggml.model is '{other}'; this build knows gpt2, llama and gemma4");
            Err(Error::new(Kind::Unsupported, text).named("tokenizer.ggml.model"))
        }
    }
}

fn byte_level_scheme(rule: &Rule) -> Result<Scheme> {
    Ok(Scheme {
        normalizer: rule.nfc.then(|| NFC.into()),
        pre_tokenizer: Some(rule.build()?),
        rules: DecodeRules::byte_level(),
        byte_fallback: false,
        ignore_merges: rule.ignore_merges,
        add_bos: rule.add_bos,
    })
}

fn sentencepiece_scheme(space_prefix: bool) -> Result<Scheme> {
    let blanks = Replace::new(" ", "\u{2581}").map_err(|e| Error::new(Kind::Internal, format!("normalizer: {e}")))?;
    let normalizer =
        if space_prefix { Sequence::new(vec![Prepend::new("\u{2581}".to_string()).into(), blanks.into()]).into() } else { blanks.into() };
    Ok(Scheme {
        normalizer: Some(normalizer),
        pre_tokenizer: None,
        rules: DecodeRules::sentencepiece(space_prefix),
        byte_fallback: true,
        ignore_merges: false,
        add_bos: true,
    })
}

/// Types, or what the texts suggest when the file has none.
fn types<'a>(vocab: &'a GgufVocab<'_>) -> Cow<'a, [i32]> {
    if let Some(types) = &vocab.types {
        return Cow::Borrowed(types);
    }
    let named = |id: usize| [vocab.bos, vocab.eos, vocab.eot, vocab.eom, vocab.pad].contains(&Some(id as i64));
    let kind = |(id, text): (usize, &Cow<'_, str>)| match () {
        _ if vocab.unk == Some(id as i64) => token_type::UNKNOWN,
        _ if named(id) => token_type::CONTROL,
        _ if vocab.model != "gpt2" && fallback_byte(text).is_some() => token_type::BYTE,
        _ => token_type::NORMAL,
    };
    vocab.tokens.iter().enumerate().map(kind).collect()
}

fn is_special(kind: i32) -> bool {
    kind == token_type::UNKNOWN || kind == token_type::CONTROL
}

fn names(vocab: &GgufVocab<'_>) -> Result<Names> {
    let id = |key: &str, id: Option<i64>| -> Result<Option<i32>> {
        let Some(id) = id else { return Ok(None) };
        if id < 0 || id >= vocab.tokens.len() as i64 {
            let text = format!("tokenizer.ggml.{key}_token_id is {id}, the vocabulary has {} tokens", vocab.tokens.len());
            return Err(Error::new(Kind::CorruptFile, text).named(format!("tokenizer.ggml.{key}_token_id")));
        }
        Ok(Some(id as i32))
    };
    let (eos, eot, eom) = (id("eos", vocab.eos)?, id("eot", vocab.eot)?, id("eom", vocab.eom)?);
    let turn_end = |(at, text): (usize, &Cow<'_, str>)| {
        let control = vocab.types.as_ref().is_some_and(|types| types[at] == token_type::CONTROL);
        (control && TURN_ENDS.contains(&&**text)).then_some(at as i32)
    };
    let mut ends: Vec<i32> = vocab.tokens.iter().enumerate().filter_map(turn_end).collect();
    ends.extend([eos, eot, eom].into_iter().flatten());
    let mut templates: Vec<(String, String)> = vocab.chat_template.clone().map(|t| ("default".to_string(), t)).into_iter().collect();
    templates.extend(vocab.named_templates.iter().cloned());
    Ok(Names {
        bos: id("bos", vocab.bos)?,
        eos,
        unk: id("unknown", vocab.unk)?,
        pad: id("padding", vocab.pad)?,
        ends: sorted(ends),
        templates,
    })
}

/// What the model merges.
fn merges(vocab: &GgufVocab<'_>, types: &[i32], texts: &Texts) -> Result<Merges> {
    match &vocab.scores {
        Some(scores) if vocab.model == "llama" => {
            // A piece that a person added always wins in SentencePiece; the file's score for it says nothing.
            let score = |at: usize| match types[at] {
                token_type::NORMAL => Some(scores[at]),
                token_type::USER_DEFINED => Some(0.0),
                _ => None,
            };
            if let Some(scored) = Merges::scored(texts, (0..types.len()).map(score))? {
                return Ok(scored);
            }
            let text = |at: usize| std::str::from_utf8(texts.text(at as u32)).unwrap_or_default();
            let pieces = (0..types.len()).filter_map(|at| Some(Piece { id: at as u32, text: text(at), score: score(at)? }));
            Merges::listed(sentencepiece::merges(texts, pieces)?)
        }
        _ => Merges::listed(listed_merges(texts, &vocab.merges)?),
    }
}

fn listed_merges(vocab: &Texts, lines: &[Cow<'_, str>]) -> Result<Vec<Merge>> {
    let mut pairs = error::vec_with_capacity(lines.len(), "merges")?;
    for (at, line) in lines.iter().enumerate() {
        pass(line.len())?;
        // A blank can be the first character of a part in raw vocabularies, so the cut is at the first blank after it.
        let cut = line.char_indices().skip(1).find(|&(_, c)| c == ' ').map(|(cut, _)| cut);
        match cut.map(|cut| (&line[..cut], &line[cut + 1..])) {
            Some(pair) if !pair.1.is_empty() => pairs.push(pair),
            _ => bail!(CorruptFile, "tokenizer.ggml.merges[{at}] is '{line}', expected two texts with a space between"),
        }
    }
    bpe::resolve(vocab, "", pairs.into_iter()).map_err(|e| e.context("tokenizer.ggml.merges").named("tokenizer.ggml.merges"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn small() -> GgufVocab<'static> {
        let tokens = ["<unk>", "<s>", "</s>", "<0x41>", "▁", "a", "b", "ab", "▁ab", "  "];
        GgufVocab {
            model: "llama".into(),
            tokens: tokens.map(Cow::from).to_vec(),
            scores: Some(vec![0.0, 0.0, 0.0, 0.0, -4.0, -5.0, -6.0, -1.0, -2.0, -1000.0]),
            types: Some(vec![2, 3, 3, 6, 1, 1, 1, 1, 1, 4]),
            bos: Some(1),
            eos: Some(2),
            unk: Some(0),
            ..Default::default()
        }
    }

    #[test]
    fn sentencepiece_by_hand() {
        let t = Tokenizer::from_gguf(small()).unwrap();
        assert_eq!(t.encode("ab", true, true).unwrap(), [1, 8]);
        assert_eq!(t.encode("ab abA", false, true).unwrap(), [8, 8, 3]);
        // 'x' has no byte tokens, so it is unknown; special text is parsed only on request.
        assert_eq!(t.encode("abx", false, true).unwrap(), [8, 0]);
        assert_eq!(t.encode("</s>", false, true).unwrap(), [2]);
        assert!(!t.encode("</s>", false, false).unwrap().contains(&2));
        assert_eq!(t.decode(&[1, 8, 3, 8], true).unwrap(), b"abA ab");
        assert_eq!(t.decode(&[1, 8], false).unwrap(), b"<s> ab");
        assert_eq!(t.token_bytes(9).unwrap(), b"  ");
        assert_eq!((t.bos(), t.eos(), t.end_tokens()), (Some(1), Some(2), &[2][..]));
    }

    #[test]
    fn special_ids_outside_the_vocabulary_name_their_key() {
        for bad in [10, -1, i64::MAX, i64::from(u32::MAX)] {
            let cases: [(&str, fn(&mut GgufVocab, i64)); 6] = [
                ("bos", |v, id| v.bos = Some(id)),
                ("eos", |v, id| v.eos = Some(id)),
                ("eot", |v, id| v.eot = Some(id)),
                ("eom", |v, id| v.eom = Some(id)),
                ("unknown", |v, id| v.unk = Some(id)),
                ("padding", |v, id| v.pad = Some(id)),
            ];
            for (key, set) in cases {
                let mut vocab = small();
                set(&mut vocab, bad);
                let error = Tokenizer::from_gguf(vocab).err().unwrap();
                assert_eq!(error.kind(), Kind::CorruptFile);
                assert_eq!(error.name(), Some(format!("tokenizer.ggml.{key}_token_id").as_str()));
            }
        }
    }

    #[test]
    fn contradictions_are_refused() {
        let cases: [(Kind, fn(&mut GgufVocab)); 9] = [
            (Kind::CorruptFile, |v| v.tokens.clear()),
            (Kind::CorruptFile, |v| v.scores = Some(vec![0.0])),
            (Kind::CorruptFile, |v| v.types = Some(vec![1; 11])),
            (Kind::CorruptFile, |v| v.scores = None),
            (Kind::Unsupported, |v| v.model = "rwkv".into()),
            (Kind::Unsupported, |v| (v.model, v.pre) = ("gpt2".into(), "nobody".into())),
            (Kind::CorruptFile, |v| (v.model, v.merges) = ("gpt2".into(), vec!["a missing".into()])),
            (Kind::CorruptFile, |v| (v.model, v.merges) = ("gpt2".into(), vec!["a".into()])),
            (Kind::CorruptFile, |v| (v.model, v.merges) = ("gpt2".into(), vec![" ".into()])),
        ];
        for (at, (kind, change)) in cases.into_iter().enumerate() {
            let mut vocab = small();
            change(&mut vocab);
            let error = Tokenizer::from_gguf(vocab).err().unwrap();
            assert_eq!(error.kind(), kind, "case {at}: {error}");
        }
    }

    #[test]
    fn odd_numbers_and_types_do_no_harm() {
        let mut vocab = small();
        vocab.scores = Some(vec![f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, f32::NAN, 1e30, -0.0, f32::NAN, 2.0, 3.0]);
        vocab.types = Some(vec![i32::MIN, i32::MAX, 0, 6, 1, 1, 1, 1, 1, 4]);
        assert!(Tokenizer::from_gguf(vocab).unwrap().encode("ab ab", true, true).is_ok());
        let mut vocab = small();
        vocab.types = None;
        let t = Tokenizer::from_gguf(vocab).unwrap();
        assert_eq!(t.encode("ab</s>", true, true).unwrap(), [1, 8, 2]);
    }
}
