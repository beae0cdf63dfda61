//! DeepSeek-V4's attention: all heads share one key/value row a token; a window of those is seen whole, and beside it rows that
//! each stand for a group of positions, all of them or those an indexer selects.
//!
//! Rows carry a rotation in their last elements that enters the values too, so outputs are turned back at the query's
//! position before they leave through a grouped low-rank product.

use super::{Linear, RmsNorm};
use crate::circuit::Tape;
use crate::ops::{
    HeadLinear, IndexSelect, Indexer, KvType, Norm, NormKind, PoolGroups, Pooled, RecordWrite, Records, RopeStyle, RopeTail,
    SharedAttention, Value, WeightId,
};
use crate::weights::{Declarations, Part};

/// Sizes and switches.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CompressedDims {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Heads.
    pub heads: usize,
    /// Elements of a head, and of a row.
    pub head_dim: usize,
    /// Elements at their end that turn.
    pub rope_dim: usize,
    /// Width queries pass through.
    pub q_rank: usize,
    /// Groups of heads in the output product, and the width of each group's result.
    pub out_groups: usize,
    /// See `out_groups`.
    pub out_rank: usize,
    /// Positions seen whole.
    pub window: usize,
    /// Of all norms.
    pub eps: f32,
    /// Whether each head of a query is normed (V4).
    pub query_norm: bool,
    /// Heads, width and choice of the indexer.
    pub index_heads: usize,
    /// See `index_heads`.
    pub index_dim: usize,
    /// See `index_heads`.
    pub index_top_k: usize,
    /// The rotary table of this layer.
    pub rope: usize,
    /// Element type of rows.
    pub kv_type: KvType,
}

/// Pools inputs of groups of positions into rows.
#[derive(Clone, Debug)]
pub struct Compressor {
    /// Values and gates as one product.
    inputs: Linear,
    bias: WeightId,
    norm: RmsNorm,
    source: Records,
    /// Index of the group's rotary table.
    rope: usize,
    rope_dim: usize,
    overlap: bool,
    rows: Records,
}

impl Compressor {
    /// Tensors `<name>.wkv`, `wgate`, `ape`, `norm`. Groups smaller than 128 overlap.
    pub fn new(d: &mut Declarations, name: &str, dims: &CompressedDims, every: usize, dim: usize, rope: usize) -> Compressor {
        let overlap = every < 128;
        let width = if overlap { 2 * dim } else { dim };
        let (kv, gate, ape) = (format!("{name}.wkv"), format!("{name}.wgate"), format!("{name}.ape"));
        let inputs = Linear::stacked(d, &format!("{name}.inputs"), &[(&kv, width), (&gate, width)], dims.hidden, false);
        let source = Records { state: d.kv(Records::spec(2 * width, 1, KvType::F32)), width: 2 * width, every: 1, dtype: KvType::F32 };
        let rows = Records { state: d.kv(Records::spec(dim, every, dims.kv_type)), width: dim, every, dtype: dims.kv_type };
        Compressor {
            inputs,
            bias: d.vector_parts(&ape, vec![Part::flat(&*ape, [1, every, width])], 0.0),
            norm: RmsNorm::new(d, &format!("{name}.norm"), dim, dims.eps, 0.0),
            source,
            rope,
            rope_dim: dims.rope_dim,
            overlap,
            rows,
        }
    }

    /// Records the pooling of the groups this batch completes, and returns where the rows are.
    pub fn record(&self, t: &mut Tape<'_>, x: Value, ropes: &[Value]) -> Records {
        let inputs = self.inputs.record(t, x);
        t.record(RecordWrite { x: inputs, records: self.source });
        let dim = self.rows.width;
        let row = t.op(PoolGroups {
            source: self.source,
            bias: Some(self.bias),
            every: self.rows.every,
            dim,
            overlap: self.overlap,
            y: Value::NONE,
        });
        let row = self.norm.record(t, row);
        debug_assert!(self.rope_dim <= dim);
        let row =
            t.op(RopeTail { x: row, table: ropes[self.rope], head_dim: dim, style: RopeStyle::Pairs, inverse: false, y: Value::NONE });
        t.record(RecordWrite { x: row, records: self.rows });
        self.rows
    }
}

/// What selects rows: queries and weights from the stream, keys by a compressor of their own.
#[derive(Clone, Debug)]
struct Index {
    compressor: Compressor,
    q: Linear,
    weights: Linear,
}

/// One layer.
#[derive(Clone, Debug)]
pub struct Compressed {
    dims: CompressedDims,
    q_a: Linear,
    q_norm: RmsNorm,
    q_b: Linear,
    kv: Linear,
    kv_norm: RmsNorm,
    sinks: WeightId,
    out_a: WeightId,
    out_b: Linear,
    rows: Records,
    compressor: Option<Compressor>,
    index: Option<Index>,
}

impl Compressed {
    /// Tensors `<name>.wq_a`, `q_norm`, `wq_b`, `wkv`, `kv_norm`, `attn_sink`, `wo_a`, `wo_b`; with groups of `every` positions
    /// `compressor.*`, and an `indexer.*` where groups are smaller than 128. `group_rope` is the index of the groups' table.
    pub fn new(d: &mut Declarations, name: &str, dims: CompressedDims, every: Option<usize>, group_rope: usize) -> Compressed {
        let part = |p: &str| format!("{name}.{p}");
        let width = dims.heads * dims.head_dim;
        let (wo_a, rank, inner) = (part("wo_a.weight"), dims.out_rank, width / dims.out_groups);
        let group = |g: usize| vec![Part::slice(&*wo_a, [1, dims.out_groups * rank, inner], 0, rank).rows_from(g * rank, 1)];
        let out_a = d.experts(&wo_a, (0..dims.out_groups).map(group).collect(), inner);
        let rows =
            Records { state: d.kv(Records::spec(dims.head_dim, 1, dims.kv_type)), width: dims.head_dim, every: 1, dtype: dims.kv_type };
        Compressed {
            q_a: Linear::new(d, &part("wq_a"), dims.q_rank, dims.hidden, false),
            q_norm: RmsNorm::new(d, &part("q_norm"), dims.q_rank, dims.eps, 0.0),
            q_b: Linear::new(d, &part("wq_b"), width, dims.q_rank, false),
            kv: Linear::new(d, &part("wkv"), dims.head_dim, dims.hidden, false),
            kv_norm: RmsNorm::new(d, &part("kv_norm"), dims.head_dim, dims.eps, 0.0),
            sinks: d.vector(&part("attn_sink"), dims.heads, 0.0),
            out_a,
            out_b: Linear::new(d, &part("wo_b"), dims.hidden, dims.out_groups * dims.out_rank, false),
            rows,
            compressor: every.map(|every| Compressor::new(d, &part("compressor"), &dims, every, dims.head_dim, group_rope)),
            index: every.filter(|every| *every < 128).map(|every| Index {
                compressor: Compressor::new(d, &part("indexer.compressor"), &dims, every, dims.index_dim, group_rope),
                q: Linear::new(d, &part("indexer.wq_b"), dims.index_heads * dims.index_dim, dims.q_rank, false),
                weights: Linear::new(d, &part("indexer.weights_proj"), dims.index_heads, dims.hidden, false),
            }),
            dims,
        }
    }

    /// Records the layer.
    pub fn record(&self, t: &mut Tape<'_>, x: Value, ropes: &[Value]) -> Value {
        let (q_latent, q) = self.queries(t, x, ropes);
        let mut pooled = None;
        if let Some(compressor) = &self.compressor {
            let records = compressor.record(t, x, ropes);
            let selection = self.index.as_ref().map_or(Value::NONE, |index| self.select(t, index, x, q_latent, ropes));
            pooled = Some(Pooled { records, selection });
        }
        self.attend(t, q, pooled, ropes)
    }

    fn turn(&self, t: &mut Tape<'_>, x: Value, head_dim: usize, ropes: &[Value], inverse: bool) -> Value {
        t.op(RopeTail { x, table: ropes[self.dims.rope], head_dim, style: RopeStyle::Pairs, inverse, y: Value::NONE })
    }

    /// The queries' latent and the queries; the batch's own rows are written.
    pub fn queries(&self, t: &mut Tape<'_>, x: Value, ropes: &[Value]) -> (Value, Value) {
        let d = &self.dims;
        let q_latent = self.q_a.record(t, x);
        let q_latent = self.q_norm.record(t, q_latent);
        let mut q = self.q_b.record(t, q_latent);
        if d.query_norm {
            q = t.op(Norm { kind: NormKind::Rms, x: q, weight: None, bias: None, group: d.head_dim, eps: d.eps, y: Value::NONE });
        }
        let q = self.turn(t, q, d.head_dim, ropes, false);
        let row = self.kv.record(t, x);
        let row = self.kv_norm.record(t, row);
        let row = self.turn(t, row, d.head_dim, ropes, false);
        t.record(RecordWrite { x: row, records: self.rows });
        (q_latent, q)
    }

    fn select(&self, t: &mut Tape<'_>, index: &Index, x: Value, q_latent: Value, ropes: &[Value]) -> Value {
        let keys = index.compressor.record(t, x, ropes);
        let q = index.q.record(t, q_latent);
        let q = self.turn(t, q, self.dims.index_dim, ropes, false);
        let weights = index.weights.record(t, x);
        let indexer = Indexer { q, weights, keys };
        t.op(IndexSelect { indexer, top_k: self.dims.index_top_k, blocks: Value::NONE, block: 0, positions: false, y: Value::NONE })
    }

    /// Attention over the window and `pooled`, and the way out.
    pub fn attend(&self, t: &mut Tape<'_>, q: Value, pooled: Option<Pooled>, ropes: &[Value]) -> Value {
        let d = &self.dims;
        let a = t.op(SharedAttention {
            q,
            heads: d.heads,
            records: self.rows,
            window: Some(d.window),
            selection: Value::NONE,
            pooled,
            value_dim: d.head_dim,
            scale: (d.head_dim as f64).powf(-0.5) as f32,
            sinks: Some(self.sinks),
            y: Value::NONE,
        });
        let a = self.turn(t, a, d.head_dim, ropes, true);
        let a = t.op(HeadLinear { x: a, q: Value::NONE, weight: self.out_a, heads: d.out_groups, tail: 0, y: Value::NONE });
        self.out_b.record(t, a)
    }
}
