//! Metadata of a GGUF file under its architecture's prefix, and the part of the config that all decoders share.

use super::super::gguf::Gguf;
use super::frequency_factors;
use crate::error::{Error, Kind, Result, vec_filled};
use crate::quant;
use serde_json::{Map, Value, json};

/// A config under construction.
pub(super) type Config = Map<String, Value>;

/// Typed access to `<architecture>.<key>` and to the tensors of all parts.
pub(super) struct Keys<'a> {
    parts: &'a [Gguf],
    prefix: String,
    /// Whether layers may differ, so that keys with a list for all layers give the first one's number.
    mixed: bool,
}

/// Architectures whose layers differ in size; their dialects read the lists.
const MIXED: &[&str] = &["gemma4"];

/// Special tokens: key in the file, key in the config.
const SPECIAL: [(&str, &str); 4] = [
    ("tokenizer.ggml.bos_token_id", "bos_token_id"),
    ("tokenizer.ggml.eos_token_id", "eos_token_id"),
    ("tokenizer.ggml.padding_token_id", "pad_token_id"),
    ("tokenizer.ggml.unknown_token_id", "unk_token_id"),
];

impl<'a> Keys<'a> {
    pub(super) fn new(parts: &'a [Gguf], architecture: &str) -> Self {
        Keys { parts, prefix: format!("{architecture}."), mixed: MIXED.contains(&architecture) }
    }

    pub(super) fn gguf(&self) -> &'a Gguf {
        &self.parts[0]
    }

    /// The whole name of a key.
    pub(super) fn key(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    pub(super) fn u64(&self, key: &str) -> Result<Option<u64>> {
        self.gguf().u64(&self.key(key))
    }

    pub(super) fn f64(&self, key: &str) -> Result<Option<f64>> {
        self.gguf().f64(&self.key(key))
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.gguf().bool(&self.key(key))
    }

    /// A count that must be there.
    pub(super) fn need_u64(&self, key: &str) -> Result<u64> {
        self.u64(key)?.ok_or_else(|| self.gguf().missing(&self.key(key)))
    }

    /// A number that must be there.
    pub(super) fn need_f64(&self, key: &str) -> Result<f64> {
        self.f64(key)?.ok_or_else(|| self.gguf().missing(&self.key(key)))
    }

    /// A count that some files give once and some for each layer. Layers that differ are not supported; where `without` says so, some may
    /// have none.
    fn uniform(&self, key: &str, without: bool) -> Result<Option<u64>> {
        let name = self.key(key);
        if self.gguf().value(&name).is_some_and(|v| v.element_type().is_some()) {
            let values = self.gguf().i64_array(&name)?.unwrap_or_default();
            return match values.as_slice() {
                [first, rest @ ..] if *first >= 0 && (self.mixed || rest.iter().all(|x| x == first)) => Ok(Some(*first as u64)),
                // Layers without (convolutions among attention layers) say nothing about the others.
                _ if without => {
                    let some: Vec<i64> = values.iter().copied().filter(|x| *x != 0).collect();
                    match some.as_slice() {
                        [first, rest @ ..] if *first > 0 && rest.iter().all(|x| x == first) => Ok(Some(*first as u64)),
                        _ => Err(self.unsupported(&name, format!("{name} differs between layers"))),
                    }
                }
                _ => Err(self.unsupported(&name, format!("{name} differs between layers"))),
            };
        }
        self.u64(key)
    }

    /// A count for each of `layers` layers, which files give once or for each.
    pub(super) fn by_layer(&self, key: &str, layers: usize) -> Result<Vec<u64>> {
        let name = self.key(key);
        if self.gguf().value(&name).is_some_and(|v| v.element_type().is_some()) {
            let values = self.gguf().i64_array(&name)?.unwrap_or_default();
            let counts: Vec<u64> = values.iter().filter_map(|n| u64::try_from(*n).ok()).collect();
            if counts.len() == layers && values.len() == layers {
                return Ok(counts);
            }
            let text = format!("{}: {name} lists {} counts for {layers} layers", self.gguf().source().label(), counts.len());
            return Err(Error::new(Kind::CorruptFile, text).named(name));
        }
        vec_filled(layers, self.need_u64(key)?, key)
    }

    pub(super) fn unsupported(&self, name: &str, text: String) -> Error {
        Error::new(Kind::Unsupported, format!("{}: {text}", self.gguf().source().label())).named(name)
    }

    pub(super) fn shape(&self, name: &str) -> Option<&'a [usize]> {
        self.parts.iter().find_map(|p| p.tensor(name)).map(|t| t.shape.as_slice())
    }

    pub(super) fn has_tensor(&self, name: &str) -> bool {
        self.parts.iter().any(|p| p.tensor(name).is_some())
    }

    /// What every decoder's config says.
    pub(super) fn common(&self) -> Result<Config> {
        let hidden = self.need_u64("embedding_length")?;
        let heads = self.uniform("attention.head_count", false)?.ok_or_else(|| self.gguf().missing(&self.key("attention.head_count")))?;
        let head_dim = match self.u64("attention.key_length")? {
            Some(head_dim) => head_dim,
            None if heads > 0 => hidden / heads,
            None => return Err(Error::new(Kind::CorruptFile, format!("{} is 0", self.key("attention.head_count")))),
        };
        let vocabulary = self.vocabulary()?;
        let mut config = Config::new();
        let mut put = |key: &str, value: Value| config.insert(key.to_owned(), value);
        put("hidden_size", json!(hidden));
        put("intermediate_size", json!(self.uniform("feed_forward_length", false)?));
        put("num_hidden_layers", json!(self.need_u64("block_count")?));
        put("num_attention_heads", json!(heads));
        put("num_key_value_heads", json!(self.uniform("attention.head_count_kv", true)?.unwrap_or(heads)));
        put("head_dim", json!(head_dim));
        put("vocab_size", json!(vocabulary));
        put("max_position_embeddings", json!(self.need_u64("context_length")?));
        put("rms_norm_eps", json!(self.need_f64("attention.layer_norm_rms_epsilon")?));
        put("rope_theta", json!(self.f64("rope.freq_base")?.unwrap_or(10_000.0)));
        put("rope_scaling", self.rope_scaling()?);
        put("tie_word_embeddings", json!(!self.has_tensor("output.weight")));
        put("attention_bias", json!(self.has_tensor("blk.0.attn_q.bias")));
        for (key, name) in SPECIAL {
            if let Some(id) = self.special(key, vocabulary)? {
                put(name, json!(id));
            }
        }
        Ok(config)
    }

    /// Rows of the embedding, which may be more than the tokenizer has tokens.
    fn vocabulary(&self) -> Result<u64> {
        let embedding = self.parts.iter().find_map(|p| p.tensor("token_embd.weight"));
        match embedding.map(|t| t.shape.as_slice()) {
            Some([rows, _]) => Ok(*rows as u64),
            Some(shape) => Err(Error::new(Kind::CorruptFile, format!("token_embd.weight is {shape:?}, expected two dimensions"))
                .named("token_embd.weight")),
            None => {
                let text = format!("{}: the tensor token_embd.weight is missing", self.gguf().source().label());
                Err(Error::new(Kind::CorruptFile, text).named("token_embd.weight"))
            }
        }
    }

    /// A special token's id, which must be a token.
    fn special(&self, key: &str, vocabulary: u64) -> Result<Option<u64>> {
        let id = self.gguf().u64(key)?;
        if let Some(id) = id.filter(|&id| id >= vocabulary) {
            let text = format!("{}: {key} is {id}, the vocabulary has {vocabulary} tokens", self.gguf().source().label());
            let at = self.gguf().value(key).map_or(0, |v| v.at() as u64);
            return Err(Error::new(Kind::CorruptFile, text).named(key).at(at).sizes(id, vocabulary));
        }
        Ok(id)
    }

    /// How generation starts and ends. A turn end of its own (`eot`) ends generation like the text end.
    pub(super) fn generation_config(&self) -> Result<Value> {
        let vocabulary = self.vocabulary()?;
        let mut config = Config::new();
        let mut ends = Vec::new();
        for key in ["tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id"] {
            ends.extend(self.special(key, vocabulary)?.filter(|id| !ends.contains(id)));
        }
        if let Some(id) = self.special("tokenizer.ggml.bos_token_id", vocabulary)? {
            config.insert("bos_token_id".into(), json!(id));
        }
        match ends.as_slice() {
            [] => {}
            [one] => drop(config.insert("eos_token_id".into(), json!(one))),
            several => drop(config.insert("eos_token_id".into(), json!(several))),
        }
        Ok(Value::Object(config))
    }

    /// `rope_scaling`: null, linear, yarn, or factors listed one by one (llama 3's, already computed by the converter, or
    /// LongRoPE's for short and for long sequences).
    fn rope_scaling(&self) -> Result<Value> {
        if let Some(factors) = self.small_vector("rope_freqs.weight")? {
            return Ok(frequency_factors(factors));
        }
        if let (Some(short), Some(long)) = (self.small_vector("rope_factors_short.weight")?, self.small_vector("rope_factors_long.weight")?)
        {
            let mut scaling = json!({"rope_type": "longrope", "short_factor": short, "long_factor": long});
            if let Some(length) = self.u64("rope.scaling.original_context_length")? {
                scaling["original_max_position_embeddings"] = json!(length);
            }
            // What converters write is already the factor on sines and cosines.
            if let Some(x) = self.f64("rope.scaling.attn_factor")? {
                scaling["attention_factor"] = json!(x);
            }
            return Ok(scaling);
        }
        let key = self.key("rope.scaling.type");
        let kind = self.gguf().str(&key)?.unwrap_or("none");
        let factor = self.f64("rope.scaling.factor")?;
        // Files from before the type key existed say a linear factor by itself.
        let linear = factor.or(self.f64("rope.scale_linear")?).filter(|&f| f != 1.0 && f != 0.0);
        match kind {
            "none" | "linear" => Ok(linear.map_or(Value::Null, |factor| json!({"rope_type": "linear", "factor": factor}))),
            "yarn" => {
                let factor = factor.ok_or_else(|| self.gguf().missing(&self.key("rope.scaling.factor")))?;
                let mut scaling = json!({"rope_type": "yarn", "factor": factor});
                if let Some(length) = self.u64("rope.scaling.original_context_length")? {
                    scaling["original_max_position_embeddings"] = json!(length);
                }
                for (key, name) in [("rope.scaling.yarn_beta_fast", "beta_fast"), ("rope.scaling.yarn_beta_slow", "beta_slow")] {
                    if let Some(x) = self.f64(key)? {
                        scaling[name] = json!(x);
                    }
                }
                // The file's factor multiplies yarn's own attention factor, the config's replaces it.
                if let Some(x) = self.f64("rope.scaling.attn_factor")?.filter(|&x| x != 1.0) {
                    scaling["attention_factor"] = json!(x * (0.1 * factor.max(1.0).ln() + 1.0));
                }
                Ok(scaling)
            }
            other => Err(self.unsupported(&key, format!("{key} is {other:?}; none, linear and yarn are read"))),
        }
    }

    /// A vector that belongs into the config rather than to the weights.
    fn small_vector(&self, name: &str) -> Result<Option<Vec<f32>>> {
        const LARGEST: usize = 4096;
        let Some((part, info)) = self.parts.iter().find_map(|p| p.tensor(name).map(|t| (p, t))) else { return Ok(None) };
        match info.shape[..] {
            [n] if n <= LARGEST => {
                let mut values = vec_filled(n, 0f32, name)?;
                quant::decode(info.dtype, &part.source().bytes()[info.range.clone()], &mut values)?;
                Ok(Some(values))
            }
            _ => {
                Err(Error::new(Kind::CorruptFile, format!("{name} is {:?}, expected a vector of at most {LARGEST}", info.shape))
                    .named(name))
            }
        }
    }
}
