//! Feed-forward matrices of many experts, of which each row meets the ones it is routed to.
//!
//! Checkpoints store them one tensor for each expert, or stacked into one tensor with gate and up beside each other or alternating, with
//! inputs or outputs first. All become one matrix for each expert and projection.

use crate::circuit::Tape;
use crate::ops::{self, ActMul, Activation, Value, WeightId};
use crate::weights::{Declarations, Part};

/// One projection of all experts.
#[derive(Clone, Debug)]
struct Projection {
    weight: WeightId,
    bias: Option<WeightId>,
}

impl Projection {
    fn record(&self, t: &mut Tape<'_>, x: Value, route: Value, slots: usize) -> Value {
        t.op(ops::ExpertLinear { x, q: Value::NONE, route, weight: self.weight, bias: self.bias, slots, y: Value::NONE })
    }
}

/// Sizes of a set of experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertDims {
    /// Width of the residual stream (or of a latent the experts work in).
    pub hidden: usize,
    /// Width between up and down.
    pub inner: usize,
    /// Experts.
    pub count: usize,
    /// Experts a row meets.
    pub top_k: usize,
    /// Activation.
    pub act: Activation,
}

/// How a checkpoint stacks its experts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Stacking {
    /// `[experts, inputs, outputs]` instead of `[experts, outputs, inputs]`.
    pub input_major: bool,
    /// Gate and up rows alternate instead of following each other.
    pub alternating: bool,
    /// Each tensor has a `<tensor>_bias`.
    pub bias: bool,
}

/// `down(act(gate x) * (up x))` of each expert; without gate `down(act(up x))`.
#[derive(Clone, Debug)]
pub struct Experts {
    gate: Option<Projection>,
    up: Projection,
    down: Projection,
    dims: ExpertDims,
}

impl Experts {
    /// Tensors `<name>.<expert>.<part>.weight` for the parts gate (if there is one), up and down.
    pub fn separate(d: &mut Declarations, name: &str, gate: Option<&str>, up: &str, down: &str, dims: ExpertDims) -> Experts {
        Experts::each(d, name, (gate, up, down), false, dims)
    }

    /// As [`Experts::separate`], with a `bias` beside each `weight`.
    pub fn separate_biased(d: &mut Declarations, name: &str, gate: Option<&str>, up: &str, down: &str, dims: ExpertDims) -> Experts {
        Experts::each(d, name, (gate, up, down), true, dims)
    }

    fn each(d: &mut Declarations, name: &str, (gate, up, down): (Option<&str>, &str, &str), biased: bool, dims: ExpertDims) -> Experts {
        let mut projection = |part: &str, outputs: usize, inputs: usize| {
            let whole = |leaf: &str| (0..dims.count).map(|e| Part::whole(format!("{name}.{e}.{part}.{leaf}"), outputs)).collect::<Vec<_>>();
            let weight = d.experts(&format!("{name}.{part}"), whole("weight").into_iter().map(|part| vec![part]).collect(), inputs);
            d.meets(weight, dims.top_k);
            let bias = biased.then(|| d.vector_parts(&format!("{name}.{part}.bias"), whole("bias"), 0.0));
            Projection { weight, bias }
        };
        let gate = gate.map(|gate| projection(gate, dims.inner, dims.hidden));
        Experts { gate, up: projection(up, dims.inner, dims.hidden), down: projection(down, dims.hidden, dims.inner), dims }
    }

    /// Tensors `<gate_up>` with gate and up of all experts, and `<down>`.
    pub fn stacked(d: &mut Declarations, gate_up: &str, down: &str, stacking: Stacking, dims: ExpertDims) -> Experts {
        // `first` and `step` say where the projection's outputs lie among the tensor's `all`.
        let mut projection = |tensor: &str, all: usize, outputs: usize, inputs: usize, first: usize, step: usize| {
            let part = |e: usize| match stacking.input_major {
                true => Part::transposed(tensor, [dims.count, inputs, all], e, outputs).rows_from(first, step),
                false => Part::slice(tensor, [dims.count, all, inputs], e, outputs).rows_from(first, step),
            };
            let weight = d.experts(tensor, (0..dims.count).map(|e| vec![part(e)]).collect(), inputs);
            d.meets(weight, dims.top_k);
            let bias = stacking.bias.then(|| {
                let name = format!("{tensor}_bias");
                let part = |e: usize| Part::slice(&*name, [dims.count, all, 1], e, outputs).rows_from(first, step);
                d.vector_parts(&name, (0..dims.count).map(part).collect(), 0.0)
            });
            Projection { weight, bias }
        };
        let inner = dims.inner;
        let (up_first, step) = if stacking.alternating { (1, 2) } else { (inner, 1) };
        Experts {
            gate: Some(projection(gate_up, 2 * inner, inner, dims.hidden, 0, step)),
            up: projection(gate_up, 2 * inner, inner, dims.hidden, up_first, step),
            down: projection(down, dims.hidden, dims.hidden, inner, 0, 1),
            dims,
        }
    }

    /// Tensors `[experts, outputs, inputs]`, one for each of gate, up and down.
    pub fn stacked_apart(d: &mut Declarations, [gate, up, down]: [&str; 3], dims: ExpertDims) -> Experts {
        let mut projection = |tensor: &str, outputs: usize, inputs: usize| {
            let part = |e: usize| vec![Part::slice(tensor, [dims.count, outputs, inputs], e, outputs)];
            let weight = d.experts(tensor, (0..dims.count).map(part).collect(), inputs);
            d.meets(weight, dims.top_k);
            Projection { weight, bias: None }
        };
        Experts {
            gate: Some(projection(gate, dims.inner, dims.hidden)),
            up: projection(up, dims.inner, dims.hidden),
            down: projection(down, dims.hidden, dims.inner),
            dims,
        }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.dims.count
    }

    /// Records the experts' answers, `[rows, top_k * hidden]`.
    pub fn record(&self, t: &mut Tape<'_>, x: Value, route: Value) -> Value {
        let (slots, act) = (self.dims.top_k, self.dims.act);
        let gate = self.gate.as_ref().map(|gate| gate.record(t, x, route, slots));
        let up = self.up.record(t, x, route, slots);
        let h = match gate {
            Some(gate) => t.op(ActMul { act, gate, up, y: Value::NONE }),
            None => t.op(ActMul { act, gate: up, up: Value::NONE, y: Value::NONE }),
        };
        self.down.record(t, h, route, slots)
    }
}
