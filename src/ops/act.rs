//! Gated activations: `act(gate) * up` (SwiGLU and its kin; Shazeer, 2020), with bounds and offsets where a family has them.
#![allow(unsafe_code)] // pieces of outputs, disjoint by `Turn::each`

use super::{Frame, Gpu, Op, Port, Shape, Shapes, Turn, Value, View};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_common};

/// The activation of the gate.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Activation {
    /// `x * sigmoid(x)`.
    Silu,
    /// `0.5 x (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3)))`.
    GeluTanh,
    /// `x * Phi(x)`.
    Gelu,
    /// `max(x, 0)`.
    Relu,
    /// `max(x, 0)^2`.
    Relu2,
    /// `1 / (1 + exp(-x))`: output gates.
    Sigmoid,
    /// `ln(1 + exp(x))`: output gates.
    Softplus,
    /// `x`: the gate is a plain factor.
    Identity,
    /// Silu between bounds: the gate is at most `limit`, `up` lies in `-limit ..= limit` (DeepSeek V4).
    ClampedSilu {
        /// The bound.
        limit: f32,
    },
    /// `beta tanh(gate / beta) sigmoid(gate)`, `up` bounded alike by `linear` unless that is 0 (Kimi K3).
    Situ {
        /// The gate's bound.
        beta: f32,
        /// The bound of `up`.
        linear: f32,
    },
    /// Silu whose result is at most `limit`; `up` lies in `-limit ..= limit` (Step 3.7).
    SiluThenClamp {
        /// The bound.
        limit: f32,
    },
    /// `(up + 1) * gate * sigmoid(alpha * gate)` between the same bounds (GPT-OSS).
    SwigluOai {
        /// Steepness of the sigmoid.
        alpha: f32,
        /// The bound.
        limit: f32,
    },
}

impl Activation {
    /// The definition.
    pub fn of(self, x: f64) -> f64 {
        match self {
            Activation::Silu => x / (1.0 + (-x).exp()),
            Activation::GeluTanh => 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x * x * x)).tanh()),
            Activation::Gelu => 0.5 * x * (1.0 + erf(x / std::f64::consts::SQRT_2)),
            Activation::Relu => x.max(0.0),
            Activation::Relu2 => x.max(0.0) * x.max(0.0),
            Activation::Sigmoid => 1.0 / (1.0 + (-x).exp()),
            Activation::Softplus => x.max(0.0) + (-x.abs()).exp().ln_1p(),
            Activation::Identity => x,
            Activation::ClampedSilu { limit } => Activation::Silu.of(below(x, limit)),
            Activation::Situ { beta, .. } => f64::from(beta) * (x / f64::from(beta)).tanh() / (1.0 + (-x).exp()),
            Activation::SiluThenClamp { limit } => below(Activation::Silu.of(x), limit),
            Activation::SwigluOai { alpha, limit } => {
                let x = below(x, limit);
                x / (1.0 + (-f64::from(alpha) * x).exp())
            }
        }
    }

    /// The definition with its other factor: `act(gate) * up`, where bounds and offsets on `up` are part of some.
    pub fn gated(self, gate: f64, up: f64) -> f64 {
        let within = |limit: f32| -below(-below(up, limit), limit);
        match self {
            Activation::ClampedSilu { limit } | Activation::SiluThenClamp { limit } => self.of(gate) * within(limit),
            Activation::Situ { linear, .. } if linear != 0.0 => self.of(gate) * f64::from(linear) * (up / f64::from(linear)).tanh(),
            Activation::SwigluOai { limit, .. } => self.of(gate) * (within(limit) + 1.0),
            _ => self.of(gate) * up,
        }
    }
}

/// At most `limit`; what is not a number stays so.
fn below(x: f64, limit: f32) -> f64 {
    if x > f64::from(limit) { f64::from(limit) } else { x }
}

/// Error function by its series (|x| < 3) or continued fraction, to about 1e-15.
fn erf(x: f64) -> f64 {
    let a = x.abs();
    if a < 3.0 {
        let (mut term, mut sum) = (a, a);
        for n in 1..80 {
            let n = f64::from(n);
            term *= -a * a / n;
            sum += term / (2.0 * n + 1.0);
        }
        (sum * 2.0 / std::f64::consts::PI.sqrt()).copysign(x)
    } else {
        let mut f = 0.0;
        for n in (1..60).rev() {
            f = f64::from(n) / 2.0 / (a + f);
        }
        (1.0 - (-a * a).exp() / ((a + f) * std::f64::consts::PI.sqrt())).copysign(x)
    }
}

/// `y = act(gate) * up`; without `up`, `y = act(gate)`.
#[derive(Clone, Debug)]
pub struct ActMul {
    /// The gate's activation.
    pub act: Activation,
    /// `[rows, width]`.
    pub gate: Value,
    /// `[rows, width]`, or none.
    pub up: Value,
    /// `[rows, width]`.
    pub y: Value,
}

const ACT_MUL: Kernel = Kernel { file: "act", name: "act_mul" };

#[derive(Clone, Copy)]
#[repr(C)]
struct ActMulArgs {
    gate: View,
    up: View,
    y: View,
    act: u32,
    limit: f32,
    slope: f32,
    spare: u32,
}

// SAFETY: the struct of kernels/act.cu.
unsafe impl Args for ActMulArgs {}

impl Activation {
    /// `(a, b)` of those that are `x sigmoid(a x + b x^3)`; `up` is then a plain factor.
    pub(super) fn as_sigmoid(self) -> Option<(f32, f32)> {
        match self {
            Activation::Silu => Some((1.0, 0.0)),
            // (1 + tanh(u)) / 2 = sigmoid(2 u).
            Activation::GeluTanh => Some((1.595_769, 1.595_769 * 0.044_715)),
            _ => None,
        }
    }

    /// Its number in kernels/act.cu, `limit` and `slope` there.
    pub(super) fn kernel(self) -> (u32, f32, f32) {
        match self {
            Activation::Silu => (0, 0.0, 0.0),
            Activation::GeluTanh => (1, 0.0, 0.0),
            Activation::Gelu => (2, 0.0, 0.0),
            Activation::Relu => (3, 0.0, 0.0),
            Activation::Relu2 => (4, 0.0, 0.0),
            Activation::Sigmoid => (5, 0.0, 0.0),
            Activation::Softplus => (6, 0.0, 0.0),
            Activation::Identity => (7, 0.0, 0.0),
            Activation::ClampedSilu { limit } => (8, limit, 0.0),
            Activation::Situ { beta, linear } => (9, beta, linear),
            Activation::SiluThenClamp { limit } => (10, limit, 0.0),
            Activation::SwigluOai { alpha, limit } => (11, limit, alpha),
        }
    }
}

/// Columns in a chunk: enough to be worth sharing when one row is wide.
const COLUMNS: usize = 1024;
/// What stands in for `up` where there is none.
static ONES: [f32; COLUMNS] = [1.0; COLUMNS];

impl Op for ActMul {
    op_common!("act_mul");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        let mut ports = vec![(Port::In, &mut self.gate)];
        if self.up.is_some() {
            ports.push((Port::In, &mut self.up));
        }
        ports.push((Port::Out, &mut self.y));
        ports
    }

    fn prepares(&self) -> Option<Value> {
        Some(self.y)
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let gate = shapes.value(self.gate);
        if self.up.is_some() {
            let up = shapes.value(self.up);
            ensure!(gate.rows == up.rows && gate.width == up.width, Internal, "act_mul: {gate:?} and {up:?} differ");
        }
        Ok(vec![Shape::f32(gate.rows, gate.width)])
    }

    fn solo(&self, frame: &Frame<'_>) -> bool {
        frame.rows(self.y) * frame.slot(self.y).width.div_ceil(COLUMNS) <= 1
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        for row in 0..y.rows() {
            let gate = frame.row(self.gate, row);
            // SAFETY: alone.
            for (i, y) in unsafe { y.row(row) }.iter_mut().enumerate() {
                let gate = f64::from(gate[i]);
                *y = match self.up.is_some() {
                    true => self.act.gated(gate, f64::from(frame.row(self.up, row)[i])),
                    false => self.act.of(gate),
                } as f32;
            }
        }
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let (act, limit, slope) = self.act.kernel();
        let args = ActMulArgs { gate: gpu.view(self.gate), up: gpu.view(self.up), y: gpu.view(self.y), act, limit, slope, spare: 0 };
        gpu.launch(ACT_MUL, Grid::columns(gpu.rows(self.y), gpu.width(self.y)), &args)
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let y = frame.output(self.y);
        let pieces = y.width().div_ceil(COLUMNS);
        turn.each(y.rows() * pieces, 1, |range| {
            for item in range {
                let (row, start) = (item / pieces, item % pieces * COLUMNS);
                let cols = start..(start + COLUMNS).min(y.width());
                let gate = &frame.row(self.gate, row)[cols.clone()];
                let up = self.up.is_some().then(|| &frame.row(self.up, row)[cols.clone()]);
                // SAFETY: `each` gives an item, and so a piece, to one worker.
                let y = unsafe { y.piece(row, cols) };
                match (self.act, up) {
                    (Activation::Silu, Some(up)) => frame.simd.silu_mul(gate, up, y),
                    (Activation::GeluTanh, Some(up)) => frame.simd.gelu_tanh_mul(gate, up, y),
                    (Activation::Identity, Some(up)) => y.iter_mut().zip(gate).zip(up).for_each(|((y, g), u)| *y = g * u),
                    (Activation::Relu, None) => y.iter_mut().zip(gate).for_each(|(y, g)| *y = g.max(0.0)),
                    (Activation::Relu2, None) => y.iter_mut().zip(gate).for_each(|(y, g)| *y = g.max(0.0) * g.max(0.0)),
                    (Activation::ClampedSilu { limit }, Some(up)) => bounded(frame, (limit, 1.0, 0.0), gate, up, y),
                    (Activation::SwigluOai { alpha, limit }, Some(up)) => bounded(frame, (limit, alpha, 1.0), gate, up, y),
                    (Activation::Sigmoid, up) => frame.simd.sigmoid_mul(gate, up.unwrap_or(&ONES[..gate.len()]), y),
                    (act, Some(up)) => {
                        for ((y, gate), up) in y.iter_mut().zip(gate).zip(up) {
                            *y = act.gated(f64::from(*gate), f64::from(*up)) as f32;
                        }
                    }
                    (act, None) => y.iter_mut().zip(gate).for_each(|(y, gate)| *y = act.of(f64::from(*gate)) as f32),
                }
            }
        });
    }
}

/// The SwiGLUs with bounds by way of the plain one: `g sigmoid(alpha g) (u + offset)` is `silu(alpha g) * (u + offset) / alpha`.
fn bounded(frame: &Frame<'_>, (limit, alpha, offset): (f32, f32, f32), gate: &[f32], up: &[f32], y: &mut [f32]) {
    let (mut g, mut u) = ([0.0f32; COLUMNS], [0.0f32; COLUMNS]);
    let (g, u) = (&mut g[..y.len()], &mut u[..y.len()]);
    g.iter_mut().zip(gate).for_each(|(g, x)| *g = alpha * if *x > limit { limit } else { *x });
    for (u, x) in u.iter_mut().zip(up) {
        let below = if *x > limit { limit } else { *x };
        *u = (if below < -limit { -limit } else { below } + offset) / alpha;
    }
    frame.simd.silu_mul(g, u, y);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gelu_meets_tabulated_values() {
        // erf(0.5), erf(1), erf(3.5) from Abramowitz and Stegun, table 7.1 and asymptotics.
        for (x, e) in [
            (0.5, 0.520_499_877_813_046_5),
            (1.0, 0.842_700_792_949_714_9),
            (3.5, 0.999_999_256_901_627_7),
            (-1.0, -0.842_700_792_949_714_9),
        ] {
            assert!((erf(x) - e).abs() < 1e-14, "erf({x}) = {}", erf(x));
        }
    }
}
