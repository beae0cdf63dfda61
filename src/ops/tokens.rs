//! Token ids as values, and rows of tables looked up by computed ids: what n-gram embeddings are made of.
//!
//! Computed ids travel as the bits of an f32 (see [`bits`]), because tables may have more rows than f32 counts.
#![allow(unsafe_code)] // rows of outputs, disjoint by `Turn::each_row`

use super::{Frame, Gpu, Op, Part, Port, Rows, Shape, Shapes, Turn, Uses, Value, View, WeightId};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_by_row, op_common};

/// An id as a value carries it.
pub(super) fn bits(id: u32) -> f32 {
    f32::from_bits(id)
}

/// `y[r]` is the token of row `r`, as a whole number.
#[derive(Clone, Debug)]
pub struct TokenIds {
    /// `[rows, 1]`.
    pub y: Value,
}

const TOKEN_IDS: Kernel = Kernel { file: "tokens", name: "token_ids" };
const LOOKUP: Kernel = Kernel { file: "tokens", name: "lookup" };

#[derive(Clone, Copy)]
#[repr(C)]
struct TokenIdsArgs {
    y: View,
    batch: u64,
}

// SAFETY: the struct of kernels/tokens.cu.
unsafe impl Args for TokenIdsArgs {}

impl Op for TokenIds {
    op_common!("token_ids");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::Out, &mut self.y)]
    }

    fn check(&self, _: &dyn Shapes) -> Result<Vec<Shape>> {
        Ok(vec![Shape::f32(Rows::All, 1)])
    }

    fn solo(&self, _: &Frame<'_>) -> bool {
        true
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        for row in 0..y.rows() {
            // SAFETY: alone.
            let y = unsafe { y.row(row) };
            y[0] = frame.batch.tokens[row] as f32;
        }
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let args = TokenIdsArgs { y: gpu.view(self.y), batch: gpu.batch_at() };
        gpu.launch(TOKEN_IDS, Grid::new([gpu.rows(self.y).div_ceil(128), 1, 1], 128), &args)
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        if turn.worker.is_leader() {
            self.scalar(frame);
        }
    }
}

/// `y[r] = table[ids[r][column]]`.
#[derive(Clone, Debug)]
pub struct Lookup {
    /// `[rows, n]`, as bits.
    pub ids: Value,
    /// First of the ids to use.
    pub column: usize,
    /// How many; their rows stand side by side.
    pub count: usize,
    /// `[table rows, width]`.
    pub table: WeightId,
    /// `[rows, count * width]`.
    pub y: Value,
}

impl Lookup {
    fn row(&self, frame: &Frame<'_>, row: usize, y: &mut [f32]) {
        let ids = &frame.row(self.ids, row)[self.column..self.column + self.count];
        let width = y.len() / self.count;
        for (id, y) in ids.iter().zip(y.chunks_mut(width)) {
            frame.decode_row(self.table, id.to_bits() as usize, y);
        }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct LookupArgs {
    ids: View,
    y: View,
    part: Part,
    vector: u64,
    column: u32,
    spare: u32,
}

// SAFETY: the struct of kernels/tokens.cu.
unsafe impl Args for LookupArgs {}

impl Op for Lookup {
    op_common!("lookup");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.ids), (Port::Out, &mut self.y)]
    }

    fn weight(&self) -> Option<Uses> {
        Some(Uses::Rows(self.table))
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let (ids, (_, width)) = (shapes.value(self.ids), shapes.weight(self.table));
        ensure!(
            self.count > 0 && self.column + self.count <= ids.width,
            Internal,
            "lookup: columns {}+{} of {ids:?}",
            self.column,
            self.count
        );
        Ok(vec![Shape::f32(ids.rows, self.count * width)])
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let (ids, y, width) = (gpu.view(self.ids), gpu.view(self.y), gpu.width(self.y) / self.count);
        gpu.each_part(self.table, width, |part, vector| {
            let args = LookupArgs { ids, y, part, vector, column: self.column as u32, spare: 0 };
            gpu.launch(LOOKUP, Grid::new([gpu.rows(self.y), self.count, width.div_ceil(128)], 128), &args)
        })
    }

    op_by_row!(1);
}
