//! `qwen3next`, `qwen35` and `qwen35moe`: delta nets between attention layers. Converters add 1 to every norm weight but the delta nets'
//! own, store `-exp(A_log)` for `A_log`, and in the last two deal the value heads out to the key heads in turn instead of in runs.

use super::keys::{Config, Keys};
use super::{Dialect, Rename, Stored, bare, experts, same};
use crate::error::{Error, Kind, Result};
use serde_json::json;

pub(super) static NEXT: Dialect = Dialect { architecture: "qwen3next", config: next, top: TOP, layer: LAYER };
pub(super) static DENSE: Dialect = Dialect { architecture: "qwen35", config: dense, top: TOP, layer: LAYER };
pub(super) static MOE: Dialect = Dialect { architecture: "qwen35moe", config: moe, top: TOP, layer: LAYER };

const fn norm(gguf: &'static str, hf: &'static str) -> Rename {
    Rename { gguf, hf, stored: Stored::OnePlus }
}

const TOP: &[Rename] = &[same("token_embd", "model.embed_tokens"), norm("output_norm", "model.norm"), same("output", "lm_head")];

const LAYER: &[Rename] = &[
    norm("attn_norm", "input_layernorm"),
    norm("post_attention_norm", "post_attention_layernorm"),
    same("attn_q", "self_attn.q_proj"),
    same("attn_k", "self_attn.k_proj"),
    same("attn_v", "self_attn.v_proj"),
    norm("attn_q_norm", "self_attn.q_norm"),
    norm("attn_k_norm", "self_attn.k_norm"),
    same("attn_output", "self_attn.o_proj"),
    same("ssm_in", "linear_attn.in_proj_qkvz"),
    same("attn_qkv", "linear_attn.in_proj_qkv"),
    same("attn_gate", "linear_attn.in_proj_z"),
    same("ssm_ba", "linear_attn.in_proj_ba"),
    same("ssm_alpha", "linear_attn.in_proj_a"),
    same("ssm_beta", "linear_attn.in_proj_b"),
    same("ssm_conv1d", "linear_attn.conv1d"),
    bare("ssm_a", "linear_attn.A_log"),
    bare("ssm_dt", "linear_attn.dt_bias"),
    same("ssm_norm", "linear_attn.norm"),
    same("ssm_out", "linear_attn.out_proj"),
    same("ffn_gate", "mlp.gate_proj"),
    same("ffn_up", "mlp.up_proj"),
    same("ffn_down", "mlp.down_proj"),
    same("ffn_gate_inp", "mlp.gate"),
    same("ffn_gate_inp_shexp", "mlp.shared_expert_gate"),
    same("ffn_gate_shexp", "mlp.shared_expert.gate_proj"),
    same("ffn_up_shexp", "mlp.shared_expert.up_proj"),
    same("ffn_down_shexp", "mlp.shared_expert.down_proj"),
    experts("ffn_gate_exps", "mlp.experts.{}.gate_proj"),
    experts("ffn_up_exps", "mlp.experts.{}.up_proj"),
    experts("ffn_down_exps", "mlp.experts.{}.down_proj"),
];

/// What the three share.
fn delta_nets(keys: &Keys<'_>, config: &mut Config) -> Result<()> {
    let heads = keys.need_u64("ssm.time_step_rank")?;
    let inner = keys.need_u64("ssm.inner_size")?;
    if heads == 0 || !inner.is_multiple_of(heads) {
        let name = keys.key("ssm.inner_size");
        return Err(Error::new(Kind::Mismatch, format!("{name} is {inner}, which {heads} heads (ssm.time_step_rank) do not share evenly"))
            .named(name));
    }
    let head_dim = config.get("head_dim").and_then(serde_json::Value::as_u64).unwrap_or(0).max(1);
    let rotary = keys.u64("rope.dimension_count")?.unwrap_or(head_dim / 4);
    // The head for drafting counts as a layer in the file.
    let layers = keys.need_u64("block_count")?.saturating_sub(keys.u64("nextn_predict_layers")?.unwrap_or(0));
    config.insert("hidden_act".into(), json!("silu"));
    config.insert("num_hidden_layers".into(), json!(layers));
    config.insert("partial_rotary_factor".into(), json!(rotary as f64 / head_dim as f64));
    config.insert("full_attention_interval".into(), json!(keys.u64("full_attention_interval")?.unwrap_or(4)));
    config.insert("linear_conv_kernel_dim".into(), json!(keys.need_u64("ssm.conv_kernel")?));
    config.insert("linear_key_head_dim".into(), json!(keys.need_u64("ssm.state_size")?));
    config.insert("linear_num_key_heads".into(), json!(keys.need_u64("ssm.group_count")?));
    config.insert("linear_num_value_heads".into(), json!(heads));
    config.insert("linear_value_head_dim".into(), json!(inner / heads));
    config.insert("linear_decay_negated".into(), json!(true));
    if let Some(count) = keys.u64("expert_count")?.filter(|n| *n > 0) {
        config.insert("num_experts".into(), json!(count));
        config.insert("num_experts_per_tok".into(), json!(keys.need_u64("expert_used_count")?));
        config.insert("moe_intermediate_size".into(), json!(keys.need_u64("expert_feed_forward_length")?));
        config.insert("shared_expert_intermediate_size".into(), json!(keys.need_u64("expert_shared_feed_forward_length")?));
    }
    Ok(())
}

fn next(keys: &Keys<'_>, config: &mut Config) -> Result<()> {
    config.insert("architectures".into(), json!(["Qwen3NextForCausalLM"]));
    config.insert("model_type".into(), json!("qwen3_next"));
    config.insert("norm_topk_prob".into(), json!(true));
    // The architecture has no other layers; files may leave the width of a dense one out.
    config.entry("intermediate_size").and_modify(|v| *v = if v.is_null() { json!(1) } else { v.take() });
    delta_nets(keys, config)
}

fn dense(keys: &Keys<'_>, config: &mut Config) -> Result<()> {
    config.insert("architectures".into(), json!(["Qwen3_5ForCausalLM"]));
    config.insert("model_type".into(), json!("qwen3_5_text"));
    config.insert("linear_value_heads_tiled".into(), json!(true));
    delta_nets(keys, config)
}

fn moe(keys: &Keys<'_>, config: &mut Config) -> Result<()> {
    config.insert("architectures".into(), json!(["Qwen3_5MoeForCausalLM"]));
    config.insert("model_type".into(), json!("qwen3_5_moe_text"));
    config.insert("linear_value_heads_tiled".into(), json!(true));
    delta_nets(keys, config)
}
