//! Experts that stay in their file.

use super::filling::{Scratch, fill};
use super::pack::{find, oriented};
use crate::backend::cpu::pack::{LANES, Layout, Packed};
use crate::error::{Error, Result};
use crate::ops::{ExpertCache, PagedExperts, PanelSource, Weight};
use crate::weights::{Checkpoint, FileBytes, Part, Pick, Role, Source, Stored, WeightSpec};
use crate::{bail, ensure};
use std::ops::Range;
use std::sync::Arc;

/// Rows of one expert's part at a time, out of the file (see [`PagedExperts`]).
struct InFileExperts {
    /// By expert and part.
    parts: Vec<Vec<PagedPart>>,
    cols: usize,
}

/// Rows of an expert, left in their file.
struct PagedPart {
    stored: Stored,
    /// As it reads the tensor.
    part: Part,
    layout: Layout,
    /// For messages.
    file: Option<Arc<FileBytes>>,
}

impl PanelSource for InFileExperts {
    fn pack(&self, expert: usize, part: usize, rows: Range<usize>) -> Result<Packed> {
        let PagedPart { stored, part, layout, file } = &self.parts[expert][part];
        let pack = || {
            let mut packed = Packed::new(*layout, rows.len(), self.cols)?;
            let mut scratch = Scratch::default();
            for (panel, start) in packed.panels_mut().zip(rows.clone().step_by(LANES)) {
                fill(stored, part, *layout, self.cols, start..(start + LANES).min(rows.end), panel, &mut scratch)?;
            }
            Ok(packed)
        };
        pack().map_err(|e: Error| {
            let file = file.as_ref().map_or("the checkpoint", |file| file.label());
            e.context(format!("{file}: {}, rows {rows:?} of expert {expert}", part.tensor)).named(&part.tensor)
        })
    }
}

/// Whether a weight's experts can stay in their file: not where inputs are stored first, since a panel's rows then cross all of it.
pub(super) fn pageable(checkpoint: &Checkpoint, spec: &WeightSpec) -> Result<bool> {
    // Matrices that every token meets (those of heads) gain nothing from staying in the file.
    if spec.role != Role::Experts || spec.active >= spec.experts() {
        return Ok(false);
    }
    for part in spec.parts() {
        if matches!(part.pick, Pick::Transposed { .. })
            && matches!(oriented(part, &find(checkpoint, &part.tensor)?).pick, Pick::Transposed { .. })
        {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The experts of a weight, left in their file.
pub(super) fn weight(checkpoint: &Checkpoint, spec: &WeightSpec, layouts: &[Layout], cache: &Arc<ExpertCache>) -> Result<Weight> {
    let Source::Experts(experts) = &spec.source else { bail!(Internal, "{}: no experts to leave in their file", spec.name) };
    let mut layouts = layouts.iter().copied();
    let mut parts = crate::error::vec_with_capacity(experts.len(), "the list of experts")?;
    // Experts may differ in format; a place is as large as the largest.
    let mut most = 0;
    for own in experts {
        let mut list = Vec::with_capacity(own.len());
        for (part, layout) in own.iter().zip(layouts.by_ref()) {
            let stored = find(checkpoint, &part.tensor)?;
            let part = oriented(part, &stored);
            let file = checkpoint.locate(&part.tensor).map(|(file, _)| file);
            list.push(PagedPart { stored, part, layout, file });
        }
        most = most.max(list.iter().map(|own| Packed::bytes(own.layout, own.part.rows, spec.cols).unwrap_or(0) as u64).sum());
        parts.push(list);
    }
    let rows = |list: &Vec<PagedPart>| list.iter().map(|own| own.part.rows).collect::<Vec<_>>();
    let first = parts.first().map(rows).unwrap_or_default();
    ensure!(parts.iter().all(|list| rows(list) == first), Internal, "{}: experts are put together from different parts", spec.name);
    let (count, source) = (parts.len(), Box::new(InFileExperts { parts, cols: spec.cols }));
    Ok(Weight::Paged(PagedExperts::new(source, count, first, spec.cols, most, cache)))
}
