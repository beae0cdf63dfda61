//! Qwen 3 with routed experts: softmax over all experts, the picked ones' weights normalised where `norm_topk_prob` says so; some
//! layers stay dense (`mlp_only_layers`, `decoder_sparse_step`).

use super::dense::{Common, qwen_windows, qwen3_common};
use super::sizes;
use crate::error::Result;
use crate::layers::{AttentionDims, Config, Experts, Linear, Moe, QkNorm, RopeParameters, Ropes, Router, Stacking};
use crate::model::{Build, Model};
use crate::weights::Declarations;

pub(super) fn build(c: &Config<'_>, b: &Build<'_>, d: &mut Declarations) -> Result<Box<dyn Model>> {
    under(c, b, d, "model", false)
}

/// The same under tensor names that begin with `root`; `tied` where the config does not say.
pub(super) fn under(c: &Config<'_>, b: &Build<'_>, d: &mut Declarations, root: &'static str, tied: bool) -> Result<Box<dyn Model>> {
    let common = Common { root, ..qwen3_common(c, tied)? };
    let bias = c.bool_or("attention_bias", false)?;
    let windows = qwen_windows(c, common.layers)?;
    let step = c.usize_or("decoder_sparse_step", 1)?;
    let dense = c.opt_numbers("mlp_only_layers")?.unwrap_or_default();
    let normalize = c.bool_or("norm_topk_prob", false)?;
    let dims = sizes(c, &common, "num_experts", "moe_intermediate_size")?;
    let mut ropes = Ropes::default();
    let rope = ropes.add(d, RopeParameters::read(c, common.head_dim, None, b.context)?);
    let layers = (0..common.layers)
        .map(|i| {
            let attention = AttentionDims {
                window: windows[i],
                qkv_bias: bias,
                out_bias: bias,
                qk_norm: QkNorm::PerHead(common.eps, 0.0),
                rope: Some(rope),
                ..common.attention(b)
            };
            if dense.contains(&(i as f64)) || (i + 1) % step != 0 {
                let mlp = common.mlp(d, i, false);
                return common.pre_norm(d, i, attention, mlp);
            }
            let gate = Linear::new(d, &common.name(i, "mlp.gate"), dims.count, common.hidden, false);
            let (name, gate_up, down) =
                (common.name(i, "mlp.experts"), common.name(i, "mlp.experts.gate_up_proj"), common.name(i, "mlp.experts.down_proj"));
            // Qwen 3 VL stacks its experts, inputs first as published and outputs first as transformers saves them.
            let experts = match b.shape(&gate_up) {
                Some(shape) => {
                    let input_major = shape.get(1) == Some(&dims.hidden);
                    Experts::stacked(d, &gate_up, &down, Stacking { input_major, alternating: false, bias: false }, dims)
                }
                None => Experts::separate(d, &name, Some("gate_proj"), "up_proj", "down_proj", dims),
            };
            let router = Router { normalize, ..Router::softmax(gate, dims.top_k) };
            common.pre_norm(d, i, attention, Moe::new(router, experts))
        })
        .collect();
    Ok(Box::new(common.decoder(d, ropes, layers, 0.0)))
}
