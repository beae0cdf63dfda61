//! DeepSeek-V3 and R1: latent attention; after the first dense layers, sigmoid-routed experts beside a shared one.
//!
//! Odd things: rotary elements turn in adjacent pairs unless `rope_interleave` says otherwise; the norms on the two latents
//! have an epsilon of 1e-6 whatever `rms_norm_eps` says; YaRN's `mscale_all_dim` enters the scale of the scores, squared.

use super::dense::Common;
use super::{group_limit, sizes};
use crate::error::Result;
use crate::layers::{Block, Config, Experts, FeedForward, GatedMlp, Linear, Mla, MlaDims, Moe, RmsNorm, RopeParameters, Ropes, Router};
use crate::model::{Build, Model, TransformerLayer};
use crate::ops::RopeStyle;
use crate::weights::Declarations;

/// Sizes of the attention, with its rotation.
pub(super) fn attention_dims(c: &Config<'_>, b: &Build<'_>, d: &mut Declarations, ropes: &mut Ropes) -> Result<MlaDims> {
    let mut dims = MlaDims::read(c, b.kv_type)?;
    let style = if c.bool_or("rope_interleave", true)? { RopeStyle::Pairs } else { RopeStyle::Halves };
    if dims.rope_dim > 0 {
        dims.rope = Some((ropes.add(d, RopeParameters::read(c, dims.rope_dim, None, b.context)?), style));
    }
    dims.scale = (f64::from(dims.scale) * MlaDims::yarn_scale(c)?) as f32;
    Ok(dims)
}

/// Layer `i` with norms before attention and before the feed-forward.
pub(super) fn layer<M: FeedForward + 'static>(
    common: &Common,
    d: &mut Declarations,
    i: usize,
    dims: MlaDims,
    mlp: M,
) -> Box<dyn TransformerLayer> {
    let norm = |d: &mut Declarations, part: &str| Some(RmsNorm::new(d, &common.name(i, part), common.hidden, common.eps, 0.0));
    Box::new(Block {
        attention_pre: norm(d, "input_layernorm"),
        attention: Mla::new(d, &common.name(i, "self_attn"), dims),
        attention_post: None,
        mlp_pre: norm(d, "post_attention_layernorm"),
        mlp,
        mlp_post: None,
    })
}

pub(super) fn build(c: &Config<'_>, b: &Build<'_>, d: &mut Declarations) -> Result<Box<dyn Model>> {
    c.only("scoring_func", &["sigmoid"])?;
    let common = Common::read(c, false)?;
    let mut ropes = Ropes::default();
    let attention = attention_dims(c, b, d, &mut ropes)?;
    let (dense, every) = (c.count("first_k_dense_replace")?.unwrap_or(0), c.usize_or("moe_layer_freq", 1)?);
    let dims = sizes(c, &common, "n_routed_experts", "moe_intermediate_size")?;
    let shared = c.count("n_shared_experts")?.unwrap_or(0);
    let (scale, normalize) = (c.f64_or("routed_scaling_factor", 1.0)? as f32, c.bool_or("norm_topk_prob", true)?);
    let groups = group_limit(c, dims.count)?;
    let layers = (0..common.layers)
        .map(|i| {
            if i < dense || !i.is_multiple_of(every) {
                let mlp = common.mlp(d, i, false);
                return layer(&common, d, i, attention, mlp);
            }
            let gate = Linear::new(d, &common.name(i, "mlp.gate"), dims.count, common.hidden, false);
            let correction = d.vector(&common.name(i, "mlp.gate.e_score_correction_bias"), dims.count, 0.0);
            let experts = Experts::separate(d, &common.name(i, "mlp.experts"), Some("gate_proj"), "up_proj", "down_proj", dims);
            let router = Router { normalize, groups, ..Router::sigmoid(gate, Some(correction), dims.top_k, scale) };
            let shared_name = common.name(i, "mlp.shared_experts");
            let shared = (shared > 0).then(|| GatedMlp::new(d, &shared_name, common.hidden, shared * dims.inner, common.act, false));
            layer(&common, d, i, attention, Moe { shared, ..Moe::new(router, experts) })
        })
        .collect();
    Ok(Box::new(common.decoder(d, ropes, layers, 0.0)))
}
