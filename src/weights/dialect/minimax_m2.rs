//! `minimax-m2`: sigmoid-routed experts in every layer, norms over all heads of q and k at once.

use super::glm4_moe::rotated_share;
use super::keys::{Config, Keys};
use super::{Dialect, Rename, TOP, bare, experts, same};
use crate::error::Result;
use serde_json::json;

pub(super) static DIALECT: Dialect = Dialect { architecture: "minimax-m2", config, top: TOP, layer: LAYER };

const LAYER: &[Rename] = &[
    same("attn_norm", "input_layernorm"),
    same("attn_q", "self_attn.q_proj"),
    same("attn_k", "self_attn.k_proj"),
    same("attn_v", "self_attn.v_proj"),
    same("attn_q_norm", "self_attn.q_norm"),
    same("attn_k_norm", "self_attn.k_norm"),
    same("attn_output", "self_attn.o_proj"),
    same("ffn_norm", "post_attention_layernorm"),
    same("ffn_gate_inp", "block_sparse_moe.gate"),
    bare("exp_probs_b", "block_sparse_moe.e_score_correction_bias"),
    experts("ffn_gate_exps", "block_sparse_moe.experts.{}.w1"),
    experts("ffn_up_exps", "block_sparse_moe.experts.{}.w3"),
    experts("ffn_down_exps", "block_sparse_moe.experts.{}.w2"),
];

fn config(keys: &Keys<'_>, config: &mut Config) -> Result<()> {
    config.insert("architectures".into(), json!(["MiniMaxM2ForCausalLM"]));
    config.insert("model_type".into(), json!("minimax_m2"));
    config.insert("hidden_act".into(), json!("silu"));
    config.insert("use_qk_norm".into(), json!(keys.has_tensor("blk.0.attn_q_norm.weight")));
    config.insert("num_local_experts".into(), json!(keys.need_u64("expert_count")?));
    config.insert("num_experts_per_tok".into(), json!(keys.need_u64("expert_used_count")?));
    config.insert("intermediate_size".into(), json!(keys.need_u64("expert_feed_forward_length")?));
    config.insert("scoring_func".into(), json!("sigmoid"));
    config.insert("use_routing_bias".into(), json!(keys.has_tensor("blk.0.exp_probs_b.bias")));
    rotated_share(keys, config)
}
