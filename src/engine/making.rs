//! One weight on its way from the checkpoint into memory: tensor after tensor, and within a large one a slice of panels at a
//! time, so that a load can stop between slices.

use super::late;
use super::pack::{self, Packing, Supply};
use crate::backend::cpu::arena::Region;
use crate::backend::cpu::late::Desk;
use crate::backend::cpu::pack::{Layout, Packed};
use crate::backend::cpu::pool::Pool;
use crate::error::{Result, vec_with_capacity};
use crate::ops::{Matrix, Weight};
use crate::weights::{Part, Role, Source, WeightSpec};
use std::sync::Arc;

/// Who makes weights, and where they go.
pub(super) struct Room<'a> {
    pub pool: &'a Pool,
    pub region: &'a Arc<Region>,
    /// Whether tables that rows are looked up in are packed too.
    pub packs_rows: bool,
    /// For those that wait until they are used.
    pub late: Option<&'a Arc<Desk>>,
}

/// How far a weight is.
#[derive(Default)]
pub(super) struct Making {
    /// Finished matrices: of an expert weight one each, else none.
    experts: Vec<Matrix>,
    /// Finished parts of the matrix being made.
    parts: Vec<Packed>,
    /// The part being made.
    current: Option<Packing>,
    /// Parts finished, of all experts.
    count: usize,
    /// Bytes of finished parts.
    bytes: u64,
}

impl Making {
    /// Bytes made so far.
    pub fn bytes(&self) -> u64 {
        self.bytes + self.current.as_ref().map_or(0, Packing::bytes)
    }

    /// Makes about `most` more bytes, at least one panel. The weight, once it is whole.
    pub fn step(&mut self, supply: &Supply, spec: &WeightSpec, layouts: &[Layout], room: &Room<'_>, most: usize) -> Result<Option<Weight>> {
        let parts = match (&spec.source, spec.role) {
            (Source::Tensors(parts), Role::Matrix | Role::Experts) => parts,
            (Source::Tensors(parts), Role::Rows) if room.packs_rows => parts,
            (Source::Experts(experts), _) => match experts.get(self.experts.len()) {
                Some(parts) => parts,
                None => return Ok(Some(Weight::Experts(std::mem::take(&mut self.experts)))),
            },
            _ => return pack::read(supply, spec).map(Some),
        };
        if let (Some(part), Some(layout)) = (parts.get(self.parts.len()), layouts.get(self.count)) {
            self.part(supply, part, spec.cols, *layout, room, most).map_err(|e| e.context(&part.tensor))?;
        }
        if self.parts.len() < parts.len() && self.count < layouts.len() {
            return Ok(None);
        }
        let matrix = Matrix { parts: std::mem::take(&mut self.parts) };
        let Source::Experts(experts) = &spec.source else { return Ok(Some(Weight::Matrix(matrix))) };
        if self.experts.is_empty() {
            self.experts = vec_with_capacity(experts.len(), "the list of experts")?;
        }
        self.experts.push(matrix);
        Ok((self.experts.len() == experts.len()).then(|| Weight::Experts(std::mem::take(&mut self.experts))))
    }

    fn part(&mut self, supply: &Supply, part: &Part, cols: usize, layout: Layout, room: &Room<'_>, most: usize) -> Result<()> {
        if self.current.is_none() {
            if let Some(desk) = room.late
                && let Some(packed) = late::matrix(supply, part, cols, layout, room.region, desk)?
            {
                self.bytes += packed.len() as u64;
                self.parts.push(packed);
                self.count += 1;
                return Ok(());
            }
            self.current = Some(Packing::new(supply, part, cols, layout, room.pool, room.region)?);
        }
        let Some(packing) = &mut self.current else { return Ok(()) };
        if !packing.is_done() {
            packing.step(supply, most, room.pool)?;
        }
        if packing.is_done()
            && let Some(packing) = self.current.take()
        {
            self.bytes += packing.bytes();
            self.parts.push(packing.finish());
            self.count += 1;
        }
        Ok(())
    }
}
