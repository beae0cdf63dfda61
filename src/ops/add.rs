//! Sum of two values, alone or with the norm that follows it.
#![allow(unsafe_code)] // rows of outputs, disjoint by `Turn::each_row`; argument structs

use super::{Frame, Gpu, Norm, NormKind, Op, Port, Shape, Shapes, Turn, Value, View, WeightId, row_grain};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_by_row, op_common};

/// `y = a + b`.
#[derive(Clone, Debug)]
pub struct Add {
    /// `[rows, width]`.
    pub a: Value,
    /// `[rows, width]`.
    pub b: Value,
    /// `[rows, width]`.
    pub y: Value,
}

const ADD: Kernel = Kernel { file: "add", name: "add_rows" };
const ADD_NORM: Kernel = Kernel { file: "add", name: "add_norm" };

#[derive(Clone, Copy)]
#[repr(C)]
struct AddArgs {
    a: View,
    b: View,
    y: View,
}

// SAFETY: the struct of kernels/add.cu.
unsafe impl Args for AddArgs {}

#[derive(Clone, Copy)]
#[repr(C)]
struct AddNormArgs {
    a: View,
    b: View,
    sum: View,
    y: View,
    weight: u64,
    eps: f32,
    spare: u32,
}

// SAFETY: the struct of kernels/add.cu.
unsafe impl Args for AddNormArgs {}

pub(super) fn add_row(a: &[f32], b: &[f32], y: &mut [f32]) {
    for ((y, a), b) in y.iter_mut().zip(a).zip(b) {
        *y = a + b;
    }
}

impl Add {
    fn row(&self, frame: &Frame<'_>, row: usize, y: &mut [f32]) {
        add_row(frame.row(self.a, row), frame.row(self.b, row), y);
    }
}

impl Op for Add {
    op_common!("add");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.a), (Port::In, &mut self.b), (Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let (a, b) = (shapes.value(self.a), shapes.value(self.b));
        ensure!(a.rows == b.rows && a.width == b.width, Internal, "add: {a:?} and {b:?} differ");
        Ok(vec![Shape::f32(a.rows, a.width)])
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let args = AddArgs { a: gpu.view(self.a), b: gpu.view(self.b), y: gpu.view(self.y) };
        gpu.launch(ADD, Grid::columns(gpu.rows(self.y), gpu.width(self.y)), &args)
    }

    op_by_row!(1);
}

/// `sum = a + b; y = norm(sum)`: the residual stream and what the next block reads. Exact fusion of [`Add`] and an
/// RMS [`Norm`] over the whole row.
#[derive(Clone, Debug)]
pub struct AddNorm {
    /// `[rows, width]`.
    pub a: Value,
    /// `[rows, width]`.
    pub b: Value,
    /// `[width]`.
    pub weight: WeightId,
    /// Added to the mean square.
    pub eps: f32,
    /// `[rows, width]`.
    pub sum: Value,
    /// `[rows, width]`.
    pub y: Value,
}

impl AddNorm {
    fn norm(&self) -> Norm {
        Norm { kind: NormKind::Rms, x: self.sum, weight: Some(self.weight), bias: None, group: 0, eps: self.eps, y: self.y }
    }
}

impl Op for AddNorm {
    op_common!("add_norm");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.a), (Port::In, &mut self.b), (Port::Out, &mut self.sum), (Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let (a, b) = (shapes.value(self.a), shapes.value(self.b));
        ensure!(a.rows == b.rows && a.width == b.width, Internal, "add_norm: {a:?} and {b:?} differ");
        ensure!(shapes.weight(self.weight).1 == a.width, Internal, "add_norm: weight {:?}, row of {}", shapes.weight(self.weight), a.width);
        Ok(vec![Shape::f32(a.rows, a.width); 2])
    }

    fn prepares(&self) -> Option<Value> {
        Some(self.y)
    }

    fn solo(&self, frame: &Frame<'_>) -> bool {
        frame.rows(self.y) <= row_grain(frame.slot(self.y).width)
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let sum = frame.output(self.sum);
        for row in 0..sum.rows() {
            // SAFETY: alone.
            add_row(frame.row(self.a, row), frame.row(self.b, row), unsafe { sum.row(row) });
        }
        self.norm().scalar(frame);
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let (a, b, sum, y) = (gpu.view(self.a), gpu.view(self.b), gpu.view(self.sum), gpu.view(self.y));
        let args = AddNormArgs { a, b, sum, y, weight: gpu.vector(Some(self.weight)), eps: self.eps, spare: 0 };
        gpu.launch(ADD_NORM, Grid::sums(gpu.rows(self.y), gpu.width(self.y)), &args)
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let (sum, y) = (frame.output(self.sum), frame.output(self.y));
        let weight = frame.weight(self.weight).vector();
        turn.each_row(y.rows(), y.width(), |row| {
            // SAFETY: `each_row` gives a row to one worker; the two outputs do not overlap.
            let (sum, y) = unsafe { (sum.row(row), y.row(row)) };
            add_row(frame.row(self.a, row), frame.row(self.b, row), sum);
            frame.simd.rms_norm(sum, weight, self.eps, y);
        });
    }
}
