//! Kimi Linear (Kimi Team, 2025): three layers of Kimi Delta Attention to one of latent attention without rotation; after the first
//! dense layers, sigmoid-routed experts beside a shared one. Layer lists in the config count from 1.

use super::dense::Common;
use super::sizes_picking;
use crate::error::Result;
use crate::layers::{
    Block, Config, Experts, FeedForward, GatedMlp, Kda, KdaDims, Linear, Mixer, Mla, MlaDims, Moe, RmsNorm, RopeParameters, Ropes, Router,
};
use crate::model::{Build, Model, TransformerLayer};
use crate::ops::{Groups, RopeStyle};
use crate::weights::Declarations;
use crate::{bail, ensure};

pub(super) fn build(c: &Config<'_>, b: &Build<'_>, d: &mut Declarations) -> Result<Box<dyn Model>> {
    c.only("moe_router_activation_func", &["sigmoid"])?;
    let mut common = Common::read(c, false)?;
    common.context = c.usize_or("model_max_length", common.context)?;
    let mut ropes = Ropes::default();
    let mut latent = MlaDims::read(c, b.kv_type)?;
    if !c.bool_or("mla_use_nope", true)? && latent.rope_dim > 0 {
        latent.rope = Some((ropes.add(d, RopeParameters::read(c, latent.rope_dim, None, b.context)?), RopeStyle::Halves));
    }
    let attends = attention_layers(c, common.layers)?;
    let kda = kda(c, &common)?;
    let (dense, every) = (c.count("first_k_dense_replace")?.unwrap_or(0), c.usize_or("moe_layer_freq", 1)?);
    let mut layers: Vec<Box<dyn TransformerLayer>> = Vec::with_capacity(common.layers);
    for i in 0..common.layers {
        let norm = |d: &mut Declarations, part: &str| Some(RmsNorm::new(d, &common.name(i, part), common.hidden, common.eps, 0.0));
        let name = common.name(i, "self_attn");
        let mixer: Box<dyn Mixer> = if attends[i] { Box::new(Mla::new(d, &name, latent)) } else { Box::new(Kda::new(d, &name, kda)?) };
        let mlp: Box<dyn FeedForward> =
            if i < dense || !i.is_multiple_of(every) { Box::new(common.mlp(d, i, false)) } else { Box::new(experts(c, d, &common, i)?) };
        layers.push(Box::new(Block {
            attention_pre: norm(d, "input_layernorm"),
            attention: mixer,
            attention_post: None,
            mlp_pre: norm(d, "post_attention_layernorm"),
            mlp,
            mlp_post: None,
        }));
    }
    Ok(Box::new(common.decoder(d, ropes, layers, 0.0)))
}

fn kda(c: &Config<'_>, common: &Common) -> Result<KdaDims> {
    let Some(own) = c.opt_object("linear_attn_config")? else { bail!(Mismatch, "config.json has no linear_attn_config") };
    Ok(KdaDims {
        hidden: common.hidden,
        heads: own.usize("num_heads")?,
        head_dim: own.usize("head_dim")?,
        taps: own.usize_or("short_conv_kernel_size", 4)?,
        eps: common.eps,
        floor: own.opt_f64("gate_lower_bound")?.map(|v| v as f32),
        full_rank_gate: own.bool_or("use_full_rank_gate", false)?,
    })
}

/// Which layers attend; the others are delta attention. The two lists must make up all layers.
fn attention_layers(c: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    let Some(own) = c.opt_object("linear_attn_config")? else { bail!(Mismatch, "config.json has no linear_attn_config") };
    let full = own.opt_numbers("full_attn_layers")?.unwrap_or_default();
    let delta = own.opt_numbers("kda_layers")?.unwrap_or_default();
    (1..=layers)
        .map(|i| {
            let (full, delta) = (full.contains(&(i as f64)), delta.contains(&(i as f64)));
            ensure!(full != delta, Mismatch, "config.json: layer {i} of {layers} is to be in one of full_attn_layers and kda_layers");
            Ok(full)
        })
        .collect()
}

fn experts(c: &Config<'_>, d: &mut Declarations, common: &Common, i: usize) -> Result<Moe> {
    let dims = sizes_picking(c, common, "num_experts", "moe_intermediate_size", "num_experts_per_token")?;
    let (count, keep) = (c.usize_or("num_expert_group", 1)?, c.usize_or("topk_group", 1)?);
    ensure!(
        dims.count.is_multiple_of(count),
        Mismatch,
        "config.json: {} experts do not split into {count} groups (num_expert_group)",
        dims.count
    );
    let part = |p: &str| common.name(i, &format!("block_sparse_moe.{p}"));
    let gate = Linear::new(d, &part("gate"), dims.count, common.hidden, false);
    let correction = d.vector(&part("gate.e_score_correction_bias"), dims.count, 0.0);
    let router = Router {
        normalize: c.bool_or("moe_renormalize", true)?,
        groups: (count > 1).then_some(Groups { count, keep, best_two: true }),
        ..Router::sigmoid(gate, Some(correction), dims.top_k, c.f64_or("routed_scaling_factor", 1.0)? as f32)
    };
    let experts = Experts::separate(d, &part("experts"), Some("w1"), "w3", "w2", dims);
    let shared =
        c.count("num_shared_experts")?.map(|n| GatedMlp::new(d, &part("shared_experts"), common.hidden, n * dims.inner, common.act, false));
    Ok(Moe { shared, ..Moe::new(router, experts) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn layer_lists_count_from_one_and_must_cover_all() {
        let read = |full: &[i32], delta: &[i32]| {
            let c = json!({"linear_attn_config": {"full_attn_layers": full, "kda_layers": delta}});
            attention_layers(&Config::new(&c).unwrap(), 4)
        };
        assert_eq!(read(&[4], &[1, 2, 3]).unwrap(), [false, false, false, true]);
        assert!(read(&[3], &[1, 2, 3]).is_err() && read(&[4], &[1, 2]).is_err());
    }
}
