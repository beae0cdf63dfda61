//! What a sublayer computed, added to each residual stream by a weight of its own (Qwen 4 Exp's gated residual streams; streams do
//! not mix with each other).
#![allow(unsafe_code)] // rows of outputs, disjoint by `Turn::each_row`

use super::{Frame, Gpu, Op, Port, Shape, Shapes, Turn, Value, View, row_grain};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_common};

/// `y[s] = x[s] + 2 sigmoid(weight[s]) out`.
#[derive(Clone, Debug)]
pub struct HyperInject {
    /// `[rows, width]`.
    pub out: Value,
    /// `[rows, streams * width]`.
    pub x: Value,
    /// `[rows, streams]`.
    pub weight: Value,
    /// `[rows, streams * width]`.
    pub y: Value,
}

impl HyperInject {
    fn row(&self, frame: &Frame<'_>, row: usize, y: &mut [f32]) {
        let (out, x) = (frame.row(self.out, row), frame.row(self.x, row));
        let streams = x.chunks(out.len()).zip(y.chunks_mut(out.len()));
        for ((x, y), weight) in streams.zip(frame.row(self.weight, row)) {
            let factor = (2.0 / (1.0 + (-f64::from(*weight)).exp())) as f32;
            y.iter_mut().zip(x).zip(out).for_each(|((y, x), o)| *y = x + factor * o);
        }
    }
}

const HYPER_INJECT: Kernel = Kernel { file: "hyper_inject", name: "hyper_inject" };

#[derive(Clone, Copy)]
#[repr(C)]
struct HyperInjectArgs {
    out: View,
    x: View,
    weight: View,
    y: View,
}

// SAFETY: the struct of kernels/hyper_inject.cu.
unsafe impl Args for HyperInjectArgs {}

impl Op for HyperInject {
    op_common!("hyper_inject");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.out), (Port::In, &mut self.x), (Port::In, &mut self.weight), (Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let (out, x, weight) = (shapes.value(self.out), shapes.value(self.x), shapes.value(self.weight));
        let fits = x.width == weight.width * out.width && x.rows == out.rows && x.rows == weight.rows;
        ensure!(fits && out.width > 0, Internal, "hyper_inject: {out:?}, {x:?}, {weight:?}");
        Ok(vec![Shape::f32(x.rows, x.width)])
    }

    fn solo(&self, frame: &Frame<'_>) -> bool {
        frame.rows(self.y) <= row_grain(frame.slot(self.y).width)
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        for row in 0..y.rows() {
            let (out, x, weight) = (frame.row(self.out, row), frame.row(self.x, row), frame.row(self.weight, row));
            // SAFETY: alone.
            for (i, y) in unsafe { y.row(row) }.iter_mut().enumerate() {
                let factor = 2.0 / (1.0 + (-f64::from(weight[i / out.len()])).exp());
                *y = (f64::from(x[i]) + factor * f64::from(out[i % out.len()])) as f32;
            }
        }
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let (out, x, weight, y) = (gpu.view(self.out), gpu.view(self.x), gpu.view(self.weight), gpu.view(self.y));
        gpu.launch(HYPER_INJECT, Grid::cells(gpu.rows(self.y), gpu.width(self.y), 256), &HyperInjectArgs { out, x, weight, y })
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let y = frame.output(self.y);
        // SAFETY: `each_row` gives a row to one worker.
        turn.each_row(y.rows(), y.width(), |row| self.row(frame, row, unsafe { y.row(row) }));
    }
}
