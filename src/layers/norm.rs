//! RMS norm, with a weight or without; layer norm with weight and bias.

use crate::circuit::Tape;
use crate::ops::{self, NormKind, Value, WeightId};
use crate::weights::Declarations;

/// `x / sqrt(mean(x^2) + eps) * w`, over the row or over each head of it.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    weight: Option<WeightId>,
    eps: f32,
    group: usize,
}

impl RmsNorm {
    /// Over the whole row; `add` is 1 where the checkpoint stores `w` and means `1 + w`.
    pub fn new(d: &mut Declarations, name: &str, width: usize, eps: f32, add: f32) -> RmsNorm {
        RmsNorm::with(Some(d.vector(&format!("{name}.weight"), width, add)), 0, eps)
    }

    /// Over each `group` elements (0: the whole row), with a weight declared elsewhere or none.
    pub fn with(weight: Option<WeightId>, group: usize, eps: f32) -> RmsNorm {
        RmsNorm { weight, eps, group }
    }

    /// Over each head of `head_dim` elements, all heads with one weight.
    pub fn per_head(d: &mut Declarations, name: &str, head_dim: usize, eps: f32, add: f32) -> RmsNorm {
        RmsNorm { group: head_dim, ..RmsNorm::new(d, name, head_dim, eps, add) }
    }

    /// Over each group of `group` elements, each element with its own weight (Mamba 2).
    pub fn grouped(d: &mut Declarations, name: &str, width: usize, group: usize, eps: f32) -> RmsNorm {
        RmsNorm { group, ..RmsNorm::new(d, name, width, eps, 0.0) }
    }

    /// The same over each group of `group` elements, each element with its own weight.
    pub fn by_group(self, group: usize) -> RmsNorm {
        RmsNorm { group, ..self }
    }

    /// Records the norm.
    pub fn record(&self, t: &mut Tape<'_>, x: Value) -> Value {
        t.op(ops::Norm { kind: NormKind::Rms, x, weight: self.weight, bias: None, group: self.group, eps: self.eps, y: Value::NONE })
    }
}

/// `(x - mean) / sqrt(variance + eps) * w + b`, over the row.
#[derive(Clone, Debug)]
pub struct LayerNorm {
    weight: WeightId,
    bias: WeightId,
    eps: f32,
}

impl LayerNorm {
    /// Tensors `<name>.weight`, `<name>.bias`.
    pub fn new(d: &mut Declarations, name: &str, width: usize, eps: f32) -> LayerNorm {
        LayerNorm { weight: d.vector(&format!("{name}.weight"), width, 0.0), bias: d.vector(&format!("{name}.bias"), width, 0.0), eps }
    }

    /// Records the norm.
    pub fn record(&self, t: &mut Tape<'_>, x: Value) -> Value {
        t.op(ops::Norm {
            kind: NormKind::Layer,
            x,
            weight: Some(self.weight),
            bias: Some(self.bias),
            group: 0,
            eps: self.eps,
            y: Value::NONE,
        })
    }
}
