//! Attention over the whole of a source text, whatever the query's own position: an encoder's own attention, and a decoder's view of
//! what the encoder read.
//!
//! Every query row has one order of work, positions ascending with a running maximum, so which rows share a pass over the
//! pages does not enter the result.
#![allow(unsafe_code)] // pages and rows of outputs, disjoint by row and head

use super::row_attention::RowAttention;
use super::{Frame, Gpu, KvSpec, Op, Port, Shape, Shapes, StateId, Turn, Value, attention};
use crate::backend::cpu::simd::attend::{Attend, QUERIES, Query};
use crate::error::Result;
use crate::op_common;
use std::ops::Range;

/// `y = softmax(scale * q k^T) v` over all positions of the segment's source; each query head has a key/value head of its own.
#[derive(Clone, Debug)]
pub struct SourceAttention {
    /// `[rows, heads * key_dim]`.
    pub q: Value,
    /// Keys and values of the source.
    pub state: StateId,
    /// Their dims.
    pub spec: KvSpec,
    /// Factor on the scores.
    pub scale: f32,
    /// `[rows, heads * value_dim]`.
    pub y: Value,
}

impl SourceAttention {
    /// Rows of one segment and one head, in one pass over the pages.
    fn attend(&self, frame: &Frame<'_>, segment: usize, rows: Range<usize>, head: usize) {
        let (spec, y) = (&self.spec, frame.output(self.y));
        let columns = head * spec.value_dim..(head + 1) * spec.value_dim;
        let Some(last) = frame.batch.source(segment).checked_sub(1) else {
            // SAFETY: these rows and this head belong to this item.
            rows.for_each(|row| unsafe { y.piece(row, columns.clone()) }.fill(0.0));
            return;
        };
        let pages = frame.pages(segment, self.state);
        let empty = Query { q: std::ptr::null(), y: std::ptr::null_mut(), first: 0, last, sink: None };
        let mut queries = [empty; QUERIES];
        let count = rows.len();
        for (query, row) in queries.iter_mut().zip(rows) {
            query.q = frame.row(self.q, row)[head * spec.key_dim..].as_ptr();
            // SAFETY: this row and head belong to this item.
            query.y = unsafe { y.piece(row, columns.clone()) }.as_mut_ptr();
        }
        let call = Attend {
            queries: &queries[..count],
            heads: 1,
            stride: 0,
            pages: pages.pages(),
            key_at: spec.key_at(head),
            value_at: spec.value_at(head),
            key_dim: spec.key_dim,
            value_dim: spec.value_dim,
            dtype: spec.dtype,
            scale: self.scale,
            softcap: None,
            part: false,
        };
        // SAFETY: every position of the source was written before the source's length was told; the outputs are this item's own.
        unsafe { frame.simd.attend(&call) };
    }
}

impl Op for SourceAttention {
    op_common!("source_attention");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.q), (Port::Out, &mut self.y)]
    }

    fn states(&self) -> Vec<(Port, StateId)> {
        vec![(Port::In, self.state)]
    }

    fn prepares(&self) -> Option<Value> {
        self.spec.value_dim.is_multiple_of(32).then_some(self.y)
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        Ok(vec![attention::check("source_attention", shapes, (self.q, self.spec.heads), (self.state, &self.spec), None)?])
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let call = RowAttention {
            q: self.q,
            y: self.y,
            state: self.state,
            spec: self.spec,
            heads: self.spec.heads,
            scale: self.scale,
            window: None,
            softcap: None,
            sinks: None,
            source: true,
        };
        call.launch(gpu)
    }

    fn gpu_scratch(&self, rows: usize, _segments: usize, context: usize, _processors: usize) -> usize {
        RowAttention::scratch(rows, self.spec.heads, &self.spec, context)
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let (y, spec) = (frame.output(self.y), &self.spec);
        for row in 0..y.rows() {
            let segment = frame.segment_of(row);
            let pages = frame.pages(segment, self.state);
            for head in 0..spec.heads {
                let q = &frame.row(self.q, row)[head * spec.key_dim..][..spec.key_dim];
                // SAFETY: alone.
                let y = unsafe { y.piece(row, head * spec.value_dim..(head + 1) * spec.value_dim) };
                attention::define(spec, &pages, q, head, 0..frame.batch.source(segment), [Some(self.scale), None, None], y);
            }
        }
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        // An item is a block of rows of one segment, and a head.
        let blocks = |rows: &Range<usize>| rows.len().div_ceil(QUERIES);
        let total: usize = frame.batch.segments.iter().map(|s| blocks(&s.rows) * self.spec.heads).sum();
        turn.pieces(total, 1, |range| {
            for mut item in range {
                for (index, segment) in frame.batch.segments.iter().enumerate() {
                    let items = blocks(&segment.rows) * self.spec.heads;
                    if item < items {
                        let start = segment.rows.start + item / self.spec.heads * QUERIES;
                        self.attend(frame, index, start..(start + QUERIES).min(segment.rows.end), item % self.spec.heads);
                        break;
                    }
                    item -= items;
                }
            }
        });
    }
}
