//! Programs of a loaded model by batch shape, and the workspace they share.

use super::load::Engine;
use crate::backend::cpu::pause::Control;
use crate::backend::cuda::Stream;
use crate::cache::{LayerPages, SequenceState};
use crate::circuit::{DeviceWorkspace, Keep, Outcome, Program, Progress, Segments, Stop, Workspace};
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

/// What suits a model of which both run a part: many rows for the device, not too many for the processor's workspace.
pub(super) static ON_BOTH: Shapes = Shapes {
    all: [ONE, Shape { rows: 64, sequences: MOST_SEQUENCES }, Shape { rows: 512, sequences: MOST_SEQUENCES }],
    steps: [ONE, Shape { rows: 64, sequences: MOST_SEQUENCES }, Shape { rows: 128, sequences: MOST_SEQUENCES }],
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
    programs: Vec<(Shape, Segments)>,
    /// Over a source, where the model reads one.
    encoder: Option<Segments>,
    /// To the last layer's output instead of logits.
    hidden: Option<Segments>,
    room: Room,
    batch: Batch,
    reached: Reached,
    /// Of the batch's logits.
    keeping: Keeping,
}

/// How far a run is.
#[derive(Default)]
pub(super) struct Reached {
    /// In the processor's segment.
    host: Progress,
    /// Whether that is done, and the device's is under way.
    passed: bool,
    /// In what the device has stopped for.
    aside: Progress,
}

/// What programs run in: on the processor, on a device, or on both.
pub(super) struct Room {
    host: Option<Box<Workspace>>,
    device: Option<Box<DeviceWorkspace>>,
    /// Of what the device stops for, apart: what the processor began with may be looked at after a run.
    asides: Option<Box<Workspace>>,
}

impl Room {
    /// For these programs; `stream` is that of the device. Of the batches: key/value states, and the longest sequence.
    pub fn new(programs: &[&Segments], stream: Option<&Arc<Stream>>, (kv_states, context): (usize, usize)) -> Result<Room> {
        let workspace = |bytes: Option<usize>| bytes.map(|bytes| Workspace::new(bytes).map(Box::new)).transpose();
        let there: Vec<&Program> = programs.iter().filter_map(|program| program.both().1).collect();
        let host = workspace(programs.iter().filter_map(|program| program.both().0).map(Program::workspace_bytes).max())?;
        let asides = workspace(programs.iter().flat_map(|program| program.asides()).map(Program::workspace_bytes).max())?;
        let device = match stream.filter(|_| !there.is_empty()) {
            Some(stream) => Some(Box::new(DeviceWorkspace::new(stream, &there, kv_states, context)?)),
            None => None,
        };
        Ok(Room { host, device, asides })
    }

    /// For a program of a loaded model.
    pub fn of(engine: &Engine, program: &Segments) -> Result<Room> {
        let stream = engine.device.as_ref().map(|device| &device.stream);
        Room::new(&[program], stream, (engine.pools().len(), engine.info().context))
    }

    /// Runs a program, or goes on with it.
    pub fn run(
        &mut self,
        engine: &Engine,
        program: &mut Segments,
        batch: &Batch,
        reached: &mut Reached,
        keeping: Keeping,
        control: Control<'_>,
    ) -> Result<Outcome> {
        let (here, there, asides) = program.all_mut();
        if let (Some(here), Some(workspace), false) = (here, &mut self.host, reached.passed) {
            let outcome = here.run(engine.pool(), workspace, batch, engine.weights(), &mut reached.host, control)?;
            let (Some(there), Some(device), Outcome::Done) = (there, &mut self.device, outcome) else { return Ok(outcome) };
            device.carry(there, |value, out| here.read_bytes(workspace, batch, value, out));
            reached.passed = true;
            // What the device does next takes a while again.
            if control.due() {
                return Ok(Outcome::Suspended);
            }
        }
        let (Some(there), Some(device)) = (there, &mut self.device) else {
            crate::bail!(Internal, "a program without a room to run in");
        };
        let slots = engine.states().0.layout().slot_floats(true);
        let keep = (keeping != Keeping::Nothing).then_some(Keep { slots, candidates: keeping == Keeping::Candidates });
        loop {
            let stop = device.run(there, batch, engine.device_weights()?, keep, control).inspect_err(|_| reached.passed = false)?;
            let (aside, workspace) = match (stop, &mut self.asides) {
                (Stop::Suspended, _) => return Ok(Outcome::Suspended),
                (Stop::Done, _) => {
                    reached.passed = false;
                    return Ok(Outcome::Done);
                }
                (Stop::Aside(index), Some(workspace)) => (&mut asides[index], workspace),
                (Stop::Aside(_), None) => crate::bail!(Internal, "a program without a room to run in"),
            };
            if !reached.aside.has_begun() {
                device.hand_out(there, |value, bytes| aside.write_bytes(workspace, batch, value, bytes));
            }
            let ran = aside.run(engine.pool(), workspace, batch, engine.weights(), &mut reached.aside, control);
            let ran = ran.inspect_err(|_| {
                device.restart();
                reached.passed = false;
            });
            if ran? == Outcome::Suspended {
                return Ok(Outcome::Suspended);
            }
            device.take_back(there, |value, out| aside.read_bytes(workspace, batch, value, out));
            if control.due() {
                return Ok(Outcome::Suspended);
            }
        }
    }

    /// What a step is sent with where a device runs all of a program: the device's, the room there, what is kept. No candidates are.
    fn all_there<'a>(&'a mut self, engine: &Engine, program: &'a Segments) -> Option<(&'a Program, &'a mut DeviceWorkspace, Keep)> {
        let slots = engine.states().0.layout().slot_floats(true);
        match (program.both(), &mut self.device) {
            ((None, Some(there)), Some(device)) => Some((there, device, Keep { slots, candidates: false })),
            _ => None,
        }
    }

    /// Runs the definitions of a program that the processor runs alone, where it is one.
    pub fn run_scalar(&mut self, engine: &Engine, program: &Segments, batch: &Batch) -> Result<bool> {
        match (program.both(), &mut self.host) {
            ((Some(program), None), Some(workspace)) => program.run_scalar(workspace, batch, engine.weights()).map(|()| true),
            _ => Ok(false),
        }
    }

    /// Rows of a value that was kept.
    pub fn read(&mut self, program: &Segments, batch: &Batch, value: Value, out: &mut Vec<f32>) -> Result<()> {
        match (program.both(), &mut self.host, &self.device) {
            ((Some(program), _), Some(workspace), _) if program.has(value) => program.read(workspace, batch, value, out),
            ((_, Some(program)), _, Some(workspace)) => workspace.read(program, batch, value, out),
            _ => crate::bail!(Internal, "a value that no part of the program makes"),
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
        programs: Vec<(Shape, Segments)>,
        [encoder, hidden]: [Option<Segments>; 2],
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
        let all: Vec<&Segments> = programs.iter().map(|(_, p)| p).chain(&encoder).chain(&hidden).collect();
        let room = Room::new(&all, stream, sizes)?;
        Ok(Runner { programs, encoder, hidden, room, batch, reached: Reached::default(), keeping: Keeping::Logits })
    }

    /// Gives back what is kept between runs.
    pub fn trim(&mut self) {
        for workspace in self.room.host.iter_mut().chain(&mut self.room.asides) {
            workspace.trim();
        }
    }

    /// Time that runs on a device spent waiting for it; none on the processor.
    pub fn waited(&self) -> Duration {
        self.room.device.as_ref().map_or(Duration::ZERO, |workspace| workspace.waited())
    }

    /// Begins a batch; one that was under way is forgotten.
    pub fn begin(&mut self) {
        self.keeping = Keeping::Logits;
        self.reached = Reached::default();
        if let Some(workspace) = &mut self.room.device {
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
        self.room.run(engine, program, &self.batch, &mut self.reached, self.keeping, control)
    }

    /// Whether the batch is one that [`Runner::send`] takes.
    pub fn sends(&mut self, engine: &Engine) -> bool {
        let program = pick(&mut self.programs, self.batch.tokens.len(), self.batch.segments.len());
        let all = self.room.all_there(engine, program);
        self.keeping == Keeping::Logits && all.is_some_and(|(there, device, keep)| device.sends(there, &self.batch, keep))
    }

    /// As [`Runner::run`], but a device may still be at it. With `next` it is the batch behind the one that is under way, which the device makes itself: each
    /// sequence's next position, with the token that is found for it. At most two are under way; [`Runner::settle`] ends it.
    pub fn send(&mut self, engine: &Engine, next: bool) -> Result<()> {
        let program = pick(&mut self.programs, self.batch.tokens.len(), self.batch.segments.len());
        let Some((there, device, keep)) = self.room.all_there(engine, program) else { crate::bail!(Internal, "a step for no device") };
        let weights = engine.device_weights()?;
        if !next {
            return device.send(there, &self.batch, weights, keep);
        }
        self.batch.advance();
        device.send_next(there, &self.batch, weights, keep)
    }

    /// Waits for the older batch under way, whose logits are there then.
    pub fn wait(&mut self) -> Result<()> {
        self.room.device.as_mut().map_or(Ok(()), |device| device.wait())
    }

    /// Ends what [`Runner::send`] began. `tokens` are those of the last batch, if all were waited for and wanted; else one that is still under way is
    /// waited for, and counts for nothing.
    pub fn settle(&mut self, tokens: Option<&[i32]>) -> Result<()> {
        let last = tokens.map(|tokens| {
            self.batch.tokens.copy_from_slice(tokens);
            &self.batch
        });
        self.room.device.as_mut().map_or(Ok(()), |device| device.settle(last))
    }

    /// As [`Runner::run`], for a source.
    pub fn encode(&mut self, engine: &Engine, control: Control<'_>) -> Result<Outcome> {
        let Some(encoder) = &mut self.encoder else { crate::bail!(Internal, "a source for a model without encoder") };
        self.room.run(engine, encoder, &self.batch, &mut self.reached, Keeping::Nothing, control)
    }

    /// As [`Runner::run`], to the last layer's output for every row; read with [`Runner::hidden`].
    pub fn embed(&mut self, engine: &Engine, control: Control<'_>) -> Result<Outcome> {
        let Some(hidden) = &mut self.hidden else { crate::bail!(Internal, "an embedding from a runner that makes none") };
        self.room.run(engine, hidden, &self.batch, &mut self.reached, Keeping::Nothing, control)
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
        let program = pick(&mut self.programs, self.batch.tokens.len(), self.batch.segments.len());
        match (program.both(), &mut self.room) {
            // The row is there already.
            ((_, Some(_)), Room { device: Some(workspace), .. }) => {
                let best = workspace.found().best(index);
                state.set_next_best(best);
                if best.is_some() && self.keeping == Keeping::Candidates {
                    let (sum, candidates) = workspace.found().candidates(index);
                    state.set_next_candidates(sum, candidates);
                }
            }
            ((Some(program), _), Room { host: Some(workspace), .. }) => {
                if let Some(row) = state.next_logits() {
                    program.copy_output_row(workspace, &self.batch, index, row);
                }
            }
            _ => {}
        }
    }
}

fn pick(programs: &mut [(Shape, Segments)], rows: usize, sequences: usize) -> &mut Segments {
    let fits = |(shape, _): &&mut (Shape, Segments)| rows <= shape.rows && sequences <= shape.sequences;
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
