//! Programs of a loaded model by batch shape, and the workspace they share.

use super::load::Engine;
use crate::backend::cpu::pause::Control;
use crate::backend::cuda::Stream;
use crate::cache::{LayerPages, SequenceState};
use crate::circuit::{DeviceWorkspace, Keep, Outcome, Program, Progress, Workspace};
use crate::error::{Result, vec_with_capacity};
use crate::ops::{Batch, KvPages, Segment, StatePointers, Value};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

/// Most rows and sequences of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub rows: usize,
    pub sequences: usize,
}

/// The batches that programs are made for, smallest first.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Shapes {
    /// Of calls that run to their end: one token of one sequence; one token of each of a few; a slice of a prompt.
    pub all: [Shape; 3],
    /// Of bounded work: small enough that a prompt's slice is soon there to keep.
    pub steps: [Shape; 3],
}

const ONE: Shape = Shape { rows: 1, sequences: 1 };

/// What suits the processor.
pub(super) static ON_HOST: Shapes = Shapes {
    all: [ONE, Shape { rows: 16, sequences: 16 }, Shape { rows: 256, sequences: 16 }],
    steps: [ONE, Shape { rows: 16, sequences: 16 }, Shape { rows: 64, sequences: 16 }],
};

/// What suits a device, which wants many rows at once.
pub(super) static ON_DEVICE: Shapes = Shapes {
    all: [ONE, Shape { rows: 64, sequences: MOST_SEQUENCES }, Shape { rows: 2048, sequences: MOST_SEQUENCES }],
    steps: [ONE, Shape { rows: 64, sequences: MOST_SEQUENCES }, Shape { rows: MOST_STEP_ROWS, sequences: MOST_SEQUENCES }],
};

/// Most sequences of a batch, anywhere.
pub(super) const MOST_SEQUENCES: usize = 64;

/// Most rows of bounded work, anywhere.
pub(super) const MOST_STEP_ROWS: usize = 512;

impl Shapes {
    /// Most rows of any batch.
    pub fn most_rows(&self) -> usize {
        self.all[2].rows
    }

    /// Most sequences of any batch.
    pub fn most_sequences(&self) -> usize {
        self.all[2].sequences
    }

    /// Most rows of bounded work.
    pub fn step_rows(&self) -> usize {
        self.steps[2].rows
    }
}

/// The programs and their memory. One batch runs at a time; it may leave off and go on later.
pub(super) struct Runner {
    programs: Vec<(Shape, Program)>,
    /// Over a source, where the model reads one.
    encoder: Option<Program>,
    /// To the last layer's output instead of logits.
    hidden: Option<Program>,
    room: Room,
    batch: Batch,
    progress: Progress,
    /// Of the batch's logits.
    keeping: Keeping,
}

/// What programs run in, where the model computes.
pub(super) enum Room {
    Host(Box<Workspace>),
    Device(Box<DeviceWorkspace>),
}

impl Room {
    /// For these programs; `stream` is that of the device. Of the batches: key/value states, and the longest sequence.
    pub fn new(programs: &[&Program], stream: Option<&Arc<Stream>>, (kv_states, context): (usize, usize)) -> Result<Room> {
        Ok(match stream {
            Some(stream) => Room::Device(Box::new(DeviceWorkspace::new(stream, programs, kv_states, context)?)),
            None => Room::Host(Box::new(Workspace::new(programs.iter().map(|p| p.workspace_bytes()).max().unwrap_or(0))?)),
        })
    }

    /// For a program of a loaded model.
    pub fn of(engine: &Engine, program: &Program) -> Result<Room> {
        let stream = engine.device.as_ref().map(|device| &device.stream);
        Room::new(&[program], stream, (engine.pools().len(), engine.info().context))
    }

    /// Runs a program, or goes on with it.
    pub fn run(
        &mut self,
        engine: &Engine,
        program: &mut Program,
        batch: &Batch,
        progress: &mut Progress,
        keep: Keeping,
        control: Control<'_>,
    ) -> Result<Outcome> {
        match self {
            Room::Host(workspace) => program.run(engine.pool(), workspace, batch, engine.weights(), progress, control),
            Room::Device(workspace) => {
                let slots = engine.states().0.layout().slot_floats();
                let keep = (keep != Keeping::Nothing).then_some(Keep { slots, candidates: keep == Keeping::Candidates });
                workspace.run(program, batch, engine.device_weights()?, keep, control)
            }
        }
    }

    /// Rows of a value that was kept.
    pub fn read(&mut self, program: &Program, batch: &Batch, value: Value, out: &mut Vec<f32>) -> Result<()> {
        match self {
            Room::Host(workspace) => program.read(workspace, batch, value, out),
            Room::Device(workspace) => workspace.read(program, batch, value, out),
        }
    }
}

/// What a device keeps of a program's rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Keeping {
    /// They are no logits.
    Nothing,
    /// The rows, behind the slots of the states, and each one's best token.
    Logits,
    /// And each one's highest logits.
    Candidates,
}

/// Tokens to append to one sequence, its pages by key/value state, and its recurrent state.
pub(super) struct Work<'a> {
    pub tokens: &'a [i32],
    pub position: usize,
    /// Tokens of the source its sequence has read.
    pub source: usize,
    pub pages: &'a [LayerPages],
    /// Names what is in `pages`; 0 for no name.
    pub stamp: u64,
    pub state: StatePointers,
}

impl Runner {
    /// Runs these programs, smallest first. `slots` says where each recurrent slot lies in a sequence's state.
    pub fn new(
        programs: Vec<(Shape, Program)>,
        [encoder, hidden]: [Option<Program>; 2],
        slots: &Arc<[Range<usize>]>,
        stream: Option<&Arc<Stream>>,
        sizes: (usize, usize),
    ) -> Result<Runner> {
        // Room for the widest batch, so that none allocates later.
        let (rows, sequences) = programs.iter().fold((0, 0), |(r, s), (shape, _)| (r.max(shape.rows), s.max(shape.sequences)));
        let what = "the widest batch";
        let batch = Batch {
            tokens: vec_with_capacity(rows, what)?,
            positions: vec_with_capacity(rows, what)?,
            segments: vec_with_capacity(sequences, what)?,
            kv: vec_with_capacity(sequences.saturating_mul(sizes.0), what)?,
            stamps: vec_with_capacity(sequences, what)?,
            states: vec_with_capacity(sequences, what)?,
            sources: vec_with_capacity(sequences, what)?,
            slots: Arc::clone(slots),
            ..Batch::default()
        };
        let all: Vec<&Program> = programs.iter().map(|(_, p)| p).chain(&encoder).chain(&hidden).collect();
        let room = Room::new(&all, stream, sizes)?;
        Ok(Runner { programs, encoder, hidden, room, batch, progress: Progress::default(), keeping: Keeping::Logits })
    }

    /// Gives back what is kept between runs.
    pub fn trim(&mut self) {
        if let Room::Host(workspace) = &mut self.room {
            workspace.trim();
        }
    }

    /// Time that runs on a device spent waiting for it; none on the processor.
    pub fn waited(&self) -> Duration {
        match &self.room {
            Room::Host(_) => Duration::ZERO,
            Room::Device(workspace) => workspace.waited(),
        }
    }

    /// Begins a batch; one that was under way is forgotten.
    pub fn begin(&mut self) {
        self.keeping = Keeping::Logits;
        self.progress.restart();
        if let Room::Device(workspace) = &mut self.room {
            workspace.restart();
        }
    }

    /// Whether somebody will draw from the batch's rows, so that a device finds their highest logits: the same each time until it is done.
    pub fn expect_draws(&mut self, draws: bool) {
        self.keeping = if draws { Keeping::Candidates } else { Keeping::Logits };
    }

    /// The batch that is run, or run on: the same each time until it is done. Its pages and states must stay what they are until then.
    pub fn set<'a>(&mut self, work: impl IntoIterator<Item = Work<'a>>) {
        fill(&mut self.batch, work);
    }

    /// Runs the batch, from its start or from where it left off. Once it is done, rows of logits are read with [`Runner::logits`].
    pub fn run(&mut self, engine: &Engine, control: Control<'_>) -> Result<Outcome> {
        let program = pick(&mut self.programs, self.batch.tokens.len(), self.batch.segments.len());
        self.room.run(engine, program, &self.batch, &mut self.progress, self.keeping, control)
    }

    /// As [`Runner::run`], for a source.
    pub fn encode(&mut self, engine: &Engine, control: Control<'_>) -> Result<Outcome> {
        let Some(encoder) = &mut self.encoder else { crate::bail!(Internal, "a source for a model without encoder") };
        self.room.run(engine, encoder, &self.batch, &mut self.progress, Keeping::Nothing, control)
    }

    /// As [`Runner::run`], to the last layer's output for every row; read with [`Runner::hidden`].
    pub fn embed(&mut self, engine: &Engine, control: Control<'_>) -> Result<Outcome> {
        let Some(hidden) = &mut self.hidden else { crate::bail!(Internal, "an embedding from a runner that makes none") };
        self.room.run(engine, hidden, &self.batch, &mut self.progress, Keeping::Nothing, control)
    }

    /// The rows that [`Runner::embed`] computed.
    pub fn hidden(&mut self, out: &mut Vec<f32>) -> Result<()> {
        let Some(hidden) = &self.hidden else { crate::bail!(Internal, "an embedding from a runner that makes none") };
        self.room.read(hidden, &self.batch, hidden.output(), out)
    }

    /// The rows that [`Runner::encode`] computed.
    pub fn encoded(&mut self, out: &mut Vec<f32>) -> Result<()> {
        let Some(encoder) = &self.encoder else { crate::bail!(Internal, "a source for a model without encoder") };
        self.room.read(encoder, &self.batch, encoder.output(), out)
    }

    /// Leaves the logits of the last batch's sequence `index` with its state.
    pub fn logits(&mut self, index: usize, state: &mut SequenceState) {
        match &mut self.room {
            // The row is there already.
            Room::Device(workspace) => {
                let best = workspace.best(index);
                state.set_next_best(best);
                if best.is_some() && self.keeping == Keeping::Candidates {
                    let (sum, candidates) = workspace.candidates(index);
                    state.set_next_candidates(sum, candidates);
                }
            }
            Room::Host(workspace) => {
                let program = pick(&mut self.programs, self.batch.tokens.len(), self.batch.segments.len());
                if let Some(row) = state.next_logits() {
                    program.copy_output_row(workspace, &self.batch, index, row);
                }
            }
        }
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
    batch.states.clear();
    batch.sources.clear();
    for w in work {
        let start = batch.tokens.len();
        batch.tokens.extend_from_slice(w.tokens);
        batch.positions.extend((w.position..w.position + w.tokens.len()).map(|p| p as u32));
        set_pages(batch, &w);
        batch.segments.push(Segment { rows: start..batch.tokens.len(), position: w.position });
        batch.states.push(w.state);
        batch.sources.push(w.source);
    }
    batch.kv.truncate(batch.segments.len() * batch.kv_states);
    batch.stamps.truncate(batch.segments.len());
}

/// Writes the page lists of the next segment, if they are not those that the last batch had in its place.
fn set_pages(batch: &mut Batch, w: &Work<'_>) {
    let index = batch.segments.len();
    if index == 0 && batch.kv_states != w.pages.len() {
        batch.kv.clear();
        batch.stamps.clear();
        batch.kv_states = w.pages.len();
    }
    match batch.stamps.get_mut(index) {
        Some(known) if w.stamp != 0 && *known == w.stamp => return,
        Some(known) => *known = w.stamp,
        None => batch.stamps.push(w.stamp),
    }
    for (kind, pages) in w.pages.iter().enumerate() {
        let pages = KvPages::new(pages.pointers());
        match batch.kv.get_mut(index * w.pages.len() + kind) {
            Some(known) => *known = pages,
            None => batch.kv.push(pages),
        }
    }
}
