//! The last row of each sequence: what the next token is predicted from.
#![allow(unsafe_code)] // argument structs

use super::{Frame, Gpu, Op, Port, Rows, Shape, Shapes, Value, View};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_by_row, op_common};

const LAST_ROWS: Kernel = Kernel { file: "last_rows", name: "last_rows" };

#[derive(Clone, Copy)]
#[repr(C)]
struct LastRowsArgs {
    x: View,
    y: View,
    batch: u64,
}

// SAFETY: the struct of kernels/last_rows.cu.
unsafe impl Args for LastRowsArgs {}

/// `y[s] = x[last row of sequence s]`.
#[derive(Clone, Debug)]
pub struct LastRows {
    /// `[rows, width]`.
    pub x: Value,
    /// `[sequences, width]`.
    pub y: Value,
}

impl LastRows {
    fn row(&self, frame: &Frame<'_>, row: usize, y: &mut [f32]) {
        y.copy_from_slice(frame.row(self.x, frame.batch.segments[row].rows.end - 1));
    }
}

impl Op for LastRows {
    op_common!("last_rows");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.x), (Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let x = shapes.value(self.x);
        ensure!(x.rows == Rows::All, Internal, "last_rows: {x:?} is cut already");
        Ok(vec![Shape::f32(Rows::Last, x.width)])
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let args = LastRowsArgs { x: gpu.view(self.x), y: gpu.view(self.y), batch: gpu.batch_at() };
        gpu.launch(LAST_ROWS, Grid::columns(gpu.rows(self.y), gpu.width(self.y)), &args)
    }

    op_by_row!(1);
}
