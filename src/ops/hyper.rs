//! Hyper-connections (Zhu et al., 2024) held to doubly stochastic mixing (mHC; Xie et al., 2025): several residual streams that are
//! collapsed to one before a sublayer and mixed with its output after it.
//!
//! A row of streams is `[streams * width]`, stream after stream. Mixing weights of a row are `[pre | post | comb]`,
//! `comb` row-major from old to new stream.
#![allow(unsafe_code)] // rows of outputs, disjoint by `Turn::each_row`

use super::{Frame, Gpu, Op, Port, Shape, Shapes, Turn, Value, View, WeightId, row_grain};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_common};

/// Most streams.
pub const MOST_STREAMS: usize = 8;

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// Mixing weights from a projection of the streams: `pre = sigmoid + eps`, `post = 2 sigmoid`, `comb` a softmax made doubly
/// stochastic by `rounds` of Sinkhorn and Knopp's divisions. Only `pre` where the projection has `streams` elements.
#[derive(Clone, Debug)]
pub struct HyperMix {
    /// `[rows, (2 + streams) * streams]`, or `[rows, streams]` (the end of the model, where streams become one).
    pub m: Value,
    /// `[3]`: factors on the projection's three parts; `[1]` for `pre` alone.
    pub scale: WeightId,
    /// As wide as the projection.
    pub base: WeightId,
    /// Streams.
    pub streams: usize,
    /// Rounds of division; the first divides columns only.
    pub rounds: usize,
    /// Keeps sums from vanishing.
    pub eps: f32,
    /// As wide as the projection.
    pub y: Value,
}

impl HyperMix {
    /// Few numbers and many divisions: f64 throughout costs nothing and keeps twenty rounds exact.
    fn row(&self, frame: &Frame<'_>, row: usize, y: &mut [f32]) {
        let (h, eps) = (self.streams, f64::from(self.eps));
        let (scale, base) = (frame.weight(self.scale).vector(), frame.weight(self.base).vector());
        let m = frame.row(self.m, row);
        let at = |i: usize| f64::from(m[i]) * f64::from(scale[i.div_euclid(h).min(2)]) + f64::from(base[i]);
        for j in 0..h {
            y[j] = (sigmoid(at(j)) + eps) as f32;
        }
        if m.len() == h {
            return;
        }
        for j in h..2 * h {
            y[j] = (2.0 * sigmoid(at(j))) as f32;
        }
        let mut comb = [[0.0f64; MOST_STREAMS]; MOST_STREAMS];
        for (j, line) in comb[..h].iter_mut().enumerate() {
            let line = &mut line[..h];
            line.iter_mut().enumerate().for_each(|(k, c)| *c = at(2 * h + j * h + k));
            let most = line.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            line.iter_mut().for_each(|c| *c = (*c - most).exp());
            let total: f64 = line.iter().sum();
            line.iter_mut().for_each(|c| *c = *c / total + eps);
        }
        for round in 0..self.rounds {
            if round > 0 {
                for line in &mut comb[..h] {
                    let total = line[..h].iter().sum::<f64>() + eps;
                    line[..h].iter_mut().for_each(|c| *c /= total);
                }
            }
            for k in 0..h {
                let total = comb[..h].iter().map(|line| line[k]).sum::<f64>() + eps;
                comb[..h].iter_mut().for_each(|line| line[k] /= total);
            }
        }
        for j in 0..h {
            for k in 0..h {
                y[2 * h + j * h + k] = comb[j][k] as f32;
            }
        }
    }
}

const MIX: Kernel = Kernel { file: "hyper", name: "hyper_mix" };
const COLLAPSE: Kernel = Kernel { file: "hyper", name: "hyper_collapse" };
const EXPAND: Kernel = Kernel { file: "hyper", name: "hyper_expand" };

#[derive(Clone, Copy)]
#[repr(C)]
struct HyperMixArgs {
    m: View,
    y: View,
    scale: u64,
    base: u64,
    streams: u32,
    rounds: u32,
    eps: f32,
    spare: u32,
}

// SAFETY: the struct of kernels/hyper.cu.
unsafe impl Args for HyperMixArgs {}

impl Op for HyperMix {
    op_common!("hyper_mix");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.m), (Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let (m, h) = (shapes.value(self.m), self.streams);
        ensure!((1..=MOST_STREAMS).contains(&h), Unsupported, "{h} residual streams; at most {MOST_STREAMS} are possible");
        let (scale, base) = (shapes.weight(self.scale).1, shapes.weight(self.base).1);
        let fits = (m.width == (2 + h) * h && scale == 3) || (m.width == h && scale == 1);
        ensure!(fits && base == m.width, Internal, "hyper_mix: {m:?} for {h} streams, {scale} factors, a base of {base}");
        Ok(vec![Shape::f32(m.rows, m.width)])
    }

    fn solo(&self, frame: &Frame<'_>) -> bool {
        frame.rows(self.y) <= 2
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        for row in 0..y.rows() {
            // SAFETY: alone.
            self.row(frame, row, unsafe { y.row(row) });
        }
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let args = HyperMixArgs {
            m: gpu.view(self.m),
            y: gpu.view(self.y),
            scale: gpu.vector(Some(self.scale)),
            base: gpu.vector(Some(self.base)),
            streams: self.streams as u32,
            rounds: self.rounds as u32,
            eps: self.eps,
            spare: 0,
        };
        gpu.launch(MIX, Grid::new([gpu.rows(self.y).div_ceil(32), 1, 1], 32), &args)
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let y = frame.output(self.y);
        turn.each(y.rows(), 2, |range| {
            for row in range {
                // SAFETY: `each` gives a row to one worker.
                self.row(frame, row, unsafe { y.row(row) });
            }
        });
    }
}

/// `y = sum_c pre[c] x[c]`; without `pre` the mean of the streams.
#[derive(Clone, Debug)]
pub struct HyperCollapse {
    /// `[rows, streams * width]`.
    pub x: Value,
    /// Mixing weights, `pre` first; or none.
    pub pre: Value,
    /// Streams.
    pub streams: usize,
    /// `[rows, width]`.
    pub y: Value,
}

impl HyperCollapse {
    fn row(&self, frame: &Frame<'_>, row: usize, y: &mut [f32]) {
        let x = frame.row(self.x, row);
        let equal = [1.0 / self.streams as f32; MOST_STREAMS];
        let pre: &[f32] = if self.pre.is_some() { frame.row(self.pre, row) } else { &equal };
        y.fill(0.0);
        for (x, pre) in x.chunks(y.len()).zip(pre) {
            super::lanes::axpy(*pre, x, y);
        }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct HyperCollapseArgs {
    x: View,
    pre: View,
    y: View,
    streams: u32,
    spare: u32,
}

// SAFETY: the struct of kernels/hyper.cu.
unsafe impl Args for HyperCollapseArgs {}

impl Op for HyperCollapse {
    op_common!("hyper_collapse");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        let mut ports = vec![(Port::In, &mut self.x)];
        if self.pre.is_some() {
            ports.push((Port::In, &mut self.pre));
        }
        ports.push((Port::Out, &mut self.y));
        ports
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let x = shapes.value(self.x);
        ensure!(
            (1..=MOST_STREAMS).contains(&self.streams) && x.width.is_multiple_of(self.streams),
            Internal,
            "hyper_collapse: {x:?} as {} streams",
            self.streams
        );
        ensure!(
            !self.pre.is_some() || shapes.value(self.pre).width >= self.streams,
            Internal,
            "hyper_collapse: {:?}",
            shapes.value(self.pre)
        );
        Ok(vec![Shape::f32(x.rows, x.width / self.streams)])
    }

    fn solo(&self, frame: &Frame<'_>) -> bool {
        frame.rows(self.y) <= row_grain(frame.slot(self.x).width)
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        for row in 0..y.rows() {
            // SAFETY: alone.
            self.row(frame, row, unsafe { y.row(row) });
        }
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let (x, pre, y) = (gpu.view(self.x), gpu.view(self.pre), gpu.view(self.y));
        let args = HyperCollapseArgs { x, pre, y, streams: self.streams as u32, spare: 0 };
        gpu.launch(COLLAPSE, Grid::cells(gpu.rows(self.y), gpu.width(self.y), 256), &args)
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let y = frame.output(self.y);
        // SAFETY: `each_row` gives a row to one worker.
        turn.each_row(y.rows(), y.width() * self.streams, |row| self.row(frame, row, unsafe { y.row(row) }));
    }
}

/// `y[k] = post[k] out + sum_j comb[j][k] x[j]`: the streams after a sublayer. Without `mix`, `y[k] = out`: streams begin as copies.
#[derive(Clone, Debug)]
pub struct HyperExpand {
    /// `[rows, width]`: what the sublayer computed.
    pub out: Value,
    /// `[rows, streams * width]`; none where streams begin.
    pub x: Value,
    /// `[rows, (2 + streams) * streams]`; none where streams begin.
    pub mix: Value,
    /// Streams.
    pub streams: usize,
    /// `[rows, streams * width]`.
    pub y: Value,
}

impl HyperExpand {
    fn row(&self, frame: &Frame<'_>, row: usize, y: &mut [f32]) {
        let (h, out) = (self.streams, frame.row(self.out, row));
        if !self.mix.is_some() {
            y.chunks_mut(out.len()).for_each(|y| y.copy_from_slice(out));
            return;
        }
        let (x, mix) = (frame.row(self.x, row), frame.row(self.mix, row));
        for (k, y) in y.chunks_mut(out.len()).enumerate() {
            y.iter_mut().zip(out).for_each(|(y, o)| *y = mix[h + k] * o);
            for (j, x) in x.chunks(out.len()).enumerate() {
                super::lanes::axpy(mix[2 * h + j * h + k], x, y);
            }
        }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct HyperExpandArgs {
    out: View,
    x: View,
    mix: View,
    y: View,
    streams: u32,
    spare: u32,
}

// SAFETY: the struct of kernels/hyper.cu.
unsafe impl Args for HyperExpandArgs {}

impl Op for HyperExpand {
    op_common!("hyper_expand");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        let mut ports = vec![(Port::In, &mut self.out)];
        if self.mix.is_some() {
            ports.extend([(Port::In, &mut self.x), (Port::In, &mut self.mix)]);
        }
        ports.push((Port::Out, &mut self.y));
        ports
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let (out, h) = (shapes.value(self.out), self.streams);
        if self.mix.is_some() {
            let (x, mix) = (shapes.value(self.x), shapes.value(self.mix));
            ensure!(
                x.width == h * out.width && mix.width == (2 + h) * h && x.rows == out.rows,
                Internal,
                "hyper_expand: {out:?}, {x:?}, {mix:?} for {h} streams"
            );
        }
        Ok(vec![Shape::f32(out.rows, h * out.width)])
    }

    fn solo(&self, frame: &Frame<'_>) -> bool {
        frame.rows(self.y) <= row_grain(frame.slot(self.y).width * self.streams)
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        for row in 0..y.rows() {
            // SAFETY: alone.
            self.row(frame, row, unsafe { y.row(row) });
        }
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let (out, x, mix, y) = (gpu.view(self.out), gpu.view(self.x), gpu.view(self.mix), gpu.view(self.y));
        let args = HyperExpandArgs { out, x, mix, y, streams: self.streams as u32, spare: 0 };
        gpu.launch(EXPAND, Grid::cells(gpu.rows(self.y), gpu.width(self.out), 256), &args)
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let y = frame.output(self.y);
        // SAFETY: `each_row` gives a row to one worker.
        turn.each_row(y.rows(), y.width() * self.streams, |row| self.row(frame, row, unsafe { y.row(row) }));
    }
}
