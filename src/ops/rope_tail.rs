//! Rotary embedding of the last elements of each head, as latent attention lays heads out: `[unrotated | rotated]`.

use super::rope::{ROPE, RopeArgs};
use super::{Frame, Gpu, Op, Port, RopeStyle, Shape, Shapes, Value};
use crate::backend::cuda::launch::Grid;
use crate::error::Result;
use crate::{ensure, op_by_row, op_common};

/// Turns the last `rotary_dim` elements of each head; those before pass.
#[derive(Clone, Debug)]
pub struct RopeTail {
    /// `[rows, heads * head_dim]`.
    pub x: Value,
    /// `[rows, rotary_dim]` from [`super::RopeTable`].
    pub table: Value,
    /// Elements of a head.
    pub head_dim: usize,
    /// Which elements turn together.
    pub style: RopeStyle,
    /// Turns back: by the negative angle.
    pub inverse: bool,
    /// `[rows, heads * head_dim]`.
    pub y: Value,
}

/// Turns one head's rotary elements in place.
pub(super) fn turn_tail(x: &mut [f32], cos: &[f32], sin: &[f32], style: RopeStyle, inverse: bool) {
    let half = cos.len();
    for i in 0..half {
        let (a, b) = match style {
            RopeStyle::Halves => (i, i + half),
            RopeStyle::Pairs => (2 * i, 2 * i + 1),
        };
        let s = if inverse { -sin[i] } else { sin[i] };
        (x[a], x[b]) = (x[a] * cos[i] - x[b] * s, x[b] * cos[i] + x[a] * s);
    }
}

impl RopeTail {
    fn row(&self, frame: &Frame<'_>, row: usize, y: &mut [f32]) {
        let table = frame.row(self.table, row);
        let (cos, sin) = table.split_at(table.len() / 2);
        y.copy_from_slice(frame.row(self.x, row));
        for head in y.chunks_mut(self.head_dim) {
            turn_tail(&mut head[self.head_dim - table.len()..], cos, sin, self.style, self.inverse);
        }
    }
}

impl Op for RopeTail {
    op_common!("rope_tail");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.x), (Port::In, &mut self.table), (Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let (x, table) = (shapes.value(self.x), shapes.value(self.table));
        ensure!(
            x.width.is_multiple_of(self.head_dim),
            Internal,
            "rope_tail: rows of {} do not split into heads of {}",
            x.width,
            self.head_dim
        );
        ensure!(
            table.width <= self.head_dim && table.width.is_multiple_of(2),
            Unsupported,
            "rope_tail: {} rotary elements in heads of {}",
            table.width,
            self.head_dim
        );
        Ok(vec![Shape::f32(x.rows, x.width)])
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let args = RopeArgs {
            x: gpu.view(self.x),
            table: gpu.view(self.table),
            y: gpu.view(self.y),
            head_dim: self.head_dim as u32,
            first: (self.head_dim - gpu.width(self.table)) as u32,
            pairs: u32::from(self.style == RopeStyle::Pairs),
            direction: if self.inverse { -1.0 } else { 1.0 },
        };
        gpu.launch(ROPE, Grid::columns(gpu.rows(self.y), gpu.width(self.y)), &args)
    }

    op_by_row!(1);
}
