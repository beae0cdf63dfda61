//! Weights on their way to a device. Of matrices that stay there alone a buffer of staging is filled at a time: while one is on its way the next is
//! filled, so that a load takes as long as the slower of the two. Rows of 16-bit floats go as they are stored, and the device packs them; others are
//! packed on the way. What does not stay there alone is made here first.

use super::filling::{Filling, Scratch};
use super::fingerprint::{Fingerprint, Maker};
use super::pack::{self, Supply};
use super::placement::{Keep, Location};
use super::plan::Plan;
use super::prepare::Prepared;
use super::stored;
use crate::backend::cpu::pack::{LANES, Layout, Packed, SUPER};
use crate::backend::cpu::pool::Pool;
use crate::backend::cuda::{Device, Stream};
use crate::circuit::{DeviceWeights, Pieces, Staging};
use crate::error::{Result, reserve};
use crate::ops::{self, GpuWeight, Weight};
use crate::weights::{Part, Pick, Role, Source, WeightSpec};
use std::ops::Range;
use std::sync::{Arc, Mutex};

/// A device that weights go to, with the fingerprint that they make as they pass.
pub(super) struct Sending {
    stream: Arc<Stream>,
    weights: DeviceWeights,
    fingerprint: Maker,
    /// Of the weight under way: the part that is, those that are there, and the bytes of these.
    current: Option<Current>,
    sent: Vec<ops::Part>,
    bytes: u64,
}

/// Bytes of panels that a worker packs at a time, if they are as small.
const FEW: usize = 64 << 10;

/// A part under way to an address of the device, with the rows of its weight before it.
struct Current {
    filling: Filling,
    address: u64,
    before: usize,
    /// Whether the device packs it.
    as_stored: bool,
}

impl Sending {
    pub fn new(device: &Arc<Device>, prepared: &Prepared, plan: &Plan) -> Result<Sending> {
        let stream = Arc::new(Stream::new(device, prepared.options.low_priority)?);
        let bytes = |planned: u64| usize::try_from(planned).unwrap_or(usize::MAX);
        // Pages, states and workspaces come when all weights are there; until then their room is spare.
        let spare = plan.device.total().saturating_sub(plan.device.weights);
        let weights = DeviceWeights::new(&stream, bytes(plan.device.weights))?.with_spare(bytes(spare));
        Ok(Sending { stream, weights, fingerprint: Maker::new(prepared), current: None, sent: Vec::new(), bytes: 0 })
    }

    /// Bytes of the weight under way that are there.
    pub fn bytes(&self) -> u64 {
        self.bytes + self.current.as_ref().map_or(0, |current| current.filling.bytes())
    }

    /// Whether a weight can be sent by pieces: nothing of it stays here but rows as they are stored.
    pub fn packs(spec: &WeightSpec, layouts: &[Layout], place: Location) -> bool {
        let is_matrix = match spec.source {
            Source::Tensors(_) => matches!(spec.role, Role::Matrix | Role::Experts | Role::Rows),
            Source::Experts(_) => true,
            Source::Constant(_) => false,
        };
        let fits = |layout: &Layout| layout.panel_bytes(spec.cols).is_some_and(|bytes| (1..=Staging::BYTES).contains(&bytes));
        place.device && place.host != Keep::Whole && is_matrix && spec.parts().count() == layouts.len() && layouts.iter().all(fits)
    }

    /// Sends about `most` bytes more of such a weight, at least a panel. Once all of it is: its bytes, and what of it stays here.
    pub fn step(
        &mut self,
        supply: &Supply,
        (spec, layouts, place): (&WeightSpec, &[Layout], Location),
        pool: &Pool,
        most: usize,
    ) -> Result<Option<(usize, Weight)>> {
        if let Some((part, layout)) = spec.parts().zip(layouts).nth(self.sent.len()) {
            self.part(supply, spec, part, *layout, pool, most).map_err(|e| e.context(&part.tensor))?;
        }
        if self.sent.len() < layouts.len() {
            return Ok(None);
        }
        let mut sent = std::mem::take(&mut self.sent).into_iter();
        let weight = match &spec.source {
            Source::Experts(experts) => {
                let parts = experts.iter().map(|parts| from_first(sent.by_ref().take(parts.len()).collect())).collect();
                ops::experts_of(parts, &mut self.weights)?
            }
            _ => GpuWeight::Matrix(from_first(sent.collect())),
        };
        self.weights.push_sent(weight)?;
        let bytes = std::mem::take(&mut self.bytes) as usize;
        let kept = match (place.host, &spec.source) {
            (Keep::Rows, Source::Tensors(parts)) => stored::rows(supply, parts, spec.cols)?,
            _ => Weight::OnDevice(bytes),
        };
        Ok(Some((bytes, kept)))
    }

    fn part(&mut self, supply: &Supply, spec: &WeightSpec, part: &Part, layout: Layout, pool: &Pool, most: usize) -> Result<()> {
        let cols = spec.cols;
        let (panel_bytes, bytes) = (layout.panel_bytes(cols).unwrap_or(1), Packed::bytes(layout, part.rows, cols).unwrap_or(usize::MAX));
        if self.current.is_none() {
            if self.sent.is_empty() {
                self.begin(supply, spec)?;
            }
            let filling = Filling::new(supply, part, cols, layout, pool)?;
            let before = self.sent.iter().map(|part| part.rows as usize).sum();
            let as_stored = filling.is_as_stored() && self.weights.most_rows(cols) > 0;
            self.current = Some(Current { filling, address: self.weights.take(bytes, "packed weights")?, before, as_stored });
        }
        let Some(Current { filling, address, before, as_stored }) = &mut self.current else { return Ok(()) };
        let (rows, done, first, before) = (filling.rows(), filling.bytes(), filling.panels, *before);
        let (count, pick) = ((most / panel_bytes).max(1).min(part.rows.div_ceil(LANES) - first), filling.part.pick);
        let give_back = |read: Range<usize>| {
            if let (Supply::Checkpoint(checkpoint), Pick::Whole) = (supply, pick) {
                checkpoint.release_part(&part.tensor, rows + read.start..part.rows.min(rows + read.end), part.rows);
            }
        };
        if *as_stored {
            let next = rows..part.rows.min(rows + count * LANES);
            let decode = |row, out: &mut [f32]| filling.decode_row(row - before, out);
            let (fingerprint, passed) = (&mut self.fingerprint, before + next.start..before + next.end);
            let pass = Mutex::new(Some(move || fingerprint.pass(passed, decode)));
            let copy = |piece: Range<usize>, to: &mut [u8]| {
                filling.copy(next.start + piece.start..next.start + piece.end, to, DeviceWeights::stride(cols));
                // One of the first, while others go on.
                let pass = pass.try_lock().ok().and_then(|mut pass| pass.take());
                pass.map_or(Ok(()), |pass| pass())
            };
            self.weights.send_rows(*address + done, layout, (next.len(), cols), pool, copy, give_back)?;
        } else {
            // Few panels go one by one, so that every worker has some.
            let few = (FEW / panel_bytes).min(count / (4 * pool.count())).max(1);
            let pieces = Pieces::new(count * panel_bytes, few * panel_bytes);
            let fill = |scratch: &mut Scratch, piece: usize, to: &mut [u8]| {
                if !cols.is_multiple_of(SUPER) {
                    // A row's last codes are half of what is stored together; nobody writes the other half.
                    to.fill(0);
                }
                let mut panels = (first + piece * few..).zip(to.chunks_exact_mut(panel_bytes));
                panels.try_for_each(|(index, panel)| filling.panel(supply, index, panel, scratch))
            };
            let fingerprint = &mut self.fingerprint;
            let rows_of = |bytes: Range<usize>| bytes.start / panel_bytes * LANES..bytes.end / panel_bytes * LANES;
            self.weights.send(
                *address + done,
                pieces,
                pool,
                fill,
                |bytes| give_back(rows_of(bytes)),
                |sent, bytes| {
                    let (first, end) = (rows + rows_of(sent.clone()).start, part.rows.min(rows + rows_of(sent).end));
                    fingerprint.pass(before + first..before + end, |row, out| {
                        let row = row - before - first;
                        layout.decode(&bytes[row / LANES * panel_bytes..][..panel_bytes], row % LANES, out);
                        Ok(())
                    })
                },
            )?;
        }
        filling.panels += count;
        if filling.is_done() {
            reserve(&mut self.sent, 1, "the list of a weight's parts")?;
            self.sent.push(ops::part_of(layout, part.rows, cols, panel_bytes, 0, *address));
            self.bytes += bytes as u64;
            self.current = None;
        }
        Ok(())
    }

    /// Begins a weight in the fingerprint, which is that of the same model on the processor: tables of rows are not packed there.
    fn begin(&mut self, supply: &Supply, spec: &WeightSpec) -> Result<()> {
        match (spec.role, supply) {
            (Role::Rows, Supply::Checkpoint(_)) => self.fingerprint.add(spec, &pack::read(supply, spec)?),
            _ => self.fingerprint.begin(spec),
        }
    }

    /// Puts a weight there if it belongs there; what of it stays here.
    pub fn put(&mut self, supply: &Supply, spec: &WeightSpec, place: Location, weight: Weight) -> Result<Weight> {
        match (spec.role, supply) {
            (Role::Rows, Supply::Checkpoint(_)) => self.begin(supply, spec)?,
            _ => self.fingerprint.add(spec, &weight)?,
        }
        if !place.device {
            self.weights.push_none()?;
            return Ok(weight);
        }
        self.weights.push(&weight)?;
        match (place.host, &spec.source) {
            (Keep::Rows, Source::Tensors(parts)) => stored::rows(supply, parts, spec.cols),
            (Keep::Nothing, _) => Ok(Weight::OnDevice(weight.bytes())),
            _ => Ok(weight),
        }
    }

    /// Waits for what is on its way.
    pub fn finish(mut self) -> Result<(Arc<Stream>, DeviceWeights, Fingerprint)> {
        self.weights.finish()?;
        Ok((self.stream, self.weights, self.fingerprint.end()))
    }
}

/// The parts of one matrix, each with the number of rows before it.
fn from_first(mut parts: Vec<ops::Part>) -> Vec<ops::Part> {
    let mut first = 0;
    for part in &mut parts {
        part.first = first;
        first += part.rows;
    }
    parts
}
