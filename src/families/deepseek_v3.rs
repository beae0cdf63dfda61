//! DeepSeek-V3 and R1: latent attention, first layers dense, then a mixture of experts with a shared expert.
//!
//! Odd things: rotary elements turn in adjacent pairs unless `rope_interleave` says otherwise; the norms on the two latents
//! have an epsilon of 1e-6 whatever `rms_norm_eps` says; YaRN's `mscale_all_dim` enters the scale of the scores, squared.

use crate::bail;
use crate::error::Result;
use crate::families::dense::Common;
use crate::layers::{Config, FeedForward, GatedMlp, Mla, MlaDims, RmsNorm, RopeParameters, Ropes};
use crate::model::{Build, Model, TransformerLayer};
use crate::circuit::Tape;
use crate::ops::{RopeStyle, Value};
use crate::weights::Declarations;

/// `h = x + attention(norm(x))`, `y = h + feed_forward(norm(h))`.
pub(super) struct Layer {
    pub attention_norm: RmsNorm,
    pub attention: Mla,
    pub mlp_norm: RmsNorm,
    pub mlp: FeedForward,
}

impl TransformerLayer for Layer {
    fn record(&self, t: &mut Tape<'_>, x: Value, ropes: &[Value]) -> Value {
        let h = self.attention_norm.record(t, x);
        let h = self.attention.record(t, h, ropes);
        let x = t.add(x, h);
        let h = self.mlp_norm.record(t, x);
        let h = self.mlp.record(t, h);
        t.add(x, h)
    }
}

/// Sizes of the attention, its rotation added to `ropes`.
pub(super) fn attention_dims(c: &Config<'_>, b: &Build, d: &mut Declarations, ropes: &mut Ropes) -> Result<MlaDims> {
    let mut dims = MlaDims::read(c, b.kv_type)?;
    let style = if c.bool_or("rope_interleave", true)? { RopeStyle::Pairs } else { RopeStyle::Halves };
    let rope = ropes.add(d, RopeParameters::read(c, dims.rope_dim, None, b.context)?);
    dims.rope = Some((rope, style));
    dims.scale = (f64::from(dims.scale) * MlaDims::yarn_scale(c)?) as f32;
    Ok(dims)
}

pub(super) fn build(c: &Config<'_>, b: &Build, d: &mut Declarations) -> Result<Box<dyn Model>> {
    let common = Common::read(c, false)?;
    let mut ropes = Ropes::default();
    let dims = attention_dims(c, b, d, &mut ropes)?;
    let (dense, every) = (c.count("first_k_dense_replace")?.unwrap_or(0), c.usize_or("moe_layer_freq", 1)?);
    let mut layers: Vec<Box<dyn TransformerLayer>> = Vec::new();
    for i in 0..common.layers {
        let name = |part: &str| format!("model.layers.{i}.{part}");
        let sparse = i >= dense && i.is_multiple_of(every);
        if sparse {
            bail!(Unsupported, "experts");
        }
        layers.push(Box::new(Layer {
            attention_norm: RmsNorm::new(d, &name("input_layernorm"), common.hidden, common.eps, 0.0),
            attention: Mla::new(d, &name("self_attn"), dims),
            mlp_norm: RmsNorm::new(d, &name("post_attention_layernorm"), common.hidden, common.eps, 0.0),
            mlp: FeedForward::Dense(GatedMlp::new(d, &name("mlp"), common.hidden, common.inner, common.act, false)),
        }));
    }
    Ok(Box::new(common.decoder(d, ropes, layers, 0.0)))
}
