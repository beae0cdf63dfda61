//! `lfm2`: names alone differ, and the convolutions' kernels lack their middle dimension of 1. Which layers attend is said by their
//! key/value heads, of which a convolution has none.

use super::keys::{Config, Keys};
use super::{Dialect, Rename, same};
use crate::error::{Error, Kind, Result};
use serde_json::json;

pub(super) static DIALECT: Dialect = Dialect { architecture: "lfm2", config, top: TOP, layer: LAYER };

const TOP: &[Rename] =
    &[same("token_embd", "model.embed_tokens"), same("token_embd_norm", "model.embedding_norm"), same("output", "lm_head")];

const LAYER: &[Rename] = &[
    same("attn_norm", "operator_norm"),
    same("attn_q", "self_attn.q_proj"),
    same("attn_k", "self_attn.k_proj"),
    same("attn_v", "self_attn.v_proj"),
    same("attn_q_norm", "self_attn.q_layernorm"),
    same("attn_k_norm", "self_attn.k_layernorm"),
    same("attn_output", "self_attn.out_proj"),
    same("shortconv.in_proj", "conv.in_proj"),
    same("shortconv.conv", "conv.conv"),
    same("shortconv.out_proj", "conv.out_proj"),
    same("ffn_norm", "ffn_norm"),
    same("ffn_gate", "feed_forward.w1"),
    same("ffn_up", "feed_forward.w3"),
    same("ffn_down", "feed_forward.w2"),
];

fn config(keys: &Keys<'_>, config: &mut Config) -> Result<()> {
    let name = keys.key("attention.head_count_kv");
    let heads = keys.gguf().i64_array(&name)?.unwrap_or_default();
    let layers = keys.need_u64("block_count")?;
    if heads.len() as u64 != layers {
        let text = format!("{name} lists {} layers, block_count is {layers}", heads.len());
        return Err(Error::new(Kind::Mismatch, text).named(name));
    }
    let kinds: Vec<&str> = heads.iter().map(|n| if *n > 0 { "full_attention" } else { "conv" }).collect();
    config.insert("architectures".into(), json!(["Lfm2ForCausalLM"]));
    config.insert("model_type".into(), json!("lfm2"));
    config.insert("layer_types".into(), json!(kinds));
    config.insert("norm_eps".into(), json!(keys.need_f64("attention.layer_norm_rms_epsilon")?));
    config.insert("conv_L_cache".into(), json!(keys.need_u64("shortconv.l_cache")?));
    config.insert("conv_bias".into(), json!(keys.has_tensor("blk.0.shortconv.in_proj.bias")));
    // The width in the file is the final one.
    config.insert("block_auto_adjust_ff_dim".into(), json!(false));
    config.insert("tie_embedding".into(), json!(!keys.has_tensor("output.weight")));
    Ok(())
}
