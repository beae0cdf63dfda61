//! Normalisation of a row, or of each group of a row (a head): RMS (Zhang and Sennrich, 2019) or layer norm.
#![allow(unsafe_code)] // rows of outputs, disjoint by `Turn::each_row`

use super::{Frame, Gpu, Op, Port, Shape, Shapes, Turn, Value, View, WeightId, row_grain};
use crate::backend::cpu::simd::Table;
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_common};

/// Which norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NormKind {
    /// `x / sqrt(mean(x^2) + eps) * w`.
    Rms,
    /// `(x - mean) / sqrt(var + eps) * w + b`.
    Layer,
}

/// `y = norm(x)` over each run of `group` elements.
#[derive(Clone, Debug)]
pub struct Norm {
    /// RMS or layer norm.
    pub kind: NormKind,
    /// `[rows, width]`.
    pub x: Value,
    /// `[group]`, or `[width]` where every group has its own; none means 1.
    pub weight: Option<WeightId>,
    /// Like `weight`; none means 0.
    pub bias: Option<WeightId>,
    /// Elements normed together; 0 means the whole row.
    pub group: usize,
    /// Added to the mean square or variance.
    pub eps: f32,
    /// `[rows, width]`.
    pub y: Value,
}

const NORM: Kernel = Kernel { file: "norm", name: "norm" };

#[derive(Clone, Copy)]
#[repr(C)]
struct NormArgs {
    x: View,
    y: View,
    weight: u64,
    bias: u64,
    weight_len: u32,
    bias_len: u32,
    group: u32,
    layer: u32,
    eps: f32,
    spare: u32,
}

// SAFETY: the struct of kernels/norm.cu.
unsafe impl Args for NormArgs {}

impl Norm {
    fn group(&self, width: usize) -> usize {
        if self.group == 0 { width } else { self.group }
    }
}

impl Op for Norm {
    op_common!("norm");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.x), (Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let x = shapes.value(self.x);
        let group = self.group(x.width);
        ensure!(group > 0 && x.width.is_multiple_of(group), Internal, "norm: rows of {} do not split into groups of {group}", x.width);
        for id in self.weight.iter().chain(&self.bias) {
            let len = shapes.weight(*id).1;
            ensure!(len == group || len == x.width, Internal, "norm: a weight of {len} for groups of {group} in rows of {}", x.width);
        }
        Ok(vec![Shape::f32(x.rows, x.width)])
    }

    fn prepares(&self) -> Option<Value> {
        (self.group == 0).then_some(self.y)
    }

    fn solo(&self, frame: &Frame<'_>) -> bool {
        frame.rows(self.y) <= row_grain(frame.slot(self.y).width)
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        let group = self.group(y.width());
        let at = |id: Option<WeightId>, column: usize, absent: f64| {
            id.map_or(absent, |id| {
                let v = frame.weight(id).vector();
                f64::from(v[column % v.len()])
            })
        };
        for row in 0..y.rows() {
            // SAFETY: alone.
            let (x, out) = (frame.row(self.x, row), unsafe { y.row(row) });
            for start in (0..x.len()).step_by(group) {
                let values: Vec<f64> = x[start..start + group].iter().map(|&v| f64::from(v)).collect();
                let n = group as f64;
                let mean = if self.kind == NormKind::Layer { values.iter().sum::<f64>() / n } else { 0.0 };
                let variance = values.iter().map(|v| (v - mean) * (v - mean)).sum::<f64>() / n;
                let factor = 1.0 / (variance + f64::from(self.eps)).sqrt();
                for (i, v) in values.iter().enumerate() {
                    out[start + i] = ((v - mean) * factor * at(self.weight, start + i, 1.0) + at(self.bias, start + i, 0.0)) as f32;
                }
            }
        }
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let width = gpu.width(self.y);
        let group = self.group(width);
        let args = NormArgs {
            x: gpu.view(self.x),
            y: gpu.view(self.y),
            weight: gpu.vector(self.weight),
            bias: gpu.vector(self.bias),
            weight_len: gpu.vector_len(self.weight) as u32,
            bias_len: gpu.vector_len(self.bias) as u32,
            group: group as u32,
            layer: u32::from(self.kind == NormKind::Layer),
            eps: self.eps,
            spare: 0,
        };
        let threads = group.next_multiple_of(32).min(256);
        gpu.launch(NORM, Grid::new([gpu.rows(self.y), width / group, 1], threads).early(), &args)
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let y = frame.output(self.y);
        let group = self.group(y.width());
        let weight = self.weight.map(|id| frame.weight(id).vector());
        let bias = self.bias.map(|id| frame.weight(id).vector());
        let part = |v: Option<&'_ [f32]>, start: usize| v.map(|v| if v.len() == group { 0 } else { start });
        turn.each_row(y.rows(), y.width(), |row| {
            // SAFETY: `each_row` gives a row to one worker.
            let (x, out) = (frame.row(self.x, row), unsafe { y.row(row) });
            for start in (0..x.len()).step_by(group) {
                let span = start..start + group;
                let w = part(weight, start).and_then(|at| weight.map(|w| &w[at..at + group]));
                match self.kind {
                    NormKind::Rms => rms_norm(frame.simd, &x[span.clone()], w, self.eps, &mut out[span.clone()]),
                    NormKind::Layer => layer_norm(&x[span.clone()], w, self.eps, &mut out[span.clone()]),
                }
                if let (Some(at), Some(b)) = (part(bias, start), bias) {
                    for (y, b) in out[span].iter_mut().zip(&b[at..at + group]) {
                        *y += b;
                    }
                }
            }
        });
    }
}

/// RMS norm with or without a weight.
fn rms_norm(simd: &Table, x: &[f32], weight: Option<&[f32]>, eps: f32, y: &mut [f32]) {
    match weight {
        Some(weight) => simd.rms_norm(x, weight, eps, y),
        None => {
            y.copy_from_slice(x);
            simd.scale(1.0 / (simd.sum_squares(x) / x.len() as f32 + eps).sqrt(), y);
        }
    }
}

/// Layer norm without bias; sums run over sixteen lanes so that they vectorise.
fn layer_norm(x: &[f32], weight: Option<&[f32]>, eps: f32, y: &mut [f32]) {
    let n = x.len() as f32;
    let sum = |f: &dyn Fn(f32) -> f32| {
        let mut lanes = [0.0f32; 16];
        for chunk in x.chunks(16) {
            for (lane, &v) in lanes.iter_mut().zip(chunk) {
                *lane += f(v);
            }
        }
        lanes.iter().sum::<f32>()
    };
    let mean = sum(&|v| v) / n;
    let factor = 1.0 / (sum(&|v| (v - mean) * (v - mean)) / n + eps).sqrt();
    for (i, (y, x)) in y.iter_mut().zip(x).enumerate() {
        *y = (x - mean) * factor * weight.map_or(1.0, |w| w[i]);
    }
}
