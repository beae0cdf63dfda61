//! Mistral Small 4, text model: latent attention and softmax-routed experts beside a shared one, alone (`mistral4`) or as the
//! `text_config` of a `mistral3` wrapper with a vision tower.
//!
//! Odd things: past the trained length queries grow with the logarithm of the position (`llama_4_scaling_beta`); the experts are
//! stacked, outputs first.

use super::deepseek_v3::{attention_dims, layer};
use super::dense::Common;
use super::{group_limit, sizes};
use crate::bail;
use crate::error::{Error, Kind, Result};
use crate::layers::{Config, Experts, GatedMlp, Linear, Moe, Ropes, Router, Stacking};
use crate::model::{Build, Model};
use crate::weights::Declarations;

pub(super) fn build(c: &Config<'_>, b: &Build<'_>, d: &mut Declarations) -> Result<Box<dyn Model>> {
    under(c, b, d, Common::read(c, false)?)
}

/// The text model inside `Mistral3ForConditionalGeneration`; transformers 5 may also save it under `model.language_model`.
pub(super) fn wrapped(c: &Config<'_>, b: &Build<'_>, d: &mut Declarations) -> Result<Box<dyn Model>> {
    let missing = || Error::new(Kind::CorruptFile, "config.json has no text_config").named("text_config");
    let text = c.opt_object("text_config")?.ok_or_else(missing)?;
    match text.opt_str("model_type")? {
        Some("mistral4") => {}
        other => bail!(Unsupported, "config.json: text_config of a mistral3 has model_type {other:?}; known: mistral4"),
    }
    let tied = c.bool_or("tie_word_embeddings", false)?;
    let (root, head) = match b.shape("model.language_model.embed_tokens.weight") {
        Some(_) => ("model.language_model", "lm_head"),
        None => ("language_model.model", "language_model.lm_head"),
    };
    under(&text, b, d, Common { root, head, ..Common::read(&text, tied)? })
}

fn under(c: &Config<'_>, b: &Build<'_>, d: &mut Declarations, common: Common) -> Result<Box<dyn Model>> {
    let mut ropes = Ropes::default();
    let mut attention = attention_dims(c, b, d, &mut ropes)?;
    if let Some(rope) = c.opt_object("rope_parameters")?
        && let Some(beta) = rope.opt_f64("llama_4_scaling_beta")?
    {
        attention.position_scale = Some((beta as f32, rope.usize("original_max_position_embeddings")?));
    }
    let dense = c.count("first_k_dense_replace")?.unwrap_or(0);
    let dims = sizes(c, &common, "n_routed_experts", "moe_intermediate_size")?;
    let shared = c.count("n_shared_experts")?.unwrap_or(0);
    let (scale, normalize) = (c.f64_or("routed_scaling_factor", 1.0)? as f32, c.bool_or("norm_topk_prob", true)?);
    let groups = group_limit(c, dims.count)?;
    let layers = (0..common.layers)
        .map(|i| {
            if i < dense {
                let mlp = common.mlp(d, i, false);
                return layer(&common, d, i, attention, mlp);
            }
            let gate = Linear::new(d, &common.name(i, "mlp.gate"), dims.count, common.hidden, false);
            let stacking = Stacking { input_major: false, alternating: false, bias: false };
            let (gate_up, down) = (common.name(i, "mlp.experts.gate_up_proj"), common.name(i, "mlp.experts.down_proj"));
            let experts = Experts::stacked(d, &gate_up, &down, stacking, dims);
            let router = Router { normalize, groups, scale, ..Router::softmax(gate, dims.top_k) };
            let shared_name = common.name(i, "mlp.shared_experts");
            let shared = (shared > 0).then(|| GatedMlp::new(d, &shared_name, common.hidden, shared * dims.inner, common.act, false));
            layer(&common, d, i, attention, Moe { shared, ..Moe::new(router, experts) })
        })
        .collect();
    Ok(Box::new(common.decoder(d, ropes, layers, 0.0)))
}
