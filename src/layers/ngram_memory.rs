//! A memory of n-grams (Qwen 4 Exp's per-layer embeddings): hashes of the last tokens choose rows of large tables, and each residual
//! stream takes their projection in through a gate; a short convolution adds what the neighbours took.

use super::{CausalConv, Linear, RmsNorm};
use crate::circuit::Tape;
use crate::ensure;
use crate::error::Result;
use crate::ops::{Lookup, NgramHash, NgramRows, NgramTable, Records, StreamGate, Value, WeightId};
use crate::weights::{Declarations, Part};

/// Sizes and tables.
#[derive(Clone, Debug, PartialEq)]
pub struct NgramMemoryDims {
    /// Residual streams.
    pub streams: usize,
    /// Width of a stream.
    pub hidden: usize,
    /// Width of a table's rows.
    pub width: usize,
    /// Taps of the convolution.
    pub taps: usize,
    /// Positions from one tap to the next.
    pub dilation: usize,
    /// Of all norms.
    pub eps: f32,
    /// Added to the norms' stored weights.
    pub norm_add: f32,
    /// The end-of-text token.
    pub end: i32,
    /// Factors of the hash.
    pub multipliers: Vec<u64>,
    /// The tables, one after another.
    pub tables: Vec<NgramTable>,
    /// Tensors that hold them, and the rows of each.
    pub shards: Vec<(String, usize)>,
}

/// The memory of one layer.
#[derive(Clone, Debug)]
pub struct NgramMemory {
    dims: NgramMemoryDims,
    history: Records,
    table: WeightId,
    /// Keys of all streams, then the value.
    project: Linear,
    norm_key: RmsNorm,
    norm_query: RmsNorm,
    norm_conv: RmsNorm,
    conv: CausalConv,
}

impl NgramMemory {
    /// Tensors `<name>.key_proj`, `value_proj`, `norm_key`, `norm_query`, `norm_conv`, `conv1d`. `history` holds the tokens so far.
    pub fn new(d: &mut Declarations, name: &str, dims: NgramMemoryDims, history: Records) -> Result<NgramMemory> {
        let part = |p: &str| format!("{name}.{p}");
        let (all, inputs) = (dims.streams * dims.hidden, dims.tables.len() * dims.width);
        let rows: usize = dims.shards.iter().map(|s| s.1).sum();
        let fits = |t: &NgramTable| u64::from(t.offset) + u64::from(t.rows) <= rows as u64;
        ensure!(dims.tables.iter().all(fits), Mismatch, "{name}: tables {:?} do not lie in {rows} rows", dims.tables);
        let norm = |d: &mut Declarations, p: &str| RmsNorm::new(d, &part(p), all, dims.eps, dims.norm_add).by_group(dims.hidden);
        let shards = dims.shards.iter().map(|(tensor, rows)| Part::whole(&**tensor, *rows)).collect();
        Ok(NgramMemory {
            history,
            table: d.row_parts(&part("ple_embedding.ngram_embedding"), shards, dims.width),
            project: Linear::stacked(d, &part("key_value"), &[(&part("key_proj"), all), (&part("value_proj"), dims.hidden)], inputs, false),
            norm_key: norm(d, "norm_key"),
            norm_query: norm(d, "norm_query"),
            norm_conv: norm(d, "norm_conv"),
            conv: CausalConv::dilated(d, &part("conv1d"), all, dims.taps, dims.dilation, true)?,
            dims,
        })
    }

    /// Records the streams with what they took in.
    pub fn record(&self, t: &mut Tape<'_>, x: Value) -> Value {
        let (d, all) = (&self.dims, self.dims.streams * self.dims.hidden);
        let hash = NgramHash::Xor { multipliers: d.multipliers.clone(), end: d.end };
        let ids = t.op(NgramRows { history: self.history, hash, tables: d.tables.clone(), y: Value::NONE });
        let rows = t.op(Lookup { ids, column: 0, count: d.tables.len(), table: self.table, y: Value::NONE });
        let projected = self.project.record(t, rows);
        let key = t.slice(projected, 0, all);
        let value = t.slice(projected, all, d.hidden);
        let key = self.norm_key.record(t, key);
        let query = self.norm_query.record(t, x);
        let taken = t.op(StreamGate { key, query, value, y: Value::NONE });
        let near = self.norm_conv.record(t, taken);
        let near = self.conv.record(t, near);
        let taken = t.add(taken, near);
        t.add(x, taken)
    }
}
