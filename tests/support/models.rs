//! Configs of small models, whose weights are made up: one of keys and values only, one of experts, one of each kind of recurrent state.

use serde_json::{Value, json};

/// Tokens they know.
pub const VOCAB: usize = 48;

/// In widths of whole registers.
pub fn wide() -> Vec<(&'static str, Value)> {
    models(64, 32, 16)
}

/// In widths that leave rests, without the one of experts.
pub fn narrow() -> Vec<(&'static str, Value)> {
    models(32, 24, 12).into_iter().filter(|(name, _)| *name != "qwen3_moe").collect()
}

fn models(hidden: usize, value_dim: usize, mamba_dim: usize) -> Vec<(&'static str, Value)> {
    let base = |name: &'static str, more: Value| {
        let mut c = json!({
            "model_type": name, "vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": hidden * 3 / 2, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": hidden / 2, "max_position_embeddings": 1024, "rope_theta": 10000.0,
        });
        c.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        (name, c)
    };
    let moe =
        json!({"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": true, "decoder_sparse_step": 1});
    let conv = json!({"layer_types": ["conv", "full_attention"], "conv_L_cache": 3, "block_auto_adjust_ff_dim": false});
    let delta = json!({"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 1, "linear_num_value_heads": 2,
        "linear_key_head_dim": 16, "linear_value_head_dim": value_dim});
    let mamba =
        json!({"hybrid_override_pattern": "M*", "mamba_num_heads": 4, "mamba_head_dim": mamba_dim, "n_groups": 2, "ssm_state_size": 16});
    vec![base("llama", json!({})), base("qwen3_moe", moe), base("lfm2", conv), base("qwen3_5", delta), base("nemotron_h", mamba)]
}
