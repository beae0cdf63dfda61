//! Layout: every value gets an offset in one workspace; memory is used again once the last reader is done.

use super::tape::Circuit;
use crate::backend::cpu::activations::{Q8_BLOCK, Q8Block};
use crate::error::{Error, Kind as ErrorKind, Result};
use crate::ops::{Kind, Port, Rows, Slot, Value, prepared_bytes};

/// Places of a circuit's values for a largest batch.
#[derive(Clone, Debug)]
pub struct Layout {
    /// By value.
    pub slots: Vec<Slot>,
    /// Bytes of workspace.
    pub bytes: usize,
    /// Most rows.
    pub max_rows: usize,
    /// Most sequences.
    pub max_sequences: usize,
}

/// Values start on a cache line.
const ALIGN: usize = 64;

impl Layout {
    /// Places the values of `circuit`; the output and values in `keep` stay to the end.
    pub fn new(circuit: &mut Circuit, max_rows: usize, max_sequences: usize, keep: &[Value]) -> Result<Layout> {
        let lives = lifetimes(circuit, keep);
        let mut slots: Vec<Option<Slot>> = vec![None; circuit.values.len()];
        let mut free = FreeList::default();
        for index in 0..circuit.nodes.len() {
            for (value, (first, _)) in lives.iter().enumerate().filter(|(_, life)| life.0 == index) {
                debug_assert_eq!(*first, index);
                let shape = circuit.values[value].shape;
                let rows = if shape.rows == Rows::All { max_rows } else { max_sequences };
                let bytes = value_bytes(rows, shape.width, shape.kind)
                    .ok_or_else(|| Error::new(ErrorKind::TooLarge, format!("a value of {rows} rows of {} elements", shape.width)))?;
                let offset = free.take(bytes);
                slots[value] = Some(Slot { offset, rows: shape.rows, width: shape.width, stride: shape.width, kind: shape.kind });
            }
            for (value, _) in lives.iter().enumerate().filter(|(_, life)| life.1 == index && life.0 != usize::MAX) {
                let slot = slots[value].expect("a value lives from its first node on");
                let rows = if slot.rows == Rows::All { max_rows } else { max_sequences };
                free.give(slot.offset, value_bytes(rows, slot.width, slot.kind).expect("computed above"));
            }
        }
        let place = |value: usize| {
            let (mut value, mut column) = (value, 0);
            while let Some((whole, start)) = circuit.values[value].part_of {
                column += start;
                value = whole.0 as usize;
            }
            slots[value].map(|slot| (slot, column))
        };
        let unused = Slot { offset: 0, rows: Rows::All, width: 0, stride: 0, kind: Kind::F32 };
        let slots = (0..circuit.values.len())
            .map(|v| {
                place(v).map_or(unused, |(slot, column)| Slot {
                    offset: slot.offset + column * 4,
                    width: circuit.values[v].shape.width,
                    ..slot
                })
            })
            .collect();
        Ok(Layout { slots, bytes: free.end, max_rows, max_sequences })
    }
}

/// Bytes of a value, or `None` on overflow.
fn value_bytes(rows: usize, width: usize, kind: Kind) -> Option<usize> {
    let elements = rows.checked_mul(width)?;
    let bytes = match kind {
        Kind::F32 => elements.checked_mul(4)?,
        Kind::Q8 => (elements / Q8_BLOCK).checked_mul(size_of::<Q8Block>())?,
        Kind::Prepared => prepared_bytes(rows, width)?.max(elements.checked_mul(4)?),
    };
    bytes.checked_next_multiple_of(ALIGN)
}

/// First and last node of each value; column ranges count for the whole, and inputs are there from the first node on. Unused values have
/// `usize::MAX`.
fn lifetimes(circuit: &mut Circuit, keep: &[Value]) -> Vec<(usize, usize)> {
    let mut lives = vec![(usize::MAX, 0); circuit.values.len()];
    for index in 0..circuit.nodes.len() {
        let ports: Vec<(Port, Value)> = circuit.nodes[index].op.ports().into_iter().map(|(p, v)| (p, *v)).collect();
        for (port, value) in ports {
            let life = &mut lives[circuit.root(value).0 as usize];
            if port == Port::Out {
                life.0 = index;
            }
            life.1 = index;
        }
    }
    for value in &circuit.inputs {
        lives[value.0 as usize].0 = 0;
    }
    for value in keep.iter().chain([&circuit.output]) {
        lives[circuit.root(*value).0 as usize].1 = usize::MAX;
    }
    lives
}

/// Free ranges of the workspace, lowest offset first.
#[derive(Default)]
struct FreeList {
    ranges: Vec<(usize, usize)>,
    end: usize,
}

impl FreeList {
    /// The smallest range that fits, else fresh bytes at the end.
    fn take(&mut self, bytes: usize) -> usize {
        let best = (0..self.ranges.len()).filter(|&i| self.ranges[i].1 >= bytes).min_by_key(|&i| self.ranges[i].1);
        if let Some(i) = best {
            let (offset, len) = self.ranges[i];
            if len == bytes {
                self.ranges.remove(i);
            } else {
                self.ranges[i] = (offset + bytes, len - bytes);
            }
            return offset;
        }
        // A free range that touches the end grows instead of being stranded.
        if let Some(&(offset, len)) = self.ranges.last()
            && offset + len == self.end
        {
            self.ranges.pop();
            self.end = offset + bytes;
            return offset;
        }
        let offset = self.end;
        self.end += bytes;
        offset
    }

    fn give(&mut self, offset: usize, bytes: usize) {
        let at = self.ranges.partition_point(|r| r.0 < offset);
        self.ranges.insert(at, (offset, bytes));
        let mut i = at.saturating_sub(1);
        while i + 1 < self.ranges.len() && i <= at {
            if self.ranges[i].0 + self.ranges[i].1 == self.ranges[i + 1].0 {
                self.ranges[i].1 += self.ranges[i + 1].1;
                self.ranges.remove(i + 1);
            } else {
                i += 1;
            }
        }
    }
}

impl Layout {
    /// First byte and the byte after the last of a whole value.
    pub fn span(&self, value: Value) -> (usize, usize) {
        let slot = self.slots[value.0 as usize];
        let rows = if slot.rows == Rows::All { self.max_rows } else { self.max_sequences };
        (slot.offset, slot.offset + value_bytes(rows, slot.width, slot.kind).unwrap_or(0))
    }
}
