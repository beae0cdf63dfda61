//! Feed-forward with a gate: `down(act(gate x) * (up x))` (Shazeer, 2020); or without: `down(act(up x))`.

use super::{FeedForward, Linear};
use crate::circuit::Tape;
use crate::ops::{ActMul, Activation, Value};
use crate::weights::Declarations;

/// Gate and up as one product, then down.
#[derive(Clone, Debug)]
pub struct GatedMlp {
    /// Up alone, where there is no gate.
    gate_up: Linear,
    down: Linear,
    act: Activation,
    inner: usize,
    gated: bool,
}

impl GatedMlp {
    /// Tensors `<name>.gate_proj`, `up_proj`, `down_proj`.
    pub fn new(d: &mut Declarations, name: &str, hidden: usize, inner: usize, act: Activation, bias: bool) -> GatedMlp {
        GatedMlp::named(d, name, ["gate_proj", "up_proj", "down_proj"], hidden, inner, act, bias)
    }

    /// The same under other names for gate, up and down.
    pub fn named(d: &mut Declarations, name: &str, parts: [&str; 3], hidden: usize, inner: usize, act: Activation, bias: bool) -> GatedMlp {
        let [gate, up, down] = parts.map(|part| format!("{name}.{part}"));
        let gate_up = Linear::stacked(d, &format!("{name}.gate_up"), &[(&gate, inner), (&up, inner)], hidden, bias);
        let down = Linear::new(d, &down, hidden, inner, bias);
        GatedMlp { gate_up, down, act, inner, gated: true }
    }

    /// Without gate: tensors `<name>.up_proj`, `down_proj` (Nemotron-H).
    pub fn plain(d: &mut Declarations, name: &str, hidden: usize, inner: usize, act: Activation, bias: bool) -> GatedMlp {
        GatedMlp::plain_named(d, name, ["up_proj", "down_proj"], hidden, inner, act, bias)
    }

    /// The same under other names for up and down.
    pub fn plain_named(
        d: &mut Declarations,
        name: &str,
        parts: [&str; 2],
        hidden: usize,
        inner: usize,
        act: Activation,
        bias: bool,
    ) -> GatedMlp {
        let [up, down] = parts.map(|part| format!("{name}.{part}"));
        let up = Linear::new(d, &up, inner, hidden, bias);
        let down = Linear::new(d, &down, hidden, inner, bias);
        GatedMlp { gate_up: up, down, act, inner, gated: false }
    }

    /// Gate and up stored as one tensor `<name>.gate_up_proj` (Phi-3).
    pub fn fused(d: &mut Declarations, name: &str, hidden: usize, inner: usize, act: Activation) -> GatedMlp {
        let gate_up = Linear::new(d, &format!("{name}.gate_up_proj"), 2 * inner, hidden, false);
        let down = Linear::new(d, &format!("{name}.down_proj"), hidden, inner, false);
        GatedMlp { gate_up, down, act, inner, gated: true }
    }

    /// Records the block.
    pub fn record(&self, t: &mut Tape<'_>, x: Value) -> Value {
        let h = self.gate_up.record(t, x);
        let gate = t.slice(h, 0, self.inner);
        let up = if self.gated { t.slice(h, self.inner, self.inner) } else { Value::NONE };
        let h = t.op(ActMul { act: self.act, gate, up, y: Value::NONE });
        self.down.record(t, h)
    }
}

impl FeedForward for GatedMlp {
    fn record(&self, t: &mut Tape<'_>, x: Value) -> Value {
        GatedMlp::record(self, t, x)
    }
}
