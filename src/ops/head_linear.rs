//! One matrix for each head (or group of heads): latent attention's ways into and out of the latent space, grouped output products.
#![allow(unsafe_code)] // pieces of outputs, disjoint by head and panel

use super::routed::Routed;
use super::{Frame, Gpu, GpuWeight, Op, Port, Product, Shape, Shapes, Turn, Uses, Value, WeightId};
use crate::backend::cpu::activations::{Activations, Epilogue, Q8_BLOCK, Q8Block};
use crate::backend::cpu::pack::Packed;
use crate::error::Result;
use crate::{ensure, op_common};
use std::ops::Range;

/// `y_h = W_h x_h`; `tail` elements at the end of each input head are handed on behind its outputs.
#[derive(Clone, Debug)]
pub struct HeadLinear {
    /// `[rows, heads * (inputs + tail)]`, or none.
    pub x: Value,
    /// `[rows, heads * inputs]` Q8, or none (see [`super::Linear`]).
    pub q: Value,
    /// `[heads]` of `[outputs, inputs]`.
    pub weight: WeightId,
    /// Heads.
    pub heads: usize,
    /// Elements handed on.
    pub tail: usize,
    /// `[rows, heads * (outputs + tail)]`.
    pub y: Value,
}

/// Panels in a chunk.
const PANELS: usize = 4;

impl HeadLinear {
    /// Outputs of a head.
    fn outputs(&self, frame: &Frame<'_>) -> usize {
        frame.slot(self.y).width / self.heads - self.tail
    }

    /// A head's 8-bit inputs from the first row on, and blocks from row to row.
    fn blocks<'a>(&self, frame: &Frame<'a>, head: usize, inputs: usize) -> (&'a [Q8Block], usize) {
        match frame.input_q8(self.q) {
            Activations::Q8 { blocks, stride } => (&blocks[head * inputs / Q8_BLOCK..], stride),
            _ => (&[], 0),
        }
    }

    /// Outputs `panels` of a part of a head's matrix that starts at output `first`, for all rows.
    fn chunk(&self, frame: &Frame<'_>, head: usize, part: &Packed, first: usize, panels: Range<usize>) {
        let (y, inputs) = (frame.output(self.y), part.cols());
        let acts = if part.layout().is_integer() {
            let (blocks, stride) = self.blocks(frame, head, inputs);
            Activations::Q8 { blocks, stride }
        } else {
            Activations::F32 { x: &frame.input(self.x)[head * (inputs + self.tail)..], stride: frame.slot(self.x).width }
        };
        let base = head * (self.outputs(frame) + self.tail) + first;
        let epilogue = Epilogue { bias: None, add: false };
        // SAFETY: the head's outputs lie at `base` of every row, and these panels' belong to this chunk alone.
        unsafe { frame.simd.matmul(part, panels, &acts, 0..y.rows(), &epilogue, y.as_mut_ptr().add(base), y.stride()) };
    }

    /// Hands on a head's tail.
    fn tail(&self, frame: &Frame<'_>, head: usize) {
        let y = frame.output(self.y);
        let end = |value: Value| (head + 1) * (frame.slot(value).width / self.heads);
        for r in 0..if self.tail > 0 { y.rows() } else { 0 } {
            // SAFETY: this head's tail belongs to this call alone.
            let to = unsafe { y.piece(r, end(self.y) - self.tail..end(self.y)) };
            to.copy_from_slice(&frame.row(self.x, r)[end(self.x) - self.tail..end(self.x)]);
        }
    }
}

impl Op for HeadLinear {
    op_common!("head_linear");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        let mut ports = Vec::with_capacity(3);
        for input in [&mut self.x, &mut self.q] {
            if input.is_some() {
                ports.push((Port::In, input));
            }
        }
        ports.push((Port::Out, &mut self.y));
        ports
    }

    fn product(&mut self) -> Option<Product<'_>> {
        let runs = if self.tail > 0 { self.heads } else { 1 };
        Some(Product { weight: self.weight, x: &mut self.x, q: &mut self.q, runs, tail: self.tail })
    }

    fn weight(&self) -> Option<Uses> {
        Some(Uses::Whole(self.weight))
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let ((outputs, inputs), matrices) = (shapes.weight(self.weight), shapes.experts(self.weight));
        let mut rows = None;
        for (value, width) in [(self.x, inputs + self.tail), (self.q, inputs)].into_iter().filter(|(value, _)| value.is_some()) {
            let x = shapes.value(value);
            let fits = x.width == self.heads * width && matrices == self.heads && !x.sliced;
            ensure!(fits, Internal, "head_linear: {matrices} matrices [{outputs}, {inputs}] meet {x:?} of {} heads", self.heads);
            rows = Some(x.rows);
        }
        ensure!(rows.is_some() && (self.tail == 0 || self.x.is_some()), Internal, "head_linear: its input is not connected");
        Ok(rows.map(|rows| Shape::f32(rows, self.heads * (outputs + self.tail))).into_iter().collect())
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let (y, outputs) = (frame.output(self.y), self.outputs(frame));
        for (head, matrix) in frame.weight(self.weight).experts().iter().enumerate() {
            self.tail(frame, head);
            let mut at = head * (outputs + self.tail);
            for part in &matrix.parts {
                let inputs = part.cols();
                let mut w = vec![0.0f32; inputs];
                for n in 0..part.rows() {
                    part.decode_row(n, &mut w).expect("the buffer has the matrix's width");
                    for r in 0..y.rows() {
                        let x: Vec<f32> = if part.layout().is_integer() {
                            let (blocks, stride) = self.blocks(frame, head, inputs);
                            let blocks = blocks[r * stride..].iter().take(inputs / Q8_BLOCK);
                            blocks.flat_map(|block| block.codes.map(|code| block.scale * f32::from(code))).collect()
                        } else {
                            frame.row(self.x, r)[head * (inputs + self.tail)..][..inputs].to_vec()
                        };
                        // SAFETY: alone.
                        let y = unsafe { y.row(r) };
                        y[at + n] = super::lanes::dot64(&w, &x) as f32;
                    }
                }
                at += part.rows();
            }
        }
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let inputs = match gpu.weight(self.weight) {
            GpuWeight::Experts { parts, .. } => parts.first().and_then(|p| p.first()).map_or(0, |part| part.cols as usize),
            _ => 0,
        };
        let HeadLinear { x, q, weight, heads, tail, y } = *self;
        let routed = Routed { x, q, step: inputs, route: Value::NONE, weight, bias: None, slots: heads, tail, y };
        routed.launch(gpu, gpu.width(y) / heads - tail)
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let matrices = frame.weight(self.weight).experts();
        // All heads are cut alike: chunks of the first serve for all.
        let chunks: usize = matrices[0].parts.iter().map(|p| p.panels().div_ceil(PANELS)).sum();
        turn.pieces(self.heads * chunks, 1, |range| {
            for item in range {
                let (head, mut chunk) = (item / chunks, item % chunks);
                if chunk == 0 {
                    self.tail(frame, head);
                }
                let mut first = 0;
                for part in &matrices[head].parts {
                    let count = part.panels().div_ceil(PANELS);
                    if chunk < count {
                        self.chunk(frame, head, part, first, chunk * PANELS..((chunk + 1) * PANELS).min(part.panels()));
                        break;
                    }
                    chunk -= count;
                    first += part.rows();
                }
            }
        });
    }
}
