//! OLMo 2 and 3: norms after attention and feed-forward instead of before, and over all heads of q and k at once.
//! OLMo 3 slides three layers of four; only its full layers scale the rotary frequencies.

use super::dense::{Common, windows};
use crate::error::Result;
use crate::layers::{Attention, AttentionDims, Block, Config, GatedMlp, QkNorm, RmsNorm, RopeParameters, Ropes};
use crate::model::{Build, Model, TransformerLayer};
use crate::weights::Declarations;

pub(super) fn olmo2(c: &Config<'_>, b: &Build, d: &mut Declarations) -> Result<Box<dyn Model>> {
    let common = Common::read(c, false)?;
    let mut ropes = Ropes::default();
    let rope = ropes.add(d, RopeParameters::read(c, common.head_dim, None, b.context)?);
    let plan = vec![(None, rope); common.layers];
    build(c, b, d, common, ropes, &plan)
}

pub(super) fn olmo3(c: &Config<'_>, b: &Build, d: &mut Declarations) -> Result<Box<dyn Model>> {
    let common = Common::read(c, false)?;
    let window = c.usize_or("sliding_window", 4096)?;
    let windows = windows(c, common.layers, |i| Ok((!(i + 1).is_multiple_of(4)).then_some(window)))?;
    let mut ropes = Ropes::default();
    let full = RopeParameters::read(c, common.head_dim, Some("full_attention"), b.context)?;
    let local = RopeParameters::plain(theta(c)?, common.head_dim);
    let (full, local) = (ropes.add(d, full), ropes.add(d, local));
    let plan: Vec<_> = windows.into_iter().map(|w| (w, if w.is_some() { local } else { full })).collect();
    build(c, b, d, common, ropes, &plan)
}

fn theta(c: &Config<'_>) -> Result<f64> {
    match c.opt_object("rope_parameters")? {
        Some(p) => match p.opt_object("sliding_attention")? {
            Some(own) => own.f64_or("rope_theta", 500_000.0),
            None => p.f64_or("rope_theta", 500_000.0),
        },
        None => c.f64_or("rope_theta", 500_000.0),
    }
}

/// `plan` has each layer's window and rotary table.
fn build(
    c: &Config<'_>,
    b: &Build,
    d: &mut Declarations,
    common: Common,
    ropes: Ropes,
    plan: &[(Option<usize>, usize)],
) -> Result<Box<dyn Model>> {
    let bias = c.bool_or("attention_bias", false)?;
    let layers = plan
        .iter()
        .enumerate()
        .map(|(i, &(window, rope))| {
            let name = |part: &str| format!("model.layers.{i}.{part}");
            let dims = AttentionDims {
                window,
                rope: Some(rope),
                qkv_bias: bias,
                out_bias: bias,
                qk_norm: QkNorm::Whole(common.eps),
                ..common.attention(b)
            };
            let layer = Block {
                attention_pre: None,
                attention: Attention::new(d, &name("self_attn"), dims),
                attention_post: Some(RmsNorm::new(d, &name("post_attention_layernorm"), common.hidden, common.eps, 0.0)),
                mlp_pre: None,
                mlp: GatedMlp::new(d, &name("mlp"), common.hidden, common.inner, common.act, false),
                mlp_post: Some(RmsNorm::new(d, &name("post_feedforward_layernorm"), common.hidden, common.eps, 0.0)),
            };
            Box::new(layer) as Box<dyn TransformerLayer>
        })
        .collect();
    Ok(Box::new(common.decoder(d, ropes, layers, 0.0)))
}
