//! `glm4moe`: the block count includes the draft layers at the end, and the rotated share of a head is given in elements.

use super::keys::{Config, Keys};
use super::{Dialect, Rename, TOP, bare, experts, same};
use crate::error::{Error, Kind, Result};
use serde_json::{Value, json};

pub(super) static DIALECT: Dialect = Dialect { architecture: "glm4moe", config, top: TOP, layer: LAYER };

const LAYER: &[Rename] = &[
    same("attn_norm", "input_layernorm"),
    same("attn_q", "self_attn.q_proj"),
    same("attn_k", "self_attn.k_proj"),
    same("attn_v", "self_attn.v_proj"),
    same("attn_q_norm", "self_attn.q_norm"),
    same("attn_k_norm", "self_attn.k_norm"),
    same("attn_output", "self_attn.o_proj"),
    same("post_attention_norm", "post_attention_layernorm"),
    same("ffn_gate", "mlp.gate_proj"),
    same("ffn_up", "mlp.up_proj"),
    same("ffn_down", "mlp.down_proj"),
    same("ffn_gate_inp", "mlp.gate"),
    bare("exp_probs_b", "mlp.gate.e_score_correction_bias"),
    experts("ffn_gate_exps", "mlp.experts.{}.gate_proj"),
    experts("ffn_up_exps", "mlp.experts.{}.up_proj"),
    experts("ffn_down_exps", "mlp.experts.{}.down_proj"),
    same("ffn_gate_shexp", "mlp.shared_experts.gate_proj"),
    same("ffn_up_shexp", "mlp.shared_experts.up_proj"),
    same("ffn_down_shexp", "mlp.shared_experts.down_proj"),
];

fn config(keys: &Keys<'_>, config: &mut Config) -> Result<()> {
    let (blocks, drafts) = (keys.need_u64("block_count")?, keys.u64("nextn_predict_layers")?.unwrap_or(0));
    let layers = blocks.checked_sub(drafts).filter(|n| *n > 0).ok_or_else(|| {
        let text = format!("{}: {blocks} blocks, {drafts} of them drafts", keys.gguf().source().label());
        Error::new(Kind::CorruptFile, text).named(keys.key("nextn_predict_layers"))
    })?;
    config.insert("architectures".into(), json!(["Glm4MoeForCausalLM"]));
    config.insert("model_type".into(), json!("glm4_moe"));
    config.insert("hidden_act".into(), json!("silu"));
    config.insert("num_hidden_layers".into(), json!(layers));
    config.insert("num_nextn_predict_layers".into(), json!(drafts));
    config.insert("use_qk_norm".into(), json!(keys.has_tensor("blk.0.attn_q_norm.weight")));
    config.insert("n_routed_experts".into(), json!(keys.need_u64("expert_count")?));
    config.insert("num_experts_per_tok".into(), json!(keys.need_u64("expert_used_count")?));
    config.insert("n_shared_experts".into(), json!(keys.u64("expert_shared_count")?.unwrap_or(0)));
    config.insert("moe_intermediate_size".into(), json!(keys.need_u64("expert_feed_forward_length")?));
    config.insert("first_k_dense_replace".into(), json!(keys.u64("leading_dense_block_count")?.unwrap_or(0)));
    config.insert("routed_scaling_factor".into(), json!(keys.f64("expert_weights_scale")?.unwrap_or(1.0)));
    config.insert("norm_topk_prob".into(), json!(keys.flag("expert_weights_norm")?.unwrap_or(true)));
    rotated_share(keys, config)
}

/// `rope.dimension_count` as a share of a head.
pub(super) fn rotated_share(keys: &Keys<'_>, config: &mut Config) -> Result<()> {
    let head_dim = config.get("head_dim").and_then(Value::as_u64).unwrap_or(0);
    if let Some(rotated) = keys.u64("rope.dimension_count")?.filter(|n| *n > 0 && head_dim > 0 && *n < head_dim) {
        config.insert("partial_rotary_factor".into(), json!(rotated as f64 / head_dim as f64));
    }
    Ok(())
}
