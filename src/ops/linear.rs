//! Matrix product with a weight: `y = W x + b`, the bulk of every model's bytes and flops.
#![allow(unsafe_code)] // pieces of outputs, disjoint by `Turn::each`

use super::scratch::{self, Scratch, sized};
use super::{Frame, Gpu, Kind, Op, Port, Product, Shape, Shapes, Turn, Uses, Value, WeightId, linear_launch};
use crate::backend::cpu::activations::{Activations, Epilogue, Q8_BLOCK};
use crate::backend::cpu::pack::{Layout, Packed};
use crate::error::Result;
use crate::{ensure, op_common};
use std::ops::Range;

/// `y[r][n] = sum_k W[n][k] x[r][k] + b[n]`.
///
/// A part of `W` packed as integers meets `q`, the 8-bit form of `x`; other parts meet `x`. The pass that picks
/// formats ([`crate::circuit`]) connects whichever is needed.
#[derive(Clone, Debug)]
pub struct Linear {
    /// `[rows, cols]` f32.
    pub x: Value,
    /// `[rows, cols]` Q8, or none.
    pub q: Value,
    /// `[width, cols]`.
    pub weight: WeightId,
    /// `[width]`.
    pub bias: Option<WeightId>,
    /// `[rows, width]`.
    pub y: Value,
}

/// Panels (16 output rows) in a chunk. Tiles take four at a time; larger chunks stream longer, smaller ones share better.
fn grain(panels: usize, rows: usize) -> usize {
    if rows >= 8 || panels < 64 { 4 } else { 8 }
}

/// Whether weights of this kind meet rounded activations.
fn meets_pairs(layout: Layout) -> bool {
    matches!(layout, Layout::Bf16 | Layout::F8)
}

impl Linear {
    fn bias<'a>(&self, frame: &Frame<'a>) -> Option<&'a [f32]> {
        self.bias.map(|id| frame.weight(id).vector())
    }
}

impl Op for Linear {
    op_common!("linear");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        let mut ports = Vec::with_capacity(3);
        if self.x.is_some() {
            ports.push((Port::In, &mut self.x));
        }
        if self.q.is_some() {
            ports.push((Port::In, &mut self.q));
        }
        ports.push((Port::Out, &mut self.y));
        ports
    }

    fn product(&mut self) -> Option<Product<'_>> {
        Some(Product { weight: self.weight, x: &mut self.x, q: &mut self.q, runs: 1, tail: 0 })
    }

    fn weight(&self) -> Option<Uses> {
        Some(Uses::Whole(self.weight))
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let (width, cols) = shapes.weight(self.weight);
        let x = shapes.value(if self.x.is_some() { self.x } else { self.q });
        ensure!(x.width == cols && !x.sliced, Internal, "linear: weight [{width}, {cols}] meets {x:?}");
        if self.q.is_some() {
            let q = shapes.value(self.q);
            ensure!(q.kind == Kind::Q8 && q.width == cols, Internal, "linear: {q:?} as the 8-bit input of [{width}, {cols}]");
        }
        if let Some(bias) = self.bias {
            ensure!(shapes.weight(bias).1 == width, Internal, "linear: bias of {} for {width} outputs", shapes.weight(bias).1);
        }
        Ok(vec![Shape::f32(x.rows, width)])
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        linear_launch::launch(self, gpu)
    }

    fn gpu_scratch_of(&self, width: &dyn Fn(Value) -> usize, rows: usize, _segments: usize, _context: usize, _processors: usize) -> usize {
        linear_launch::scratch(self, width, rows)
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        let bias = self.bias(frame);
        let cols = frame.slot(if self.x.is_some() { self.x } else { self.q }).width;
        let mut w = vec![0.0f32; cols];
        for n in 0..y.width() {
            frame.decode_row(self.weight, n, &mut w);
            for r in 0..y.rows() {
                let x = |k: usize| match self.x.is_some() {
                    true => frame.row(self.x, r)[k],
                    false => match frame.input_q8(self.q) {
                        Activations::Q8 { blocks, stride } => {
                            let block = &blocks[r * stride + k / Q8_BLOCK];
                            block.scale * f32::from(block.codes[k % Q8_BLOCK])
                        }
                        Activations::F32 { x, stride } => x[r * stride + k],
                        Activations::Pairs { .. } => f32::NAN,
                    },
                };
                let sum: f64 = w.iter().enumerate().map(|(k, w)| f64::from(*w) * f64::from(x(k))).sum();
                // SAFETY: alone.
                let y = unsafe { y.row(r) };
                y[n] = (sum + bias.map_or(0.0, |b| f64::from(b[n]))) as f32;
            }
        }
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let y = frame.output(self.y);
        let rows = y.rows();
        let parts = &frame.weight(self.weight).matrix().parts;
        let grain = grain(y.width() / 16, rows);
        // Chunks are counted over all parts, so that small parts share workers with large ones.
        let chunks = |part: &Packed| part.panels().div_ceil(grain);
        let total = parts.iter().map(chunks).sum();
        let rounds = frame.rounds && parts.iter().any(|part| meets_pairs(part.layout()));
        scratch::with(|scratch| {
            let mut scratch = rounds.then_some(scratch);
            let mut rounded: (&[u32], usize) = (&[], 0);
            turn.pieces(total, 1, |range| {
                // Each worker rounds for itself, with its first piece: less work than a barrier takes.
                if let Some(scratch) = scratch.take() {
                    rounded = self.round(frame, rows, scratch);
                }
                self.chunks(frame, range, grain, rounded);
            });
        });
    }
}

impl Linear {
    /// The input's rows as pairs, and the words from one row to the next.
    fn round<'a>(&self, frame: &Frame<'_>, rows: usize, scratch: &'a mut Scratch) -> (&'a [u32], usize) {
        let stride = frame.slot(self.x).width.div_ceil(2);
        let words = sized(&mut scratch.pairs, rows * stride);
        for (row, words) in words.chunks_mut(stride).enumerate() {
            frame.simd.round_row(frame.row(self.x, row), words);
        }
        (words, stride)
    }

    /// Chunks of `grain` panels, counted over all parts.
    fn chunks(&self, frame: &Frame<'_>, range: Range<usize>, grain: usize, (pairs, pairs_stride): (&[u32], usize)) {
        let (y, bias) = (frame.output(self.y), self.bias(frame));
        let rows = y.rows();
        let parts = &frame.weight(self.weight).matrix().parts;
        let chunks = |part: &Packed| part.panels().div_ceil(grain);
        for item in range {
            let (mut item, mut column) = (item, 0);
            for part in parts {
                let count = chunks(part);
                if item < count {
                    let panels = item * grain..((item + 1) * grain).min(part.panels());
                    let acts = if part.layout().is_integer() {
                        frame.input_q8(self.q)
                    } else if meets_pairs(part.layout()) && !pairs.is_empty() {
                        Activations::Pairs { x: pairs, stride: pairs_stride }
                    } else {
                        Activations::F32 { x: frame.input(self.x), stride: part.cols() }
                    };
                    let epilogue = Epilogue { bias: bias.map(|b| &b[column..column + part.rows()]), add: false };
                    // SAFETY: columns `column + 16 * panels` of every row belong to this chunk alone.
                    unsafe { frame.simd.matmul(part, panels, &acts, 0..rows, &epilogue, y.as_mut_ptr().add(column), y.stride()) };
                    break;
                }
                item -= count;
                column += part.rows();
            }
        }
    }
}
