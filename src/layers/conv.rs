//! A causal depthwise convolution with its weights and its slot.

use crate::circuit::Tape;
use crate::ensure;
use crate::error::Result;
use crate::ops::{self, SlotId, Value, WeightId};
use crate::weights::{Declarations, Part};

/// The convolution, with or without a SiLU after it.
#[derive(Clone, Debug)]
pub struct CausalConv {
    weight: WeightId,
    bias: Option<WeightId>,
    taps: usize,
    dilation: usize,
    silu: bool,
    slot: SlotId,
}

impl CausalConv {
    /// Tensors `<part>.weight`, each `[channels, 1, taps]`, side by side in order; and `<part>.bias` where asked for.
    pub fn new(d: &mut Declarations, name: &str, parts: &[(&str, usize)], taps: usize, bias: bool, silu: bool) -> Result<CausalConv> {
        CausalConv::build(d, name, parts, taps, 1, bias, silu)
    }

    /// Tensor `<name>.weight`, `[channels, 1, taps]`, its taps `dilation` positions apart.
    pub fn dilated(d: &mut Declarations, name: &str, channels: usize, taps: usize, dilation: usize, silu: bool) -> Result<CausalConv> {
        CausalConv::build(d, name, &[(name, channels)], taps, dilation, false, silu)
    }

    fn build(
        d: &mut Declarations,
        name: &str,
        parts: &[(&str, usize)],
        taps: usize,
        dilation: usize,
        bias: bool,
        silu: bool,
    ) -> Result<CausalConv> {
        let channels: usize = parts.iter().map(|p| p.1).sum();
        let elements = taps.checked_sub(1).and_then(|tail| tail.checked_mul(dilation)?.checked_mul(channels));
        ensure!(elements.is_some(), TooLarge, "{name}: a convolution of {taps} taps over {channels} channels");
        let weights = parts.iter().map(|(part, channels)| Part::flat(format!("{part}.weight"), [*channels, 1, taps])).collect();
        let weight = d.vector_parts(&format!("{name}.weight"), weights, 0.0);
        let bias = bias.then(|| {
            let biases = parts.iter().map(|(part, channels)| Part::whole(format!("{part}.bias"), *channels)).collect();
            d.vector_parts(&format!("{name}.bias"), biases, 0.0)
        });
        let slot = d.slot(format!("{name}.tail"), elements.unwrap_or(0));
        Ok(CausalConv { weight, bias, taps, dilation, silu, slot })
    }

    /// Records the convolution.
    pub fn record(&self, t: &mut Tape<'_>, x: Value) -> Value {
        let (weight, bias, taps, dilation, silu, slot) = (self.weight, self.bias, self.taps, self.dilation, self.silu, self.slot);
        t.op(ops::Conv { x, weight, bias, taps, dilation, silu, slot, y: Value::NONE })
    }
}
