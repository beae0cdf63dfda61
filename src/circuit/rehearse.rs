//! The launches of a program without a device: whether every operation has its kernels, and which files these are of.

use super::device_weights::PACK;
use super::found::LOGITS;
use super::program::Program;
use crate::backend::cuda::launch::{Grid, Kernel, Launch};
use crate::error::{Result, reserve};
use crate::ops::{BATCH, Batch, Gpu, GpuWeight, Segment};
use std::cell::RefCell;
use std::ops::Range;
use std::sync::Arc;

/// What a rehearsal takes the device for, and the kernel files that were asked of it, each once.
pub struct Rehearsal {
    /// Multiprocessors.
    processors: usize,
    /// Whether it has kernels with products of groups of warps.
    has_groups: bool,
    files: RefCell<Vec<&'static str>>,
}

/// Steps of so many sequences take different kernels.
const STEPS: [usize; 4] = [1, 4, 8, 32];

impl Rehearsal {
    /// Nothing is asked yet but what every load and every run needs.
    pub fn new(processors: usize, has_groups: bool) -> Rehearsal {
        Rehearsal { processors, has_groups, files: RefCell::new(vec![BATCH.file, LOGITS.file, PACK.file]) }
    }

    /// The files.
    pub fn files(self) -> Vec<&'static str> {
        self.files.into_inner()
    }

    /// Goes through a program's launches for its largest batch and for steps. `weights` say how they are packed; their addresses do not matter.
    pub fn run(&self, program: &Program, weights: &[GpuWeight], kv_states: usize, slots: &Arc<[Range<usize>]>) -> Result<()> {
        let layout = program.layout();
        let (rows, sequences) = (layout.max_rows, layout.max_sequences.min(layout.max_rows));
        self.batch(program, weights, kv_states, slots, rows, sequences)?;
        STEPS.iter().filter(|n| **n < sequences).try_for_each(|n| self.batch(program, weights, kv_states, slots, *n, *n))
    }

    /// One long sequence and others of one token.
    fn batch(
        &self,
        program: &Program,
        weights: &[GpuWeight],
        kv_states: usize,
        slots: &Arc<[Range<usize>]>,
        rows: usize,
        sequences: usize,
    ) -> Result<()> {
        let mut batch = Batch { kv_states, slots: Arc::clone(slots), ..Batch::default() };
        batch.tokens.resize(rows, 0);
        batch.positions.resize(rows, 0);
        for index in 0..sequences {
            let first = if index == 0 { 0 } else { rows - sequences + index };
            batch.segments.push(Segment { rows: first..rows - sequences + index + 1, position: 0 });
            batch.sources.push(0);
        }
        let gpu = Gpu {
            base: 0,
            slots: &program.layout().slots,
            rows,
            segments: sequences,
            batch_at: 0,
            batch: &batch,
            weights,
            rounds: program.rounds(),
            fixed_order: program.fixed_order(),
            stream: self,
            scratch: (0, usize::MAX),
        };
        let (mut place, end) = (0, program.ops().count());
        while place < end {
            // Behind what is the processor's.
            place = program.launch(&gpu, place, || false)? + 1;
        }
        Ok(())
    }
}

impl Launch for Rehearsal {
    fn launch(&self, kernel: Kernel, _: Grid, _: &[u8]) -> Result<()> {
        let mut files = self.files.borrow_mut();
        if !files.contains(&kernel.file) {
            reserve(&mut files, 1, "the list of kernel files")?;
            files.push(kernel.file);
        }
        Ok(())
    }
    fn write(&self, _: u64, _: &[u8]) -> Result<()> {
        Ok(())
    }
    fn processors(&self) -> usize {
        self.processors
    }
    fn has_groups(&self) -> bool {
        self.has_groups
    }
}
