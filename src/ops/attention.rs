//! Attention over paged keys and values: the cache write, and softmax(q k^T) v with windows, soft caps and sinks.
//!
//! Every query row has one order of work: pages ascending from position 0 (or the window's first page), sixteen
//! positions at a time, with a running maximum (online softmax; Milakov and Gimelshein, 2018), in stretches whose results are merged. Which
//! rows share a pass over the pages, and whether stretches are computed together, does not enter the result, so a prompt split any way gives
//! the same bits.
#![allow(unsafe_code)] // pages and rows of outputs, disjoint by segment, head and row

use super::row_attention::RowAttention;
use super::{Frame, Gpu, Kv, KvPages, KvSpec, KvType, Op, PAGE, Port, Segment, Shape, Shapes, StateId, Turn, Value, View, WeightId};
use crate::backend::cpu::simd::attend::{Attend, QUERIES, Query, VALUE_DIM, queries_at_once};
use crate::backend::cpu::simd::attend_q8;
use crate::backend::cpu::simd::stretch::{Join, STRETCHES, stretch};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_common};
use std::ops::Range;

const CACHE_WRITE: Kernel = Kernel { file: "cache_write", name: "cache_write" };

#[derive(Clone, Copy)]
#[repr(C)]
struct CacheWriteArgs {
    k: View,
    v: View,
    batch: u64,
    kv: Kv,
    state: u32,
    spare: u32,
}

// SAFETY: the struct of kernels/cache_write.cu.
unsafe impl Args for CacheWriteArgs {}

/// Appends keys and values of the batch's rows to the pages of their sequences.
#[derive(Clone, Debug)]
pub struct CacheWrite {
    /// `[rows, kv_heads * key_dim]`.
    pub k: Value,
    /// `[rows, kv_heads * value_dim]`.
    pub v: Value,
    /// The layer's pages.
    pub state: StateId,
    /// Their dims.
    pub spec: KvSpec,
}

impl CacheWrite {
    fn row(&self, frame: &Frame<'_>, segment: usize, row: usize) {
        let position = frame.batch.positions[row] as usize;
        let page = frame.pages(segment, self.state).page(position / PAGE);
        let at = position % PAGE;
        let (k, v, spec) = (frame.row(self.k, row), frame.row(self.v, row), &self.spec);
        for head in 0..spec.heads {
            let (key, value) = (&k[head * spec.key_dim..][..spec.key_dim], &v[head * spec.value_dim..][..spec.value_dim]);
            // SAFETY: the page has `page_bytes`; this position's elements belong to this row alone.
            unsafe {
                spec.store_key(frame.simd, page, head, at, key);
                spec.store_value(frame.simd, page, head, at, value);
            }
        }
    }

    fn rows(&self, frame: &Frame<'_>, range: Range<usize>) {
        for (index, segment) in frame.batch.segments.iter().enumerate() {
            for row in range.start.max(segment.rows.start)..range.end.min(segment.rows.end) {
                self.row(frame, index, row);
            }
        }
    }
}

impl Op for CacheWrite {
    op_common!("cache_write");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.k), (Port::In, &mut self.v)]
    }

    fn states(&self) -> Vec<(Port, StateId)> {
        vec![(Port::Out, self.state)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let (k, v, spec) = (shapes.value(self.k), shapes.value(self.v), &self.spec);
        ensure!(
            k.width == spec.heads * spec.key_dim && v.width == spec.heads * spec.value_dim && *spec == shapes.kv(self.state),
            Internal,
            "cache_write: {k:?} and {v:?} for {spec:?}"
        );
        Ok(Vec::new())
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let (k, v) = (gpu.view(self.k), gpu.view(self.v));
        let args = CacheWriteArgs { k, v, batch: gpu.batch_at(), kv: self.spec.on_gpu()?, state: gpu.kv_index(self.state), spare: 0 };
        gpu.launch(CACHE_WRITE, Grid::columns(gpu.rows(self.k), gpu.width(self.k) + gpu.width(self.v)), &args)
    }

    fn solo(&self, frame: &Frame<'_>) -> bool {
        frame.batch.tokens.len() <= 2
    }

    fn scalar(&self, frame: &Frame<'_>) {
        self.rows(frame, 0..frame.batch.tokens.len());
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        turn.each(frame.batch.tokens.len(), 2, |range| self.rows(frame, range));
    }
}

/// `y = softmax(mask(softcap(scale * q k^T))) v`, causal; query heads share key/value heads in order.
#[derive(Clone, Debug)]
pub struct Attention {
    /// `[rows, heads * key_dim]`.
    pub q: Value,
    /// The layer's pages; this batch's rows are in them already.
    pub state: StateId,
    /// Their dims.
    pub spec: KvSpec,
    /// Query heads.
    pub heads: usize,
    /// Factor on the scores.
    pub scale: f32,
    /// A query at `p` sees keys at `p - window + 1 ..= p`; none means from 0.
    pub window: Option<usize>,
    /// `cap * tanh(score / cap)`.
    pub softcap: Option<f32>,
    /// `[heads]`: a score for a key without value, which only takes weight away (GPT-OSS).
    pub sinks: Option<WeightId>,
    /// What [`AttentionParts`](super::AttentionParts) has computed of far queries, or none.
    pub parts: Value,
    /// `[rows, heads * value_dim]`.
    pub y: Value,
}

impl Attention {
    pub(super) fn group(&self) -> usize {
        self.heads / self.spec.heads
    }

    /// Whether a segment is one far query, which then comes in parts: for several workers to share, and for a single one because a piece of
    /// work then reads whole pages, however far the query sees.
    pub(super) fn is_far(&self, segment: &Segment) -> bool {
        self.parts.is_some() && segment.rows.len() == 1 && self.stretches(segment.position).len() >= FAR
    }

    /// The stretches of what a query at `position` sees.
    pub(super) fn stretches(&self, position: usize) -> Range<usize> {
        let length = stretch(position);
        self.first(position) / length..position / length + 1
    }

    /// First position a query at `position` sees.
    pub(super) fn first(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }
}

/// What every attention over pages of keys and values asks for: queries of the keys' width, pages as the layer declared them, values
/// that the kernel has room for, a sink for each head. Gives the result's shape.
pub(super) fn check(
    name: &str,
    shapes: &dyn Shapes,
    (q, heads): (Value, usize),
    (state, spec): (StateId, &KvSpec),
    sinks: Option<WeightId>,
) -> Result<Shape> {
    let (q, KvSpec { heads: kv_heads, key_dim, value_dim, dtype }) = (shapes.value(q), *spec);
    ensure!(q.width == heads * key_dim, Internal, "{name}: {q:?} for {heads} heads of {key_dim}");
    ensure!(*spec == shapes.kv(state), Internal, "{name}: {spec:?} over pages of {:?}", shapes.kv(state));
    ensure!(kv_heads > 0 && heads.is_multiple_of(kv_heads), Unsupported, "{name}: {heads} query heads over {kv_heads} key/value heads");
    let room = dtype != KvType::Q8 || attend_q8::fits(queries_at_once(value_dim), key_dim);
    ensure!(room, Unsupported, "{name}: keys of {key_dim} elements beside values of {value_dim} are not computed in 8 bits");
    ensure!(value_dim <= VALUE_DIM, Unsupported, "{name}: values of {value_dim} elements; at most {VALUE_DIM} are computed");
    if let Some(sinks) = sinks {
        let found = shapes.weight(sinks).1;
        ensure!(found == heads, Internal, "{name}: {found} sinks for {heads} heads");
    }
    Ok(Shape::f32(q.rows, heads * value_dim))
}

/// The definition of one query over the positions it sees, as written in the papers, in f64. Keys of 8 bits meet a query that is rounded
/// likewise.
pub(super) fn define(
    spec: &KvSpec,
    pages: &KvPages,
    q: &[f32],
    kv_head: usize,
    positions: Range<usize>,
    [scale, softcap, sink]: [Option<f32>; 3],
    y: &mut [f32],
) {
    let (scale, softcap, sink) = (f64::from(scale.unwrap_or(1.0)), softcap.map(f64::from), sink.map(f64::from));
    let mut rounded = q.to_vec();
    if spec.dtype == KvType::Q8 {
        attend_q8::round_query(&mut rounded);
    }
    let mut scores: Vec<f64> = positions
        .clone()
        .map(|p| {
            let page = pages.page(p / PAGE);
            // SAFETY: inside the page; written before this operation.
            let key = |d: usize| f64::from(unsafe { spec.key(page, kv_head, p % PAGE, d) });
            let dot: f64 = (0..spec.key_dim).map(|d| f64::from(rounded[d]) * key(d)).sum();
            softcap.map_or(dot * scale, |cap| cap * (dot * scale / cap).tanh())
        })
        .collect();
    let most = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
    scores.iter_mut().for_each(|s| *s = (*s - most).exp());
    let total: f64 = scores.iter().sum::<f64>() + sink.map_or(0.0, |s| (s - most).exp());
    for (d, y) in y.iter_mut().enumerate() {
        // SAFETY: as above.
        let value = |p: usize| f64::from(unsafe { spec.value(pages.page(p / PAGE), kv_head, p % PAGE, d) });
        *y = scores.iter().zip(positions.clone()).map(|(s, p)| s / total * value(p)).sum::<f64>() as f32;
    }
}

impl Op for Attention {
    op_common!("attention");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        let mut ports = vec![(Port::In, &mut self.q), (Port::Out, &mut self.y)];
        if self.parts.is_some() {
            ports.insert(1, (Port::In, &mut self.parts));
        }
        ports
    }

    fn states(&self) -> Vec<(Port, StateId)> {
        vec![(Port::In, self.state)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        ensure!(self.window != Some(0), Unsupported, "attention: a window of 0 sees nothing");
        Ok(vec![check("attention", shapes, (self.q, self.heads), (self.state, &self.spec), self.sinks)?])
    }

    fn prepares(&self) -> Option<Value> {
        // Whole warps write a head.
        self.spec.value_dim.is_multiple_of(32).then_some(self.y)
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let call = RowAttention {
            q: self.q,
            y: self.y,
            state: self.state,
            spec: self.spec,
            heads: self.heads,
            scale: self.scale,
            window: self.window,
            softcap: self.softcap,
            sinks: self.sinks,
            source: false,
        };
        call.launch(gpu)
    }

    fn gpu_scratch(&self, rows: usize, _segments: usize, context: usize, _processors: usize) -> usize {
        RowAttention::scratch(rows, self.heads, &self.spec, context)
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        for (index, segment) in frame.batch.segments.iter().enumerate() {
            let pages = frame.pages(index, self.state);
            for row in segment.rows.clone() {
                for head in 0..self.heads {
                    // SAFETY: alone.
                    let y = unsafe { y.piece(row, head * self.spec.value_dim..(head + 1) * self.spec.value_dim) };
                    let q = &frame.row(self.q, row)[head * self.spec.key_dim..][..self.spec.key_dim];
                    let position = frame.batch.positions[row] as usize;
                    let sink = self.sinks.map(|id| frame.weight(id).vector()[head]);
                    let factors = [Some(self.scale), self.softcap, sink];
                    define(&self.spec, &pages, q, head / self.group(), self.first(position)..position + 1, factors, y);
                }
            }
        }
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        // An item is a block of rows and a block of heads of one segment: rows of one head in a prompt, heads of one row while decoding.
        let heads = |s: &Segment| if s.rows.len() == 1 { self.heads_of_a_row(frame.workers, s) } else { 1 };
        let head_blocks = |s: &Segment| match heads(s) {
            n if n >= self.group() => self.heads.div_ceil(n),
            n => self.spec.heads * self.group().div_ceil(n),
        };
        let block = |s: &Segment| {
            let rows = (MOST_WORK / self.work_of_a_query(s)).clamp(1, queries_at_once(self.spec.value_dim));
            if rows > TILE { rows / TILE * TILE } else { rows }
        };
        let items = |s: &Segment| if self.is_far(s) { self.spec.heads } else { s.rows.len().div_ceil(block(s)) * head_blocks(s) };
        let total: usize = frame.batch.segments.iter().map(items).sum();
        turn.pieces(total, 1, |range| {
            for item in range {
                let mut item = item;
                for (index, segment) in frame.batch.segments.iter().enumerate() {
                    if item < items(segment) {
                        if self.is_far(segment) {
                            self.join(frame, index, item * self.group()..(item + 1) * self.group());
                            break;
                        }
                        let (first, head) = (item / head_blocks(segment) * block(segment), item % head_blocks(segment));
                        let start = segment.rows.start + first;
                        let (group, heads) = (self.group(), heads(segment));
                        let heads = if heads >= group {
                            head * heads..((head + 1) * heads).min(self.heads)
                        } else {
                            let blocks = group.div_ceil(heads);
                            let first = head / blocks * group + head % blocks * heads;
                            first..(first + heads).min((head / blocks + 1) * group)
                        };
                        let rows = start..(start + block(segment)).min(segment.rows.end);
                        self.attend(frame, &frame.pages(index, self.state), rows, heads);
                        break;
                    }
                    item -= items(segment);
                }
            }
        });
    }
}

/// Stretches from which on a single row's are computed apart. Fewer would leave workers without one; then heads are shared out instead.
pub(super) const FAR: usize = 4;
/// Rows that the kernel takes together.
const TILE: usize = 6;
/// Multiply-adds of a piece, where one query alone does not have more: about 0.2 ms. Far into a sequence fewer rows make a piece, so that a
/// run that shall leave off has not long to go.
const MOST_WORK: usize = 1 << 23;

impl Attention {
    /// Multiply-adds of a query at the end of a segment.
    fn work_of_a_query(&self, s: &Segment) -> usize {
        let seen = self.window.unwrap_or(usize::MAX).min(s.position + s.rows.len());
        (seen * (self.spec.key_dim + self.spec.value_dim)).max(1)
    }

    /// Query heads of one row that share a pass over the pages: those of several key/value heads, as many as leave each worker its share, so
    /// that pages are read in long runs; part of a group where it is large.
    fn heads_of_a_row(&self, workers: usize, s: &Segment) -> usize {
        let (most, group) = (queries_at_once(self.spec.value_dim), self.group());
        if group > most {
            return most;
        }
        // Twice the work of a piece: it waits for memory more than it computes.
        let fit = (2 * MOST_WORK / (self.work_of_a_query(s) * group)).min(most / group);
        fit.min(self.spec.heads.div_ceil(workers.max(1))).max(1) * group
    }

    /// Merges the parts of some heads of a far query.
    fn join(&self, frame: &Frame<'_>, segment: usize, heads: Range<usize>) {
        let (dim, y) = (self.spec.value_dim, frame.output(self.y));
        let place = &frame.batch.segments[segment];
        for head in heads {
            let join = Join {
                parts: frame.row(self.parts, segment)[head * STRETCHES * (dim + 2)..][..STRETCHES * (dim + 2)].as_ptr(),
                count: self.stretches(place.position).len(),
                value_dim: dim,
                sink: self.sinks.map(|id| frame.weight(id).vector()[head]),
                // SAFETY: this row and head belong to this item.
                y: unsafe { y.piece(place.rows.start, head * dim..(head + 1) * dim) }.as_mut_ptr(),
            };
            // SAFETY: the parts were computed before, and there are at most `STRETCHES` of them.
            unsafe { frame.simd.join(&join) };
        }
    }

    /// The call for queries of `heads`, whole or in part.
    pub(super) fn call<'a>(&self, pages: &'a KvPages, queries: &'a [Query], heads: Range<usize>, part: bool) -> Attend<'a> {
        let (spec, kv_head) = (&self.spec, heads.start / self.group());
        Attend {
            queries,
            heads: heads.len().div_ceil(self.group()),
            stride: spec.head_stride(),
            pages: pages.pages(),
            key_at: spec.key_at(kv_head),
            value_at: spec.value_at(kv_head),
            key_dim: spec.key_dim,
            value_dim: spec.value_dim,
            dtype: spec.dtype,
            scale: self.scale,
            softcap: self.softcap,
            part,
        }
    }

    /// Rows of one segment and heads, in one pass over the pages: one row, or heads of one key/value head.
    fn attend(&self, frame: &Frame<'_>, pages: &KvPages, rows: Range<usize>, heads: Range<usize>) {
        let (spec, y) = (&self.spec, frame.output(self.y));
        let empty = Query { q: std::ptr::null(), y: std::ptr::null_mut(), first: 0, last: 0, sink: None };
        let mut queries = [empty; QUERIES];
        let mut count = 0;
        // Rows of one head, or heads of one row: in either case head by head.
        for row in rows {
            for head in heads.clone() {
                let position = frame.batch.positions[row] as usize;
                queries[count] = Query {
                    q: frame.row(self.q, row)[head * spec.key_dim..].as_ptr(),
                    // SAFETY: this row and head belong to this item.
                    y: unsafe { y.piece(row, head * spec.value_dim..(head + 1) * spec.value_dim) }.as_mut_ptr(),
                    first: self.first(position),
                    last: position,
                    sink: self.sinks.map(|id| frame.weight(id).vector()[head]),
                };
                count += 1;
            }
        }
        let call = self.call(pages, &queries[..count], heads, false);
        // SAFETY: `CacheWrite` wrote every position up to the last row's; the outputs are this item's own.
        unsafe { frame.simd.attend(&call) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::cpu::arena::Buffer;
    use crate::backend::cpu::simd::tables;

    /// More than 2^31 elements of keys and values in one layer of one sequence. All pages are the same memory, so what comes out is known:
    /// each position of the page counts as often as there are pages that it is seen on.
    #[test]
    fn caches_of_more_than_two_to_the_thirty_one_elements() {
        let spec = KvSpec { heads: 64, key_dim: 64, value_dim: 64, dtype: KvType::F32 };
        let positions = (1usize << 31) / (spec.heads * spec.key_dim) + PAGE / 2 + 1;
        let elements = spec.heads * PAGE * (spec.key_dim + spec.value_dim);
        let value = |i: usize| ((i as u32).wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 23) as f32 - 1.0;
        let mut memory = Buffer::new(elements * 4, "a page").unwrap();
        memory.as_mut_slice_of::<f32>()[..elements].iter_mut().enumerate().for_each(|(i, x)| *x = value(i));
        let (pages, page) = (vec![memory.as_ptr(); positions.div_ceil(PAGE)], memory.as_slice_of::<f32>());
        let (head, q) = (spec.heads - 1, (0..spec.key_dim).map(|i| value(i + 77)).collect::<Vec<f32>>());
        let (mut sums, mut total) = (vec![0.0f64; spec.value_dim], 0.0);
        for p in 0..PAGE {
            let seen = (positions - p).div_ceil(PAGE) as f64;
            let key = |d: usize| f64::from(page[spec.key_at(head) + p / 16 * 16 * spec.key_dim + p % 16 + d * 16]);
            let weight = seen * ((0..spec.key_dim).map(|d| f64::from(q[d]) * key(d)).sum::<f64>() * 0.125).exp();
            total += weight;
            sums.iter_mut().enumerate().for_each(|(d, sum)| *sum += weight * f64::from(page[spec.value_at(head) + p * spec.value_dim + d]));
        }
        for table in tables() {
            let mut y = vec![0.0f32; spec.value_dim];
            let query = Query { q: q.as_ptr(), y: y.as_mut_ptr(), first: 0, last: positions - 1, sink: None };
            let call = Attend {
                queries: &[query],
                heads: 1,
                stride: 0,
                pages: &pages,
                key_at: spec.key_at(head),
                value_at: spec.value_at(head),
                key_dim: spec.key_dim,
                value_dim: spec.value_dim,
                dtype: spec.dtype,
                scale: 0.125,
                softcap: None,
                part: false,
            };
            // SAFETY: every page has all elements of the spec, and nobody writes them; the output is this call's own.
            unsafe { table.attend(&call) };
            for (found, sum) in y.iter().zip(&sums) {
                assert!((f64::from(*found) - sum / total).abs() < 2e-3, "{}: {found}, exactly {}", table.name(), sum / total);
            }
        }
    }
}
