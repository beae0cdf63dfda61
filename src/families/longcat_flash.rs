//! LongCat-Flash: each layer is two of attention and dense feed-forward, around one shortcut mixture of experts that reads the first
//! half and joins the stream at the end of the second. Some experts compute nothing and hand on their input.
//!
//! Odd things: queries and latents carry factors `sqrt(hidden / rank)`; router weights are not made to sum to one; the
//! identity experts need no tensors, and those that some files hold for them are not read.

use super::MOST_EXPERTS;
use super::deepseek_v3::attention_dims;
use super::dense::Common;
use crate::circuit::Tape;
use crate::ensure;
use crate::error::Result;
use crate::layers::{Config, ExpertDims, Experts, FeedForward, GatedMlp, Linear, Mixer, Mla, Moe, RmsNorm, Ropes, Router};
use crate::model::{Build, Decoder, Model, TransformerLayer};
use crate::ops::{Activation, Scoring, Value};
use crate::weights::Declarations;

/// One half of a layer.
struct Half {
    attention_norm: RmsNorm,
    attention: Mla,
    mlp_norm: RmsNorm,
    mlp: GatedMlp,
}

struct Double {
    halves: [Half; 2],
    moe: Moe,
}

impl TransformerLayer for Double {
    fn record(&self, t: &mut Tape<'_>, mut x: Value, ropes: &[Value]) -> Value {
        let mut shortcut = Value::NONE;
        for half in &self.halves {
            let h = half.attention_norm.record(t, x);
            let h = half.attention.record(t, h, ropes);
            x = t.add(x, h);
            let h = half.mlp_norm.record(t, x);
            if !shortcut.is_some() {
                shortcut = self.moe.record(t, h);
            }
            let h = half.mlp.record(t, h);
            x = t.add(x, h);
        }
        t.add(x, shortcut)
    }
}

fn common(c: &Config<'_>) -> Result<Common> {
    c.only("hidden_act", &["silu"])?;
    let heads = c.usize("num_attention_heads")?;
    Ok(Common {
        hidden: c.usize("hidden_size")?,
        inner: c.usize("ffn_hidden_size")?,
        layers: c.usize("num_layers")?,
        heads,
        kv_heads: heads,
        head_dim: c.usize("v_head_dim")?,
        vocab: c.usize("vocab_size")?,
        context: c.usize_or("max_position_embeddings", 131_072)?,
        eps: c.f64_or("rms_norm_eps", 1e-5)? as f32,
        act: Activation::Silu,
        tied: c.bool_or("tie_word_embeddings", false)?,
        root: "model",
        head: "lm_head",
    })
}

pub(super) fn decoder(c: &Config<'_>, b: &Build<'_>, d: &mut Declarations) -> Result<Decoder> {
    let common = common(c)?;
    let mut ropes = Ropes::default();
    let mut attention = attention_dims(c, b, d, &mut ropes)?;
    let factor = |rank: usize| (common.hidden as f64 / rank as f64).sqrt() as f32;
    if let (Some(rank), true) = (attention.q_rank, c.bool_or("mla_scale_q_lora", true)?) {
        attention.query_factor = factor(rank);
    }
    if c.bool_or("mla_scale_kv_lora", true)? {
        attention.latent_factor = factor(attention.kv_rank);
    }
    let (count, top_k) = (c.usize("n_routed_experts")?, c.usize("moe_topk")?);
    let identities = c.count("zero_expert_num")?.unwrap_or(0);
    c.only("zero_expert_type", &["identity"])?;
    ensure!(
        count <= MOST_EXPERTS && identities <= MOST_EXPERTS,
        LimitExceeded,
        "config.json: {count} experts (n_routed_experts) and {identities} that compute nothing (zero_expert_num); at most {MOST_EXPERTS} of each are possible"
    );
    ensure!(top_k <= count + identities, Mismatch, "config.json: moe_topk is {top_k}, of {} experts", count + identities);
    let dims = ExpertDims { hidden: common.hidden, inner: c.usize("expert_ffn_hidden_size")?, count, top_k, act: common.act };
    let (bias, scale) = (c.bool_or("router_bias", false)?, c.f64_or("routed_scaling_factor", 1.0)? as f32);
    let layers = (0..common.layers)
        .map(|i| {
            let mut half = |n: usize| {
                let name = |part: &str| common.name(i, &format!("{part}.{n}"));
                Half {
                    attention_norm: RmsNorm::new(d, &name("input_layernorm"), common.hidden, common.eps, 0.0),
                    attention: Mla::new(d, &name("self_attn"), attention),
                    mlp_norm: RmsNorm::new(d, &name("post_attention_layernorm"), common.hidden, common.eps, 0.0),
                    mlp: GatedMlp::new(d, &name("mlps"), common.hidden, common.inner, common.act, false),
                }
            };
            let halves = [half(0), half(1)];
            let router = Router {
                scoring: Scoring::Softmax,
                correction: Some(d.vector(&common.name(i, "mlp.router.e_score_correction_bias"), count + identities, 0.0)),
                normalize: false,
                scale,
                ..Router::softmax(Linear::new(d, &common.name(i, "mlp.router.classifier"), count + identities, common.hidden, bias), top_k)
            };
            let experts = Experts::separate(d, &common.name(i, "mlp.experts"), Some("gate_proj"), "up_proj", "down_proj", dims);
            Box::new(Double { halves, moe: Moe { identity: identities > 0, ..Moe::new(router, experts) } }) as Box<dyn TransformerLayer>
        })
        .collect();
    Ok(common.decoder(d, ropes, layers, 0.0))
}

pub(super) fn build(c: &Config<'_>, b: &Build<'_>, d: &mut Declarations) -> Result<Box<dyn Model>> {
    Ok(Box::new(decoder(c, b, d)?))
}
