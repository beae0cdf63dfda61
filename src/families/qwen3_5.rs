//! Qwen 3.5 (and 3.6, Holo 3.1), text part: the shape of Qwen 3 Next with the delta nets' input products apart, dense or with experts,
//! under `text_config`. Rotary pairs are dealt out among time, height and width; for text all three are the position.

use super::dense::Common;
use super::qwen3_next::{Recipe, hybrid};
use crate::error::Result;
use crate::layers::{Config, DeltaNetTensors};
use crate::model::{Build, Model};
use crate::weights::Declarations;

pub(super) fn dense(c: &Config<'_>, b: &Build<'_>, d: &mut Declarations) -> Result<Box<dyn Model>> {
    build(c, b, d, false)
}

pub(super) fn moe(c: &Config<'_>, b: &Build<'_>, d: &mut Declarations) -> Result<Box<dyn Model>> {
    build(c, b, d, true)
}

fn build(c: &Config<'_>, b: &Build<'_>, d: &mut Declarations, moe: bool) -> Result<Box<dyn Model>> {
    let tied = c.bool_or("tie_word_embeddings", false)?;
    // A text-only checkpoint has the language model's numbers at the top, and its tensors without the middle name.
    let (text, root) = match c.opt_object("text_config")? {
        Some(text) => (text, "model.language_model"),
        None => (*c, "model"),
    };
    let root = if b.shape("model.embed_tokens.weight").is_some() { "model" } else { root };
    let inner = if moe { text.usize_or("intermediate_size", 0)? } else { text.usize("intermediate_size")? };
    let common = Common::with_inner(&text, tied, inner)?;
    let common = Common { head_dim: text.usize_or("head_dim", 256)?, root, ..common };
    let recipe = Recipe { facts: "qwen3_5", sparse: vec![moe; common.layers], normalize: true, tensors: DeltaNetTensors::Separate };
    hybrid(&text, b, d, common, recipe)
}
