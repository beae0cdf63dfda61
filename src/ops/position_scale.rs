//! A factor that grows with the position, for queries past the trained length (Llama 4, 2025).
#![allow(unsafe_code)] // argument structs

use super::{Frame, Gpu, Op, Port, Shape, Shapes, Value, View};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_by_row, op_common};

const POSITION_SCALE: Kernel = Kernel { file: "position_scale", name: "position_scale" };

#[derive(Clone, Copy)]
#[repr(C)]
struct PositionScaleArgs {
    x: View,
    y: View,
    batch: u64,
    beta: f32,
    original: u32,
}

// SAFETY: the struct of kernels/position_scale.cu.
unsafe impl Args for PositionScaleArgs {}

/// `y = x * (1 + beta ln(1 + floor(position / original)))`.
#[derive(Clone, Debug)]
pub struct PositionScale {
    /// `[rows, width]`.
    pub x: Value,
    /// Strength.
    pub beta: f32,
    /// Trained length.
    pub original: usize,
    /// `[rows, width]`.
    pub y: Value,
}

impl PositionScale {
    fn row(&self, frame: &Frame<'_>, row: usize, y: &mut [f32]) {
        let turns = frame.batch.positions[row] as usize / self.original;
        let factor = (1.0 + f64::from(self.beta) * (1.0 + turns as f64).ln()) as f32;
        for (y, x) in y.iter_mut().zip(frame.row(self.x, row)) {
            *y = x * factor;
        }
    }
}

impl Op for PositionScale {
    op_common!("position_scale");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.x), (Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let x = shapes.value(self.x);
        ensure!(self.original > 0 && x.rows == super::Rows::All, Internal, "position_scale: {x:?}, original length {}", self.original);
        Ok(vec![Shape::f32(x.rows, x.width)])
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let original = u32::try_from(self.original).unwrap_or(u32::MAX);
        let args = PositionScaleArgs { x: gpu.view(self.x), y: gpu.view(self.y), batch: gpu.batch_at(), beta: self.beta, original };
        gpu.launch(POSITION_SCALE, Grid::columns(gpu.rows(self.y), gpu.width(self.y)), &args)
    }

    op_by_row!(1);
}
