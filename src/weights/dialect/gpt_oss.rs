//! `gpt-oss`: experts stacked with gate and up apart, biases beside every matrix, a sink for each head.

use super::keys::{Config, Keys};
use super::{Dialect, Rename, TOP, bare, experts, same};
use crate::error::Result;
use serde_json::json;

pub(super) static DIALECT: Dialect = Dialect { architecture: "gpt-oss", config, top: TOP, layer: LAYER };

const LAYER: &[Rename] = &[
    same("attn_norm", "input_layernorm"),
    same("attn_q", "self_attn.q_proj"),
    same("attn_k", "self_attn.k_proj"),
    same("attn_v", "self_attn.v_proj"),
    same("attn_output", "self_attn.o_proj"),
    bare("attn_sinks", "self_attn.sinks"),
    same("post_attention_norm", "post_attention_layernorm"),
    same("ffn_gate_inp", "mlp.router"),
    experts("ffn_gate_exps", "mlp.experts.{}.gate_proj"),
    experts("ffn_up_exps", "mlp.experts.{}.up_proj"),
    experts("ffn_down_exps", "mlp.experts.{}.down_proj"),
];

fn config(keys: &Keys<'_>, config: &mut Config) -> Result<()> {
    config.insert("architectures".into(), json!(["GptOssForCausalLM"]));
    config.insert("model_type".into(), json!("gpt_oss"));
    config.insert("hidden_act".into(), json!("silu"));
    config.insert("num_local_experts".into(), json!(keys.need_u64("expert_count")?));
    config.insert("num_experts_per_tok".into(), json!(keys.need_u64("expert_used_count")?));
    config.insert("intermediate_size".into(), json!(keys.need_u64("expert_feed_forward_length")?));
    config.insert("sliding_window".into(), json!(keys.need_u64("attention.sliding_window")?));
    // The published models blend rotary frequencies without rounding the blend's ends; the file has no key for it.
    if let Some(scaling) = config.get_mut("rope_scaling").and_then(|s| s.as_object_mut()) {
        scaling.insert("truncate".into(), json!(false));
    }
    Ok(())
}
