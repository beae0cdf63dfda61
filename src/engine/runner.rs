//! Programs of a loaded model by batch shape, and the workspace they share.

use super::load::Engine;
use crate::backend::cpu::pause::Control;
use crate::cache::LayerPages;
use crate::circuit::{Outcome, Program, Progress, Workspace};
use crate::error::Result;
use crate::ops::{Batch, KvPages, Segment, StatePointers};
use std::ops::Range;
use std::sync::Arc;

/// Most rows and sequences of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub rows: usize,
    pub sequences: usize,
}

impl Shape {
    /// One token of one sequence; one token of each of a few; a slice of a prompt.
    pub const ALL: [Shape; 3] = [Shape { rows: 1, sequences: 1 }, Shape { rows: 16, sequences: 16 }, Shape { rows: 256, sequences: 16 }];

    /// Batches of bounded work: small enough that a prompt's slice is soon there to keep.
    pub const STEPS: [Shape; 3] = [Shape { rows: 1, sequences: 1 }, Shape { rows: 16, sequences: 16 }, Shape { rows: 64, sequences: 16 }];

    /// Most rows of any batch.
    pub const MOST_ROWS: usize = Shape::ALL[2].rows;
    /// Most sequences of any batch.
    pub const MOST_SEQUENCES: usize = Shape::ALL[2].sequences;
}

/// The programs and their memory. One batch runs at a time; it may leave off and go on later.
pub(super) struct Runner {
    programs: Vec<(Shape, Program)>,
    /// Over a source, where the model reads one.
    encoder: Option<Program>,
    /// To the last layer's output instead of logits.
    hidden: Option<Program>,
    workspace: Workspace,
    batch: Batch,
    progress: Progress,
}

/// Tokens to append to one sequence, its pages by key/value state, and its recurrent state.
pub(super) struct Work<'a> {
    pub tokens: &'a [i32],
    pub position: usize,
    /// Tokens of the source its sequence has read.
    pub source: usize,
    pub pages: &'a [LayerPages],
    pub state: StatePointers,
}

impl Runner {
    /// Runs these programs, smallest first. `slots` says where each recurrent slot lies in a sequence's state.
    pub fn new(programs: Vec<(Shape, Program)>, [encoder, hidden]: [Option<Program>; 2], slots: &Arc<[Range<usize>]>) -> Result<Runner> {
        let bytes = programs.iter().map(|(_, p)| p).chain(&encoder).chain(&hidden).map(Program::workspace_bytes).max().unwrap_or(0);
        let batch = Batch { slots: Arc::clone(slots), ..Batch::default() };
        Ok(Runner { programs, encoder, hidden, workspace: Workspace::new(bytes)?, batch, progress: Progress::default() })
    }

    /// Gives back what is kept between runs.
    pub fn trim(&mut self) {
        self.workspace.trim();
    }

    /// Begins a batch; one that was under way is forgotten.
    pub fn begin(&mut self) {
        self.progress.restart();
    }

    /// The batch that is run, or run on: the same each time until it is done. Its pages and states must stay what they are until then.
    pub fn set<'a>(&mut self, work: impl IntoIterator<Item = Work<'a>>) {
        fill(&mut self.batch, work);
    }

    /// Runs the batch, from its start or from where it left off. Once it is done, rows of logits are read with [`Runner::logits`].
    pub fn run(&mut self, engine: &Engine, control: Control<'_>) -> Result<Outcome> {
        let (rows, sequences) = (self.batch.tokens.len(), self.batch.segments.len());
        let program = pick(&mut self.programs, rows, sequences);
        program.run(engine.pool(), &mut self.workspace, &self.batch, engine.weights(), &mut self.progress, control)
    }

    /// As [`Runner::run`], for a source.
    pub fn encode(&mut self, engine: &Engine, control: Control<'_>) -> Result<Outcome> {
        let Some(encoder) = &mut self.encoder else { crate::bail!(Internal, "a source for a model without encoder") };
        encoder.run(engine.pool(), &mut self.workspace, &self.batch, engine.weights(), &mut self.progress, control)
    }

    /// As [`Runner::run`], to the last layer's output for every row; read with [`Runner::hidden`].
    pub fn embed(&mut self, engine: &Engine, control: Control<'_>) -> Result<Outcome> {
        let Some(hidden) = &mut self.hidden else { crate::bail!(Internal, "an embedding from a runner that makes none") };
        hidden.run(engine.pool(), &mut self.workspace, &self.batch, engine.weights(), &mut self.progress, control)
    }

    /// The rows that [`Runner::embed`] computed.
    pub fn hidden(&mut self, out: &mut Vec<f32>) -> Result<()> {
        let Some(hidden) = &self.hidden else { crate::bail!(Internal, "an embedding from a runner that makes none") };
        hidden.read(&mut self.workspace, &self.batch, hidden.output(), out)
    }

    /// The rows that [`Runner::encode`] computed.
    pub fn encoded(&mut self, out: &mut Vec<f32>) -> Result<()> {
        let Some(encoder) = &self.encoder else { crate::bail!(Internal, "a source for a model without encoder") };
        encoder.read(&mut self.workspace, &self.batch, encoder.output(), out)
    }

    /// Copies the logits of the last batch's sequence `index`.
    pub fn logits(&mut self, index: usize, out: &mut [f32]) {
        let program = pick(&mut self.programs, self.batch.tokens.len(), self.batch.segments.len());
        program.copy_output_row(&mut self.workspace, &self.batch, index, out);
    }
}

fn pick(programs: &mut [(Shape, Program)], rows: usize, sequences: usize) -> &mut Program {
    let fits = |(shape, _): &&mut (Shape, Program)| rows <= shape.rows && sequences <= shape.sequences;
    &mut programs.iter_mut().find(fits).expect("callers slice batches by the largest shape").1
}

/// Writes the metadata of a batch.
pub(super) fn fill<'a>(batch: &mut Batch, work: impl IntoIterator<Item = Work<'a>>) {
    batch.tokens.clear();
    batch.positions.clear();
    batch.segments.clear();
    batch.kv.clear();
    batch.states.clear();
    batch.sources.clear();
    // Room for the widest batch from the first one on, so that none allocates later.
    batch.tokens.reserve(Shape::MOST_ROWS);
    batch.positions.reserve(Shape::MOST_ROWS);
    batch.segments.reserve(Shape::MOST_SEQUENCES);
    batch.states.reserve(Shape::MOST_SEQUENCES);
    batch.sources.reserve(Shape::MOST_SEQUENCES);
    for w in work {
        let start = batch.tokens.len();
        if start == 0 {
            batch.kv.reserve(Shape::MOST_SEQUENCES * w.pages.len());
        }
        batch.tokens.extend_from_slice(w.tokens);
        batch.positions.extend((w.position..w.position + w.tokens.len()).map(|p| p as u32));
        batch.segments.push(Segment { rows: start..batch.tokens.len(), position: w.position });
        batch.kv.extend(w.pages.iter().map(|pages| KvPages::new(pages.pointers())));
        batch.kv_states = w.pages.len();
        batch.states.push(w.state);
        batch.sources.push(w.source);
    }
}
