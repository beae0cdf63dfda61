//! `qwen3`: norms on each head of q and k, nothing moved.

use super::keys::{Config, Keys};
use super::{Dialect, Rename, TOP, same};
use crate::error::Result;
use serde_json::json;

pub(super) static DIALECT: Dialect = Dialect { architecture: "qwen3", config, top: TOP, layer: LAYER };

pub(super) const LAYER: &[Rename] = &[
    same("attn_norm", "input_layernorm"),
    same("attn_q", "self_attn.q_proj"),
    same("attn_k", "self_attn.k_proj"),
    same("attn_v", "self_attn.v_proj"),
    same("attn_q_norm", "self_attn.q_norm"),
    same("attn_k_norm", "self_attn.k_norm"),
    same("attn_output", "self_attn.o_proj"),
    same("ffn_norm", "post_attention_layernorm"),
    same("ffn_gate", "mlp.gate_proj"),
    same("ffn_up", "mlp.up_proj"),
    same("ffn_down", "mlp.down_proj"),
];

pub(super) fn config(_: &Keys<'_>, config: &mut Config) -> Result<()> {
    config.insert("architectures".into(), json!(["Qwen3ForCausalLM"]));
    config.insert("model_type".into(), json!("qwen3"));
    config.insert("hidden_act".into(), json!("silu"));
    config.insert("use_sliding_window".into(), json!(false));
    config.insert("sliding_window".into(), json!(null));
    Ok(())
}
