//! A stored factor on every element: one number for the whole row (Gemma 4's layer scalar), or one for each column.
#![allow(unsafe_code)] // argument structs

use super::{Frame, Gpu, Op, Port, Shape, Shapes, Value, View, WeightId};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_by_row, op_common};

const SCALE_BY: Kernel = Kernel { file: "scale_by", name: "scale_by" };

#[derive(Clone, Copy)]
#[repr(C)]
struct ScaleByArgs {
    x: View,
    y: View,
    factor: u64,
    factors: u32,
    spare: u32,
}

// SAFETY: the struct of kernels/scale_by.cu.
unsafe impl Args for ScaleByArgs {}

/// `y = factor * x`.
#[derive(Clone, Debug)]
pub struct ScaleBy {
    /// `[rows, width]`.
    pub x: Value,
    /// `[1]` or `[width]`.
    pub factor: WeightId,
    /// `[rows, width]`.
    pub y: Value,
}

impl ScaleBy {
    fn row(&self, frame: &Frame<'_>, row: usize, y: &mut [f32]) {
        let x = frame.row(self.x, row);
        match frame.weight(self.factor).vector() {
            [factor] => y.iter_mut().zip(x).for_each(|(y, x)| *y = factor * x),
            factors => y.iter_mut().zip(x).zip(factors).for_each(|((y, x), factor)| *y = factor * x),
        }
    }
}

impl Op for ScaleBy {
    op_common!("scale_by");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.x), (Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let (x, factors) = (shapes.value(self.x), shapes.weight(self.factor).1);
        ensure!(factors == 1 || factors == x.width, Internal, "scale_by: {factors} factors for rows of {}", x.width);
        Ok(vec![Shape::f32(x.rows, x.width)])
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let (factor, factors) = (gpu.vector(Some(self.factor)), gpu.vector_len(Some(self.factor)) as u32);
        let args = ScaleByArgs { x: gpu.view(self.x), y: gpu.view(self.y), factor, factors, spare: 0 };
        gpu.launch(SCALE_BY, Grid::columns(gpu.rows(self.y), gpu.width(self.y)), &args)
    }

    op_by_row!(1);
}
