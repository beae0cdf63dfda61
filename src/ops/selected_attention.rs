//! Grouped-query attention over the positions that a selection names (Qwen 4 Exp's sparse attention).
//!
//! Keys and values of a position are one record, `[keys of all heads | values of all heads]`: positions are met one by one, so
//! a position's numbers lie together. Every query and head takes positions in the order the selection lists them, with a
//! running maximum; so bits do not depend on the batch.
#![allow(unsafe_code)] // pieces of outputs, disjoint by row and head

use super::lanes::dot64;
use super::records::GpuRecords;
use super::splits::GpuSplits;
use super::{Frame, Gpu, Op, Port, Records, Shape, Shapes, StateId, Turn, Value, View, scratch};
use crate::backend::cuda::launch::{Args, Kernel};
use crate::error::Result;
use crate::{bail, ensure, op_common};
use std::ops::Range;

/// `y_h = sum_j softmax_j(scale q_h . k_j) v_j` over the selected positions `j`; query heads share key/value heads in order.
#[derive(Clone, Debug)]
pub struct SelectedAttention {
    /// `[rows, heads * key_dim]`.
    pub q: Value,
    /// Query heads.
    pub heads: usize,
    /// Key/value heads.
    pub kv_heads: usize,
    /// Elements of a key.
    pub key_dim: usize,
    /// Elements of a value.
    pub value_dim: usize,
    /// Keys and values, this batch's included.
    pub records: Records,
    /// `[rows, n]`: positions as whole numbers, negative ones skipped.
    pub selection: Value,
    /// Factor on the scores.
    pub scale: f32,
    /// `[rows, heads * value_dim]`.
    pub y: Value,
}

/// Query heads that share one reading of a record.
const HEADS: usize = 8;

impl SelectedAttention {
    fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Calls `f` with key and value of every position a query sees, in order. `scratch` holds a key and a value.
    fn visit(&self, frame: &Frame<'_>, row: usize, kv_head: usize, scratch: &mut [f32], mut f: impl FnMut(&[f32], &[f32])) {
        let position = frame.batch.positions[row] as usize;
        let pages = frame.pages(frame.segment_of(row), self.records.state);
        let (key, value) = scratch.split_at_mut(self.key_dim);
        let value_at = self.kv_heads * self.key_dim + kv_head * self.value_dim;
        let selected = frame.row(self.selection, row).iter().filter(|v| **v >= 0.0).map(|v| *v as usize);
        for p in selected.filter(|p| *p <= position) {
            let key = self.records.read_part(&pages, p, kv_head * self.key_dim, key);
            f(key, self.records.read_part(&pages, p, value_at, value));
        }
    }

    /// Some query heads of one key/value head, of one query.
    fn heads(&self, frame: &Frame<'_>, row: usize, kv_head: usize, heads: Range<usize>, scratch: &mut [f32]) {
        let y = frame.output(self.y);
        // SAFETY: these heads of this row belong to this call alone.
        let y = unsafe { y.piece(row, heads.start * self.value_dim..heads.end * self.value_dim) };
        y.fill(0.0);
        let q = &frame.row(self.q, row)[heads.start * self.key_dim..heads.end * self.key_dim];
        let mut most = [f32::NEG_INFINITY; HEADS];
        let mut total = [0.0f32; HEADS];
        self.visit(frame, row, kv_head, scratch, |k, v| {
            for (i, (q, y)) in q.chunks(self.key_dim).zip(y.chunks_mut(self.value_dim)).enumerate() {
                let score = frame.simd.dot(q, k) * self.scale;
                if score > most[i] {
                    let shrink = (most[i] - score).exp();
                    total[i] *= shrink;
                    frame.simd.scale(shrink, y);
                    most[i] = score;
                }
                let weight = (score - most[i]).exp();
                total[i] += weight;
                frame.simd.axpy(weight, v, y);
            }
        });
        for (i, y) in y.chunks_mut(self.value_dim).enumerate() {
            let factor = if total[i] > 0.0 { 1.0 / total[i] } else { 0.0 };
            frame.simd.scale(factor, y);
        }
    }
}

const MERGE: Kernel = Kernel { file: "selected_attention", name: "selected_attention_merge" };

#[derive(Clone, Copy)]
#[repr(C)]
struct SelectedAttentionArgs {
    q: View,
    y: View,
    selection: View,
    batch: u64,
    records: GpuRecords,
    splits: GpuSplits,
    heads: u32,
    kv_heads: u32,
    key_dim: u32,
    scale: f32,
}

// SAFETY: the struct of kernels/selected_attention.cu.
unsafe impl Args for SelectedAttentionArgs {}

impl Op for SelectedAttention {
    op_common!("selected_attention");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.q), (Port::In, &mut self.selection), (Port::Out, &mut self.y)]
    }

    fn states(&self) -> Vec<(Port, StateId)> {
        vec![(Port::In, self.records.state)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let q = shapes.value(self.q);
        self.records.check(shapes)?;
        ensure!(q.width == self.heads * self.key_dim, Internal, "selected_attention: {q:?} for {} heads of {}", self.heads, self.key_dim);
        ensure!(
            self.kv_heads > 0 && self.heads.is_multiple_of(self.kv_heads),
            Unsupported,
            "selected_attention: {} query heads over {} key/value heads",
            self.heads,
            self.kv_heads
        );
        let width = self.kv_heads * (self.key_dim + self.value_dim);
        ensure!(
            self.records.width == width && self.records.every == 1,
            Internal,
            "selected_attention: {:?} for records of {width}",
            self.records
        );
        Ok(vec![Shape::f32(q.rows, self.heads * self.value_dim)])
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        let mut scratch = vec![0.0f32; self.key_dim + self.value_dim];
        for row in 0..y.rows() {
            for head in 0..self.heads {
                let q = &frame.row(self.q, row)[head * self.key_dim..][..self.key_dim];
                let mut seen: Vec<(f64, Vec<f32>)> = Vec::new();
                self.visit(frame, row, head / self.group(), &mut scratch, |k, v| {
                    seen.push((dot64(q, k) * f64::from(self.scale), v.to_vec()))
                });
                let most = seen.iter().map(|s| s.0).fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = seen.iter().map(|s| (s.0 - most).exp()).sum();
                // SAFETY: alone.
                let y = unsafe { y.piece(row, head * self.value_dim..(head + 1) * self.value_dim) };
                for (d, y) in y.iter_mut().enumerate() {
                    *y = seen.iter().map(|(s, v)| (s - most).exp() / total * f64::from(v[d])).sum::<f64>() as f32;
                }
            }
        }
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let (name, together) = match self.key_dim.max(self.value_dim) {
            ..=128 => ("selected_attention_128", 4),
            129..=256 => ("selected_attention_256", 4),
            257..=512 => ("selected_attention_512", 2),
            wide => bail!(Unsupported, "selected_attention: heads of {wide} elements; a GPU computes at most 512"),
        };
        let (rows, groups) = (gpu.rows(self.y), self.kv_heads * self.group().div_ceil(together));
        let args = |splits: GpuSplits| SelectedAttentionArgs {
            q: gpu.view(self.q),
            y: gpu.view(self.y),
            selection: gpu.view(self.selection),
            batch: gpu.batch_at(),
            records: self.records.gpu(gpu),
            splits,
            heads: self.heads as u32,
            kv_heads: self.kv_heads as u32,
            key_dim: self.key_dim as u32,
            scale: self.scale,
        };
        GpuSplits::each(gpu, (rows, self.heads, groups), self.value_dim, |splits, grid| {
            gpu.launch(Kernel { file: "selected_attention", name }, grid, &args(splits))?;
            splits.merge(gpu, MERGE, self.y, self.heads)
        })
    }

    fn gpu_scratch(&self, rows: usize, _segments: usize, _context: usize, processors: usize) -> usize {
        GpuSplits::scratch(rows, self.heads, self.value_dim, processors)
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        // An item is a row and up to HEADS query heads of one key/value head.
        let blocks = self.group().div_ceil(HEADS);
        let per_row = self.kv_heads * blocks;
        turn.pieces(frame.rows(self.y) * per_row, 1, |range| {
            for item in range {
                let (row, kv_head, block) = (item / per_row, item % per_row / blocks, item % blocks);
                let first = kv_head * self.group() + block * HEADS;
                let heads = first..(first + HEADS).min((kv_head + 1) * self.group());
                scratch::with(|s| self.heads(frame, row, kv_head, heads, scratch::sized(&mut s.a, self.key_dim + self.value_dim)));
            }
        });
    }
}
