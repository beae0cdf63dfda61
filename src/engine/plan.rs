//! The memory plan: bytes by class, from headers and config alone.

use super::placement::{Keep, Placement};
use super::prepare::{Prepared, Programs};
use crate::backend::cpu::available_threads;
use crate::backend::cpu::pack::{Layout, Packed};
use crate::cache::{PagePool, StateLayout};
use crate::circuit::{DeviceWeights, DeviceWorkspace, Program, Segments};
use crate::error::Result;
use crate::options::LoadOptions;
use crate::weights::{Access, Input, Part, Reading, Role, WeightSpec};
use std::path::Path;

/// Bytes of host memory by class, and of a device's. Mapped files do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Plan {
    /// Packed weights and vectors.
    pub weights: u64,
    /// Key/value pages of the sequences.
    pub kv: u64,
    /// Recurrent states of the sequences.
    pub state: u64,
    /// Workspace of the largest step.
    pub scratch: u64,
    /// Rows of logits, tokenizer, tables.
    pub other: u64,
    /// Files that were read into memory, or copied.
    pub source: u64,
    /// What is on the device that computes, where that is not the processor.
    pub device: DevicePlan,
}

/// Bytes of a device's memory by class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct DevicePlan {
    /// Packed weights and vectors.
    pub weights: u64,
    /// Key/value pages of the sequences.
    pub kv: u64,
    /// Recurrent states and rows of logits of the sequences.
    pub state: u64,
    /// Workspaces.
    pub scratch: u64,
    /// Layers that run there: the last so many, and what follows them. 0 where only what follows them does, or nothing.
    pub layers: u64,
    /// Of those the first so many with experts whose experts stay on the processor.
    pub host_experts: u64,
}

impl DevicePlan {
    /// Sum of the classes.
    pub fn total(&self) -> u64 {
        [self.kv, self.state, self.scratch].into_iter().fold(self.weights, u64::saturating_add)
    }
}

impl Plan {
    /// Sum of the classes.
    pub fn total(&self) -> u64 {
        [self.kv, self.state, self.scratch, self.other, self.source].into_iter().fold(self.weights, u64::saturating_add)
    }
}

/// Plans `path` for `sequences` sequences of the context limit. Reads headers only.
pub fn plan(path: &Path, options: &LoadOptions, sequences: usize) -> Result<Plan> {
    plan_from(Input::path(path, Access::Map)?, options, sequences)
}

/// As [`plan`], from wherever the bytes come.
pub fn plan_from(input: Input, options: &LoadOptions, sequences: usize) -> Result<Plan> {
    Prepared::of(Reading::headers(input, options.synthetic.is_some())?, options)?.plan(sequences)
}

impl Prepared {
    /// Bytes by class, for `sequences` sequences of the longest context, where the model is placed as a load would place it.
    pub fn plan(&mut self, sequences: usize) -> Result<Plan> {
        let mut programs = Programs::default();
        while !programs.step(self)? {}
        self.plan_of(&programs, sequences)
    }

    /// As `plan`, where the programs are there.
    pub fn plan_of(&self, programs: &Programs, sequences: usize) -> Result<Plan> {
        let mut plan = self.plan_kept(&self.placement, sequences)?;
        // Blocking calls and steps each have a workspace, as large as their largest program needs.
        let others = programs.encoder.iter().chain(&programs.hidden);
        let blocking: Vec<&Segments> = programs.blocking.iter().map(|(_, program)| program).chain(others).collect();
        let steps: Vec<&Segments> = programs.steps.iter().map(|(_, program)| program).collect();
        let listed = || programs.blocking.iter().chain(&programs.steps).map(|(_, program)| program);
        let tables: u64 = listed().flat_map(Segments::programs).map(|program| program.table_bytes() as u64).sum();
        plan.other = plan.other.saturating_add(tables);
        for list in [&blocking, &steps] {
            let host = list.iter().filter_map(|program| program.both().0).map(Program::workspace_bytes).max().unwrap_or(0);
            let asides = list.iter().flat_map(|program| program.asides()).map(Program::workspace_bytes).max().unwrap_or(0);
            let crossing = list.iter().map(|program| program.crossing_bytes()).max().unwrap_or(0);
            plan.scratch = [host, asides, crossing].into_iter().fold(plan.scratch, |sum, bytes| sum.saturating_add(bytes as u64));
            if let Some(device) = &self.device {
                let there: Vec<&Program> = list.iter().filter_map(|program| program.both().1).collect();
                let bytes = DeviceWorkspace::bytes(&there, self.declarations.kv.len(), self.context, device.info().processors);
                plan.device.scratch = plan.device.scratch.saturating_add(bytes as u64);
            }
        }
        Ok(plan)
    }

    /// What is held as long as the model and its sequences, in a placement: all but workspaces and programs.
    pub fn plan_kept(&self, placement: &Placement, sequences: usize) -> Result<Plan> {
        // Sizes of made-up weights follow the config alone, so sums stop at the largest number instead of passing it.
        let (mut weights, mut paged, mut there, mut passing) = (0u64, 0u64, 0u64, 0u64);
        for (index, (spec, layouts)) in self.declarations.weights.iter().zip(&self.layouts).enumerate() {
            let host = if self.pages(spec)? { &mut paged } else { &mut weights };
            let packed = || packed_bytes(spec, layouts);
            *host = host.saturating_add(match (placement.weights[index].host, spec.role) {
                (Keep::Nothing, _) => 0,
                (_, Role::Vector { .. }) => (spec.cols as u64).saturating_mul(4),
                (Keep::Whole, Role::Matrix | Role::Experts) => packed(),
                _ if self.options.synthetic.is_some() => (spec.rows as u64).saturating_mul(spec.cols as u64).saturating_mul(2),
                _ => 0,
            });
            let bytes = self.device_bytes_of(index, placement);
            there = there.saturating_add(bytes);
            if bytes > 0 {
                there = there.saturating_add(ROOM * (layouts.len() as u64 + 1));
            }
            // A weight is packed here before it goes.
            if bytes > 0 && !matches!(spec.role, Role::Vector { .. }) {
                passing = passing.max(packed());
            }
        }
        let weights = weights.saturating_add(paged.min(self.expert_budget.unwrap_or(0))).saturating_add(passing);
        let (mut kv, mut kv_there, mut spare) = (0u64, 0u64, 0u64);
        for (spec, on_device) in self.declarations.kv.iter().zip(&placement.held.kv) {
            let bytes = PagePool::planned(*on_device, spec.page_bytes(), self.context, sequences, self.kept());
            let sum = if *on_device { &mut kv_there } else { &mut kv };
            *sum = sum.saturating_add(bytes);
            if *on_device {
                spare = spare.max(PagePool::spare(spec.page_bytes(), self.context));
            }
        }
        // Each sequence has a committed and a spare state, and all share the one before any token.
        let layout = self.state_layout(placement)?;
        let bytes_of = |each: u64| (sequences as u64).saturating_mul(each).saturating_add(1).saturating_mul(4);
        let states = bytes_of(2);
        // And a third, where a device has the whole model and begins a step before the one before it is committed.
        let states_there = bytes_of(if placement.is_cut() || placement.host_experts > 0 { 2 } else { 3 });
        let rows = states.saturating_mul(self.model.dims().vocab as u64);
        let on_device = self.device.is_some();
        let only_there = |bytes: u64| if on_device { bytes } else { 0 };
        Ok(Plan {
            weights,
            kv,
            state: states.saturating_mul(layout.slot_floats(false) as u64),
            scratch: only_there(DeviceWeights::STAGING as u64),
            other: rows.saturating_add(self.overhead(sequences)?),
            source: self.checkpoint.held_bytes(),
            device: DevicePlan {
                weights: there,
                kv: kv_there.saturating_add(spare),
                state: states_there.saturating_mul(layout.floats_of(true) as u64),
                scratch: 0,
                layers: placement.layers as u64,
                host_experts: placement.host_experts as u64,
            },
        })
    }

    /// Where the parts of a recurrent state lie; logits are the device's where there is one.
    pub fn state_layout(&self, placement: &Placement) -> Result<StateLayout> {
        let slots = &placement.held.slots;
        StateLayout::apart(&self.declarations.slots, self.model.dims().vocab, |slot| slots[slot], self.device.is_some())
    }

    /// Pages of what is kept for later prompts, as if all of it were pages.
    fn kept(&self) -> usize {
        let set = self.declarations.kv.iter().map(|spec| spec.page_bytes()).fold(0, usize::saturating_add).max(1);
        usize::try_from(self.options.prefix_bytes).unwrap_or(usize::MAX) / set
    }

    /// What is not made of buffers whose size is known: the tokenizer, names, lists of pages, stacks. Estimates, from
    /// vocabularies of 512 to 262,144 tokens; tests hold them against the kernel's counters.
    fn overhead(&self, sequences: usize) -> Result<u64> {
        let tokenizer = match (self.checkpoint.gguf(), self.checkpoint.beside()) {
            (Some(gguf), _) => {
                let each = if gguf.value("tokenizer.ggml.scores").is_some() { SCORED_TOKEN } else { TOKEN };
                gguf.strings("tokenizer.ggml.tokens")?.map_or(0, |tokens| tokens.count() as u64 * each)
            }
            (None, Some(files)) => match files.size("tokenizer.json") {
                0 => 0,
                size => (self.model.dims().vocab as u64 * JSON_TOKEN).max(size.saturating_mul(JSON_TENTHS) / 10),
            },
            (None, None) => 0,
        };
        let pages = self.declarations.kv.len() as u64 * self.context.div_ceil(crate::ops::PAGE) as u64;
        let sequence = pages.saturating_mul(PAGE_ENTRY).saturating_add(4 * self.context as u64 + SEQUENCE);
        let threads = if self.options.threads == 0 { available_threads() } else { self.options.threads };
        let own = LIBRARY + threads as u64 * (THREAD + self.rounded_bytes()) + self.declarations.weights.len() as u64 * NAMES;
        Ok([tokenizer, sequence.saturating_mul(sequences as u64), own].into_iter().fold(0, u64::saturating_add))
    }
}

/// What lies between a weight on a device and the next at most, with a part's place in a table of experts.
const ROOM: u64 = 320;
/// Bytes of a token: its text, its merge, their places in tables, and what building those leaves behind.
const TOKEN: u64 = 84;
/// Where merges follow from scores.
const SCORED_TOKEN: u64 = 64;
/// Where a `tokenizer.json` is read, which passes through maps of strings.
const JSON_TOKEN: u64 = 216;
/// Tenths of a byte for each of `tokenizer.json`, which writes some vocabularies at greater length.
const JSON_TENTHS: u64 = 58;
/// Of a page: its count and its places in two lists.
const PAGE_ENTRY: u64 = 72;
/// Of a sequence besides.
const SEQUENCE: u64 = 2048;
/// Of a weight: its name and description.
const NAMES: u64 = 1024;
/// Of a thread: what it touches of its stack, and its buffers.
const THREAD: u64 = 48 << 10;
/// Of everything else.
const LIBRARY: u64 = 512 << 10;

/// Bytes of a weight once it is packed.
pub(super) fn packed_bytes(spec: &WeightSpec, layouts: &[Layout]) -> u64 {
    let bytes = |(part, layout): (&Part, &Layout)| Packed::bytes(*layout, part.rows, spec.cols).map_or(u64::MAX, |n| n as u64);
    spec.parts().zip(layouts).map(bytes).fold(0, u64::saturating_add)
}
