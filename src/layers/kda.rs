//! Kimi Delta Attention (Kimi Team, 2025): the gated delta rule with a forget gate for each key channel, from a low-rank product.

use super::config::head_width;
use super::delta_net::{UnitKeys, matrix_slot};
use super::{CausalConv, Linear, Mixer, RmsNorm};
use crate::circuit::Tape;
use crate::error::Result;
use crate::ops::{self, ActMul, Activation, Decay, SlotId, Value, WeightId};
use crate::weights::Declarations;

/// Sizes and switches of a layer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KdaDims {
    /// Width of the residual stream.
    pub hidden: usize,
    /// Heads.
    pub heads: usize,
    /// Elements of a key and of a value.
    pub head_dim: usize,
    /// Taps of the convolutions.
    pub taps: usize,
    /// Of the gated norm.
    pub eps: f32,
    /// Lowest logarithm of a forget gate, if it has one (Kimi K3: -5).
    pub floor: Option<f32>,
    /// Output gate from one product `g_proj` instead of `g_b_proj(g_a_proj(x))`.
    pub full_rank_gate: bool,
}

/// One layer.
#[derive(Clone, Debug)]
pub struct Kda {
    dims: KdaDims,
    /// Queries, keys, values, betas.
    input: Linear,
    conv: CausalConv,
    unit: UnitKeys,
    forget: (Linear, Linear),
    a_log: WeightId,
    dt_bias: WeightId,
    gate: (Linear, Option<Linear>),
    norm: RmsNorm,
    out: Linear,
    slot: SlotId,
}

impl Kda {
    /// Tensors `<name>.{q,k,v}_proj`, `{q,k,v}_conv1d`, `b_proj`, `f_a_proj`, `f_b_proj`, `A_log`, `dt_bias`, `g_*proj`, `o_norm`, `o_proj`.
    pub fn new(d: &mut Declarations, name: &str, dims: KdaDims) -> Result<Kda> {
        let part = |p: &str| format!("{name}.{p}");
        let (hidden, width, dim) = (dims.hidden, head_width(name, dims.heads, dims.head_dim)?, dims.head_dim);
        let projections = [(&*part("q_proj"), width), (&*part("k_proj"), width), (&*part("v_proj"), width), (&*part("b_proj"), dims.heads)];
        let convolutions = [(&*part("q_conv1d"), width), (&*part("k_conv1d"), width), (&*part("v_conv1d"), width)];
        let gate = if dims.full_rank_gate {
            (Linear::new(d, &part("g_proj"), width, hidden, false), None)
        } else {
            (Linear::new(d, &part("g_a_proj"), dim, hidden, false), Some(Linear::new(d, &part("g_b_proj"), width, dim, false)))
        };
        Ok(Kda {
            dims,
            input: Linear::stacked(d, &part("qkvb"), &projections, hidden, false),
            conv: CausalConv::new(d, &part("conv1d"), &convolutions, dims.taps, false, true)?,
            unit: UnitKeys::new(d, name, dim)?,
            forget: (Linear::new(d, &part("f_a_proj"), dim, hidden, false), Linear::new(d, &part("f_b_proj"), width, dim, false)),
            a_log: d.vector(&part("A_log"), dims.heads, 0.0),
            dt_bias: d.vector(&part("dt_bias"), width, 0.0),
            gate,
            norm: RmsNorm::per_head(d, &part("o_norm"), dim, dims.eps, 0.0),
            out: Linear::new(d, &part("o_proj"), hidden, width, false),
            slot: matrix_slot(d, name, ops::DeltaRule::slot_elements(dims.heads, dim, dim))?,
        })
    }
}

impl Mixer for Kda {
    fn record(&self, t: &mut Tape<'_>, x: Value, _: &[Value]) -> Value {
        let (heads, width) = (self.dims.heads, self.dims.heads * self.dims.head_dim);
        let all = self.input.record(t, x);
        let (mixed, beta) = (t.slice(all, 0, 3 * width), t.slice(all, 3 * width, heads));
        let mixed = self.conv.record(t, mixed);
        let [q, k, v] = [0, 1, 2].map(|i| t.slice(mixed, i * width, width));
        let (q, k) = self.unit.record(t, q, k);
        let beta = t.op(ActMul { act: Activation::Sigmoid, gate: beta, up: Value::NONE, y: Value::NONE });
        let forget = self.forget.0.record(t, x);
        let forget = self.forget.1.record(t, forget);
        let decay =
            t.op(Decay { x: forget, a_log: self.a_log, negated: false, bias: self.dt_bias, floor: self.dims.floor, y: Value::NONE });
        let h = t.op(ops::DeltaRule { q, k, v, decay, beta, key_heads: heads, heads, tiled: false, slot: self.slot, y: Value::NONE });
        let h = self.norm.record(t, h);
        let mut gate = self.gate.0.record(t, x);
        if let Some(second) = &self.gate.1 {
            gate = second.record(t, gate);
        }
        let h = t.op(ActMul { act: Activation::Sigmoid, gate, up: h, y: Value::NONE });
        self.out.record(t, h)
    }
}
