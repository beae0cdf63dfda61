//! Gated DeltaNet (Yang et al., 2024) as Qwen 3 Next has it: convolved queries, keys and values, a gated delta rule for each
//! value head, a gated norm on what is read.

use super::config::head_width;
use super::{CausalConv, Linear, Mixer, RmsNorm};
use crate::circuit::Tape;
use crate::error::{Error, Kind, Result};
use crate::ops::{self, ActMul, Activation, Decay, Norm, NormKind, Piece, Regroup, SlotId, Value, WeightId};
use crate::weights::Declarations;

/// How a checkpoint names the input products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeltaNetTensors {
    /// `in_proj_qkvz` and `in_proj_ba`, each key head's rows together (Qwen 3 Next).
    ByHead,
    /// `in_proj_qkv`, `in_proj_z`, `in_proj_b`, `in_proj_a` (Qwen 3.5).
    Separate,
    /// `in_proj_qkv`, `in_proj_z`, and `in_proj_ba` with each key head's rows together (Qwen 3 Next in GGUF).
    NarrowByHead,
}

/// Sizes and switches of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DeltaNetDims {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values.
    pub heads: usize,
    /// Elements of a key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// Taps of the convolution.
    pub taps: usize,
    /// Of the gated norm.
    pub eps: f32,
    /// Of the gate on the output.
    pub gate: Activation,
    /// Names of the input products.
    pub tensors: DeltaNetTensors,
    /// Whether key heads are dealt out to value heads in turn (GGUF).
    pub tiled: bool,
    /// Whether `A_log` holds `-exp(A_log)` (GGUF).
    pub negated: bool,
}

impl DeltaNetDims {
    fn keys(&self) -> usize {
        self.key_heads * self.key_dim
    }
    fn values(&self) -> usize {
        self.heads * self.value_dim
    }

    /// From rows by key head to queries, keys, values, gates, betas, decays of all heads side by side.
    fn regroup(&self) -> Vec<Piece> {
        let (share, keys) = (self.heads / self.key_heads, self.key_dim);
        let values = share * self.value_dim;
        let piece = |first, width, stride| Piece { first, width, stride, count: self.key_heads };
        let (stride, narrow) = (2 * (keys + values), self.key_heads * 2 * (keys + values));
        let wide = match self.tensors {
            DeltaNetTensors::ByHead => vec![
                piece(0, keys, stride),
                piece(keys, keys, stride),
                piece(2 * keys, values, stride),
                piece(2 * keys + values, values, stride),
            ],
            _ => vec![Piece { first: 0, width: narrow, stride: narrow, count: 1 }],
        };
        [wide, vec![piece(narrow, share, 2 * share), piece(narrow + share, share, 2 * share)]].concat()
    }
}

/// Queries and keys with length 1, and the queries' factor `1 / sqrt(key_dim)`.
#[derive(Clone, Debug)]
pub(super) struct UnitKeys {
    query: WeightId,
    key: WeightId,
    key_dim: usize,
}

/// Added to squared lengths.
const UNIT_EPS: f64 = 1e-6;

impl UnitKeys {
    pub(super) fn new(d: &mut Declarations, name: &str, key_dim: usize) -> Result<UnitKeys> {
        let n = key_dim as f64;
        let mut fill = |part: &str, value: f64| {
            let values = crate::error::vec_filled(key_dim, value as f32, "factors of a head")?;
            Ok::<_, Error>(d.constant(&format!("{name}.{part}"), values))
        };
        Ok(UnitKeys { query: fill("unit_query", 1.0 / n)?, key: fill("unit_key", 1.0 / n.sqrt())?, key_dim })
    }

    /// Length 1 is an RMS norm over the head divided by `sqrt(key_dim)`.
    pub(super) fn record(&self, t: &mut Tape<'_>, q: Value, k: Value) -> (Value, Value) {
        let eps = (UNIT_EPS / self.key_dim as f64) as f32;
        let mut unit =
            |x, weight| t.op(Norm { kind: NormKind::Rms, x, weight: Some(weight), bias: None, group: self.key_dim, eps, y: Value::NONE });
        (unit(q, self.query), unit(k, self.key))
    }
}

/// The slot of a layer's matrix states.
pub(super) fn matrix_slot(d: &mut Declarations, name: &str, elements: Option<usize>) -> Result<SlotId> {
    let elements =
        elements.ok_or_else(|| Error::new(Kind::TooLarge, format!("{name}: the recurrent state is beyond counting")).named(name))?;
    Ok(d.slot(format!("{name}.state"), elements))
}

/// One layer.
#[derive(Clone, Debug)]
pub struct DeltaNet {
    dims: DeltaNetDims,
    input: Linear,
    conv: CausalConv,
    unit: UnitKeys,
    a_log: WeightId,
    dt_bias: WeightId,
    norm: RmsNorm,
    out: Linear,
    slot: SlotId,
}

impl DeltaNet {
    /// Tensors `<name>.in_proj_*`, `conv1d`, `A_log`, `dt_bias`, `norm`, `out_proj`.
    pub fn new(d: &mut Declarations, name: &str, dims: DeltaNetDims) -> Result<DeltaNet> {
        crate::ensure!(
            dims.heads.is_multiple_of(dims.key_heads),
            Mismatch,
            "{name}: {} value heads do not share {} key heads evenly",
            dims.heads,
            dims.key_heads
        );
        let part = |p: &str| format!("{name}.{p}");
        let keys = head_width(name, dims.key_heads, dims.key_dim)?;
        let (values, heads) = (head_width(name, dims.heads, dims.value_dim)?, dims.heads);
        let mixed = 2 * keys + values;
        let input = match dims.tensors {
            DeltaNetTensors::ByHead => {
                let parts = [(&*part("in_proj_qkvz"), mixed + values), (&*part("in_proj_ba"), 2 * heads)];
                Linear::stacked(d, &part("in_proj"), &parts, dims.hidden, false)
            }
            DeltaNetTensors::NarrowByHead => {
                let parts = [(&*part("in_proj_qkv"), mixed), (&*part("in_proj_z"), values), (&*part("in_proj_ba"), 2 * heads)];
                Linear::stacked(d, &part("in_proj"), &parts, dims.hidden, false)
            }
            DeltaNetTensors::Separate => {
                let parts = [
                    (&*part("in_proj_qkv"), mixed),
                    (&*part("in_proj_z"), values),
                    (&*part("in_proj_b"), heads),
                    (&*part("in_proj_a"), heads),
                ];
                Linear::stacked(d, &part("in_proj"), &parts, dims.hidden, false)
            }
        };
        Ok(DeltaNet {
            dims,
            input,
            conv: CausalConv::new(d, &part("conv1d"), &[(&*part("conv1d"), mixed)], dims.taps, false, true)?,
            unit: UnitKeys::new(d, name, dims.key_dim)?,
            a_log: d.vector(&part("A_log"), heads, 0.0),
            dt_bias: d.vector(&part("dt_bias"), heads, 0.0),
            norm: RmsNorm::per_head(d, &part("norm"), dims.value_dim, dims.eps, 0.0),
            out: Linear::new(d, &part("out_proj"), dims.hidden, values, false),
            slot: matrix_slot(d, name, ops::DeltaRule::slot_elements(heads, dims.key_dim, dims.value_dim))?,
        })
    }
}

impl Mixer for DeltaNet {
    fn record(&self, t: &mut Tape<'_>, x: Value, _: &[Value]) -> Value {
        let d = &self.dims;
        let (keys, values, heads) = (d.keys(), d.values(), d.heads);
        let mut all = self.input.record(t, x);
        if d.tensors != DeltaNetTensors::Separate {
            all = t.op(Regroup { x: all, pieces: d.regroup(), y: Value::NONE });
        }
        let mixed = t.slice(all, 0, 2 * keys + values);
        let gate = t.slice(all, 2 * keys + values, values);
        let beta = t.slice(all, 2 * (keys + values), heads);
        let decay = t.slice(all, 2 * (keys + values) + heads, heads);
        let mixed = self.conv.record(t, mixed);
        let (q, k) = (t.slice(mixed, 0, keys), t.slice(mixed, keys, keys));
        let v = t.slice(mixed, 2 * keys, values);
        let (q, k) = self.unit.record(t, q, k);
        let beta = t.op(ActMul { act: Activation::Sigmoid, gate: beta, up: Value::NONE, y: Value::NONE });
        let decay = t.op(Decay { x: decay, a_log: self.a_log, negated: d.negated, bias: self.dt_bias, floor: None, y: Value::NONE });
        let h =
            t.op(ops::DeltaRule { q, k, v, decay, beta, key_heads: d.key_heads, heads, tiled: d.tiled, slot: self.slot, y: Value::NONE });
        let h = self.norm.record(t, h);
        let h = t.op(ActMul { act: d.gate, gate, up: h, y: Value::NONE });
        self.out.record(t, h)
    }
}
