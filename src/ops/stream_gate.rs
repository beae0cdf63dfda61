//! A value that several residual streams take in, each as much as its own gate lets through (Qwen 4 Exp's n-gram memory).
#![allow(unsafe_code)] // rows of outputs, disjoint by `Turn::each_row`

use super::lanes::dot;
use super::{Frame, Gpu, Op, Port, Shape, Shapes, Turn, Value, View, row_grain};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_common};

/// `y[s] = sigmoid(g_s) value` with `g_s` the signed square root of `key_s . query_s / sqrt(width)`, at least `FLOOR` in size.
#[derive(Clone, Debug)]
pub struct StreamGate {
    /// `[rows, streams * width]`.
    pub key: Value,
    /// `[rows, streams * width]`.
    pub query: Value,
    /// `[rows, width]`.
    pub value: Value,
    /// `[rows, streams * width]`.
    pub y: Value,
}

/// Smallest size under the square root, except for 0 itself.
const FLOOR: f64 = 1e-6;

/// The gate of a dot product that was divided by the square root of the width.
fn gate(dot: f64) -> f64 {
    let root = if dot == 0.0 { 0.0 } else { dot.abs().max(FLOOR).sqrt().copysign(dot) };
    1.0 / (1.0 + (-root).exp())
}

impl StreamGate {
    fn row(&self, frame: &Frame<'_>, row: usize, y: &mut [f32]) {
        let value = frame.row(self.value, row);
        let width = value.len();
        let pairs = frame.row(self.key, row).chunks(width).zip(frame.row(self.query, row).chunks(width));
        for ((key, query), y) in pairs.zip(y.chunks_mut(width)) {
            let factor = gate(f64::from(dot(key, query)) / (width as f64).sqrt()) as f32;
            y.iter_mut().zip(value).for_each(|(y, v)| *y = factor * v);
        }
    }
}

const STREAM_GATE: Kernel = Kernel { file: "stream_gate", name: "stream_gate" };

#[derive(Clone, Copy)]
#[repr(C)]
struct StreamGateArgs {
    key: View,
    query: View,
    value: View,
    y: View,
}

// SAFETY: the struct of kernels/stream_gate.cu.
unsafe impl Args for StreamGateArgs {}

impl Op for StreamGate {
    op_common!("stream_gate");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.key), (Port::In, &mut self.query), (Port::In, &mut self.value), (Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let (key, query, value) = (shapes.value(self.key), shapes.value(self.query), shapes.value(self.value));
        let fits = value.width > 0 && key.width == query.width && key.width.is_multiple_of(value.width);
        ensure!(fits && key.rows == query.rows && key.rows == value.rows, Internal, "stream_gate: {key:?}, {query:?}, {value:?}");
        Ok(vec![Shape::f32(key.rows, key.width)])
    }

    fn solo(&self, frame: &Frame<'_>) -> bool {
        frame.rows(self.y) <= row_grain(frame.slot(self.y).width)
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        for row in 0..y.rows() {
            let (key, query, value) = (frame.row(self.key, row), frame.row(self.query, row), frame.row(self.value, row));
            let width = value.len();
            // SAFETY: alone.
            for (i, y) in unsafe { y.row(row) }.iter_mut().enumerate() {
                let start = i / width * width;
                let dot: f64 = (start..start + width).map(|j| f64::from(key[j]) * f64::from(query[j])).sum();
                *y = (gate(dot / (width as f64).sqrt()) * f64::from(value[i % width])) as f32;
            }
        }
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let (key, query, value, y) = (gpu.view(self.key), gpu.view(self.query), gpu.view(self.value), gpu.view(self.y));
        let (width, streams) = (gpu.width(self.value), gpu.width(self.key) / gpu.width(self.value));
        let grid = Grid::new([gpu.rows(self.y), streams, 1], width.next_multiple_of(32).min(256));
        gpu.launch(STREAM_GATE, grid, &StreamGateArgs { key, query, value, y })
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let y = frame.output(self.y);
        // SAFETY: `each_row` gives a row to one worker.
        turn.each_row(y.rows(), y.width(), |row| self.row(frame, row, unsafe { y.row(row) }));
    }
}

#[cfg(test)]
mod tests {
    use super::gate;

    #[test]
    fn gates_are_symmetric_and_floored() {
        assert_eq!(gate(0.0), 0.5);
        assert!((gate(0.49) - 1.0 / (1.0 + (-0.7f64).exp())).abs() < 1e-15);
        assert!((gate(1e-12) - gate(1e-6)).abs() < 1e-15 && gate(1e-12) > 0.5);
        assert!((gate(-2.0) + gate(2.0) - 1.0).abs() < 1e-15);
    }
}
