//! The state space recurrence of Mamba 2 (Dao and Gu, 2024): a matrix state for each head that decays by one factor and takes
//! in the outer product of an input and a write vector.
//!
//! Positions go one by one in order, so a prompt split any way gives the same bits. Work is shared by sequence, head
//! and block of sixteen channels.
#![allow(unsafe_code)] // pieces of outputs and slots, disjoint by segment, head and block

use super::decay::softplus;
use super::delta_rule::{Block, LANES, each_block, lanes, stage_bytes, state_elements};
use super::{Frame, Gpu, Op, Port, Rows, Shape, Shapes, SlotId, Turn, Value, View, WeightId};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{bail, ensure, op_common};

/// `t = clamp(softplus(dt + bias)); S <- exp(-t exp(a_log)) S + t x b^T; y = S c + d x`, for each head, from a state of
/// zeros. Write and read vectors `b` and `c` are shared by the consecutive heads of a group.
#[derive(Clone, Debug)]
pub struct Mamba2 {
    /// `[rows, heads * channels]`.
    pub x: Value,
    /// `[rows, groups * depth]`.
    pub b: Value,
    /// `[rows, groups * depth]`.
    pub c: Value,
    /// `[rows, heads]`.
    pub dt: Value,
    /// `[heads]`.
    pub a_log: WeightId,
    /// `[heads]`.
    pub d: WeightId,
    /// `[heads]`.
    pub dt_bias: WeightId,
    /// Bounds on the time step.
    pub limit: (f32, f32),
    /// Heads.
    pub heads: usize,
    /// Groups of heads.
    pub groups: usize,
    /// `[heads, channels / 16 rounded up, depth, 16]`.
    pub slot: SlotId,
    /// `[rows, heads * channels]`.
    pub y: Value,
}

impl Mamba2 {
    /// Floats of the slot, `None` where they are beyond counting.
    pub fn slot_elements(heads: usize, channels: usize, depth: usize) -> Option<usize> {
        state_elements(heads, channels, depth)
    }

    /// `(channels of a head, depth of a state)`.
    fn dims(&self, width: impl Fn(Value) -> usize) -> (usize, usize) {
        (width(self.x) / self.heads, width(self.b) / self.groups)
    }

    /// All rows of one block.
    fn block(&self, frame: &Frame<'_>, block: &Block) {
        let (channels, depth) = self.dims(|v| frame.slot(v).width);
        let vector = |id| frame.weight(id).vector()[block.head];
        let (rate, skip, bias) = (vector(self.a_log).exp(), vector(self.d), vector(self.dt_bias));
        let group = block.head / (self.heads / self.groups);
        let own = block.head * channels + block.channels.start..block.head * channels + block.channels.end;
        // SAFETY: the block's state belongs to this chunk alone.
        let state = lanes(unsafe { frame.state(block.segment, self.slot).piece(block.state.clone()) });
        let y = frame.output(self.y);
        for row in frame.batch.segments[block.segment].rows.clone() {
            let step = softplus(frame.row(self.dt, row)[block.head] + bias).clamp(self.limit.0, self.limit.1);
            let mut x = [0.0f32; LANES];
            x[..own.len()].copy_from_slice(&frame.row(self.x, row)[own.clone()]);
            let write = x.map(|x| step * x);
            let (b, c) = (&frame.row(self.b, row)[group * depth..][..depth], &frame.row(self.c, row)[group * depth..][..depth]);
            let mut read = [0.0f32; LANES];
            frame.simd.scan_read(state, (-step * rate).exp(), &write, b, c, &mut read);
            // SAFETY: these channels of this segment's rows belong to this chunk alone.
            let y = unsafe { y.piece(row, own.clone()) };
            for (lane, y) in y.iter_mut().enumerate() {
                *y = read[lane] + skip * x[lane];
            }
        }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct Mamba2Args {
    x: View,
    b: View,
    c: View,
    dt: View,
    y: View,
    batch: u64,
    a_log: u64,
    d: u64,
    dt_bias: u64,
    slot: u64,
    least: f32,
    most: f32,
    heads: u32,
    groups: u32,
    channels: u32,
    depth: u32,
}

// SAFETY: the struct of kernels/mamba2.cu.
unsafe impl Args for Mamba2Args {}

impl Op for Mamba2 {
    op_common!("mamba2");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        let inputs = [&mut self.x, &mut self.b, &mut self.c, &mut self.dt];
        inputs.into_iter().map(|v| (Port::In, v)).chain([(Port::Out, &mut self.y)]).collect()
    }

    fn slots(&self) -> Vec<SlotId> {
        vec![self.slot]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let width = |v| shapes.value(v).width;
        ensure!(
            self.heads > 0 && self.groups > 0 && self.heads.is_multiple_of(self.groups),
            Unsupported,
            "mamba2: {} heads do not split into {} groups",
            self.heads,
            self.groups
        );
        let (channels, depth) = self.dims(width);
        ensure!(
            width(self.x) == self.heads * channels
                && width(self.b) == self.groups * depth
                && width(self.c) == self.groups * depth
                && width(self.dt) == self.heads
                && shapes.value(self.x).rows == Rows::All
                && [self.a_log, self.d, self.dt_bias].iter().all(|id| shapes.weight(*id).1 == self.heads),
            Internal,
            "mamba2: widths {:?} for {} heads in {} groups",
            [self.x, self.b, self.c, self.dt].map(width),
            self.heads,
            self.groups
        );
        ensure!(self.limit.0 <= self.limit.1, Mismatch, "mamba2: time steps from {} to {}", self.limit.0, self.limit.1);
        let (slot, wanted) = (shapes.slot(self.slot), Mamba2::slot_elements(self.heads, channels, depth));
        ensure!(Some(slot) == wanted, Internal, "mamba2: a slot of {slot}, {wanted:?} are needed");
        Ok(vec![Shape::f32(Rows::All, self.heads * channels)])
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let (channels, depth) = self.dims(|v| frame.slot(v).width);
        let y = frame.output(self.y);
        let elements = Mamba2::slot_elements(self.heads, channels, depth).expect("the slot exists");
        for (index, segment) in frame.batch.segments.iter().enumerate() {
            // SAFETY: alone.
            let state = unsafe { frame.state(index, self.slot).piece(0..elements) };
            for (head, state) in state.chunks_mut(elements / self.heads).enumerate() {
                let vector = |id| f64::from(frame.weight(id).vector()[head]);
                let group = head / (self.heads / self.groups);
                for p in 0..channels {
                    let at = |i: usize| (p / LANES * depth + i) * LANES + p % LANES;
                    for row in segment.rows.clone() {
                        let dt = f64::from(frame.row(self.dt, row)[head]) + vector(self.dt_bias);
                        let step = (dt.max(0.0) + (-dt.abs()).exp().ln_1p()).clamp(f64::from(self.limit.0), f64::from(self.limit.1));
                        let decay = (-step * vector(self.a_log).exp()).exp();
                        let x = f64::from(frame.row(self.x, row)[head * channels + p]);
                        let shared = |v: Value, i: usize| f64::from(frame.row(v, row)[group * depth + i]);
                        let s: Vec<f64> = (0..depth).map(|i| decay * f64::from(state[at(i)]) + step * x * shared(self.b, i)).collect();
                        let out: f64 = (0..depth).map(|i| s[i] * shared(self.c, i)).sum::<f64>() + vector(self.d) * x;
                        s.iter().enumerate().for_each(|(i, s)| state[at(i)] = *s as f32);
                        let column = head * channels + p;
                        // SAFETY: alone.
                        unsafe { y.piece(row, column..column + 1) }.fill(out as f32);
                    }
                }
            }
        }
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let (channels, depth) = self.dims(|v| gpu.width(v));
        let (name, padded) = match depth {
            ..=32 => ("mamba2_32", 32),
            33..=64 => ("mamba2_64", 64),
            65..=128 => ("mamba2_128", 128),
            129..=256 => ("mamba2_256", 256),
            _ => bail!(Unsupported, "mamba2: states {depth} deep; a GPU computes at most 256"),
        };
        let args = Mamba2Args {
            x: gpu.view(self.x),
            b: gpu.view(self.b),
            c: gpu.view(self.c),
            dt: gpu.view(self.dt),
            y: gpu.view(self.y),
            batch: gpu.batch_at(),
            a_log: gpu.vector(Some(self.a_log)),
            d: gpu.vector(Some(self.d)),
            dt_bias: gpu.vector(Some(self.dt_bias)),
            slot: gpu.slot(self.slot).start as u64,
            least: self.limit.0,
            most: self.limit.1,
            heads: self.heads as u32,
            groups: self.groups as u32,
            channels: channels as u32,
            depth: depth as u32,
        };
        let blocks = channels.next_multiple_of(LANES).div_ceil(32);
        let grid = Grid::new([gpu.segments(), self.heads, blocks], 128).shared(stage_bytes(2, padded));
        gpu.launch(Kernel { file: "mamba2", name }, grid, &args)
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let (channels, depth) = self.dims(|v| frame.slot(v).width);
        each_block(frame, turn, self.heads, channels, depth, |block| self.block(frame, &block));
    }
}
