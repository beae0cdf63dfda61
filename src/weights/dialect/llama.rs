//! `llama`: also Mistral 7B, SmolLM2 and others of the same shape, and Mixtral, which is the one with experts. Converters interleave the
//! rotary halves of q and k.

use super::keys::{Config, Keys};
use super::{Dialect, Rename, Stored, TOP, experts, same};
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
    same("ffn_gate_inp", "block_sparse_moe.gate"),
    experts("ffn_gate_exps", "block_sparse_moe.experts.{}.w1"),
    experts("ffn_up_exps", "block_sparse_moe.experts.{}.w3"),
    experts("ffn_down_exps", "block_sparse_moe.experts.{}.w2"),
];

fn config(keys: &Keys<'_>, config: &mut Config) -> Result<()> {
    config.insert("hidden_act".into(), json!("silu"));
    if let Some(count) = keys.u64("expert_count")?.filter(|n| *n > 0) {
        config.insert("architectures".into(), json!(["MixtralForCausalLM"]));
        config.insert("model_type".into(), json!("mixtral"));
        config.insert("num_local_experts".into(), json!(count));
        config.insert("num_experts_per_tok".into(), json!(keys.need_u64("expert_used_count")?));
        return Ok(());
    }
    config.insert("architectures".into(), json!(["LlamaForCausalLM"]));
    config.insert("model_type".into(), json!("llama"));
    config.insert("mlp_bias".into(), json!(keys.has_tensor("blk.0.ffn_gate.bias")));
    Ok(())
}
