//! Grouped-query attention (Ainslie et al., 2023) with the variants families differ in: biases, norms on queries and
//! keys, rotary embedding or none, windows, soft caps, sinks, gates on the output, values or whole caches borrowed.

use super::{Linear, Mixer, RmsNorm};
use crate::circuit::Tape;
use crate::ops::{
    self, ActMul, Activation, CacheWrite, HeadGate, KvSpec, KvType, Piece, Regroup, Rope, RopeStyle, StateId, Value, WeightId,
};
use crate::weights::Declarations;

/// Norm on queries and keys, before the rotation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum QkNorm {
    /// None.
    No,
    /// Over each head (Qwen 3, Gemma 3); the second number is added to the stored weight.
    PerHead(f32, f32),
    /// Over all heads at once (OLMo 2).
    Whole(f32),
}

/// A gate on the heads' outputs, before the output product; its logits are a product with the layer's input.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum HeadGating {
    /// None.
    No,
    /// One number for each head.
    PerHead(Activation),
    /// One for each element.
    PerElement(Activation),
    /// One for each element, where `q_proj` holds each head's query and then its gate (Qwen 3 Next).
    InQuery(Activation),
}

/// Where values come from.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Values {
    /// A product of their own.
    Own,
    /// As `Own`, each head then normed without weight; the number is the norm's eps (Gemma 4).
    Normed(f32),
    /// The keys before their norm and rotation, each head normed without weight; there is no `v_proj` (Gemma 4's full layers).
    Keys(f32),
}

/// Sizes and switches of an attention layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionDims {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// Keys a query sees, itself included.
    pub window: Option<usize>,
    /// Bound on the scores.
    pub softcap: Option<f32>,
    /// Biases on q, k, v.
    pub qkv_bias: bool,
    /// Bias on the output product.
    pub out_bias: bool,
    /// Norm on queries and keys.
    pub qk_norm: QkNorm,
    /// Where values come from.
    pub values: Values,
    /// A learned score for each head that only takes weight away (GPT-OSS).
    pub sinks: bool,
    /// Gate on the heads' outputs.
    pub gating: HeadGating,
    /// Which rotary table (see [`super::Ropes`]); none leaves positions to the mask.
    pub rope: Option<usize>,
    /// Element type of cached keys and values.
    pub kv_type: KvType,
}

/// Names of an attention layer's tensors, where a family has its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionNames {
    /// Norm of queries.
    pub q_norm: &'static str,
    /// Norm of keys.
    pub k_norm: &'static str,
    /// Output product.
    pub out: &'static str,
}

impl AttentionNames {
    /// What most families call them.
    pub const USUAL: AttentionNames = AttentionNames { q_norm: "q_norm", k_norm: "k_norm", out: "o_proj" };
}

/// One attention layer.
#[derive(Clone, Debug)]
pub struct Attention {
    dims: AttentionDims,
    /// Queries, keys, values, without those that come from elsewhere.
    qkv: Linear,
    q_norm: Option<RmsNorm>,
    k_norm: Option<RmsNorm>,
    v_norm: Option<RmsNorm>,
    /// Whether keys and values are those of an earlier layer.
    borrows: bool,
    sinks: Option<WeightId>,
    gate: Option<Linear>,
    out: Linear,
    state: StateId,
    spec: KvSpec,
}

impl Attention {
    /// Tensors `<name>.q_proj`, `k_proj`, `v_proj`, `o_proj`, and `q_norm`, `k_norm`, `sinks`, `g_proj` where asked for.
    pub fn new(d: &mut Declarations, name: &str, dims: AttentionDims) -> Attention {
        Attention::named(d, name, dims, AttentionNames::USUAL)
    }

    /// As [`Attention::new`] under other names.
    pub fn named(d: &mut Declarations, name: &str, dims: AttentionDims, names: AttentionNames) -> Attention {
        let (q, kv) = (dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim);
        let part = |p: &str| format!("{name}.{p}_proj");
        let q = if matches!(dims.gating, HeadGating::InQuery(_)) { 2 * q } else { q };
        let parts = [(&*part("q"), q), (&*part("k"), kv), (&*part("v"), kv)];
        let parts = if matches!(dims.values, Values::Keys(_)) { &parts[..2] } else { &parts };
        let qkv = Linear::stacked(d, &format!("{name}.qkv"), parts, dims.hidden, dims.qkv_bias);
        Attention::with_qkv(d, name, dims, qkv, names, None)
    }

    /// As [`Attention::new`] over the keys and values of an earlier layer: of `q_proj`, `k_proj`, `v_proj` only the first is there.
    pub fn borrowing(d: &mut Declarations, name: &str, dims: AttentionDims, from: &Attention) -> Attention {
        let q = Linear::new(d, &format!("{name}.q_proj"), dims.heads * dims.head_dim, dims.hidden, dims.qkv_bias);
        Attention::with_qkv(d, name, dims, q, AttentionNames::USUAL, Some(from))
    }

    /// As [`Attention::new`] with q, k and v stored as one tensor `<name>.qkv_proj` (Phi-3).
    pub fn fused(d: &mut Declarations, name: &str, dims: AttentionDims) -> Attention {
        let rows = (dims.heads + 2 * dims.kv_heads) * dims.head_dim;
        let qkv = Linear::new(d, &format!("{name}.qkv_proj"), rows, dims.hidden, dims.qkv_bias);
        Attention::with_qkv(d, name, dims, qkv, AttentionNames::USUAL, None)
    }

    fn with_qkv(
        d: &mut Declarations,
        name: &str,
        dims: AttentionDims,
        qkv: Linear,
        names: AttentionNames,
        from: Option<&Attention>,
    ) -> Attention {
        let (q, kv) = (dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim);
        let (q_norm, k_norm) = (format!("{name}.{}", names.q_norm), format!("{name}.{}", names.k_norm));
        let mut norm = |name: &str, width: usize| match dims.qk_norm {
            QkNorm::No => None,
            QkNorm::PerHead(eps, add) => Some(RmsNorm::per_head(d, name, dims.head_dim, eps, add)),
            QkNorm::Whole(eps) => Some(RmsNorm::new(d, name, width, eps, 0.0)),
        };
        let q_norm = norm(&q_norm, q);
        let k_norm = if from.is_some() { None } else { norm(&k_norm, kv) };
        let v_norm = match dims.values {
            Values::Own => None,
            Values::Normed(eps) | Values::Keys(eps) => Some(RmsNorm::with(None, dims.head_dim, eps)),
        };
        let sinks = dims.sinks.then(|| d.vector(&format!("{name}.sinks"), dims.heads, 0.0));
        let gates = match dims.gating {
            HeadGating::No | HeadGating::InQuery(_) => None,
            HeadGating::PerHead(_) => Some(dims.heads),
            HeadGating::PerElement(_) => Some(q),
        };
        let gate = gates.map(|n| Linear::new(d, &format!("{name}.g_proj"), n, dims.hidden, false));
        let out = Linear::new(d, &format!("{name}.{}", names.out), dims.hidden, q, dims.out_bias);
        let spec = KvSpec { heads: dims.kv_heads, key_dim: dims.head_dim, value_dim: dims.head_dim, dtype: dims.kv_type };
        let (state, spec) = from.map_or_else(|| (d.kv(spec), spec), |from| (from.state, from.spec));
        Attention { dims, qkv, q_norm, k_norm, v_norm, borrows: from.is_some(), sinks, gate, out, state, spec }
    }

    /// Records the layer; `ropes` are the tables of this circuit.
    pub fn record(&self, t: &mut Tape<'_>, x: Value, ropes: &[Value]) -> Value {
        let d = &self.dims;
        let (q_width, kv_width) = (d.heads * d.head_dim, d.kv_heads * d.head_dim);
        let qkv = self.qkv.record(t, x);
        let mut gate = self.gate.as_ref().map(|gate| gate.record(t, x));
        let q_rows = if matches!(d.gating, HeadGating::InQuery(_)) { 2 * q_width } else { q_width };
        let mut q = t.slice(qkv, 0, q_rows);
        let mut own = (!self.borrows).then(|| {
            let k = t.slice(qkv, q_rows, kv_width);
            (k, if matches!(d.values, Values::Keys(_)) { k } else { t.slice(qkv, q_rows + kv_width, kv_width) })
        });
        if q_rows > q_width {
            let piece = |first| Piece { first, width: d.head_dim, stride: 2 * d.head_dim, count: d.heads };
            let both = t.op(Regroup { x: q, pieces: vec![piece(0), piece(d.head_dim)], y: Value::NONE });
            q = t.slice(both, 0, q_width);
            gate = Some(t.slice(both, q_width, q_width));
        }
        let normed = |t: &mut Tape<'_>, norm: &Option<RmsNorm>, x| norm.as_ref().map_or(x, |norm| norm.record(t, x));
        q = normed(t, &self.q_norm, q);
        if let Some((k, v)) = &mut own {
            *k = normed(t, &self.k_norm, *k);
            *v = normed(t, &self.v_norm, *v);
        }
        if let Some(rope) = d.rope {
            let mut turn = |x| t.op(Rope { x, table: ropes[rope], head_dim: d.head_dim, style: RopeStyle::Halves, y: Value::NONE });
            q = turn(q);
            if let Some((k, _)) = &mut own {
                *k = turn(*k);
            }
        }
        if let Some((k, v)) = own {
            t.record(CacheWrite { k, v, state: self.state, spec: self.spec });
        }
        let mut a = t.op(ops::Attention {
            q,
            state: self.state,
            spec: self.spec,
            heads: d.heads,
            scale: d.scale,
            window: d.window,
            softcap: d.softcap,
            sinks: self.sinks,
            parts: Value::NONE,
            y: Value::NONE,
        });
        if let Some(gate) = gate {
            a = match d.gating {
                HeadGating::No => a,
                HeadGating::PerHead(act) => t.op(HeadGate { act, gate, x: a, y: Value::NONE }),
                HeadGating::PerElement(act) | HeadGating::InQuery(act) => t.op(ActMul { act, gate, up: a, y: Value::NONE }),
            };
        }
        self.out.record(t, a)
    }
}

impl Mixer for Attention {
    fn record(&self, t: &mut Tape<'_>, x: Value, ropes: &[Value]) -> Value {
        Attention::record(self, t, x, ropes)
    }
}
