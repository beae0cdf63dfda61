//! MiniMax M2: full attention with norms over all heads of q and k at once, rotation of the first `rotary_dim` elements; sigmoid-routed
//! experts in every layer, no shared one. `intermediate_size` is an expert's.

use super::dense::Common;
use super::sizes;
use crate::ensure;
use crate::error::Result;
use crate::layers::{AttentionDims, Config, Experts, Linear, Moe, QkNorm, RopeParameters, Ropes, Router};
use crate::model::{Build, Model};
use crate::ops::Scoring;
use crate::weights::Declarations;

pub(super) fn build(c: &Config<'_>, b: &Build<'_>, d: &mut Declarations) -> Result<Box<dyn Model>> {
    let common = Common::read(c, false)?;
    if let Some(kinds) = c.opt_numbers("attn_type_list")? {
        ensure!(kinds.iter().all(|k| *k == 1.0), Unsupported, "config.json: attn_type_list holds other kinds than 1 (full attention)");
    }
    c.only("scoring_func", &["sigmoid", "softmax"])?;
    c.only("qk_norm_type", &["per_layer"])?;
    ensure!(
        c.count("shared_intermediate_size")?.is_none(),
        Unsupported,
        "config.json: shared_intermediate_size is not 0; shared experts are not known here"
    );
    let scoring = if c.opt_str("scoring_func")? == Some("softmax") { Scoring::Softmax } else { Scoring::Sigmoid };
    let qk_norm = if c.bool_or("use_qk_norm", true)? { QkNorm::Whole(common.eps) } else { QkNorm::No };
    let corrected = c.bool_or("use_routing_bias", true)?;
    let dims = sizes(c, &common, "num_local_experts", "intermediate_size")?;
    // Older configs give the rotated elements, newer ones their share of a head.
    let rotary = match c.count("rotary_dim")? {
        Some(dim) if c.get("rope_parameters").is_none() && c.get("partial_rotary_factor").is_none() => dim.min(common.head_dim),
        _ => common.head_dim,
    };
    let mut ropes = Ropes::default();
    let rope = ropes.add(d, RopeParameters::read(c, rotary, None, b.context)?);
    let layers = (0..common.layers)
        .map(|i| {
            let attention = AttentionDims { qk_norm, rope: Some(rope), ..common.attention(b) };
            let gate = Linear::new(d, &common.name(i, "block_sparse_moe.gate"), dims.count, common.hidden, false);
            let name = common.name(i, "block_sparse_moe.e_score_correction_bias");
            let correction = corrected.then(|| d.vector(&name, dims.count, 0.0));
            let experts = Experts::separate(d, &common.name(i, "block_sparse_moe.experts"), Some("w1"), "w3", "w2", dims);
            let router = Router { scoring, ..Router::sigmoid(gate, correction, dims.top_k, 1.0) };
            common.pre_norm(d, i, attention, Moe::new(router, experts))
        })
        .collect();
    Ok(Box::new(common.decoder(d, ropes, layers, 0.0)))
}
