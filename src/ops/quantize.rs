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
}

// SAFETY: the struct of kernels/quantize.cu.
unsafe impl Args for QuantizeArgs {}

/// `y = round(x / scale)` by blocks of 32, `scale = max|x| / 127`.
#[derive(Clone, Debug)]
pub struct Quantize {
    /// `[rows, width]` f32; `width` is a multiple of 32.
    pub x: Value,
    /// `[rows, width]` Q8.
    pub y: Value,
}

impl Op for Quantize {
    op_common!("quantize");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.x), (Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let x = shapes.value(self.x);
        ensure!(x.kind == Kind::F32 && x.width.is_multiple_of(32), Internal, "quantize: {x:?} is no row of 32-element blocks");
        Ok(vec![Shape { rows: x.rows, width: x.width, kind: Kind::Q8, sliced: false }])
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let args = QuantizeArgs { x: gpu.view(self.x), y: gpu.view(self.y) };
        let blocks = gpu.width(self.y) / Q8_BLOCK;
        gpu.launch(QUANTIZE, Grid::new([gpu.rows(self.y), blocks.div_ceil(8), 1], blocks.clamp(1, 8) * 32).early(), &args)
    }

    fn solo(&self, frame: &Frame<'_>) -> bool {
        frame.rows(self.y) <= row_grain(frame.slot(self.y).width)
    }

    fn scalar(&self, frame: &Frame<'_>) {
        for row in 0..frame.rows(self.y) {
            // SAFETY: alone.
            quantize_row(frame.row(self.x, row), unsafe { frame.output_q8(self.y, row) });
        }
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        turn.each_row(frame.rows(self.y), frame.slot(self.y).width, |row| {
            // SAFETY: `each_row` gives a row to one worker.
            frame.simd.quantize_row(frame.row(self.x, row), unsafe { frame.output_q8(self.y, row) });
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
