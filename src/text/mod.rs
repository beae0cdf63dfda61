//! Text: between bytes and token ids, between messages and a prompt.
//!
//! Vocabularies come from `tokenizer.json` or from the metadata of a GGUF file; both end in the same [`Tokenizer`], which
//! runs the parts of the `tokenizers` crate itself (normalizer, pre-tokenizer, model; byte-pair merging is ours) so that no
//! state is shared and no thread is started. Decoding is ours: every token has its exact bytes in a table. Chat templates run in `minijinja`
//! under limits, and [`TextStream`] turns tokens into text that a terminal can show.

mod bpe;
mod bytes;
mod clock;
mod decode_rules;
mod files;
mod fold;
mod gguf;
mod json;
pub(crate) mod own_stack;
mod pieces;
mod pre_tokenizers;
mod python;
mod sentencepiece;
mod stream;
mod template;
mod template_source;
mod texts;
mod tokenizer;
pub(crate) mod turns;

#[cfg(test)]
mod model_tests;

pub use clock::Clock;
pub use files::Files;
pub use fold::folded_ids;
pub use gguf::GgufVocab;
pub use stream::{Stopped, StreamOptions, TextPiece, TextStream};
pub use template::ChatTemplate;
pub use tokenizer::Tokenizer;
