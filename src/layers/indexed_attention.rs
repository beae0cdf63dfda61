//! Grouped-query attention over a budget of positions (Qwen 4 Exp's QSA): an indexer scores blocks of positions by the mean of small
//! keys, and a query sees the best blocks and the positions after the last whole one.

use super::{AttentionDims, Linear, Mixer, RmsNorm};
use crate::circuit::Tape;
use crate::ops::{
    ActMul, Activation, IndexSelect, Indexer, Join, KvType, MeanGroups, Piece, RecordWrite, Records, Regroup, Rope, RopeStyle,
    SelectedAttention, Value,
};
use crate::weights::Declarations;

/// Sizes and switches. Of the attention's, heads, widths, biases, scale and cache count; queries carry gates and are normed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct IndexedAttentionDims {
    /// The attention proper.
    pub attention: AttentionDims,
    /// Heads of the indexer.
    pub index_heads: usize,
    /// Elements of an index key.
    pub index_dim: usize,
    /// Positions of a block.
    pub every: usize,
    /// Blocks to see.
    pub top_k: usize,
    /// Of all norms.
    pub eps: f32,
    /// Added to the norms' stored weights.
    pub norm_add: f32,
    /// Rotary table at positions.
    pub rope: usize,
    /// Rotary table at the first position of a block.
    pub block_rope: usize,
}

/// One layer.
#[derive(Clone, Debug)]
pub struct IndexedAttention {
    dims: IndexedAttentionDims,
    qkv: Linear,
    q_norm: RmsNorm,
    k_norm: RmsNorm,
    out: Linear,
    /// Keys and values.
    cache: Records,
    index_qk: Linear,
    index_q_norm: RmsNorm,
    index_k_norm: RmsNorm,
    /// Index keys of positions, and of blocks.
    index_cache: Records,
    index_blocks: Records,
}

fn records(d: &mut Declarations, width: usize, every: usize, dtype: KvType) -> Records {
    Records { state: d.kv(Records::spec(width, every, dtype)), width, every, dtype }
}

impl IndexedAttention {
    /// Tensors `<name>.q_proj` (each head's query, then its gate), `k_proj`, `v_proj`, `o_proj`, `q_norm`, `k_norm`, and
    /// `<name>.indexer.index_qk_proj`, `q_layernorm`, `k_layernorm`.
    pub fn new(d: &mut Declarations, name: &str, dims: IndexedAttentionDims) -> IndexedAttention {
        let a = &dims.attention;
        let part = |p: &str| format!("{name}.{p}");
        let (q, kv) = (a.heads * a.head_dim, a.kv_heads * a.head_dim);
        let parts = [(&*part("q_proj"), 2 * q), (&*part("k_proj"), kv), (&*part("v_proj"), kv)];
        let norm = |d: &mut Declarations, p: &str, dim| RmsNorm::per_head(d, &part(p), dim, dims.eps, dims.norm_add);
        IndexedAttention {
            qkv: Linear::stacked(d, &part("qkv"), &parts, a.hidden, a.qkv_bias),
            q_norm: norm(d, "q_norm", a.head_dim),
            k_norm: norm(d, "k_norm", a.head_dim),
            out: Linear::new(d, &part("o_proj"), a.hidden, q, a.out_bias),
            cache: records(d, 2 * kv, 1, a.kv_type),
            index_qk: Linear::new(d, &part("indexer.index_qk_proj"), (dims.index_heads + 1) * dims.index_dim, a.hidden, false),
            index_q_norm: norm(d, "indexer.q_layernorm", dims.index_dim),
            index_k_norm: norm(d, "indexer.k_layernorm", dims.index_dim),
            index_cache: records(d, dims.index_dim, 1, KvType::F32),
            index_blocks: records(d, dims.index_dim, dims.every, a.kv_type),
            dims,
        }
    }

    /// Records the indexer: the positions each row sees.
    fn select(&self, t: &mut Tape<'_>, x: Value, ropes: &[Value]) -> Value {
        let d = &self.dims;
        let turn = |t: &mut Tape<'_>, x, table: usize| {
            t.op(Rope { x, table: ropes[table], head_dim: d.index_dim, style: RopeStyle::Halves, y: Value::NONE })
        };
        let qk = self.index_qk.record(t, x);
        let q = t.slice(qk, 0, d.index_heads * d.index_dim);
        let k = t.slice(qk, d.index_heads * d.index_dim, d.index_dim);
        let q = self.index_q_norm.record(t, q);
        let q = turn(t, q, d.rope);
        t.record(RecordWrite { x: k, records: self.index_cache });
        let block = t.op(MeanGroups { source: self.index_cache, every: d.every, y: Value::NONE });
        let block = self.index_k_norm.record(t, block);
        let block = turn(t, block, d.block_rope);
        t.record(RecordWrite { x: block, records: self.index_blocks });
        let indexer = Indexer { q, weights: Value::NONE, keys: self.index_blocks };
        t.op(IndexSelect { indexer, top_k: d.top_k, blocks: Value::NONE, block: 0, positions: true, y: Value::NONE })
    }
}

impl Mixer for IndexedAttention {
    fn record(&self, t: &mut Tape<'_>, x: Value, ropes: &[Value]) -> Value {
        let a = &self.dims.attention;
        let (q_width, kv_width) = (a.heads * a.head_dim, a.kv_heads * a.head_dim);
        let selection = self.select(t, x, ropes);
        let qkv = self.qkv.record(t, x);
        let q = t.slice(qkv, 0, 2 * q_width);
        let k = t.slice(qkv, 2 * q_width, kv_width);
        let v = t.slice(qkv, 2 * q_width + kv_width, kv_width);
        let piece = |first| Piece { first, width: a.head_dim, stride: 2 * a.head_dim, count: a.heads };
        let both = t.op(Regroup { x: q, pieces: vec![piece(0), piece(a.head_dim)], y: Value::NONE });
        let (q, gate) = (t.slice(both, 0, q_width), t.slice(both, q_width, q_width));
        let (q, k) = (self.q_norm.record(t, q), self.k_norm.record(t, k));
        let mut turn = |x| t.op(Rope { x, table: ropes[self.dims.rope], head_dim: a.head_dim, style: RopeStyle::Halves, y: Value::NONE });
        let (q, k) = (turn(q), turn(k));
        let kv = t.op(Join { parts: vec![k, v], y: Value::NONE });
        t.record(RecordWrite { x: kv, records: self.cache });
        let h = t.op(SelectedAttention {
            q,
            heads: a.heads,
            kv_heads: a.kv_heads,
            key_dim: a.head_dim,
            value_dim: a.head_dim,
            records: self.cache,
            selection,
            scale: a.scale,
            y: Value::NONE,
        });
        let h = t.op(ActMul { act: Activation::Sigmoid, gate, up: h, y: Value::NONE });
        self.out.record(t, h)
    }
}
