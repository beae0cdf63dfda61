//! `gemma4`: sliding and full layers have heads of different size and count, so some keys are lists by layer; the head size under the plain key
//! is that of full layers. Which layers slide is a list of flags; rotary factors are for full layers, huge where a pair does not turn.

use super::keys::{Config, Keys};
use super::{Dialect, Rename, bare, experts, same};
use crate::error::{Error, Kind, Result};
use serde_json::{Value, json};

pub(super) static DIALECT: Dialect = Dialect { architecture: "gemma4", config, top: TOP, layer: LAYER };

const TOP: &[Rename] = &[
    same("token_embd", "model.embed_tokens"),
    same("per_layer_token_embd", "model.embed_tokens_per_layer"),
    same("per_layer_model_proj", "model.per_layer_model_projection"),
    same("per_layer_proj_norm", "model.per_layer_projection_norm"),
    same("output_norm", "model.norm"),
    same("output", "lm_head"),
];

const LAYER: &[Rename] = &[
    same("attn_norm", "input_layernorm"),
    same("attn_q", "self_attn.q_proj"),
    same("attn_k", "self_attn.k_proj"),
    same("attn_v", "self_attn.v_proj"),
    same("attn_q_norm", "self_attn.q_norm"),
    same("attn_k_norm", "self_attn.k_norm"),
    same("attn_output", "self_attn.o_proj"),
    same("post_attention_norm", "post_attention_layernorm"),
    same("ffn_norm", "pre_feedforward_layernorm"),
    same("post_ffw_norm", "post_feedforward_layernorm"),
    same("ffn_gate", "mlp.gate_proj"),
    same("ffn_up", "mlp.up_proj"),
    same("ffn_down", "mlp.down_proj"),
    same("pre_ffw_norm_2", "pre_feedforward_layernorm_2"),
    same("post_ffw_norm_1", "post_feedforward_layernorm_1"),
    same("post_ffw_norm_2", "post_feedforward_layernorm_2"),
    same("ffn_gate_inp", "router.proj"),
    bare("ffn_gate_inp.scale", "router.scale"),
    bare("ffn_gate_up_exps", "experts.gate_up_proj"),
    experts("ffn_gate_exps", "experts.{}.gate_proj"),
    experts("ffn_up_exps", "experts.{}.up_proj"),
    experts("ffn_down_exps", "experts.{}.down_proj"),
    bare("ffn_down_exps.scale", "router.per_expert_scale"),
    same("inp_gate", "per_layer_input_gate"),
    same("proj", "per_layer_projection"),
    same("post_norm", "post_per_layer_input_norm"),
    bare("layer_output_scale", "layer_scalar"),
];

fn config(keys: &Keys<'_>, config: &mut Config) -> Result<()> {
    let layers = keys.need_u64("block_count")?;
    let pattern_key = keys.key("attention.sliding_window_pattern");
    let slides = keys.gguf().bool_array(&pattern_key)?.ok_or_else(|| keys.gguf().missing(&pattern_key))?;
    let wrong =
        |key: &str, text: String| Error::new(Kind::CorruptFile, format!("{}: {key} {text}", keys.gguf().source().label())).named(key);
    if slides.len() as u64 != layers {
        return Err(wrong(&pattern_key, format!("lists {} layers, block_count is {layers}", slides.len())));
    }
    let borrowers = keys.u64("attention.shared_kv_layers")?.unwrap_or(0);
    let first_borrower = layers.saturating_sub(borrowers) as usize;
    let vocabulary = config.get("vocab_size").cloned().unwrap_or_default();
    let mut put = |key: &str, value: Value| config.insert(key.to_owned(), value);
    put("architectures", json!(["Gemma4ForCausalLM"]));
    put("model_type", json!("gemma4_text"));
    put("hidden_activation", json!("gelu_pytorch_tanh"));
    let kinds: Vec<&str> = slides.iter().map(|s| if *s { "sliding_attention" } else { "full_attention" }).collect();
    put("layer_types", json!(kinds));
    put("sliding_window", json!(keys.need_u64("attention.sliding_window")?));
    put("global_head_dim", json!(keys.need_u64("attention.key_length")?));
    put("head_dim", json!(keys.need_u64("attention.key_length_swa")?));
    put("num_kv_shared_layers", json!(borrowers));
    put("vocab_size_per_layer_input", vocabulary);

    // One number for all layers, or one for each.
    let heads = keys.by_layer("attention.head_count_kv", slides.len())?;
    for (kind, key) in [(false, "num_global_key_value_heads"), (true, "num_key_value_heads")] {
        let of_kind: Vec<u64> = slides.iter().zip(&heads).filter(|(s, _)| **s == kind).map(|(_, n)| *n).collect();
        if of_kind.iter().any(|n| *n != of_kind[0]) {
            let name = keys.key("attention.head_count_kv");
            return Err(keys.unsupported(&name, format!("{name} differs between layers of a kind: {of_kind:?}")));
        }
        if let Some(first) = of_kind.first() {
            put(key, json!(first));
        }
    }
    let widths = keys.by_layer("feed_forward_length", slides.len())?;
    let inner = widths.first().copied().unwrap_or(0);
    let wide = widths.last().is_some_and(|last| inner.checked_mul(2) == Some(*last)) && borrowers > 0;
    for (i, width) in widths.iter().enumerate() {
        let expected = if wide && i >= first_borrower { 2 * inner } else { inner };
        if *width != expected {
            let name = keys.key("feed_forward_length");
            return Err(keys.unsupported(&name, format!("{name} is {width} in layer {i}, expected {expected}")));
        }
    }
    put("intermediate_size", json!(inner));
    put("use_double_wide_mlp", json!(wide));

    let keyed = slides.iter().take(first_borrower).position(|s| !s);
    put("attention_k_eq_v", json!(keyed.is_some_and(|i| !keys.has_tensor(&format!("blk.{i}.attn_v.weight")))));
    put("hidden_size_per_layer_input", json!(keys.u64("embedding_length_per_layer_input")?.unwrap_or(0)));
    put("final_logit_softcapping", json!(keys.f64("final_logit_softcapping")?));
    let routed = keys.has_tensor("blk.0.ffn_gate_inp.weight");
    put("enable_moe_block", json!(routed));
    if routed {
        put("num_experts", json!(keys.need_u64("expert_count")?));
        put("top_k_experts", json!(keys.need_u64("expert_used_count")?));
        let inner = keys.by_layer("expert_feed_forward_length", slides.len())?;
        put("moe_intermediate_size", json!(inner.first()));
    }
    rotations(keys, config)
}

/// Sliding layers turn whole heads; full layers by the file's factors.
fn rotations(keys: &Keys<'_>, config: &mut Config) -> Result<()> {
    let theta = keys.f64("rope.freq_base")?.unwrap_or(1_000_000.0);
    let share = match config.remove("rope_scaling").as_ref().and_then(|scaling| scaling.get("factors")?.as_array()) {
        Some(factors) => turning(factors).ok_or_else(|| {
            let text = "rope_freqs.weight holds other factors than 1 for the first pairs and huge ones for the others".to_string();
            keys.unsupported("rope_freqs.weight", text)
        })?,
        None => 0.25,
    };
    let full = json!({"rope_type": "proportional", "partial_rotary_factor": share, "rope_theta": theta});
    let local = json!({"rope_type": "default", "rope_theta": keys.f64("rope.freq_base_swa")?.unwrap_or(10_000.0)});
    config.insert("rope_parameters".into(), json!({"full_attention": full, "sliding_attention": local}));
    Ok(())
}

/// Share of the pairs that turn.
fn turning(factors: &[Value]) -> Option<f64> {
    /// A factor that stops a pair; converters write 1e30.
    const STOPPED: f64 = 1e20;
    let turning = factors.iter().take_while(|f| f.as_f64() == Some(1.0)).count();
    let stopped = factors[turning..].iter().all(|f| f.as_f64().is_some_and(|f| f > STOPPED));
    (turning > 0 && stopped).then(|| turning as f64 / factors.len() as f64)
}
