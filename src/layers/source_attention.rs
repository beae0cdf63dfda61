//! Attention over a source text (Vaswani et al., 2017): an encoder's layers see all of it, and a decoder's layers look at what the
//! encoder made of it, through keys and values that are computed once for each source.

use super::Linear;
use crate::circuit::Tape;
use crate::ops::{self, CacheWrite, KvSpec, KvType, StateId, Value};
use crate::weights::Declarations;

/// Sizes of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SourceAttentionDims {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Heads.
    pub heads: usize,
    /// Element type of cached keys and values.
    pub kv_type: KvType,
}

impl SourceAttentionDims {
    /// The pages of keys and values.
    pub fn spec(&self) -> KvSpec {
        let dim = self.hidden / self.heads;
        KvSpec { heads: self.heads, key_dim: dim, value_dim: dim, dtype: self.kv_type }
    }

    fn scale(&self) -> f32 {
        1.0 / ((self.hidden / self.heads) as f32).sqrt()
    }

    fn attend(&self, t: &mut Tape<'_>, q: Value, state: StateId) -> Value {
        t.op(ops::SourceAttention { q, state, spec: self.spec(), scale: self.scale(), y: Value::NONE })
    }
}

/// Attention inside an encoder.
#[derive(Clone, Debug)]
pub struct EncoderAttention {
    dims: SourceAttentionDims,
    qkv: Linear,
    out: Linear,
    state: StateId,
}

impl EncoderAttention {
    /// Tensors `<name>.q_proj`, `k_proj`, `v_proj`, `out_proj`, with biases. Layers run one after another, so `state`, for keys and
    /// values of the source, may serve all of them.
    pub fn new(d: &mut Declarations, name: &str, dims: SourceAttentionDims, state: StateId) -> EncoderAttention {
        let part = |p: &str| format!("{name}.{p}_proj");
        let parts = ["q", "k", "v"].map(part);
        let parts = parts.each_ref().map(|p| (&**p, dims.hidden));
        EncoderAttention {
            qkv: Linear::stacked(d, &format!("{name}.qkv"), &parts, dims.hidden, true),
            out: Linear::new(d, &part("out"), dims.hidden, dims.hidden, true),
            state,
            dims,
        }
    }

    /// Records the layer.
    pub fn record(&self, t: &mut Tape<'_>, x: Value) -> Value {
        let width = self.dims.hidden;
        let qkv = self.qkv.record(t, x);
        let [q, k, v] = [0, 1, 2].map(|i| t.slice(qkv, i * width, width));
        t.record(CacheWrite { k, v, state: self.state, spec: self.dims.spec() });
        let a = self.dims.attend(t, q, self.state);
        self.out.record(t, a)
    }
}

/// A decoder's attention over the encoder's output.
#[derive(Clone, Debug)]
pub struct CrossAttention {
    dims: SourceAttentionDims,
    q: Linear,
    kv: Linear,
    out: Linear,
    state: StateId,
}

impl CrossAttention {
    /// Tensors `<name>.q_proj`, `k_proj`, `v_proj`, `out_proj`, with biases.
    pub fn new(d: &mut Declarations, name: &str, dims: SourceAttentionDims) -> CrossAttention {
        let part = |p: &str| format!("{name}.{p}_proj");
        let (k, v) = (part("k"), part("v"));
        CrossAttention {
            q: Linear::new(d, &part("q"), dims.hidden, dims.hidden, true),
            kv: Linear::stacked(d, &format!("{name}.kv"), &[(&k, dims.hidden), (&v, dims.hidden)], dims.hidden, true),
            out: Linear::new(d, &part("out"), dims.hidden, dims.hidden, true),
            state: d.source_kv(dims.spec()),
            dims,
        }
    }

    /// Records, in the encoder's circuit, the keys and values of its output.
    pub fn remember(&self, t: &mut Tape<'_>, encoded: Value) {
        let kv = self.kv.record(t, encoded);
        let (k, v) = (t.slice(kv, 0, self.dims.hidden), t.slice(kv, self.dims.hidden, self.dims.hidden));
        t.record(CacheWrite { k, v, state: self.state, spec: self.dims.spec() });
    }

    /// Records the layer.
    pub fn record(&self, t: &mut Tape<'_>, x: Value) -> Value {
        let q = self.q.record(t, x);
        let a = self.dims.attend(t, q, self.state);
        self.out.record(t, a)
    }
}
