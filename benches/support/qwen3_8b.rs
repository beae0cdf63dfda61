//! The shapes of Qwen3-8B.

/// Its `config.json`, with so many layers.
pub fn config(layers: usize) -> String {
    format!(
        r#"{{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 12288,
"num_hidden_layers": {layers}, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
"rope_theta": 1000000.0, "rms_norm_eps": 1e-6, "tie_word_embeddings": false, "hidden_act": "silu"}}"#
    )
}
