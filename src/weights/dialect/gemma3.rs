//! `gemma3` (text): converters add 1 to every norm weight. The local rotary base, the layer pattern and the GELU kind are
//! mostly not in the file; they are the architecture's constants.

use super::keys::{Config, Keys};
use super::{Dialect, Rename, Stored, same};
use crate::error::{Error, Kind, Result};
use serde_json::json;

pub(super) static DIALECT: Dialect = Dialect { architecture: "gemma3", config, top: TOP, layer: LAYER };

const fn norm(gguf: &'static str, hf: &'static str) -> Rename {
    Rename { gguf, hf, stored: Stored::OnePlus }
}

const TOP: &[Rename] = &[same("token_embd", "model.embed_tokens"), norm("output_norm", "model.norm"), same("output", "lm_head")];

const LAYER: &[Rename] = &[
    norm("attn_norm", "input_layernorm"),
    same("attn_q", "self_attn.q_proj"),
    same("attn_k", "self_attn.k_proj"),
    same("attn_v", "self_attn.v_proj"),
    norm("attn_q_norm", "self_attn.q_norm"),
    norm("attn_k_norm", "self_attn.k_norm"),
    same("attn_output", "self_attn.o_proj"),
    norm("post_attention_norm", "post_attention_layernorm"),
    norm("ffn_norm", "pre_feedforward_layernorm"),
    norm("post_ffw_norm", "post_feedforward_layernorm"),
    same("ffn_gate", "mlp.gate_proj"),
    same("ffn_up", "mlp.up_proj"),
    same("ffn_down", "mlp.down_proj"),
];

/// The 27B model is the only one of 62 layers, and the only one whose attention is not scaled by its head size.
const LAYERS_27B: u64 = 62;
const PATTERN: u64 = 6;

fn config(keys: &Keys<'_>, config: &mut Config) -> Result<()> {
    let layers = keys.need_u64("block_count")?;
    let whole = |key: &str| config.get(key).and_then(serde_json::Value::as_u64).unwrap_or(0);
    let (head_dim, hidden, heads) = (whole("head_dim"), whole("hidden_size"), whole("num_attention_heads"));
    let scalar = if layers == LAYERS_27B && heads > 0 { hidden / heads } else { head_dim };
    let pattern_key = keys.key("attention.sliding_window_pattern");
    let pattern = keys.gguf().u64(&pattern_key)?.unwrap_or(PATTERN);
    // The list below has an entry per layer, and a file may claim any number of layers.
    if pattern == 0 || layers > 65_536 {
        let text = format!("{pattern_key} is {pattern} for {layers} layers");
        return Err(Error::new(Kind::CorruptFile, format!("{}: {text}", keys.gguf().source().label())).named(pattern_key));
    }
    let kinds: Vec<&str> = (1..=layers).map(|i| if i.is_multiple_of(pattern) { "full_attention" } else { "sliding_attention" }).collect();
    config.insert("architectures".into(), json!(["Gemma3ForCausalLM"]));
    config.insert("model_type".into(), json!("gemma3_text"));
    config.insert("hidden_activation".into(), json!("gelu_pytorch_tanh"));
    config.insert("query_pre_attn_scalar".into(), json!(scalar));
    config.insert("sliding_window".into(), json!(keys.need_u64("attention.sliding_window")?));
    config.insert("sliding_window_pattern".into(), json!(pattern));
    config.insert("layer_types".into(), json!(kinds));
    config.insert("rope_local_base_freq".into(), json!(keys.f64("rope.freq_base_swa")?.unwrap_or(10_000.0)));
    config.insert("attn_logit_softcapping".into(), json!(keys.f64("attn_logit_softcapping")?));
    config.insert("final_logit_softcapping".into(), json!(keys.f64("final_logit_softcapping")?));
    config.insert("use_bidirectional_attention".into(), json!(false));
    Ok(())
}
