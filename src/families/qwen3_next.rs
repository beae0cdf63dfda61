//! Qwen 3 Next: three layers of gated delta nets to one of gated attention with partial rotation; routed experts beside a
//! shared one that is gated too. Norms are stored as `w` for `1 + w`, but for the delta nets' own.

use super::dense::Common;
use super::facts::facts;
use super::sizes;
use crate::error::Result;
use crate::layers::{
    Attention, AttentionDims, Block, Config, DeltaNet, DeltaNetDims, DeltaNetTensors, ExpertDims, Experts, FeedForward, GatedMlp,
    HeadGating, Linear, Mixer, Moe, QkNorm, RmsNorm, RopeParameters, Ropes, Router, Stacking,
};
use crate::model::{Build, Model, TransformerLayer};
use crate::ops::Activation;
use crate::weights::Declarations;
use crate::{bail, ensure};

pub(super) fn build(c: &Config<'_>, b: &Build<'_>, d: &mut Declarations) -> Result<Box<dyn Model>> {
    let common = Common { head_dim: c.usize_or("head_dim", 256)?, ..Common::read(c, false)? };
    let step = c.usize_or("decoder_sparse_step", 1)?;
    let plain = c.opt_numbers("mlp_only_layers")?.unwrap_or_default();
    let sparse = (0..common.layers).map(|i| !plain.contains(&(i as f64)) && (i + 1) % step == 0).collect();
    // Converters to GGUF take the wide product apart.
    let apart = (0..common.layers.min(64)).any(|i| b.shape(&common.name(i, "linear_attn.in_proj_qkv.weight")).is_some());
    let tensors = if apart { DeltaNetTensors::NarrowByHead } else { DeltaNetTensors::ByHead };
    let recipe = Recipe { facts: "qwen3_next", sparse, normalize: c.bool_or("norm_topk_prob", true)?, tensors };
    hybrid(c, b, d, common, recipe)
}

/// Differences between the families of this shape.
pub(super) struct Recipe {
    /// Whose facts count.
    pub facts: &'static str,
    /// Whether a layer has routed experts.
    pub sparse: Vec<bool>,
    /// Whether the picked experts' weights are made to sum to one.
    pub normalize: bool,
    /// Names of the delta nets' input products.
    pub tensors: DeltaNetTensors,
}

/// Which layers attend: `layer_types`, else every `full_attention_interval`-th.
pub(super) fn attention_layers(c: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    match c.opt_layer_strings("layer_types", layers)? {
        Some(kinds) => kinds
            .into_iter()
            .map(|kind| match kind {
                "full_attention" => Ok(true),
                "linear_attention" => Ok(false),
                other => bail!(Unsupported, "config.json: layer_types holds {other:?}; known here: full_attention, linear_attention"),
            })
            .collect(),
        None => {
            let interval = c.usize_or("full_attention_interval", 4)?;
            Ok((0..layers).map(|i| (i + 1).is_multiple_of(interval)).collect())
        }
    }
}

pub(super) fn delta_net(c: &Config<'_>, common: &Common, tensors: DeltaNetTensors) -> Result<DeltaNetDims> {
    Ok(DeltaNetDims {
        hidden: common.hidden,
        key_heads: c.usize_or("linear_num_key_heads", 16)?,
        heads: c.usize_or("linear_num_value_heads", 32)?,
        key_dim: c.usize_or("linear_key_head_dim", 128)?,
        value_dim: c.usize_or("linear_value_head_dim", 128)?,
        taps: c.usize_or("linear_conv_kernel_dim", 4)?,
        eps: common.eps,
        gate: Activation::Silu,
        tensors,
        tiled: c.bool_or("linear_value_heads_tiled", false)?,
        negated: c.bool_or("linear_decay_negated", false)?,
    })
}

/// The experts of layer `i`, each with tensors of its own, or stacked as transformers saves them.
pub(super) fn experts(b: &Build<'_>, d: &mut Declarations, common: &Common, i: usize, dims: ExpertDims) -> Experts {
    let (gate_up, down) = (common.name(i, "mlp.experts.gate_up_proj"), common.name(i, "mlp.experts.down_proj"));
    match b.shape(&gate_up) {
        Some(_) => Experts::stacked(d, &gate_up, &down, Stacking { input_major: false, alternating: false, bias: false }, dims),
        None => Experts::separate(d, &common.name(i, "mlp.experts"), Some("gate_proj"), "up_proj", "down_proj", dims),
    }
}

/// The model.
pub(super) fn hybrid(c: &Config<'_>, b: &Build<'_>, d: &mut Declarations, common: Common, recipe: Recipe) -> Result<Box<dyn Model>> {
    let add = facts(recipe.facts).norm_add;
    let attends = attention_layers(c, common.layers)?;
    let bias = c.bool_or("attention_bias", false)?;
    let net = delta_net(c, &common, recipe.tensors)?;
    let routed = if recipe.sparse.contains(&true) {
        let dims = sizes(c, &common, "num_experts", "moe_intermediate_size")?;
        Some((dims, c.usize("shared_expert_intermediate_size")?))
    } else {
        None
    };
    ensure!(routed.is_some() || common.inner > 0, Mismatch, "config.json: found neither intermediate_size nor experts");
    let mut ropes = Ropes::default();
    let rope = ropes.add(d, RopeParameters::read_partial(c, common.head_dim, None, b.context, 0.25)?);
    let mut layers: Vec<Box<dyn TransformerLayer>> = Vec::with_capacity(common.layers);
    for i in 0..common.layers {
        let norm = |d: &mut Declarations, part: &str| Some(RmsNorm::new(d, &common.name(i, part), common.hidden, common.eps, add));
        let mixer: Box<dyn Mixer> = if attends[i] {
            let dims = AttentionDims {
                qkv_bias: bias,
                out_bias: bias,
                qk_norm: QkNorm::PerHead(common.eps, add),
                gating: HeadGating::InQuery(Activation::Sigmoid),
                rope: Some(rope),
                ..common.attention(b)
            };
            Box::new(Attention::new(d, &common.name(i, "self_attn"), dims))
        } else {
            Box::new(DeltaNet::new(d, &common.name(i, "linear_attn"), net)?)
        };
        let mlp: Box<dyn FeedForward> = match routed {
            Some((dims, shared)) if recipe.sparse[i] => {
                let gate = Linear::new(d, &common.name(i, "mlp.gate"), dims.count, common.hidden, false);
                let router = Router { normalize: recipe.normalize, ..Router::softmax(gate, dims.top_k) };
                let experts = experts(b, d, &common, i, dims);
                let shared = GatedMlp::new(d, &common.name(i, "mlp.shared_expert"), common.hidden, shared, common.act, false);
                let shared_gate = Linear::new(d, &common.name(i, "mlp.shared_expert_gate"), 1, common.hidden, false);
                Box::new(Moe { shared: Some(shared), shared_gate: Some(shared_gate), ..Moe::new(router, experts) })
            }
            _ => Box::new(common.mlp(d, i, false)),
        };
        layers.push(Box::new(Block {
            attention_pre: norm(d, "input_layernorm"),
            attention: mixer,
            attention_post: None,
            mlp_pre: norm(d, "post_attention_layernorm"),
            mlp,
            mlp_post: None,
        }));
    }
    Ok(Box::new(common.decoder(d, ropes, layers, add)))
}
