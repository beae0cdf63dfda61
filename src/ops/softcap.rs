//! A smooth bound on every element: `cap * tanh(x / cap)` (Gemma 2, 2024).
#![allow(unsafe_code)] // argument structs

use super::{Frame, Gpu, Op, Port, Shape, Shapes, Value, View};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{op_by_row, op_common};

const SOFTCAP: Kernel = Kernel { file: "softcap", name: "softcap_rows" };

#[derive(Clone, Copy)]
#[repr(C)]
struct SoftcapArgs {
    x: View,
    y: View,
    cap: f32,
    spare: u32,
}

// SAFETY: the struct of kernels/softcap.cu.
unsafe impl Args for SoftcapArgs {}

/// `y = cap * tanh(x / cap)`.
#[derive(Clone, Debug)]
pub struct Softcap {
    /// `[rows, width]`.
    pub x: Value,
    /// The bound.
    pub cap: f32,
    /// `[rows, width]`.
    pub y: Value,
}

impl Softcap {
    fn row(&self, frame: &Frame<'_>, row: usize, y: &mut [f32]) {
        for (y, x) in y.iter_mut().zip(frame.row(self.x, row)) {
            *y = self.cap * (x / self.cap).tanh();
        }
    }
}

impl Op for Softcap {
    op_common!("softcap");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.x), (Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let x = shapes.value(self.x);
        Ok(vec![Shape::f32(x.rows, x.width)])
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let args = SoftcapArgs { x: gpu.view(self.x), y: gpu.view(self.y), cap: self.cap, spare: 0 };
        gpu.launch(SOFTCAP, Grid::columns(gpu.rows(self.y), gpu.width(self.y)), &args)
    }

    op_by_row!(1);
}
