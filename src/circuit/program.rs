//! Programs: a circuit with places, run in order by every worker of the pool.
//!
//! The whole program is one fork and join. Workers meet at a barrier only where an operation depends on work that
//! others may still be doing; what falls to the first worker alone (rows too few to share) runs through without.
//!
//! A run can leave off between any two pieces of an operation and be continued: the counter that deals out an operation's
//! pieces says which are done, and [`Progress`] where each worker was.

use super::layout::Layout;
use super::tape::Circuit;
use crate::backend::cpu::arena::Buffer;
use crate::backend::cpu::pause::{Control, Pause};
use crate::backend::cpu::pool::{Pool, Worker};
use crate::backend::cpu::simd::{self, Table};
use crate::error::Result;
use crate::ops::{Batch, Frame, Op, Port, Scratch, Turn, Value, Weight, exchange};
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
    output: Value,
}

/// How a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Everything is computed.
    Done,
    /// It left off, and can be continued.
    Suspended,
}

/// How far a run is: the place of each worker. The counters of the operations they are at belong to the program, so one run of
/// a program is under way at a time.
#[derive(Default, Debug)]
pub struct Progress {
    begun: bool,
    open: usize,
    at: Vec<AtomicUsize>,
}

impl Progress {
    /// Back to the first instruction.
    pub fn restart(&mut self) {
        self.begun = false;
        self.open = 0;
        self.at.iter_mut().for_each(|at| *at.get_mut() = 0);
    }

    /// Has a place for each of `workers`.
    fn fit(&mut self, workers: usize) -> Result<()> {
        if self.at.len() < workers {
            crate::error::reserve(&mut self.at, workers, "the places of workers")?;
            self.at.resize_with(workers, AtomicUsize::default);
        }
        Ok(())
    }
}

/// The memory programs run in; large enough for any program it is used with.
pub struct Workspace {
    memory: Buffer,
    /// Buffers of the thread that calls, kept here between its runs.
    scratch: Scratch,
}

impl Workspace {
    /// `bytes` of zeroed memory, all of it there, so that no step waits for it.
    pub fn new(bytes: usize) -> Result<Workspace> {
        let mut memory = Buffer::new(bytes.max(64), "workspace")?;
        memory.touch();
        Ok(Workspace { memory, scratch: Scratch::default() })
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
        let output = circuit.output;
        let instructions = circuit
            .nodes
            .into_iter()
            .zip(after)
            .map(|(node, after)| Instruction { op: node.op, after, counter: AtomicUsize::new(0) })
            .collect();
        Ok(Program { instructions, layout, output })
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

    fn frame<'a>(&'a self, workspace: &'a mut Workspace, batch: &'a Batch, weights: &'a [Weight], simd: &'static Table) -> Frame<'a> {
        assert!(workspace.len() >= self.layout.bytes, "the engine sizes the workspace by its largest program");
        assert!(
            batch.tokens.len() <= self.layout.max_rows && batch.segments.len() <= self.layout.max_sequences,
            "the scheduler slices batches"
        );
        Frame { base: workspace.memory.as_ptr(), slots: &self.layout.slots, batch, weights, simd, _workspace: PhantomData }
    }

    /// Runs on the pool, from where `progress` stands. A run that leaves off can be continued with the same batch and the
    /// same workspace, which nobody else may have used meanwhile; the bits are those of a run in one go. After an error
    /// `progress` is back at the start.
    pub fn run(
        &self,
        pool: &Pool,
        workspace: &mut Workspace,
        batch: &Batch,
        weights: &[Weight],
        progress: &mut Progress,
        control: Control<'_>,
    ) -> Result<Outcome> {
        progress.fit(pool.count())?;
        let mut scratch = std::mem::take(&mut workspace.scratch);
        let frame = self.frame(workspace, batch, weights, simd::table());
        let (pause, opened) = (Pause::new(control), AtomicUsize::new(progress.open));
        let fresh = !progress.begun;
        let job = |worker: &Worker<'_>| {
            let place = &progress.at[worker.index()];
            // First instruction not yet behind a barrier; earlier ones are done on every worker.
            let mut open = progress.open;
            let mut section = 1;
            let mut index = place.load(Ordering::Relaxed);
            let leave = |index: usize, open: usize| {
                place.store(index, Ordering::Relaxed);
                if worker.index() == 0 {
                    opened.store(open, Ordering::Relaxed);
                }
            };
            while let Some(instruction) = self.instructions.get(index) {
                let solo = instruction.op.solo(&frame);
                let waits = |&&before: &&usize| before >= open && !(solo && self.instructions[before].op.solo(&frame));
                if instruction.after.iter().take_while(|&&before| before >= open).find(waits).is_some() {
                    worker.barrier();
                    if pause.left(section) {
                        return leave(index, open);
                    }
                    section += 1;
                    open = index;
                }
                if !solo || worker.index() == 0 {
                    let turn = Turn::new(worker, &instruction.counter, &pause);
                    instruction.op.run(&frame, &turn);
                    if pause.due() {
                        leave(if turn.was_cut() { index } else { index + 1 }, open);
                        pause.leave(section);
                        return worker.barrier();
                    }
                }
                index += 1;
            }
            worker.barrier();
            leave(index, open);
        };
        // The counters are this program's, so they are set by whoever has the pool: before its first instruction, by one worker.
        let begin = |worker: &Worker<'_>| {
            if fresh {
                if worker.index() == 0 {
                    self.instructions.iter().for_each(|i| i.counter.store(0, Ordering::Relaxed));
                }
                worker.barrier();
            }
            job(worker);
        };
        exchange(&mut scratch);
        let ran = pool.run_unless(&|| pause.due(), &begin);
        exchange(&mut scratch);
        workspace.scratch = scratch;
        match ran {
            Ok(true) => {}
            Ok(false) => return Ok(Outcome::Suspended),
            Err(e) => {
                progress.restart();
                return Err(e);
            }
        }
        progress.begun = true;
        progress.open = opened.into_inner();
        if progress.at.iter_mut().any(|at| *at.get_mut() < self.instructions.len()) {
            return Ok(Outcome::Suspended);
        }
        progress.restart();
        Ok(Outcome::Done)
    }

    /// Runs every operation's definition, on the calling thread: what `run` is tested against.
    pub fn run_scalar(&self, workspace: &mut Workspace, batch: &Batch, weights: &[Weight]) {
        let frame = self.frame(workspace, batch, weights, simd::table());
        for instruction in &self.instructions {
            instruction.op.scalar(&frame);
        }
    }

    /// Rows of a value after a run; `[rows, width]`, row after row. For values that were kept.
    pub fn read(&self, workspace: &mut Workspace, batch: &Batch, value: Value, out: &mut Vec<f32>) -> Result<()> {
        let frame = self.frame(workspace, batch, &[], simd::table());
        let (rows, width) = (frame.rows(value), frame.slot(value).width);
        out.clear();
        crate::error::reserve(out, rows * width, "a copy of a value")?;
        for row in 0..rows {
            out.extend_from_slice(frame.row(value, row));
        }
        Ok(())
    }

    /// Copies one row of the result.
    pub fn copy_output_row(&self, workspace: &mut Workspace, batch: &Batch, row: usize, out: &mut [f32]) {
        let frame = self.frame(workspace, batch, &[], simd::table());
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
