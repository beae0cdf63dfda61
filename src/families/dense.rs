//! Llama and its closest kin: pre-norm blocks of grouped-query attention and SwiGLU. Mistral adds a window, Qwen 2
//! biases on q, k, v, Qwen 3 norms on queries and keys, SmolLM3 layers without rotation.

use crate::error::Result;
use crate::layers::{
    Attention, AttentionDims, Block, Config, FeedForward, GatedMlp, HeadGating, QkNorm, RmsNorm, RopeParameters, Ropes, Values,
};
use crate::model::{Build, Decoder, Dims, Head, Model, TransformerLayer};
use crate::ops::Activation;
use crate::weights::Declarations;
use crate::{bail, ensure};

/// What the families of this shape read alike.
pub(super) struct Common {
    pub hidden: usize,
    pub inner: usize,
    pub layers: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub vocab: usize,
    pub context: usize,
    pub eps: f32,
    pub act: Activation,
    pub tied: bool,
    /// What tensor names of the language model begin with.
    pub root: &'static str,
    /// Name of the output matrix.
    pub head: &'static str,
}

impl Common {
    pub(super) fn read(c: &Config<'_>, tied: bool) -> Result<Common> {
        Common::with_inner(c, tied, c.usize("intermediate_size")?)
    }

    /// As [`Common::read`] where the width of the feed-forward is not under its usual name, or there is none.
    pub(super) fn with_inner(c: &Config<'_>, tied: bool, inner: usize) -> Result<Common> {
        let (hidden, heads) = (c.usize("hidden_size")?, c.usize("num_attention_heads")?);
        let head_dim = match c.count("head_dim")? {
            Some(dim) => dim,
            None => {
                // Latent attention has head sizes of its own.
                let needed = c.get("kv_lora_rank").is_none();
                ensure!(
                    !needed || hidden.is_multiple_of(heads),
                    Mismatch,
                    "config.json: hidden_size {hidden} does not split into {heads} heads, and head_dim is absent"
                );
                hidden / heads
            }
        };
        let kv_heads = c.usize_or("num_key_value_heads", heads)?;
        ensure!(
            heads.is_multiple_of(kv_heads),
            Mismatch,
            "config.json: {heads} query heads do not share {kv_heads} key/value heads evenly"
        );
        let act = match c.opt_str("hidden_act")?.or(c.opt_str("hidden_activation")?).unwrap_or("silu") {
            "silu" | "swish" => Activation::Silu,
            "gelu_pytorch_tanh" | "gelu_new" => Activation::GeluTanh,
            "gelu" => Activation::Gelu,
            "relu2" => Activation::Relu2,
            other => bail!(Unsupported, "config.json: hidden_act {other:?}; known: silu, gelu, gelu_pytorch_tanh, relu2"),
        };
        Ok(Common {
            hidden,
            inner,
            layers: c.usize("num_hidden_layers")?,
            heads,
            kv_heads,
            head_dim,
            vocab: c.usize("vocab_size")?,
            context: c.usize_or("max_position_embeddings", 2048)?,
            eps: c.f64_or("rms_norm_eps", 1e-6)? as f32,
            act,
            tied: c.bool_or("tie_word_embeddings", tied)?,
            root: "model",
            head: "lm_head",
        })
    }

    pub(super) fn attention(&self, build: &Build) -> AttentionDims {
        AttentionDims {
            hidden: self.hidden,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            scale: 1.0 / (self.head_dim as f32).sqrt(),
            window: None,
            softcap: None,
            qkv_bias: false,
            out_bias: false,
            qk_norm: QkNorm::No,
            values: Values::Own,
            sinks: false,
            gating: HeadGating::No,
            rope: None,
            kv_type: build.kv_type,
        }
    }

    /// Name of a tensor, or of a part, of layer `i`.
    pub(super) fn name(&self, i: usize, part: &str) -> String {
        format!("{}.layers.{i}.{part}", self.root)
    }

    /// Layer `i` as Llama arranges it: norms before attention and before the feed-forward.
    pub(super) fn pre_norm<M: FeedForward + 'static>(
        &self,
        d: &mut Declarations,
        i: usize,
        dims: AttentionDims,
        mlp: M,
    ) -> Box<dyn TransformerLayer> {
        let norm = |d: &mut Declarations, part: &str| Some(RmsNorm::new(d, &self.name(i, part), self.hidden, self.eps, 0.0));
        Box::new(Block {
            attention_pre: norm(d, "input_layernorm"),
            attention: Attention::new(d, &self.name(i, "self_attn"), dims),
            attention_post: None,
            mlp_pre: norm(d, "post_attention_layernorm"),
            mlp,
            mlp_post: None,
        })
    }

    /// The gated MLP of layer `i` under its usual name.
    pub(super) fn mlp(&self, d: &mut Declarations, i: usize, bias: bool) -> GatedMlp {
        GatedMlp::new(d, &self.name(i, "mlp"), self.hidden, self.inner, self.act, bias)
    }

    pub(super) fn decoder(&self, d: &mut Declarations, ropes: Ropes, layers: Vec<Box<dyn TransformerLayer>>, norm_add: f32) -> Decoder {
        Decoder {
            dims: Dims { vocab: self.vocab, hidden: self.hidden, layers: self.layers, context: self.context },
            head: Head::new(d, &format!("{}.embed_tokens.weight", self.root), self.head, self.vocab, self.hidden, self.tied),
            embed_factor: 1.0,
            entry: None,
            ropes,
            layers,
            norm: RmsNorm::new(d, &format!("{}.norm", self.root), self.hidden, self.eps, norm_add),
            logit_factor: 1.0,
            logit_softcap: None,
        }
    }
}

/// The window of each layer: from `layer_types`, else `fallback(layer)`.
pub(super) fn windows(c: &Config<'_>, layers: usize, fallback: impl Fn(usize) -> Result<Option<usize>>) -> Result<Vec<Option<usize>>> {
    match c.opt_layer_strings("layer_types", layers)? {
        Some(kinds) => kinds
            .into_iter()
            .map(|kind| match kind {
                "full_attention" => Ok(None),
                "sliding_attention" => c.usize("sliding_window").map(Some),
                other => bail!(Unsupported, "config.json: layer_types holds {other:?}; known here: full_attention, sliding_attention"),
            })
            .collect(),
        None => (0..layers).map(fallback).collect(),
    }
}

/// Differences between the families of this file.
struct Recipe {
    windows: Vec<Option<usize>>,
    qkv_bias: bool,
    out_bias: bool,
    mlp_bias: bool,
    qk_norm: QkNorm,
    /// Whether a layer rotates queries and keys.
    rotates: Vec<bool>,
}

fn build(c: &Config<'_>, b: &Build, d: &mut Declarations, common: Common, recipe: Recipe) -> Result<Box<dyn Model>> {
    let mut ropes = Ropes::default();
    let rope = ropes.add(d, RopeParameters::read(c, common.head_dim, None, b.context)?);
    let layers = (0..common.layers)
        .map(|i| {
            let dims = AttentionDims {
                window: recipe.windows[i],
                qkv_bias: recipe.qkv_bias,
                out_bias: recipe.out_bias,
                qk_norm: recipe.qk_norm,
                rope: recipe.rotates[i].then_some(rope),
                ..common.attention(b)
            };
            let mlp = common.mlp(d, i, recipe.mlp_bias);
            common.pre_norm(d, i, dims, mlp)
        })
        .collect();
    Ok(Box::new(common.decoder(d, ropes, layers, 0.0)))
}

pub(super) fn llama(c: &Config<'_>, b: &Build, d: &mut Declarations) -> Result<Box<dyn Model>> {
    let common = Common::read(c, false)?;
    let bias = c.bool_or("attention_bias", false)?;
    let recipe = Recipe {
        windows: vec![None; common.layers],
        qkv_bias: bias,
        out_bias: bias,
        mlp_bias: c.bool_or("mlp_bias", false)?,
        qk_norm: QkNorm::No,
        rotates: vec![true; common.layers],
    };
    build(c, b, d, common, recipe)
}

pub(super) fn mistral(c: &Config<'_>, b: &Build, d: &mut Declarations) -> Result<Box<dyn Model>> {
    let common = Common::read(c, false)?;
    let window = c.count("sliding_window")?;
    let recipe = Recipe {
        windows: windows(c, common.layers, |_| Ok(window))?,
        qkv_bias: false,
        out_bias: false,
        mlp_bias: false,
        qk_norm: QkNorm::No,
        rotates: vec![true; common.layers],
    };
    build(c, b, d, common, recipe)
}

/// Layers from `max_window_layers` on slide where `use_sliding_window` is set; the window is off by default.
pub(super) fn qwen_windows(c: &Config<'_>, layers: usize) -> Result<Vec<Option<usize>>> {
    let slides = c.bool_or("use_sliding_window", false)?;
    let window = c.count("sliding_window")?;
    let first = c.count("max_window_layers")?.unwrap_or(0);
    if !slides {
        return Ok(vec![None; layers]);
    }
    windows(c, layers, |i| Ok(if i >= first { window } else { None }))
}

pub(super) fn qwen2(c: &Config<'_>, b: &Build, d: &mut Declarations) -> Result<Box<dyn Model>> {
    let common = Common::read(c, false)?;
    let recipe = Recipe {
        windows: qwen_windows(c, common.layers)?,
        qkv_bias: c.bool_or("attention_bias", true)?,
        out_bias: false,
        mlp_bias: false,
        qk_norm: QkNorm::No,
        rotates: vec![true; common.layers],
    };
    build(c, b, d, common, recipe)
}

pub(super) fn qwen3(c: &Config<'_>, b: &Build, d: &mut Declarations) -> Result<Box<dyn Model>> {
    qwen3_under(c, b, d, "model", false)
}

/// Qwen 3 under tensor names that begin with `root`; `tied` where the config does not say.
pub(super) fn qwen3_under(c: &Config<'_>, b: &Build, d: &mut Declarations, root: &'static str, tied: bool) -> Result<Box<dyn Model>> {
    let common = Common { root, ..qwen3_common(c, tied)? };
    let bias = c.bool_or("attention_bias", false)?;
    let recipe = Recipe {
        windows: qwen_windows(c, common.layers)?,
        qkv_bias: bias,
        out_bias: bias,
        mlp_bias: false,
        qk_norm: QkNorm::PerHead(common.eps, 0.0),
        rotates: vec![true; common.layers],
    };
    build(c, b, d, common, recipe)
}

/// 128 is the published default where head_dim is absent.
pub(super) fn qwen3_common(c: &Config<'_>, tied: bool) -> Result<Common> {
    let mut common = Common::read(c, tied)?;
    common.head_dim = c.usize_or("head_dim", 128)?;
    Ok(common)
}

/// Every `no_rope_layer_interval`-th layer leaves queries and keys unrotated; `no_rope_layers` says 1 where a layer rotates.
pub(super) fn smollm3(c: &Config<'_>, b: &Build, d: &mut Declarations) -> Result<Box<dyn Model>> {
    let common = Common::read(c, true)?;
    let bias = c.bool_or("attention_bias", false)?;
    let rotates = match c.opt_numbers("no_rope_layers")? {
        Some(list) => {
            ensure!(
                list.len() == common.layers,
                Mismatch,
                "config.json: no_rope_layers lists {} layers, num_hidden_layers is {}",
                list.len(),
                common.layers
            );
            list.iter().map(|&n| n != 0.0).collect()
        }
        None => {
            let interval = c.usize_or("no_rope_layer_interval", 4)?;
            (0..common.layers).map(|i| (i + 1) % interval != 0).collect()
        }
    };
    let recipe = Recipe {
        windows: qwen_windows(c, common.layers)?,
        qkv_bias: bias,
        out_bias: bias,
        mlp_bias: c.bool_or("mlp_bias", false)?,
        qk_norm: QkNorm::No,
        rotates,
    };
    build(c, b, d, common, recipe)
}
