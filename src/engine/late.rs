//! Which weights a load leaves in their file until they are used a second time, and how they are had then.

use super::filling::{Scratch, fill};
use super::pack::{Supply, find, oriented};
use super::prepare::Prepared;
use crate::backend::cpu::arena::{Buffer, Region};
use crate::backend::cpu::late::{Desk, GROUP, Rows};
use crate::backend::cpu::pack::{LANES, Layout, Packed};
use crate::backend::cpu::simd;
use crate::error::{Result, vec_with_capacity};
use crate::runtime::Class;
use crate::tensor::DType;
use crate::weights::{FileBytes, Form, Part, Pick, Stored};
use std::ops::Range;
use std::sync::Arc;

/// Bytes of packed weights from which on a load leaves some for later: what memory costs is not noticed below.
pub(super) const LEAST: u64 = 32 << 20;

/// Rows in their file.
struct InFile {
    stored: Stored,
    /// As it reads the tensor.
    part: Part,
    layout: Layout,
    cols: usize,
    file: Option<Arc<FileBytes>>,
}

impl InFile {
    fn row(&self, row: usize) -> &[u8] {
        self.stored.plain_row(self.part.stored(row), self.cols)
    }
}

impl Rows for InFile {
    fn fill(&self, panel: usize, out: &mut [u8]) {
        let rows = panel * LANES..(panel + 1) * LANES;
        let done = fill(&self.stored, &self.part, self.layout, self.cols, rows, out, &mut Scratch::default());
        done.expect("only what is unusual takes memory, and types were compared when the weight was made");
    }

    fn filled(&self, panels: Range<usize>) {
        let Some(file) = &self.file else { return };
        let (start, bytes) = (file.bytes().as_ptr().addr(), panels.len() * LANES * self.row(0).len());
        let rows = || (panels.start * LANES..panels.end * LANES).map(|row| self.row(row));
        let first = rows().map(|row| row.as_ptr().addr()).min().unwrap_or(start) - start;
        let end = rows().map(|row| row.as_ptr().addr() + row.len()).max().unwrap_or(start) - start;
        // Where rows are far apart, others lie between them.
        if end - first <= 2 * bytes {
            file.release(first..end);
        }
    }
}

/// Whether panels of this type are filled as fast as memory is read, in this process.
fn is_fast(dtype: DType, layout: Layout) -> bool {
    // One block of every type.
    const COLS: usize = 256;
    let (row, mut panel) = ([0u8; COLS * 4], [0u8; COLS * 4 * LANES]);
    let row = dtype.bytes(COLS).and_then(|n| row.get(..n));
    let panel = layout.panel_bytes(COLS).and_then(|n| panel.get_mut(..n));
    row.zip(panel).is_some_and(|(row, panel)| simd::table().fill(dtype, layout, COLS, &[row; LANES], panel))
}

/// The matrix of a part that can wait; `None` for one that is to be packed now.
pub(super) fn matrix(
    supply: &Supply,
    part: &Part,
    cols: usize,
    layout: Layout,
    region: &Arc<Region>,
    desk: &Arc<Desk>,
) -> Result<Option<Packed>> {
    let Supply::Checkpoint(checkpoint) = supply else { return Ok(None) };
    let stored = find(checkpoint, &part.tensor)?;
    let oriented = oriented(part, &stored);
    let Form::Plain(dtype) = stored.form() else { return Ok(None) };
    let whole = part.rows.is_multiple_of(LANES) && cols.is_multiple_of(32) && !matches!(oriented.pick, Pick::Transposed { .. });
    if !whole || !is_fast(dtype, layout) {
        return Ok(None);
    }
    let packed = Packed::new_in(layout, part.rows, cols, Some(region))?;
    let file = checkpoint.locate(&part.tensor).map(|(file, _)| file);
    packed.filled_late(Box::new(InFile { stored, part: oriented, layout, cols, file }), desk).map(Some)
}

/// Buffers for products of `threads` threads with weights that wait; `None` where all of them are packed by the load.
pub(super) fn desk(prepared: &Prepared, threads: usize, region: u64) -> Result<Option<Arc<Desk>>> {
    if region < prepared.options.late_bytes()?.unwrap_or(LEAST) {
        return Ok(None);
    }
    let specs = prepared.declarations.weights.iter().zip(&prepared.layouts).enumerate();
    let host = specs.filter(|(index, _)| !prepared.placement.weights[*index].device);
    let groups = host.flat_map(|(_, (spec, layouts))| {
        let bytes = |(part, layout): (&Part, &Layout)| {
            layout.panel_bytes(spec.cols).unwrap_or(0).saturating_mul(part.rows.div_ceil(LANES).min(GROUP))
        };
        spec.parts().zip(layouts).map(bytes).max()
    });
    let most = groups.max().unwrap_or(0);
    if most == 0 {
        return Ok(None);
    }
    let mut buffers = vec_with_capacity(threads, "a list of buffers")?;
    for _ in 0..threads {
        buffers.push(Buffer::of(Class::Weights, most, "a buffer for weights that are used once")?);
    }
    Ok(Some(Arc::new(Desk::new(buffers))))
}
