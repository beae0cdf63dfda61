//! Programs on a device: the workspace there, and runs that queue one operation after the other.
//!
//! A run of many rows looks at its pause after each few operations and never has more than a few of them queued ahead, so that it leaves off soon
//! when it shall; it then goes on at the operation that is next. What it leaves of the last rows is a token for each sequence, the one with the
//! highest logit: the rows themselves stay on the device, behind the sequences' recurrent states.
//!
//! A step of one token for each of a few sequences is a graph, captured for a number of sequences and a longest position that are rounded up: kernels
//! read what there is from the batch. It begins with a copy of what is new in the batch, and its last kernel leaves the tokens in the host's memory. So
//! such a step is one launch, or where the processor computes amid it ([`Aside`](crate::ops::Aside)), one before each of its turns and one behind the last.
#![allow(unsafe_code)] // pinned copies

use super::ahead::Sent;
use super::found::{Found, Keep};
use super::program::Program;
use super::segments::{crossing, most_carried, most_sent};
use crate::backend::cpu::pause::Control;
use crate::backend::cuda::launch::{Launch, bytes_of};
use crate::backend::cuda::{Block, Event, Graph, Pinned, Queue, Stream};
use crate::ensure;
use crate::error::{Result, reserve, vec_filled};
use crate::ops::{BATCH, Batch, BatchArgs, BatchImage, BatchPlaces, Gpu, GpuWeight, News, PAGE, Rows, Segment, Value, batch_grid};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What programs run in on a device; large enough for any program it is used with.
pub struct DeviceWorkspace {
    pub(super) stream: Arc<Stream>,
    /// What graphs are captured on. The other one is used by every thread that has to do with the model.
    recorder: Stream,
    values: Block,
    /// The batch as kernels read it.
    pub(super) batch: Block,
    scratch: Block,
    /// What is found in rows of logits.
    pub(super) found: Found,
    /// The batch as it is written here, and what of it is new.
    pub(super) image: BatchImage,
    pub(super) places: BatchPlaces,
    pub(super) host: Pinned,
    pub(super) news: Pinned,
    list: Block,
    /// What the processor computed for a run that begins or goes on.
    carried: Pinned,
    /// What it is to compute with.
    handed: Pinned,
    /// Whether that is there, and the processor's turn.
    waits: bool,
    /// The operation to go on with; 0 for none under way.
    pub(super) place: usize,
    /// Ends of the last operations that were queued.
    ends: Vec<Event>,
    /// Captured steps, with the operation to go on with.
    graphs: Vec<(Step, Graph, usize)>,
    /// As many graphs as [`MOST_GRAPHS`] steps have.
    most_graphs: usize,
    /// Whether steps are captured.
    pub(super) captures: bool,
    /// Steps that nobody has waited for yet.
    pub(super) sent: Sent,
    /// Spent waiting for the device.
    pub(super) waited: Duration,
}

/// Where a run stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Everything is computed.
    Done,
    /// It left off, and can be continued.
    Suspended,
    /// The processor's turn, at its program of this index: it takes what [`DeviceWorkspace::hand_out`] gives, and the run is
    /// continued after [`DeviceWorkspace::take_back`].
    Aside(usize),
}

/// What a graph is captured for.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Step {
    /// Address of the program, which stays where it is as long as its runner.
    program: usize,
    /// The operation it begins with.
    start: usize,
    sequences: usize,
    positions: usize,
    sources: usize,
    keep: Option<Keep>,
    /// Whether the device makes the batch itself, of that of the step before and the tokens found in it.
    fed: bool,
}

/// Steps whose graphs are kept; with more of them, all begin anew.
const MOST_GRAPHS: usize = 64;
/// Least positions that a graph is captured for.
const FEWEST_POSITIONS: usize = 512;

/// Operations queued ahead while a run may have to leave off.
const AHEAD: usize = 4;

impl DeviceWorkspace {
    /// For the largest of `programs` and batches with `kv_states` key/value states, whose sequences have at most `context` positions.
    pub fn new(stream: &Arc<Stream>, programs: &[&Program], kv_states: usize, context: usize) -> Result<DeviceWorkspace> {
        let device = stream.device();
        let most = |size: &dyn Fn(&Program) -> usize| programs.iter().map(|p| size(p)).max().unwrap_or(0);
        let (rows, sequences) = (most(&|p| p.layout().max_rows), most(&|p| p.layout().max_sequences));
        let places = BatchPlaces::new(rows, sequences, kv_states, most_pages(context));
        let batch = Block::new(device, places.bytes(), "a batch for the device")?;
        Ok(DeviceWorkspace {
            stream: Arc::clone(stream),
            recorder: stream.another()?,
            values: Block::new(device, most(&Program::workspace_bytes), "workspace")?,
            scratch: Block::new(
                device,
                most(&|p| p.gpu_scratch_bytes(rounded(context), device.info().processors)),
                "scratch of operations",
            )?,
            found: Found::new(device, sequences)?,
            image: BatchImage::new(places, batch.address())?,
            places,
            host: Pinned::new(device, places.bytes(), "a batch for the device")?,
            news: Pinned::new(device, BatchPlaces::NEWS_BYTES, "a batch for the device")?,
            list: Block::new(device, BatchPlaces::NEWS_BYTES, "a batch for the device")?,
            carried: Pinned::new(device, most(&most_carried), "rows for the device")?,
            handed: Pinned::new(device, most(&most_sent), "rows from the device")?,
            waits: false,
            batch,
            place: 0,
            ends: (0..AHEAD).map(|_| Event::new(device, false)).collect::<Result<_>>()?,
            graphs: Vec::new(),
            most_graphs: MOST_GRAPHS * (1 + most(&|p| p.asides().count())),
            captures: true,
            sent: Sent::new(device)?,
            waited: Duration::ZERO,
        })
    }

    /// Bytes of the device that a workspace for these programs takes.
    pub fn bytes(programs: &[&Program], kv_states: usize, context: usize, processors: usize) -> usize {
        let most = |size: &dyn Fn(&Program) -> usize| programs.iter().map(|p| size(p)).max().unwrap_or(0);
        let (rows, sequences) = (most(&|p| p.layout().max_rows), most(&|p| p.layout().max_sequences));
        let batch = BatchPlaces::new(rows, sequences, kv_states, most_pages(context)).bytes();
        let scratch = most(&|p| p.gpu_scratch_bytes(rounded(context), processors));
        [most(&Program::workspace_bytes), batch, BatchPlaces::NEWS_BYTES, scratch, Found::bytes(sequences)]
            .into_iter()
            .fold(0, usize::saturating_add)
    }

    /// Time that runs spent waiting for the device, all together.
    pub fn waited(&self) -> Duration {
        self.waited
    }

    /// Queues every step anew: for programs with operations that copy from memory of the host, which a graph would read again later.
    pub fn without_graphs(self) -> DeviceWorkspace {
        DeviceWorkspace { captures: false, ..self }
    }

    /// Forgets a run that is under way.
    pub fn restart(&mut self) {
        (self.place, self.waits) = (0, false);
    }

    /// Takes rows of what the processor computed, for a run of `program` that begins: `read` writes those of a value.
    pub fn carry(&mut self, program: &Program, mut read: impl FnMut(Value, &mut [u8])) {
        for (value, range) in crossing(program, program.inputs()) {
            read(value, &mut self.carried.as_mut_slice()[range]);
        }
    }

    /// Gives rows of what the processor's turn begins with: `write` takes those of a value.
    pub fn hand_out(&self, program: &Program, mut write: impl FnMut(Value, &[u8])) {
        let inputs = program.aside(self.place).map_or(&[][..], |aside| &aside.inputs);
        crossing(program, inputs).for_each(|(value, range)| write(value, &self.handed.as_slice()[range]));
    }

    /// Takes rows of what the processor's turn made, which then is over: `read` writes those of a value.
    pub fn take_back(&mut self, program: &Program, mut read: impl FnMut(Value, &mut [u8])) {
        let outputs = program.aside(self.place).map_or(&[][..], |aside| &aside.outputs);
        crossing(program, outputs).for_each(|(value, range)| read(value, &mut self.carried.as_mut_slice()[range]));
        (self.place, self.waits) = (self.place + 1, false);
    }

    /// Runs a program from where it left off; all that was queued is done when it returns. With `keep` its output rows are rows of logits,
    /// which are kept.
    pub fn run(
        &mut self,
        program: &Program,
        batch: &Batch,
        weights: &[GpuWeight],
        keep: Option<Keep>,
        control: Control<'_>,
    ) -> Result<Stop> {
        if let (true, Some(aside)) = (self.waits, program.aside(self.place)) {
            return Ok(Stop::Aside(aside.index));
        }
        let ran = self.queue(program, batch, weights, keep, control);
        let ran = ran.and_then(|place| self.copy_handed(program, place, batch).map(|()| place));
        // Whatever was queued uses memory that its owners may now free.
        let begun = Instant::now();
        let ended = self.stream.synchronize();
        self.waited += begun.elapsed();
        let place = ran.and_then(|place| ended.map(|()| place)).inspect_err(|_| {
            self.image.forget();
            self.restart();
        })?;
        self.found.look(0);
        if let Some(aside) = program.aside(place) {
            (self.place, self.waits) = (place, true);
            return Ok(Stop::Aside(aside.index));
        }
        let is_done = place >= program.ops().count();
        self.place = if is_done { 0 } else { place };
        Ok(if is_done { Stop::Done } else { Stop::Suspended })
    }

    /// Queues operations. The one to go on with.
    pub(super) fn queue(
        &mut self,
        program: &Program,
        batch: &Batch,
        weights: &[GpuWeight],
        keep: Option<Keep>,
        control: Control<'_>,
    ) -> Result<usize> {
        ensure!(self.values.len() >= program.workspace_bytes(), Internal, "the workspace is sized by the largest program");
        // Nobody should have left any.
        self.settle(None)?;
        // `run` waits for the stream before this memory is written again.
        let news = self.image.write(batch, self.host.as_mut_slice(), self.news.as_mut_slice())?;
        if let News::Copy(range) = &news {
            // SAFETY: as above.
            unsafe { self.stream.write_pinned(self.batch.address() + range.start as u64, &self.host, range.clone()) }?;
        }
        let goes_on = self.place.checked_sub(1).and_then(|before| program.aside(before));
        if let Some(aside) = goes_on {
            self.copy_carried(&self.stream, program, &aside.outputs, batch.tokens.len(), batch.segments.len())?;
        }
        let captures = self.captures && !self.stream.times_kernels() && (self.place == 0 || goes_on.is_some() && news == News::None);
        if let (true, Some(step)) = (captures, Step::of(program, self.place, batch, keep)) {
            if news.list_bytes() > BatchPlaces::FEW_NEWS_BYTES {
                self.copy_news(&self.stream, BatchPlaces::FEW_NEWS_BYTES..news.list_bytes())?;
            }
            return self.step(program, batch, weights, step);
        }
        if news != News::None {
            self.copy_news(&self.stream, 0..news.list_bytes())?;
        }
        self.launches(program, batch, weights, news != News::None, keep, control)
    }

    /// Queues the copies of what the processor computed, for so many rows and segments.
    fn copy_carried(&self, stream: &Stream, program: &Program, values: &[Value], rows: usize, segments: usize) -> Result<()> {
        for (value, range) in crossing(program, values) {
            let (at, len) = self.place_of(program, value, rows, segments);
            // SAFETY: as in `queue`.
            unsafe { stream.write_pinned(at, &self.carried, range.start..range.start + len) }?;
        }
        Ok(())
    }

    /// Queues the copies of what the processor is to compute with, where it is its turn at `place`.
    fn copy_handed(&mut self, program: &Program, place: usize, batch: &Batch) -> Result<()> {
        let inputs = program.aside(place).map_or(&[][..], |aside| &aside.inputs);
        for (value, range) in crossing(program, inputs) {
            let (at, len) = self.place_of(program, value, batch.tokens.len(), batch.segments.len());
            // SAFETY: `run` waits for the stream before anybody looks.
            unsafe { self.stream.read_pinned(at, &mut self.handed, range.start..range.start + len) }?;
        }
        Ok(())
    }

    /// Where the rows of a value lie, and their bytes.
    fn place_of(&self, program: &Program, value: Value, rows: usize, segments: usize) -> (u64, usize) {
        let slot = program.layout().slots[value.0 as usize];
        (self.values.address() + slot.offset as u64, 4 * slot.stride * if slot.rows == Rows::All { rows } else { segments })
    }

    /// Queues the copy of a part of the list of what is new.
    fn copy_news(&self, stream: &Stream, range: Range<usize>) -> Result<()> {
        // SAFETY: as in `queue`.
        unsafe { stream.write_pinned(self.list.address() + range.start as u64, &self.news, range) }
    }

    /// Queues what takes up what is new in the batch. The kernels after it may read the batch before those before them have ended.
    fn take_up(&self, queue: &Queue<'_>) -> Result<()> {
        let args = BatchArgs { news: self.list.address(), to: self.batch.address() };
        queue.launch(BATCH, batch_grid(), bytes_of(&args))?;
        queue.settle();
        Ok(())
    }

    /// Queues operations one by one, and what is kept of the last one's rows. Which one is next.
    fn launches(
        &self,
        program: &Program,
        batch: &Batch,
        weights: &[GpuWeight],
        new: bool,
        keep: Option<Keep>,
        control: Control<'_>,
    ) -> Result<usize> {
        let queue = self.stream.queue()?;
        if self.place == 0 {
            self.copy_carried(&self.stream, program, program.inputs(), batch.tokens.len(), batch.segments.len())?;
        }
        if new {
            self.take_up(&queue)?;
        }
        let gpu = self.gpu(program, batch, weights, &queue);
        // A step of few rows is over soon, and nothing may come between its kernels.
        let watched = batch.tokens.len() > FEW_ROWS || control.has_deadline();
        let mut queued = 0;
        let mut failed = Ok(());
        let place = program.launch(&gpu, self.place, || {
            if !watched {
                return false;
            }
            let end = &self.ends[queued % AHEAD];
            // The operation that took this place before is done first.
            failed = if queued >= AHEAD { end.wait() } else { Ok(()) }.and_then(|()| end.record(&self.stream));
            queued += 1;
            failed.is_err() || control.due()
        })?;
        failed?;
        match keep {
            Some(keep) if place == program.ops().count() => self.keep(program, &gpu, keep)?,
            _ => {}
        }
        Ok(place)
    }

    fn gpu<'a>(&'a self, program: &'a Program, batch: &'a Batch, weights: &'a [GpuWeight], queue: &'a Queue<'a>) -> Gpu<'a> {
        Gpu {
            base: self.values.address(),
            slots: &program.layout().slots,
            rows: batch.tokens.len(),
            segments: batch.segments.len(),
            batch_at: self.batch.address(),
            batch,
            weights,
            rounds: program.rounds(),
            fixed_order: program.fixed_order(),
            stream: queue,
            scratch: (self.scratch.address(), self.scratch.len()),
        }
    }

    /// Queues a step, or what of it comes before the processor's turn, as a graph. The operation to go on with.
    pub(super) fn step(&mut self, program: &Program, batch: &Batch, weights: &[GpuWeight], step: Step) -> Result<usize> {
        if !self.graphs.iter().any(|(known, _, _)| *known == step) {
            if self.graphs.len() >= self.most_graphs {
                self.stream.synchronize()?;
                self.graphs.clear();
            }
            reserve(&mut self.graphs, 1, "the list of graphs")?;
            let widest = step.widest(&batch.slots, batch.kv_states);
            let mut place = 0;
            let graph = self.recorder.capture(&self.stream, |queue| {
                if step.fed {
                    self.advance(queue)?;
                } else if step.start == 0 {
                    self.copy_news(&self.recorder, 0..BatchPlaces::FEW_NEWS_BYTES)?;
                    self.copy_carried(&self.recorder, program, program.inputs(), step.sequences, step.sequences)?;
                    self.take_up(queue)?;
                }
                let gpu = self.gpu(program, &widest, weights, queue);
                place = program.launch(&gpu, step.start, || false)?;
                match step.keep {
                    Some(keep) if place == program.ops().count() => self.keep(program, &gpu, keep),
                    _ => Ok(()),
                }
            })?;
            self.graphs.push((step, graph, place));
        }
        let found = self.graphs.iter_mut().find(|(known, _, _)| *known == step);
        let (_, graph, place) = found.expect("captured just above");
        graph.launch(&self.stream)?;
        Ok(*place)
    }

    /// Queues what is kept of rows of logits.
    fn keep(&self, program: &Program, gpu: &Gpu<'_>, keep: Keep) -> Result<()> {
        self.found.launch(gpu, program.output(), self.batch.address() + self.places.ahead()[1], keep)
    }

    /// What was found in the rows of the last run that was waited for.
    pub fn found(&self) -> &Found {
        &self.found
    }

    /// Rows of a value after a run; `[rows, width]`. For values that were kept.
    pub fn read(&self, program: &Program, batch: &Batch, value: Value, out: &mut Vec<f32>) -> Result<()> {
        let slot = program.layout().slots[value.0 as usize];
        let rows = if slot.rows == Rows::All { batch.tokens.len() } else { batch.segments.len() };
        out.clear();
        reserve(out, rows * slot.width, "a copy of a value")?;
        let mut bytes = vec_filled(4 * rows.saturating_sub(1) * slot.stride + 4 * slot.width, 0u8, "a copy of a value")?;
        self.stream.read(self.values.address() + slot.offset as u64, &mut bytes)?;
        for row in 0..rows {
            let row = &bytes[4 * row * slot.stride..][..4 * slot.width];
            out.extend(row.as_chunks().0.iter().map(|b| f32::from_ne_bytes(*b)));
        }
        Ok(())
    }

    /// Sets every byte of the workspace: for tests, since values that nobody writes must not matter.
    pub fn poison(&self) -> Result<()> {
        let bytes = vec_filled(self.values.len(), 0xffu8, "poison")?;
        self.stream.write(self.values.address(), &bytes)
    }
}

/// Positions that a graph is captured for, for so many.
fn rounded(positions: usize) -> usize {
    positions.max(FEWEST_POSITIONS).checked_next_power_of_two().unwrap_or(positions)
}

impl Step {
    /// The graph for a batch, from operation `start` on, if that is one token for each of a few sequences.
    pub(super) fn of(program: &Program, start: usize, batch: &Batch, keep: Option<Keep>) -> Option<Step> {
        let sequences = batch.segments.len();
        if sequences != batch.tokens.len() || sequences > FEW_ROWS {
            return None;
        }
        let layout = program.layout();
        let most = |values: &mut dyn Iterator<Item = usize>| rounded(values.max().unwrap_or(0));
        Some(Step {
            program: std::ptr::from_ref(program).addr(),
            start,
            sequences: sequences.next_power_of_two().min(layout.max_sequences).min(layout.max_rows),
            positions: most(&mut batch.segments.iter().map(|s| s.position + 1)),
            sources: if batch.sources.iter().all(|n| *n == 0) { 0 } else { most(&mut batch.sources.iter().copied()) },
            keep,
            fed: false,
        })
    }

    /// The same, with a batch that the device makes itself.
    pub(super) fn fed(self) -> Step {
        Step { fed: true, ..self }
    }

    /// The widest batch that the graph is for.
    fn widest(&self, slots: &Arc<[Range<usize>]>, kv_states: usize) -> Batch {
        let mut batch = Batch { kv_states, slots: Arc::clone(slots), ..Batch::default() };
        for index in 0..self.sequences {
            batch.tokens.push(0);
            batch.positions.push((self.positions - 1) as u32);
            batch.segments.push(Segment { rows: index..index + 1, position: self.positions - 1 });
            batch.sources.push(self.sources);
        }
        batch
    }
}

/// Rows of a step that is not watched.
const FEW_ROWS: usize = 64;

/// Pages of the longest list.
fn most_pages(context: usize) -> usize {
    context.div_ceil(PAGE) + 1
}
