//! DeepSeek-V4: several residual streams, shared key/value rows with compressed ones beside a window, routed experts whose first
//! layers are chosen by token.
//!
//! Odd things: tensors have the vendor's names, without `model.`; `compress_ratios` says how many positions a compressed row of a
//! layer stands for (0: none), and may go on past the layers for draft heads; layers with compressed rows turn by
//! `compress_rope_theta` with YaRN but without its factor, others by `rope_theta` alone.

use super::MOST_EXPERTS;
use crate::circuit::Tape;
use crate::error::Result;
use crate::layers::{
    Compressed, CompressedDims, Config, ExpertDims, Experts, FeedForward, GatedMlp, HyperHead, HyperSite, Linear, MOST_HEADS, Moe, RmsNorm,
    RopeParameters, Ropes, Router, Streams,
};
use crate::model::{Build, Carry, Dims, Head, Model, StreamDecoder, StreamEnd, StreamLayer};
use crate::ops::{Activation, Scoring, Value};
use crate::weights::Declarations;
use crate::{bail, ensure};
use serde_json::json;

/// What V4 and V4.1 read alike.
pub(super) struct Common {
    pub dims: Dims,
    pub streams: Streams,
    pub attention: CompressedDims,
    pub experts: ExpertDims,
    pub shared: usize,
    pub eps: f32,
    pub tied: bool,
    /// Positions of each layer's groups; 0 for none.
    pub ratios: Vec<usize>,
    pub normalize: bool,
    pub scale: f32,
}

impl Common {
    pub(super) fn read(c: &Config<'_>, b: &Build<'_>) -> Result<Common> {
        c.only("hidden_act", &["silu"])?;
        c.only("scoring_func", &["sqrtsoftplus"])?;
        let (hidden, heads, layers) = (c.usize("hidden_size")?, c.usize("num_attention_heads")?, c.usize("num_hidden_layers")?);
        let (head_dim, rope_dim) = (c.usize("head_dim")?, c.usize("qk_rope_head_dim")?);
        let (out_groups, index_dim) = (c.usize("o_groups")?, c.usize_or("index_head_dim", 128)?);
        let eps = c.f64_or("rms_norm_eps", 1e-6)? as f32;
        ensure!(
            rope_dim <= head_dim && rope_dim <= index_dim,
            Mismatch,
            "config.json: qk_rope_head_dim {rope_dim} exceeds head_dim {head_dim} or index_head_dim {index_dim}"
        );
        ensure!(heads <= MOST_HEADS, LimitExceeded, "config.json: num_attention_heads is {heads}; at most {MOST_HEADS} are possible");
        ensure!(heads.is_multiple_of(out_groups), Mismatch, "config.json: {heads} heads do not split into {out_groups} groups (o_groups)");
        let (count, top_k) = (c.usize("n_routed_experts")?, c.usize("num_experts_per_tok")?);
        ensure!(
            count <= MOST_EXPERTS && top_k <= count,
            LimitExceeded,
            "config.json: {top_k} of {count} experts (n_routed_experts); at most {MOST_EXPERTS} are possible"
        );
        let limit = c.f64_or("swiglu_limit", 0.0)? as f32;
        let act = if limit > 0.0 { Activation::ClampedSilu { limit } } else { Activation::Silu };
        let mut ratios = Vec::new();
        for ratio in c.opt_numbers("compress_ratios")?.unwrap_or_default().into_iter().take(layers) {
            ensure!(ratio.fract() == 0.0 && (0.0..=65536.0).contains(&ratio), CorruptFile, "config.json: compress_ratios holds {ratio}");
            ratios.push(ratio as usize);
        }
        ensure!(
            ratios.len() == layers,
            Mismatch,
            "config.json: compress_ratios lists {} layers, num_hidden_layers is {layers}",
            ratios.len()
        );
        Ok(Common {
            dims: Dims { vocab: c.usize("vocab_size")?, hidden, layers, context: c.usize_or("max_position_embeddings", 4096)? },
            streams: Streams::read(c, hidden, eps)?,
            attention: CompressedDims {
                hidden,
                heads,
                head_dim,
                rope_dim,
                q_rank: c.usize("q_lora_rank")?,
                out_groups,
                out_rank: c.usize("o_lora_rank")?,
                window: c.usize_or("sliding_window", 128)?,
                eps,
                query_norm: true,
                index_heads: c.usize_or("index_n_heads", 64)?,
                index_dim,
                index_top_k: c.usize_or("index_topk", 512)?,
                rope: 0,
                kv_type: b.kv_type,
            },
            experts: ExpertDims { hidden, inner: c.usize("moe_intermediate_size")?, count, top_k, act },
            shared: c.count("n_shared_experts")?.unwrap_or(0),
            eps,
            tied: c.bool_or("tie_word_embeddings", false)?,
            ratios,
            normalize: c.bool_or("norm_topk_prob", true)?,
            scale: c.f64_or("routed_scaling_factor", 1.0)? as f32,
        })
    }

    /// Tables 0 (layers without compressed rows) and 1 (layers with them).
    pub(super) fn ropes(&self, c: &Config<'_>, b: &Build<'_>, d: &mut Declarations) -> Result<(Ropes, [usize; 2])> {
        let mut ropes = Ropes::default();
        let dim = self.attention.rope_dim;
        let plain = ropes.add(d, RopeParameters::plain(c.f64_or("rope_theta", 1e4)?, dim));
        // Converters may leave the published scaling out of a GGUF file.
        let published = json!({"type": "yarn", "factor": 16, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 65536});
        let scaling = c.get("rope_scaling").or(b.checkpoint.gguf().map(|_| &published));
        let scaled = json!({
            "rope_theta": c.f64_or("compress_rope_theta", 160_000.0)?,
            "rope_scaling": scaling,
            "max_position_embeddings": self.dims.context,
        });
        let scaled = RopeParameters { factor: 1.0, ..RopeParameters::read(&Config::new(&scaled)?, dim, None, b.context)? };
        let scaled = ropes.add(d, scaled);
        Ok((ropes, [plain, scaled]))
    }

    /// The feed-forward of layer `i`; chosen by token where `by_token`.
    pub(super) fn moe(&self, b: &Build<'_>, d: &mut Declarations, i: usize, by_token: bool) -> Moe {
        let name = |part: &str| format!("layers.{i}.ffn.{part}");
        let e = self.experts;
        let logits = Linear::new(d, &name("gate"), e.count, e.hidden, false);
        let (table, correction) = match by_token {
            true => (Some(d.rows(&name("gate.tid2eid"), self.dims.vocab, e.top_k)), None),
            false => {
                let other = name("gate.e_score_correction_bias");
                let bias = if b.shape(&other).is_some() { other } else { name("gate.bias") };
                (None, Some(d.vector(&bias, e.count, 0.0)))
            }
        };
        let router = Router {
            scoring: Scoring::SqrtSoftplus,
            table,
            correction,
            normalize: self.normalize && e.top_k > 1,
            scale: self.scale,
            ..Router::softmax(logits, e.top_k)
        };
        let experts = Experts::separate(d, &name("experts"), Some("w1"), "w3", "w2", e);
        let inner = self.shared * e.inner;
        let shared =
            (self.shared > 0).then(|| GatedMlp::named(d, &name("shared_experts"), ["w1", "w3", "w2"], e.hidden, inner, e.act, false));
        Moe { shared, ..Moe::new(router, experts) }
    }
}

struct Layer {
    streams: Streams,
    attention_site: HyperSite,
    attention_norm: RmsNorm,
    attention: Compressed,
    mlp_site: HyperSite,
    mlp_norm: RmsNorm,
    mlp: Moe,
}

impl StreamLayer for Layer {
    fn record(&self, t: &mut Tape<'_>, carry: &mut Carry, ropes: &[Value]) {
        let s = &self.streams;
        let mix = self.attention_site.mix(t, carry.x);
        let h = s.collapse(t, carry.x, mix);
        let h = self.attention_norm.record(t, h);
        let h = self.attention.record(t, h, ropes);
        carry.x = s.expand(t, h, carry.x, mix);
        let mix = self.mlp_site.mix(t, carry.x);
        let h = s.collapse(t, carry.x, mix);
        let h = self.mlp_norm.record(t, h);
        let h = self.mlp.record(t, h);
        carry.x = s.expand(t, h, carry.x, mix);
    }
}

pub(super) fn build(c: &Config<'_>, b: &Build<'_>, d: &mut Declarations) -> Result<Box<dyn Model>> {
    let common = Common::read(c, b)?;
    let (ropes, [plain, scaled]) = common.ropes(c, b, d)?;
    let by_token = c.count("num_hash_layers")?.unwrap_or(0);
    let mut group_ropes: Vec<(usize, usize)> = Vec::new();
    let mut layers: Vec<Box<dyn StreamLayer>> = Vec::new();
    for i in 0..common.dims.layers {
        let name = |part: &str| format!("layers.{i}.{part}");
        let every = Some(common.ratios[i]).filter(|r| *r > 0);
        if every == Some(1) {
            bail!(Unsupported, "config.json: compress_ratios: layer {i} has groups of one position");
        }
        // Group tables stand behind the two plain ones.
        let group = match every {
            Some(every) => group_ropes.iter().position(|g| g.1 == every).unwrap_or_else(|| {
                group_ropes.push((scaled, every));
                group_ropes.len() - 1
            }),
            None => 0,
        };
        let dims = CompressedDims { rope: if every.is_some() { scaled } else { plain }, ..common.attention };
        layers.push(Box::new(Layer {
            streams: common.streams,
            attention_site: HyperSite::new(d, &name("hc_attn"), common.streams),
            attention_norm: RmsNorm::new(d, &name("attn_norm"), common.dims.hidden, common.eps, 0.0),
            attention: Compressed::new(d, &name("attn"), dims, every, ropes.count() + group),
            mlp_site: HyperSite::new(d, &name("hc_ffn"), common.streams),
            mlp_norm: RmsNorm::new(d, &name("ffn_norm"), common.dims.hidden, common.eps, 0.0),
            mlp: common.moe(b, d, i, i < by_token),
        }));
    }
    Ok(Box::new(StreamDecoder {
        head: Head::new(d, "embed.weight", "head", common.dims.vocab, common.dims.hidden, common.tied),
        streams: common.streams,
        ropes,
        group_ropes,
        history: None,
        layers,
        end: StreamEnd::Weighted(HyperHead::new(d, "hc_head", common.streams)),
        norm: Some(RmsNorm::new(d, "norm", common.dims.hidden, common.eps, 0.0)),
        dims: common.dims,
    }))
}
