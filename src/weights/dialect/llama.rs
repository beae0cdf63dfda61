//! `llama`: also Mistral 7B, SmolLM2 and others of the same shape. Converters interleave the rotary halves of q and k.

use super::keys::{Config, Keys};
use super::{Dialect, Rename, Stored, TOP, same};
use crate::error::Result;
use serde_json::json;

pub(super) static DIALECT: Dialect = Dialect { architecture: "llama", config, top: TOP, layer: LAYER };

const LAYER: &[Rename] = &[
    same("attn_norm", "input_layernorm"),
    Rename { gguf: "attn_q", hf: "self_attn.q_proj", stored: Stored::Interleaved("num_attention_heads") },
    Rename { gguf: "attn_k", hf: "self_attn.k_proj", stored: Stored::Interleaved("num_key_value_heads") },
    same("attn_v", "self_attn.v_proj"),
    same("attn_output", "self_attn.o_proj"),
    same("ffn_norm", "post_attention_layernorm"),
    same("ffn_gate", "mlp.gate_proj"),
    same("ffn_up", "mlp.up_proj"),
    same("ffn_down", "mlp.down_proj"),
];

fn config(keys: &Keys<'_>, config: &mut Config) -> Result<()> {
    if keys.u64("expert_count")?.is_some_and(|n| n > 0) {
        let key = keys.key("expert_count");
        return Err(keys.unsupported(&key, format!("{key} is set: mixtures of experts under the llama architecture are not read")));
    }
    config.insert("architectures".into(), json!(["LlamaForCausalLM"]));
    config.insert("model_type".into(), json!("llama"));
    config.insert("hidden_act".into(), json!("silu"));
    config.insert("mlp_bias".into(), json!(keys.has_tensor("blk.0.ffn_gate.bias")));
    Ok(())
}
