//! Attention over paged keys and values: the cache write, and softmax(q k^T) v with windows, soft caps and sinks.
//!
//! Every query row has one order of work: pages ascending from position 0 (or the window's first page), sixteen
//! positions at a time, with a running maximum (online softmax; Milakov and Gimelshein, 2018). Which rows share a
//! pass over the pages does not enter the result, so a prompt split any way gives the same bits.
#![allow(unsafe_code)] // pages and rows of outputs, disjoint by segment, head and row

use super::row_attention::RowAttention;
use super::{Frame, Gpu, Kv, KvPages, KvSpec, KvType, Op, PAGE, Port, Segment, Shape, Shapes, StateId, Turn, Value, View, WeightId};
use crate::backend::cpu::simd::attend::{Attend, QUERIES, Query, VALUE_DIM, queries_at_once};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_common};
use half::f16;
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
            let keys = spec.key_at(head) + at / 16 * 16 * spec.key_dim + at % 16;
            // SAFETY: the page has `page_bytes`; this position's elements belong to this row alone.
            unsafe { store(frame, page, keys, 16, spec.dtype, &k[head * spec.key_dim..][..spec.key_dim]) };
            let values = spec.value_at(head) + at * spec.value_dim;
            // SAFETY: as above.
            unsafe { store(frame, page, values, 1, spec.dtype, &v[head * spec.value_dim..][..spec.value_dim]) };
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

/// Writes elements of a page from `at` on, `step` apart.
///
/// # Safety
/// They are inside the page, and nobody else touches them now.
pub(super) unsafe fn store(frame: &Frame<'_>, page: *mut u8, at: usize, step: usize, dtype: KvType, x: &[f32]) {
    const CHUNK: usize = 64;
    let mut halves = [0u16; CHUNK];
    for (chunk, x) in x.chunks(CHUNK).enumerate() {
        let at = at + chunk * CHUNK * step;
        // SAFETY: the caller's promise.
        unsafe {
            match dtype {
                KvType::F32 => x.iter().enumerate().for_each(|(i, x)| page.cast::<f32>().add(at + i * step).write(*x)),
                KvType::F16 => {
                    frame.simd.to_f16(x, &mut halves[..x.len()]);
                    halves[..x.len()].iter().enumerate().for_each(|(i, x)| page.cast::<u16>().add(at + i * step).write(*x));
                }
            }
        }
    }
}

/// Reads element `at` of a page.
///
/// # Safety
/// `at` is inside the page, and nobody writes that element now.
unsafe fn load(page: *const u8, at: usize, dtype: KvType) -> f32 {
    // SAFETY: the caller's promise.
    unsafe {
        match dtype {
            KvType::F32 => page.cast::<f32>().add(at).read(),
            KvType::F16 => page.cast::<f16>().add(at).read().to_f32(),
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
        let args = CacheWriteArgs { k, v, batch: gpu.batch_at(), kv: self.spec.into(), state: gpu.kv_index(self.state), spare: 0 };
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
    /// `[rows, heads * value_dim]`.
    pub y: Value,
}

impl Attention {
    fn group(&self) -> usize {
        self.heads / self.spec.heads
    }

    /// First position a query at `position` sees.
    fn first(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// One query, as written in the papers, in f64.
    fn scalar_query(&self, frame: &Frame<'_>, pages: &KvPages, row: usize, head: usize, y: &mut [f32]) {
        let (spec, kv_head) = (&self.spec, head / self.group());
        let q = &frame.row(self.q, row)[head * spec.key_dim..][..spec.key_dim];
        let position = frame.batch.positions[row] as usize;
        let first = self.first(position);
        let mut scores: Vec<f64> = (first..=position)
            .map(|p| {
                let page = pages.page(p / PAGE);
                let base = spec.key_at(kv_head) + p % PAGE / 16 * 16 * spec.key_dim + p % 16;
                // SAFETY: inside the page; written before this operation.
                let dot: f64 =
                    (0..spec.key_dim).map(|d| f64::from(q[d]) * f64::from(unsafe { load(page, base + d * 16, spec.dtype) })).sum();
                let score = dot * f64::from(self.scale);
                self.softcap.map_or(score, |cap| f64::from(cap) * (score / f64::from(cap)).tanh())
            })
            .collect();
        let sink = self.sinks.map(|id| f64::from(frame.weight(id).vector()[head]));
        let most = scores.iter().copied().chain(sink).fold(f64::NEG_INFINITY, f64::max);
        scores.iter_mut().for_each(|s| *s = (*s - most).exp());
        let total: f64 = scores.iter().sum::<f64>() + sink.map_or(0.0, |s| (s - most).exp());
        for (d, y) in y.iter_mut().enumerate() {
            let at = |p: usize| spec.value_at(kv_head) + p % PAGE * spec.value_dim + d;
            *y = scores
                .iter()
                .enumerate()
                .map(|(i, s)| {
                    let p = first + i;
                    // SAFETY: as above.
                    s / total * f64::from(unsafe { load(pages.page(p / PAGE), at(p), spec.dtype) })
                })
                .sum::<f64>() as f32;
        }
    }
}

impl Op for Attention {
    op_common!("attention");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.q), (Port::Out, &mut self.y)]
    }

    fn states(&self) -> Vec<(Port, StateId)> {
        vec![(Port::In, self.state)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let (q, spec) = (shapes.value(self.q), &self.spec);
        ensure!(q.width == self.heads * spec.key_dim, Internal, "attention: {q:?} for {} heads of {}", self.heads, spec.key_dim);
        ensure!(
            self.heads.is_multiple_of(spec.heads),
            Unsupported,
            "attention: {} query heads over {} key/value heads",
            self.heads,
            spec.heads
        );
        ensure!(
            spec.value_dim <= VALUE_DIM,
            Unsupported,
            "attention: values of {} elements; at most {VALUE_DIM} are computed",
            spec.value_dim
        );
        ensure!(self.window != Some(0), Unsupported, "attention: a window of 0 sees nothing");
        Ok(vec![Shape::f32(q.rows, self.heads * spec.value_dim)])
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
                    self.scalar_query(frame, &pages, row, head, y);
                }
            }
        }
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        // An item is a block of rows and a block of heads of one segment: rows of one head in a prompt, heads of one row while decoding.
        let heads = |s: &Segment| if s.rows.len() == 1 { HEADS.min(self.group()) } else { 1 };
        let head_blocks = |s: &Segment| self.spec.heads * self.group().div_ceil(heads(s));
        // Far into a sequence fewer rows make a piece, so that a run that shall leave off has not long to go.
        let block = |s: &Segment| {
            let seen = self.window.unwrap_or(usize::MAX).min(s.position + s.rows.len());
            let rows =
                (MOST_WORK / (seen * (self.spec.key_dim + self.spec.value_dim)).max(1)).clamp(1, queries_at_once(self.spec.value_dim));
            if rows > TILE { rows / TILE * TILE } else { rows }
        };
        let items = |s: &Segment| s.rows.len().div_ceil(block(s)) * head_blocks(s);
        let total: usize = frame.batch.segments.iter().map(items).sum();
        turn.pieces(total, 1, |range| {
            for item in range {
                let mut item = item;
                for (index, segment) in frame.batch.segments.iter().enumerate() {
                    if item < items(segment) {
                        let (first, head) = (item / head_blocks(segment) * block(segment), item % head_blocks(segment));
                        let start = segment.rows.start + first;
                        let per_group = self.group().div_ceil(heads(segment));
                        let first = head / per_group * self.group() + head % per_group * heads(segment);
                        let last = (first + heads(segment)).min((head / per_group + 1) * self.group());
                        self.attend(
                            frame,
                            &frame.pages(index, self.state),
                            start..(start + block(segment)).min(segment.rows.end),
                            first..last,
                        );
                        break;
                    }
                    item -= items(segment);
                }
            }
        });
    }
}

/// Heads of one row that share a pass over the pages. More would leave workers without an item where there are few key/value heads.
const HEADS: usize = 4;
/// Rows that the kernel takes together.
const TILE: usize = 6;
/// Multiply-adds of a piece, where one row alone does not have more: about 0.2 ms.
const MOST_WORK: usize = 1 << 23;

impl Attention {
    /// Rows of one segment and heads of one key/value head, in one pass over the pages.
    fn attend(&self, frame: &Frame<'_>, pages: &KvPages, rows: Range<usize>, heads: Range<usize>) {
        let (spec, y) = (&self.spec, frame.output(self.y));
        let empty = Query { q: std::ptr::null(), y: std::ptr::null_mut(), first: 0, last: 0, sink: None };
        let mut queries = [empty; QUERIES];
        let mut count = 0;
        let kv_head = heads.start / self.group();
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
        let call = Attend {
            queries: &queries[..count],
            pages: pages.pages(),
            key_at: spec.key_at(kv_head),
            value_at: spec.value_at(kv_head),
            key_dim: spec.key_dim,
            value_dim: spec.value_dim,
            half: spec.dtype == KvType::F16,
            scale: self.scale,
            softcap: self.softcap,
        };
        // SAFETY: `CacheWrite` wrote every position up to the last row's; the outputs are this item's own.
        unsafe { frame.simd.attend(&call) };
    }
}
