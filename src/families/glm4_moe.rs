//! GLM 4.5 to 4.7: partial rotation, norms on queries and keys in the larger ones; after the first dense layers, sigmoid-routed experts
//! beside a shared one.

use super::dense::Common;
use super::{group_limit, sizes};
use crate::error::Result;
use crate::layers::{AttentionDims, Config, Experts, GatedMlp, Linear, Moe, QkNorm, RopeParameters, Ropes, Router};
use crate::model::{Build, Model};
use crate::weights::Declarations;

pub(super) fn build(c: &Config<'_>, b: &Build<'_>, d: &mut Declarations) -> Result<Box<dyn Model>> {
    let common = Common::read(c, false)?;
    let bias = c.bool_or("attention_bias", false)?;
    let qk_norm = if c.bool_or("use_qk_norm", false)? { QkNorm::PerHead(common.eps, 0.0) } else { QkNorm::No };
    let dense = c.count("first_k_dense_replace")?.unwrap_or(0);
    let dims = sizes(c, &common, "n_routed_experts", "moe_intermediate_size")?;
    let shared = c.count("n_shared_experts")?.unwrap_or(0);
    let (scale, normalize) = (c.f64_or("routed_scaling_factor", 1.0)? as f32, c.bool_or("norm_topk_prob", true)?);
    let groups = group_limit(c, dims.count)?;
    let mut ropes = Ropes::default();
    let rope = ropes.add(d, RopeParameters::read(c, common.head_dim, None, b.context)?);
    let layers = (0..common.layers)
        .map(|i| {
            let attention = AttentionDims { qkv_bias: bias, qk_norm, rope: Some(rope), ..common.attention(b) };
            if i < dense {
                let mlp = common.mlp(d, i, false);
                return common.pre_norm(d, i, attention, mlp);
            }
            let gate = Linear::new(d, &common.name(i, "mlp.gate"), dims.count, common.hidden, false);
            let correction = d.vector(&common.name(i, "mlp.gate.e_score_correction_bias"), dims.count, 0.0);
            let experts = Experts::separate(d, &common.name(i, "mlp.experts"), Some("gate_proj"), "up_proj", "down_proj", dims);
            let router = Router { normalize, groups, ..Router::sigmoid(gate, Some(correction), dims.top_k, scale) };
            let shared_name = common.name(i, "mlp.shared_experts");
            let shared = (shared > 0).then(|| GatedMlp::new(d, &shared_name, common.hidden, shared * dims.inner, common.act, false));
            common.pre_norm(d, i, attention, Moe { shared, ..Moe::new(router, experts) })
        })
        .collect();
    Ok(Box::new(common.decoder(d, ropes, layers, 0.0)))
}
