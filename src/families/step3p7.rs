//! Step 3.7 Flash, text part: full layers among sliding ones, which may have more query heads; norms stored as `w` for `1 + w`; a sigmoid gate
//! on each head; sigmoid-routed experts beside a shared one after the first dense layers.
//!
//! Odd things: lists by layer also cover the prediction layers at the end; some layers clamp their MLPs, after the activation; rotary base and
//! share are those of the first layer of a kind, and scaling is for full layers alone.

use super::dense::Common;
use super::facts::facts;
use super::sizes_picking;
use crate::error::{Error, Kind, Result};
use crate::layers::{
    Attention, AttentionDims, Block, Config, ExpertDims, Experts, FeedForward, GatedMlp, HeadGating, Linear, Moe, QkNorm, RmsNorm,
    RopeParameters, Ropes, Router,
};
use crate::model::{Build, Model, TransformerLayer};
use crate::ops::Activation;
use crate::weights::Declarations;
use crate::{bail, ensure};
use serde_json::{Map, Value, json};

pub(super) fn build(c: &Config<'_>, b: &Build<'_>, d: &mut Declarations) -> Result<Box<dyn Model>> {
    let tied = c.bool_or("tie_word_embeddings", false)?;
    let c = &c.opt_object("text_config")?.unwrap_or(*c);
    let nested = b.shape("model.language_model.embed_tokens.weight").is_some();
    let mut common = Common { root: if nested { "model.language_model" } else { "model" }, ..Common::read(c, tied)? };
    common.kv_heads = c.usize_or(either(c, ["num_attention_groups", "num_key_value_heads"]), common.heads)?;
    common.eps = c.f64_or("rms_norm_eps", 1e-5)? as f32;
    let recipe = Recipe::read(c, &common)?;
    let add = facts("step3p7").norm_add;
    let mut ropes = Ropes::default();
    let mut turning = |sliding: bool| match recipe.slides.iter().position(|s| *s == sliding) {
        Some(first) => Ok(Some(ropes.add(d, rotation(c, &common, b, first, sliding)?))),
        None => Ok::<_, Error>(None),
    };
    let (full, local) = (turning(false)?, turning(true)?);
    let layers = (0..common.layers)
        .map(|i| {
            let slides = recipe.slides[i];
            let attention = AttentionDims {
                heads: if slides { recipe.sliding_heads } else { common.heads },
                scale: recipe.scale,
                window: slides.then_some(recipe.window),
                qkv_bias: recipe.attention_bias,
                out_bias: recipe.attention_bias,
                qk_norm: QkNorm::PerHead(common.eps, add),
                gating: recipe.gating,
                rope: if slides { local } else { full },
                ..common.attention(b)
            };
            let norm = |d: &mut Declarations, part: &str| Some(RmsNorm::new(d, &common.name(i, part), common.hidden, common.eps, add));
            let layer = Block {
                attention_pre: norm(d, "input_layernorm"),
                attention: Attention::new(d, &common.name(i, "self_attn"), attention),
                attention_post: None,
                mlp_pre: norm(d, "post_attention_layernorm"),
                mlp: recipe.feed_forward(&common, b, d, i),
                mlp_post: None,
            };
            Box::new(layer) as Box<dyn TransformerLayer>
        })
        .collect();
    Ok(Box::new(common.decoder(d, ropes, layers, add)))
}

/// What layers are built by.
struct Recipe {
    /// By layer.
    slides: Vec<bool>,
    window: usize,
    sliding_heads: usize,
    scale: f32,
    attention_bias: bool,
    gating: HeadGating,
    /// By layer.
    routed: Vec<bool>,
    experts: ExpertDims,
    shared_inner: usize,
    corrected: bool,
    normalize: bool,
    router_scale: f32,
    mlp_bias: bool,
    /// By layer: bounds of routed experts, and of all other MLPs.
    limits: Vec<Option<f32>>,
    shared_limits: Vec<Option<f32>>,
}

impl Recipe {
    fn read(c: &Config<'_>, common: &Common) -> Result<Recipe> {
        c.only("moe_router_activation", &["sigmoid"])?;
        let slides = match by_layer(c, "layer_types", common.layers)? {
            None => vec![false; common.layers],
            Some(kinds) => kinds.iter().map(slides).collect::<Result<_>>()?,
        };
        let other = c.opt_object("attention_other_setting")?;
        let sliding_heads = match other {
            Some(other) if c.get("num_sliding_attention_heads").is_none() => other.usize_or("num_attention_heads", common.heads)?,
            _ => c.usize_or("num_sliding_attention_heads", common.heads)?,
        };
        for (heads, key) in [(common.heads, "num_attention_heads"), (sliding_heads, "attention_other_setting.num_attention_heads")] {
            ensure!(
                heads.is_multiple_of(common.kv_heads),
                Mismatch,
                "config.json: {heads} query heads ({key}) do not share {} key/value heads evenly",
                common.kv_heads
            );
        }
        let gating = match c.get("gating") {
            None | Some(Value::Bool(true)) => HeadGating::PerHead(Activation::Sigmoid),
            Some(v) if v == "per-head" => HeadGating::PerHead(Activation::Sigmoid),
            Some(other) => bail!(Unsupported, "config.json: gating is {other}; known: true, per-head"),
        };
        let count = either(c, ["moe_num_experts", "n_routed_experts"]);
        let experts = sizes_picking(c, common, count, "moe_intermediate_size", either(c, ["moe_top_k", "num_experts_per_tok"]))?;
        Ok(Recipe {
            window: if slides.contains(&true) { c.usize("sliding_window")? } else { 0 },
            slides,
            sliding_heads,
            scale: c.f64_or("query_pre_attn_scalar", common.head_dim as f64)?.powf(-0.5) as f32,
            attention_bias: c.bool_or("attention_bias", false)?,
            gating: if c.bool_or("use_head_wise_attn_gate", true)? { gating } else { HeadGating::No },
            routed: routed(c, common.layers)?,
            experts,
            shared_inner: c.usize(either(c, ["share_expert_dim", "share_expert_dims"]))?,
            corrected: c.bool_or("use_moe_router_bias", true)?,
            normalize: c.bool_or("norm_expert_weight", true)?,
            router_scale: c.f64_or("moe_router_scaling_factor", 1.0)? as f32,
            mlp_bias: c.bool_or("mlp_bias", false)?,
            limits: limits(c, "swiglu_limits", common.layers)?,
            shared_limits: limits(c, "swiglu_limits_shared", common.layers)?,
        })
    }

    fn feed_forward(&self, common: &Common, b: &Build<'_>, d: &mut Declarations, i: usize) -> Box<dyn FeedForward> {
        let clamped = |limit: Option<f32>| limit.map_or(common.act, |limit| Activation::SiluThenClamp { limit });
        let (act, shared_act) = (clamped(self.limits[i]), clamped(self.shared_limits[i]));
        if !self.routed[i] {
            return Box::new(GatedMlp::new(d, &common.name(i, "mlp"), common.hidden, common.inner, shared_act, self.mlp_bias));
        }
        let name = |part: &str| common.name(i, part);
        let dims = ExpertDims { act, ..self.experts };
        let gate = Linear::new(d, &name("moe.gate"), dims.count, common.hidden, false);
        let correction = self.corrected.then(|| d.vector(&name("moe.router_bias"), dims.count, 0.0));
        let router = Router { normalize: self.normalize, ..Router::sigmoid(gate, correction, dims.top_k, self.router_scale) };
        // Published files stack each projection's experts; quantised copies may hold them one by one.
        let apart = ["weight", "weight_packed"].iter().any(|leaf| b.shape(&name(&format!("moe.experts.0.gate_proj.{leaf}"))).is_some());
        let experts = if apart {
            Experts::separate(d, &name("moe.experts"), Some("gate_proj"), "up_proj", "down_proj", dims)
        } else {
            let [gate, up, down] = ["gate", "up", "down"].map(|part| name(&format!("moe.{part}_proj.weight")));
            Experts::stacked_apart(d, [&gate, &up, &down], dims)
        };
        let shared = Some(GatedMlp::new(d, &name("share_expert"), common.hidden, self.shared_inner, shared_act, self.mlp_bias));
        Box::new(Moe { shared, ..Moe::new(router, experts) })
    }
}

/// The key that is there; the first where none is.
fn either<'k>(c: &Config<'_>, keys: [&'k str; 2]) -> &'k str {
    if c.get(keys[0]).is_none() && c.get(keys[1]).is_some() { keys[1] } else { keys[0] }
}

/// A list with an entry for each layer; entries of prediction layers may follow and are left out.
fn by_layer<'a>(c: &Config<'a>, key: &str, layers: usize) -> Result<Option<&'a [Value]>> {
    let Some(list) = c.opt_list(key)? else { return Ok(None) };
    ensure!(list.len() >= layers, Mismatch, "config.json: {key} lists {} layers, num_hidden_layers is {layers}", list.len());
    Ok(Some(&list[..layers]))
}

fn wrong(key: &str, found: &Value, expected: &str) -> Error {
    Error::new(Kind::CorruptFile, format!("config.json: {key} holds {found}, expected {expected}")).named(key)
}

fn slides(kind: &Value) -> Result<bool> {
    match kind.as_str() {
        Some("full_attention") => Ok(false),
        Some("sliding_attention") => Ok(true),
        _ => bail!(Unsupported, "config.json: layer_types holds {kind}; known here: full_attention, sliding_attention"),
    }
}

/// Which layers have experts: by `mlp_layer_types`, or the numbers in `moe_layers_enum`, else from the fourth on.
fn routed(c: &Config<'_>, layers: usize) -> Result<Vec<bool>> {
    if let Some(kinds) = by_layer(c, "mlp_layer_types", layers)? {
        return kinds
            .iter()
            .map(|kind| match kind.as_str() {
                Some("sparse") => Ok(true),
                Some("dense") => Ok(false),
                _ => Err(wrong("mlp_layer_types", kind, "dense or sparse")),
            })
            .collect();
    }
    const KEY: &str = "moe_layers_enum";
    let numbers: Vec<u64> = match c.get(KEY) {
        None => return Ok((0..layers).map(|i| i >= 3).collect()),
        Some(Value::Array(list)) => {
            list.iter().map(|v| v.as_u64().ok_or_else(|| wrong(KEY, v, "numbers of layers"))).collect::<Result<_>>()?
        }
        Some(v) => {
            let text = v.as_str().ok_or_else(|| wrong(KEY, v, "numbers of layers, or a list of them"))?;
            let items = text.split(',').map(str::trim).filter(|item| !item.is_empty());
            items.map(|item| item.parse().map_err(|_| wrong(KEY, v, "numbers of layers"))).collect::<Result<_>>()?
        }
    };
    Ok((0..layers).map(|i| numbers.contains(&(i as u64))).collect())
}

/// The bound of each layer; 0, `null` and no list at all mean none.
fn limits(c: &Config<'_>, key: &str, layers: usize) -> Result<Vec<Option<f32>>> {
    let Some(list) = by_layer(c, key, layers)? else { return Ok(vec![None; layers]) };
    list.iter()
        .map(|v| match v {
            Value::Null => Ok(None),
            v => match v.as_f64() {
                Some(0.0) => Ok(None),
                Some(limit) if limit > 0.0 => Ok(Some(limit as f32)),
                _ => Err(wrong(key, v, "bounds of at least 0")),
            },
        })
        .collect()
}

/// Rotation of a kind of layer, of which layer `first` is the first.
fn rotation(c: &Config<'_>, common: &Common, b: &Build<'_>, first: usize, sliding: bool) -> Result<RopeParameters> {
    let kind = if sliding { "sliding_attention" } else { "full_attention" };
    if c.opt_object("rope_parameters")?.is_some_and(|p| p.get(kind).is_some()) {
        return RopeParameters::read(c, common.head_dim, Some(kind), b.context);
    }
    // The same in the form that other families have: one number each.
    let mut own = Map::new();
    own.insert("max_position_embeddings".into(), json!(common.context));
    for (key, list) in [("rope_theta", "rope_theta"), ("partial_rotary_factor", "partial_rotary_factors")] {
        let value = match c.get(list) {
            Some(Value::Array(_)) => by_layer(c, list, common.layers)?.map(|values| values[first].clone()),
            Some(number) => Some(number.clone()),
            None => None,
        };
        own.extend(value.map(|value| (key.to_string(), value)));
    }
    if !sliding {
        own.extend(c.get("rope_scaling").map(|scaling| ("rope_scaling".to_string(), scaling.clone())));
    }
    RopeParameters::read(&Config::new(&Value::Object(own))?, common.head_dim, None, b.context)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_with_experts_are_named_three_ways() {
        let read = |config: Value| routed(&Config::new(&config).unwrap(), 5);
        assert_eq!(read(json!({})).unwrap(), [false, false, false, true, true]);
        assert_eq!(read(json!({"moe_layers_enum": "1, 4,9"})).unwrap(), [false, true, false, false, true]);
        assert_eq!(read(json!({"moe_layers_enum": [0]})).unwrap(), [true, false, false, false, false]);
        let kinds = json!({"mlp_layer_types": ["dense", "sparse", "dense", "dense", "sparse", "sparse"]});
        assert_eq!(read(kinds).unwrap(), [false, true, false, false, true]);
        assert!(read(json!({"moe_layers_enum": "1,x"})).unwrap_err().message().contains("moe_layers_enum"));
        assert!(read(json!({"mlp_layer_types": ["dense"]})).unwrap_err().message().contains("lists 1 layers"));
    }

    #[test]
    fn bounds_of_nothing_are_none() {
        let config = json!({"swiglu_limits": [0, null, 7.0, 1]});
        assert_eq!(limits(&Config::new(&config).unwrap(), "swiglu_limits", 3).unwrap(), [None, None, Some(7.0)]);
        let config = json!({"swiglu_limits": [-1]});
        assert!(limits(&Config::new(&config).unwrap(), "swiglu_limits", 1).is_err());
    }
}
