//! Latent attention over positions an indexer selects (DeepSeek Sparse Attention, 2025), with keys pooled over groups of positions
//! (GLM-5.3). A layer without an indexer of its own takes the selection of the layer before.

use super::{Linear, Mla, MlaDims};
use crate::circuit::Tape;
use crate::ops::{IndexSelect, Indexer, Join, KvType, Norm, NormKind, PoolGroups, RecordWrite, Records, Value, WeightId};
use crate::weights::{Declarations, Part};

/// Sizes of an indexer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PooledIndexDims {
    /// Heads.
    pub heads: usize,
    /// Elements of a key.
    pub dim: usize,
    /// Positions of a group.
    pub every: usize,
    /// Groups to keep.
    pub top_k: usize,
}

/// Scores groups of positions.
#[derive(Clone, Debug)]
struct PooledIndex {
    dims: PooledIndexDims,
    q: Linear,
    weights: Linear,
    k: Linear,
    k_norm: (WeightId, WeightId),
    gate: Linear,
    bias: WeightId,
    source: Records,
    keys: Records,
}

/// Of the layer norm on index keys.
const KEY_EPS: f32 = 1e-6;

impl PooledIndex {
    fn new(d: &mut Declarations, name: &str, hidden: usize, q_rank: usize, dims: PooledIndexDims) -> PooledIndex {
        let part = |p: &str| format!("{name}.{p}");
        let records = |d: &mut Declarations, width: usize, every: usize| {
            let dtype = KvType::F32;
            Records { state: d.kv(Records::spec(width, every, dtype)), width, every, dtype }
        };
        let ape = part("index_kpool_compress_ape");
        PooledIndex {
            q: Linear::new(d, &part("wq_b"), dims.heads * dims.dim, q_rank, false),
            weights: Linear::new(d, &part("weights_proj"), dims.heads, hidden, false),
            k: Linear::new(d, &part("wk"), dims.dim, hidden, false),
            k_norm: (d.vector(&part("k_norm.weight"), dims.dim, 0.0), d.vector(&part("k_norm.bias"), dims.dim, 0.0)),
            gate: Linear { weight: d.matrix(&part("index_kpool_compress_gate"), dims.dim, hidden), bias: None },
            bias: d.vector_parts(&ape, vec![Part::flat(&*ape, [1, dims.every, dims.dim])], 0.0),
            source: records(d, 2 * dims.dim, 1),
            keys: records(d, dims.dim, dims.every),
            dims,
        }
    }

    /// Records the selection, `[rows, top_k * every + every - 1]` positions.
    fn record(&self, t: &mut Tape<'_>, x: Value, q_latent: Value) -> Value {
        let k = self.k.record(t, x);
        let (weight, bias) = (Some(self.k_norm.0), Some(self.k_norm.1));
        let k = t.op(Norm { kind: NormKind::Layer, x: k, weight, bias, group: 0, eps: KEY_EPS, y: Value::NONE });
        let gate = self.gate.record(t, x);
        let inputs = t.op(Join { parts: vec![k, gate], y: Value::NONE });
        t.record(RecordWrite { x: inputs, records: self.source });
        let key = t.op(PoolGroups {
            source: self.source,
            bias: Some(self.bias),
            every: self.dims.every,
            dim: self.dims.dim,
            overlap: false,
            y: Value::NONE,
        });
        t.record(RecordWrite { x: key, records: self.keys });
        let q = self.q.record(t, q_latent);
        let weights = self.weights.record(t, x);
        let indexer = Indexer { q, weights, keys: self.keys };
        t.op(IndexSelect { indexer, top_k: self.dims.top_k, blocks: Value::NONE, block: 0, positions: true, y: Value::NONE })
    }
}

/// One layer.
#[derive(Clone, Debug)]
pub struct SparseMla {
    mla: Mla,
    index: Option<PooledIndex>,
}

impl SparseMla {
    /// Tensors of [`Mla::new`], and `<name>.indexer.*` where the layer has an indexer. `q_rank` is the width its queries come from.
    pub fn new(d: &mut Declarations, name: &str, dims: MlaDims, q_rank: usize, index: Option<PooledIndexDims>) -> SparseMla {
        let hidden = dims.hidden;
        SparseMla {
            mla: Mla::new(d, name, dims),
            index: index.map(|index| PooledIndex::new(d, &format!("{name}.indexer"), hidden, q_rank, index)),
        }
    }

    /// Records the layer; `selection` is the last one on entry and this layer's on return.
    pub fn record(&self, t: &mut Tape<'_>, x: Value, ropes: &[Value], selection: &mut Value) -> Value {
        let parts = self.mla.queries(t, x, ropes);
        if let Some(index) = &self.index {
            *selection = index.record(t, x, parts.q_latent);
        }
        self.mla.attend(t, x, parts, *selection)
    }
}
