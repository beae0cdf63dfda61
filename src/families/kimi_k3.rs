//! Kimi K3: Kimi delta attention and gated latent attention without rotation, routed experts in a narrower space, and a residual that
//! is attended to: sublayers read a mixture of finished blocks of layers and the running sum.
//!
//! Odd things: layer lists count from 1 when their largest entry is the number of layers; a block's running sum starts
//! from its first attention output, and that attention still reads the mixture from before; the activation is SiTU.

use super::MOST_EXPERTS;
use crate::circuit::Tape;
use crate::ensure;
use crate::error::{Error, Kind, Result};
use crate::layers::{
    Config, ExpertDims, Experts, FeedForward, GatedMlp, Kda, KdaDims, Latent, Linear, Mixer, Mla, MlaDims, Moe, RmsNorm, RopeParameters,
    Ropes, Router,
};
use crate::model::{Build, Dims, Head, Model};
use crate::ops::{Activation, Embed, Groups, LastRows, ResidualMix, RopeStyle, Value, WeightId};
use crate::weights::Declarations;

/// What a sublayer reads.
struct Reading {
    query: WeightId,
    norm: WeightId,
    eps: f32,
}

impl Reading {
    /// Tensors `<name>_proj.weight`, `<name>_norm.weight`.
    fn new(d: &mut Declarations, name: &str, hidden: usize, eps: f32) -> Reading {
        Reading {
            query: d.vector(&format!("{name}_proj.weight"), hidden, 0.0),
            norm: d.vector(&format!("{name}_norm.weight"), hidden, 0.0),
            eps,
        }
    }

    fn record(&self, t: &mut Tape<'_>, blocks: &[Value], sum: Value) -> Value {
        if blocks.is_empty() {
            return sum;
        }
        let sources = blocks.iter().copied().chain([sum]).collect();
        t.op(ResidualMix { sources, query: self.query, norm: self.norm, eps: self.eps, y: Value::NONE })
    }
}

struct Layer {
    attention_reading: Reading,
    attention_norm: RmsNorm,
    attention: Box<dyn Mixer>,
    mlp_reading: Reading,
    mlp_norm: RmsNorm,
    mlp: Box<dyn FeedForward>,
}

struct KimiK3 {
    dims: Dims,
    head: Head,
    ropes: Ropes,
    /// Layers of a block.
    block: usize,
    layers: Vec<Layer>,
    last_reading: Reading,
    norm: RmsNorm,
}

impl Model for KimiK3 {
    fn dims(&self) -> &Dims {
        &self.dims
    }

    fn record(&self, t: &mut Tape<'_>) -> Value {
        let mut sum = t.op(Embed { table: self.head.embedding, factor: 1.0, y: Value::NONE });
        t.name(sum, "embedding");
        let ropes = self.ropes.record(t);
        let mut blocks = Vec::new();
        for (index, layer) in self.layers.iter().enumerate() {
            t.set_layer(Some(index));
            let starts = index.is_multiple_of(self.block);
            let h = layer.attention_reading.record(t, &blocks, sum);
            if starts {
                blocks.push(sum);
            }
            let h = layer.attention_norm.record(t, h);
            let h = layer.attention.record(t, h, &ropes);
            sum = if starts { h } else { t.add(sum, h) };
            let h = layer.mlp_reading.record(t, &blocks, sum);
            let h = layer.mlp_norm.record(t, h);
            let h = layer.mlp.record(t, h);
            sum = t.add(sum, h);
            t.name(sum, format!("layer.{index}"));
        }
        t.set_layer(None);
        let mut x = self.last_reading.record(t, &blocks, sum);
        if !t.all_logits() {
            x = t.op(LastRows { x, y: Value::NONE });
        }
        let x = self.norm.record(t, x);
        t.name(x, "hidden");
        let logits = self.head.output.record(t, x);
        t.name(logits, "logits");
        logits
    }
}

fn activation(c: &Config<'_>) -> Result<Activation> {
    c.only("hidden_act", &["situ", "silu"])?;
    Ok(match c.opt_str("hidden_act")? {
        Some("situ") => {
            let (beta, linear) = (c.f64("activation_situ_beta")? as f32, c.f64_or("activation_situ_linear_beta", 0.0)? as f32);
            ensure!(beta != 0.0, CorruptFile, "config.json: activation_situ_beta is 0");
            Activation::Situ { beta, linear }
        }
        _ => Activation::Silu,
    })
}

/// Whether each layer is delta attention.
fn delta_layers(linear: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    let missing = |key: &'static str| Error::new(Kind::CorruptFile, format!("config.json: linear_attn_config has no {key}")).named(key);
    let delta = linear.opt_numbers("kda_layers")?.ok_or_else(|| missing("kda_layers"))?;
    let full = linear.opt_numbers("full_attn_layers")?.ok_or_else(|| missing("full_attn_layers"))?;
    let first = if delta.iter().chain(&full).any(|n| *n == layers as f64) { 1 } else { 0 };
    (0..layers)
        .map(|i| {
            let number = (i + first) as f64;
            ensure!(
                delta.contains(&number) != full.contains(&number),
                Mismatch,
                "config.json: layer {i} is not in exactly one of kda_layers and full_attn_layers"
            );
            Ok(delta.contains(&number))
        })
        .collect()
}

pub(super) fn build(outer: &Config<'_>, b: &Build<'_>, d: &mut Declarations) -> Result<Box<dyn Model>> {
    let (c, root, head) = match outer.opt_object("text_config")? {
        Some(text) => (text, "language_model.model", "language_model.lm_head"),
        None => (*outer, "model", "lm_head"),
    };
    c.only("moe_router_activation_func", &["sigmoid"])?;
    let (hidden, layers, vocab) = (c.usize("hidden_size")?, c.usize("num_hidden_layers")?, c.usize("vocab_size")?);
    let (eps, act) = (c.f64_or("rms_norm_eps", 1e-5)? as f32, activation(&c)?);
    let missing = || Error::new(Kind::CorruptFile, "config.json has no linear_attn_config").named("linear_attn_config");
    let linear = c.opt_object("linear_attn_config")?.ok_or_else(missing)?;
    let kda = KdaDims {
        hidden,
        heads: linear.usize("num_heads")?,
        head_dim: linear.usize("head_dim")?,
        taps: linear.usize("short_conv_kernel_size")?,
        eps,
        floor: linear.opt_f64("gate_lower_bound")?.map(|v| v as f32),
        full_rank_gate: linear.bool_or("use_full_rank_gate", false)?,
    };
    let delta = delta_layers(&linear, layers)?;
    let mut ropes = Ropes::default();
    let mut mla = MlaDims { eps, output_gate: c.bool_or("mla_use_output_gate", false)?, ..MlaDims::read(&c, b.kv_type)? };
    if !c.bool_or("mla_use_nope", true)? && mla.rope_dim > 0 {
        mla.rope = Some((ropes.add(d, RopeParameters::read(&c, mla.rope_dim, None, b.context)?), RopeStyle::Halves));
    }
    let (count, top_k) = (c.usize("num_experts")?, c.usize("num_experts_per_token")?);
    ensure!(
        count <= MOST_EXPERTS && top_k <= count,
        LimitExceeded,
        "config.json: {top_k} of {count} experts (num_experts); at most {MOST_EXPERTS} are possible"
    );
    let latent = c.count("routed_expert_hidden_size")?;
    let experts = ExpertDims { hidden: latent.unwrap_or(hidden), inner: c.usize("moe_intermediate_size")?, count, top_k, act };
    let (dense, inner, shared) =
        (c.count("first_k_dense_replace")?.unwrap_or(0), c.usize("intermediate_size")?, c.count("num_shared_experts")?.unwrap_or(0));
    let (normalize, scale) = (c.bool_or("moe_renormalize", true)?, c.f64_or("routed_scaling_factor", 1.0)? as f32);
    let latent_norm = c.bool_or("latent_moe_use_norm", false)?;
    let groups = match c.usize_or("num_expert_group", 1)? {
        1 => None,
        groups => Some(Groups { count: groups, keep: c.usize_or("topk_group", 1)?, best_two: true }),
    };
    // Without `attn_res_block_size` nothing is ever finished: one block longer than the model would still archive the embedding.
    let block = c.usize("attn_res_block_size")?;
    let mut list = Vec::new();
    for i in 0..layers {
        let name = |part: &str| format!("{root}.layers.{i}.{part}");
        let attention: Box<dyn Mixer> = match delta[i] {
            true => Box::new(Kda::new(d, &name("self_attn"), kda)?),
            false => Box::new(Mla::new(d, &name("self_attn"), mla)),
        };
        let mlp: Box<dyn FeedForward> = if i < dense {
            Box::new(GatedMlp::new(d, &name("mlp"), hidden, inner, act, false))
        } else {
            let part = |part: &str| name(&format!("block_sparse_moe.{part}"));
            let gate = Linear::new(d, &part("gate"), count, hidden, false);
            let correction = d.vector(&part("gate.e_score_correction_bias"), count, 0.0);
            let router = Router { normalize, groups, ..Router::sigmoid(gate, Some(correction), top_k, scale) };
            let latent = latent.map(|width| Latent {
                down: Linear::new(d, &part("routed_expert_down_proj"), width, hidden, false),
                norm: latent_norm.then(|| RmsNorm::new(d, &part("routed_expert_norm"), width, eps, 0.0)),
                up: Linear::new(d, &part("routed_expert_up_proj"), hidden, width, false),
            });
            let all = Experts::separate(d, &part("experts"), Some("w1"), "w3", "w2", experts);
            let shared = (shared > 0).then(|| GatedMlp::new(d, &part("shared_experts"), hidden, shared * experts.inner, act, false));
            Box::new(Moe { shared, latent, ..Moe::new(router, all) })
        };
        list.push(Layer {
            attention_reading: Reading::new(d, &name("self_attention_res"), hidden, eps),
            attention_norm: RmsNorm::new(d, &name("input_layernorm"), hidden, eps, 0.0),
            attention,
            mlp_reading: Reading::new(d, &name("mlp_res"), hidden, eps),
            mlp_norm: RmsNorm::new(d, &name("post_attention_layernorm"), hidden, eps, 0.0),
            mlp,
        });
    }
    let tied = outer.bool_or("tie_word_embeddings", c.bool_or("tie_word_embeddings", false)?)?;
    let context = c.usize_or("max_position_embeddings", c.usize_or("model_max_length", 4096)?)?;
    Ok(Box::new(KimiK3 {
        dims: Dims { vocab, hidden, layers, context },
        head: Head::new(d, &format!("{root}.embed_tokens.weight"), head, vocab, hidden, tied),
        ropes,
        block,
        layers: list,
        last_reading: Reading::new(d, &format!("{root}.output_attn_res"), hidden, eps),
        norm: RmsNorm::new(d, &format!("{root}.norm"), hidden, eps, 0.0),
    }))
}
