//! A matrix with an optional bias, possibly put together from several tensors of the checkpoint.

use crate::circuit::Tape;
use crate::ops::{self, Value, WeightId};
use crate::weights::Declarations;

/// `y = W x + b`.
#[derive(Clone, Debug)]
pub struct Linear {
    /// `[outputs, inputs]`.
    pub weight: WeightId,
    /// `[outputs]`.
    pub bias: Option<WeightId>,
}

impl Linear {
    /// One tensor `<name>.weight`, and `<name>.bias` if there is one.
    pub fn new(d: &mut Declarations, name: &str, outputs: usize, inputs: usize, bias: bool) -> Linear {
        Linear::stacked(d, name, &[(name, outputs)], inputs, bias)
    }

    /// Tensors `<part>.weight` stacked along the outputs, in order (`q_proj`, `k_proj`, `v_proj`).
    pub fn stacked(d: &mut Declarations, name: &str, parts: &[(&str, usize)], inputs: usize, bias: bool) -> Linear {
        let named = |suffix: &str| -> Vec<(String, usize)> { parts.iter().map(|(p, n)| (format!("{p}.{suffix}"), *n)).collect() };
        let weights = named("weight");
        let weights: Vec<(&str, usize)> = weights.iter().map(|(p, n)| (p.as_str(), *n)).collect();
        let weight = d.stacked(&format!("{name}.weight"), &weights, inputs);
        let bias = bias.then(|| {
            let biases = named("bias");
            let biases: Vec<(&str, usize)> = biases.iter().map(|(p, n)| (p.as_str(), *n)).collect();
            d.stacked_vector(&format!("{name}.bias"), &biases, 0.0)
        });
        Linear { weight, bias }
    }

    /// Records the product.
    pub fn record(&self, t: &mut Tape<'_>, x: Value) -> Value {
        t.op(ops::Linear { x, q: Value::NONE, weight: self.weight, bias: self.bias, y: Value::NONE })
    }
}
