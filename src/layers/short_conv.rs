//! LFM2's mixer (Liquid AI, 2025): a short convolution between two gates that depend on the input.

use super::{CausalConv, Linear, Mixer};
use crate::circuit::Tape;
use crate::error::Result;
use crate::ops::{ActMul, Activation, Value};
use crate::weights::Declarations;

/// `out(c * conv(b * x))` with `b, c, x = in(input)`.
#[derive(Clone, Debug)]
pub struct ShortConv {
    input: Linear,
    conv: CausalConv,
    out: Linear,
    channels: usize,
}

impl ShortConv {
    /// Tensors `<name>.in_proj`, `conv`, `out_proj`.
    pub fn new(d: &mut Declarations, name: &str, channels: usize, taps: usize, bias: bool) -> Result<ShortConv> {
        let part = |p: &str| format!("{name}.{p}");
        let input = Linear::new(d, &part("in_proj"), 3 * channels, channels, bias);
        let conv = CausalConv::new(d, &part("conv"), &[(&*part("conv"), channels)], taps, bias, false)?;
        Ok(ShortConv { input, conv, out: Linear::new(d, &part("out_proj"), channels, channels, bias), channels })
    }
}

impl Mixer for ShortConv {
    fn record(&self, t: &mut Tape<'_>, x: Value, _: &[Value]) -> Value {
        let all = self.input.record(t, x);
        let [b, c, x] = [0, 1, 2].map(|i| t.slice(all, i * self.channels, self.channels));
        let times = |t: &mut Tape<'_>, gate, up| t.op(ActMul { act: Activation::Identity, gate, up, y: Value::NONE });
        let h = times(t, b, x);
        let h = self.conv.record(t, h);
        let h = times(t, c, h);
        self.out.record(t, h)
    }
}
