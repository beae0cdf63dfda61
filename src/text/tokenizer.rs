//! The tokenizer: text to ids and back, whatever file the vocabulary came from.
//!
//! The parts of the `tokenizers` crate are run here one after the other (split at added tokens, normalize, pre-tokenize,
//! merge) rather than through its own `Tokenizer`, because there whether special tokens are parsed is a state of the
//! object and not a choice of the call. Its caches are switched off (they live in thread-local storage and would outlive
//! the model) and so is its thread pool.

use std::collections::HashMap;
use std::path::{Path, PathBuf};

use tokenizers::models::bpe::BpeTrainer;
use tokenizers::tokenizer::{
    AddedToken, AddedVocabulary, Encoding, Model, ModelWrapper, NormalizerWrapper, OffsetType, PostProcessor, PostProcessorWrapper,
    PreTokenizer, PreTokenizerWrapper, Token,
};

use super::bpe::Bpe;
use super::files::Files;
use super::gguf::{self, GgufVocab};
use super::json;
use super::own_stack;
use super::pieces::{PieceKind, Pieces};
use crate::bail;
use crate::ensure;
use crate::error::{Error, Kind, Result};

/// Longest text that is tokenized in one call, after normalizing. Working on it takes about 50 bytes for each of its
/// bytes, and no context holds anything near as many tokens.
const MAX_TEXT: usize = 48 << 20;

/// A vocabulary with everything needed to encode and decode. Immutable but for the end tokens; `Send + Sync`.
pub struct Tokenizer {
    words: Words,
    normalizer: Option<NormalizerWrapper>,
    pre_tokenizer: Option<PreTokenizerWrapper>,
    /// Finds added tokens, special ones included.
    added: AddedVocabulary,
    /// Finds added tokens, but leaves the text of special ones alone.
    added_plain: AddedVocabulary,
    /// Ids that the model wants before and after a text.
    prefix: Vec<u32>,
    suffix: Vec<u32>,
    pieces: Pieces,
    strip_start: usize,
    max_text: usize,
    names: Names,
}

/// What turns a word into tokens.
pub(super) enum Words {
    /// Byte-pair merges: nearly every language model.
    Bpe(Bpe),
    /// The other kinds, as the `tokenizers` crate has them.
    Other(ModelWrapper),
}

impl Words {
    fn tokenize(&self, word: &str) -> tokenizers::Result<Vec<Token>> {
        match self {
            Words::Bpe(bpe) => Ok(bpe.tokens(word).into_iter().map(|id| Token::new(id, String::new(), (0, 0))).collect()),
            Words::Other(model) => model.tokenize(word),
        }
    }

    fn id(&self, text: &str) -> Option<u32> {
        match self {
            Words::Bpe(bpe) => bpe.id(text),
            Words::Other(model) => model.token_to_id(text),
        }
    }
}

/// Ids with a role, and the templates.
#[derive(Clone, Debug, Default)]
pub(super) struct Names {
    pub(super) bos: Option<i32>,
    pub(super) eos: Option<i32>,
    pub(super) unk: Option<i32>,
    pub(super) pad: Option<i32>,
    /// All tokens that end a turn or a text, ascending.
    pub(super) ends: Vec<i32>,
    /// Named chat templates; the one called `default` is meant when none is named.
    pub(super) templates: Vec<(String, String)>,
}

/// What a reader of a vocabulary hands over.
pub(super) struct Parts {
    pub(super) words: Words,
    pub(super) normalizer: Option<NormalizerWrapper>,
    /// How many times longer the normalizer can make a text.
    pub(super) expansion: usize,
    pub(super) pre_tokenizer: Option<PreTokenizerWrapper>,
    pub(super) added: Vec<(u32, AddedToken)>,
    pub(super) prefix: Vec<u32>,
    pub(super) suffix: Vec<u32>,
    pub(super) pieces: Pieces,
    pub(super) strip_start: usize,
    pub(super) names: Names,
}

impl Tokenizer {
    /// From a folder with `tokenizer.json`; `None` if there is none. `tokenizer_config.json`, `chat_template.jinja`,
    /// `additional_chat_templates/` and `generation_config.json` are read when they are there.
    pub fn from_folder(folder: &Path) -> Result<Option<Tokenizer>> {
        Self::from_files(&folder.to_path_buf())
    }

    /// As [`Tokenizer::from_folder`], wherever the files are.
    pub fn from_files(files: &dyn Files) -> Result<Option<Tokenizer>> {
        tokenizers::utils::parallelism::set_parallelism(false);
        own_stack::run(own_stack::LOAD_STACK, "tokenizer", || json::from_files(files))
    }

    /// From the bytes of a `tokenizer.json`, with the parsed `tokenizer_config.json` if there is one.
    pub fn from_json(bytes: &[u8], tokenizer_config: Option<&serde_json::Value>) -> Result<Tokenizer> {
        tokenizers::utils::parallelism::set_parallelism(false);
        own_stack::run(own_stack::LOAD_STACK, "tokenizer.json", || json::from_bytes(bytes, tokenizer_config))
    }

    /// From the vocabulary in the metadata of a GGUF file.
    pub fn from_gguf(vocab: GgufVocab<'_>) -> Result<Tokenizer> {
        tokenizers::utils::parallelism::set_parallelism(false);
        own_stack::run(own_stack::LOAD_STACK, "GGUF vocabulary", || gguf::build(vocab))
    }

    pub(super) fn assemble(parts: Parts) -> Result<Tokenizer> {
        let known = KnownIds(parts.added.iter().map(|(id, token)| (token.content.clone(), *id)).collect());
        let mut added = AddedVocabulary::new();
        added
            .add_tokens(parts.added.into_iter().map(|(_, token)| token), &known, parts.normalizer.as_ref())
            .map_err(|e| Error::new(Kind::CorruptFile, format!("added tokens: {e}")).named("added_tokens"))?;
        let mut added_plain = added.clone();
        added_plain.set_encode_special_tokens(true);
        Ok(Tokenizer {
            words: parts.words,
            normalizer: parts.normalizer,
            pre_tokenizer: parts.pre_tokenizer,
            added,
            added_plain,
            prefix: parts.prefix,
            suffix: parts.suffix,
            pieces: parts.pieces,
            strip_start: parts.strip_start,
            // A blank that becomes U+2581 is three bytes, so three is the ordinary case.
            max_text: MAX_TEXT / parts.expansion.max(3),
            names: parts.names,
        })
    }

    /// The ids of a text. `add_special` puts the tokens around it that the model was trained to see (usually one that
    /// begins a text). With `parse_special` the text of a special token becomes that token; without, it is plain text,
    /// which is right for text from a stranger.
    pub fn encode(&self, text: &str, add_special: bool, parse_special: bool) -> Result<Vec<i32>> {
        if text.len() > self.max_text {
            let message = format!("text of {} bytes; at most {} are tokenized in one call", text.len(), self.max_text);
            return Err(Error::new(Kind::TooLarge, message).sizes(text.len() as u64, self.max_text as u64));
        }
        let added = if parse_special { &self.added } else { &self.added_plain };
        let encoding = own_stack::caught("tokenizer", || {
            let failed = |e: tokenizers::Error| Error::new(Kind::InvalidArgument, format!("text cannot be tokenized: {e}"));
            let mut pieces = added.extract_and_normalize(self.normalizer.as_ref(), text);
            if let Some(pre_tokenizer) = &self.pre_tokenizer {
                pre_tokenizer.pre_tokenize(&mut pieces).map_err(failed)?;
            }
            pieces.tokenize(|piece| self.words.tokenize(piece.get())).map_err(failed)?;
            pieces.into_encoding(None, 0, OffsetType::None).map_err(failed)
        })?;
        let (before, after): (&[u32], &[u32]) = if add_special { (&self.prefix, &self.suffix) } else { (&[], &[]) };
        let mut ids = crate::error::vec_with_capacity(before.len() + encoding.len() + after.len(), "token ids")?;
        ids.extend(before.iter().chain(encoding.get_ids()).chain(after).map(|&id| id as i32));
        Ok(ids)
    }

    /// The bytes of a whole text. They need not be UTF-8: a token may be part of a character. Where the vocabulary puts a
    /// space before the first word, that space is taken off again; pieces of a running text come from [`Self::token_bytes`].
    pub fn decode(&self, ids: &[i32], skip_special: bool) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        for (at, &id) in ids.iter().enumerate() {
            let piece = self.pieces.get(id).map_err(|e| e.context(format!("index {at}")).at(at as u64))?;
            if !(skip_special && self.is_special(id)) {
                bytes.extend_from_slice(piece);
            }
        }
        let spaces = bytes.iter().take(self.strip_start).take_while(|&&b| b == b' ').count();
        bytes.drain(..spaces);
        Ok(bytes)
    }

    /// Exactly the bytes this token adds to a text; special tokens give their literal text.
    pub fn token_bytes(&self, id: i32) -> Result<&[u8]> {
        self.pieces.get(id)
    }

    /// The token with this literal text: an added token, or an entry of the vocabulary as it is written in the file.
    pub fn token_id(&self, text: &str) -> Option<i32> {
        let id = self.added.get_vocab().get(text).copied().or_else(|| self.words.id(text))?;
        i32::try_from(id).ok()
    }

    /// One more than the largest id. The model's matrix may have more rows, for padding.
    pub fn vocab_len(&self) -> usize {
        self.pieces.len()
    }

    /// Whether this is a control token, whose text is not part of what was said.
    pub fn is_special(&self, id: i32) -> bool {
        self.pieces.kind(id) == PieceKind::Special
    }

    /// Whether a token has this id.
    pub fn is_token(&self, id: i32) -> bool {
        self.pieces.kind(id) != PieceKind::Hole
    }

    /// The token that begins a text.
    pub fn bos(&self) -> Option<i32> {
        self.names.bos
    }
    /// The token that ends a text.
    pub fn eos(&self) -> Option<i32> {
        self.names.eos
    }
    /// The token for what cannot be written.
    pub fn unk(&self) -> Option<i32> {
        self.names.unk
    }
    /// The token that fills a batch.
    pub fn pad(&self) -> Option<i32> {
        self.names.pad
    }

    /// All tokens that end a generation, ascending.
    pub fn end_tokens(&self) -> &[i32] {
        &self.names.ends
    }

    /// Whether a generation ends at this token.
    pub fn is_end(&self, id: i32) -> bool {
        self.names.ends.binary_search(&id).is_ok()
    }

    /// Replaces the end tokens, for a model whose configuration names others.
    pub fn set_end_tokens(&mut self, ids: &[i32]) -> Result<()> {
        for (at, &id) in ids.iter().enumerate() {
            if !self.is_token(id) {
                let text = format!("end token {id} (index {at}) is not in the vocabulary of {} tokens", self.vocab_len());
                return Err(Error::new(Kind::InvalidToken, text).at(at as u64));
            }
        }
        self.names.ends = sorted(ids.to_vec());
        Ok(())
    }

    /// The chat template that is meant when none is named.
    pub fn chat_template(&self) -> Option<&str> {
        self.named_chat_template("default")
    }

    /// A template by name, such as `tool_use`.
    pub fn named_chat_template(&self, name: &str) -> Option<&str> {
        self.names.templates.iter().find(|(known, _)| known == name).map(|(_, source)| source.as_str())
    }

    /// The names of the chat templates.
    pub fn chat_template_names(&self) -> impl Iterator<Item = &str> {
        self.names.templates.iter().map(|(name, _)| name.as_str())
    }
}

/// Ascending, each once.
pub(super) fn sorted(mut ids: Vec<i32>) -> Vec<i32> {
    ids.sort_unstable();
    ids.dedup();
    ids
}

/// The ids that a post-processor puts before and after a text, found by letting it process one that cannot occur.
pub(super) fn affixes(post_processor: &PostProcessorWrapper) -> Result<(Vec<u32>, Vec<u32>)> {
    const MARK: u32 = u32::MAX;
    let text = Encoding::from_tokens(vec![Token::new(MARK, String::new(), (0, 0))], 0);
    let around = own_stack::caught("post_processor", || {
        post_processor.process(text, None, true).map_err(|e| Error::new(Kind::CorruptFile, format!("post_processor: {e}")))
    })?;
    let ids = around.get_ids();
    let Some(at) = ids.iter().position(|&id| id == MARK) else {
        bail!(CorruptFile, "tokenizer.json: the post_processor drops the text");
    };
    let (prefix, suffix) = (ids[..at].to_vec(), ids[at + 1..].to_vec());
    ensure!(!suffix.contains(&MARK), Unsupported, "tokenizer.json: the post_processor repeats the text");
    Ok((prefix, suffix))
}

/// Tells `AddedVocabulary` which ids the file gives to its tokens; it would otherwise number them itself.
struct KnownIds(HashMap<String, u32>);

impl Model for KnownIds {
    type Trainer = BpeTrainer;

    fn tokenize(&self, _: &str) -> tokenizers::Result<Vec<Token>> {
        Err("only ids are known here".into())
    }
    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.0.get(token).copied()
    }
    fn id_to_token(&self, _: u32) -> Option<String> {
        None
    }
    fn get_vocab(&self) -> HashMap<String, u32> {
        self.0.clone()
    }
    fn get_vocab_size(&self) -> usize {
        self.0.len()
    }
    fn save(&self, _: &Path, _: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        Err("nothing to save".into())
    }
    fn get_trainer(&self) -> BpeTrainer {
        BpeTrainer::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn is_shared_between_threads() {
        fn shared<T: Send + Sync>() {}
        shared::<Tokenizer>();
    }

    #[test]
    fn post_processors_become_affixes() {
        let json = serde_json::json!({"type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "a", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                       {"SpecialToken": {"id": "b", "type_id": 0}}], "pair": [],
            "special_tokens": {"a": {"id": "a", "ids": [7, 8], "tokens": ["x", "y"]}, "b": {"id": "b", "ids": [9], "tokens": ["z"]}}});
        let processor: PostProcessorWrapper = serde_json::from_value(json).unwrap();
        assert_eq!(affixes(&processor).unwrap(), (vec![7, 8], vec![9]));
    }
}
