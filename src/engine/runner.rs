//! Programs of a loaded model by batch shape, and the workspace they share.

use super::prepare::Prepared;
use crate::backend::cpu::pool::Pool;
use crate::circuit::{Program, Workspace};
use crate::error::Result;
use crate::ops::{Batch, KvPages, Segment, StatePointers, Weight};
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// Most rows and sequences of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub rows: usize,
    pub sequences: usize,
}

impl Shape {
    /// One token of one sequence; one token of each of a few; a slice of a prompt.
    pub const ALL: [Shape; 3] =
        [Shape { rows: 1, sequences: 1 }, Shape { rows: 16, sequences: 16 }, Shape { rows: 256, sequences: 16 }];

    /// Most rows of any batch.
    pub const MOST_ROWS: usize = Shape::ALL[2].rows;
    /// Most sequences of any batch.
    pub const MOST_SEQUENCES: usize = Shape::ALL[2].sequences;
}

/// The programs and their memory. One batch runs at a time.
pub(super) struct Runner {
    programs: Vec<(Shape, Program)>,
    /// Over a source, where the model reads one.
    encoder: Option<Program>,
    workspace: Workspace,
    batch: Batch,
}

/// Tokens to append to one sequence, its pages by key/value state, and its recurrent state.
pub(super) struct Work<'a> {
    pub tokens: &'a [i32],
    pub position: usize,
    /// Tokens of the source its sequence has read.
    pub source: usize,
    pub pages: Vec<KvPages>,
    pub state: StatePointers,
}

impl Runner {
    /// `slots` says where each recurrent slot lies in a sequence's state.
    pub fn new(prepared: &Prepared, slots: &Arc<[Range<usize>]>) -> Result<Runner> {
        let mut programs = Vec::with_capacity(Shape::ALL.len());
        for shape in Shape::ALL {
            programs.push((shape, prepared.program(shape, false, &[])?.0));
        }
        let encoder = prepared.encoder_program(prepared.context, &[])?.map(|(program, _)| program);
        let bytes = programs.iter().map(|(_, p)| p).chain(&encoder).map(Program::workspace_bytes).max().unwrap_or(0);
        Ok(Runner { programs, encoder, workspace: Workspace::new(bytes)?, batch: Batch { slots: Arc::clone(slots), ..Batch::default() } })
    }

    /// Runs one batch; false where it was stopped. Rows of logits are read with [`Runner::logits`].
    pub fn run(&mut self, work: &[Work<'_>], weights: &[Weight], pool: &Pool, stop: &AtomicBool) -> Result<bool> {
        fill(&mut self.batch, work);
        let (rows, sequences) = (self.batch.tokens.len(), work.len());
        let (_, program) = pick(&self.programs, rows, sequences);
        program.run(pool, &mut self.workspace, &self.batch, weights, stop)
    }

    /// Reads a source; false where it was stopped.
    pub fn encode(&mut self, work: &Work<'_>, weights: &[Weight], pool: &Pool, stop: &AtomicBool) -> Result<bool> {
        let Some(encoder) = &self.encoder else { crate::bail!(Internal, "a source for a model without encoder") };
        fill(&mut self.batch, std::slice::from_ref(work));
        encoder.run(pool, &mut self.workspace, &self.batch, weights, stop)
    }

    /// Copies the logits of the last batch's sequence `index`.
    pub fn logits(&mut self, index: usize, out: &mut [f32]) {
        let (_, program) = pick(&self.programs, self.batch.tokens.len(), self.batch.segments.len());
        program.copy_output_row(&mut self.workspace, &self.batch, index, out);
    }
}

fn pick(programs: &[(Shape, Program)], rows: usize, sequences: usize) -> &(Shape, Program) {
    programs.iter().find(|(s, _)| rows <= s.rows && sequences <= s.sequences).expect("callers slice batches by the largest shape")
}

/// Writes the metadata of a batch.
pub(super) fn fill(batch: &mut Batch, work: &[Work<'_>]) {
    batch.tokens.clear();
    batch.positions.clear();
    batch.segments.clear();
    batch.kv.clear();
    batch.states.clear();
    batch.sources.clear();
    for w in work {
        let start = batch.tokens.len();
        batch.tokens.extend_from_slice(w.tokens);
        batch.positions.extend((w.position..w.position + w.tokens.len()).map(|p| p as u32));
        batch.segments.push(Segment { rows: start..batch.tokens.len(), position: w.position });
        batch.kv.extend_from_slice(&w.pages);
        batch.kv_states = w.pages.len();
        batch.states.push(w.state);
        batch.sources.push(w.source);
    }
}
