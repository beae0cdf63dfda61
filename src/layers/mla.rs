//! Multi-head latent attention (DeepSeek-V2, 2024): keys and values of all heads are linear in one small latent a token.
//!
//! The absorbed form is what runs: queries are moved into the latent space by each head's key matrix, the cache holds
//! `[latent | rotated key]` once a token, and outputs leave through each head's value matrix. Prompts and single
//! tokens take the same form, so that a prompt cut any way gives the same bits. [`MlaForm::Expanded`] keeps each head's keys and
//! values instead: larger, and fewer operations a key.

use super::{Config, Linear, Mixer, RmsNorm};
use crate::circuit::Tape;
use crate::ensure;
use crate::error::Result;
use crate::ops::{
    self, Activation, CacheWrite, ExpandHeads, HeadLinear, Join, KvSpec, KvType, PositionScale, RecordWrite, Records, RopeStyle, RopeTail,
    SharedAttention, StateId, Value, WeightId,
};
use crate::weights::{Declarations, Part};

/// What the cache holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MlaForm {
    /// One latent row a token, shared by all heads.
    Latent,
    /// Keys and values of each head.
    Expanded,
}

/// Sizes and switches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MlaDims {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Heads.
    pub heads: usize,
    /// Width queries pass through; none takes them straight from the stream.
    pub q_rank: Option<usize>,
    /// Width of the latent.
    pub kv_rank: usize,
    /// Elements of a head's key that come from the latent.
    pub nope_dim: usize,
    /// Elements of a key that all heads share, behind those; may be 0.
    pub rope_dim: usize,
    /// Elements of a head's value.
    pub value_dim: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// Which rotary table turns the shared elements, and how; none leaves them as they are.
    pub rope: Option<(usize, RopeStyle)>,
    /// Of the norms on both latents.
    pub eps: f32,
    /// Biases on the products from and to the stream.
    pub bias: bool,
    /// Factor on queries (LongCat-Flash).
    pub query_factor: f32,
    /// Factor on the normed latent (LongCat-Flash).
    pub latent_factor: f32,
    /// Queries grow with the position: strength and trained length (Mistral Small 4).
    pub position_scale: Option<(f32, usize)>,
    /// The output passes a gate `sigmoid(g_proj x)` before `o_proj` (Kimi K3).
    pub output_gate: bool,
    /// What the cache holds.
    pub form: MlaForm,
    /// Element type of the cache.
    pub kv_type: KvType,
}

/// Most heads: each has matrices of its own, and a count beyond this would only fill memory with names.
pub const MOST_HEADS: usize = 4096;

impl MlaDims {
    /// Reads the names that DeepSeek's configs established; no rotation yet, scale `(nope + rope)^-1/2`.
    pub fn read(c: &Config<'_>, kv_type: KvType) -> Result<MlaDims> {
        let (nope_dim, rope_dim) = (c.usize("qk_nope_head_dim")?, c.count("qk_rope_head_dim")?.unwrap_or(0));
        let heads = c.usize("num_attention_heads")?;
        ensure!(heads <= MOST_HEADS, LimitExceeded, "config.json: num_attention_heads is {heads}; at most {MOST_HEADS} are possible");
        Ok(MlaDims {
            hidden: c.usize("hidden_size")?,
            heads,
            q_rank: c.count("q_lora_rank")?,
            kv_rank: c.usize("kv_lora_rank")?,
            nope_dim,
            rope_dim,
            value_dim: c.usize("v_head_dim")?,
            scale: ((nope_dim + rope_dim) as f64).powf(-0.5) as f32,
            rope: None,
            eps: 1e-6,
            bias: c.bool_or("attention_bias", false)?,
            query_factor: 1.0,
            latent_factor: 1.0,
            position_scale: None,
            output_gate: false,
            form: MlaForm::Latent,
            kv_type,
        })
    }

    /// The factor YaRN puts on the scores: `(0.1 mscale_all_dim ln factor + 1)^2`, where the config has `mscale_all_dim`.
    pub fn yarn_scale(c: &Config<'_>) -> Result<f64> {
        let Some(o) = c.opt_object("rope_parameters")?.or(c.opt_object("rope_scaling")?) else { return Ok(1.0) };
        let kind = o.opt_str("rope_type")?.or(o.opt_str("type")?).unwrap_or("default");
        let (factor, all) = (o.f64_or("factor", 1.0)?, o.f64_or("mscale_all_dim", 0.0)?);
        if kind == "default" || all == 0.0 || factor <= 1.0 {
            return Ok(1.0);
        }
        Ok((0.1 * all * factor.ln() + 1.0).powi(2))
    }

    fn qk_dim(&self) -> usize {
        self.nope_dim + self.rope_dim
    }
}

/// `kv_b_proj`, cut as the cache's form wants it.
#[derive(Clone, Copy, Debug)]
enum KvB {
    /// Of each head its key rows, transposed, and its value rows.
    Heads { into: WeightId, out_of: WeightId },
    /// As it is.
    Whole(WeightId),
}

impl KvB {
    fn new(d: &mut Declarations, tensor: &str, dims: &MlaDims) -> KvB {
        let (nope, value, rank) = (dims.nope_dim, dims.value_dim, dims.kv_rank);
        let step = nope + value;
        let of = [1, dims.heads * step, rank];
        match dims.form {
            MlaForm::Expanded => KvB::Whole(d.matrix(tensor, dims.heads * step, rank)),
            MlaForm::Latent => {
                let keys = (0..dims.heads).map(|h| vec![Part::transposed(tensor, of, 0, rank).columns_from(h * step)]).collect();
                let values = (0..dims.heads).map(|h| vec![Part::slice(tensor, of, 0, value).rows_from(h * step + nope, 1)]).collect();
                KvB::Heads {
                    into: d.experts(&format!("{tensor} (keys)"), keys, nope),
                    out_of: d.experts(&format!("{tensor} (values)"), values, rank),
                }
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Cache {
    Latent(Records),
    Expanded(StateId, KvSpec),
}

/// One latent attention layer.
#[derive(Clone, Debug)]
pub struct Mla {
    dims: MlaDims,
    /// `q_a` and `kv_a` as one product where queries have a latent too, else `kv_a` alone.
    down: Linear,
    /// `q_proj`, where queries have no latent.
    q: Option<Linear>,
    q_norm: Option<RmsNorm>,
    q_b: Option<Linear>,
    kv_norm: RmsNorm,
    kv_b: KvB,
    gate: Option<Linear>,
    out: Linear,
    cache: Cache,
}

/// What [`Mla::queries`] computes from the stream.
#[derive(Clone, Copy, Debug)]
pub struct MlaParts {
    /// Normed latent of the queries; [`Value::NONE`] where there is none. Indexers read it.
    pub q_latent: Value,
    /// `[rows, heads * (nope + rope)]`, rotated.
    pub q: Value,
    /// `[rows, kv_rank]`, normed.
    pub latent: Value,
    /// `[rows, rope]`, rotated; [`Value::NONE`] where `rope_dim` is 0.
    pub shared_key: Value,
}

impl Mla {
    /// Tensors `<name>.q_a_proj`, `q_a_layernorm`, `q_b_proj` (or `q_proj`), `kv_a_proj_with_mqa`, `kv_a_layernorm`, `kv_b_proj`, `o_proj`.
    pub fn new(d: &mut Declarations, name: &str, dims: MlaDims) -> Mla {
        let part = |p: &str| format!("{name}.{p}");
        let (q_a, kv_a) = (part("q_a_proj"), part("kv_a_proj_with_mqa"));
        let kv_rows = dims.kv_rank + dims.rope_dim;
        let q_rows = dims.heads * dims.qk_dim();
        let down = match dims.q_rank {
            Some(rank) => Linear::stacked(d, &part("qkv_a"), &[(&q_a, rank), (&kv_a, kv_rows)], dims.hidden, dims.bias),
            None => Linear::new(d, &kv_a, kv_rows, dims.hidden, dims.bias),
        };
        let cache = match dims.form {
            MlaForm::Latent => {
                let (width, dtype) = (dims.kv_rank + dims.rope_dim, dims.kv_type);
                Cache::Latent(Records { state: d.kv(Records::spec(width, 1, dtype)), width, every: 1, dtype })
            }
            MlaForm::Expanded => {
                let spec = KvSpec { heads: dims.heads, key_dim: dims.qk_dim(), value_dim: dims.value_dim, dtype: dims.kv_type };
                Cache::Expanded(d.kv(spec), spec)
            }
        };
        Mla {
            down,
            q: dims.q_rank.is_none().then(|| Linear::new(d, &part("q_proj"), q_rows, dims.hidden, false)),
            q_norm: dims.q_rank.map(|rank| RmsNorm::new(d, &part("q_a_layernorm"), rank, dims.eps, 0.0)),
            q_b: dims.q_rank.map(|rank| Linear::new(d, &part("q_b_proj"), q_rows, rank, false)),
            kv_norm: RmsNorm::new(d, &part("kv_a_layernorm"), dims.kv_rank, dims.eps, 0.0),
            kv_b: KvB::new(d, &part("kv_b_proj.weight"), &dims),
            gate: dims.output_gate.then(|| Linear::new(d, &part("g_proj"), dims.heads * dims.value_dim, dims.hidden, false)),
            out: Linear::new(d, &part("o_proj"), dims.hidden, dims.heads * dims.value_dim, dims.bias),
            cache,
            dims,
        }
    }

    /// Records everything before the cache.
    pub fn queries(&self, t: &mut Tape<'_>, x: Value, ropes: &[Value]) -> MlaParts {
        let d = &self.dims;
        let down = self.down.record(t, x);
        let at = d.q_rank.unwrap_or(0);
        let mut q_latent = Value::NONE;
        let mut q = match (&self.q, &self.q_norm, &self.q_b) {
            (None, Some(norm), Some(q_b)) => {
                let rank = t.slice(down, 0, at);
                q_latent = norm.record(t, rank);
                q_b.record(t, q_latent)
            }
            (Some(q), ..) => q.record(t, x),
            _ => Value::NONE,
        };
        let latent = t.slice(down, at, d.kv_rank);
        let latent = self.kv_norm.record(t, latent);
        let latent = t.scale(latent, d.latent_factor);
        let mut shared_key = if d.rope_dim > 0 { t.slice(down, at + d.kv_rank, d.rope_dim) } else { Value::NONE };
        if let (Some((rope, style)), true) = (d.rope, d.rope_dim > 0) {
            let mut turn = |x, head_dim| t.op(RopeTail { x, table: ropes[rope], head_dim, style, inverse: false, y: Value::NONE });
            q = turn(q, d.qk_dim());
            shared_key = turn(shared_key, d.rope_dim);
        }
        if let Some((beta, original)) = d.position_scale {
            q = t.op(PositionScale { x: q, beta, original, y: Value::NONE });
        }
        MlaParts { q_latent, q, latent, shared_key }
    }

    /// Records the cache write and the attention over what the cache holds, up to `o_proj`. `selection` names the positions
    /// each query sees (see [`SharedAttention`]), for the latent form.
    pub fn attend(&self, t: &mut Tape<'_>, x: Value, parts: MlaParts, selection: Value) -> Value {
        let d = &self.dims;
        let scale = d.scale * d.query_factor;
        let a = match (&self.cache, self.kv_b) {
            (Cache::Latent(records), KvB::Heads { into, out_of }) => {
                let key = match parts.shared_key.is_some() {
                    true => t.op(Join { parts: vec![parts.latent, parts.shared_key], y: Value::NONE }),
                    false => parts.latent,
                };
                t.record(RecordWrite { x: key, records: *records });
                let q = t.op(HeadLinear { x: parts.q, q: Value::NONE, weight: into, heads: d.heads, tail: d.rope_dim, y: Value::NONE });
                let a = t.op(SharedAttention {
                    q,
                    heads: d.heads,
                    records: *records,
                    window: None,
                    selection,
                    pooled: None,
                    value_dim: d.kv_rank,
                    scale,
                    sinks: None,
                    y: Value::NONE,
                });
                t.op(HeadLinear { x: a, q: Value::NONE, weight: out_of, heads: d.heads, tail: 0, y: Value::NONE })
            }
            (Cache::Expanded(state, spec), KvB::Whole(weight)) => {
                let kv = t.op(ops::Linear { x: parts.latent, q: Value::NONE, weight, bias: None, y: Value::NONE });
                let split = t.record(ExpandHeads {
                    x: kv,
                    shared: parts.shared_key,
                    heads: d.heads,
                    key_dim: d.nope_dim,
                    value_dim: d.value_dim,
                    k: Value::NONE,
                    v: Value::NONE,
                });
                if let [k, v] = split[..] {
                    t.record(CacheWrite { k, v, state: *state, spec: *spec });
                }
                t.op(ops::Attention {
                    q: parts.q,
                    state: *state,
                    spec: *spec,
                    heads: d.heads,
                    scale,
                    window: None,
                    softcap: None,
                    sinks: None,
                    parts: Value::NONE,
                    y: Value::NONE,
                })
            }
            // `new` makes cache and matrices of one form.
            _ => Value::NONE,
        };
        let a = match &self.gate {
            Some(gate) => {
                let g = gate.record(t, x);
                t.op(ops::ActMul { act: Activation::Sigmoid, gate: g, up: a, y: Value::NONE })
            }
            None => a,
        };
        self.out.record(t, a)
    }
}

impl Mixer for Mla {
    fn record(&self, t: &mut Tape<'_>, x: Value, ropes: &[Value]) -> Value {
        let parts = self.queries(t, x, ropes);
        self.attend(t, x, parts, Value::NONE)
    }
}
