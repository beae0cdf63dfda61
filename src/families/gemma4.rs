//! Gemma 4, text part: Gemma 3's norms before and after each part, now stored as plain factors; full layers with heads of their own size and
//! count among sliding ones; scores unscaled, since queries, keys and values are all normed.
//!
//! Odd things: full layers may use their keys as values, and turn only the fastest pairs of a head; the last layers may read the keys and
//! values of earlier ones (and then have a wider MLP); an MLP and experts may run side by side, the router reading the residual itself; small
//! models add to each layer what an embedding of its own says of the token; every layer ends with a stored factor.

use super::dense::{Common, windows};
use super::sizes_picking;
use crate::circuit::Tape;
use crate::error::Result;
use crate::layers::{
    Attention, AttentionDims, Block, Config, Experts, FeedForward, GatedMlp, Linear, QkNorm, RmsNorm, RopeParameters, Ropes, Router,
    Stacking, Values,
};
use crate::model::{Build, Entry, Model, TransformerLayer};
use crate::ops::{ActMul, Activation, Combine, Embed, ScaleBy, Value, WeightId};
use crate::weights::Declarations;
use crate::{bail, ensure};

pub(super) fn build(c: &Config<'_>, b: &Build<'_>, d: &mut Declarations) -> Result<Box<dyn Model>> {
    let tied = c.bool_or("tie_word_embeddings", true)?;
    let c = &c.opt_object("text_config")?.unwrap_or(*c);
    let wrapped = b.shape("model.language_model.embed_tokens.weight").is_some();
    let mut common = Common { root: if wrapped { "model.language_model" } else { "model" }, ..Common::read(c, tied)? };
    if c.get("hidden_activation").is_none() && c.get("hidden_act").is_none() {
        common.act = Activation::GeluTanh;
    }
    common.head_dim = c.usize_or("head_dim", 256)?;
    if c.opt_str("use_bidirectional_attention")? == Some("all") {
        bail!(Unsupported, "config.json: use_bidirectional_attention is \"all\"; text is read forwards only");
    }
    let recipe = Recipe::read(c, &common, b, d)?;
    let mut layers: Vec<Box<dyn TransformerLayer>> = Vec::new();
    // The last layer of each kind that has keys and values of its own: sliding, full.
    let mut lenders: [Option<Attention>; 2] = [None, None];
    for i in 0..common.layers {
        layers.push(Box::new(recipe.layer(c, &common, d, i, &mut lenders)?));
    }
    let width = recipe.beside;
    let mut decoder = common.decoder(d, recipe.ropes, layers, 0.0);
    if let Some(width) = width {
        decoder.entry = Some(Box::new(TokenSides::new(c, &common, d, width)?));
    }
    decoder.embed_factor = (common.hidden as f32).sqrt();
    decoder.logit_softcap = c.opt_f64("final_logit_softcapping")?.map(|v| v as f32);
    Ok(Box::new(decoder))
}

/// What layers are built by.
struct Recipe {
    /// By layer.
    windows: Vec<Option<usize>>,
    sliding: AttentionDims,
    full: AttentionDims,
    ropes: Ropes,
    /// First layer that borrows its keys and values.
    borrows_from: usize,
    /// Width of the MLP where keys and values are borrowed.
    borrower_inner: usize,
    experts: bool,
    /// Width of what each layer reads beside the residual.
    beside: Option<usize>,
}

impl Recipe {
    fn read(c: &Config<'_>, common: &Common, b: &Build<'_>, d: &mut Declarations) -> Result<Recipe> {
        let slides = c.usize_or("sliding_window", 512)?;
        let mut windows = windows(c, common.layers, |i| Ok((!(i + 1).is_multiple_of(6)).then_some(slides)))?;
        if let Some(last) = windows.last_mut() {
            *last = None;
        }
        let bias = c.bool_or("attention_bias", false)?;
        let full_dim = c.usize_or("global_head_dim", 512)?;
        let mut ropes = Ropes::default();
        let (local, global) = match c.opt_object("rope_parameters")? {
            Some(_) => (
                RopeParameters::read(c, common.head_dim, Some("sliding_attention"), b.context)?,
                RopeParameters::read(c, full_dim, Some("full_attention"), b.context)?,
            ),
            None => (RopeParameters::plain(1e4, common.head_dim), RopeParameters::proportional(1e6, full_dim, full_dim / 4, 1.0)),
        };
        let sliding = AttentionDims {
            scale: 1.0,
            qkv_bias: bias,
            out_bias: bias,
            qk_norm: QkNorm::PerHead(common.eps, 0.0),
            values: Values::Normed(common.eps),
            rope: Some(ropes.add(d, local)),
            ..common.attention(b)
        };
        let mut full = AttentionDims { head_dim: full_dim, rope: Some(ropes.add(d, global)), ..sliding };
        if c.bool_or("attention_k_eq_v", false)? {
            full.values = Values::Keys(common.eps);
            full.kv_heads = c.usize_or("num_global_key_value_heads", common.kv_heads)?;
            ensure!(
                full.heads.is_multiple_of(full.kv_heads),
                Mismatch,
                "config.json: {} query heads do not share {} key/value heads evenly (num_global_key_value_heads)",
                full.heads,
                full.kv_heads
            );
        }
        let borrowers = c.count("num_kv_shared_layers")?.unwrap_or(0);
        ensure!(
            borrowers < common.layers,
            Unsupported,
            "config.json: num_kv_shared_layers is {borrowers} of {} layers; none is left to have keys and values",
            common.layers
        );
        Ok(Recipe {
            windows,
            sliding,
            full,
            ropes,
            borrows_from: common.layers - borrowers,
            borrower_inner: if c.bool_or("use_double_wide_mlp", false)? { 2 * common.inner } else { common.inner },
            experts: c.bool_or("enable_moe_block", false)?,
            beside: if c.get("hidden_size_per_layer_input").is_none() { Some(256) } else { c.count("hidden_size_per_layer_input")? },
        })
    }

    fn layer(
        &self,
        c: &Config<'_>,
        common: &Common,
        d: &mut Declarations,
        i: usize,
        lenders: &mut [Option<Attention>; 2],
    ) -> Result<Layer> {
        let norm = |d: &mut Declarations, part: &str| RmsNorm::new(d, &common.name(i, part), common.hidden, common.eps, 0.0);
        let name = common.name(i, "self_attn");
        let window = self.windows[i];
        let dims = AttentionDims { window, ..if window.is_some() { self.sliding } else { self.full } };
        let lender = &mut lenders[usize::from(window.is_none())];
        let attention = if i < self.borrows_from {
            lender.insert(Attention::new(d, &name, dims)).clone()
        } else {
            let Some(from) = lender else {
                bail!(
                    Mismatch,
                    "config.json: layer {i} borrows keys and values (num_kv_shared_layers), but no earlier layer is of its kind (layer_types)"
                )
            };
            Attention::borrowing(d, &name, dims, from)
        };
        let inner = if i < self.borrows_from { common.inner } else { self.borrower_inner };
        let mlp = GatedMlp::new(d, &common.name(i, "mlp"), common.hidden, inner, common.act, false);
        let before = norm(d, "pre_feedforward_layernorm");
        let (mlp_pre, mlp): (_, Box<dyn FeedForward>) = match self.experts {
            true => (None, Box::new(SideBySide::new(c, common, d, i, (before, mlp))?)),
            false => (Some(before), Box::new(mlp)),
        };
        let block = Block {
            attention_pre: Some(norm(d, "input_layernorm")),
            attention,
            attention_post: Some(norm(d, "post_attention_layernorm")),
            mlp_pre,
            mlp,
            mlp_post: Some(norm(d, "post_feedforward_layernorm")),
        };
        let beside = self.beside.map(|width| Beside {
            gate: Linear::new(d, &common.name(i, "per_layer_input_gate"), width, common.hidden, false),
            act: common.act,
            first: i * width,
            width,
            table: self.ropes.count(),
            out: Linear::new(d, &common.name(i, "per_layer_projection"), common.hidden, width, false),
            norm: norm(d, "post_per_layer_input_norm"),
        });
        Ok(Layer { block, beside, factor: d.vector(&common.name(i, "layer_scalar"), 1, 0.0) })
    }
}

/// One layer.
struct Layer {
    block: Block<Attention, Box<dyn FeedForward>>,
    beside: Option<Beside>,
    factor: WeightId,
}

impl TransformerLayer for Layer {
    fn record(&self, t: &mut Tape<'_>, x: Value, tables: &[Value]) -> Value {
        let mut x = self.block.record(t, x, tables);
        if let Some(beside) = &self.beside {
            x = beside.record(t, x, tables);
        }
        t.op(ScaleBy { x, factor: self.factor, y: Value::NONE })
    }
}

/// The end of a layer that reads beside the residual: `x + norm(out(act(gate x) * side))`.
struct Beside {
    gate: Linear,
    act: Activation,
    /// Columns of this layer.
    first: usize,
    width: usize,
    /// Where layers find what [`TokenSides`] recorded.
    table: usize,
    out: Linear,
    norm: RmsNorm,
}

impl Beside {
    fn record(&self, t: &mut Tape<'_>, x: Value, tables: &[Value]) -> Value {
        let gate = self.gate.record(t, x);
        let side = t.slice(tables[self.table], self.first, self.width);
        let h = t.op(ActMul { act: self.act, gate, up: side, y: Value::NONE });
        let h = self.out.record(t, h);
        let h = self.norm.record(t, h);
        t.add(x, h)
    }
}

/// What all layers read beside the residual: of each token an embedding of its own, and a product of its usual one, averaged.
struct TokenSides {
    table: WeightId,
    width: usize,
    project: Linear,
    /// On the product.
    factor: f32,
    norm: RmsNorm,
}

impl TokenSides {
    fn new(c: &Config<'_>, common: &Common, d: &mut Declarations, width: usize) -> Result<TokenSides> {
        let rows = c.usize_or("vocab_size_per_layer_input", common.vocab)?;
        ensure!(rows >= common.vocab, Mismatch, "config.json: vocab_size_per_layer_input is {rows}, vocab_size is {}", common.vocab);
        let (name, all) = (|part: &str| format!("{}.{part}", common.root), common.layers * width);
        Ok(TokenSides {
            table: d.rows(&name("embed_tokens_per_layer.weight"), rows, all),
            width,
            project: Linear::new(d, &name("per_layer_model_projection"), all, common.hidden, false),
            factor: (common.hidden as f32).sqrt().recip(),
            norm: RmsNorm::per_head(d, &name("per_layer_projection_norm"), width, common.eps, 0.0),
        })
    }
}

impl Entry for TokenSides {
    fn record(&self, _: &mut Tape<'_>, x: Value) -> Value {
        x
    }

    fn beside(&self, t: &mut Tape<'_>, x: Value) -> Value {
        let h = self.project.record(t, x);
        let h = t.scale(h, self.factor);
        let h = self.norm.record(t, h);
        let token = t.op(Embed { table: self.table, factor: (self.width as f32).sqrt(), y: Value::NONE });
        let both = t.add(h, token);
        t.scale(both, std::f32::consts::FRAC_1_SQRT_2)
    }
}

/// An MLP and routed experts over the same residual, each between norms of its own.
struct SideBySide {
    mlp: (RmsNorm, GatedMlp, RmsNorm),
    /// Before the router, with the stored scale as its weight.
    route_pre: RmsNorm,
    route_factor: f32,
    router: Router,
    experts: (RmsNorm, Experts, RmsNorm),
}

impl SideBySide {
    fn new(c: &Config<'_>, common: &Common, d: &mut Declarations, i: usize, (before, mlp): (RmsNorm, GatedMlp)) -> Result<SideBySide> {
        let name = |part: &str| common.name(i, part);
        let norm = |d: &mut Declarations, part: &str| RmsNorm::new(d, &name(part), common.hidden, common.eps, 0.0);
        let dims = sizes_picking(c, common, "num_experts", "moe_intermediate_size", "top_k_experts")?;
        let logits = Linear::new(d, &name("router.proj"), dims.count, common.hidden, false);
        let gain = Some(d.vector(&name("router.per_expert_scale"), dims.count, 0.0));
        let stacking = Stacking { input_major: false, alternating: false, bias: false };
        Ok(SideBySide {
            mlp: (before, mlp, norm(d, "post_feedforward_layernorm_1")),
            route_pre: RmsNorm::with(Some(d.vector(&name("router.scale"), common.hidden, 0.0)), 0, common.eps),
            route_factor: (common.hidden as f32).sqrt().recip(),
            router: Router { gain, ..Router::softmax(logits, dims.top_k) },
            experts: (
                norm(d, "pre_feedforward_layernorm_2"),
                Experts::stacked(d, &name("experts.gate_up_proj"), &name("experts.down_proj"), stacking, dims),
                norm(d, "post_feedforward_layernorm_2"),
            ),
        })
    }
}

impl FeedForward for SideBySide {
    fn record(&self, t: &mut Tape<'_>, x: Value) -> Value {
        let (before, mlp, after) = &self.mlp;
        let h = before.record(t, x);
        let h = mlp.record(t, h);
        let dense = after.record(t, h);
        let h = self.route_pre.record(t, x);
        let h = t.scale(h, self.route_factor);
        let route = self.router.record(t, h);
        let (before, experts, after) = &self.experts;
        let h = before.record(t, x);
        let answers = experts.record(t, h, route);
        let none = Value::NONE;
        let h = t.op(Combine { x: answers, route, shared: none, gate: none, identity: none, experts: experts.count(), y: none });
        let routed = after.record(t, h);
        t.add(dense, routed)
    }
}
