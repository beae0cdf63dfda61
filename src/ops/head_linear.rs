//! One matrix for each head (or group): rows of one stored matrix, applied to their head's part of the input.
//!
//! Latent attention needs both directions of `kv_b_proj`: its key rows transposed (queries move into the latent space) and
//! its value rows as they are (outputs leave it). Both read the one stored matrix, row by row, so neither is stored twice.
#![allow(unsafe_code)] // pieces of outputs, disjoint by head and row

use super::lanes::{axpy, dot};
use super::{Frame, Op, Port, Shape, Shapes, Turn, Value, WeightId, scratch};
use crate::error::Result;
use crate::{ensure, op_common};

/// With `W_h` the rows `h * step + first ..` (`count` of them) of the weight: `y_h = W_h x_h`, or `y_h = W_h^T x_h`.
/// `tail` elements at the end of each input head are handed on behind its outputs.
#[derive(Clone, Debug)]
pub struct HeadLinear {
    /// `[rows, heads * (inputs + tail)]`.
    pub x: Value,
    /// `[heads * step, cols]`.
    pub weight: WeightId,
    /// Heads.
    pub heads: usize,
    /// Rows of the weight from one head to the next.
    pub step: usize,
    /// First row of a head that takes part.
    pub first: usize,
    /// Rows of a head that take part.
    pub count: usize,
    /// `W^T x`: `count` inputs and `cols` outputs, else `cols` inputs and `count` outputs.
    pub transposed: bool,
    /// Elements handed on.
    pub tail: usize,
    /// `[rows, heads * (outputs + tail)]`.
    pub y: Value,
}

/// Rows that share one reading of a head's matrix.
const ROWS: usize = 16;

impl HeadLinear {
    /// Inputs and outputs of a head.
    fn dims(&self, cols: usize) -> (usize, usize) {
        if self.transposed { (self.count, cols) } else { (cols, self.count) }
    }

    /// One head for some rows: `w` is a buffer for a row of the weight.
    fn head(&self, frame: &Frame<'_>, head: usize, rows: std::ops::Range<usize>, w: &mut [f32]) {
        let y = frame.output(self.y);
        let weight = frame.weight(self.weight);
        let (inputs, outputs) = self.dims(w.len());
        let x = |r: usize| &frame.row(self.x, r)[head * (inputs + self.tail)..][..inputs + self.tail];
        // SAFETY: this head of these rows belongs to this call alone.
        let y = |r: usize| unsafe { y.piece(r, head * (outputs + self.tail)..(head + 1) * (outputs + self.tail)) };
        for r in rows.clone() {
            let (out, tail) = y(r).split_at_mut(outputs);
            out.fill(0.0);
            tail.copy_from_slice(&x(r)[inputs..]);
        }
        for n in 0..self.count {
            weight.decode_row(head * self.step + self.first + n, w);
            for r in rows.clone() {
                if self.transposed {
                    axpy(x(r)[n], w, y(r));
                } else {
                    y(r)[n] = dot(w, &x(r)[..inputs]);
                }
            }
        }
    }
}

impl Op for HeadLinear {
    op_common!("head_linear");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.x), (Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let (x, (rows, cols)) = (shapes.value(self.x), shapes.weight(self.weight));
        let (inputs, outputs) = self.dims(cols);
        let fits = x.width == self.heads * (inputs + self.tail) && rows == self.heads * self.step && self.first + self.count <= self.step;
        ensure!(fits, Internal, "head_linear: weight [{rows}, {cols}] as {} heads meets {x:?}", self.heads);
        Ok(vec![Shape::f32(x.rows, self.heads * (outputs + self.tail))])
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        let (inputs, outputs) = (frame.slot(self.x).width / self.heads - self.tail, y.width() / self.heads - self.tail);
        let cols = if self.transposed { outputs } else { inputs };
        let mut w = vec![0.0f32; cols];
        for r in 0..y.rows() {
            // SAFETY: alone.
            let y = unsafe { y.row(r) };
            for head in 0..self.heads {
                let x = &frame.row(self.x, r)[head * (inputs + self.tail)..][..inputs + self.tail];
                let y = &mut y[head * (outputs + self.tail)..][..outputs + self.tail];
                let mut sums = vec![0.0f64; outputs];
                for n in 0..self.count {
                    frame.weight(self.weight).decode_row(head * self.step + self.first + n, &mut w);
                    for (c, w) in w.iter().enumerate() {
                        let (i, o) = if self.transposed { (n, c) } else { (c, n) };
                        sums[o] += f64::from(*w) * f64::from(x[i]);
                    }
                }
                for (y, s) in y.iter_mut().zip(sums) {
                    *y = s as f32;
                }
                y[outputs..].copy_from_slice(&x[inputs..]);
            }
        }
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let rows = frame.rows(self.y);
        let cols = {
            let width = frame.slot(if self.transposed { self.y } else { self.x }).width;
            width / self.heads - self.tail
        };
        let blocks = rows.div_ceil(ROWS);
        turn.pieces(self.heads * blocks, 1, |range| {
            for item in range {
                let (head, block) = (item / blocks, item % blocks);
                let rows = block * ROWS..((block + 1) * ROWS).min(rows);
                scratch::with(|s| self.head(frame, head, rows, scratch::sized(&mut s.a, cols)));
            }
        });
    }
}
