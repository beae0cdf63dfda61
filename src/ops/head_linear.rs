//! One matrix for each head (or group of heads): latent attention's ways into and out of the latent space, grouped output products.
//!
//! Float matrices run in the backend's product; integer ones are decoded row by row, since each would want 8-bit activations of its
//! head alone.
#![allow(unsafe_code)] // pieces of outputs, disjoint by head and panel

use super::lanes::dot;
use super::routed::Routed;
use super::{Frame, Gpu, LayoutKind, Op, Port, Shape, Shapes, Turn, Uses, Value, WeightId, scratch};
use crate::backend::cpu::activations::{Activations, Epilogue};
use crate::backend::cpu::pack::{LANES, Packed};
use crate::backend::cuda::launch::Kernel;
use crate::error::Result;
use crate::{ensure, op_common};
use std::ops::Range;

/// `y_h = W_h x_h`; `tail` elements at the end of each input head are handed on behind its outputs.
#[derive(Clone, Debug)]
pub struct HeadLinear {
    /// `[rows, heads * (inputs + tail)]`.
    pub x: Value,
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
    /// Inputs and outputs of a head.
    fn dims(&self, frame: &Frame<'_>) -> (usize, usize) {
        let width = |v: Value| frame.slot(v).width / self.heads - self.tail;
        (width(self.x), width(self.y))
    }

    /// Outputs `panels` of a part of a head's matrix that starts at output `first`, for all rows.
    fn chunk(&self, frame: &Frame<'_>, head: usize, part: &Packed, first: usize, panels: Range<usize>) {
        let (inputs, outputs) = self.dims(frame);
        let y = frame.output(self.y);
        let base = head * (outputs + self.tail) + first;
        if !part.layout().is_integer() {
            let acts = Activations::F32 { x: &frame.input(self.x)[head * (inputs + self.tail)..], stride: frame.slot(self.x).width };
            let epilogue = Epilogue { bias: None, add: false };
            // SAFETY: the head's outputs lie at `base` of every row, and these panels' belong to this chunk alone.
            unsafe { frame.simd.matmul(part, panels, &acts, 0..y.rows(), &epilogue, y.as_mut_ptr().add(base), y.stride()) };
            return;
        }
        let rows = panels.start * LANES..(panels.end * LANES).min(part.rows());
        scratch::with(|s| {
            let w = scratch::sized(&mut s.a, inputs);
            for n in rows {
                part.decode_row(n, w).expect("the buffer has the matrix's width");
                for r in 0..y.rows() {
                    // SAFETY: as above.
                    let y = unsafe { y.piece(r, base + n..base + n + 1) };
                    y[0] = dot(w, &frame.row(self.x, r)[head * (inputs + self.tail)..][..inputs]);
                }
            }
        });
    }

    /// Hands on a head's tail.
    fn tail(&self, frame: &Frame<'_>, head: usize) {
        let (inputs, outputs) = self.dims(frame);
        let y = frame.output(self.y);
        for r in 0..if self.tail > 0 { y.rows() } else { 0 } {
            let end = (head + 1) * (outputs + self.tail);
            // SAFETY: this head's tail belongs to this call alone.
            let y = unsafe { y.piece(r, end - self.tail..end) };
            y.copy_from_slice(&frame.row(self.x, r)[head * (inputs + self.tail) + inputs..][..self.tail]);
        }
    }
}

/// Kernels for a kind of weights.
fn kernels(kind: LayoutKind) -> (Kernel, Option<Kernel>) {
    let (alone, together) = match kind {
        LayoutKind::F32 => ("head_linear_f32", Some("head_linear_f32_together")),
        LayoutKind::Bf16 => ("head_linear_bf16", Some("head_linear_bf16_together")),
        LayoutKind::F16 => ("head_linear_f16", Some("head_linear_f16_together")),
        LayoutKind::F8 => ("head_linear_f8", Some("head_linear_f8_together")),
        LayoutKind::I8 => ("head_linear_i8", None),
        LayoutKind::I4 => ("head_linear_i4", None),
        LayoutKind::Table => ("head_linear_table", None),
    };
    let kernel = |name| Kernel { file: "head_linear", name };
    (kernel(alone), together.map(kernel))
}

impl Op for HeadLinear {
    op_common!("head_linear");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.x), (Port::Out, &mut self.y)]
    }

    fn weight(&self) -> Option<Uses> {
        Some(Uses::Whole(self.weight))
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let (x, (outputs, inputs)) = (shapes.value(self.x), shapes.weight(self.weight));
        let fits = x.width == self.heads * (inputs + self.tail) && shapes.experts(self.weight) == self.heads && !x.sliced;
        ensure!(
            fits,
            Internal,
            "head_linear: {} matrices [{outputs}, {inputs}] meet {x:?} of {} heads",
            shapes.experts(self.weight),
            self.heads
        );
        Ok(vec![Shape::f32(x.rows, self.heads * (outputs + self.tail))])
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        let (inputs, outputs) = self.dims(frame);
        let mut w = vec![0.0f32; inputs];
        for head in 0..self.heads {
            self.tail(frame, head);
            for n in 0..outputs {
                frame.decode_row(self.weight, head * outputs + n, &mut w);
                for r in 0..y.rows() {
                    let x = &frame.row(self.x, r)[head * (inputs + self.tail)..][..inputs];
                    // SAFETY: alone.
                    let y = unsafe { y.row(r) };
                    y[head * (outputs + self.tail) + n] = super::lanes::dot64(&w, x) as f32;
                }
            }
        }
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let width = |v: Value| gpu.width(v) / self.heads - self.tail;
        let step = width(self.x) + self.tail;
        let routed =
            Routed { step, q8: false, route: Value::NONE, weight: self.weight, bias: None, slots: self.heads, tail: self.tail, y: self.y };
        routed.launch(gpu, width(self.y), kernels, |_| self.x)
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
