//! Attention of far queries in parts: each stretch of what a row sees is a piece of work of its own.
//!
//! One row alone would be shared out by heads, of which there are few, and a head's keys and values are small bits of every page. A stretch
//! is read from its first page's first byte to its last page's last, as fast as memory gives it, and there are up to sixteen of them. Rows
//! of a prompt and near rows are left to [`Attention`], which merges the parts.
#![allow(unsafe_code)] // pages, and rows of outputs, disjoint by segment, head and stretch

use super::attention::FAR;
use super::{Attention, Frame, Op, Port, Rows, Segment, Shape, Shapes, StateId, Turn, Value};
use crate::backend::cpu::simd::attend::{QUERIES, Query, queries_at_once};
use crate::backend::cpu::simd::stretch::{SHORTEST, STRETCHES, stretch};
use crate::error::Result;
use crate::op_common;

/// What each stretch gives, unmerged: `[sequences, heads * STRETCHES * (2 + value_dim)]`, of which only far rows' first parts are written.
#[derive(Clone, Debug)]
pub struct AttentionParts {
    /// The attention it works for; writes its `parts`.
    pub attention: Attention,
}

/// Most bytes of a sequence's parts; attention that takes more stays whole.
const MOST_BYTES: usize = 1 << 20;

impl AttentionParts {
    /// Shape of the parts, where they are worth their memory.
    pub fn shape(a: &Attention) -> Option<Shape> {
        let width = a.heads.checked_mul(STRETCHES)?.checked_mul(a.spec.value_dim.checked_add(2)?)?;
        // Windows that no query sees in parts need none.
        (width <= MOST_BYTES / 4 && a.window.is_none_or(|window| window > (FAR - 2) * SHORTEST)).then_some(Shape::f32(Rows::Last, width))
    }

    /// Pieces of a segment.
    fn pieces(&self, segment: &Segment) -> usize {
        if self.attention.is_far(segment) { self.attention.stretches(segment.position).len() } else { 0 }
    }

    /// A stretch of a segment's row, for all heads.
    fn part(&self, frame: &Frame<'_>, segment: usize, index: usize) {
        let (a, parts) = (&self.attention, frame.output(self.attention.parts));
        let (spec, place) = (&a.spec, &frame.batch.segments[segment]);
        let (width, length) = (spec.value_dim + 2, stretch(place.position));
        let begin = (a.stretches(place.position).start + index) * length;
        let (first, last) = (a.first(place.position).max(begin), place.position.min(begin + length - 1));
        let pages = frame.pages(segment, a.state);
        // Whole groups where one fits, else parts of one.
        let (most, group) = (queries_at_once(spec.value_dim), a.group());
        let step = if group > most { most } else { most / group * group };
        let mut head = 0;
        while head < a.heads {
            let end = (head + step).min(if group > most { (head / group + 1) * group } else { a.heads });
            let mut queries = [Query { q: std::ptr::null(), y: std::ptr::null_mut(), first, last, sink: None }; QUERIES];
            for (query, head) in queries.iter_mut().zip(head..end) {
                query.q = frame.row(a.q, place.rows.start)[head * spec.key_dim..][..spec.key_dim].as_ptr();
                let at = (head * STRETCHES + index) * width;
                // SAFETY: this stretch of this row belongs to this piece.
                query.y = unsafe { parts.piece(segment, at..at + width) }.as_mut_ptr();
            }
            let call = a.call(&pages, &queries[..end - head], head..end, true);
            // SAFETY: every position up to the row's own was written before; what it sees is in one stretch, the outputs are this piece's own.
            unsafe { frame.simd.attend(&call) };
            head = end;
        }
    }
}

impl Op for AttentionParts {
    op_common!("attention_parts");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.attention.q), (Port::Out, &mut self.attention.parts)]
    }

    fn states(&self) -> Vec<(Port, StateId)> {
        vec![(Port::In, self.attention.state)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        self.attention.check(shapes)?;
        Ok(Self::shape(&self.attention).into_iter().collect())
    }

    fn idle(&self, frame: &Frame<'_>) -> bool {
        !frame.batch.segments.iter().any(|segment| self.attention.is_far(segment))
    }

    /// Nothing: the definition of attention has no parts.
    fn scalar(&self, _: &Frame<'_>) {}

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let segments = &frame.batch.segments;
        turn.pieces(segments.iter().map(|s| self.pieces(s)).sum(), 1, |range| {
            for item in range {
                let mut item = item;
                for (index, segment) in segments.iter().enumerate() {
                    let pieces = self.pieces(segment);
                    if item < pieces {
                        self.part(frame, index, item);
                        break;
                    }
                    item -= pieces;
                }
            }
        });
    }
}
