//! The gated delta rule (Yang et al., 2024): a matrix state for each head that decays, unlearns what a key held and
//! learns its new value. With a gate for each key channel it is Kimi Delta Attention.
//!
//! Positions go one by one in order, each element of the state by the same additions, so a prompt split any way gives the
//! same bits. Work is shared by sequence, head and block of sixteen value channels, which never meet.
#![allow(unsafe_code)] // pieces of outputs and slots, disjoint by segment, head and block

use super::{Frame, Gpu, Op, Port, Rows, Shape, Shapes, SlotId, Turn, Value, View};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{bail, ensure, op_common};
use std::ops::Range;

/// `S <- decay S; S <- S + k (beta (v - S^T k))^T; y = S^T q`, for each head, from a state of zeros.
///
/// Key heads are shared by consecutive value heads, or dealt out to them in turn. `q` and `k` come normed and scaled.
#[derive(Clone, Debug)]
pub struct DeltaRule {
    /// `[rows, key_heads * key_dim]`.
    pub q: Value,
    /// `[rows, key_heads * key_dim]`.
    pub k: Value,
    /// `[rows, heads * value_dim]`.
    pub v: Value,
    /// `[rows, heads]`, or `[rows, heads * key_dim]`: a gate for each key channel.
    pub decay: Value,
    /// `[rows, heads]`.
    pub beta: Value,
    /// Heads of queries and keys.
    pub key_heads: usize,
    /// Heads of values and states.
    pub heads: usize,
    /// Whether value head `h` has key head `h % key_heads`, instead of each key head having a run of value heads (GGUF).
    pub tiled: bool,
    /// `[heads, value_dim / 16 rounded up, key_dim, 16]`.
    pub slot: SlotId,
    /// `[rows, heads * value_dim]`.
    pub y: Value,
}

/// Value channels computed together.
pub(super) const LANES: usize = 16;

/// Floats of a state of `heads` heads, `None` where they are beyond counting.
pub(super) fn state_elements(heads: usize, channels: usize, depth: usize) -> Option<usize> {
    channels.div_ceil(LANES).checked_mul(LANES)?.checked_mul(heads)?.checked_mul(depth)
}

/// Bytes of shared memory in which a GPU has eight positions: `lines` of `padded` elements in four groups, and what is one for each channel or position.
pub(super) fn stage_bytes(lines: usize, padded: usize) -> usize {
    8 * (lines * (padded + 16) + 32 + 3) * 4
}

/// One block's place: `segment`, `head`, value channels of the head, and where its state lies in the slot.
pub(super) struct Block {
    pub segment: usize,
    pub head: usize,
    pub channels: Range<usize>,
    pub state: Range<usize>,
}

/// Runs `f` over every block of every segment, shared among workers.
pub(super) fn each_block(frame: &Frame<'_>, turn: &Turn<'_>, heads: usize, channels: usize, depth: usize, mut f: impl FnMut(Block)) {
    let blocks = channels.div_ceil(LANES);
    turn.each(frame.batch.segments.len() * heads * blocks, 1, |range| {
        for item in range {
            let (block, head, segment) = (item % blocks, item / blocks % heads, item / blocks / heads);
            let start = (head * blocks + block) * depth * LANES;
            let channels = block * LANES..((block + 1) * LANES).min(channels);
            f(Block { segment, head, channels, state: start..start + depth * LANES });
        }
    });
}

/// A block's state as rows of sixteen lanes.
pub(super) fn lanes(piece: &mut [f32]) -> &mut [[f32; LANES]] {
    piece.as_chunks_mut().0
}

impl DeltaRule {
    /// Floats of the slot, `None` where they are beyond counting.
    pub fn slot_elements(heads: usize, key_dim: usize, value_dim: usize) -> Option<usize> {
        state_elements(heads, value_dim, key_dim)
    }

    fn key_head(&self, head: usize) -> usize {
        if self.tiled { head % self.key_heads } else { head / (self.heads / self.key_heads) }
    }

    /// `(key_dim, value_dim, gates of a head)`.
    fn dims(&self, width: impl Fn(Value) -> usize) -> (usize, usize, usize) {
        (width(self.k) / self.key_heads, width(self.v) / self.heads, width(self.decay) / self.heads)
    }

    /// All rows of one block.
    fn block(&self, frame: &Frame<'_>, block: &Block) {
        let (key_dim, value_dim, gates) = self.dims(|v| frame.slot(v).width);
        let key_head = self.key_head(block.head);
        let keys = key_head * key_dim..(key_head + 1) * key_dim;
        let values = block.head * value_dim + block.channels.start..block.head * value_dim + block.channels.end;
        // SAFETY: the block's state belongs to this chunk alone.
        let state = lanes(unsafe { frame.state(block.segment, self.slot).piece(block.state.clone()) });
        let y = frame.output(self.y);
        for row in frame.batch.segments[block.segment].rows.clone() {
            let (q, k) = (&frame.row(self.q, row)[keys.clone()], &frame.row(self.k, row)[keys.clone()]);
            let decay = &frame.row(self.decay, row)[block.head * gates..(block.head + 1) * gates];
            let mut v = [0.0f32; LANES];
            v[..values.len()].copy_from_slice(&frame.row(self.v, row)[values.clone()]);
            let mut out = [0.0f32; LANES];
            frame.simd.decay_read(state, decay, k, &mut out);
            let beta = frame.row(self.beta, row)[block.head];
            for (v, held) in v.iter_mut().zip(out) {
                *v = (*v - held) * beta;
            }
            frame.simd.learn_read(state, &v, k, q, &mut out);
            // SAFETY: these channels of this segment's rows belong to this chunk alone.
            unsafe { y.piece(row, values.clone()) }.copy_from_slice(&out[..values.len()]);
        }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct DeltaRuleArgs {
    q: View,
    k: View,
    v: View,
    decay: View,
    beta: View,
    y: View,
    batch: u64,
    slot: u64,
    key_heads: u32,
    heads: u32,
    key_dim: u32,
    value_dim: u32,
    gates: u32,
    tiled: u32,
}

// SAFETY: the struct of kernels/delta_rule.cu.
unsafe impl Args for DeltaRuleArgs {}

impl Op for DeltaRule {
    op_common!("delta_rule");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        let inputs = [&mut self.q, &mut self.k, &mut self.v, &mut self.decay, &mut self.beta];
        inputs.into_iter().map(|v| (Port::In, v)).chain([(Port::Out, &mut self.y)]).collect()
    }

    fn slots(&self) -> Vec<SlotId> {
        vec![self.slot]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let width = |v| shapes.value(v).width;
        ensure!(
            self.heads > 0 && self.key_heads > 0 && self.heads.is_multiple_of(self.key_heads),
            Unsupported,
            "delta_rule: {} value heads do not share {} key heads evenly",
            self.heads,
            self.key_heads
        );
        let (key_dim, value_dim, gates) = self.dims(width);
        ensure!(
            width(self.q) == self.key_heads * key_dim
                && width(self.k) == self.key_heads * key_dim
                && width(self.v) == self.heads * value_dim
                && width(self.beta) == self.heads
                && width(self.decay) == self.heads * gates
                && (gates == 1 || gates == key_dim)
                && shapes.value(self.v).rows == Rows::All,
            Internal,
            "delta_rule: widths {:?} for {} key heads and {} heads",
            [self.q, self.k, self.v, self.decay, self.beta].map(width),
            self.key_heads,
            self.heads
        );
        let (slot, wanted) = (shapes.slot(self.slot), DeltaRule::slot_elements(self.heads, key_dim, value_dim));
        ensure!(Some(slot) == wanted, Internal, "delta_rule: a slot of {slot}, {wanted:?} are needed");
        Ok(vec![Shape::f32(Rows::All, self.heads * value_dim)])
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let (key_dim, value_dim, gates) = self.dims(|v| frame.slot(v).width);
        let y = frame.output(self.y);
        for (index, segment) in frame.batch.segments.iter().enumerate() {
            let elements = DeltaRule::slot_elements(self.heads, key_dim, value_dim).expect("the slot exists");
            // SAFETY: alone.
            let state = unsafe { frame.state(index, self.slot).piece(0..elements) };
            for (head, state) in state.chunks_mut(elements / self.heads).enumerate() {
                let key_head = self.key_head(head);
                for d in 0..value_dim {
                    let at = |i: usize| (d / LANES * key_dim + i) * LANES + d % LANES;
                    for row in segment.rows.clone() {
                        let keys = |v: Value, i: usize| f64::from(frame.row(v, row)[key_head * key_dim + i]);
                        let gate = |i: usize| f64::from(frame.row(self.decay, row)[head * gates + if gates == 1 { 0 } else { i }]);
                        let mut s: Vec<f64> = (0..key_dim).map(|i| f64::from(state[at(i)]) * gate(i)).collect();
                        let held: f64 = (0..key_dim).map(|i| s[i] * keys(self.k, i)).sum();
                        let v = f64::from(frame.row(self.v, row)[head * value_dim + d]);
                        let delta = (v - held) * f64::from(frame.row(self.beta, row)[head]);
                        s.iter_mut().enumerate().for_each(|(i, s)| *s += keys(self.k, i) * delta);
                        let out: f64 = (0..key_dim).map(|i| s[i] * keys(self.q, i)).sum();
                        s.iter().enumerate().for_each(|(i, s)| state[at(i)] = *s as f32);
                        let column = head * value_dim + d;
                        // SAFETY: alone.
                        unsafe { y.piece(row, column..column + 1) }.fill(out as f32);
                    }
                }
            }
        }
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let (key_dim, value_dim, gates) = self.dims(|v| gpu.width(v));
        let (name, padded) = match key_dim {
            ..=32 => ("delta_rule_32", 32),
            33..=64 => ("delta_rule_64", 64),
            65..=128 => ("delta_rule_128", 128),
            129..=256 => ("delta_rule_256", 256),
            _ => bail!(Unsupported, "delta_rule: keys of {key_dim} elements; a GPU computes at most 256"),
        };
        let args = DeltaRuleArgs {
            q: gpu.view(self.q),
            k: gpu.view(self.k),
            v: gpu.view(self.v),
            decay: gpu.view(self.decay),
            beta: gpu.view(self.beta),
            y: gpu.view(self.y),
            batch: gpu.batch_at(),
            slot: gpu.slot(self.slot).start as u64,
            key_heads: self.key_heads as u32,
            heads: self.heads as u32,
            key_dim: key_dim as u32,
            value_dim: value_dim as u32,
            gates: gates as u32,
            tiled: u32::from(self.tiled),
        };
        let channels = value_dim.next_multiple_of(LANES).div_ceil(32);
        let grid = Grid::new([gpu.segments(), self.heads, channels], 128).shared(stage_bytes(3, padded));
        gpu.launch(Kernel { file: "delta_rule", name }, grid, &args)
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let (key_dim, value_dim, _) = self.dims(|v| frame.slot(v).width);
        each_block(frame, turn, self.heads, value_dim, key_dim, |block| self.block(frame, &block));
    }
}
