//! A causal depthwise convolution with its weights and its slot.

use crate::circuit::Tape;
use crate::error::Result;
use crate::ops::{self, SlotId, Value, WeightId};
use crate::weights::{Declarations, Part};
use crate::ensure;

/// The convolution, with or without a SiLU after it.
#[derive(Clone, Debug)]
pub struct CausalConv {
    weight: WeightId,
    bias: Option<WeightId>,
    taps: usize,
    silu: bool,
    slot: SlotId,
}

impl CausalConv {
    /// Tensors `<part>.weight`, each `[channels, 1, taps]`, side by side in order; and `<part>.bias` where asked for.
    pub fn new(d: &mut Declarations, name: &str, parts: &[(&str, usize)], taps: usize, bias: bool, silu: bool) -> Result<CausalConv> {
        let channels: usize = parts.iter().map(|p| p.1).sum();
        let elements = taps.checked_sub(1).and_then(|tail| tail.checked_mul(channels));
        ensure!(elements.is_some(), TooLarge, "{name}: a convolution of {taps} taps over {channels} channels");
        let weights = parts.iter().map(|(part, channels)| Part::flat(format!("{part}.weight"), [*channels, 1, taps])).collect();
        let weight = d.vector_parts(&format!("{name}.weight"), weights, 0.0);
        let bias = bias.then(|| {
            let biases = parts.iter().map(|(part, channels)| Part::whole(format!("{part}.bias"), *channels)).collect();
            d.vector_parts(&format!("{name}.bias"), biases, 0.0)
        });
        let slot = d.slot(format!("{name}.tail"), elements.unwrap_or(0));
        Ok(CausalConv { weight, bias, taps, silu, slot })
    }

    /// Records the convolution.
    pub fn record(&self, t: &mut Tape<'_>, x: Value) -> Value {
        let (weight, bias, taps, silu, slot) = (self.weight, self.bias, self.taps, self.silu, self.slot);
        t.op(ops::Conv { x, weight, bias, taps, dilation: 1, silu, slot, y: Value::NONE })
    }
}
