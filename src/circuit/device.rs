//! Programs on a device: the workspace there, and runs that queue one operation after the other.
//!
//! A run of many rows looks at its pause after each few operations and never has more than a few of them queued ahead, so that it leaves off soon
//! when it shall; it then goes on at the operation that is next. What it leaves of the last rows is a token for each sequence, the one with the
//! highest logit: the rows themselves stay on the device, behind the sequences' recurrent states.
#![allow(unsafe_code)] // argument structs, pinned copies

use super::program::{Outcome, Program};
use crate::backend::cpu::pause::Control;
use crate::backend::cuda::launch::{Args, Grid, Kernel, Launch};
use crate::backend::cuda::{Block, Event, Pinned, Stream};
use crate::ensure;
use crate::error::{Result, reserve, vec_filled};
use crate::ops::{Batch, BatchPlaces, Gpu, GpuWeight, PAGE, Place, Rows, Segment, Value, Weight, upload};
use std::ops::Range;
use std::sync::Arc;

/// What programs run in on a device; large enough for any program it is used with.
pub struct DeviceWorkspace {
    stream: Arc<Stream>,
    values: Block,
    /// The batch as kernels read it.
    batch: Block,
    scratch: Block,
    /// Highest logits: by sequence and chunk, then by sequence.
    best: Block,
    found: Pinned,
    places: BatchPlaces,
    image: Vec<u8>,
    sequences: usize,
    /// The operation to go on with; 0 for none under way.
    place: usize,
    /// Ends of the last operations that were queued.
    ends: Vec<Event>,
}

/// Chunks that a row of logits is cut into.
const CHUNKS: usize = 16;
/// Operations queued ahead while a run may have to leave off.
const AHEAD: usize = 4;

const LOGITS: Kernel = Kernel { file: "logits", name: "logits" };
const LOGITS_BEST: Kernel = Kernel { file: "logits", name: "logits_best" };

#[derive(Clone, Copy)]
#[repr(C)]
struct LogitsArgs {
    x: crate::ops::View,
    batch: u64,
    parts: u64,
    best: u64,
    slots: u32,
    chunks: u32,
}

// SAFETY: the struct of kernels/logits.cu.
unsafe impl Args for LogitsArgs {}

/// Bytes of a `Best`.
const BEST: usize = 16;

impl DeviceWorkspace {
    /// For the largest of `programs` and batches with `kv_states` key/value states, whose sequences have at most `context` positions.
    pub fn new(stream: &Arc<Stream>, programs: &[&Program], kv_states: usize, context: usize) -> Result<DeviceWorkspace> {
        let device = stream.device();
        let most = |size: &dyn Fn(&Program) -> usize| programs.iter().map(|p| size(p)).max().unwrap_or(0);
        let (rows, sequences) = (most(&|p| p.layout().max_rows), most(&|p| p.layout().max_sequences));
        let places = BatchPlaces::new(rows, sequences, kv_states);
        Ok(DeviceWorkspace {
            stream: Arc::clone(stream),
            values: Block::new(device, most(&Program::workspace_bytes), "workspace")?,
            batch: Block::new(device, places.bytes(most_pages(sequences, kv_states, context)), "a batch for the device")?,
            scratch: Block::new(device, most(&|p| p.gpu_scratch_bytes(context, device.info().processors)), "scratch of operations")?,
            best: Block::new(device, BEST * sequences * (CHUNKS + 1), "the highest logits")?,
            found: Pinned::new(device, BEST * sequences, "the highest logits")?,
            places,
            image: Vec::new(),
            sequences,
            place: 0,
            ends: (0..AHEAD).map(|_| Event::new(device, false)).collect::<Result<_>>()?,
        })
    }

    /// Bytes of the device that a workspace for these programs takes.
    pub fn bytes(programs: &[&Program], kv_states: usize, context: usize, processors: usize) -> usize {
        let most = |size: &dyn Fn(&Program) -> usize| programs.iter().map(|p| size(p)).max().unwrap_or(0);
        let (rows, sequences) = (most(&|p| p.layout().max_rows), most(&|p| p.layout().max_sequences));
        let batch = BatchPlaces::new(rows, sequences, kv_states).bytes(most_pages(sequences, kv_states, context));
        let scratch = most(&|p| p.gpu_scratch_bytes(context, processors));
        [most(&Program::workspace_bytes), batch, scratch, BEST * sequences * (CHUNKS + 1)].into_iter().fold(0, usize::saturating_add)
    }

    /// Forgets a run that is under way.
    pub fn restart(&mut self) {
        self.place = 0;
    }

    /// Runs a program from where it left off; all that was queued is done when it returns. With `keep`, the number of floats of the recurrent
    /// slots, its output rows are rows of logits, to be kept behind the sequences' slots.
    pub fn run(
        &mut self,
        program: &Program,
        batch: &Batch,
        weights: &[GpuWeight],
        keep: Option<usize>,
        control: Control<'_>,
    ) -> Result<Outcome> {
        let ran = self.queue(program, batch, weights, keep, control);
        // Whatever was queued uses memory that its owners may now free.
        let ended = self.stream.synchronize();
        match ran.and_then(|outcome| ended.map(|()| outcome)) {
            Ok(Outcome::Suspended) => Ok(Outcome::Suspended),
            other => {
                self.place = 0;
                other
            }
        }
    }

    fn queue(
        &mut self,
        program: &Program,
        batch: &Batch,
        weights: &[GpuWeight],
        keep: Option<usize>,
        control: Control<'_>,
    ) -> Result<Outcome> {
        ensure!(self.values.len() >= program.workspace_bytes(), Internal, "the workspace is sized by the largest program");
        self.places.write(batch, self.batch.address(), &mut self.image)?;
        ensure!(self.image.len() <= self.batch.len(), Internal, "a batch of more pages than its sequences' context has");
        self.stream.write(self.batch.address(), &self.image)?;
        let queue = self.stream.queue()?;
        let gpu = Gpu {
            base: self.values.address(),
            slots: &program.layout().slots,
            rows: batch.tokens.len(),
            segments: batch.segments.len(),
            batch_at: self.batch.address(),
            batch,
            weights,
            rounds: program.rounds(),
            stream: &queue,
            scratch: (self.scratch.address(), self.scratch.len()),
        };
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
        if place < program.ops().count() {
            self.place = place;
            return Ok(Outcome::Suspended);
        }
        if let Some(slots) = keep {
            let rows = gpu.rows(program.output());
            let parts = self.best.address();
            let best = parts + (BEST * self.sequences * CHUNKS) as u64;
            let args = LogitsArgs {
                x: gpu.view(program.output()),
                batch: gpu.batch_at(),
                parts,
                best,
                slots: slots as u32,
                chunks: CHUNKS as u32,
            };
            gpu.launch(LOGITS, Grid::new([rows, CHUNKS, 1], 256).early(), &args)?;
            gpu.launch(LOGITS_BEST, Grid::new([rows, 1, 1], 32).early(), &args)?;
            // SAFETY: `run` waits before anybody looks.
            unsafe { self.stream.read_pinned(best, &mut self.found, 0..BEST * rows) }?;
        }
        Ok(Outcome::Done)
    }

    /// The token of the highest logit of a sequence's row, the lowest of several; none where the row holds what is no number, or nothing else
    /// than minus infinity.
    pub fn best(&self, sequence: usize) -> Option<i32> {
        let words = self.found.as_slice()[BEST * sequence..][..BEST].as_chunks::<4>().0;
        let [token, bad] = [words[1], words[2]].map(u32::from_ne_bytes);
        (bad == 0 && f32::from_ne_bytes(words[0]) > f32::NEG_INFINITY).then_some(token as i32)
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

/// Rows of a step that is not watched.
const FEW_ROWS: usize = 64;

fn most_pages(sequences: usize, kv_states: usize, context: usize) -> usize {
    sequences.saturating_mul(kv_states).saturating_mul(context.div_ceil(PAGE) + 1)
}

/// Goes through the launches of a program for its largest batch without a device: whether every operation has its kernels. `weights` say how
/// they are packed; their addresses do not matter.
pub fn rehearse(program: &Program, weights: &[GpuWeight], kv_states: usize, slots: &Arc<[Range<usize>]>, processors: usize) -> Result<()> {
    struct Nowhere(usize);
    impl Launch for Nowhere {
        fn launch(&self, _: Kernel, _: Grid, _: &[u8]) -> Result<()> {
            Ok(())
        }
        fn write(&self, _: u64, _: &[u8]) -> Result<()> {
            Ok(())
        }
        fn processors(&self) -> usize {
            self.0
        }
    }
    let layout = program.layout();
    let (rows, sequences) = (layout.max_rows, layout.max_sequences.min(layout.max_rows));
    let mut batch = Batch { kv_states, slots: Arc::clone(slots), ..Batch::default() };
    batch.tokens.resize(rows, 0);
    batch.positions.resize(rows, 0);
    // One long sequence and others of one token.
    for index in 0..sequences {
        let first = if index == 0 { 0 } else { rows - sequences + index };
        batch.segments.push(Segment { rows: first..rows - sequences + index + 1, position: 0 });
        batch.sources.push(0);
    }
    let gpu = Gpu {
        base: 0,
        slots: &layout.slots,
        rows,
        segments: sequences,
        batch_at: 0,
        batch: &batch,
        weights,
        rounds: program.rounds(),
        stream: &Nowhere(processors),
        scratch: (0, usize::MAX),
    };
    program.launch(&gpu, 0, || false).map(|_| ())
}

/// Weights on a device: one block for most of them, and staging to fill it.
pub struct DeviceWeights {
    stream: Arc<Stream>,
    /// As operations see them.
    pub weights: Vec<GpuWeight>,
    region: Block,
    used: usize,
    /// What did not fit the region.
    blocks: Vec<Block>,
    /// Bytes on their way, with the end of the copy that used them last.
    staging: Vec<(Pinned, Event)>,
    turn: usize,
}

/// Every weight starts on a multiple of this.
const ALIGN: usize = 256;
/// Bytes that go at once.
const STAGE: usize = 8 << 20;

impl DeviceWeights {
    /// None yet, with room for `bytes`.
    pub fn new(stream: &Arc<Stream>, bytes: usize) -> Result<DeviceWeights> {
        let device = stream.device();
        Ok(DeviceWeights {
            stream: Arc::clone(stream),
            weights: Vec::new(),
            region: Block::new(device, bytes, "packed weights")?,
            used: 0,
            blocks: Vec::new(),
            staging: Vec::new(),
            turn: 0,
        })
    }

    /// Bytes of the host's memory that a load uses on the way.
    pub const STAGING: usize = 2 * STAGE;

    /// What a weight of `len` bytes takes of the room.
    pub fn room(len: usize) -> usize {
        len.checked_next_multiple_of(ALIGN).unwrap_or(len)
    }

    /// Puts one more.
    pub fn push(&mut self, weight: &Weight) -> Result<()> {
        let put = upload(weight, self)?;
        reserve(&mut self.weights, 1, "the list of weights")?;
        self.weights.push(put);
        Ok(())
    }

    /// Waits for the copies and gives up the staging.
    pub fn finish(&mut self) -> Result<()> {
        self.stream.synchronize()?;
        self.staging.clear();
        Ok(())
    }
}

impl Place for DeviceWeights {
    fn put(&mut self, bytes: &[u8], what: &str) -> Result<u64> {
        let address = if bytes.len() <= self.region.len() - self.used {
            let address = self.region.address() + self.used as u64;
            self.used = (self.used + DeviceWeights::room(bytes.len())).min(self.region.len());
            address
        } else {
            let block = Block::new(self.stream.device(), bytes.len(), what)?;
            let address = block.address();
            self.blocks.push(block);
            address
        };
        if self.staging.is_empty() {
            for _ in 0..2 {
                let device = self.stream.device();
                self.staging.push((Pinned::new(device, STAGE, "staging of weights")?, Event::new(device, false)?));
            }
        }
        for (index, piece) in bytes.chunks(STAGE).enumerate() {
            let (pinned, end) = &mut self.staging[self.turn];
            self.turn = 1 - self.turn;
            end.wait()?;
            pinned.as_mut_slice()[..piece.len()].copy_from_slice(piece);
            // SAFETY: the bytes are not touched before `end` was waited for.
            unsafe { self.stream.write_pinned(address + (index * STAGE) as u64, pinned, 0..piece.len()) }?;
            end.record(&self.stream)?;
        }
        Ok(address)
    }
}

impl Drop for DeviceWeights {
    fn drop(&mut self) {
        // Copies may still read the staging.
        let _ = self.stream.synchronize();
    }
}
