//! Programs in segments: what the processor runs of a circuit, and then what a device does with what comes out of it.

use super::cut::Parts;
use super::layout::Layout;
use super::program::Program;
use super::tape::Circuit;
use crate::error::Result;
use crate::ops::{Slot, Value};

/// A circuit's programs, one for each of its parts.
#[derive(Debug)]
pub struct Segments {
    host: Option<Program>,
    device: Option<Program>,
    output: Value,
}

impl Segments {
    /// Places the values of both parts; the output and values in `keep` stay to the end wherever they are.
    pub fn new(parts: Parts<Circuit>, max_rows: usize, max_sequences: usize, keep: &[Value]) -> Result<Segments> {
        let crossing: Vec<Value> = parts.device.as_ref().map_or(Vec::new(), |device| device.inputs.clone());
        let output = parts.device.as_ref().or(parts.host.as_ref()).map_or(Value::NONE, |part| part.output);
        let kept: Vec<Value> = keep.iter().copied().chain(crossing).collect();
        let programs = parts.map(|part, on_device| Program::new(part, max_rows, max_sequences, if on_device { keep } else { &kept }))?;
        Ok(Segments { host: programs.host, device: programs.device, output })
    }

    /// The processor's, and the device's.
    pub fn both(&self) -> (Option<&Program>, Option<&Program>) {
        (self.host.as_ref(), self.device.as_ref())
    }

    /// Those that there are.
    pub fn programs(&self) -> impl Iterator<Item = &Program> {
        [self.host.as_ref(), self.device.as_ref()].into_iter().flatten()
    }

    /// As [`Segments::both`], to be run.
    pub fn both_mut(&mut self) -> (Option<&mut Program>, Option<&Program>) {
        (self.host.as_mut(), self.device.as_ref())
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

    /// Bytes of what crosses, for the widest batch.
    pub fn crossing_bytes(&self) -> usize {
        self.device.as_ref().map_or(0, crossing_bytes)
    }
}

/// The values that a program is given, and where each lies among them.
pub(super) fn crossing(program: &Program) -> impl Iterator<Item = (Value, std::ops::Range<usize>)> {
    let layout: &Layout = program.layout();
    program.inputs().iter().scan(0, |end, value| {
        let (first, after) = layout.span(*value);
        let start = *end;
        *end += after - first;
        Some((*value, start..*end))
    })
}

/// Bytes of them all.
pub(super) fn crossing_bytes(program: &Program) -> usize {
    crossing(program).last().map_or(0, |(_, range)| range.end)
}
