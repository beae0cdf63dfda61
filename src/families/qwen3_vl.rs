//! Qwen 3 VL, text part: Qwen 3 (dense or with experts) under `text_config`. Its rotary pairs are dealt out among time, height
//! and width (`mrope_section`); a text token has the same position in all three, which makes that plain rotation.

use super::{dense, qwen3_moe};
use crate::error::{Error, Kind, Result};
use crate::layers::Config;
use crate::model::{Build, Model};
use crate::weights::Declarations;

const ROOT: &str = "model.language_model";

fn text<'a>(c: &Config<'a>) -> Result<(Config<'a>, bool)> {
    let missing = || Error::new(Kind::CorruptFile, "config.json has no text_config").named("text_config");
    Ok((c.opt_object("text_config")?.ok_or_else(missing)?, c.bool_or("tie_word_embeddings", false)?))
}

pub(super) fn dense(c: &Config<'_>, b: &Build<'_>, d: &mut Declarations) -> Result<Box<dyn Model>> {
    let (text, tied) = text(c)?;
    dense::qwen3_under(&text, b, d, ROOT, tied)
}

pub(super) fn moe(c: &Config<'_>, b: &Build<'_>, d: &mut Declarations) -> Result<Box<dyn Model>> {
    let (text, tied) = text(c)?;
    qwen3_moe::under(&text, b, d, ROOT, tied)
}
