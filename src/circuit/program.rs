//! Programs: a circuit with places, run in order by everybody who takes part.
//!
//! The whole program is one run of the pool. Participants meet only where an operation depends on work that others may still be
//! doing; what falls to the leader alone (rows too few to share) runs through without. Between two meetings lies a section. A
//! helper joins by walking from the beginning of the section that is under way: the counter that deals out an operation's pieces
//! says which are left. So the leader needs nobody, and the bits do not depend on who came when.
//!
//! A run can leave off between any two pieces of an operation and be continued, since the counters stay; [`Progress`] says where
//! the section began and where in it the leader was.

use super::layout::Layout;
use super::tape::Circuit;
use crate::backend::cpu::arena::Buffer;
use crate::backend::cpu::pause::{Control, Pause};
use crate::backend::cpu::pool::{Pool, Worker};
use crate::backend::cpu::simd::{self, Table};
use crate::error::Result;
use crate::ops::{Aside, Batch, Failure, Frame, Gpu, Op, Port, Rows, Shelf, Turn, Value, Weight};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicUsize, Ordering};

/// An operation and the earlier ones it must not overtake.
#[derive(Debug)]
struct Instruction {
    op: Box<dyn Op>,
    /// Indices of instructions it conflicts with (read after write, write after read, write after write), latest first.
    after: Vec<usize>,
    counter: AtomicUsize,
}

/// A straight line of operations over one workspace.
#[derive(Debug)]
pub struct Program {
    instructions: Vec<Instruction>,
    layout: Layout,
    inputs: Vec<Value>,
    output: Value,
    /// As the circuit's.
    rounds: bool,
    /// As the circuit's.
    fixed_order: bool,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Everything is computed.
    Done,
    /// It left off, and can be continued.
    Suspended,
}

/// How far a run is. The counters of the operations belong to the program, so one run of a program is under way at a time.
#[derive(Default, Debug)]
pub struct Progress {
    begun: bool,
    /// First instruction of the section: earlier ones are done.
    open: usize,
    /// The leader's next instruction. Earlier ones have no pieces left to take.
    place: usize,
}

impl Progress {
    /// Whether a run is under way.
    pub fn has_begun(&self) -> bool {
        self.begun
    }

    /// Back to the first instruction.
    pub fn restart(&mut self) {
        *self = Progress::default();
    }
}

/// The memory programs run in; large enough for any program it is used with.
pub struct Workspace {
    memory: Buffer,
    /// Buffers of those who take part, kept here between runs.
    shelf: Shelf,
}

impl Workspace {
    /// `bytes` of zeroed memory, all of it there, so that no step waits for it.
    pub fn new(bytes: usize) -> Result<Workspace> {
        let mut memory = Buffer::new(bytes.max(64), "workspace")?;
        memory.touch();
        Ok(Workspace { memory, shelf: Shelf::default() })
    }

    /// Gives back the buffers that are kept between runs.
    pub fn trim(&mut self) {
        self.shelf = Shelf::default();
    }

    /// Its size.
    pub fn len(&self) -> usize {
        self.memory.len()
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.memory.len() == 0
    }
}

impl Program {
    /// Places the circuit's values and orders its operations.
    pub fn new(mut circuit: Circuit, max_rows: usize, max_sequences: usize, keep: &[Value]) -> Result<Program> {
        let layout = Layout::new(&mut circuit, max_rows, max_sequences, keep)?;
        let after = conflicts(&mut circuit, &layout);
        let (output, rounds, fixed_order) = (circuit.output, circuit.rounds, circuit.fixed_order);
        let instructions = circuit
            .nodes
            .into_iter()
            .zip(after)
            .map(|(node, after)| Instruction { op: node.op, after, counter: AtomicUsize::new(0) })
            .collect();
        Ok(Program { instructions, layout, inputs: circuit.inputs, output, rounds, fixed_order })
    }

    /// Bytes of workspace it needs.
    pub fn workspace_bytes(&self) -> usize {
        self.layout.bytes
    }

    /// About the bytes that the program itself takes.
    pub fn table_bytes(&self) -> usize {
        let lists: usize = self.instructions.iter().map(|i| size_of_val(i) + size_of::<usize>() * i.after.capacity() + OP).sum();
        lists + size_of_val(&self.layout.slots[..])
    }

    /// Most rows of a batch.
    pub fn max_rows(&self) -> usize {
        self.layout.max_rows
    }

    /// Values that are to be there before it runs.
    pub fn inputs(&self) -> &[Value] {
        &self.inputs
    }

    /// Whether it makes a value, or is given it.
    pub fn has(&self, value: Value) -> bool {
        self.layout.slots[value.0 as usize].width > 0
    }

    /// The value that is the result.
    pub fn output(&self) -> Value {
        self.output
    }

    /// Operations it runs.
    pub fn ops(&self) -> impl Iterator<Item = &dyn Op> {
        self.instructions.iter().map(|i| &*i.op)
    }

    /// The layout.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    fn frame<'a>(
        &'a self,
        workspace: &'a mut Workspace,
        batch: &'a Batch,
        weights: &'a [Weight],
        failure: &'a Failure,
        simd: &'static Table,
    ) -> Frame<'a> {
        assert!(workspace.len() >= self.layout.bytes, "the engine sizes the workspace by its largest program");
        assert!(
            batch.tokens.len() <= self.layout.max_rows && batch.segments.len() <= self.layout.max_sequences,
            "the scheduler slices batches"
        );
        Frame {
            base: workspace.memory.as_ptr(),
            slots: &self.layout.slots,
            batch,
            weights,
            simd,
            workers: 1,
            rounds: self.rounds && simd.has_pairs(),
            failure,
            _workspace: PhantomData,
        }
    }

    /// Runs on the pool, from where `progress` stands. A run that leaves off can be continued with the same batch and the
    /// same workspace, which nobody else may have used meanwhile; the bits are those of a run in one go. After an error
    /// `progress` is back at the start.
    pub fn run(
        &mut self,
        pool: &Pool,
        workspace: &mut Workspace,
        batch: &Batch,
        weights: &[Weight],
        progress: &mut Progress,
        control: Control<'_>,
    ) -> Result<Outcome> {
        if !progress.begun {
            progress.restart();
            self.instructions.iter_mut().for_each(|i| *i.counter.get_mut() = 0);
        }
        let mut shelf = std::mem::take(&mut workspace.shelf);
        let failure = Failure::default();
        let frame = Frame { workers: pool.count(), ..self.frame(workspace, batch, weights, &failure, simd::table()) };
        let pause = Pause::new(control);
        // Written by the leader, who is one thread for the whole run.
        let (open, place) = (AtomicUsize::new(progress.open), AtomicUsize::new(progress.place));
        let job = |worker: &Worker<'_>| {
            let start = if worker.is_leader() { place.load(Ordering::Relaxed) } else { worker.start() };
            let (ended, section) = shelf.lend(worker.is_leader(), || self.walk(worker, &frame, &pause, start));
            if worker.is_leader() {
                open.store(section, Ordering::Relaxed);
                place.store(ended, Ordering::Relaxed);
            }
        };
        let ran = pool.run_from(progress.open, &job);
        shelf.level(pool.count() - 1);
        workspace.shelf = shelf;
        if let Err(e) = failure.into_error().map_or(ran, Err) {
            progress.restart();
            return Err(e);
        }
        *progress = Progress { begun: true, open: open.into_inner(), place: place.into_inner() };
        if progress.place < self.instructions.len() {
            return Ok(Outcome::Suspended);
        }
        progress.restart();
        Ok(Outcome::Done)
    }

    /// One participant's way through the instructions, from `index` on in the section where it joined. Returns where it left off
    /// and where that section begins.
    fn walk(&self, worker: &Worker<'_>, frame: &Frame<'_>, pause: &Pause<'_>, mut index: usize) -> (usize, usize) {
        let mut open = worker.start();
        let mut has_worked = false;
        while let Some(instruction) = self.instructions.get(index) {
            if frame.failure.is_noted() {
                break;
            }
            if instruction.op.idle(frame) {
                index += 1;
                continue;
            }
            let solo = instruction.op.solo(frame);
            let waits = |&&before: &&usize| {
                let op = &self.instructions[before].op;
                before >= open && !(solo && op.solo(frame)) && !op.idle(frame)
            };
            if instruction.after.iter().take_while(|&&before| before >= open).find(waits).is_some() {
                if !worker.meet(index) {
                    break;
                }
                open = index;
                // However late it is, a run gets on by a piece.
                if has_worked && pause.is_noticed() {
                    break;
                }
            }
            if !solo || worker.is_leader() {
                let turn = Turn::new(worker, &instruction.counter, pause);
                instruction.op.run(frame, &turn);
                if turn.has_worked() && (pause.due() || worker.is_called_away()) {
                    return (if turn.was_cut() { index } else { index + 1 }, open);
                }
                has_worked |= turn.has_worked();
            }
            index += 1;
        }
        (index, open)
    }

    /// Whether bfloat16 weights may meet activations rounded to bfloat16.
    pub fn rounds(&self) -> bool {
        self.rounds
    }

    /// Whether a device computes a row by the same sums whatever else is in the batch.
    pub fn fixed_order(&self) -> bool {
        self.fixed_order
    }

    /// Most bytes of device memory that an operation uses between its kernels, for sequences of `context` positions.
    pub fn gpu_scratch_bytes(&self, context: usize, processors: usize) -> usize {
        let (rows, segments) = (self.layout.max_rows, self.layout.max_sequences);
        let width = |value: Value| self.layout.slots[value.0 as usize].width;
        let need = |i: &Instruction| i.op.gpu_scratch_of(&width, rows, segments, context, processors);
        self.instructions.iter().map(need).max().unwrap_or(0)
    }

    /// Where a device stops for the processor, in order.
    pub fn asides(&self) -> impl Iterator<Item = &Aside> {
        self.instructions.iter().filter_map(|instruction| instruction.op.as_any().downcast_ref())
    }

    /// The operation at a place, where a device stops for the processor.
    pub fn aside(&self, place: usize) -> Option<&Aside> {
        self.instructions.get(place).and_then(|instruction| instruction.op.as_any().downcast_ref())
    }

    /// Queues operations on a device, from `start` on, until `pause` says so after one of them or the processor's turn comes
    /// ([`Program::aside`]). The one to go on with.
    pub fn launch(&self, gpu: &Gpu<'_>, start: usize, mut pause: impl FnMut() -> bool) -> Result<usize> {
        for (index, instruction) in self.instructions.iter().enumerate().skip(start) {
            if self.aside(index).is_some() {
                return Ok(index);
            }
            instruction.op.launch(gpu)?;
            if pause() {
                return Ok(index + 1);
            }
        }
        Ok(self.instructions.len())
    }

    /// Runs every operation's definition, on the calling thread: what `run` is tested against.
    pub fn run_scalar(&self, workspace: &mut Workspace, batch: &Batch, weights: &[Weight]) -> Result<()> {
        let failure = Failure::default();
        let frame = self.frame(workspace, batch, weights, &failure, simd::table());
        for instruction in &self.instructions {
            instruction.op.scalar(&frame);
        }
        failure.into_error().map_or(Ok(()), Err)
    }

    /// Rows of a value after a run; `[rows, width]`, row after row. For values that were kept.
    pub fn read(&self, workspace: &mut Workspace, batch: &Batch, value: Value, out: &mut Vec<f32>) -> Result<()> {
        let failure = Failure::default();
        let frame = self.frame(workspace, batch, &[], &failure, simd::table());
        let (rows, width) = (frame.rows(value), frame.slot(value).width);
        out.clear();
        crate::error::reserve(out, rows * width, "a copy of a value")?;
        for row in 0..rows {
            out.extend_from_slice(frame.row(value, row));
        }
        Ok(())
    }

    /// As [`Program::read`], as bytes, which begin `out`.
    pub fn read_bytes(&self, workspace: &mut Workspace, batch: &Batch, value: Value, out: &mut [u8]) {
        let failure = Failure::default();
        let frame = self.frame(workspace, batch, &[], &failure, simd::table());
        let rows = (0..frame.rows(value)).flat_map(|row| frame.row(value, row));
        out.as_chunks_mut().0.iter_mut().zip(rows).for_each(|(to, from)| *to = from.to_ne_bytes());
    }

    /// Writes rows of a value that is to be there before a run, as [`Program::read_bytes`] gives them.
    pub fn write_bytes(&self, workspace: &mut Workspace, batch: &Batch, value: Value, bytes: &[u8]) {
        let slot = self.layout.slots[value.0 as usize];
        let rows = if slot.rows == Rows::All { batch.tokens.len() } else { batch.segments.len() };
        let len = 4 * rows * slot.width;
        workspace.memory.as_mut_slice()[slot.offset..][..len].copy_from_slice(&bytes[..len]);
    }

    /// Copies one row of the result.
    pub fn copy_output_row(&self, workspace: &mut Workspace, batch: &Batch, row: usize, out: &mut [f32]) {
        let failure = Failure::default();
        let frame = self.frame(workspace, batch, &[], &failure, simd::table());
        out.copy_from_slice(frame.row(self.output, row));
    }
}

/// About the size of an operation.
const OP: usize = 160;

/// For each node, the earlier nodes that touch the same bytes or state with at least one write, latest first.
fn conflicts(circuit: &mut Circuit, layout: &Layout) -> Vec<Vec<usize>> {
    struct Touch {
        write: bool,
        bytes: (usize, usize),
    }
    let mut touches: Vec<Vec<Touch>> = Vec::new();
    let mut states: Vec<Vec<(Port, crate::ops::StateId)>> = Vec::new();
    let mut slots: Vec<Vec<crate::ops::SlotId>> = Vec::new();
    let mut after = Vec::new();
    for index in 0..circuit.nodes.len() {
        let ports: Vec<(Port, Value)> = circuit.nodes[index].op.ports().into_iter().map(|(p, v)| (p, *v)).collect();
        let mine: Vec<Touch> = ports
            .into_iter()
            .map(|(port, value)| {
                let root = circuit.root(value);
                Touch { write: port == Port::Out, bytes: layout.span(root) }
            })
            .collect();
        let my_states = circuit.nodes[index].op.states();
        let my_slots = circuit.nodes[index].op.slots();
        let clash = |before: usize| {
            let bytes = touches[before]
                .iter()
                .any(|a: &Touch| mine.iter().any(|b| (a.write || b.write) && a.bytes.0 < b.bytes.1 && b.bytes.0 < a.bytes.1));
            let state = states[before].iter().any(|a| my_states.iter().any(|b| a.1 == b.1 && (a.0 == Port::Out || b.0 == Port::Out)));
            bytes || state || slots[before].iter().any(|s| my_slots.contains(s))
        };
        after.push((0..index).rev().filter(|&before| clash(before)).collect());
        touches.push(mine);
        states.push(my_states);
        slots.push(my_slots);
    }
    after
}
