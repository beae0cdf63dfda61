//! Token embedding: a row of the table for each token.
#![allow(unsafe_code)] // argument structs

use super::{Frame, Gpu, GpuWeight, Op, Part, Port, Rows, Shape, Shapes, Uses, Value, View, WeightId};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{op_by_row, op_common};

const EMBED: Kernel = Kernel { file: "embed", name: "embed_rows" };

#[derive(Clone, Copy)]
#[repr(C)]
struct EmbedArgs {
    y: View,
    batch: u64,
    vector: u64,
    part: Part,
    factor: f32,
    spare: u32,
}

// SAFETY: the struct of kernels/embed.cu.
unsafe impl Args for EmbedArgs {}

/// `y[r] = factor * table[token of row r]`.
#[derive(Clone, Debug)]
pub struct Embed {
    /// `[vocabulary, width]`.
    pub table: WeightId,
    /// Gemma scales embeddings by `sqrt(width)`; others by 1.
    pub factor: f32,
    /// `[rows, width]`.
    pub y: Value,
}

impl Embed {
    fn row(&self, frame: &Frame<'_>, row: usize, y: &mut [f32]) {
        frame.decode_row(self.table, frame.batch.tokens[row] as usize, y);
        if self.factor != 1.0 {
            y.iter_mut().for_each(|v| *v *= self.factor);
        }
    }
}

impl Op for Embed {
    op_common!("embed");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::Out, &mut self.y)]
    }

    fn weight(&self) -> Option<Uses> {
        Some(Uses::Rows(self.table))
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        Ok(vec![Shape::f32(Rows::All, shapes.weight(self.table).1)])
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let grid = Grid::columns(gpu.rows(self.y), gpu.width(self.y));
        let args = EmbedArgs { y: gpu.view(self.y), batch: gpu.batch_at(), vector: 0, part: Part::NONE, factor: self.factor, spare: 0 };
        match gpu.weight(self.table) {
            GpuWeight::Vector { data, .. } => gpu.launch(EMBED, grid, &EmbedArgs { vector: *data, ..args }),
            // A token's row is in one of them.
            GpuWeight::Matrix(parts) => parts.iter().try_for_each(|part| gpu.launch(EMBED, grid, &EmbedArgs { part: *part, ..args })),
            GpuWeight::Experts { .. } => crate::bail!(Unsupported, "embed: a table of experts has no GPU kernel"),
        }
    }

    op_by_row!(1);
}
