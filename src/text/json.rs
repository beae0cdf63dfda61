//! `tokenizer.json` and the files beside it.
//!
//! The file is read into its parts in one pass. Normalizer, pre-tokenizer, post-processor and the rarer models are then
//! made by the `tokenizers` crate; the vocabulary is checked, its bytes are tabled and its merges resolved here.

use std::collections::HashMap;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::Value;
use tokenizers::models::bpe::Vocab;
use tokenizers::models::unigram::Unigram;
use tokenizers::models::wordlevel::WordLevel;
use tokenizers::models::wordpiece::WordPiece;
use tokenizers::tokenizer::{AddedToken, NormalizerWrapper, PostProcessorWrapper, PreTokenizerWrapper};

use super::bpe::{self, Bpe, BpeOptions};
use super::decode_rules::DecodeRules;
use super::files::Files;
use super::pieces::{PieceKind, Pieces};
use super::texts::Texts;
use super::tokenizer::{Names, Parts, Tokenizer, Words, affixes, sorted};
use super::turns::pass;
use crate::error::{Context, Error, Kind, Result};
use crate::{bail, ensure};

/// Largest file read. The largest `tokenizer.json` in use has about 35 MB.
const MAX_FILE: u64 = 512 << 20;
/// Longest word that WordPiece looks at; its time grows with the square.
const MAX_WORD: usize = 1000;
/// Largest token id; tables are as long as the largest id.
const MAX_ID: u32 = 1 << 24;

pub(super) fn from_files(files: &dyn Files) -> Result<Option<Tokenizer>> {
    let Some(bytes) = files.read("tokenizer.json", MAX_FILE)? else { return Ok(None) };
    let mut config = read_json(files, "tokenizer_config.json")?.unwrap_or(Value::Null);
    add_template_files(files, &mut config)?;
    let mut tokenizer = from_bytes(&bytes, Some(&config))?;
    for file in ["generation_config.json", "config.json"] {
        let ends = match read_json(files, file)? {
            Some(config) => ids(config.get("eos_token_id").unwrap_or(&Value::Null)),
            None => Vec::new(),
        };
        if !ends.is_empty() {
            let known: Vec<i32> = ends.iter().filter_map(|&id| i32::try_from(id).ok()).collect();
            ensure!(known.len() == ends.len(), CorruptFile, "{file}: eos_token_id {ends:?} is not a token id");
            let both = [tokenizer.end_tokens(), &known].concat();
            tokenizer
                .set_end_tokens(&both)
                .map_err(|e| Error::new(Kind::CorruptFile, format!("{file}: eos_token_id: {e}")).named("eos_token_id"))?;
            break;
        }
    }
    Ok(Some(tokenizer))
}

pub(super) fn from_bytes(bytes: &[u8], config: Option<&Value>) -> Result<Tokenizer> {
    let file: File = serde_json::from_slice(bytes)
        .map_err(|e| Error::new(Kind::CorruptFile, format!("tokenizer.json: {e}")).named("tokenizer.json").at(e.column() as u64))?;
    let config = config.unwrap_or(&Value::Null);
    let rules = DecodeRules::from_json(&file.decoder)?;
    let post_processor: Option<PostProcessorWrapper> = part("post_processor", file.post_processor)?;
    let (mut prefix, mut suffix) = match &post_processor {
        Some(post_processor) => affixes(post_processor)?,
        None => Default::default(),
    };
    let added: Vec<(u32, AddedToken)> = file.added_tokens.into_iter().map(|t| (t.id, t.token)).collect();
    let pieces = pieces(&file.model.vocab, &added, &rules)?;

    let find = |text: &str| -> Option<i32> {
        let id = added.iter().find(|(_, token)| token.content == text).map(|&(id, _)| id).or_else(|| file.model.vocab.id(text));
        id.and_then(|id| i32::try_from(id).ok())
    };
    let role = |key: &str| token_text(config.get(key)).and_then(|text| find(&text));
    let (bos, eos) = (role("bos_token"), role("eos_token"));
    affix_by_config(config, "add_bos_token", bos, &mut prefix);
    affix_by_config(config, "add_eos_token", eos, &mut suffix);
    for &id in prefix.iter().chain(&suffix) {
        let known = i32::try_from(id).is_ok_and(|id| pieces.kind(id) != PieceKind::Hole);
        ensure!(known, CorruptFile, "tokenizer.json: post_processor adds token {id}, the vocabulary has {} tokens", pieces.len());
    }
    let unk = role("unk_token").or_else(|| file.model.unk_token.as_deref().and_then(find));
    let names = Names { bos, eos, unk, pad: role("pad_token"), ends: sorted(eos.into_iter().collect()), templates: templates(config) };
    Tokenizer::assemble(Parts {
        words: words(file.model)?,
        expansion: expansion(&file.normalizer),
        normalizer: part::<NormalizerWrapper>("normalizer", file.normalizer)?,
        pre_tokenizer: part::<PreTokenizerWrapper>("pre_tokenizer", file.pre_tokenizer)?,
        added,
        prefix,
        suffix,
        pieces,
        strip_start: rules.strip_start,
        names,
    })
}

/// `tokenizer.json`. Truncation and padding settings are for training and are ignored.
#[derive(Deserialize)]
struct File {
    #[serde(default)]
    added_tokens: Vec<Added>,
    #[serde(default)]
    normalizer: Value,
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
    model: ModelFile,
}

#[derive(Deserialize)]
struct Added {
    id: u32,
    #[serde(flatten)]
    token: AddedToken,
}

/// The `model` entry, all kinds together; what a kind does not have stays at its default.
#[derive(Deserialize)]
struct ModelFile {
    #[serde(rename = "type")]
    kind: Option<String>,
    vocab: VocabFile,
    merges: Option<Vec<Merge>>,
    unk_token: Option<String>,
    unk_id: Option<usize>,
    dropout: Option<f32>,
    continuing_subword_prefix: Option<String>,
    end_of_word_suffix: Option<String>,
    fuse_unk: Option<bool>,
    byte_fallback: Option<bool>,
    ignore_merges: Option<bool>,
    max_input_chars_per_word: Option<usize>,
}

/// A map of text to id, or for Unigram a list of texts with scores.
enum VocabFile {
    Map(Vocab),
    List(Vec<(String, f64)>),
}

impl VocabFile {
    fn id(&self, text: &str) -> Option<u32> {
        match self {
            VocabFile::Map(map) => map.get(text).copied(),
            VocabFile::List(list) => list.iter().position(|(known, _)| known == text).map(|at| at as u32),
        }
    }
}

impl<'de> Deserialize<'de> for VocabFile {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = VocabFile;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a map of token to id or a list of [token, score]")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> std::result::Result<VocabFile, A::Error> {
                let mut vocab = Vocab::new();
                while let Some((text, id)) = map.next_entry::<String, u32>()? {
                    pass(text.len()).map_err(A::Error::custom)?;
                    vocab.insert(text, id);
                }
                Ok(VocabFile::Map(vocab))
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<VocabFile, A::Error> {
                let mut list = Vec::new();
                while let Some(entry) = seq.next_element::<(String, f64)>()? {
                    pass(entry.0.len()).map_err(A::Error::custom)?;
                    list.push(entry);
                }
                Ok(VocabFile::List(list))
            }
        }
        from.deserialize_any(Read)
    }
}

/// A merge: `["a", "b"]`, or in older files `"a b"`.
struct Merge(String, String);

impl<'de> Deserialize<'de> for Merge {
    fn deserialize<D: Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        struct Read;
        impl<'de> Visitor<'de> for Read {
            type Value = Merge;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a merge, [\"a\", \"b\"] or \"a b\"")
            }
            fn visit_str<E: serde::de::Error>(self, text: &str) -> std::result::Result<Merge, E> {
                pass(text.len()).map_err(E::custom)?;
                let mut parts = text.split(' ');
                match (parts.next(), parts.next(), parts.next()) {
                    (Some(a), Some(b), None) => Ok(Merge(a.to_string(), b.to_string())),
                    _ => Err(E::custom(format!("merge '{text}' is not two texts with a space between"))),
                }
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> std::result::Result<Merge, A::Error> {
                pass(0).map_err(A::Error::custom)?;
                let short = || A::Error::custom("a merge has two texts");
                let merge = Merge(seq.next_element()?.ok_or_else(short)?, seq.next_element()?.ok_or_else(short)?);
                if seq.next_element::<String>()?.is_some() { Err(short()) } else { Ok(merge) }
            }
        }
        from.deserialize_any(Read)
    }
}

/// A part that the `tokenizers` crate reads itself.
fn part<T: serde::de::DeserializeOwned>(name: &str, value: Value) -> Result<Option<T>> {
    if value.is_null() {
        return Ok(None);
    }
    serde_json::from_value(value).map(Some).map_err(|e| Error::new(Kind::CorruptFile, format!("tokenizer.json: {name}: {e}")).named(name))
}

/// How many times longer a normalizer can make a text, at most.
fn expansion(normalizer: &Value) -> usize {
    let len = |key: &str| normalizer.get(key).and_then(Value::as_str).map_or(0, str::len);
    match normalizer.get("type").and_then(Value::as_str) {
        Some("Sequence") => {
            let parts = normalizer.get("normalizers").and_then(Value::as_array).into_iter().flatten();
            parts.map(expansion).fold(1, usize::saturating_mul)
        }
        Some("Replace") => {
            let pattern = normalizer.get("pattern").and_then(|p| p.get("String")).and_then(Value::as_str);
            // A regular expression may match nothing, before every byte.
            pattern.map_or(len("content") + 1, |pattern| len("content").div_ceil(pattern.len().max(1)).max(1))
        }
        Some("Prepend") => len("prepend").max(1),
        // U+FDFA, 3 bytes, becomes 33 (NFKC, NFKD); other forms triple at most.
        Some("NFKC" | "NFKD" | "Precompiled" | "Nmt") => 11,
        Some("NFC" | "NFD" | "BertNormalizer" | "Lowercase" | "ByteLevel") => 3,
        _ => 1,
    }
}

fn words(file: ModelFile) -> Result<Words> {
    let kind = match file.kind.as_deref() {
        Some(kind) => kind.to_string(),
        // Files from before the entry had a type.
        None if file.merges.is_some() => "BPE".to_string(),
        None if matches!(file.vocab, VocabFile::List(_)) => "Unigram".to_string(),
        None => "WordPiece".to_string(),
    };
    let corrupt = |e: tokenizers::Error| Error::new(Kind::CorruptFile, format!("tokenizer.json: model: {e}")).named("model");
    match (kind.as_str(), file.vocab) {
        ("BPE", VocabFile::Map(vocab)) => {
            ensure!(file.dropout.unwrap_or(0.0) == 0.0, Unsupported, "tokenizer.json: model.dropout is for training only");
            let find = |unk: &String| {
                let missing = || Error::new(Kind::CorruptFile, format!("tokenizer.json: model.unk_token '{unk}' is not in model.vocab"));
                vocab.get(unk).copied().ok_or_else(missing)
            };
            let options = BpeOptions {
                unk: file.unk_token.as_ref().map(find).transpose()?,
                fuse_unk: file.fuse_unk.unwrap_or(false),
                byte_fallback: file.byte_fallback.unwrap_or(false),
                ignore_merges: file.ignore_merges.unwrap_or(false),
                continuing_prefix: file.continuing_subword_prefix.unwrap_or_default(),
                word_end: file.end_of_word_suffix.unwrap_or_default(),
            };
            let listed = file.merges.unwrap_or_default();
            let pairs = listed.iter().map(|Merge(left, right)| (left.as_str(), right.as_str()));
            let vocab = Texts::of(vocab.iter().map(|(text, &id)| (text.as_str(), id)))?;
            let merges = bpe::resolve(&vocab, &options.continuing_prefix, pairs)
                .map_err(|e| e.context("tokenizer.json: model.merges").named("model.merges"))?;
            Ok(Words::Bpe(Bpe::new(vocab, bpe::Merges::listed(merges)?, options)))
        }
        ("WordPiece", VocabFile::Map(vocab)) => {
            let unk = file.unk_token.unwrap_or_else(|| "[UNK]".to_string());
            ensure!(vocab.contains_key(&unk), CorruptFile, "tokenizer.json: model.unk_token '{unk}' is not in model.vocab");
            let pieces = WordPiece::builder()
                .vocab(vocab)
                .unk_token(unk)
                .continuing_subword_prefix(file.continuing_subword_prefix.unwrap_or_else(|| "##".to_string()))
                .max_input_chars_per_word(file.max_input_chars_per_word.unwrap_or(100).min(MAX_WORD));
            Ok(Words::Other(pieces.build().map_err(corrupt)?.into()))
        }
        ("WordLevel", VocabFile::Map(vocab)) => {
            let unk = file.unk_token.unwrap_or_default();
            Ok(Words::Other(WordLevel::builder().vocab(vocab).unk_token(unk).build().map_err(corrupt)?.into()))
        }
        ("Unigram", VocabFile::List(list)) => {
            if let Some(at) = list.iter().position(|(text, score)| text.is_empty() || !score.is_finite()) {
                bail!(CorruptFile, "tokenizer.json: model.vocab[{at}] has no text or no finite score");
            }
            let mut unigram = Unigram::from(list, file.unk_id, file.byte_fallback.unwrap_or(false)).map_err(corrupt)?;
            unigram.resize_cache(0);
            Ok(Words::Other(unigram.into()))
        }
        ("BPE" | "WordPiece" | "WordLevel" | "Unigram", _) => {
            bail!(CorruptFile, "tokenizer.json: model.vocab has the wrong shape for a {kind} model")
        }
        _ => bail!(Unsupported, "tokenizer.json: model.type '{kind}'; this build knows BPE, WordPiece, WordLevel and Unigram"),
    }
}

/// The bytes of every id; added tokens stand above the model's own.
fn pieces(vocab: &VocabFile, added: &[(u32, AddedToken)], rules: &DecodeRules) -> Result<Pieces> {
    let mut by_id: Vec<(u32, PieceKind, &str)> = match vocab {
        VocabFile::Map(map) => map.iter().map(|(text, &id)| (id, PieceKind::Text, text.as_str())).collect(),
        VocabFile::List(list) => list.iter().enumerate().map(|(id, (text, _))| (id as u32, PieceKind::Text, text.as_str())).collect(),
    };
    let from_model = by_id.len();
    for (id, token) in added {
        let kind = if token.special { PieceKind::Special } else { PieceKind::Text };
        by_id.push((*id, kind, &token.content));
    }
    // Stable: an added token comes after the model's entry of the same id and replaces it.
    let is_added: HashMap<u32, usize> = added.iter().enumerate().map(|(at, (id, _))| (*id, from_model + at)).collect();
    by_id.sort_by_key(|&(id, ..)| id);
    let count = by_id.last().map_or(0, |&(id, ..)| id as usize + 1);
    ensure!(count > 0, CorruptFile, "tokenizer.json: model.vocab is empty");
    ensure!(count <= MAX_ID as usize, CorruptFile, "tokenizer.json: token id {} is beyond {MAX_ID}", count - 1);

    let mut pieces = Pieces::with_capacity(count)?;
    for (at, &(id, kind, text)) in by_id.iter().enumerate() {
        pass(0)?;
        if by_id.get(at + 1).is_some_and(|&(next, ..)| next == id) {
            continue;
        }
        while pieces.len() < id as usize {
            pieces.push(PieceKind::Hole, &[])?;
        }
        // Byte-level letters are for the model's tokens; what was added by hand is meant literally.
        let literal = kind == PieceKind::Special || (rules.byte_level && is_added.contains_key(&id));
        if literal { pieces.push(kind, text.as_bytes())? } else { pieces.push(kind, &rules.bytes(text))? }
    }
    Ok(pieces)
}

/// `add_bos_token` and `add_eos_token` decide, where they are given, over what the post-processor does.
fn affix_by_config(config: &Value, key: &str, id: Option<i32>, affix: &mut Vec<u32>) {
    let (Some(wanted), Some(id)) = (config.get(key).and_then(Value::as_bool), id) else { return };
    let id = id as u32;
    match (wanted, affix.contains(&id)) {
        (true, false) => affix.push(id),
        (false, true) => affix.retain(|&known| known != id),
        _ => {}
    }
}

/// A token as `tokenizer_config.json` names it: its text, or an object with it.
fn token_text(value: Option<&Value>) -> Option<String> {
    let value = value?;
    value.as_str().or_else(|| value.get("content")?.as_str()).map(str::to_string)
}

fn templates(config: &Value) -> Vec<(String, String)> {
    match config.get("chat_template") {
        Some(Value::String(source)) => vec![("default".to_string(), source.clone())],
        Some(Value::Array(list)) => {
            let text = |entry: &Value, key: &str| entry.get(key).and_then(Value::as_str).map(str::to_string);
            list.iter().filter_map(|entry| Some((text(entry, "name")?, text(entry, "template")?))).collect()
        }
        _ => Vec::new(),
    }
}

/// One id, or a list of them.
fn ids(value: &Value) -> Vec<i64> {
    // A number that is no i64 must not pass for a missing one.
    let id = |value: &Value| value.as_number().map(|n| n.as_i64().unwrap_or(i64::MAX));
    match value {
        Value::Array(list) => list.iter().filter_map(id).collect(),
        other => id(other).into_iter().collect(),
    }
}

/// Templates that newer folders keep in files of their own; they stand above the configuration.
fn add_template_files(files: &dyn Files, config: &mut Value) -> Result<()> {
    let mut found: Vec<(String, String)> = Vec::new();
    if let Some(source) = read_text(files, "chat_template.jinja")? {
        found.push(("default".to_string(), source));
    } else if let Some(Value::String(source)) = read_json(files, "chat_template.json")?.and_then(|v| v.get("chat_template").cloned()) {
        found.push(("default".to_string(), source));
    }
    for file in files.list(MORE_TEMPLATES) {
        if let Some(name) = file.strip_suffix(".jinja").filter(|name| !name.is_empty())
            && let Some(source) = read_text(files, &format!("{MORE_TEMPLATES}/{file}"))?
        {
            found.push((name.to_string(), source));
        }
    }
    if found.is_empty() {
        return Ok(());
    }
    found.sort();
    for (name, source) in templates(config) {
        if !found.iter().any(|(known, _)| *known == name) {
            found.push((name, source));
        }
    }
    if !config.is_object() {
        *config = Value::Object(Default::default());
    }
    config["chat_template"] = found.into_iter().map(|(name, template)| serde_json::json!({"name": name, "template": template})).collect();
    Ok(())
}

/// Folder of further templates, a file for each.
const MORE_TEMPLATES: &str = "additional_chat_templates";

fn read_text(files: &dyn Files, name: &str) -> Result<Option<String>> {
    let Some(bytes) = files.read(name, MAX_FILE)? else { return Ok(None) };
    let text = String::from_utf8(bytes.into_owned());
    text.map(Some).map_err(|e| Error::new(Kind::CorruptFile, format!("{}: {e}", files.label(name))))
}

fn read_json(files: &dyn Files, name: &str) -> Result<Option<Value>> {
    let Some(bytes) = files.read(name, MAX_FILE)? else { return Ok(None) };
    serde_json::from_slice(&bytes)
        .map(Some)
        .map_err(|e| Error::new(Kind::CorruptFile, e.to_string()).named(files.label(name)))
        .context(|| files.label(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn sample() -> Value {
        json!({
            "added_tokens": [{"id": 5, "content": "<e>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true},
                             {"id": 9, "content": "é x", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": false}],
            "normalizer": null,
            "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "post_processor": null,
            "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "Ġ": 3, "Ã": 4}, "merges": ["a b"]}
        })
    }

    fn load(value: &Value, config: Option<&Value>) -> Result<Tokenizer> {
        Tokenizer::from_json(value.to_string().as_bytes(), config)
    }

    #[test]
    fn ids_come_from_the_file() {
        let t = load(&sample(), Some(&json!({"eos_token": {"content": "<e>"}, "add_eos_token": true}))).unwrap();
        assert_eq!(t.encode("ab é x<e>", true, true).unwrap(), [2, 3, 9, 5, 5]);
        assert_eq!(t.decode(&[2, 3, 9, 4, 5], true).unwrap(), b"ab \xc3\xa9 x\xc3");
        assert_eq!((t.vocab_len(), t.is_token(7), t.is_special(5), t.eos()), (10, false, true, Some(5)));
        assert_eq!(t.decode(&[2, 7], true).unwrap_err().offset(), Some(1));
    }

    #[test]
    fn configuration_decides_over_the_post_processor() {
        let mut file = sample();
        file["post_processor"] = json!({"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<e>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
            "special_tokens": {"<e>": {"id": "<e>", "ids": [5], "tokens": ["<e>"]}}});
        let ids = |config: Value| load(&file, Some(&config)).unwrap().encode("a", true, false).unwrap();
        assert_eq!(ids(json!({})), [5, 0]);
        assert_eq!(ids(json!({"bos_token": "<e>", "add_bos_token": true})), [5, 0]);
        assert_eq!(ids(json!({"bos_token": "<e>", "add_bos_token": false})), [0]);
        file["post_processor"]["special_tokens"]["<e>"]["ids"] = json!([77]);
        assert_eq!(load(&file, None).err().unwrap().kind(), Kind::CorruptFile);
    }

    #[test]
    fn malformed_files_are_errors() {
        let cases: Vec<(&str, Value)> = vec![
            ("/model/vocab", json!({})),
            ("/model/vocab", json!({"a": -1})),
            ("/model/vocab", json!({"a": 4_000_000_000u32})),
            ("/model/vocab", json!([["a", 0.0]])),
            ("/model/vocab", json!(7)),
            ("/model/merges", json!(["a b c"])),
            ("/model/merges", json!([["a"]])),
            ("/model/merges", json!([["a", "b", "c"]])),
            ("/model/merges", json!([["a", "x"]])),
            ("/model/merges", json!([["", "a"]])),
            ("/model/merges", json!([["ab", "aaaaaaaaaaaaaaaa"]])),
            ("/model/type", json!("Magic")),
            ("/model/type", json!("Unigram")),
            ("/decoder", json!({"type": "Magic"})),
            ("/normalizer", json!({"type": "Magic"})),
            ("/normalizer", json!({"type": "Replace", "pattern": {"Regex": "("}, "content": ""})),
            ("/normalizer", json!({"type": "Replace", "pattern": {"Regex": "(".repeat(100_000)}, "content": ""})),
            ("/pre_tokenizer", json!({"type": "Split", "pattern": {"Regex": "*a"}, "behavior": "Isolated", "invert": false})),
            ("/post_processor", json!({"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}})),
            ("/added_tokens", json!([{"id": 1}])),
        ];
        for (path, value) in cases {
            let mut file = sample();
            *file.pointer_mut(path).unwrap_or(&mut Value::Null) = value.clone();
            assert!(load(&file, None).is_err(), "{path} = {value}");
        }
        let nested = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        for text in ["", "{}", "null", "[1]", nested.as_str(), "{\"model\":", "\u{feff}"] {
            assert_eq!(Tokenizer::from_json(text.as_bytes(), None).err().unwrap().kind(), Kind::CorruptFile);
        }
    }

    #[test]
    fn a_normalizer_that_inflates_text_gets_short_texts_only() {
        let mut file = sample();
        let replace = json!({"type": "Replace", "pattern": {"String": "a"}, "content": "aaaaaaaaaaaaaaaa"});
        file["normalizer"] = json!({"type": "Sequence", "normalizers": vec![replace; 6]});
        let t = load(&file, None).unwrap();
        assert_eq!(t.encode("aaaa", false, false).unwrap_err().kind(), Kind::TooLarge);
        assert_eq!(expansion(&json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"})), 3);
    }

    #[test]
    fn templates_from_files_and_lists() {
        let config = json!({"chat_template": [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]});
        let t = load(&sample(), Some(&config)).unwrap();
        assert_eq!((t.chat_template(), t.named_chat_template("tool_use")), (Some("D"), Some("T")));
        assert_eq!(t.chat_template_names().collect::<Vec<_>>(), ["default", "tool_use"]);
    }
}
