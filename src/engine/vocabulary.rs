//! The tokenizer and chat template of a checkpoint, wherever it keeps them.

use crate::error::{Error, Kind, Result};
use crate::text::turns::pass;
use crate::text::{ChatTemplate, GgufVocab, Tokenizer};
use crate::weights::{Checkpoint, Gguf};
use serde_json::Value;
use std::borrow::Cow;
use std::sync::Arc;

/// The tokenizer, and the tokens that end a generation. A model without a readable tokenizer still runs on token ids, so
/// the reason is kept for whoever asks for text.
pub(super) fn open(checkpoint: &Checkpoint) -> (Result<Arc<Tokenizer>>, Vec<i32>) {
    let mut ends: Vec<i32> = Vec::new();
    for source in [checkpoint.generation_config(), Some(checkpoint.config())].into_iter().flatten() {
        for id in ids(source.get("eos_token_id")) {
            if !ends.contains(&id) {
                ends.push(id);
            }
        }
    }
    let tokenizer = match checkpoint.gguf() {
        Some(gguf) => vocab(gguf).and_then(Tokenizer::from_gguf),
        None => match checkpoint.beside().map(|files| Tokenizer::from_files(files)) {
            Some(Ok(Some(tokenizer))) => Ok(tokenizer),
            Some(Err(e)) => Err(e),
            Some(Ok(None)) | None => {
                Err(Error::new(Kind::NotFound, "the checkpoint has no tokenizer.json; token ids still work").named("tokenizer.json"))
            }
        },
    };
    if let Ok(tokenizer) = &tokenizer {
        ends.extend(tokenizer.end_tokens().iter().copied().filter(|id| !ends.contains(id)).collect::<Vec<_>>());
    }
    (tokenizer.map(Arc::new), ends)
}

/// One id or a list of them.
fn ids(value: Option<&Value>) -> Vec<i32> {
    let one = |v: &Value| v.as_i64().and_then(|id| i32::try_from(id).ok());
    match value {
        Some(Value::Array(list)) => list.iter().filter_map(one).collect(),
        Some(v) => one(v).into_iter().collect(),
        None => Vec::new(),
    }
}

/// The chat template, ready to render.
pub(super) fn template(tokenizer: &Tokenizer) -> Result<ChatTemplate> {
    let source = tokenizer
        .chat_template()
        .ok_or_else(|| Error::new(Kind::NotFound, "the checkpoint has no chat template; give the prompt as text").named("chat_template"))?;
    let text = |id: Option<i32>| -> Result<String> {
        Ok(match id {
            Some(id) => String::from_utf8_lossy(tokenizer.token_bytes(id)?).into_owned(),
            None => String::new(),
        })
    };
    ChatTemplate::new(source, &text(tokenizer.bos())?, &text(tokenizer.eos())?)
}

fn vocab(gguf: &Gguf) -> Result<GgufVocab<'_>> {
    let key = |name: &str| format!("tokenizer.ggml.{name}");
    let text = |name: &str| -> Result<String> { Ok(gguf.str(&key(name))?.unwrap_or_default().to_string()) };
    let strings = |name: &str| -> Result<Option<Vec<Cow<'_, str>>>> {
        let Some(list) = gguf.strings(&key(name))? else { return Ok(None) };
        let text = |bytes| {
            pass(0)?;
            Ok(String::from_utf8_lossy(bytes))
        };
        list.map(text).collect::<Result<_>>().map(Some)
    };
    // Ids are compared as written; what does not fit is judged by the tokenizer.
    let id = |name: &str| -> Result<Option<i64>> { Ok(gguf.u64(&key(name))?.map(|id| i64::try_from(id).unwrap_or(i64::MAX))) };
    let model = text("model")?;
    if model.is_empty() {
        return Err(Error::new(Kind::NotFound, "the GGUF file has no tokenizer; token ids still work").named(key("model")));
    }
    let named_templates = gguf
        .metadata()
        .filter_map(|(k, _)| k.strip_prefix("tokenizer.chat_template.").map(|name| (k, name)))
        .filter_map(|(k, name)| gguf.str(k).ok().flatten().map(|source| (name.to_string(), source.to_string())))
        .collect();
    Ok(GgufVocab {
        pre: text("pre")?,
        tokens: strings("tokens")?.ok_or_else(|| gguf.missing(&key("tokens")))?,
        scores: gguf.f32_array(&key("scores"))?,
        types: gguf.i64_array(&key("token_type"))?.map(|t| t.into_iter().map(|v| v as i32).collect()),
        merges: strings("merges")?.unwrap_or_default(),
        bos: id("bos_token_id")?,
        eos: id("eos_token_id")?,
        eot: id("eot_token_id")?,
        eom: id("eom_token_id")?,
        unk: id("unknown_token_id")?,
        pad: id("padding_token_id")?,
        add_bos: gguf.bool(&key("add_bos_token"))?,
        add_eos: gguf.bool(&key("add_eos_token"))?,
        add_space_prefix: gguf.bool(&key("add_space_prefix"))?,
        chat_template: gguf.str("tokenizer.chat_template")?.map(str::to_string),
        named_templates,
        model,
    })
}
