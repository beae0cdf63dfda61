//! Programs in segments: what the processor runs of a circuit, then what a device does with what comes out of it, and what the processor runs
//! where the device stops for it.

use super::cut::Parts;
use super::layout::Layout;
use super::program::Program;
use super::tape::Circuit;
use crate::error::Result;
use crate::ops::{Aside, Slot, Value};

/// A circuit's programs, one for each of its parts.
#[derive(Debug)]
pub struct Segments {
    host: Option<Program>,
    device: Option<Program>,
    asides: Vec<Program>,
    output: Value,
}

impl Segments {
    /// Places the values of all parts; the output and values in `keep` stay to the end wherever they are.
    pub fn new(parts: Parts<Circuit>, max_rows: usize, max_sequences: usize, keep: &[Value]) -> Result<Segments> {
        let output = parts.device.as_ref().or(parts.host.as_ref()).map_or(Value::NONE, |part| part.output);
        let mut kept = keep.to_vec();
        if let Some(device) = &parts.device {
            kept.extend_from_slice(&device.inputs);
            let asides = device.nodes.iter().filter_map(|node| node.op.as_any().downcast_ref::<Aside>());
            asides.for_each(|aside| kept.extend_from_slice(&aside.outputs));
        }
        let programs = parts.map(|part, on_device| Program::new(part, max_rows, max_sequences, if on_device { keep } else { &kept }))?;
        Ok(Segments { host: programs.host, device: programs.device, asides: programs.asides, output })
    }

    /// What the processor begins with, and the device's.
    pub fn both(&self) -> (Option<&Program>, Option<&Program>) {
        (self.host.as_ref(), self.device.as_ref())
    }

    /// What the device stops for.
    pub fn asides(&self) -> &[Program] {
        &self.asides
    }

    /// Those that there are.
    pub fn programs(&self) -> impl Iterator<Item = &Program> {
        self.host.iter().chain(&self.device).chain(&self.asides)
    }

    /// As [`Segments::both`], to be run, and what the device stops for.
    pub fn all_mut(&mut self) -> (Option<&mut Program>, Option<&Program>, &mut [Program]) {
        (self.host.as_mut(), self.device.as_ref(), &mut self.asides)
    }

    /// The value that is the result.
    pub fn output(&self) -> Value {
        self.output
    }

    /// Where a value lies.
    pub fn slot(&self, value: Value) -> Slot {
        let layout = |program: &Program| program.layout().slots[value.0 as usize];
        self.programs().find(|program| program.has(value)).or(self.programs().next()).map(layout).expect("a circuit has a part")
    }

    /// Bytes of what crosses at once, both ways, for the widest batch.
    pub fn crossing_bytes(&self) -> usize {
        self.device.as_ref().map_or(0, |device| most_carried(device).saturating_add(most_sent(device)))
    }
}

/// Values that cross together, and where each lies among them.
pub(super) fn crossing<'a>(program: &'a Program, values: &'a [Value]) -> impl Iterator<Item = (Value, std::ops::Range<usize>)> {
    let layout: &Layout = program.layout();
    values.iter().scan(0, |end, value| {
        let (first, after) = layout.span(*value);
        let start = *end;
        *end += after - first;
        Some((*value, start..*end))
    })
}

fn crossing_bytes(program: &Program, values: &[Value]) -> usize {
    crossing(program, values).last().map_or(0, |(_, range)| range.end)
}

/// Most bytes that a device's program is given at once.
pub(super) fn most_carried(program: &Program) -> usize {
    let asides = program.asides().map(|aside| crossing_bytes(program, &aside.outputs)).max();
    crossing_bytes(program, program.inputs()).max(asides.unwrap_or(0))
}

/// Most bytes that it hands out at once.
pub(super) fn most_sent(program: &Program) -> usize {
    program.asides().map(|aside| crossing_bytes(program, &aside.inputs)).max().unwrap_or(0)
}
