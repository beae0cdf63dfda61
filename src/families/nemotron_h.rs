//! Nemotron-H, Nemotron 3 and their Puzzle: layers of one part each, Mamba 2, attention without any position signal, a plain MLP with
//! squared ReLU or sigmoid-routed experts of that kind, in a latent space for the largest. Puzzle gives each block sizes of its own.

use super::dense::Common;
use super::{group_limit, sizes};
use crate::error::{Error, Kind, Result};
use crate::layers::{
    Attention, AttentionDims, Config, Experts, GatedMlp, Latent, Linear, Mamba2, Mamba2Dims, Moe, OnePart, Part, RmsNorm, Ropes, Router,
};
use crate::model::{Build, Decoder, Dims, Head, Model, TransformerLayer};
use crate::ops::Activation;
use crate::weights::Declarations;
use crate::{bail, ensure};
use serde_json::{Map, Value};

/// What a layer does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Does {
    Mamba,
    Experts,
    Attention,
    Mlp,
}

pub(super) fn build(c: &Config<'_>, b: &Build<'_>, d: &mut Declarations) -> Result<Box<dyn Model>> {
    let plan = plan(c)?;
    let mut common = common(c, plan.len())?;
    // As transformers saves it.
    if b.shape("model.embeddings.weight").is_some() {
        common.root = "model";
    }
    let mut layers: Vec<Box<dyn TransformerLayer>> = Vec::with_capacity(plan.len());
    for (i, (does, own)) in plan.iter().enumerate() {
        let c = match own {
            Some(own) => Config::new(own)?,
            None => *c,
        };
        let name = common.name(i, "mixer");
        let part = match does {
            Does::Mamba => Part::Mixer(Box::new(Mamba2::new(d, &name, mamba(&c, &common)?)?)),
            Does::Attention => {
                let bias = c.bool_or("attention_bias", false)?;
                Part::Mixer(Box::new(Attention::new(d, &name, AttentionDims { qkv_bias: bias, out_bias: bias, ..common.attention(b) })))
            }
            Does::Mlp => {
                let (inner, bias) = (c.usize("intermediate_size")?, c.bool_or("mlp_bias", false)?);
                Part::FeedForward(Box::new(GatedMlp::plain(d, &name, common.hidden, inner, common.act, bias)))
            }
            Does::Experts => Part::FeedForward(Box::new(experts(&c, d, &common, &name)?)),
        };
        let norm = RmsNorm::new(d, &common.name(i, "norm"), common.hidden, common.eps, 0.0);
        layers.push(Box::new(OnePart { norm, part }));
    }
    Ok(Box::new(Decoder {
        dims: Dims { vocab: common.vocab, hidden: common.hidden, layers: common.layers, context: common.context },
        head: Head::new(d, &format!("{}.embeddings.weight", common.root), common.head, common.vocab, common.hidden, common.tied),
        embed_factor: 1.0,
        entry: None,
        ropes: Ropes::default(),
        layers,
        norm: RmsNorm::new(d, &format!("{}.norm_f", common.root), common.hidden, common.eps, 0.0),
        logit_factor: 1.0,
        logit_softcap: None,
    }))
}

fn common(c: &Config<'_>, layers: usize) -> Result<Common> {
    let (hidden, heads) = (c.usize("hidden_size")?, c.usize("num_attention_heads")?);
    let kv_heads = c.usize_or("num_key_value_heads", heads)?;
    ensure!(heads.is_multiple_of(kv_heads), Mismatch, "config.json: {heads} query heads do not share {kv_heads} key/value heads evenly");
    let head_dim = match c.count("head_dim")? {
        Some(dim) => dim,
        None => c.usize_or("attention_head_dim", 128)?,
    };
    let act = match c.opt_str("mlp_hidden_act")?.unwrap_or("relu2") {
        "relu2" => Activation::Relu2,
        "silu" => Activation::Silu,
        other => bail!(Unsupported, "config.json: mlp_hidden_act {other:?}; known here: relu2, silu"),
    };
    let eps = match c.opt_f64("layer_norm_epsilon")? {
        Some(eps) => eps,
        None => c.f64_or("norm_eps", 1e-5)?,
    };
    Ok(Common {
        hidden,
        // Layers with a feed-forward read its width themselves.
        inner: 0,
        layers,
        heads,
        kv_heads,
        head_dim,
        vocab: c.usize("vocab_size")?,
        context: c.usize_or("max_position_embeddings", 4096)?,
        eps: eps as f32,
        act,
        tied: c.bool_or("tie_word_embeddings", false)?,
        root: "backbone",
        head: "lm_head",
    })
}

fn mamba(c: &Config<'_>, common: &Common) -> Result<Mamba2Dims> {
    c.only("mamba_hidden_act", &["silu", "swish"])?;
    let limit = c.opt_numbers("time_step_limit")?.unwrap_or_else(|| vec![0.0, f64::INFINITY]);
    let [low, high] = limit[..] else { bail!(CorruptFile, "config.json: time_step_limit holds {limit:?}, expected two numbers") };
    Ok(Mamba2Dims {
        hidden: common.hidden,
        heads: c.usize("mamba_num_heads")?,
        head_dim: c.usize("mamba_head_dim")?,
        groups: c.usize("n_groups")?,
        depth: c.usize("ssm_state_size")?,
        taps: c.usize_or("conv_kernel", 4)?,
        conv_bias: c.bool_or("use_conv_bias", true)?,
        bias: c.bool_or("use_bias", false)?,
        eps: common.eps,
        limit: (low as f32, high as f32),
    })
}

fn experts(c: &Config<'_>, d: &mut Declarations, common: &Common, name: &str) -> Result<Moe> {
    let mut dims = sizes(c, common, "n_routed_experts", "moe_intermediate_size")?;
    let bias = c.bool_or("mlp_bias", false)?;
    let part = |p: &str| format!("{name}.{p}");
    let gate = Linear::new(d, &part("gate"), dims.count, common.hidden, false);
    let correction = d.vector(&part("gate.e_score_correction_bias"), dims.count, 0.0);
    let router = Router {
        normalize: c.bool_or("norm_topk_prob", true)?,
        groups: group_limit(c, dims.count)?,
        ..Router::sigmoid(gate, Some(correction), dims.top_k, c.f64_or("routed_scaling_factor", 1.0)? as f32)
    };
    let latent = c.count("moe_latent_size")?.map(|latent| {
        dims.hidden = latent;
        Latent {
            down: Linear::new(d, &part("fc1_latent_proj"), latent, common.hidden, bias),
            norm: None,
            up: Linear::new(d, &part("fc2_latent_proj"), common.hidden, latent, bias),
        }
    });
    let experts = Experts::separate(d, &part("experts"), None, "up_proj", "down_proj", dims);
    let shared = match c.count("moe_shared_expert_intermediate_size")? {
        Some(inner) if c.get("n_shared_experts").is_none() || c.count("n_shared_experts")?.is_some() => {
            Some(GatedMlp::plain(d, &part("shared_experts"), common.hidden, inner, common.act, bias))
        }
        _ => None,
    };
    Ok(Moe { shared, latent, ..Moe::new(router, experts) })
}

/// What each layer does, with the config it is built from where it has entries of its own: from `block_configs`, the list
/// `layers_block_type`, or the letters of `hybrid_override_pattern`. `num_hidden_layers` may be null.
fn plan(c: &Config<'_>) -> Result<Vec<(Does, Option<Value>)>> {
    let of = |name: &str| {
        Ok(match name {
            "mamba" | "mamba2" | "linear_attention" | "M" => Does::Mamba,
            "moe" | "E" => Does::Experts,
            "attention" | "full_attention" | "*" => Does::Attention,
            "mlp" | "-" => Does::Mlp,
            other => bail!(Unsupported, "config.json: a layer of type {other:?}; known here: mamba (M), moe (E), attention (*), mlp (-)"),
        })
    };
    if let Some(blocks) = c.opt_list("block_configs")? {
        ensure!(!blocks.is_empty(), CorruptFile, "config.json: block_configs is empty");
        return blocks
            .iter()
            .enumerate()
            .map(|(i, block)| {
                let entries = block
                    .as_object()
                    .ok_or_else(|| Error::new(Kind::CorruptFile, format!("config.json: block_configs[{i}] is no object")))?;
                let kind = entries.get("block_type").and_then(Value::as_str).ok_or_else(|| {
                    Error::new(Kind::CorruptFile, format!("config.json: block_configs[{i}] has no block_type")).named("block_type")
                })?;
                Ok((of(kind)?, Some(over(c, entries))))
            })
            .collect();
    }
    let kinds: Vec<String> = match (c.opt_list("layers_block_type")?, c.opt_str("hybrid_override_pattern")?) {
        (Some(list), _) => list.iter().map(|v| v.as_str().unwrap_or("").to_string()).collect(),
        (None, Some(pattern)) => pattern.chars().map(String::from).collect(),
        (None, None) => bail!(
            Mismatch,
            "config.json: found no hybrid_override_pattern, layers_block_type or block_configs; one says what each layer does"
        ),
    };
    ensure!(!kinds.is_empty(), CorruptFile, "config.json: the list of layers is empty");
    if let Some(layers) = c.count("num_hidden_layers")? {
        ensure!(layers == kinds.len(), Mismatch, "config.json: num_hidden_layers is {layers}, {} layers are listed", kinds.len());
    }
    kinds.iter().map(|kind| Ok((of(kind)?, None))).collect()
}

/// The config's entries with a block's own over them.
fn over(c: &Config<'_>, own: &Map<String, Value>) -> Value {
    let top = c.entries().filter(|(key, _)| *key != "block_configs");
    Value::Object(top.chain(own).map(|(key, value)| (key.clone(), value.clone())).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn does(c: Value) -> Result<Vec<Does>> {
        plan(&Config::new(&c).unwrap()).map(|plan| plan.into_iter().map(|(does, _)| does).collect())
    }

    #[test]
    fn letters_names_and_blocks_say_the_same() {
        let expected = vec![Does::Mamba, Does::Experts, Does::Attention, Does::Mlp];
        assert_eq!(does(json!({"hybrid_override_pattern": "ME*-", "num_hidden_layers": 4})).unwrap(), expected);
        assert_eq!(does(json!({"layers_block_type": ["mamba", "moe", "attention", "mlp"], "num_hidden_layers": null})).unwrap(), expected);
        let blocks: Vec<Value> = ["mamba", "moe", "attention", "mlp"].iter().map(|t| json!({"block_type": t})).collect();
        assert_eq!(does(json!({"block_configs": blocks})).unwrap(), expected);
    }

    #[test]
    fn a_block_overrides_the_config_and_odd_lists_are_errors() {
        let c = json!({"n_routed_experts": 4, "top": 1, "block_configs": [{"block_type": "moe", "n_routed_experts": 6}]});
        let own = plan(&Config::new(&c).unwrap()).unwrap().remove(0).1.unwrap();
        assert_eq!((own["n_routed_experts"].clone(), own["top"].clone()), (json!(6), json!(1)));
        assert_eq!(does(json!({"hybrid_override_pattern": "MX"})).unwrap_err().kind(), Kind::Unsupported);
        assert_eq!(does(json!({"hybrid_override_pattern": "M", "num_hidden_layers": 2})).unwrap_err().kind(), Kind::Mismatch);
        assert_eq!(does(json!({"block_configs": [{}]})).unwrap_err().name(), Some("block_type"));
        assert!(does(json!({})).is_err());
    }
}
