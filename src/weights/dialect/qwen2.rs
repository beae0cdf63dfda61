//! `qwen2`: biases on q, k and v, nothing moved.

use super::keys::{Config, Keys};
use super::{Dialect, Rename, TOP, same};
use crate::error::Result;
use serde_json::json;

pub(super) static DIALECT: Dialect = Dialect { architecture: "qwen2", config, top: TOP, layer: LAYER };

const LAYER: &[Rename] = &[
    same("attn_norm", "input_layernorm"),
    same("attn_q", "self_attn.q_proj"),
    same("attn_k", "self_attn.k_proj"),
    same("attn_v", "self_attn.v_proj"),
    same("attn_output", "self_attn.o_proj"),
    same("ffn_norm", "post_attention_layernorm"),
    same("ffn_gate", "mlp.gate_proj"),
    same("ffn_up", "mlp.up_proj"),
    same("ffn_down", "mlp.down_proj"),
];

fn config(_: &Keys<'_>, config: &mut Config) -> Result<()> {
    config.insert("architectures".into(), json!(["Qwen2ForCausalLM"]));
    config.insert("model_type".into(), json!("qwen2"));
    config.insert("hidden_act".into(), json!("silu"));
    config.insert("use_sliding_window".into(), json!(false));
    config.insert("sliding_window".into(), json!(null));
    Ok(())
}
