//! Sinusoidal positions added to embeddings (Vaswani et al., 2017, in the arrangement of tensor2tensor: sines, then cosines).
#![allow(unsafe_code)] // rows of outputs, disjoint by `Turn::each_row`

use super::{Frame, Gpu, Op, Port, Shape, Shapes, Turn, Value, View, WeightId, row_grain};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_common};

const SINUSOID: Kernel = Kernel { file: "sinusoid", name: "sinusoid" };

#[derive(Clone, Copy)]
#[repr(C)]
struct SinusoidArgs {
    x: View,
    y: View,
    batch: u64,
    frequencies: u64,
    offset: u32,
    spare: u32,
}

// SAFETY: the struct of kernels/sinusoid.cu.
unsafe impl Args for SinusoidArgs {}

/// `y[r] = x[r] + [sin(p f_0) .. sin(p f_n), cos(p f_0) .. cos(p f_n)]`, `p` the position of row `r` plus `offset`. An odd last
/// column stays `x`.
#[derive(Clone, Debug)]
pub struct Sinusoid {
    /// `[rows, width]`.
    pub x: Value,
    /// `f`: `[width / 2]`.
    pub frequencies: WeightId,
    /// Number of the first position.
    pub offset: usize,
    /// `[rows, width]`.
    pub y: Value,
}

impl Sinusoid {
    /// Angles are rounded to f32 first, as the reference does.
    fn row(&self, frame: &Frame<'_>, row: usize, y: &mut [f32]) {
        let position = (frame.batch.positions[row] as usize + self.offset) as f32;
        let frequencies = frame.weight(self.frequencies).vector();
        y.copy_from_slice(frame.row(self.x, row));
        let (sines, rest) = y.split_at_mut(frequencies.len());
        for ((f, sine), cosine) in frequencies.iter().zip(sines).zip(rest) {
            let (s, c) = f64::from(position * f).sin_cos();
            *sine += s as f32;
            *cosine += c as f32;
        }
    }
}

impl Op for Sinusoid {
    op_common!("sinusoid");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.x), (Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let (x, n) = (shapes.value(self.x), shapes.weight(self.frequencies).1);
        ensure!(x.width / 2 == n, Internal, "sinusoid: {n} frequencies for {x:?}");
        Ok(vec![Shape::f32(x.rows, x.width)])
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let (frequencies, offset) = (gpu.vector(Some(self.frequencies)), self.offset as u32);
        let args = SinusoidArgs { x: gpu.view(self.x), y: gpu.view(self.y), batch: gpu.batch_at(), frequencies, offset, spare: 0 };
        gpu.launch(SINUSOID, Grid::columns(gpu.rows(self.y), gpu.width(self.y)), &args)
    }

    fn solo(&self, frame: &Frame<'_>) -> bool {
        frame.rows(self.y) <= row_grain(frame.slot(self.y).width * 8)
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        for row in 0..y.rows() {
            // SAFETY: alone.
            self.row(frame, row, unsafe { y.row(row) });
        }
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let y = frame.output(self.y);
        // SAFETY: `each_row` gives a row to one worker. A sine costs about eight elements of other work.
        turn.each_row(y.rows(), y.width() * 8, |row| self.row(frame, row, unsafe { y.row(row) }));
    }
}
