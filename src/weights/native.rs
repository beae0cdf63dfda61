//! Mistral's own layout, `params.json` and `consolidated.safetensors`, in the words of Hugging Face.
//!
//! Names differ by a table; values only in that dense models keep the rotary halves of q and k interleaved, which the row
//! map takes back.

use super::store::Located;
use crate::bail;
use crate::error::{Error, Kind, Result};
use crate::tensor::RowMap;
use serde_json::{Value, json};

/// The file that takes the place of `config.json`.
pub(super) const PARAMS: &str = "params.json";
/// The file that takes the place of `model.safetensors`.
pub(super) const WEIGHTS: &str = "consolidated.safetensors";
/// The index of a sharded one.
pub(super) const INDEX: &str = "consolidated.safetensors.index.json";

/// Modules outside the layers.
const TOP: [(&str, &str); 3] = [("tok_embeddings", "model.embed_tokens"), ("norm", "model.norm"), ("output", "lm_head")];

/// Modules of a layer.
const LAYER: [(&str, &str); 15] = [
    ("attention_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("attention.wq", "self_attn.q_proj"),
    ("attention.wk", "self_attn.k_proj"),
    ("attention.wv", "self_attn.v_proj"),
    ("attention.wo", "self_attn.o_proj"),
    ("attention.wq_a", "self_attn.q_a_proj"),
    ("attention.q_a_norm", "self_attn.q_a_layernorm"),
    ("attention.wq_b", "self_attn.q_b_proj"),
    ("attention.wkv_a_with_mqa", "self_attn.kv_a_proj_with_mqa"),
    ("attention.kv_a_norm", "self_attn.kv_a_layernorm"),
    ("attention.wkv_b", "self_attn.kv_b_proj"),
    ("gate", "mlp.gate"),
    ("feed_forward", "mlp"),
    ("shared_experts", "mlp.shared_experts"),
];

/// The three matrices of a feed-forward module.
const FEED_FORWARD: [(&str, &str); 3] = [("w1", "gate_proj"), ("w2", "down_proj"), ("w3", "up_proj")];

/// The config that `params.json` stands for.
pub(super) fn config(params: &Value) -> Result<Value> {
    let number = |key: &str| -> Result<Value> {
        match params.get(key) {
            Some(v) if v.is_number() => Ok(v.clone()),
            found => {
                let found = found.map_or("nothing".into(), Value::to_string);
                Err(Error::new(Kind::CorruptFile, format!("{PARAMS}: {key}: found {found}, expected a number")).named(key))
            }
        }
    };
    let or = |key: &str, absent: Value| params.get(key).filter(|v| !v.is_null()).cloned().unwrap_or(absent);
    for key in ["vision_encoder", "multimodal"] {
        if params.get(key).is_some_and(|v| !v.is_null()) {
            bail!(Unsupported, "{PARAMS}: {key} is set; of Mistral's own layout this build reads text models");
        }
    }
    let mut config = json!({
        "hidden_size": number("dim")?,
        "num_hidden_layers": number("n_layers")?,
        "num_attention_heads": number("n_heads")?,
        "num_key_value_heads": or("n_kv_heads", number("n_heads")?),
        "intermediate_size": number("hidden_dim")?,
        "rms_norm_eps": number("norm_eps")?,
        "vocab_size": number("vocab_size")?,
        "tie_word_embeddings": or("tied_embeddings", json!(false)),
        "hidden_act": "silu",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "max_position_embeddings": longest(params),
    });
    let rope = rope(params)?;
    let latent = params.get("kv_lora_rank").is_some_and(|v| !v.is_null());
    match (latent, params.get("moe").filter(|v| v.is_object())) {
        (true, Some(moe)) => mistral4(moe, &mut config, &number)?,
        (false, None) => {
            config["model_type"] = json!("mistral");
            config["architectures"] = json!(["MistralForCausalLM"]);
            config["head_dim"] = number("head_dim")?;
            config["sliding_window"] = or("sliding_window", Value::Null);
        }
        _ => bail!(Unsupported, "{PARAMS}: experts without latent attention, or the other way round, are not read in Mistral's own layout"),
    }
    config["rope_parameters"] = rope;
    if let Some(q) = params
        .get("quantization")
        .or_else(|| params.get("quantization_config"))
        .filter(|q| q.get("quant_method").is_some() || q.get("config_groups").is_some())
    {
        config["quantization_config"] = q.clone();
    }
    Ok(config)
}

/// Latent attention and routed experts.
fn mistral4(moe: &Value, config: &mut Value, number: &dyn Fn(&str) -> Result<Value>) -> Result<()> {
    config["model_type"] = json!("mistral4");
    config["architectures"] = json!(["Mistral4ForCausalLM"]);
    for key in ["kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank"] {
        config[key] = number(key)?;
    }
    config["rope_interleave"] = json!(true);
    // Key there, key here, and what absence means.
    for (from, to, absent) in [
        ("num_experts", "n_routed_experts", None),
        ("num_experts_per_tok", "num_experts_per_tok", None),
        ("expert_hidden_dim", "moe_intermediate_size", None),
        ("num_shared_experts", "n_shared_experts", Some(json!(0))),
        ("first_k_dense_replace", "first_k_dense_replace", Some(json!(0))),
        ("routed_scale", "routed_scaling_factor", Some(json!(1.0))),
        ("num_expert_groups", "n_group", Some(json!(1))),
        ("num_expert_groups_per_tok", "topk_group", Some(json!(1))),
    ] {
        config[to] = match (moe.get(from).filter(|v| !v.is_null()), absent) {
            (Some(found), _) => found.clone(),
            (None, Some(absent)) => absent,
            (None, None) => return Err(Error::new(Kind::CorruptFile, format!("{PARAMS}: moe.{from} is missing")).named(from)),
        };
    }
    config["norm_topk_prob"] = json!(true);
    for (key, known) in [("route_every_n", json!(1)), ("renorm_strategy", json!("WEIGHTS")), ("use_load_balancing_bias", json!(false))] {
        if let Some(found) = moe.get(key).filter(|v| !v.is_null() && **v != known) {
            bail!(Unsupported, "{PARAMS}: moe.{key} is {found}; this build computes {known}");
        }
    }
    Ok(())
}

/// The longest sequence: said outright, or what the rotary scaling reaches.
fn longest(params: &Value) -> Value {
    ["max_position_embeddings", "max_seq_len"].iter().find_map(|key| params.get(key).filter(|v| v.is_number())).cloned().unwrap_or_else(
        || {
            let yarn = |key: &str| params.get("yarn").and_then(|y| y.get(key)).and_then(Value::as_f64);
            let reached = yarn("factor").zip(yarn("original_max_position_embeddings")).map(|(f, n)| (f * n) as u64);
            json!(reached.unwrap_or(32_768))
        },
    )
}

/// Rotary settings; yarn is normalised with both mscales at 1, so that the cosines keep their size.
fn rope(params: &Value) -> Result<Value> {
    let theta = params.get("rope_theta").and_then(Value::as_f64).unwrap_or(10_000.0);
    let Some(yarn) = params.get("yarn").filter(|v| v.is_object()) else {
        return Ok(json!({"rope_type": "default", "rope_theta": theta}));
    };
    let number = |key: &str| {
        let found = yarn.get(key).and_then(Value::as_f64);
        found.ok_or_else(|| Error::new(Kind::CorruptFile, format!("{PARAMS}: yarn.{key} is missing or no number")).named(key))
    };
    let original = yarn.get("original_max_position_embeddings").and_then(Value::as_u64);
    let mut rope = json!({
        "rope_type": "yarn",
        "rope_theta": theta,
        "factor": number("factor")?,
        "beta_slow": number("alpha")?,
        "beta_fast": number("beta")?,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    });
    if let Some(original) = original {
        rope["original_max_position_embeddings"] = json!(original);
    }
    if let Some(scaling) = params.get("llama_4_scaling").filter(|v| v.is_object()) {
        rope["llama_4_scaling_beta"] = scaling.get("beta").cloned().unwrap_or(Value::Null);
        let own = scaling.get("original_max_position_embeddings").and_then(Value::as_u64);
        if own.is_some() && own != original {
            bail!(
                Unsupported,
                "{PARAMS}: llama_4_scaling counts from {own:?}, yarn from {original:?}; this build takes one length for both"
            );
        }
    }
    Ok(rope)
}

/// Renames the tensors; what the table does not know keeps its name.
pub(super) fn translate(tensors: &mut [Located], config: &Value) -> Result<()> {
    for tensor in tensors {
        let Some(name) = hf_name(&tensor.name) else { continue };
        let heads = match name.rsplit('.').nth(1) {
            Some("q_proj") => config["num_attention_heads"].as_u64(),
            Some("k_proj") => config["num_key_value_heads"].as_u64(),
            _ => None,
        };
        // Rows of codes move; scales are looked up by the row that moved.
        if let Some(heads) = heads.filter(|_| name.ends_with(".weight") || name.ends_with(".weight_packed")) {
            let (heads, rows) = (heads as usize, tensor.shape.first().copied().unwrap_or(0));
            if heads == 0 || rows == 0 || !rows.is_multiple_of(2 * heads) {
                return Err(Error::new(Kind::Mismatch, format!("{}: {rows} rows are not {heads} heads of even size", tensor.name))
                    .named(&tensor.name));
            }
            tensor.row_map = RowMap::Interleaved { head_dim: rows / heads };
        }
        tensor.name = name;
    }
    Ok(())
}

/// `layers.0.attention.wo.weight` to `model.layers.0.self_attn.o_proj.weight`.
fn hf_name(name: &str) -> Option<String> {
    let (module, leaf) = name.rsplit_once('.')?;
    if let Some((_, hf)) = TOP.iter().find(|(native, _)| *native == module) {
        return Some(format!("{hf}.{leaf}"));
    }
    let (number, module) = module.strip_prefix("layers.")?.split_once('.')?;
    let known = |module: &str| LAYER.iter().find(|(native, _)| *native == module).map(|(_, hf)| (*hf).to_string());
    let hf = known(module).or_else(|| {
        let (module, matrix) = module.rsplit_once('.')?;
        let matrix = FEED_FORWARD.iter().find(|(native, _)| *native == matrix)?.1;
        let module = known(module).or_else(|| Some(format!("mlp.experts.{}", module.strip_prefix("experts.")?)))?;
        Some(format!("{module}.{matrix}"))
    })?;
    Some(format!("model.layers.{number}.{hf}.{leaf}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_follow_the_table() {
        for (native, hf) in [
            ("tok_embeddings.weight", "model.embed_tokens.weight"),
            ("output.weight", "lm_head.weight"),
            ("layers.12.attention.wkv_a_with_mqa.weight", "model.layers.12.self_attn.kv_a_proj_with_mqa.weight"),
            ("layers.0.experts.31.w2.weight_packed", "model.layers.0.mlp.experts.31.down_proj.weight_packed"),
            ("layers.0.shared_experts.w3.weight", "model.layers.0.mlp.shared_experts.up_proj.weight"),
            ("layers.0.feed_forward.w1.weight", "model.layers.0.mlp.gate_proj.weight"),
            ("layers.0.gate.weight", "model.layers.0.mlp.gate.weight"),
        ] {
            assert_eq!(hf_name(native).as_deref(), Some(hf));
        }
        assert_eq!(hf_name("layers.0.unheard.of.weight"), None);
    }

    #[test]
    fn a_dense_model_becomes_mistral() {
        let mut params = json!({"dim": 64, "n_layers": 2, "head_dim": 16, "hidden_dim": 128, "n_heads": 4, "n_kv_heads": 2,
            "norm_eps": 1e-5, "vocab_size": 320, "rope_theta": 1000000.0});
        let found = config(&params).unwrap();
        assert_eq!((found["model_type"].as_str(), found["num_key_value_heads"].as_u64()), (Some("mistral"), Some(2)));
        assert_eq!(found["rope_parameters"]["rope_theta"].as_f64(), Some(1e6));
        params["moe"] = json!({"num_experts": 8});
        assert_eq!(config(&params).unwrap_err().kind(), Kind::Unsupported);
        params["dim"] = json!("wide");
        assert_eq!(config(&params).unwrap_err().name(), Some("dim"));
    }
}
