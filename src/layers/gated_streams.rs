//! Gated residual streams (Qwen 4 Exp): a sublayer reads the mean of the normed streams, each element through a low-rank gate, and
//! writes to every stream by a weight of its own.

use super::{Linear, RmsNorm};
use crate::circuit::Tape;
use crate::ops::{ActMul, Activation, HyperCollapse, HyperInject, Value};
use crate::weights::Declarations;

/// Sizes of all sites of a model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GatedStreamDims {
    /// Residual streams.
    pub streams: usize,
    /// Width of a stream.
    pub hidden: usize,
    /// Width the gates pass through.
    pub rank: usize,
    /// Of the norm on each stream.
    pub eps: f32,
    /// Added to the norm's stored weight.
    pub norm_add: f32,
}

/// The streams around one sublayer, or the end of the model, where they become one row.
#[derive(Clone, Debug)]
pub struct GatedSite {
    dims: GatedStreamDims,
    norm: RmsNorm,
    /// The gate's first product, and behind it the weights to write by where a sublayer follows.
    down: Linear,
    up: Linear,
}

impl GatedSite {
    /// Around a sublayer: tensors `<name>.hc_norm`, `input_mix_weight_down`, `input_mix_weight_up`, `block_inject_weight`.
    pub fn new(d: &mut Declarations, name: &str, dims: GatedStreamDims) -> GatedSite {
        GatedSite::with(d, name, dims, true)
    }

    /// At the end: the same tensors without the last.
    pub fn end(d: &mut Declarations, name: &str, dims: GatedStreamDims) -> GatedSite {
        GatedSite::with(d, name, dims, false)
    }

    fn with(d: &mut Declarations, name: &str, dims: GatedStreamDims, writes: bool) -> GatedSite {
        let part = |p: &str| format!("{name}.{p}");
        let width = dims.streams * dims.hidden;
        let (down, inject) = (part("input_mix_weight_down"), part("block_inject_weight"));
        let parts = [(&*down, dims.rank), (&*inject, dims.streams)];
        GatedSite {
            norm: RmsNorm::new(d, &part("hc_norm"), width, dims.eps, dims.norm_add).by_group(dims.hidden),
            down: Linear::stacked(d, &down, &parts[..if writes { 2 } else { 1 }], width, false),
            up: Linear::new(d, &part("input_mix_weight_up"), width, dims.rank, false),
            dims,
        }
    }

    /// Records what the sublayer reads, and the weights it writes by ([`Value::NONE`] at the end).
    pub fn read(&self, t: &mut Tape<'_>, x: Value) -> (Value, Value) {
        let (streams, rank) = (self.dims.streams, self.dims.rank);
        let x = self.norm.record(t, x);
        let down = self.down.record(t, x);
        let down = t.scale(down, 1.0 / streams as f32);
        let weights = if t.width(down) > rank { t.slice(down, rank, streams) } else { Value::NONE };
        let gate = t.slice(down, 0, rank);
        let gate = t.op(ActMul { act: Activation::Silu, gate, up: Value::NONE, y: Value::NONE });
        let gate = self.up.record(t, gate);
        let x = t.op(ActMul { act: Activation::Sigmoid, gate, up: x, y: Value::NONE });
        (t.op(HyperCollapse { x, pre: Value::NONE, streams, y: Value::NONE }), weights)
    }

    /// Records the streams after the sublayer computed `out`.
    pub fn write(&self, t: &mut Tape<'_>, out: Value, x: Value, weight: Value) -> Value {
        t.op(HyperInject { out, x, weight, y: Value::NONE })
    }
}
