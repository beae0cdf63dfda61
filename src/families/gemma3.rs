//! Gemma 3 (text): norms before and after each part, stored as `w` for `1 + w`; queries and keys normed per head;
//! local layers with a window and their own rotary base between global ones; embeddings scaled by `sqrt(hidden)`.

use super::dense::{Common, windows};
use crate::error::Result;
use crate::layers::{Attention, AttentionDims, Block, Config, GatedMlp, QkNorm, RmsNorm, RopeParameters, Ropes};
use crate::model::{Build, Model, TransformerLayer};
use crate::ops::Activation;
use crate::weights::Declarations;

pub(super) fn build(c: &Config<'_>, b: &Build, d: &mut Declarations) -> Result<Box<dyn Model>> {
    let mut common = Common::read(c, true)?;
    if c.get("hidden_activation").is_none() && c.get("hidden_act").is_none() {
        common.act = Activation::GeluTanh;
    }
    common.head_dim = c.usize_or("head_dim", 256)?;
    let scale = c.f64_or("query_pre_attn_scalar", 256.0)?.powf(-0.5) as f32;
    let softcap = c.opt_f64("attn_logit_softcapping")?.map(|v| v as f32);
    let pattern = c.usize_or("sliding_window_pattern", 6)?;
    let window = c.usize_or("sliding_window", 4096)?;
    let windows = windows(c, common.layers, |i| Ok((!(i + 1).is_multiple_of(pattern)).then_some(window)))?;
    let mut ropes = Ropes::default();
    let global = ropes.add(d, RopeParameters::read(c, common.head_dim, Some("full_attention"), b.context)?);
    // The older style has the local base beside the scaling, which only global layers use.
    let local = match c.opt_object("rope_parameters")? {
        Some(_) => RopeParameters::read(c, common.head_dim, Some("sliding_attention"), b.context)?,
        None => RopeParameters::plain(c.f64_or("rope_local_base_freq", 10_000.0)?, common.head_dim),
    };
    let local = ropes.add(d, local);
    let layers = (0..common.layers)
        .map(|i| {
            let name = |part: &str| format!("model.layers.{i}.{part}");
            let norm = |d: &mut Declarations, part: &str| Some(RmsNorm::new(d, &name(part), common.hidden, common.eps, 1.0));
            let dims = AttentionDims {
                scale,
                softcap,
                window: windows[i],
                qk_norm: QkNorm::PerHead(common.eps, 1.0),
                rope: Some(if windows[i].is_some() { local } else { global }),
                ..common.attention(b)
            };
            let layer = Block {
                attention_pre: norm(d, "input_layernorm"),
                attention: Attention::new(d, &name("self_attn"), dims),
                attention_post: norm(d, "post_attention_layernorm"),
                mlp_pre: norm(d, "pre_feedforward_layernorm"),
                mlp: GatedMlp::new(d, &name("mlp"), common.hidden, common.inner, common.act, false),
                mlp_post: norm(d, "post_feedforward_layernorm"),
            };
            Box::new(layer) as Box<dyn TransformerLayer>
        })
        .collect();
    let mut decoder = common.decoder(d, ropes, layers, 1.0);
    decoder.embed_factor = (common.hidden as f32).sqrt();
    decoder.logit_softcap = c.opt_f64("final_logit_softcapping")?.map(|v| v as f32);
    Ok(Box::new(decoder))
}
