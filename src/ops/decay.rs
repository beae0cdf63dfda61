//! The forget gate of gated delta rules: how much of a state survives a position.
#![allow(unsafe_code)] // pieces of outputs, disjoint by `Turn::each`

use super::{Frame, Gpu, Op, Port, Shape, Shapes, Turn, Value, View, WeightId};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_common};

/// `y = exp(-exp(a_log) * softplus(x + bias))`, or with a floor `y = exp(floor * sigmoid(exp(a_log) * (x + bias)))`.
/// Each head has one `a_log`; it has one gate (Gated DeltaNet) or one for each key channel (Kimi Delta Attention).
#[derive(Clone, Debug)]
pub struct Decay {
    /// `[rows, heads * gates]`.
    pub x: Value,
    /// `[heads]`.
    pub a_log: WeightId,
    /// Whether `-exp(a_log)` is what is stored (GGUF).
    pub negated: bool,
    /// `[heads * gates]`.
    pub bias: WeightId,
    /// Lowest logarithm of the result, less than 0.
    pub floor: Option<f32>,
    /// `[rows, heads * gates]`, 0 to 1.
    pub y: Value,
}

/// Gates of a chunk: two exponentials and a logarithm each.
const COLUMNS: usize = 128;

/// `ln(1 + e^x)`.
pub(super) fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

impl Decay {
    /// `exp(a_log)`.
    fn rate(&self, stored: f32) -> f32 {
        if self.negated { -stored } else { stored.exp() }
    }

    /// Columns `start ..` of one row.
    fn piece(&self, frame: &Frame<'_>, row: usize, start: usize, y: &mut [f32]) {
        let (a_log, bias) = (frame.weight(self.a_log).vector(), frame.weight(self.bias).vector());
        let gates = bias.len() / a_log.len();
        y.iter_mut().zip(&frame.row(self.x, row)[start..]).zip(&bias[start..]).for_each(|((y, x), bias)| *y = x + bias);
        if self.floor.is_none() {
            frame.simd.softplus(y);
        }
        let mut at = start;
        while at < start + y.len() {
            let end = (at / gates * gates + gates).min(start + y.len());
            frame.simd.scale(-self.rate(a_log[at / gates]), &mut y[at - start..end - start]);
            at = end;
        }
        if let Some(floor) = self.floor {
            frame.simd.exp(y);
            y.iter_mut().for_each(|y| *y = floor / (1.0 + *y));
        }
        frame.simd.exp(y);
    }
}

const DECAY: Kernel = Kernel { file: "decay", name: "decay" };

#[derive(Clone, Copy)]
#[repr(C)]
struct DecayArgs {
    x: View,
    y: View,
    a_log: u64,
    bias: u64,
    gates: u32,
    negated: u32,
    floor: f32,
    spare: u32,
}

// SAFETY: the struct of kernels/decay.cu.
unsafe impl Args for DecayArgs {}

impl Op for Decay {
    op_common!("decay");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.x), (Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let (x, heads, gates) = (shapes.value(self.x), shapes.weight(self.a_log).1, shapes.weight(self.bias).1);
        ensure!(
            x.width == gates && heads > 0 && gates.is_multiple_of(heads),
            Internal,
            "decay: {x:?} with {heads} rates and {gates} biases"
        );
        Ok(vec![Shape::f32(x.rows, x.width)])
    }

    fn solo(&self, frame: &Frame<'_>) -> bool {
        frame.rows(self.y) * frame.slot(self.y).width.div_ceil(COLUMNS) <= 1
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        let (a_log, bias) = (frame.weight(self.a_log).vector(), frame.weight(self.bias).vector());
        let gates = bias.len() / a_log.len();
        for row in 0..y.rows() {
            let x = frame.row(self.x, row);
            // SAFETY: alone.
            for (i, y) in unsafe { y.row(row) }.iter_mut().enumerate() {
                let x = f64::from(x[i]) + f64::from(bias[i]);
                let a = f64::from(a_log[i / gates]);
                let rate = if self.negated { -a } else { a.exp() };
                *y = match self.floor {
                    None => (-rate * (x.max(0.0) + (-x.abs()).exp().ln_1p())).exp(),
                    Some(floor) => (f64::from(floor) / (1.0 + (-rate * x).exp())).exp(),
                } as f32;
            }
        }
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let gates = gpu.vector_len(Some(self.bias)) / gpu.vector_len(Some(self.a_log));
        let args = DecayArgs {
            x: gpu.view(self.x),
            y: gpu.view(self.y),
            a_log: gpu.vector(Some(self.a_log)),
            bias: gpu.vector(Some(self.bias)),
            gates: gates as u32,
            negated: u32::from(self.negated),
            floor: self.floor.unwrap_or(0.0),
            spare: 0,
        };
        gpu.launch(DECAY, Grid::cells(gpu.rows(self.y), gpu.width(self.y), 256), &args)
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let y = frame.output(self.y);
        let pieces = y.width().div_ceil(COLUMNS);
        turn.each(y.rows() * pieces, 1, |range| {
            for item in range {
                let (row, start) = (item / pieces, item % pieces * COLUMNS);
                // SAFETY: `each` gives an item, and so a piece, to one worker.
                self.piece(frame, row, start, unsafe { y.piece(row, start..(start + COLUMNS).min(y.width())) });
            }
        });
    }
}
