//! A model's tokens as the parser wants them: a tree of their exact bytes.

use std::sync::Arc;

use llguidance::api::{GrammarInit, ParserLimits};
use llguidance::toktrie::{ApproximateTokEnv, InferenceCapabilities, TokEnv, TokRxInfo, TokTrie};
use llguidance::{Logger, ParserFactory, TokenParser};

use crate::ensure;
use crate::error::{Error, Kind, Result};
use crate::text::{Tokenizer, own_stack};

/// Longer tokens are never chosen under a grammar; the tree holds at most 1,024 bytes in a row.
const LONGEST_TOKEN: usize = 512;

/// Stack for building the tree, which recurses once for each byte of a token.
const STACK: usize = 8 << 20;

/// The tokens that a grammar chooses among. Made once for a model.
pub struct Vocabulary {
    factory: ParserFactory,
    /// Width of a row of logits. The parser knows one token more, which stands for the end.
    rows: usize,
    /// Tokens that end generation, ascending.
    ends: Vec<i32>,
}

impl Vocabulary {
    /// The vocabulary of a tokenizer for a model with `rows` logits and these end tokens.
    pub fn of(tokenizer: &Tokenizer, rows: usize, ends: &[i32]) -> Result<Arc<Vocabulary>> {
        let word = |id: usize| -> Vec<u8> {
            let Ok(id) = i32::try_from(id) else { return Vec::new() };
            match tokenizer.token_bytes(id) {
                Ok(bytes) if tokenizer.is_special(id) => special(bytes),
                Ok(bytes) if tokenizer.is_token(id) => bytes.to_vec(),
                _ => Vec::new(),
            }
        };
        Vocabulary::new(rows, ends, word)
    }

    /// A vocabulary from the bytes of every token; no bytes, no such token. End tokens have a meaning instead of bytes.
    pub(super) fn new(rows: usize, ends: &[i32], word: impl Fn(usize) -> Vec<u8> + Sync) -> Result<Arc<Vocabulary>> {
        // The tree numbers tokens with 24 bits.
        ensure!(rows < (1 << 24) - 2, Unsupported, "a grammar over a vocabulary of {rows} tokens");
        let mut ends: Vec<i32> = ends.iter().copied().filter(|&id| usize::try_from(id).is_ok_and(|id| id < rows)).collect();
        ends.sort_unstable();
        ends.dedup();
        let factory = own_stack::run(STACK, "grammar vocabulary", || {
            let mut words = crate::error::vec_with_capacity(rows + 1, "grammar vocabulary")?;
            for id in 0..rows {
                let is_end = ends.binary_search(&(id as i32)).is_ok();
                let bytes = if is_end { Vec::new() } else { word(id) };
                words.push(if bytes.len() > LONGEST_TOKEN { Vec::new() } else { bytes });
            }
            words.push(Vec::new());
            let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, rows as u32), &words);
            // Not canonical: any spelling of the right bytes is allowed, not only the tokenizer's own.
            let env: TokEnv = Arc::new(ApproximateTokEnv::new(trie));
            let slices = llguidance::earley::SlicedBiasComputer::general_slices();
            ParserFactory::new(&env, InferenceCapabilities::default(), &slices)
                .map_err(|e| Error::new(Kind::Internal, format!("grammar vocabulary: {e}")))
        })?;
        Ok(Arc::new(Vocabulary { factory, rows, ends }))
    }

    /// Width of a row of logits.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Tokens that end generation, ascending.
    pub fn ends(&self) -> &[i32] {
        &self.ends
    }

    /// Whether a token ends generation.
    pub(super) fn is_end(&self, token: i32) -> bool {
        self.ends.binary_search(&token).is_ok()
    }

    pub(super) fn parser(&self, init: GrammarInit, limits: ParserLimits) -> Result<TokenParser, String> {
        let silent = Logger::new(0, 0);
        self.factory.create_parser_from_init_ext(init, silent, InferenceCapabilities::default(), limits).map_err(|e| e.to_string())
    }
}

/// A special token's name for grammars: a byte that no text holds in front of its literal text, so that plain text never
/// becomes a special token.
fn special(text: &[u8]) -> Vec<u8> {
    match text {
        [] => Vec::new(),
        _ => [&[TokTrie::SPECIAL_TOKEN_MARKER], text].concat(),
    }
}
