//! Mamba 2 (Dao and Gu, 2024): a convolved state space recurrence between an input and an output product, its result gated and
//! then normed by group.

use super::config::head_width;
use super::delta_net::matrix_slot;
use super::{CausalConv, Linear, Mixer, RmsNorm};
use crate::circuit::Tape;
use crate::ensure;
use crate::error::Result;
use crate::ops::{self, ActMul, Activation, SlotId, Value, WeightId};
use crate::weights::Declarations;

/// Sizes and switches of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mamba2Dims {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Heads.
    pub heads: usize,
    /// Channels of a head.
    pub head_dim: usize,
    /// Groups of heads that share write and read vectors, and groups of the norm.
    pub groups: usize,
    /// Elements of a write or read vector.
    pub depth: usize,
    /// Taps of the convolution.
    pub taps: usize,
    /// Bias of the convolution.
    pub conv_bias: bool,
    /// Biases of input and output products.
    pub bias: bool,
    /// Of the norm.
    pub eps: f32,
    /// Bounds on the time step.
    pub limit: (f32, f32),
}

/// One layer.
#[derive(Clone, Debug)]
pub struct Mamba2 {
    dims: Mamba2Dims,
    input: Linear,
    conv: CausalConv,
    a_log: WeightId,
    d: WeightId,
    dt_bias: WeightId,
    norm: RmsNorm,
    out: Linear,
    slot: SlotId,
}

impl Mamba2 {
    /// Tensors `<name>.in_proj`, `conv1d`, `A_log`, `D`, `dt_bias`, `norm`, `out_proj`.
    pub fn new(d: &mut Declarations, name: &str, dims: Mamba2Dims) -> Result<Mamba2> {
        let (inner, shared) = (head_width(name, dims.heads, dims.head_dim)?, head_width(name, dims.groups, dims.depth)?);
        ensure!(dims.heads.is_multiple_of(dims.groups), Mismatch, "{name}: {} heads do not split into {} groups", dims.heads, dims.groups);
        let part = |p: &str| format!("{name}.{p}");
        let mixed = inner + 2 * shared;
        Ok(Mamba2 {
            dims,
            input: Linear::new(d, &part("in_proj"), inner + mixed + dims.heads, dims.hidden, dims.bias),
            conv: CausalConv::new(d, &part("conv1d"), &[(&*part("conv1d"), mixed)], dims.taps, dims.conv_bias, true)?,
            a_log: d.vector(&part("A_log"), dims.heads, 0.0),
            d: d.vector(&part("D"), dims.heads, 0.0),
            dt_bias: d.vector(&part("dt_bias"), dims.heads, 0.0),
            norm: RmsNorm::grouped(d, &part("norm"), inner, inner / dims.groups, dims.eps),
            out: Linear::new(d, &part("out_proj"), dims.hidden, inner, dims.bias),
            slot: matrix_slot(d, name, ops::Mamba2::slot_elements(dims.heads, dims.head_dim, dims.depth))?,
        })
    }
}

impl Mixer for Mamba2 {
    fn record(&self, t: &mut Tape<'_>, x: Value, _: &[Value]) -> Value {
        let dims = &self.dims;
        let (inner, shared) = (dims.heads * dims.head_dim, dims.groups * dims.depth);
        let all = self.input.record(t, x);
        let gate = t.slice(all, 0, inner);
        let mixed = t.slice(all, inner, inner + 2 * shared);
        let dt = t.slice(all, 2 * (inner + shared), dims.heads);
        let mixed = self.conv.record(t, mixed);
        let x = t.slice(mixed, 0, inner);
        let (b, c) = (t.slice(mixed, inner, shared), t.slice(mixed, inner + shared, shared));
        let h = t.op(ops::Mamba2 {
            x,
            b,
            c,
            dt,
            a_log: self.a_log,
            d: self.d,
            dt_bias: self.dt_bias,
            limit: dims.limit,
            heads: dims.heads,
            groups: dims.groups,
            slot: self.slot,
            y: Value::NONE,
        });
        let h = t.op(ActMul { act: Activation::Silu, gate, up: h, y: Value::NONE });
        let h = self.norm.record(t, h);
        self.out.record(t, h)
    }
}
