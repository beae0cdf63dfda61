//! DeepSeek-V4.1's attention: as V4's ([`Compressed`]), but compressed rows, index keys and selections are made by some layers and
//! used by those after them.
//!
//! Index keys are linear in the compressed latents. One layer also picks blocks of rows, and later indexers choose inside them.

use super::{Compressed, CompressedDims, Linear, RmsNorm};
use crate::circuit::Tape;
use crate::ops::{IndexBlocks, IndexSelect, Indexer, KvType, PoolGroups, Pooled, RecordWrite, Records, RopeStyle, RopeTail, Value};
use crate::weights::Declarations;

/// Where compressed rows and their index keys are.
#[derive(Clone, Copy, Debug)]
pub struct RowSource {
    /// Rows.
    pub rows: Records,
    /// Index keys.
    pub keys: Records,
}

/// Makes rows and keys.
#[derive(Clone, Debug)]
struct Compressor {
    inputs: Linear,
    /// Inputs of groups of more than one position.
    source: Option<Records>,
    norm: RmsNorm,
    k: Linear,
    k_norm: RmsNorm,
    rope: usize,
    to: RowSource,
}

impl Compressor {
    fn new(d: &mut Declarations, name: &str, dims: &CompressedDims, every: usize, rope: usize) -> Compressor {
        let part = |p: &str| format!("{name}.{p}");
        let (kv, gate, dim) = (part("compressor.wkv"), part("compressor.wgate"), dims.head_dim);
        let records = |d: &mut Declarations, width: usize, every: usize, dtype: KvType| Records {
            state: d.kv(Records::spec(width, every, dtype)),
            width,
            every,
            dtype,
        };
        let (inputs, source) = match every {
            1 => (Linear::new(d, &kv, dim, dims.hidden, false), None),
            _ => {
                let inputs = Linear::stacked(d, &part("compressor.inputs"), &[(&kv, dim), (&gate, dim)], dims.hidden, false);
                (inputs, Some(records(d, 2 * dim, 1, KvType::F32)))
            }
        };
        Compressor {
            inputs,
            source,
            norm: RmsNorm::new(d, &part("compressor.norm"), dim, dims.eps, 0.0),
            k: Linear::new(d, &part("indexer.wk"), dims.index_dim, dim, false),
            k_norm: RmsNorm::new(d, &part("indexer.k_norm"), dims.index_dim, dims.eps, 0.0),
            rope,
            to: RowSource { rows: records(d, dim, every, dims.kv_type), keys: records(d, dims.index_dim, every, KvType::F32) },
        }
    }

    fn record(&self, t: &mut Tape<'_>, x: Value, ropes: &[Value]) {
        let (rows, keys) = (self.to.rows, self.to.keys);
        let mut latent = self.inputs.record(t, x);
        if let Some(source) = self.source {
            t.record(RecordWrite { x: latent, records: source });
            latent = t.op(PoolGroups { source, bias: None, every: rows.every, dim: rows.width, overlap: false, y: Value::NONE });
        }
        let latent = self.norm.record(t, latent);
        self.write(t, latent, rows, ropes);
        let key = self.k.record(t, latent);
        let key = self.k_norm.record(t, key);
        self.write(t, key, keys, ropes);
    }

    /// Turns rows at their group's first position, and keeps them.
    fn write(&self, t: &mut Tape<'_>, x: Value, records: Records, ropes: &[Value]) {
        let x =
            t.op(RopeTail { x, table: ropes[self.rope], head_dim: records.width, style: RopeStyle::Pairs, inverse: false, y: Value::NONE });
        t.record(RecordWrite { x, records });
    }
}

/// What a layer does with blocks of rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Blocks {
    /// Nothing.
    No,
    /// Picks the best `top_k` blocks of `block` rows for the layers after it.
    Pick {
        /// Rows of a block.
        block: usize,
        /// Blocks to keep.
        top_k: usize,
    },
    /// Chooses inside the blocks of `block` rows that an earlier layer picked.
    Inside {
        /// Rows of a block.
        block: usize,
    },
}

/// Queries, weights and choice of an indexer.
#[derive(Clone, Debug)]
struct Index {
    q: Linear,
    weights: Linear,
    blocks: Blocks,
}

/// One layer.
#[derive(Clone, Debug)]
pub struct SharedRows {
    attention: Compressed,
    dims: CompressedDims,
    compressor: Option<Compressor>,
    index: Option<Index>,
    source: Option<RowSource>,
}

/// The roles of a layer.
#[derive(Clone, Copy, Debug)]
pub struct Roles {
    /// Positions of a group; 0 where the layer sees no compressed rows.
    pub every: usize,
    /// Whether it makes rows and keys.
    pub source: bool,
    /// Whether it has an indexer.
    pub index: bool,
    /// What that indexer does with blocks.
    pub blocks: Blocks,
    /// The rotary table of groups.
    pub group_rope: usize,
}

impl SharedRows {
    /// Tensors of [`Compressed::new`], and `compressor.*`, `indexer.*` as the roles say. `from` is the last source before this
    /// layer; the result's is [`SharedRows::source`].
    pub fn new(d: &mut Declarations, name: &str, dims: CompressedDims, roles: Roles, from: Option<RowSource>) -> SharedRows {
        let compressor = roles.source.then(|| Compressor::new(d, name, &dims, roles.every, roles.group_rope));
        let index = roles.index.then(|| Index {
            q: Linear::new(d, &format!("{name}.indexer.wq_b"), dims.index_heads * dims.index_dim, dims.q_rank, false),
            weights: Linear::new(d, &format!("{name}.indexer.weights_proj"), dims.index_heads, dims.hidden, false),
            blocks: roles.blocks,
        });
        let source = compressor.as_ref().map(|c| c.to).or(from);
        SharedRows {
            attention: Compressed::new(d, name, dims, None, 0),
            dims,
            compressor,
            index,
            source: source.filter(|_| roles.every > 0),
        }
    }

    /// Where this layer's compressed rows are.
    pub fn source(&self) -> Option<RowSource> {
        self.source
    }

    /// Records the layer. `selection` and `blocks` are the last ones on entry and this layer's on return.
    pub fn record(&self, t: &mut Tape<'_>, x: Value, ropes: &[Value], selection: &mut Value, blocks: &mut Value) -> Value {
        let (q_latent, q) = self.attention.queries(t, x, ropes);
        if let Some(compressor) = &self.compressor {
            compressor.record(t, x, ropes);
        }
        if let (Some(index), Some(source)) = (&self.index, self.source) {
            let q = index.q.record(t, q_latent);
            let table = ropes[self.dims.rope];
            let q = t.op(RopeTail { x: q, table, head_dim: self.dims.index_dim, style: RopeStyle::Pairs, inverse: false, y: Value::NONE });
            let weights = index.weights.record(t, x);
            let indexer = Indexer { q, weights, keys: source.keys };
            if let Blocks::Pick { block, top_k } = index.blocks {
                *blocks = t.op(IndexBlocks { indexer, block, top_k, y: Value::NONE });
            }
            let (among, block) = match index.blocks {
                Blocks::Inside { block } => (*blocks, block),
                _ => (Value::NONE, 0),
            };
            *selection =
                t.op(IndexSelect { indexer, top_k: self.dims.index_top_k, blocks: among, block, positions: false, y: Value::NONE });
        }
        let pooled = self.source.map(|source| Pooled { records: source.rows, selection: *selection });
        self.attention.attend(t, q, pooled, ropes)
    }
}
