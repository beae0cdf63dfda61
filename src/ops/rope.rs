//! Rotary position embedding (Su et al., 2021): a table of cosines and sines for the batch, and the rotation itself.
//!
//! The table is computed once for each run and shared by all layers that use the same frequencies. Angles are rounded
//! to f32 before cosine and sine are taken, as the reference implementations do; at long contexts that is visible.
#![allow(unsafe_code)] // argument structs

use super::{Frame, Gpu, Op, Port, Rows, Shape, Shapes, Value, View, WeightId};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_by_row, op_common};

const ROPE_TABLE: Kernel = Kernel { file: "rope", name: "rope_table" };
pub(super) const ROPE: Kernel = Kernel { file: "rope", name: "rope_turn" };

#[derive(Clone, Copy)]
#[repr(C)]
struct RopeTableArgs {
    y: View,
    batch: u64,
    frequencies: u64,
    factor: f32,
    spare: u32,
}

// SAFETY: the struct of kernels/rope.cu.
unsafe impl Args for RopeTableArgs {}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct RopeArgs {
    pub(super) x: View,
    pub(super) table: View,
    pub(super) y: View,
    pub(super) head_dim: u32,
    pub(super) first: u32,
    pub(super) pairs: u32,
    pub(super) direction: f32,
}

// SAFETY: the struct of kernels/rope.cu.
unsafe impl Args for RopeArgs {}

/// `y[r] = factor * [cos(p f_0) .. cos(p f_n), sin(p f_0) .. sin(p f_n)]`, `p` the position of row `r`.
#[derive(Clone, Debug)]
pub struct RopeTable {
    /// `f`: `[rotary_dim / 2]`.
    pub frequencies: WeightId,
    /// YaRN's attention factor; 1 elsewhere.
    pub factor: f32,
    /// `[rows, rotary_dim]`.
    pub y: Value,
}

impl RopeTable {
    fn row(&self, frame: &Frame<'_>, row: usize, y: &mut [f32]) {
        let position = frame.batch.positions[row] as f32;
        let (cos, sin) = y.split_at_mut(y.len() / 2);
        for ((f, cos), sin) in frame.weight(self.frequencies).vector().iter().zip(cos).zip(sin) {
            let (s, c) = f64::from(position * f).sin_cos();
            (*cos, *sin) = (c as f32 * self.factor, s as f32 * self.factor);
        }
    }
}

impl Op for RopeTable {
    op_common!("rope_table");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        Ok(vec![Shape::f32(Rows::All, shapes.weight(self.frequencies).1 * 2)])
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let (y, frequencies) = (gpu.view(self.y), gpu.vector(Some(self.frequencies)));
        let threads = (gpu.width(self.y) / 2).next_multiple_of(32).clamp(32, 256);
        let args = RopeTableArgs { y, batch: gpu.batch_at(), frequencies, factor: self.factor, spare: 0 };
        gpu.launch(ROPE_TABLE, Grid::new([gpu.rows(self.y), 1, 1], threads).early(), &args)
    }

    op_by_row!(8);
}

/// Which elements of a head turn together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RopeStyle {
    /// `i` with `i + rotary_dim / 2`.
    Halves,
    /// `2i` with `2i + 1`.
    Pairs,
}

/// Turns the first `rotary_dim` elements of each head; the rest pass.
#[derive(Clone, Debug)]
pub struct Rope {
    /// `[rows, heads * head_dim]`.
    pub x: Value,
    /// `[rows, rotary_dim]` from [`RopeTable`].
    pub table: Value,
    /// Elements of a head.
    pub head_dim: usize,
    /// Which elements turn together.
    pub style: RopeStyle,
    /// `[rows, heads * head_dim]`.
    pub y: Value,
}

impl Rope {
    fn row(&self, frame: &Frame<'_>, row: usize, y: &mut [f32]) {
        let (cos, sin) = {
            let table = frame.row(self.table, row);
            table.split_at(table.len() / 2)
        };
        let half = cos.len();
        for (x, y) in frame.row(self.x, row).chunks(self.head_dim).zip(y.chunks_mut(self.head_dim)) {
            match self.style {
                RopeStyle::Halves => {
                    let ((x0, x1), (y0, y1)) = (x[..2 * half].split_at(half), y[..2 * half].split_at_mut(half));
                    for i in 0..half {
                        y0[i] = x0[i] * cos[i] - x1[i] * sin[i];
                        y1[i] = x1[i] * cos[i] + x0[i] * sin[i];
                    }
                }
                RopeStyle::Pairs => {
                    for i in 0..half {
                        y[2 * i] = x[2 * i] * cos[i] - x[2 * i + 1] * sin[i];
                        y[2 * i + 1] = x[2 * i + 1] * cos[i] + x[2 * i] * sin[i];
                    }
                }
            }
            y[2 * half..].copy_from_slice(&x[2 * half..]);
        }
    }
}

impl Op for Rope {
    op_common!("rope");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.x), (Port::In, &mut self.table), (Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let (x, table) = (shapes.value(self.x), shapes.value(self.table));
        ensure!(x.width.is_multiple_of(self.head_dim), Internal, "rope: rows of {} do not split into heads of {}", x.width, self.head_dim);
        ensure!(table.width <= self.head_dim, Unsupported, "rope: {} rotary elements in heads of {}", table.width, self.head_dim);
        Ok(vec![Shape::f32(x.rows, x.width)])
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let args = RopeArgs {
            x: gpu.view(self.x),
            table: gpu.view(self.table),
            y: gpu.view(self.y),
            head_dim: self.head_dim as u32,
            first: 0,
            pairs: u32::from(self.style == RopeStyle::Pairs),
            direction: 1.0,
        };
        gpu.launch(ROPE, Grid::columns(gpu.rows(self.y), gpu.width(self.y)), &args)
    }

    op_by_row!(1);
}
