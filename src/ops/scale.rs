//! A constant factor on every element (embedding scales, logit scales, residual multipliers).
#![allow(unsafe_code)] // argument structs

use super::{Frame, Gpu, Op, Port, Shape, Shapes, Value, View};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{op_by_row, op_common};

const SCALE: Kernel = Kernel { file: "scale", name: "scale_rows" };

#[derive(Clone, Copy)]
#[repr(C)]
struct ScaleArgs {
    x: View,
    y: View,
    factor: f32,
    spare: u32,
}

// SAFETY: the struct of kernels/scale.cu.
unsafe impl Args for ScaleArgs {}

/// `y = factor * x`.
#[derive(Clone, Debug)]
pub struct Scale {
    /// `[rows, width]`.
    pub x: Value,
    /// The factor.
    pub factor: f32,
    /// `[rows, width]`.
    pub y: Value,
}

impl Scale {
    fn row(&self, frame: &Frame<'_>, row: usize, y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(frame.row(self.x, row)) {
            *y = self.factor * x;
        }
    }
}

impl Op for Scale {
    op_common!("scale");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.x), (Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let x = shapes.value(self.x);
        Ok(vec![Shape::f32(x.rows, x.width)])
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let args = ScaleArgs { x: gpu.view(self.x), y: gpu.view(self.y), factor: self.factor, spare: 0 };
        gpu.launch(SCALE, Grid::columns(gpu.rows(self.y), gpu.width(self.y)), &args)
    }

    op_by_row!(1);
}
