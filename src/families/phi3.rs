//! Phi-3 and Phi-4-mini: Llama's shape with q, k, v and gate, up each stored as one tensor; LongRoPE, partial rotation.

use super::dense::Common;
use crate::error::Result;
use crate::layers::{Attention, AttentionDims, Block, Config, GatedMlp, RmsNorm, RopeParameters, Ropes};
use crate::model::{Build, Model, TransformerLayer};
use crate::weights::Declarations;

pub(super) fn build(c: &Config<'_>, b: &Build, d: &mut Declarations) -> Result<Box<dyn Model>> {
    let common = Common::read(c, false)?;
    let window = c.count("sliding_window")?;
    let mut ropes = Ropes::default();
    let rope = ropes.add(d, RopeParameters::read(c, common.head_dim, None, b.context)?);
    let layers = (0..common.layers)
        .map(|i| {
            let name = |part: &str| format!("model.layers.{i}.{part}");
            let dims = AttentionDims { window, rope: Some(rope), ..common.attention(b) };
            let layer = Block {
                attention_pre: Some(RmsNorm::new(d, &name("input_layernorm"), common.hidden, common.eps, 0.0)),
                attention: Attention::fused(d, &name("self_attn"), dims),
                attention_post: None,
                mlp_pre: Some(RmsNorm::new(d, &name("post_attention_layernorm"), common.hidden, common.eps, 0.0)),
                mlp: GatedMlp::fused(d, &name("mlp"), common.hidden, common.inner, common.act),
                mlp_post: None,
            };
            Box::new(layer) as Box<dyn TransformerLayer>
        })
        .collect();
    Ok(Box::new(common.decoder(d, ropes, layers, 0.0)))
}
