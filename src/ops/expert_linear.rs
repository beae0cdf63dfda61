//! Products with routed matrices: each row meets the matrices of the experts it was routed to.
//!
//! Work is cut by expert and panels: the rows that share an expert are gathered, so its weights are streamed once for all of them, and experts
//! nobody was routed to are not touched. One row (decoding) is the same with groups of one. A product's bits depend on its operands
//! alone, so grouping never shows. Without routing, slot `j` meets matrix `j` (per-head matrices).
#![allow(unsafe_code)] // pieces of outputs, disjoint by slot, row and panel

use super::routed::Routed;
use super::scratch::{self, Scratch, sized};
use super::{Frame, Gpu, GpuWeight, Kind, Matrix, Op, PagedExperts, Port, Product, Shape, Shapes, Turn, Uses, Value, Weight, WeightId};
use crate::backend::cpu::activations::{Activations, Epilogue, Q8_BLOCK};
use crate::backend::cpu::pack::{LANES, Packed};
use crate::error::Result;
use crate::{ensure, op_common};
use std::ops::Range;

/// `y[r][j] = W[e(r, j)] x[r]`, or `W[e(r, j)] x[r][j]` where each slot has its own input.
///
/// An id beyond the experts computes nothing; its slot is zeros.
#[derive(Clone, Debug)]
pub struct ExpertLinear {
    /// `[rows, cols]`, or `[rows, slots * cols]`.
    pub x: Value,
    /// The same in Q8, or none (see [`super::Linear`]).
    pub q: Value,
    /// `[rows, 2 * slots]` (see [`super::Route`]), or none: slot `j` meets matrix `j`.
    pub route: Value,
    /// `[experts]` of `[width, cols]`.
    pub weight: WeightId,
    /// `[experts * width]`.
    pub bias: Option<WeightId>,
    /// Matrices a row meets.
    pub slots: usize,
    /// `[rows, slots * width]`.
    pub y: Value,
}

/// Panels of 16 outputs in a chunk: few, so that one row's work spreads over all workers; a block's results stay small.
const PANELS: usize = 4;
/// Rows that are gathered at a time.
const ROWS: usize = 64;

/// Rows that meet one expert.
#[derive(Clone, Debug)]
pub(super) struct Group {
    expert: usize,
    /// Where its (row, slot) pairs lie among all, sorted by expert.
    pairs: Range<usize>,
    /// Number of its first chunk.
    first_chunk: usize,
}

impl ExpertLinear {
    /// The expert of a row's slot.
    fn expert(&self, frame: &Frame<'_>, row: usize, slot: usize) -> usize {
        if self.route.is_some() { frame.row(self.route, row)[slot] as usize } else { slot }
    }

    /// Where slot `slot` begins in a row of `x`, and how wide it is.
    fn input(&self, frame: &Frame<'_>, slot: usize, cols: usize) -> usize {
        let x = frame.slot(if self.x.is_some() { self.x } else { self.q });
        if x.width == cols { 0 } else { slot * cols }
    }

    /// Sorts (row, slot) pairs by expert, rows ascending within; those without an expert are one group at the end. Returns the number of
    /// chunks. Every worker does it for itself and finds the same.
    fn group(&self, frame: &Frame<'_>, experts: &Experts<'_>, scratch: &mut Scratch) -> usize {
        let (rows, slots, count) = (frame.rows(self.y), self.slots, experts.count());
        // A counting sort: starts of each expert, then places.
        let (starts, order) = sized(&mut scratch.pairs, count + 2 + rows * slots).split_at_mut(count + 2);
        starts.fill(0);
        let of = |row: usize, slot: usize| self.expert(frame, row, slot).min(count);
        for row in 0..rows {
            (0..slots).for_each(|slot| starts[of(row, slot) + 1] += 1);
        }
        for e in 0..=count {
            starts[e + 1] += starts[e];
        }
        for row in 0..rows {
            for slot in 0..slots {
                let at = &mut starts[of(row, slot)];
                order[*at as usize] = (row * slots + slot) as u32;
                *at += 1;
            }
        }
        // `starts[e]` has moved on to where expert `e` ends.
        scratch.groups.clear();
        let (mut begin, mut chunks) = (0, 0);
        for (expert, end) in starts[..=count].iter().map(|e| *e as usize).enumerate() {
            if end > begin {
                scratch.groups.push(Group { expert, pairs: begin..end, first_chunk: chunks });
                chunks += if expert < count { experts.chunks(expert) } else { 1 };
            }
            begin = end;
        }
        chunks
    }

    /// One chunk: some panels of one expert, for all rows that meet it.
    fn chunk(&self, frame: &Frame<'_>, experts: &Experts<'_>, width: usize, chunk: usize, scratch: &mut Scratch) {
        let group = &scratch.groups[scratch.groups.partition_point(|g| g.first_chunk <= chunk) - 1];
        let (expert, pairs) = (group.expert, experts.count() + 2 + group.pairs.start..experts.count() + 2 + group.pairs.end);
        let index = chunk - group.first_chunk;
        if expert >= experts.count() {
            let y = frame.output(self.y);
            for pair in &scratch.pairs[pairs] {
                let (row, slot) = (*pair as usize / self.slots, *pair as usize % self.slots);
                // SAFETY: pairs without an expert are one chunk.
                unsafe { y.piece(row, slot * width..(slot + 1) * width) }.fill(0.0);
            }
            return;
        }
        let done = experts.with(expert, index, |part, panels, column| {
            let bias = self.bias.map(|id| &frame.weight(id).vector()[expert * width + column..][..part.rows()]);
            self.product(frame, part, panels, width, column, bias, pairs, scratch);
        });
        if let Err(e) = done {
            frame.failure.note(e);
        }
    }

    /// Some panels of one expert, whose first output is `column`, for these (row, slot) pairs.
    fn product(
        &self,
        frame: &Frame<'_>,
        part: &Packed,
        panels: Range<usize>,
        width: usize,
        column: usize,
        bias: Option<&[f32]>,
        pairs: Range<usize>,
        scratch: &mut Scratch,
    ) {
        let Scratch { a, b, blocks, pairs: all, .. } = scratch;
        let y = frame.output(self.y);
        let place = |pair: u32| (pair as usize / self.slots, pair as usize % self.slots);
        let epilogue = Epilogue { bias, add: false };
        let cols = part.cols();
        let features = panels.start * LANES..(panels.end * LANES).min(part.rows());
        for pairs in all[pairs].chunks(ROWS) {
            let (row, slot) = place(pairs[0]);
            let start = self.input(frame, slot, cols);
            // Rows next to each other in the same slot need no gathering; one row never does.
            let even = pairs.iter().enumerate().all(|(i, p)| *p as usize == pairs[0] as usize + i * self.slots);
            let count = pairs.len();
            if even {
                let acts = match part.layout().is_integer() {
                    true => match frame.input_q8(self.q) {
                        Activations::Q8 { blocks, stride } => {
                            Activations::Q8 { blocks: &blocks[row * stride + start / Q8_BLOCK..], stride }
                        }
                        other => other,
                    },
                    false => {
                        let stride = frame.slot(self.x).width;
                        Activations::F32 { x: &frame.input(self.x)[row * stride + start..], stride }
                    }
                };
                assert!(row + count <= y.rows() && slot * width + column + part.rows() <= y.width());
                // SAFETY: the rows and columns are inside the output (just checked), and this chunk's alone: it has these slots' panels.
                unsafe {
                    let y_at = y.as_mut_ptr().add(row * y.stride() + slot * width + column);
                    frame.simd.matmul(part, panels.clone(), &acts, 0..count, &epilogue, y_at, y.stride());
                }
                continue;
            }
            let acts = match part.layout().is_integer() {
                true => {
                    let wide = cols / Q8_BLOCK;
                    let gathered = sized(blocks, count * wide);
                    if let Activations::Q8 { blocks, stride } = frame.input_q8(self.q) {
                        for (to, (row, slot)) in gathered.chunks_mut(wide).zip(pairs.iter().map(|p| place(*p))) {
                            to.copy_from_slice(&blocks[row * stride + self.input(frame, slot, cols) / Q8_BLOCK..][..wide]);
                        }
                    }
                    Activations::Q8 { blocks: gathered, stride: wide }
                }
                false => {
                    let gathered = sized(a, count * cols);
                    for (to, (row, slot)) in gathered.chunks_mut(cols).zip(pairs.iter().map(|p| place(*p))) {
                        to.copy_from_slice(&frame.row(self.x, row)[self.input(frame, slot, cols)..][..cols]);
                    }
                    Activations::F32 { x: gathered, stride: cols }
                }
            };
            let ld = PANELS * LANES;
            // Features keep their numbers, so the rows begin where the first of these panels would be.
            let tile = sized(b, features.start + count * ld);
            // SAFETY: these panels have at most `ld` features, from `features.start` on, in each of `count` rows `ld` apart.
            unsafe { frame.simd.matmul(part, panels.clone(), &acts, 0..count, &epilogue, tile.as_mut_ptr(), ld) };
            for (from, (row, slot)) in tile[features.start..].chunks(ld).zip(pairs.iter().map(|p| place(*p))) {
                let at = slot * width + column;
                // SAFETY: this chunk has these panels of these slots alone.
                unsafe { y.piece(row, at + features.start..at + features.end) }.copy_from_slice(&from[..features.len()]);
            }
        }
    }
}

/// Chunks of a part.
fn part_chunks(part: &Packed) -> usize {
    part.panels().div_ceil(PANELS)
}

/// The experts of a weight, in memory or in their file.
enum Experts<'a> {
    Packed(&'a [Matrix]),
    Paged(&'a PagedExperts),
}

impl<'a> Experts<'a> {
    fn of(weight: &'a Weight) -> Experts<'a> {
        match weight {
            Weight::Paged(paged) => Experts::Paged(paged),
            weight => Experts::Packed(weight.experts()),
        }
    }

    fn count(&self) -> usize {
        match self {
            Experts::Packed(matrices) => matrices.len(),
            Experts::Paged(paged) => paged.count(),
        }
    }

    fn cols(&self) -> usize {
        match self {
            Experts::Packed(matrices) => matrices.first().and_then(|m| m.parts.first()).map_or(0, Packed::cols),
            Experts::Paged(paged) => paged.cols(),
        }
    }

    /// Chunks of one expert.
    fn chunks(&self, expert: usize) -> usize {
        match self {
            Experts::Packed(matrices) => matrices[expert].parts.iter().map(part_chunks).sum(),
            Experts::Paged(paged) => paged.chunks(),
        }
    }

    /// Calls `f` with the part that has a chunk, the chunk's panels in it, and the part's first output.
    fn with(&self, expert: usize, mut chunk: usize, f: impl FnOnce(&Packed, Range<usize>, usize)) -> Result<()> {
        match self {
            Experts::Paged(paged) => paged.with(expert, chunk, chunk == 0, |packed, column| f(packed, 0..packed.panels(), column)),
            Experts::Packed(matrices) => {
                let mut column = 0;
                for part in &matrices[expert].parts {
                    if chunk < part_chunks(part) {
                        f(part, chunk * PANELS..((chunk + 1) * PANELS).min(part.panels()), column);
                        break;
                    }
                    chunk -= part_chunks(part);
                    column += part.rows();
                }
                Ok(())
            }
        }
    }

    fn decode_row(&self, expert: usize, row: usize, out: &mut [f32]) -> Result<()> {
        match self {
            Experts::Packed(matrices) => {
                matrices[expert].decode_row(row, out);
                Ok(())
            }
            Experts::Paged(paged) => paged.decode_row(expert, row, out),
        }
    }
}

impl Op for ExpertLinear {
    op_common!("expert_linear");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        let mut ports = Vec::with_capacity(4);
        for input in [&mut self.x, &mut self.q, &mut self.route] {
            if input.is_some() {
                ports.push((Port::In, input));
            }
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
        let ((width, cols), experts) = (shapes.weight(self.weight), shapes.experts(self.weight));
        let x = shapes.value(if self.x.is_some() { self.x } else { self.q });
        ensure!(
            (x.width == cols || x.width == self.slots * cols) && !x.sliced,
            Internal,
            "{experts} experts [{width}, {cols}], {} slots, meet {x:?}",
            self.slots
        );
        if self.q.is_some() {
            let q = shapes.value(self.q);
            ensure!(q.kind == Kind::Q8 && q.width == x.width, Internal, "{q:?} as the 8-bit input of experts [{width}, {cols}]");
        }
        if self.route.is_some() {
            let route = shapes.value(self.route);
            ensure!(route.width == 2 * self.slots && route.rows == x.rows, Internal, "{route:?} routes {} slots of {x:?}", self.slots);
        } else {
            ensure!(self.slots == experts, Internal, "{} slots of {experts} experts without routing", self.slots);
        }
        if let Some(bias) = self.bias {
            ensure!(
                shapes.weight(bias).1 == experts * width,
                Internal,
                "a bias of {} for {experts} experts of {width}",
                shapes.weight(bias).1
            );
        }
        ensure!(width < 1 << 31 && self.slots < 1 << 20, Unsupported, "{} slots of {width}", self.slots);
        Ok(vec![Shape::f32(x.rows, self.slots * width)])
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        let experts = Experts::of(frame.weight(self.weight));
        let (width, cols) = (y.width() / self.slots, experts.cols());
        let bias = self.bias.map(|id| frame.weight(id).vector());
        for row in 0..y.rows() {
            for slot in 0..self.slots {
                // SAFETY: alone.
                let y = unsafe { y.piece(row, slot * width..(slot + 1) * width) };
                let id = self.expert(frame, row, slot);
                if id >= experts.count() {
                    y.fill(0.0);
                    continue;
                }
                let start = self.input(frame, slot, cols);
                let x: Vec<f64> = (start..start + cols).map(|k| element(self, frame, row, k)).collect();
                let mut w = vec![0.0f32; cols];
                for (n, y) in y.iter_mut().enumerate() {
                    if let Err(e) = experts.decode_row(id, n, &mut w) {
                        return frame.failure.note(e);
                    }
                    let sum: f64 = w.iter().zip(&x).map(|(w, x)| f64::from(*w) * x).sum();
                    *y = (sum + bias.map_or(0.0, |b| f64::from(b[id * width + n]))) as f32;
                }
            }
        }
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let x = if self.x.is_some() { self.x } else { self.q };
        let cols = match gpu.weight(self.weight) {
            GpuWeight::Experts { parts, .. } => parts.first().and_then(|p| p.first()).map_or(0, |part| part.cols as usize),
            _ => 0,
        };
        let step = if gpu.width(x) == cols { 0 } else { cols };
        let ExpertLinear { q, route, weight, bias, slots, y, .. } = *self;
        let routed = Routed { x: self.x, q, step, route, weight, bias, slots, tail: 0, y };
        routed.launch(gpu, gpu.width(y) / slots)
    }

    fn gpu_scratch(&self, rows: usize, _segments: usize, _context: usize, _processors: usize) -> usize {
        if self.route.is_some() { Routed::scratch(rows, self.slots) } else { 0 }
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let experts = &Experts::of(frame.weight(self.weight));
        let width = frame.slot(self.y).width / self.slots;
        scratch::with(|scratch| {
            let chunks = self.group(frame, experts, scratch);
            turn.pieces(chunks, 1, |range| {
                range.for_each(|chunk| {
                    if !frame.failure.is_noted() {
                        self.chunk(frame, experts, width, chunk, scratch)
                    }
                })
            });
        });
    }
}

/// Element `k` of a row of the input, of whichever form is connected.
fn element(op: &ExpertLinear, frame: &Frame<'_>, row: usize, k: usize) -> f64 {
    if op.x.is_some() {
        return f64::from(frame.row(op.x, row)[k]);
    }
    match frame.input_q8(op.q) {
        Activations::Q8 { blocks, stride } => {
            let block = &blocks[row * stride + k / Q8_BLOCK];
            f64::from(block.scale) * f64::from(block.codes[k % Q8_BLOCK])
        }
        Activations::F32 { x, stride } => f64::from(x[row * stride + k]),
        Activations::Pairs { .. } => f64::NAN,
    }
}
