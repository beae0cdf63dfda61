//! A gate on each head: all elements of a head are multiplied by one activated number (Laguna's softplus gates).
#![allow(unsafe_code)] // rows of outputs, disjoint by `Turn::each_row`

use super::{Activation, Frame, Gpu, Op, Port, Shape, Shapes, Turn, Value, View, row_grain};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_common};

/// `y[h][i] = act(gate[h]) * x[h][i]`.
#[derive(Clone, Debug)]
pub struct HeadGate {
    /// The gate's activation.
    pub act: Activation,
    /// `[rows, heads]`.
    pub gate: Value,
    /// `[rows, heads * dim]`.
    pub x: Value,
    /// `[rows, heads * dim]`.
    pub y: Value,
}

impl HeadGate {
    fn row(&self, frame: &Frame<'_>, row: usize, y: &mut [f32]) {
        let (gate, x) = (frame.row(self.gate, row), frame.row(self.x, row));
        let dim = x.len() / gate.len();
        for ((y, x), gate) in y.chunks_mut(dim).zip(x.chunks(dim)).zip(gate) {
            let factor = self.act.of(f64::from(*gate)) as f32;
            y.iter_mut().zip(x).for_each(|(y, x)| *y = factor * x);
        }
    }
}

const HEAD_GATE: Kernel = Kernel { file: "head_gate", name: "head_gate" };

#[derive(Clone, Copy)]
#[repr(C)]
struct HeadGateArgs {
    gate: View,
    x: View,
    y: View,
    act: u32,
    limit: f32,
    slope: f32,
    spare: u32,
}

// SAFETY: the struct of kernels/head_gate.cu.
unsafe impl Args for HeadGateArgs {}

impl Op for HeadGate {
    op_common!("head_gate");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.gate), (Port::In, &mut self.x), (Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let (gate, x) = (shapes.value(self.gate), shapes.value(self.x));
        ensure!(gate.rows == x.rows && gate.width > 0 && x.width.is_multiple_of(gate.width), Internal, "{gate:?} gates {x:?}");
        Ok(vec![Shape::f32(x.rows, x.width)])
    }

    fn solo(&self, frame: &Frame<'_>) -> bool {
        frame.rows(self.y) <= row_grain(frame.slot(self.y).width)
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        for row in 0..y.rows() {
            let (gate, x) = (frame.row(self.gate, row), frame.row(self.x, row));
            // SAFETY: alone.
            for (i, y) in unsafe { y.row(row) }.iter_mut().enumerate() {
                *y = (self.act.of(f64::from(gate[i / (x.len() / gate.len())])) * f64::from(x[i])) as f32;
            }
        }
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let (act, limit, slope) = self.act.kernel();
        let args = HeadGateArgs { gate: gpu.view(self.gate), x: gpu.view(self.x), y: gpu.view(self.y), act, limit, slope, spare: 0 };
        gpu.launch(HEAD_GATE, Grid::cells(gpu.rows(self.y), gpu.width(self.y), 256), &args)
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let y = frame.output(self.y);
        // SAFETY: `each_row` gives a row to one worker.
        turn.each_row(y.rows(), y.width(), |row| self.row(frame, row, unsafe { y.row(row) }));
    }
}
