//! Attention over depth (Kimi K3's attention residuals): a sublayer reads a softmax-weighed sum of finished blocks and the running sum.
#![allow(unsafe_code)] // rows of outputs, disjoint by `Turn::each_row`

use super::{Frame, Gpu, Op, Port, Shape, Shapes, Turn, Value, View, WeightId, row_grain};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_common};

/// `y = sum_i softmax_i(w . norm(x_i)) x_i`, the norm an RMS norm with a weight.
#[derive(Clone, Debug)]
pub struct ResidualMix {
    /// Each `[rows, width]`.
    pub sources: Vec<Value>,
    /// `[width]`: `w`.
    pub query: WeightId,
    /// `[width]`: the norm's weight.
    pub norm: WeightId,
    /// The norm's epsilon.
    pub eps: f32,
    /// `[rows, width]`.
    pub y: Value,
}

/// Most sources; more blocks than any published depth has.
const MOST: usize = 64;

impl ResidualMix {
    fn row(&self, frame: &Frame<'_>, row: usize, y: &mut [f32]) {
        let (query, norm) = (frame.weight(self.query).vector(), frame.weight(self.norm).vector());
        let mut scores = [0.0f64; MOST];
        let scores = &mut scores[..self.sources.len()];
        for (score, source) in scores.iter_mut().zip(&self.sources) {
            let x = frame.row(*source, row);
            let (mut square, mut dot) = (0.0f64, 0.0f64);
            for ((x, q), n) in x.iter().zip(query).zip(norm) {
                square += f64::from(*x) * f64::from(*x);
                dot += f64::from(*x) * f64::from(*q) * f64::from(*n);
            }
            *score = dot / (square / x.len() as f64 + f64::from(self.eps)).sqrt();
        }
        let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        scores.iter_mut().for_each(|s| *s = (*s - most).exp());
        let total: f64 = scores.iter().sum();
        y.fill(0.0);
        for (score, source) in scores.iter().zip(&self.sources) {
            super::lanes::axpy((score / total) as f32, frame.row(*source, row), y);
        }
    }
}

const RESIDUAL_MIX: Kernel = Kernel { file: "residual_mix", name: "residual_mix" };

#[derive(Clone, Copy)]
#[repr(C)]
struct ResidualMixArgs {
    y: View,
    query: u64,
    norm: u64,
    sources: u32,
    eps: f32,
    source: [View; MOST],
}

// SAFETY: the struct of kernels/residual_mix.cu.
unsafe impl Args for ResidualMixArgs {}

impl Op for ResidualMix {
    op_common!("residual_mix");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        self.sources.iter_mut().map(|s| (Port::In, s)).chain([(Port::Out, &mut self.y)]).collect()
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        ensure!(
            (1..=MOST).contains(&self.sources.len()),
            Unsupported,
            "a residual of {} blocks; at most {MOST} are possible",
            self.sources.len()
        );
        let sources: Vec<Shape> = self.sources.iter().map(|s| shapes.value(*s)).collect();
        let first = sources[0];
        let weights = [self.query, self.norm].map(|id| shapes.weight(id).1);
        ensure!(
            sources.iter().all(|s| s.rows == first.rows && s.width == first.width) && weights == [first.width; 2],
            Internal,
            "residual_mix: {sources:?}, weights of {weights:?}"
        );
        Ok(vec![Shape::f32(first.rows, first.width)])
    }

    fn solo(&self, frame: &Frame<'_>) -> bool {
        frame.rows(self.y) <= row_grain(frame.slot(self.y).width * self.sources.len())
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        for row in 0..y.rows() {
            // SAFETY: alone.
            self.row(frame, row, unsafe { y.row(row) });
        }
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let mut source = [View::NONE; MOST];
        source.iter_mut().zip(&self.sources).for_each(|(to, value)| *to = gpu.view(*value));
        let args = ResidualMixArgs {
            y: gpu.view(self.y),
            query: gpu.vector(Some(self.query)),
            norm: gpu.vector(Some(self.norm)),
            sources: self.sources.len() as u32,
            eps: self.eps,
            source,
        };
        let threads = gpu.width(self.y).next_multiple_of(32).min(256);
        gpu.launch(RESIDUAL_MIX, Grid::new([gpu.rows(self.y), 1, 1], threads), &args)
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let y = frame.output(self.y);
        // SAFETY: `each_row` gives a row to one worker.
        turn.each_row(y.rows(), y.width() * self.sources.len(), |row| self.row(frame, row, unsafe { y.row(row) }));
    }
}
