//! LFM2 (Liquid AI, 2025): short gated convolutions, grouped-query attention with norms on queries and keys every few layers,
//! SwiGLU whose width is two thirds of what the config says, rounded up.

use super::dense::Common;
use crate::error::Result;
use crate::layers::{
    Attention, AttentionDims, AttentionNames, Block, Config, GatedMlp, Mixer, QkNorm, RmsNorm, RopeParameters, Ropes, ShortConv,
};
use crate::model::{Build, Decoder, Dims, Head, Model, TransformerLayer};
use crate::weights::Declarations;
use crate::{bail, ensure};

const NAMES: AttentionNames = AttentionNames { q_norm: "q_layernorm", k_norm: "k_layernorm", out: "out_proj" };

pub(super) fn build(c: &Config<'_>, b: &Build<'_>, d: &mut Declarations) -> Result<Box<dyn Model>> {
    let tied = c.bool_or("tie_embedding", true)?;
    let mut common = Common::with_inner(c, tied, inner(c)?)?;
    common.eps = c.f64_or("norm_eps", 1e-5)? as f32;
    let (taps, bias) = (c.usize_or("conv_L_cache", 3)?, c.bool_or("conv_bias", false)?);
    let attends = attention_layers(c, common.layers)?;
    let mut ropes = Ropes::default();
    let rope = ropes.add(d, RopeParameters::read(c, common.head_dim, None, b.context)?);
    let mut layers: Vec<Box<dyn TransformerLayer>> = Vec::with_capacity(attends.len());
    for (i, attends) in attends.into_iter().enumerate() {
        let mixer: Box<dyn Mixer> = if attends {
            let dims = AttentionDims { qk_norm: QkNorm::PerHead(common.eps, 0.0), rope: Some(rope), ..common.attention(b) };
            Box::new(Attention::named(d, &common.name(i, "self_attn"), dims, NAMES))
        } else {
            Box::new(ShortConv::new(d, &common.name(i, "conv"), common.hidden, taps, bias)?)
        };
        let norm = |d: &mut Declarations, part: &str| Some(RmsNorm::new(d, &common.name(i, part), common.hidden, common.eps, 0.0));
        layers.push(Box::new(Block {
            attention_pre: norm(d, "operator_norm"),
            attention: mixer,
            attention_post: None,
            mlp_pre: norm(d, "ffn_norm"),
            mlp: GatedMlp::named(d, &common.name(i, "feed_forward"), ["w1", "w3", "w2"], common.hidden, common.inner, common.act, false),
            mlp_post: None,
        }));
    }
    Ok(Box::new(Decoder {
        dims: Dims { vocab: common.vocab, hidden: common.hidden, layers: common.layers, context: common.context },
        head: Head::new(d, "model.embed_tokens.weight", "lm_head", common.vocab, common.hidden, common.tied),
        embed_factor: 1.0,
        entry: None,
        ropes,
        layers,
        norm: RmsNorm::new(d, "model.embedding_norm", common.hidden, common.eps, 0.0),
        logit_factor: 1.0,
        logit_softcap: None,
    }))
}

/// Width of the feed-forward: two thirds of the given one, times a factor, up to a multiple; or the given one as it is.
fn inner(c: &Config<'_>) -> Result<usize> {
    let given = if c.get("block_ff_dim").is_some() { c.usize("block_ff_dim")? } else { c.usize("intermediate_size")? };
    if !c.bool_or("block_auto_adjust_ff_dim", true)? {
        return Ok(given);
    }
    let factor = c.f64_or("block_ffn_dim_multiplier", 1.0)?;
    ensure!(factor > 0.0 && factor < 1e6, CorruptFile, "config.json: block_ffn_dim_multiplier is {factor}, expected more than 0");
    let scaled = (factor * (2 * given / 3) as f64) as usize;
    Ok(scaled.max(1).next_multiple_of(c.usize_or("block_multiple_of", 256)?))
}

/// Which layers attend: `layer_types`, else `full_attn_idxs`, else all.
fn attention_layers(c: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    if let Some(kinds) = c.opt_layer_strings("layer_types", layers)? {
        return kinds
            .into_iter()
            .map(|kind| match kind {
                "full_attention" => Ok(true),
                "conv" => Ok(false),
                other => bail!(Unsupported, "config.json: layer_types holds {other:?}; known here: full_attention, conv"),
            })
            .collect();
    }
    Ok(match c.opt_numbers("full_attn_idxs")? {
        Some(list) => (0..layers).map(|i| list.contains(&(i as f64))).collect(),
        None => vec![true; layers],
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_feed_forward_of_lfm2_1_2b_is_8192_wide() {
        let c = json!({"block_ff_dim": 12288, "block_auto_adjust_ff_dim": true, "block_ffn_dim_multiplier": 1.0, "block_multiple_of": 256});
        assert_eq!(inner(&Config::new(&c).unwrap()).unwrap(), 8192);
        let c = json!({"intermediate_size": 100, "block_auto_adjust_ff_dim": false});
        assert_eq!(inner(&Config::new(&c).unwrap()).unwrap(), 100);
    }
}
