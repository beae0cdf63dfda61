//! Operations whose result only products of 8-bit activations read, written as such: for devices, where each launch costs more than the work.
#![allow(unsafe_code)] // rows of outputs, disjoint by `Turn::each_row`; argument structs

use super::{Activation, Frame, Gpu, Kind, Op, Port, Shape, Shapes, Turn, Value, View, WeightId};
use crate::backend::cpu::activations::Q8Block;
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_common};

/// `sum = a + b; y = quantize(norm(sum))`: fusion of [`super::AddNorm`] and [`super::Quantize`].
#[derive(Clone, Debug)]
pub struct AddNormQuantize {
    /// `[rows, width]`; `width` is a multiple of 32.
    pub a: Value,
    /// `[rows, width]`.
    pub b: Value,
    /// `[width]`.
    pub weight: WeightId,
    /// Added to the mean square.
    pub eps: f32,
    /// `[rows, width]`.
    pub sum: Value,
    /// `[rows, width]` Q8.
    pub y: Value,
}

/// `y = quantize(act(gate) * up)`: fusion of [`super::ActMul`] and [`super::Quantize`].
#[derive(Clone, Debug)]
pub struct ActQuantize {
    /// The gate's activation.
    pub act: Activation,
    /// `[rows, width]`; `width` is a multiple of 32.
    pub gate: Value,
    /// `[rows, width]`, or none.
    pub up: Value,
    /// `[rows, width]` Q8.
    pub y: Value,
}

const ADD_NORM_QUANTIZE: Kernel = Kernel { file: "quantized", name: "add_norm_quantize" };
const ACT_QUANTIZE: Kernel = Kernel { file: "quantized", name: "act_quantize" };

#[derive(Clone, Copy)]
#[repr(C)]
struct AddNormQuantizeArgs {
    a: View,
    b: View,
    sum: View,
    y: View,
    weight: u64,
    eps: f32,
    spare: u32,
}

// SAFETY: the struct of kernels/quantized.cu.
unsafe impl Args for AddNormQuantizeArgs {}

#[derive(Clone, Copy)]
#[repr(C)]
struct ActQuantizeArgs {
    gate: View,
    up: View,
    y: View,
    act: u32,
    limit: f32,
    slope: f32,
    spare: u32,
}

// SAFETY: the struct of kernels/quantized.cu.
unsafe impl Args for ActQuantizeArgs {}

fn q8(x: Shape) -> Shape {
    Shape { rows: x.rows, width: x.width, kind: Kind::Q8, sliced: false }
}

impl AddNormQuantize {
    fn row(&self, frame: &Frame<'_>, row: usize, sum: &mut [f32], y: &mut [Q8Block]) {
        let weight = frame.weight(self.weight).vector();
        super::add::add_row(frame.row(self.a, row), frame.row(self.b, row), sum);
        let squares: f64 = sum.iter().map(|v| f64::from(*v) * f64::from(*v)).sum();
        let factor = 1.0 / (squares / sum.len() as f64 + f64::from(self.eps)).sqrt();
        for ((y, sum), weight) in y.iter_mut().zip(sum.chunks(32)).zip(weight.chunks(32)) {
            let x: [f32; 32] = std::array::from_fn(|i| (f64::from(sum[i]) * factor * f64::from(weight[i])) as f32);
            super::quantize::quantize_row(&x, std::slice::from_mut(y));
        }
    }
}

impl Op for AddNormQuantize {
    op_common!("add_norm_quantize");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.a), (Port::In, &mut self.b), (Port::Out, &mut self.sum), (Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let (a, b) = (shapes.value(self.a), shapes.value(self.b));
        ensure!(a.rows == b.rows && a.width == b.width && a.width.is_multiple_of(32), Internal, "add_norm_quantize: {a:?} and {b:?}");
        ensure!(shapes.weight(self.weight).1 == a.width, Internal, "add_norm_quantize: {:?}, {a:?}", shapes.weight(self.weight));
        Ok(vec![Shape::f32(a.rows, a.width), q8(a)])
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let sum = frame.output(self.sum);
        for row in 0..sum.rows() {
            // SAFETY: alone.
            unsafe { self.row(frame, row, sum.row(row), frame.output_q8(self.y, row)) };
        }
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let sum = frame.output(self.sum);
        turn.each_row(sum.rows(), sum.width(), |row| {
            // SAFETY: `each_row` gives a row to one worker.
            unsafe { self.row(frame, row, sum.row(row), frame.output_q8(self.y, row)) };
        });
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let (a, b, sum, y) = (gpu.view(self.a), gpu.view(self.b), gpu.view(self.sum), gpu.view(self.y));
        let args = AddNormQuantizeArgs { a, b, sum, y, weight: gpu.vector(Some(self.weight)), eps: self.eps, spare: 0 };
        gpu.launch(ADD_NORM_QUANTIZE, Grid::sums(gpu.rows(self.y), gpu.width(self.y)), &args)
    }
}

impl ActQuantize {
    fn row(&self, frame: &Frame<'_>, row: usize, y: &mut [Q8Block]) {
        let gate = frame.row(self.gate, row);
        let up = self.up.is_some().then(|| frame.row(self.up, row));
        for (block, y) in y.iter_mut().enumerate() {
            let x: [f32; 32] = std::array::from_fn(|i| {
                let at = block * 32 + i;
                let gate = f64::from(gate[at]);
                up.map_or_else(|| self.act.of(gate), |up| self.act.gated(gate, f64::from(up[at]))) as f32
            });
            super::quantize::quantize_row(&x, std::slice::from_mut(y));
        }
    }
}

impl Op for ActQuantize {
    op_common!("act_quantize");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        let mut ports = vec![(Port::In, &mut self.gate)];
        if self.up.is_some() {
            ports.push((Port::In, &mut self.up));
        }
        ports.push((Port::Out, &mut self.y));
        ports
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let gate = shapes.value(self.gate);
        ensure!(gate.width.is_multiple_of(32), Internal, "act_quantize: {gate:?} is no row of 32-element blocks");
        if self.up.is_some() {
            let up = shapes.value(self.up);
            ensure!(gate.rows == up.rows && gate.width == up.width, Internal, "act_quantize: {gate:?} and {up:?} differ");
        }
        Ok(vec![q8(gate)])
    }

    fn scalar(&self, frame: &Frame<'_>) {
        for row in 0..frame.rows(self.y) {
            // SAFETY: alone.
            self.row(frame, row, unsafe { frame.output_q8(self.y, row) });
        }
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        turn.each_row(frame.rows(self.y), frame.slot(self.y).width, |row| {
            // SAFETY: `each_row` gives a row to one worker.
            self.row(frame, row, unsafe { frame.output_q8(self.y, row) });
        });
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let (act, limit, slope) = self.act.kernel();
        let args = ActQuantizeArgs { gate: gpu.view(self.gate), up: gpu.view(self.up), y: gpu.view(self.y), act, limit, slope, spare: 0 };
        gpu.launch(ACT_QUANTIZE, Grid::columns(gpu.rows(self.y), gpu.width(self.y)), &args)
    }
}
