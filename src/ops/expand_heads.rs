//! Splits what a latent expands to, `[key | value]` for each head, and puts the key part all heads share behind each key.
#![allow(unsafe_code)] // rows of outputs, disjoint by `Turn::each_row`

use super::{Frame, Gpu, Op, Port, Shape, Shapes, Turn, Value, View, row_grain};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_common};

/// `k_h = [x_h[..key_dim], shared]`, `v_h = x_h[key_dim..]`.
#[derive(Clone, Debug)]
pub struct ExpandHeads {
    /// `[rows, heads * (key_dim + value_dim)]`.
    pub x: Value,
    /// `[rows, shared_dim]`, or none.
    pub shared: Value,
    /// Heads.
    pub heads: usize,
    /// Elements of a head's own key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// `[rows, heads * (key_dim + shared_dim)]`.
    pub k: Value,
    /// `[rows, heads * value_dim]`.
    pub v: Value,
}

impl ExpandHeads {
    fn row(&self, frame: &Frame<'_>, row: usize, k: &mut [f32], v: &mut [f32]) {
        let shared: &[f32] = if self.shared.is_some() { frame.row(self.shared, row) } else { &[] };
        let heads = frame.row(self.x, row).chunks(self.key_dim + self.value_dim);
        for ((x, k), v) in heads.zip(k.chunks_mut(self.key_dim + shared.len())).zip(v.chunks_mut(self.value_dim)) {
            k[..self.key_dim].copy_from_slice(&x[..self.key_dim]);
            k[self.key_dim..].copy_from_slice(shared);
            v.copy_from_slice(&x[self.key_dim..]);
        }
    }
}

const EXPAND_HEADS: Kernel = Kernel { file: "expand_heads", name: "expand_heads" };

#[derive(Clone, Copy)]
#[repr(C)]
struct ExpandHeadsArgs {
    x: View,
    shared: View,
    k: View,
    v: View,
    heads: u32,
    key_dim: u32,
    value_dim: u32,
    spare: u32,
}

// SAFETY: the struct of kernels/expand_heads.cu.
unsafe impl Args for ExpandHeadsArgs {}

impl Op for ExpandHeads {
    op_common!("expand_heads");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        let mut ports = vec![(Port::In, &mut self.x)];
        if self.shared.is_some() {
            ports.push((Port::In, &mut self.shared));
        }
        ports.extend([(Port::Out, &mut self.k), (Port::Out, &mut self.v)]);
        ports
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let x = shapes.value(self.x);
        let shared = if self.shared.is_some() { shapes.value(self.shared).width } else { 0 };
        ensure!(x.width == self.heads * (self.key_dim + self.value_dim), Internal, "expand_heads: {x:?} for {} heads", self.heads);
        Ok(vec![Shape::f32(x.rows, self.heads * (self.key_dim + shared)), Shape::f32(x.rows, self.heads * self.value_dim)])
    }

    fn solo(&self, frame: &Frame<'_>) -> bool {
        frame.rows(self.k) <= row_grain(frame.slot(self.x).width)
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let (k, v) = (frame.output(self.k), frame.output(self.v));
        for row in 0..k.rows() {
            // SAFETY: alone; the two outputs do not overlap.
            self.row(frame, row, unsafe { k.row(row) }, unsafe { v.row(row) });
        }
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let args = ExpandHeadsArgs {
            x: gpu.view(self.x),
            shared: gpu.view(self.shared),
            k: gpu.view(self.k),
            v: gpu.view(self.v),
            heads: self.heads as u32,
            key_dim: self.key_dim as u32,
            value_dim: self.value_dim as u32,
            spare: 0,
        };
        gpu.launch(EXPAND_HEADS, Grid::cells(gpu.rows(self.k), gpu.width(self.k) + gpu.width(self.v), 256), &args)
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let (k, v) = (frame.output(self.k), frame.output(self.v));
        // SAFETY: `each_row` gives a row to one worker; the two outputs do not overlap.
        turn.each_row(k.rows(), k.width() + v.width(), |row| self.row(frame, row, unsafe { k.row(row) }, unsafe { v.row(row) }));
    }
}
