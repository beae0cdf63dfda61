//! Attention in which all heads share one row a position, and values are the row's first elements: latent attention in
//! its absorbed form (DeepSeek-V2, 2024), and DeepSeek-V4's shared key/value row.
//!
//! A query may see all earlier positions, a window of them, or those a selection names; and beside them compressed rows, each
//! standing for a group of positions. Every query and head has one order of work: positions ascending (or as the
//! selection lists them), then compressed rows; softmax with a running maximum. So bits do not depend on the batch.
#![allow(unsafe_code)] // pieces of outputs, disjoint by row and head

use super::lanes::dot64;
use super::records::GpuRecords;
use super::splits::GpuSplits;
use super::{Frame, Gpu, Op, Port, Records, Shape, Shapes, StateId, Turn, Value, View, WeightId, scratch};
use crate::backend::cuda::launch::{Args, Kernel};
use crate::error::Result;
use crate::{bail, ensure, op_common};

/// Compressed rows beside the positions.
#[derive(Clone, Copy, Debug)]
pub struct Pooled {
    /// The rows; a query at `p` may see the first `(p + 1) / every`.
    pub records: Records,
    /// `[rows, n]`: indices of the rows to see, as whole numbers, negative ones skipped. None sees all.
    pub selection: Value,
}

/// `y_h = sum_j softmax_j(scale q_h . k_j, sink_h) k_j[..value_dim]`.
#[derive(Clone, Debug)]
pub struct SharedAttention {
    /// `[rows, heads * width]`.
    pub q: Value,
    /// Query heads.
    pub heads: usize,
    /// Rows of positions, this batch's included.
    pub records: Records,
    /// A query at `p` sees `p - window + 1 ..= p`; none means from 0.
    pub window: Option<usize>,
    /// `[rows, n]`: positions to see instead, as whole numbers, negative ones skipped; or none.
    pub selection: Value,
    /// Compressed rows.
    pub pooled: Option<Pooled>,
    /// Elements of a value.
    pub value_dim: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// `[heads]`: a score without value.
    pub sinks: Option<WeightId>,
    /// `[rows, heads * value_dim]`.
    pub y: Value,
}

/// Heads that share one reading of a row.
const HEADS: usize = 8;

impl SharedAttention {
    /// Calls `f` with every row a query sees, in order. `scratch` holds a row.
    fn visit(&self, frame: &Frame<'_>, segment: usize, row: usize, scratch: &mut [f32], mut f: impl FnMut(&[f32])) {
        let position = frame.batch.positions[row] as usize;
        let pages = frame.pages(segment, self.records.state);
        let selected = |list: Value| frame.row(list, row).iter().filter(|v| **v >= 0.0).map(|v| *v as usize);
        if self.selection.is_some() {
            for p in selected(self.selection).filter(|p| *p <= position) {
                f(self.records.read(&pages, p, scratch));
            }
        } else {
            for p in self.window.map_or(0, |w| (position + 1).saturating_sub(w))..=position {
                f(self.records.read(&pages, p, scratch));
            }
        }
        if let Some(pooled) = self.pooled {
            let (records, pages) = (pooled.records, frame.pages(segment, pooled.records.state));
            let count = (position + 1) / records.every;
            if pooled.selection.is_some() {
                for j in selected(pooled.selection).filter(|j| *j < count) {
                    f(records.read(&pages, j, scratch));
                }
            } else {
                for j in 0..count {
                    f(records.read(&pages, j, scratch));
                }
            }
        }
    }

    fn sink(&self, frame: &Frame<'_>, head: usize) -> Option<f32> {
        self.sinks.map(|id| frame.weight(id).vector()[head])
    }

    /// Some heads of one query.
    fn heads(&self, frame: &Frame<'_>, segment: usize, row: usize, heads: std::ops::Range<usize>, scratch: &mut [f32]) {
        let (width, value_dim) = (self.records.width, self.value_dim);
        let y = frame.output(self.y);
        // SAFETY: these heads of this row belong to this call alone.
        let y = unsafe { y.piece(row, heads.start * value_dim..heads.end * value_dim) };
        y.fill(0.0);
        let q = &frame.row(self.q, row)[heads.start * width..heads.end * width];
        // A sink is a score that was there before all keys: its weight counts, its value is nothing.
        let mut most = [f32::NEG_INFINITY; HEADS];
        let mut total = [0.0f32; HEADS];
        for (i, head) in heads.clone().enumerate() {
            if let Some(sink) = self.sink(frame, head) {
                (most[i], total[i]) = (sink, 1.0);
            }
        }
        self.visit(frame, segment, row, scratch, |k| {
            for (i, (q, y)) in q.chunks(width).zip(y.chunks_mut(value_dim)).enumerate() {
                let score = frame.simd.dot(q, k) * self.scale;
                if score > most[i] {
                    let shrink = (most[i] - score).exp();
                    total[i] *= shrink;
                    frame.simd.scale(shrink, y);
                    most[i] = score;
                }
                let weight = (score - most[i]).exp();
                total[i] += weight;
                frame.simd.axpy(weight, &k[..value_dim], y);
            }
        });
        for (i, y) in y.chunks_mut(value_dim).enumerate() {
            let factor = if total[i] > 0.0 { 1.0 / total[i] } else { 0.0 };
            frame.simd.scale(factor, y);
        }
    }
}

const MERGE: Kernel = Kernel { file: "shared_attention", name: "shared_attention_merge" };

#[derive(Clone, Copy)]
#[repr(C)]
struct SharedAttentionArgs {
    q: View,
    y: View,
    selection: View,
    pooled_selection: View,
    batch: u64,
    sinks: u64,
    records: GpuRecords,
    pooled: GpuRecords,
    splits: GpuSplits,
    heads: u32,
    window: u32,
    has_pooled: u32,
    scale: f32,
}

// SAFETY: the struct of kernels/shared_attention.cu.
unsafe impl Args for SharedAttentionArgs {}

impl Op for SharedAttention {
    op_common!("shared_attention");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        let mut ports = vec![(Port::In, &mut self.q)];
        if self.selection.is_some() {
            ports.push((Port::In, &mut self.selection));
        }
        if let Some(pooled) = &mut self.pooled
            && pooled.selection.is_some()
        {
            ports.push((Port::In, &mut pooled.selection));
        }
        ports.push((Port::Out, &mut self.y));
        ports
    }

    fn states(&self) -> Vec<(Port, StateId)> {
        let pooled = self.pooled.map(|p| (Port::In, p.records.state));
        [(Port::In, self.records.state)].into_iter().chain(pooled).collect()
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let (q, width) = (shapes.value(self.q), self.records.width);
        ensure!(
            q.width == self.heads * width && self.value_dim <= width,
            Internal,
            "shared_attention: {q:?} for {} heads of {width}",
            self.heads
        );
        ensure!(self.window != Some(0), Unsupported, "shared_attention: a window of 0 sees nothing");
        self.records.check(shapes)?;
        if let Some(pooled) = self.pooled {
            ensure!(
                pooled.records.width == width,
                Internal,
                "shared_attention: compressed rows of {}, rows of {width}",
                pooled.records.width
            );
            pooled.records.check(shapes)?;
        }
        if let Some(sinks) = self.sinks {
            ensure!(
                shapes.weight(sinks).1 == self.heads,
                Internal,
                "shared_attention: {} sinks for {} heads",
                shapes.weight(sinks).1,
                self.heads
            );
        }
        Ok(vec![Shape::f32(q.rows, self.heads * self.value_dim)])
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        let width = self.records.width;
        let mut scratch = vec![0.0f32; width];
        for (segment, rows) in frame.batch.segments.iter().map(|s| s.rows.clone()).enumerate() {
            for row in rows {
                for head in 0..self.heads {
                    let q = &frame.row(self.q, row)[head * width..][..width];
                    let mut seen: Vec<(f64, Vec<f32>)> = Vec::new();
                    self.visit(frame, segment, row, &mut scratch, |k| seen.push((dot64(q, k) * f64::from(self.scale), k.to_vec())));
                    let sink = self.sink(frame, head).map(f64::from);
                    let most = seen.iter().map(|s| s.0).chain(sink).fold(f64::NEG_INFINITY, f64::max);
                    let total: f64 = seen.iter().map(|s| s.0).chain(sink).map(|s| (s - most).exp()).sum();
                    // SAFETY: alone.
                    let y = unsafe { y.piece(row, head * self.value_dim..(head + 1) * self.value_dim) };
                    for (d, y) in y.iter_mut().enumerate() {
                        *y = seen.iter().map(|(s, k)| (s - most).exp() / total * f64::from(k[d])).sum::<f64>() as f32;
                    }
                }
            }
        }
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let width = self.records.width;
        let (name, together) = match width {
            ..=128 => ("shared_attention_128", 4),
            129..=512 => ("shared_attention_512", 4),
            513..=576 => ("shared_attention_576", 4),
            577..=1024 => ("shared_attention_1024", 2),
            _ => bail!(Unsupported, "shared_attention: rows of {width} elements; a GPU computes at most 1024"),
        };
        let (rows, groups) = (gpu.rows(self.y), self.heads.div_ceil(together));
        let args = |splits: GpuSplits| SharedAttentionArgs {
            q: gpu.view(self.q),
            y: gpu.view(self.y),
            selection: gpu.view(self.selection),
            pooled_selection: self.pooled.map_or(View::NONE, |p| gpu.view(p.selection)),
            batch: gpu.batch_at(),
            sinks: gpu.vector(self.sinks),
            records: self.records.gpu(gpu),
            pooled: self.pooled.map_or(GpuRecords::NONE, |p| p.records.gpu(gpu)),
            splits,
            heads: self.heads as u32,
            window: self.window.unwrap_or(0).min(u32::MAX as usize) as u32,
            has_pooled: u32::from(self.pooled.is_some()),
            scale: self.scale,
        };
        GpuSplits::each(gpu, (rows, self.heads, groups), self.value_dim, |splits, grid| {
            gpu.launch(Kernel { file: "shared_attention", name }, grid, &args(splits))?;
            splits.merge(gpu, MERGE, self.y, self.heads)
        })
    }

    fn gpu_scratch(&self, rows: usize, _segments: usize, _context: usize, processors: usize) -> usize {
        GpuSplits::scratch(rows, self.heads, self.value_dim, processors)
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        // An item is a row and up to HEADS heads.
        let blocks = self.heads.div_ceil(HEADS);
        let rows = frame.rows(self.y);
        turn.pieces(rows * blocks, 1, |range| {
            for item in range {
                let (row, block) = (item / blocks, item % blocks);
                let segment = frame.segment_of(row);
                let heads = block * HEADS..((block + 1) * HEADS).min(self.heads);
                scratch::with(|s| self.heads(frame, segment, row, heads, scratch::sized(&mut s.a, self.records.width)));
            }
        });
    }
}
