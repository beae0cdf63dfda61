//! Facts of a model: what `probe` says of a file, and what a loaded engine says of itself.

use crate::error::Result;
use crate::families::loader_for_config;
use crate::weights::{Access, Input, Reading};
use std::path::Path;

/// A loaded model, in numbers a host asks for.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Info {
    /// Normalised `model_type`.
    pub model_type: String,
    /// `architectures[0]` of the config, if it says so.
    pub architecture: Option<String>,
    /// Elements of all weights.
    pub parameters: u64,
    /// Decoder layers.
    pub layers: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Tokens the embedding knows; rows of logits are this long.
    pub vocab: usize,
    /// Longest sequence this engine was loaded for.
    pub context: usize,
    /// Longest sequence the model was made for.
    pub model_context: usize,
    /// `f32` or `fast`.
    pub compute: &'static str,
    /// Threads that compute, the caller's included.
    pub threads: usize,
    /// Kernels in use: `scalar`, `avx2` or `avx512`.
    pub simd: &'static str,
    /// Begin-of-text token, if the model has one.
    pub bos: Option<i32>,
    /// Tokens that end a generation.
    pub end_tokens: Vec<i32>,
    /// Beginnings of names of tensors that only drafting would use, and that this engine leaves in the file.
    pub drafts: Vec<String>,
}

/// What a path holds, from headers only.
#[derive(Clone, Debug, serde::Serialize)]
pub struct Probe {
    /// `safetensors` or `GGUF v3`.
    pub format: String,
    /// Normalised `model_type`.
    pub model_type: Option<String>,
    /// Whether this build has the family.
    pub supported: bool,
    /// Number of tensors.
    pub tensors: usize,
    /// Bytes of all tensors as stored.
    pub bytes: u64,
    /// Bytes by element type.
    pub by_dtype: Vec<(String, u64)>,
    /// Files with tensors and their sizes.
    pub files: Vec<(String, u64)>,
    /// Vocabulary.
    pub vocab: Option<u64>,
    /// Longest sequence the model was made for.
    pub context: Option<u64>,
    /// Decoder layers.
    pub layers: Option<u64>,
    /// Width of the residual stream.
    pub hidden: Option<u64>,
}

/// Says what a path holds.
pub fn probe(path: &Path) -> Result<Probe> {
    probe_from(Input::path(path, Access::Map)?)
}

/// As [`probe`], from wherever the bytes come.
pub fn probe_from(input: Input) -> Result<Probe> {
    let checkpoint = Reading::headers(input, false)?;
    let described = checkpoint.describe();
    let number = |key: &str| checkpoint.config().get(key).and_then(serde_json::Value::as_u64);
    Ok(Probe {
        format: described.format,
        supported: loader_for_config(checkpoint.config()).is_ok(),
        model_type: described.model_type,
        tensors: described.tensors,
        bytes: described.tensor_bytes,
        by_dtype: described.by_dtype.into_iter().map(|(t, n)| (t.name().to_string(), n)).collect(),
        files: described.files,
        vocab: number("vocab_size"),
        context: number("max_position_embeddings"),
        layers: number("num_hidden_layers"),
        hidden: number("hidden_size"),
    })
}
