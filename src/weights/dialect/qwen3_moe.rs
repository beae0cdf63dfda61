//! `qwen3moe`: qwen3 with routed experts in every layer, stacked into one tensor per projection.

use super::keys::{Config, Keys};
use super::{Dialect, Rename, TOP, experts, same};
use crate::error::Result;
use serde_json::json;

pub(super) static DIALECT: Dialect = Dialect { architecture: "qwen3moe", config, top: TOP, layer: LAYER };

pub(super) const LAYER: &[Rename] = &[
    same("attn_norm", "input_layernorm"),
    same("attn_q", "self_attn.q_proj"),
    same("attn_k", "self_attn.k_proj"),
    same("attn_v", "self_attn.v_proj"),
    same("attn_q_norm", "self_attn.q_norm"),
    same("attn_k_norm", "self_attn.k_norm"),
    same("attn_output", "self_attn.o_proj"),
    same("ffn_norm", "post_attention_layernorm"),
    same("ffn_gate_inp", "mlp.gate"),
    experts("ffn_gate_exps", "mlp.experts.{}.gate_proj"),
    experts("ffn_up_exps", "mlp.experts.{}.up_proj"),
    experts("ffn_down_exps", "mlp.experts.{}.down_proj"),
];

pub(super) fn config(keys: &Keys<'_>, config: &mut Config) -> Result<()> {
    config.insert("architectures".into(), json!(["Qwen3MoeForCausalLM"]));
    config.insert("model_type".into(), json!("qwen3_moe"));
    config.insert("hidden_act".into(), json!("silu"));
    config.insert("use_sliding_window".into(), json!(false));
    config.insert("sliding_window".into(), json!(null));
    config.insert("num_experts".into(), json!(keys.need_u64("expert_count")?));
    config.insert("num_experts_per_tok".into(), json!(keys.need_u64("expert_used_count")?));
    config.insert("moe_intermediate_size".into(), json!(keys.need_u64("expert_feed_forward_length")?));
    // The architecture's constants: every layer has experts, and the chosen ones' weights are normalised.
    config.insert("decoder_sparse_step".into(), json!(1));
    config.insert("mlp_only_layers".into(), json!([]));
    config.insert("norm_topk_prob".into(), json!(true));
    Ok(())
}
