//! What routed experts answered, put together: a weighted sum over a row's slots, and the shared expert beside it.
#![allow(unsafe_code)] // pieces of outputs, disjoint by `Turn::each`

use super::{Frame, Gpu, Op, Port, Shape, Shapes, Turn, Value, View};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_common};
use std::ops::Range;

/// `y = sum_j w[j] x[j] + sigmoid(gate) * shared`, slots in order, so that a row's bits are its own.
#[derive(Clone, Debug)]
pub struct Combine {
    /// `[rows, slots * width]`.
    pub x: Value,
    /// `[rows, 2 * slots]` (see [`super::Route`]).
    pub route: Value,
    /// `[rows, width]`, or none.
    pub shared: Value,
    /// `[rows, 1]`, before the sigmoid, or none: the shared expert counts whole.
    pub gate: Value,
    /// `[rows, width]`: the answer of experts that hand on their input (LongCat's zero experts), or none.
    pub identity: Value,
    /// Experts that compute; ids from here on stand for `identity`.
    pub experts: usize,
    /// `[rows, width]`.
    pub y: Value,
}

/// Columns in a chunk: one wide row is worth sharing.
const COLUMNS: usize = 1024;

impl Combine {
    /// Each slot's weight and answer, for columns `cols` of a row; without those that compute nothing.
    fn terms<'a>(&self, frame: &'a Frame<'_>, row: usize, cols: Range<usize>) -> impl Iterator<Item = (f32, &'a [f32])> {
        let route = frame.row(self.route, row);
        let (slots, width) = (route.len() / 2, frame.slot(self.y).width);
        let x = frame.row(self.x, row);
        let identity = self.identity.is_some().then(|| frame.row(self.identity, row));
        let experts = self.experts;
        (0..slots).filter_map(move |slot| {
            let computes = (route[slot] as usize) < experts;
            let answer = if computes { &x[slot * width..(slot + 1) * width] } else { identity? };
            Some((route[slots + slot], &answer[cols.clone()]))
        })
    }

    /// The shared expert's share and answer.
    fn shared<'a>(&self, frame: &'a Frame<'_>, row: usize) -> Option<(f64, &'a [f32])> {
        let gate = if self.gate.is_some() { f64::from(frame.row(self.gate, row)[0]) } else { f64::INFINITY };
        self.shared.is_some().then(|| (1.0 / (1.0 + (-gate).exp()), frame.row(self.shared, row)))
    }
}

const COMBINE: Kernel = Kernel { file: "combine", name: "combine" };

#[derive(Clone, Copy)]
#[repr(C)]
struct CombineArgs {
    x: View,
    route: View,
    shared: View,
    gate: View,
    identity: View,
    y: View,
    experts: u32,
    spare: u32,
}

// SAFETY: the struct of kernels/combine.cu.
unsafe impl Args for CombineArgs {}

impl Op for Combine {
    op_common!("combine");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        let mut ports = vec![(Port::In, &mut self.x), (Port::In, &mut self.route)];
        for input in [&mut self.shared, &mut self.gate, &mut self.identity] {
            if input.is_some() {
                ports.push((Port::In, input));
            }
        }
        ports.push((Port::Out, &mut self.y));
        ports
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let (x, route) = (shapes.value(self.x), shapes.value(self.route));
        let slots = route.width / 2;
        ensure!(slots > 0 && x.width.is_multiple_of(slots) && x.rows == route.rows, Internal, "{x:?} is put together by {route:?}");
        let width = x.width / slots;
        for (value, wanted) in [(self.shared, width), (self.gate, 1), (self.identity, width)] {
            if value.is_some() {
                let shape = shapes.value(value);
                ensure!(shape.width == wanted && shape.rows == x.rows, Internal, "{shape:?} beside {slots} slots of {width}");
            }
        }
        Ok(vec![Shape::f32(x.rows, width)])
    }

    fn solo(&self, frame: &Frame<'_>) -> bool {
        frame.rows(self.y) * frame.slot(self.y).width.div_ceil(COLUMNS) <= 1
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        for row in 0..y.rows() {
            let terms: Vec<_> = self.terms(frame, row, 0..y.width()).collect();
            let shared = self.shared(frame, row);
            // SAFETY: alone.
            for (i, y) in unsafe { y.row(row) }.iter_mut().enumerate() {
                let sum: f64 = terms.iter().map(|(w, x)| f64::from(*w) * f64::from(x[i])).sum();
                *y = (sum + shared.map_or(0.0, |(g, s)| g * f64::from(s[i]))) as f32;
            }
        }
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let args = CombineArgs {
            x: gpu.view(self.x),
            route: gpu.view(self.route),
            shared: gpu.view(self.shared),
            gate: gpu.view(self.gate),
            identity: gpu.view(self.identity),
            y: gpu.view(self.y),
            experts: self.experts as u32,
            spare: 0,
        };
        gpu.launch(COMBINE, Grid::cells(gpu.rows(self.y), gpu.width(self.y), 256), &args)
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let y = frame.output(self.y);
        let pieces = y.width().div_ceil(COLUMNS);
        turn.each(y.rows() * pieces, 1, |range| {
            for item in range {
                let (row, start) = (item / pieces, item % pieces * COLUMNS);
                let cols = start..(start + COLUMNS).min(y.width());
                // SAFETY: `each` gives an item, and so a piece, to one worker.
                let y = unsafe { y.piece(row, cols.clone()) };
                y.fill(0.0);
                for (w, x) in self.terms(frame, row, cols.clone()) {
                    y.iter_mut().zip(x).for_each(|(y, x)| *y += w * x);
                }
                if let Some((g, shared)) = self.shared(frame, row) {
                    let g = g as f32;
                    y.iter_mut().zip(&shared[cols]).for_each(|(y, x)| *y += g * x);
                }
            }
        });
    }
}
