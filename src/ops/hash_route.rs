//! Routing by token: a table names the experts of each token, the router's scores only weigh them (DeepSeek-V4's first layers).
#![allow(unsafe_code)] // argument structs

use super::{Frame, Gpu, Op, Part, Port, Shape, Shapes, Uses, Value, View, WeightId};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_by_row, op_common};

/// `ids = table[token]`, `weights = scale * score[id] (/ their sum)`, `score = sqrt(softplus(logit))`; laid out as [`super::Route`]'s.
#[derive(Clone, Debug)]
pub struct HashRoute {
    /// `[rows, experts]`.
    pub logits: Value,
    /// `[vocabulary, top_k]`, whole numbers.
    pub table: WeightId,
    /// Whether the weights are divided by their sum.
    pub normalize: bool,
    /// Factor on all weights.
    pub scale: f32,
    /// `[rows, 2 * top_k]`.
    pub y: Value,
}

impl HashRoute {
    fn row(&self, frame: &Frame<'_>, row: usize, y: &mut [f32]) {
        let logits = frame.row(self.logits, row);
        let top_k = y.len() / 2;
        let (ids, weights) = y.split_at_mut(top_k);
        frame.decode_row(self.table, frame.batch.tokens[row] as usize, ids);
        for (id, weight) in ids.iter_mut().zip(&mut *weights) {
            // A table is a file's word: whatever it says, an expert is found.
            let expert = (*id as usize).min(logits.len() - 1);
            *id = expert as f32;
            let x = f64::from(logits[expert]);
            *weight = (x.max(0.0) + (-x.abs()).exp().ln_1p()).sqrt() as f32;
        }
        let total = if self.normalize { weights.iter().sum::<f32>() + 1e-20 } else { 1.0 };
        weights.iter_mut().for_each(|w| *w = *w / total * self.scale);
    }
}

const HASH_ROUTE: Kernel = Kernel { file: "hash_route", name: "hash_route" };

#[derive(Clone, Copy)]
#[repr(C)]
struct HashRouteArgs {
    logits: View,
    y: View,
    batch: u64,
    part: Part,
    vector: u64,
    normalize: u32,
    scale: f32,
}

// SAFETY: the struct of kernels/hash_route.cu.
unsafe impl Args for HashRouteArgs {}

impl Op for HashRoute {
    op_common!("hash_route");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.logits), (Port::Out, &mut self.y)]
    }

    fn weight(&self) -> Option<Uses> {
        Some(Uses::Rows(self.table))
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let (logits, (_, top_k)) = (shapes.value(self.logits), shapes.weight(self.table));
        ensure!(
            top_k > 0 && logits.width > 0 && logits.rows == super::Rows::All,
            Internal,
            "hash_route: {logits:?}, {top_k} experts a token"
        );
        Ok(vec![Shape::f32(logits.rows, 2 * top_k)])
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let (logits, y) = (gpu.view(self.logits), gpu.view(self.y));
        gpu.each_part(self.table, gpu.width(self.y) / 2, |part, vector| {
            let normalize = u32::from(self.normalize);
            let args = HashRouteArgs { logits, y, batch: gpu.batch_at(), part, vector, normalize, scale: self.scale };
            gpu.launch(HASH_ROUTE, Grid::new([gpu.rows(self.y).div_ceil(64), 1, 1], 64), &args)
        })
    }

    op_by_row!(8);
}
