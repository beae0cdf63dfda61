//! GPT-OSS: alternating windows, a sink for each head, biases everywhere; experts stacked with gate and up rows alternating, behind a
//! clamped SwiGLU; softmax over the picked experts alone.

use super::dense::{Common, windows};
use super::sizes;
use crate::error::Result;
use crate::layers::{AttentionDims, Config, ExpertDims, Experts, Linear, Moe, RopeParameters, Ropes, Router, Stacking};
use crate::model::{Build, Model};
use crate::ops::{Activation, Scoring};
use crate::weights::Declarations;

pub(super) fn build(c: &Config<'_>, b: &Build<'_>, d: &mut Declarations) -> Result<Box<dyn Model>> {
    let mut common = Common::read(c, false)?;
    common.head_dim = c.usize_or("head_dim", 64)?;
    let bias = c.bool_or("attention_bias", true)?;
    let window = c.usize_or("sliding_window", 128)?;
    let windows = windows(c, common.layers, |i| Ok(i.is_multiple_of(2).then_some(window)))?;
    let act = Activation::SwigluOai { alpha: c.f64_or("swiglu_alpha", 1.702)? as f32, limit: c.f64_or("swiglu_limit", 7.0)? as f32 };
    let dims = ExpertDims { act, ..sizes(c, &common, "num_local_experts", "intermediate_size")? };
    let mut ropes = Ropes::default();
    let rope = ropes.add(d, RopeParameters::read(c, common.head_dim, None, b.context)?);
    let layers = (0..common.layers)
        .map(|i| {
            let attention =
                AttentionDims { window: windows[i], qkv_bias: bias, out_bias: bias, sinks: true, rope: Some(rope), ..common.attention(b) };
            let router = Linear::new(d, &common.name(i, "mlp.router"), dims.count, common.hidden, true);
            let (gate_up, down) = (common.name(i, "mlp.experts.gate_up_proj"), common.name(i, "mlp.experts.down_proj"));
            // GGUF files hold each expert's matrices apart, with gate and up apart too.
            let name = common.name(i, "mlp.experts");
            let experts = if b.shape(&format!("{name}.0.gate_proj.weight")).is_some() {
                Experts::separate_biased(d, &name, Some("gate_proj"), "up_proj", "down_proj", dims)
            } else {
                // BF16 experts are stored inputs first, MXFP4 blocks outputs first.
                let input_major = b.shape(&format!("{gate_up}_blocks")).is_none();
                Experts::stacked(d, &gate_up, &down, Stacking { input_major, alternating: true, bias: true }, dims)
            };
            let router = Router { scoring: Scoring::SoftmaxPicked, ..Router::softmax(router, dims.top_k) };
            common.pre_norm(d, i, attention, Moe::new(router, experts))
        })
        .collect();
    Ok(Box::new(common.decoder(d, ropes, layers, 0.0)))
}
