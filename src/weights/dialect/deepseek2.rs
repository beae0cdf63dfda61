//! `deepseek2`: DeepSeek-V3 and R1. `kv_b_proj` comes as one tensor, or as each head's key rows (transposed) and value rows apart.

use super::keys::{Config, Keys};
use super::{Dialect, Rename, TOP, bare, experts, same};
use crate::error::Result;
use serde_json::{Value, json};

pub(super) static DIALECT: Dialect = Dialect { architecture: "deepseek2", config, top: TOP, layer: LAYER };

const LAYER: &[Rename] = &[
    same("attn_norm", "input_layernorm"),
    same("attn_q", "self_attn.q_proj"),
    same("attn_q_a", "self_attn.q_a_proj"),
    same("attn_q_a_norm", "self_attn.q_a_layernorm"),
    same("attn_q_b", "self_attn.q_b_proj"),
    same("attn_kv_a_mqa", "self_attn.kv_a_proj_with_mqa"),
    same("attn_kv_a_norm", "self_attn.kv_a_layernorm"),
    same("attn_kv_b", "self_attn.kv_b_proj"),
    same("attn_k_b", "self_attn.k_b_proj"),
    same("attn_v_b", "self_attn.v_b_proj"),
    same("attn_output", "self_attn.o_proj"),
    same("ffn_norm", "post_attention_layernorm"),
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

/// `expert_gating_func` of sigmoid routing; without the key files are of the softmax kind.
const SIGMOID: u64 = 2;

fn config(keys: &Keys<'_>, config: &mut Config) -> Result<()> {
    let gating = keys.u64("expert_gating_func")?.unwrap_or(1);
    if gating != SIGMOID {
        let key = keys.key("expert_gating_func");
        return Err(
            keys.unsupported(&key, format!("{key} is {gating}: DeepSeek-V2's softmax routing is not read, V3's sigmoid ({SIGMOID}) is"))
        );
    }
    // Files whose key rows are transposed count the one latent head that the cache holds; the model has a key a head.
    let heads = config.get("num_attention_heads").cloned().unwrap_or(Value::Null);
    let rope = keys.need_u64("rope.dimension_count")?;
    let length = |mla: &str, plain: &str| -> Result<u64> { keys.u64(mla)?.map_or_else(|| keys.need_u64(plain), Ok) };
    let nope = length("attention.key_length_mla", "attention.key_length")?.saturating_sub(rope);
    let value = length("attention.value_length_mla", "attention.value_length")?;
    let mut put = |key: &str, value: Value| config.insert(key.to_owned(), value);
    put("architectures", json!(["DeepseekV3ForCausalLM"]));
    put("model_type", json!("deepseek_v3"));
    put("hidden_act", json!("silu"));
    put("scoring_func", json!("sigmoid"));
    put("topk_method", json!("noaux_tc"));
    put("rope_interleave", json!(true));
    put("num_key_value_heads", heads);
    put("qk_rope_head_dim", json!(rope));
    put("qk_nope_head_dim", json!(nope));
    put("v_head_dim", json!(value));
    put("q_lora_rank", json!(keys.u64("attention.q_lora_rank")?));
    put("kv_lora_rank", json!(keys.need_u64("attention.kv_lora_rank")?));
    put("first_k_dense_replace", json!(keys.u64("leading_dense_block_count")?.unwrap_or(0)));
    put("n_routed_experts", json!(keys.need_u64("expert_count")?));
    put("num_experts_per_tok", json!(keys.need_u64("expert_used_count")?));
    put("moe_intermediate_size", json!(keys.need_u64("expert_feed_forward_length")?));
    put("n_shared_experts", json!(keys.u64("expert_shared_count")?.unwrap_or(0)));
    put("n_group", json!(keys.u64("expert_group_count")?.unwrap_or(1)));
    put("topk_group", json!(keys.u64("expert_group_used_count")?.unwrap_or(1)));
    put("routed_scaling_factor", json!(keys.f64("expert_weights_scale")?.unwrap_or(1.0)));
    put("norm_topk_prob", json!(keys.flag("expert_weights_norm")?.unwrap_or(true)));
    // A tenth of `mscale_all_dim`. The factor on sines and cosines cancels: the published configs have both mscales alike.
    if let Some(scaling) = config.get_mut("rope_scaling").and_then(Value::as_object_mut) {
        let mscale = keys.f64("rope.scaling.yarn_log_multiplier")?.map_or(0.0, |m| (m * 1e4).round() / 1e3);
        scaling.remove("attention_factor");
        scaling.insert("mscale".into(), json!(mscale));
        scaling.insert("mscale_all_dim".into(), json!(mscale));
    }
    Ok(())
}
