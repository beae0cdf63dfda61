//! Mixtral: Mistral with experts in every layer; softmax over all, the picked weights normalised.

use super::dense::Common;
use super::sizes;
use crate::error::Result;
use crate::layers::{AttentionDims, Config, Experts, Linear, Moe, RopeParameters, Ropes, Router};
use crate::model::{Build, Model};
use crate::weights::Declarations;

pub(super) fn build(c: &Config<'_>, b: &Build<'_>, d: &mut Declarations) -> Result<Box<dyn Model>> {
    let common = Common::read(c, false)?;
    let window = c.count("sliding_window")?;
    let dims = sizes(c, &common, "num_local_experts", "intermediate_size")?;
    let mut ropes = Ropes::default();
    let rope = ropes.add(d, RopeParameters::read(c, common.head_dim, None, b.context)?);
    let layers = (0..common.layers)
        .map(|i| {
            let attention = AttentionDims { window, rope: Some(rope), ..common.attention(b) };
            let gate = Linear::new(d, &common.name(i, "block_sparse_moe.gate"), dims.count, common.hidden, false);
            let experts = Experts::separate(d, &common.name(i, "block_sparse_moe.experts"), Some("w1"), "w3", "w2", dims);
            common.pre_norm(d, i, attention, Moe::new(Router::softmax(gate, dims.top_k), experts))
        })
        .collect();
    Ok(Box::new(common.decoder(d, ropes, layers, 0.0)))
}
