//! Columns of several values side by side.
#![allow(unsafe_code)] // argument structs

use super::{Frame, Gpu, Op, Port, Shape, Shapes, Value, View};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_by_row, op_common};

const JOIN: Kernel = Kernel { file: "join", name: "join_part" };

#[derive(Clone, Copy)]
#[repr(C)]
struct JoinArgs {
    x: View,
    y: View,
    first: u32,
    spare: u32,
}

// SAFETY: the struct of kernels/join.cu.
unsafe impl Args for JoinArgs {}

/// `y[r] = [parts[0][r], parts[1][r], ...]`.
#[derive(Clone, Debug)]
pub struct Join {
    /// Each `[rows, its width]`.
    pub parts: Vec<Value>,
    /// `[rows, sum of the widths]`.
    pub y: Value,
}

impl Join {
    fn row(&self, frame: &Frame<'_>, row: usize, mut y: &mut [f32]) {
        for &part in &self.parts {
            let x = frame.row(part, row);
            let (here, rest) = y.split_at_mut(x.len());
            here.copy_from_slice(x);
            y = rest;
        }
    }
}

impl Op for Join {
    op_common!("join");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        self.parts.iter_mut().map(|p| (Port::In, p)).chain([(Port::Out, &mut self.y)]).collect()
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let parts: Vec<Shape> = self.parts.iter().map(|p| shapes.value(*p)).collect();
        ensure!(parts.first().is_some_and(|f| parts.iter().all(|p| p.rows == f.rows)), Internal, "join: {parts:?} differ in rows");
        Ok(vec![Shape::f32(parts[0].rows, parts.iter().map(|p| p.width).sum())])
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let mut first = 0;
        for &part in &self.parts {
            let args = JoinArgs { x: gpu.view(part), y: gpu.view(self.y), first, spare: 0 };
            gpu.launch(JOIN, Grid::columns(gpu.rows(self.y), gpu.width(part)), &args)?;
            first += args.x.width;
        }
        Ok(())
    }

    op_by_row!(1);
}
