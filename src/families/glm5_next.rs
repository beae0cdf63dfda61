//! GLM-5.3: several residual streams; most layers are Kimi delta attention, the others latent attention without rotation over
//! positions an indexer selects.
//!
//! Odd things: the language model's numbers are in `text_config`; both latent norms take `rms_norm_eps`; gate and up are bounded
//! (`swiglu_limit`) in every feed-forward; streams end as their mean.

use super::{MOST_EXPERTS, group_limit};
use crate::circuit::Tape;
use crate::error::{Error, Kind, Result};
use crate::layers::{
    Config, ExpertDims, Experts, FeedForward, GatedMlp, HyperSite, Kda, KdaDims, Linear, Mixer, MlaDims, Moe, PooledIndexDims, RmsNorm,
    Ropes, Router, SparseMla, Streams,
};
use crate::model::{Build, Carry, Dims, Head, Model, StreamDecoder, StreamEnd, StreamLayer};
use crate::ops::{Activation, Value};
use crate::weights::Declarations;
use crate::{bail, ensure};

enum Attention {
    Delta(Box<Kda>),
    Sparse(Box<SparseMla>),
}

struct Layer {
    streams: Streams,
    attention_site: HyperSite,
    attention_norm: RmsNorm,
    attention: Attention,
    mlp_site: HyperSite,
    mlp_norm: RmsNorm,
    mlp: Box<dyn FeedForward>,
}

impl StreamLayer for Layer {
    fn record(&self, t: &mut Tape<'_>, carry: &mut Carry, ropes: &[Value]) {
        let s = &self.streams;
        let mix = self.attention_site.mix(t, carry.x);
        let h = s.collapse(t, carry.x, mix);
        let h = self.attention_norm.record(t, h);
        let h = match &self.attention {
            Attention::Delta(kda) => kda.record(t, h, ropes),
            Attention::Sparse(mla) => mla.record(t, h, ropes, &mut carry.selection),
        };
        carry.x = s.expand(t, h, carry.x, mix);
        let mix = self.mlp_site.mix(t, carry.x);
        let h = s.collapse(t, carry.x, mix);
        let h = self.mlp_norm.record(t, h);
        let h = self.mlp.record(t, h);
        carry.x = s.expand(t, h, carry.x, mix);
    }
}

/// Which layers are delta attention: `layer_types`, or the lists of `linear_attn_config`, counted from 0.
fn delta_layers(c: &Config<'_>, linear: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    if let Some(kinds) = c.opt_layer_strings("layer_types", layers)? {
        return kinds
            .into_iter()
            .map(|kind| match kind {
                "linear_attention" => Ok(true),
                "deepseek_sparse_attention" | "full_attention" => Ok(false),
                other => bail!(
                    Unsupported,
                    "config.json: layer_types holds {other:?}; known here: linear_attention, deepseek_sparse_attention, full_attention"
                ),
            })
            .collect();
    }
    let list = linear.opt_numbers("kda_layers")?.ok_or_else(|| {
        Error::new(Kind::CorruptFile, "config.json has neither layer_types nor linear_attn_config.kda_layers").named("layer_types")
    })?;
    Ok((0..layers).map(|i| list.contains(&(i as f64))).collect())
}

pub(super) fn build(outer: &Config<'_>, b: &Build<'_>, d: &mut Declarations) -> Result<Box<dyn Model>> {
    let (c, root) = match outer.opt_object("text_config")? {
        Some(text) => (text, "model.language_model"),
        None => (*outer, "model"),
    };
    c.only("hidden_act", &["silu"])?;
    c.only("scoring_func", &["sigmoid"])?;
    let (hidden, layers) = (c.usize("hidden_size")?, c.usize("num_hidden_layers")?);
    let eps = c.f64_or("rms_norm_eps", 1e-5)? as f32;
    let act = Activation::ClampedSilu { limit: c.f64("swiglu_limit")? as f32 };
    let streams = Streams::read(&c, hidden, eps)?;
    let missing = || Error::new(Kind::CorruptFile, "config.json has no linear_attn_config").named("linear_attn_config");
    let linear = c.opt_object("linear_attn_config")?.ok_or_else(missing)?;
    let kda = KdaDims {
        hidden,
        heads: linear.usize("num_heads")?,
        head_dim: linear.usize("head_dim")?,
        taps: linear.usize("short_conv_kernel_size")?,
        eps,
        floor: linear.opt_f64("gate_lower_bound")?.map(|v| v as f32),
        full_rank_gate: false,
    };
    let delta = delta_layers(&c, &linear, layers)?;
    let mla = MlaDims { eps, ..MlaDims::read(&c, b.kv_type)? };
    ensure!(mla.rope_dim == 0, Unsupported, "config.json: qk_rope_head_dim is {}; this family's attention does not rotate", mla.rope_dim);
    let q_rank = c.usize("q_lora_rank")?;
    let every = c.usize_or("index_kpool", 1)?;
    ensure!(
        c.bool_or("index_kpool_always_select_tail", true)?,
        Unsupported,
        "config.json: index_kpool_always_select_tail false is not computed"
    );
    let index = PooledIndexDims {
        heads: c.usize("index_n_heads")?,
        dim: c.usize("index_head_dim")?,
        every,
        top_k: (c.usize("index_topk")? / every).max(1),
    };
    let owners = match c.opt_layer_strings("indexer_types", layers)? {
        Some(kinds) => kinds.into_iter().map(|kind| kind != "shared").collect(),
        None => vec![true; layers],
    };
    let sparse = match c.opt_layer_strings("mlp_layer_types", layers)? {
        Some(kinds) => kinds.into_iter().map(|kind| kind == "sparse").collect::<Vec<_>>(),
        None => {
            let dense = c.count("first_k_dense_replace")?.unwrap_or(0);
            (0..layers).map(|i| i >= dense).collect()
        }
    };
    let (count, top_k) = (c.usize("n_routed_experts")?, c.usize("num_experts_per_tok")?);
    ensure!(
        count <= MOST_EXPERTS && top_k <= count,
        LimitExceeded,
        "config.json: {top_k} of {count} experts (n_routed_experts); at most {MOST_EXPERTS} are possible"
    );
    let experts = ExpertDims { hidden, inner: c.usize("moe_intermediate_size")?, count, top_k, act };
    let (shared, inner) = (c.count("n_shared_experts")?.unwrap_or(0), c.usize("intermediate_size")?);
    let (scale, normalize) = (c.f64_or("routed_scaling_factor", 1.0)? as f32, c.bool_or("norm_topk_prob", true)?);
    let groups = group_limit(&c, count)?;
    let mut list: Vec<Box<dyn StreamLayer>> = Vec::new();
    let mut selected = false;
    for i in 0..layers {
        let name = |part: &str| format!("{root}.layers.{i}.{part}");
        let attention = if delta[i] {
            Attention::Delta(Box::new(Kda::new(d, &name("self_attn"), kda)?))
        } else {
            ensure!(
                owners[i] || selected,
                Mismatch,
                "config.json: indexer_types: layer {i} shares the selection of a layer before it, and there is none"
            );
            selected = true;
            Attention::Sparse(Box::new(SparseMla::new(d, &name("self_attn"), mla, q_rank, owners[i].then_some(index))))
        };
        let mlp: Box<dyn FeedForward> = if sparse[i] {
            let gate = Linear::new(d, &name("mlp.gate"), count, hidden, false);
            let correction = d.vector(&name("mlp.gate.e_score_correction_bias"), count, 0.0);
            let router = Router { normalize, groups, ..Router::sigmoid(gate, Some(correction), top_k, scale) };
            let all = Experts::separate(d, &name("mlp.experts"), Some("gate_proj"), "up_proj", "down_proj", experts);
            let shared = (shared > 0).then(|| GatedMlp::new(d, &name("mlp.shared_experts"), hidden, shared * experts.inner, act, false));
            Box::new(Moe { shared, ..Moe::new(router, all) })
        } else {
            Box::new(GatedMlp::new(d, &name("mlp"), hidden, inner, act, false))
        };
        list.push(Box::new(Layer {
            streams,
            attention_site: HyperSite::new(d, &name("hc_attn"), streams),
            attention_norm: RmsNorm::new(d, &name("input_layernorm"), hidden, eps, 0.0),
            attention,
            mlp_site: HyperSite::new(d, &name("hc_ffn"), streams),
            mlp_norm: RmsNorm::new(d, &name("post_attention_layernorm"), hidden, eps, 0.0),
            mlp,
        }));
    }
    let vocab = c.usize("vocab_size")?;
    let tied = outer.bool_or("tie_word_embeddings", c.bool_or("tie_word_embeddings", false)?)?;
    Ok(Box::new(StreamDecoder {
        dims: Dims { vocab, hidden, layers, context: c.usize_or("max_position_embeddings", 4096)? },
        head: Head::new(d, &format!("{root}.embed_tokens.weight"), "lm_head", vocab, hidden, tied),
        streams,
        ropes: Ropes::default(),
        group_ropes: Vec::new(),
        history: None,
        layers: list,
        end: StreamEnd::Mean,
        norm: Some(RmsNorm::new(d, &format!("{root}.norm"), hidden, eps, 0.0)),
    }))
}
