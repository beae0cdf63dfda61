//! Programs: a circuit with places, run in order by every worker of the pool.
//!
//! The whole program is one fork and join. Workers meet at a barrier only where an operation depends on work that
//! others may still be doing; what falls to the first worker alone (rows too few to share) runs through without.

use super::layout::Layout;
use super::tape::Circuit;
use crate::backend::cpu::arena::Buffer;
use crate::backend::cpu::pool::Pool;
use crate::backend::cpu::simd::{self, Table};
use crate::error::Result;
use crate::ops::{Batch, Frame, Op, Port, Turn, Value, Weight};
use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

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

/// The memory programs run in; large enough for any program it is used with.
pub struct Workspace(Buffer);

impl Workspace {
    /// `bytes` of zeroed memory.
    pub fn new(bytes: usize) -> Result<Workspace> {
        Ok(Workspace(Buffer::new(bytes.max(64), "workspace")?))
    }

    /// Its size.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether it holds nothing.
    pub fn is_empty(&self) -> bool {
        self.0.len() == 0
    }
}

impl Program {
    /// Places the circuit's values and orders its operations.
    pub fn new(mut circuit: Circuit, max_rows: usize, max_sequences: usize, keep: &[Value]) -> Result<Program> {
        let layout = Layout::new(&mut circuit, max_rows, max_sequences, keep)?;
        let after = conflicts(&mut circuit, &layout);
        let output = circuit.output;
        let instructions =
            circuit.nodes.into_iter().zip(after).map(|(node, after)| Instruction { op: node.op, after, counter: AtomicUsize::new(0) }).collect();
        Ok(Program { instructions, layout, output })
    }

    /// Bytes of workspace it needs.
    pub fn workspace_bytes(&self) -> usize {
        self.layout.bytes
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
        assert!(batch.tokens.len() <= self.layout.max_rows && batch.segments.len() <= self.layout.max_sequences, "the scheduler slices batches");
        Frame { base: workspace.0.as_ptr(), slots: &self.layout.slots, batch, weights, simd, _workspace: PhantomData }
    }

    /// Runs on the pool. `stop` is looked at between operations; a run that was stopped returns false and leaves
    /// half-written values and states behind, which the caller discards.
    pub fn run(&self, pool: &Pool, workspace: &mut Workspace, batch: &Batch, weights: &[Weight], stop: &AtomicBool) -> Result<bool> {
        let frame = self.frame(workspace, batch, weights, simd::table());
        for instruction in &self.instructions {
            instruction.counter.store(0, Ordering::Relaxed);
        }
        let stopped = AtomicBool::new(false);
        pool.run(&|worker| {
            // First instruction not yet behind a barrier; earlier ones are done on every worker.
            let mut open = 0;
            for (index, instruction) in self.instructions.iter().enumerate() {
                let solo = instruction.op.solo(&frame);
                let waits = |&&before: &&usize| before >= open && !(solo && self.instructions[before].op.solo(&frame));
                if instruction.after.iter().take_while(|&&before| before >= open).find(waits).is_some() {
                    if worker.index() == 0 && stop.load(Ordering::Relaxed) {
                        stopped.store(true, Ordering::Relaxed);
                    }
                    worker.barrier();
                    if stopped.load(Ordering::Relaxed) {
                        return;
                    }
                    open = index;
                }
                if !solo || worker.index() == 0 {
                    instruction.op.run(&frame, &Turn { worker, counter: &instruction.counter });
                }
            }
        })?;
        Ok(!stopped.load(Ordering::Relaxed))
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
        out.try_reserve(rows * width).map_err(|_| crate::error::Error::new(crate::error::Kind::OutOfMemory, "a copy of a value"))?;
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
            let bytes = touches[before].iter().any(|a: &Touch| {
                mine.iter().any(|b| (a.write || b.write) && a.bytes.0 < b.bytes.1 && b.bytes.0 < a.bytes.1)
            });
            let state = states[before].iter()
                .any(|a| my_states.iter().any(|b| a.1 == b.1 && (a.0 == Port::Out || b.0 == Port::Out)));
            bytes || state || slots[before].iter().any(|s| my_slots.contains(s))
        };
        after.push((0..index).rev().filter(|&before| clash(before)).collect());
        touches.push(mine);
        states.push(my_states);
        slots.push(my_slots);
    }
    after
}
