//! How GGUF files of an architecture say what Hugging Face folders say: one file and one line in the table each.
//!
//! A dialect is data: the config it derives from metadata, and for each tensor its other name and what converters did
//! to the values. Everything it leaves unnamed stays reachable under the file's own name.

mod deepseek2;
mod deepseek41;
mod gemma3;
mod gemma4;
mod glm4_moe;
mod gpt_oss;
mod keys;
mod lfm2;
mod llama;
mod minimax_m2;
mod phi3;
mod qwen2;
mod qwen3;
mod qwen35;
mod qwen3_moe;
mod qwen3_vl;

use super::TensorInfo;
use super::gguf::Gguf;
use super::store::Located;
use crate::error::{Error, Kind, Result};
use crate::tensor::RowMap;
use keys::{Config, Keys};
use serde_json::{Value, json};

/// One architecture of GGUF.
pub(super) struct Dialect {
    /// `general.architecture`.
    architecture: &'static str,
    /// Adds to the common part of the config what is particular.
    config: fn(&Keys<'_>, &mut Config) -> Result<()>,
    /// Tensors outside the layers: stems (without `.weight`) there and here.
    top: &'static [Rename],
    /// Tensors of a layer: stems after `blk.N.` there and `model.layers.N.` here (`layers.N.` for those with a leading slash).
    layer: &'static [Rename],
}

static DIALECTS: &[&Dialect] = &[
    &llama::DIALECT,
    &qwen2::DIALECT,
    &qwen3::DIALECT,
    &qwen3_moe::DIALECT,
    &qwen3_vl::DENSE,
    &qwen3_vl::MOE,
    &gemma3::DIALECT,
    &gemma4::DIALECT,
    &gpt_oss::DIALECT,
    &glm4_moe::DIALECT,
    &minimax_m2::DIALECT,
    &lfm2::DIALECT,
    &qwen35::NEXT,
    &qwen35::DENSE,
    &qwen35::MOE,
    &deepseek41::DIALECT,
    &deepseek2::DIALECT,
    &phi3::DIALECT,
];

/// A tensor's two names, and what the file does to its values.
struct Rename {
    gguf: &'static str,
    hf: &'static str,
    stored: Stored,
}

/// How values in the file differ from Hugging Face's.
#[derive(Clone, Copy, PartialEq)]
enum Stored {
    /// Not at all.
    Same,
    /// Rotary halves of each head interleaved; the key of the config says how many heads.
    Interleaved(&'static str),
    /// Norm weights as `1 + w`.
    OnePlus,
    /// Experts stacked in front; `{}` in the name takes the number of the expert.
    Experts,
    /// Not at all, and the other name is whole: nothing follows it. The name here may be whole too (`ffn_gate_inp.scale`).
    Bare,
    /// As matrices `[groups, rows, columns]` that are one of `groups * rows` rows here.
    Stacked,
}

const fn same(gguf: &'static str, hf: &'static str) -> Rename {
    Rename { gguf, hf, stored: Stored::Same }
}

const fn experts(gguf: &'static str, hf: &'static str) -> Rename {
    Rename { gguf, hf, stored: Stored::Experts }
}

const fn bare(gguf: &'static str, hf: &'static str) -> Rename {
    Rename { gguf, hf, stored: Stored::Bare }
}

const TOP: &[Rename] = &[same("token_embd", "model.embed_tokens"), same("output_norm", "model.norm"), same("output", "lm_head")];

/// A file in the words of Hugging Face.
pub(super) struct Translated {
    pub config: Value,
    pub generation_config: Value,
    pub tensors: Vec<Located>,
}

/// Translates the parts of one GGUF; the first has the metadata.
pub(super) fn translate(parts: &[Gguf]) -> Result<Translated> {
    let gguf = &parts[0];
    let label = gguf.source().label();
    let architecture = gguf.str("general.architecture")?.ok_or_else(|| gguf.missing("general.architecture"))?;
    let Some(dialect) = DIALECTS.iter().find(|d| d.architecture == architecture) else {
        let known: Vec<&str> = DIALECTS.iter().map(|d| d.architecture).collect();
        let text = format!("{label}: GGUF architecture {architecture:?} is not read by this build; it reads {}", known.join(", "));
        return Err(Error::new(Kind::Unsupported, text).named("general.architecture"));
    };
    let keys = Keys::new(parts, architecture);
    let mut config = keys.common()?;
    (dialect.config)(&keys, &mut config)?;

    let config = Value::Object(config);
    let mut tensors = Vec::new();
    for (file, part) in parts.iter().enumerate() {
        for info in part.tensors() {
            let located = place(dialect, info, file, &config).map_err(|e| e.context(label).named(&info.name))?;
            tensors.extend(located);
        }
    }
    Ok(Translated { generation_config: keys.generation_config()?, config, tensors })
}

/// The tensor (or, for stacked experts, the tensors) that one of the file's stands for.
fn place(dialect: &Dialect, info: &TensorInfo, file: usize, config: &Value) -> Result<Vec<Located>> {
    let located = |name: String| Located {
        name,
        dtype: info.dtype,
        shape: info.shape.clone(),
        file,
        range: info.range.clone(),
        row_map: RowMap::Straight,
        offset: 0.0,
    };
    let Some((rename, name)) = hf_name(dialect, &info.name) else { return Ok(vec![located(info.name.clone())]) };
    let mut one = located(name);
    match rename.stored {
        Stored::Same | Stored::Bare => {}
        Stored::Stacked => {
            if let [groups, rows, cols] = info.shape[..] {
                one.shape = vec![groups * rows, cols];
            }
        }
        Stored::OnePlus => one.offset = -1.0,
        Stored::Interleaved(heads_key) => {
            let heads = config.get(heads_key).and_then(Value::as_u64).unwrap_or(0) as usize;
            let rows = info.shape.first().copied().unwrap_or(0);
            if heads == 0 || !rows.is_multiple_of(2 * heads) || rows == 0 {
                let text = format!("{}: {rows} rows are not {heads} ({heads_key}) heads of even size", info.name);
                return Err(Error::new(Kind::Mismatch, text));
            }
            one.row_map = RowMap::Interleaved { head_dim: rows / heads };
        }
        Stored::Experts => return of_experts(info, &one),
    }
    Ok(vec![one])
}

/// Slices of a tensor whose first dimension counts experts: matrices, or vectors of biases.
fn of_experts(info: &TensorInfo, stacked: &Located) -> Result<Vec<Located>> {
    let (count, shape) = match info.shape[..] {
        [count, rows, cols] => (count, vec![rows, cols]),
        [count, len] => (count, vec![len]),
        _ => {
            let text = format!("{}: shape {:?}, expected [experts, rows, columns] or [experts, elements]", info.name, info.shape);
            return Err(Error::new(Kind::Mismatch, text));
        }
    };
    // A count beyond this is no model and would only fill memory with names of empty slices.
    if count > 65_536 || info.range.is_empty() {
        return Err(Error::new(Kind::CorruptFile, format!("{}: shape {:?} is not plausible", info.name, info.shape)));
    }
    let bytes = info.range.len() / count;
    let slice = |e: usize| Located {
        name: stacked.name.replace("{}", &e.to_string()),
        dtype: info.dtype,
        shape: shape.clone(),
        file: stacked.file,
        range: info.range.start + e * bytes..info.range.start + (e + 1) * bytes,
        row_map: RowMap::Straight,
        offset: 0.0,
    };
    Ok((0..count).map(slice).collect())
}

/// `blk.3.attn_q.weight` to `model.layers.3.self_attn.q_proj.weight`; `None` for names outside the tables.
fn hf_name(dialect: &Dialect, name: &str) -> Option<(&'static Rename, String)> {
    let (stem, leaf) = name.rsplit_once('.')?;
    if let Some(rename) = dialect.top.iter().find(|r| r.gguf == stem) {
        return Some((rename, format!("{}.{leaf}", rename.hf)));
    }
    let (number, whole) = name.strip_prefix("blk.")?.split_once('.')?;
    // Only the plain spelling of a number, so that no two names meet in one.
    if number.parse::<u32>().ok()?.to_string() != number {
        return None;
    }
    // A few tensors have no leaf (`ssm_a`); their other name is whole.
    let find = |name: &str| dialect.layer.iter().find(|r| r.gguf == name);
    let rename = find(whole).or_else(|| whole.rsplit_once('.').and_then(|(stem, _)| find(stem)))?;
    let module = match rename.hf.strip_prefix('/') {
        Some(module) => format!("layers.{number}.{module}"),
        None => format!("model.layers.{number}.{}", rename.hf),
    };
    Some((rename, if rename.stored == Stored::Bare { module } else { format!("{module}.{leaf}") }))
}

/// The rotary scaling of a key whose factors the file lists one by one.
fn frequency_factors(factors: Vec<f32>) -> Value {
    json!({"rope_type": "freq_factors", "factors": factors})
}
