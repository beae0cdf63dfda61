//! `deepseek41`: DeepSeek-V4.1 under the names of the vendor's own checkpoint, its hash tables in the metadata.
//!
//! What the metadata leaves out follows from which tensors are there (sources of keys and of indices) or is the published model's.

use super::keys::{Config, Keys};
use super::{Dialect, Rename, Stored, bare, experts, same};
use crate::error::{Error, Kind, Result};
use serde_json::{Value, json};

pub(super) static DIALECT: Dialect = Dialect { architecture: "deepseek41", config, top: TOP, layer: LAYER };

const TOP: &[Rename] = &[same("token_embd", "embed"), same("output_norm", "norm"), same("output", "head")];

const LAYER: &[Rename] = &[
    same("attn_norm", "/attn_norm"),
    same("ffn_norm", "/ffn_norm"),
    bare("attn_sinks", "/attn.attn_sink"),
    same("attn_q_a", "/attn.wq_a"),
    same("attn_q_a_norm", "/attn.q_norm"),
    same("attn_q_b", "/attn.wq_b"),
    same("attn_kv", "/attn.wkv"),
    same("attn_kv_a_norm", "/attn.kv_norm"),
    Rename { gguf: "attn_output_a", hf: "/attn.wo_a", stored: Stored::Stacked },
    same("attn_output_b", "/attn.wo_b"),
    same("attn_compressor_kv", "/attn.compressor.wkv"),
    same("attn_compressor_gate", "/attn.compressor.wgate"),
    same("attn_compressor_norm", "/attn.compressor.norm"),
    same("indexer.attn_q_b", "/attn.indexer.wq_b"),
    same("indexer.proj", "/attn.indexer.weights_proj"),
    same("indexer.attn_k", "/attn.indexer.wk"),
    same("indexer.k_norm", "/attn.indexer.k_norm"),
    same("ffn_gate_inp", "/ffn.gate"),
    bare("exp_probs_b", "/ffn.gate.bias"),
    experts("ffn_gate_exps", "/ffn.experts.{}.w1"),
    experts("ffn_down_exps", "/ffn.experts.{}.w2"),
    experts("ffn_up_exps", "/ffn.experts.{}.w3"),
    same("ffn_gate_shexp", "/ffn.shared_experts.w1"),
    same("ffn_down_shexp", "/ffn.shared_experts.w2"),
    same("ffn_up_shexp", "/ffn.shared_experts.w3"),
    same("engram_embd", "/engram.embed"),
    same("engram_wkv", "/engram.wkv"),
    bare("engram_q", "/engram.q_weight"),
    bare("engram_k", "/engram.k_weight"),
    bare("hc_attn_fn", "/hc_attn_fn"),
    bare("hc_attn_base", "/hc_attn_base"),
    bare("hc_attn_scale", "/hc_attn_scale"),
    bare("hc_ffn_fn", "/hc_ffn_fn"),
    bare("hc_ffn_base", "/hc_ffn_base"),
    bare("hc_ffn_scale", "/hc_ffn_scale"),
];

/// Gating by the root of a softplus, the only one the architecture knows.
const SQRT_SOFTPLUS: u64 = 4;

fn config(keys: &Keys<'_>, config: &mut Config) -> Result<()> {
    let layers = keys.need_u64("block_count")?;
    let gating = keys.u64("expert_gating_func")?.unwrap_or(SQRT_SOFTPLUS);
    if gating != SQRT_SOFTPLUS {
        let key = keys.key("expert_gating_func");
        return Err(keys.unsupported(&key, format!("{key} is {gating}; {SQRT_SOFTPLUS} is read")));
    }
    let mut put = |key: &str, value: Value| config.insert(key.to_owned(), value);
    put("architectures", json!(["DeepseekV41ForCausalLM"]));
    put("model_type", json!("deepseek_v41"));
    put("hidden_act", json!("silu"));
    put("scoring_func", json!("sqrtsoftplus"));
    put("topk_method", json!("noaux_tc"));
    put("num_key_value_heads", json!(1));
    for (from, to) in [
        ("rope.dimension_count", "qk_rope_head_dim"),
        ("attention.q_lora_rank", "q_lora_rank"),
        ("attention.output_lora_rank", "o_lora_rank"),
        ("attention.output_group_count", "o_groups"),
        ("attention.sliding_window", "sliding_window"),
        ("attention.indexer.head_count", "index_n_heads"),
        ("attention.indexer.key_length", "index_head_dim"),
        ("attention.indexer.top_k", "index_topk"),
        ("hyper_connection.count", "hc_mult"),
        ("hyper_connection.sinkhorn_iterations", "hc_sinkhorn_iters"),
        ("expert_count", "n_routed_experts"),
        ("expert_used_count", "num_experts_per_tok"),
        ("expert_feed_forward_length", "moe_intermediate_size"),
    ] {
        put(to, json!(keys.need_u64(from)?));
    }
    put("n_shared_experts", json!(keys.u64("expert_shared_count")?.unwrap_or(1)));
    put("num_hash_layers", json!(keys.u64("hash_layer_count")?.unwrap_or(0)));
    put("hc_eps", json!(keys.f64("hyper_connection.epsilon")?.unwrap_or(1e-6)));
    put("routed_scaling_factor", json!(keys.f64("expert_weights_scale")?.unwrap_or(1.0)));
    put("norm_topk_prob", json!(keys.flag("expert_weights_norm")?.unwrap_or(true)));
    put("compress_rope_theta", json!(keys.need_f64("attention.compress_rope_freq_base")?));
    let ratios = per_layer(keys, "attention.compress_ratios", layers)?;
    put("compress_ratios", json!(ratios));
    put("swiglu_limit", clamp(keys)?);
    let having = |tensor: &str| -> Vec<u64> { (0..layers).filter(|l| keys.has_tensor(&format!("blk.{l}.{tensor}.weight"))).collect() };
    put("kv_source_layer_ids", json!(having("attn_compressor_kv")));
    put("index_source_layer_ids", json!(having("indexer.attn_q_b")));
    // The published model's; a shorter one has no such layer.
    put("candidate_source_layer_id", if layers > 20 { json!(20) } else { json!(-1) });
    put("candidate_topk_blocks", json!(2048));
    put("candidate_block_size", json!(8));
    engram(keys, config)
}

/// An array with an entry for each layer; more are left out.
fn per_layer(keys: &Keys<'_>, key: &str, layers: u64) -> Result<Vec<i64>> {
    let name = keys.key(key);
    let mut values = keys.gguf().i64_array(&name)?.ok_or_else(|| keys.gguf().missing(&name))?;
    if (values.len() as u64) < layers {
        let text = format!("{}: {name} has {} entries, {layers} layers need one each", keys.gguf().source().label(), values.len());
        return Err(Error::new(Kind::CorruptFile, text).named(name));
    }
    values.truncate(layers as usize);
    Ok(values)
}

/// The clamp of the experts' activation, which all layers share.
fn clamp(keys: &Keys<'_>) -> Result<Value> {
    let name = keys.key("swiglu_clamp_exp");
    match keys.gguf().f32_array(&name)?.as_deref() {
        None | Some([]) => Ok(Value::Null),
        Some([first, rest @ ..]) if rest.iter().all(|x| x == first) => Ok(json!(first)),
        Some(_) => Err(keys.unsupported(&name, format!("{name} differs between layers"))),
    }
}

/// Geometry of the n-gram memory, and its hash tables as `engram_tables`.
fn engram(keys: &Keys<'_>, config: &mut Config) -> Result<()> {
    let list = |key: &str| -> Result<Vec<i64>> { Ok(keys.gguf().i64_array(&keys.key(key))?.unwrap_or_default()) };
    let layers = list("engram.layer_ids")?;
    config.insert("engram_layer_ids".into(), json!(layers));
    if layers.is_empty() {
        return Ok(());
    }
    for (from, to) in [
        ("engram.max_ngram_size", "engram_max_ngram_size"),
        ("engram.head_count", "engram_n_heads"),
        ("engram.key_length", "engram_head_dim"),
        ("engram.pad_id", "engram_pad_token_id"),
    ] {
        config.insert(to.into(), json!(keys.need_u64(from)?));
    }
    let map = list("engram.token_map")?;
    let compressed = map.iter().copied().max().unwrap_or(-1) + 1;
    config.insert("engram_compressed_vocab_size".into(), json!(compressed));
    let mut rows = Vec::with_capacity(layers.len());
    for layer in &layers {
        let name = format!("blk.{layer}.engram_embd.weight");
        rows.push(keys.shape(&name).and_then(|s| s.first().copied()).ok_or_else(|| {
            Error::new(Kind::CorruptFile, format!("{}: the tensor {name} is missing", keys.gguf().source().label())).named(name)
        })?);
    }
    config.insert("engram_num_embeddings".into(), json!(rows));
    let tables = json!({
        "token_map": map,
        "multipliers": list("engram.multipliers")?,
        "primes": list("engram.primes")?,
        "offsets": list("engram.offsets")?,
    });
    config.insert("engram_tables".into(), tables);
    Ok(())
}
