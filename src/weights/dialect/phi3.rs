//! `phi3`: Phi-3 and Phi-4-mini, with q, k, v in one tensor and gate, up in another as in their own checkpoints; rotary
//! factors come as two tensors, for short and for long sequences.

use super::glm4_moe::rotated_share;
use super::keys::{Config, Keys};
use super::{Dialect, Rename, TOP, same};
use crate::error::Result;
use serde_json::json;

pub(super) static DIALECT: Dialect = Dialect { architecture: "phi3", config, top: TOP, layer: LAYER };

const LAYER: &[Rename] = &[
    same("attn_norm", "input_layernorm"),
    same("attn_qkv", "self_attn.qkv_proj"),
    same("attn_output", "self_attn.o_proj"),
    same("ffn_norm", "post_attention_layernorm"),
    same("ffn_up", "mlp.gate_up_proj"),
    same("ffn_down", "mlp.down_proj"),
];

fn config(keys: &Keys<'_>, config: &mut Config) -> Result<()> {
    config.insert("architectures".into(), json!(["Phi3ForCausalLM"]));
    config.insert("model_type".into(), json!("phi3"));
    config.insert("hidden_act".into(), json!("silu"));
    config.insert("sliding_window".into(), json!(keys.u64("attention.sliding_window")?.filter(|n| *n > 0)));
    if let Some(trained) = keys.u64("rope.scaling.original_context_length")? {
        config.insert("original_max_position_embeddings".into(), json!(trained));
    }
    rotated_share(keys, config)
}
