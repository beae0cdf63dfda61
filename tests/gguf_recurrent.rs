//! GGUF files of the recurrent families, written here from the reference checkpoints by the rules of their converters: other names,
//! norms plus 1, `-exp(A_log)`, value heads dealt out in turn. Logits must stay those of the golden.

mod support;

use metrale::engine::{self, Bodies};
use metrale::options::{Compute, LoadOptions};
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::path::Path;
use support::golden::{Golden, folders};
use support::{ARRAY, F32, GgufWriter, I32, Scratch};

/// A tensor in f32, rows first.
struct Tensor {
    name: String,
    shape: Vec<usize>,
    values: Vec<f32>,
}

fn tensors(folder: &Path) -> Vec<Tensor> {
    let bytes = std::fs::read(folder.join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let decode = |dtype: Dtype, data: &[u8]| -> Vec<f32> {
        match dtype {
            Dtype::F32 => data.chunks_exact(4).map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]])).collect(),
            Dtype::BF16 => data.chunks_exact(2).map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16)).collect(),
            other => panic!("{other:?}"),
        }
    };
    file.tensors().into_iter().map(|(name, t)| Tensor { name, shape: t.shape().to_vec(), values: decode(t.dtype(), t.data()) }).collect()
}

/// Names of a layer there and here.
const RENAMES: &[(&str, &str)] = &[
    ("input_layernorm", "attn_norm"),
    ("post_attention_layernorm", "post_attention_norm"),
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.out_proj", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("self_attn.q_layernorm", "attn_q_norm"),
    ("self_attn.k_layernorm", "attn_k_norm"),
    ("linear_attn.in_proj_qkvz", "ssm_in"),
    ("linear_attn.in_proj_ba", "ssm_ba"),
    ("linear_attn.in_proj_qkv", "attn_qkv"),
    ("linear_attn.in_proj_z", "attn_gate"),
    ("linear_attn.in_proj_a", "ssm_alpha"),
    ("linear_attn.in_proj_b", "ssm_beta"),
    ("linear_attn.conv1d", "ssm_conv1d"),
    ("linear_attn.norm", "ssm_norm"),
    ("linear_attn.out_proj", "ssm_out"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate", "ffn_gate_inp"),
    ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("operator_norm", "attn_norm"),
    ("ffn_norm", "ffn_norm"),
    ("feed_forward.w1", "ffn_gate"),
    ("feed_forward.w2", "ffn_down"),
    ("feed_forward.w3", "ffn_up"),
    ("conv.in_proj", "shortconv.in_proj"),
    ("conv.conv", "shortconv.conv"),
    ("conv.out_proj", "shortconv.out_proj"),
];

fn renamed(name: &str) -> Option<String> {
    let name = name.replace("model.language_model.", "model.");
    let top = [
        ("model.embed_tokens.weight", "token_embd.weight"),
        ("model.norm.weight", "output_norm.weight"),
        ("model.embedding_norm.weight", "token_embd_norm.weight"),
        ("lm_head.weight", "output.weight"),
    ];
    if let Some((_, gguf)) = top.iter().find(|(hf, _)| *hf == name) {
        return Some((*gguf).to_string());
    }
    let (layer, rest) = name.strip_prefix("model.layers.")?.split_once('.')?;
    match rest {
        "linear_attn.A_log" => return Some(format!("blk.{layer}.ssm_a")),
        "linear_attn.dt_bias" => return Some(format!("blk.{layer}.ssm_dt.bias")),
        _ => {}
    }
    if let Some((_, part)) = rest.strip_prefix("mlp.experts.").and_then(|r| r.split_once('.')) {
        return Some(format!("blk.{layer}.ffn_{}_exps.weight", part.strip_suffix("_proj.weight")?));
    }
    let (stem, leaf) = rest.rsplit_once('.')?;
    let (_, gguf) = RENAMES.iter().find(|(hf, _)| *hf == stem)?;
    Some(format!("blk.{layer}.{gguf}.{leaf}"))
}

/// Deals rows (or columns) of value heads out in turn: stored head `v * key_heads + k` was head `k * share + v`.
fn tile(t: &mut Tensor, first: usize, dim: usize, heads: (usize, usize), columns: bool) {
    let (key_heads, share) = heads;
    let row = if columns { *t.shape.last().unwrap() } else { t.values.len() / t.shape[0] };
    let old = t.values.clone();
    for stored in 0..key_heads * share {
        let was = stored % key_heads * share + stored / key_heads;
        for i in 0..dim {
            let (to, from) = (first + stored * dim + i, first + was * dim + i);
            if columns {
                (0..t.shape[0]).for_each(|r| t.values[r * row + to] = old[r * row + from]);
            } else {
                t.values[to * row..(to + 1) * row].copy_from_slice(&old[from * row..(from + 1) * row]);
            }
        }
    }
}

fn gguf(folder: &Path, architecture: &str) -> Vec<u8> {
    let config: Value = serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap();
    let c = config.get("text_config").unwrap_or(&config);
    let number = |key: &str| c.get(key).and_then(Value::as_u64).unwrap_or(0) as usize;
    let mut w = GgufWriter::new();
    w.string("general.architecture", architecture);
    let key = |k: &str| format!("{architecture}.{k}");
    for (k, value) in [
        ("context_length", number("max_position_embeddings")),
        ("embedding_length", number("hidden_size")),
        ("block_count", number("num_hidden_layers")),
        ("attention.head_count", number("num_attention_heads")),
    ] {
        w.u32(&key(k), value as u32);
    }
    let float = |w: &mut GgufWriter, k: &str, v: f64| w.raw(key(k), F32, &(v as f32).to_le_bytes());
    let eps = c.get("rms_norm_eps").or(c.get("norm_eps")).and_then(Value::as_f64).unwrap();
    float(&mut w, "attention.layer_norm_rms_epsilon", eps);
    let theta = c.get("rope_theta").or(c.get("rope_parameters").and_then(|r| r.get("rope_theta"))).and_then(Value::as_f64).unwrap();
    float(&mut w, "rope.freq_base", theta);
    let mut all = tensors(folder);
    if architecture == "lfm2" {
        let inner = all.iter().find(|t| t.name.ends_with("w1.weight")).unwrap().shape[0];
        w.u32(&key("feed_forward_length"), inner as u32);
        w.u32(&key("shortconv.l_cache"), number("conv_L_cache") as u32);
        let kinds = c["layer_types"].as_array().unwrap();
        let heads = kinds.iter().map(|k| if k == "conv" { 0 } else { number("num_key_value_heads") as i32 });
        let mut list = I32.to_le_bytes().to_vec();
        list.extend((kinds.len() as u64).to_le_bytes());
        heads.for_each(|n| list.extend(n.to_le_bytes()));
        w.raw(key("attention.head_count_kv"), ARRAY, &list);
    } else {
        let (key_heads, heads) = (number("linear_num_key_heads"), number("linear_num_value_heads"));
        let (key_dim, value_dim) = (number("linear_key_head_dim"), number("linear_value_head_dim"));
        for (k, value) in [
            ("attention.head_count_kv", number("num_key_value_heads")),
            ("attention.key_length", number("head_dim")),
            ("rope.dimension_count", number("head_dim") / 4),
            ("feed_forward_length", number("intermediate_size")),
            ("full_attention_interval", 4),
            ("ssm.conv_kernel", number("linear_conv_kernel_dim")),
            ("ssm.state_size", key_dim),
            ("ssm.group_count", key_heads),
            ("ssm.time_step_rank", heads),
            ("ssm.inner_size", heads * value_dim),
            ("expert_count", number("num_experts")),
            ("expert_used_count", number("num_experts_per_tok")),
            ("expert_feed_forward_length", number("moe_intermediate_size")),
            ("expert_shared_feed_forward_length", number("shared_expert_intermediate_size")),
        ] {
            if value > 0 {
                w.u32(&key(k), value as u32);
            }
        }
        let share = (key_heads, heads / key_heads);
        for t in &mut all {
            let plain = t.name.ends_with("norm.weight") && !t.name.ends_with("linear_attn.norm.weight");
            t.values.iter_mut().filter(|_| plain).for_each(|v| *v += 1.0);
            if t.name.ends_with("A_log") {
                t.values.iter_mut().for_each(|v| *v = -v.exp());
            }
            if architecture == "qwen3next" {
                continue;
            }
            let queries = 2 * key_heads * key_dim;
            match t.name.rsplit("linear_attn.").next().unwrap() {
                "A_log" | "dt_bias" | "in_proj_a.weight" | "in_proj_b.weight" => tile(t, 0, 1, share, false),
                "in_proj_z.weight" => tile(t, 0, value_dim, share, false),
                "in_proj_qkv.weight" | "conv1d.weight" => tile(t, queries, value_dim, share, false),
                "out_proj.weight" => tile(t, 0, value_dim, share, true),
                _ => {}
            }
        }
        // Newer converters take the wide product of Qwen 3 Next apart: all queries, keys, values; all gates.
        if architecture == "qwen3next" {
            let (v, block) = (value_dim * share.1, 2 * key_dim + 2 * value_dim * share.1);
            for t in std::mem::take(&mut all) {
                if !t.name.ends_with("in_proj_qkvz.weight") {
                    all.push(t);
                    continue;
                }
                let cols = t.shape[1];
                let rows = |runs: &[(usize, usize)]| -> Vec<f32> {
                    let rows =
                        runs.iter().flat_map(|(first, n)| (0..key_heads).flat_map(move |h| (0..*n).map(move |i| h * block + first + i)));
                    rows.flat_map(|r| t.values[r * cols..(r + 1) * cols].to_vec()).collect()
                };
                for (name, runs) in [("qkv", &[(0, key_dim), (key_dim, key_dim), (2 * key_dim, v)][..]), ("z", &[(2 * key_dim + v, v)][..])]
                {
                    let values = rows(runs);
                    all.push(Tensor { name: t.name.replace("qkvz", name), shape: vec![values.len() / cols, cols], values });
                }
            }
        }
    }
    // Experts stack into one tensor, in order.
    let mut stacked: Vec<Tensor> = Vec::new();
    let expert = |t: &Tensor| t.name.split(".experts.").nth(1).and_then(|r| r.split('.').next()?.parse::<usize>().ok());
    all.sort_by_key(|t| (expert(t).unwrap_or(0), t.name.clone()));
    for t in all {
        let Some(name) = renamed(&t.name).filter(|_| !t.name.starts_with("mtp.")) else { continue };
        let shape: Vec<usize> = t.shape.iter().copied().filter(|n| *n != 1).collect();
        match stacked.iter_mut().find(|s| s.name == name) {
            Some(s) => {
                s.shape[0] += 1;
                s.values.extend(t.values);
            }
            None => {
                let shape = if expert(&t).is_some() { [&[1], &shape[..]].concat() } else { shape };
                stacked.push(Tensor { name, shape, values: t.values });
            }
        }
    }
    for t in stacked {
        let dimensions: Vec<u64> = t.shape.iter().rev().map(|n| *n as u64).collect();
        let bytes: Vec<u8> = t.values.iter().flat_map(|v| v.to_le_bytes()).collect();
        w.tensor(&t.name, &dimensions, 0, &bytes);
    }
    w.bytes()
}

#[test]
fn files_written_by_the_converters_rules_give_the_goldens_logits() {
    let cases = [("lfm2", "lfm2"), ("qwen3_next", "qwen3next"), ("qwen3_5", "qwen35"), ("qwen3_5_moe", "qwen35moe")];
    for (name, architecture) in cases {
        let Some(folder) = folders().into_iter().find(|f| f.ends_with(name)) else {
            println!("{name}: SKIPPED, no reference checkpoint beside the project");
            continue;
        };
        let scratch = Scratch::new(&format!("gguf-{architecture}"));
        let path = scratch.file("model.gguf", gguf(&folder, architecture));
        let options = LoadOptions { compute: Some(Compute::F32), threads: 2, ..LoadOptions::default() };
        let engine = engine::load(&path, &options, None).unwrap_or_else(|e| panic!("{architecture}: {e}"));
        let golden = Golden::read(&folder);
        let found = engine.capture(&golden.prompt, 64, &["logits"], Bodies::Fast).unwrap();
        let most = found[0].values.iter().zip(&golden.prompt_logits).fold(0f32, |m, (a, b)| m.max((a - b).abs()));
        println!("{architecture}: {most:.1e}");
        assert!(most < 1e-3, "{architecture}: logits differ by {most}");
    }
}
