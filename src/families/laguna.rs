//! Poolside Laguna: head counts by layer, full layers (YaRN over half a head) among sliding ones, softplus gates on the heads, sigmoid-routed
//! experts beside a shared one.

use super::dense::{Common, windows};
use super::sizes;
use crate::error::Result;
use crate::layers::{AttentionDims, Config, Experts, GatedMlp, HeadGating, Linear, Moe, QkNorm, RopeParameters, Ropes, Router};
use crate::model::{Build, Model};
use crate::ops::Activation;
use crate::weights::Declarations;
use crate::{bail, ensure};

pub(super) fn build(c: &Config<'_>, b: &Build<'_>, d: &mut Declarations) -> Result<Box<dyn Model>> {
    let common = Common::read(c, false)?;
    ensure!(
        !c.bool_or("moe_apply_router_weight_on_input", false)?,
        Unsupported,
        "config.json: moe_apply_router_weight_on_input is true; weights are known on outputs only"
    );
    let heads = heads(c, &common)?;
    let windows = windows(c, common.layers, |_| Ok(None))?;
    let dense = dense_layers(c, &common)?;
    let gating =
        match c.get("gating").and_then(|v| v.as_str().map_or_else(|| v.as_bool().map(|b| if b { "per-head" } else { "none" }), Some)) {
            None | Some("per-head") => HeadGating::PerHead(Activation::Softplus),
            Some("per-element") => HeadGating::PerElement(Activation::Softplus),
            Some("none") => HeadGating::No,
            Some(other) => bail!(Unsupported, "config.json: gating is {other:?}; known: true, per-head, per-element"),
        };
    let dims = sizes(c, &common, "num_experts", "moe_intermediate_size")?;
    let shared_inner = c.usize_or("shared_expert_intermediate_size", dims.inner)?;
    let normalize = c.bool_or("norm_topk_prob", true)?;
    let scale = c.f64_or("moe_routed_scaling_factor", 1.0)? as f32;
    let softcap = c.opt_f64("moe_router_logit_softcapping")?.filter(|cap| *cap > 0.0).map(|cap| cap as f32);
    let bias = c.bool_or("attention_bias", false)?;
    let (full, local) = rotations(c, &common, b)?;
    let mut ropes = Ropes::default();
    let (full, local) = (ropes.add(d, full), ropes.add(d, local));
    let layers = (0..common.layers)
        .map(|i| {
            let attention = AttentionDims {
                heads: heads[i],
                window: windows[i],
                qkv_bias: bias,
                out_bias: bias,
                qk_norm: QkNorm::PerHead(common.eps, 0.0),
                gating,
                rope: Some(if windows[i].is_some() { local } else { full }),
                ..common.attention(b)
            };
            if dense[i] {
                let mlp = common.mlp(d, i, false);
                return common.pre_norm(d, i, attention, mlp);
            }
            let gate = Linear::new(d, &common.name(i, "mlp.gate"), dims.count, common.hidden, false);
            let correction = d.vector(&common.name(i, "mlp.experts.e_score_correction_bias"), dims.count, 0.0);
            let experts = Experts::separate(d, &common.name(i, "mlp.experts"), Some("gate_proj"), "up_proj", "down_proj", dims);
            let router = Router { normalize, softcap, ..Router::sigmoid(gate, Some(correction), dims.top_k, scale) };
            let shared = Some(GatedMlp::new(d, &common.name(i, "mlp.shared_expert"), common.hidden, shared_inner, common.act, false));
            common.pre_norm(d, i, attention, Moe { shared, ..Moe::new(router, experts) })
        })
        .collect();
    Ok(Box::new(common.decoder(d, ropes, layers, 0.0)))
}

/// Query heads of each layer.
fn heads(c: &Config<'_>, common: &Common) -> Result<Vec<usize>> {
    let Some(list) = c.opt_numbers("num_attention_heads_per_layer")? else { return Ok(vec![common.heads; common.layers]) };
    ensure!(
        list.len() == common.layers,
        Mismatch,
        "config.json: num_attention_heads_per_layer lists {} layers, num_hidden_layers is {}",
        list.len(),
        common.layers
    );
    let heads: Vec<usize> = list.iter().map(|n| *n as usize).collect();
    for (i, &n) in heads.iter().enumerate() {
        ensure!(
            n > 0 && n < 1 << 20 && n.is_multiple_of(common.kv_heads),
            Mismatch,
            "config.json: num_attention_heads_per_layer has {} for layer {i}; {} key/value heads are shared evenly",
            list[i],
            common.kv_heads
        );
    }
    Ok(heads)
}

/// Which layers are dense: as `mlp_layer_types` or `mlp_only_layers` says, else the first.
fn dense_layers(c: &Config<'_>, common: &Common) -> Result<Vec<bool>> {
    if let Some(kinds) = c.opt_layer_strings("mlp_layer_types", common.layers)? {
        return kinds
            .into_iter()
            .map(|kind| match kind {
                "dense" => Ok(true),
                "sparse" => Ok(false),
                other => bail!(Unsupported, "config.json: mlp_layer_types holds {other:?}; known: dense, sparse"),
            })
            .collect();
    }
    let dense = c.opt_numbers("mlp_only_layers")?.unwrap_or_else(|| vec![0.0]);
    Ok((0..common.layers).map(|i| dense.contains(&(i as f64))).collect())
}

/// Frequencies of full and of sliding layers; without parameters, half a head by base 500,000 and a whole one by 10,000.
fn rotations(c: &Config<'_>, common: &Common, b: &Build<'_>) -> Result<(RopeParameters, RopeParameters)> {
    if c.get("rope_parameters").is_none() && c.get("rope_scaling").is_none() {
        let half = (common.head_dim / 2).next_multiple_of(2);
        return Ok((RopeParameters::plain(500_000.0, half), RopeParameters::plain(10_000.0, common.head_dim)));
    }
    let read = |kind: &str| RopeParameters::read(c, common.head_dim, Some(kind), b.context);
    Ok((read("full_attention")?, read("sliding_attention")?))
}
