//! 8-bit activations: codes with one scale for each 32 elements, and the sums the integer products need.
#![allow(unsafe_code)] // rows of outputs, disjoint by `Turn::each_row`

use super::{Frame, Gpu, Kind, Op, Port, Shape, Shapes, Turn, Value, View, row_grain};
use crate::backend::cpu::activations::{Q8_BLOCK, Q8Block};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_common};

const QUANTIZE: Kernel = Kernel { file: "quantize", name: "quantize_rows" };

#[derive(Clone, Copy)]
#[repr(C)]
struct QuantizeArgs {
    x: View,
    y: View,
    run: u32,
    tail: u32,
}

// SAFETY: the struct of kernels/quantize.cu.
unsafe impl Args for QuantizeArgs {}

/// `y = round(x / scale)` by blocks of 32, `scale = max|x| / 127`.
#[derive(Clone, Debug)]
pub struct Quantize {
    /// `[rows, runs * (width + tail)]` f32; `width` is a multiple of 32.
    pub x: Value,
    /// Runs of a row; 1 but for matrices that each have their own.
    pub runs: usize,
    /// Elements behind each run that are left out.
    pub tail: usize,
    /// `[rows, runs * width]` Q8.
    pub y: Value,
}

impl Quantize {
    /// The runs of a row of `x` with their blocks in a row of `y`.
    fn runs<'a>(&self, x: &'a [f32], y: &'a mut [Q8Block]) -> impl Iterator<Item = (&'a [f32], &'a mut [Q8Block])> {
        let (step, tail) = (x.len() / self.runs, self.tail);
        x.chunks(step).map(move |x| &x[..step - tail]).zip(y.chunks_mut((step - tail) / Q8_BLOCK))
    }
}

impl Op for Quantize {
    op_common!("quantize");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.x), (Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let x = shapes.value(self.x);
        let width = (x.width / self.runs).saturating_sub(self.tail);
        let fits = x.kind == Kind::F32 && width.is_multiple_of(32) && width > 0 && x.width == self.runs * (width + self.tail);
        ensure!(fits, Internal, "quantize: {x:?} has no {} runs of 32-element blocks and {}", self.runs, self.tail);
        Ok(vec![Shape { rows: x.rows, width: self.runs * width, kind: Kind::Q8, sliced: false }])
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let run = (gpu.width(self.y) / self.runs) as u32;
        let args = QuantizeArgs { x: gpu.view(self.x), y: gpu.view(self.y), run, tail: self.tail as u32 };
        let blocks = gpu.width(self.y) / Q8_BLOCK;
        gpu.launch(QUANTIZE, Grid::new([gpu.rows(self.y), blocks.div_ceil(8), 1], blocks.clamp(1, 8) * 32).early(), &args)
    }

    fn solo(&self, frame: &Frame<'_>) -> bool {
        frame.rows(self.y) <= row_grain(frame.slot(self.y).width)
    }

    fn scalar(&self, frame: &Frame<'_>) {
        for row in 0..frame.rows(self.y) {
            // SAFETY: alone.
            let y = unsafe { frame.output_q8(self.y, row) };
            self.runs(frame.row(self.x, row), y).for_each(|(x, y)| quantize_row(x, y));
        }
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        turn.each_row(frame.rows(self.y), frame.slot(self.y).width, |row| {
            // SAFETY: `each_row` gives a row to one worker.
            let y = unsafe { frame.output_q8(self.y, row) };
            self.runs(frame.row(self.x, row), y).for_each(|(x, y)| frame.simd.quantize_row(x, y));
        });
    }
}

/// The definition: nearest code, half to even; a block of zeros has scale 0; what is not finite makes the scale NaN.
pub(super) fn quantize_row(x: &[f32], blocks: &mut [Q8Block]) {
    for (block, x) in blocks.iter_mut().zip(x.chunks(Q8_BLOCK)) {
        let most = x.iter().fold(0.0f32, |m, v| m.max(v.abs()));
        let finite = x.iter().all(|v| v.is_finite());
        let inverse = if most > 0.0 && finite { 127.0 / most } else { 0.0 };
        let codes = std::array::from_fn(|i| if finite { (x[i] * inverse).round_ties_even() as i8 } else { 0 });
        *block = Q8Block::of(codes, if finite { most / 127.0 } else { f32::NAN });
    }
}
