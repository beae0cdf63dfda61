//! From a checkpoint's tensors to weights as operations use them: panels filled in parallel, vectors decoded.

use super::layouts::layout_for;
use super::stored;
use super::synthetic::Random;
use crate::backend::cpu::arena::Region;
use crate::backend::cpu::pack::{CodeRow, F8_RUN, F8Row, LANES, Layout, Packed};
use crate::backend::cpu::pool::Pool;
use crate::backend::cpu::simd;
use crate::bail;
use crate::error::{Error, Kind, Result, vec_filled};
use crate::ops::Weight;
use crate::options::Compute;
use crate::quant::{self, Unpacked};
use crate::tensor::DType;
use crate::weights::{Checkpoint, CodeForm, Form, Part, Pick, Role, Source, Stored, WeightSpec};
use std::ops::Range;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, PoisonError};

/// Where bytes come from: the checkpoint, or a generator.
pub(super) enum Supply {
    Checkpoint(Arc<Checkpoint>),
    Random(Random),
}

/// Reads a weight that is not a matrix; [`Packing`] makes those.
pub(super) fn read(supply: &Supply, spec: &WeightSpec) -> Result<Weight> {
    match (&spec.source, spec.role) {
        (Source::Constant(values), _) => Ok(Weight::Vector(values.clone())),
        (Source::Tensors(parts), Role::Vector { add }) => vector(supply, parts, add).map(Weight::Vector),
        (Source::Tensors(parts), Role::Rows) => stored::rows(supply, parts, spec.cols),
        (Source::Tensors(_) | Source::Experts(_), _) => bail!(Internal, "{}: is a matrix", spec.name),
    }
}

pub(super) fn find(checkpoint: &Checkpoint, name: &str) -> Result<Stored> {
    checkpoint.stored(name)?.ok_or_else(|| Error::new(Kind::CorruptFile, format!("the checkpoint has no tensor {name}")).named(name))
}

/// The part as it reads a tensor that is stored output-major where its plain form is input-major: rows are then rows.
pub(super) fn oriented(part: &Part, stored: &Stored) -> Part {
    let mut part = part.clone();
    if let (true, Pick::Transposed { of: [count, cols, rows], index, first, step, from: 0 }) = (stored.output_major, part.pick) {
        part.pick = Pick::Slice { of: [count, rows, cols], index, first, step };
    }
    part
}

fn vector(supply: &Supply, parts: &[Part], add: f32) -> Result<Vec<f32>> {
    let len = parts.iter().map(|p| p.rows).sum();
    let mut out = vec_filled(len, 0.0, "a vector of weights")?;
    let mut at = 0;
    // Biases of experts are many parts of one tensor.
    let mut last: (&str, Vec<f32>) = ("", Vec::new());
    for part in parts {
        let piece = &mut out[at..at + part.rows];
        match supply {
            Supply::Checkpoint(checkpoint) => {
                if last.0 != part.tensor {
                    last = (&part.tensor, find(checkpoint, &part.tensor)?.values()?);
                }
                let stored = &last.1;
                piece.iter_mut().enumerate().for_each(|(row, v)| *v = stored[part.stored(row)]);
            }
            Supply::Random(random) => random.vector(&part.tensor, piece),
        }
        at += part.rows;
    }
    out.iter_mut().for_each(|v| *v += add);
    Ok(out)
}

/// One tensor on its way into panels in memory, some of them at a time.
pub(super) struct Packing {
    packed: Packed,
    filling: Filling,
    /// Shares of the tensor's bytes that went back to the system.
    given_back: usize,
}

impl Packing {
    /// Finds the tensor and makes room, in `region` where that has some left.
    pub fn new(supply: &Supply, part: &Part, cols: usize, layout: Layout, pool: &Pool, region: &Arc<Region>) -> Result<Packing> {
        let packed = Packed::new_in(layout, part.rows, cols, Some(region))?;
        Ok(Packing { packed, filling: Filling::new(supply, part, cols, layout, pool)?, given_back: 0 })
    }

    /// Whether every panel is full.
    pub fn is_done(&self) -> bool {
        self.filling.is_done()
    }

    /// Bytes of full panels.
    pub fn bytes(&self) -> u64 {
        self.filling.bytes()
    }

    /// The matrix, once it is done.
    pub fn finish(self) -> Packed {
        self.packed
    }

    /// Fills panels of about `most` bytes, at least one.
    pub fn step(&mut self, supply: &Supply, most: usize, pool: &Pool) -> Result<()> {
        let (first, count) = (self.filling.panels, (most / self.packed.panel_bytes().max(1)).max(1));
        self.filling.step(supply, self.packed.panels_mut().skip(first).take(count), pool)?;
        self.give_back(supply, pool)
    }

    /// Gives back what was read of a large tensor, which would else be in memory twice by its end.
    fn give_back(&mut self, supply: &Supply, pool: &Pool) -> Result<()> {
        let (part, shares) = (&self.filling.part, self.packed.len() / SHARE);
        let (Supply::Checkpoint(checkpoint), Pick::Whole, 2..) = (supply, part.pick, shares) else { return Ok(()) };
        let read = (self.filling.rows() as u128 * shares as u128 / part.rows.max(1) as u128) as usize;
        let (first, counter) = (self.given_back, AtomicUsize::new(0));
        self.given_back = read.max(first);
        pool.run(&|worker| {
            worker.each(&counter, self.given_back - first, 1, |range| {
                range.for_each(|share| checkpoint.release_share(&part.tensor, first + share, shares));
            });
        })
    }
}

/// Bytes of panels whose rows of the tensor go back to the system together.
const SHARE: usize = 4 << 20;

/// A tensor whose panels are filled one after the other, wherever they lie.
pub(super) struct Filling {
    layout: Layout,
    cols: usize,
    panel_bytes: usize,
    /// Where the values are; `None` for random ones.
    tensor: Option<Stored>,
    /// The part as it reads the tensor.
    part: Part,
    /// A transposed part's values as rows.
    columns: Option<Vec<f32>>,
    /// Panels that are full.
    panels: usize,
}

impl Filling {
    /// Finds the tensor.
    pub fn new(supply: &Supply, part: &Part, cols: usize, layout: Layout, pool: &Pool) -> Result<Filling> {
        let tensor = match supply {
            Supply::Checkpoint(checkpoint) => Some(find(checkpoint, &part.tensor)?),
            Supply::Random(_) => None,
        };
        let part = tensor.as_ref().map_or_else(|| part.clone(), |stored| oriented(part, stored));
        let columns = match (&tensor, part.pick) {
            (Some(stored), Pick::Transposed { of, index, from, .. }) => {
                Some(columns(stored, &part, of[2], index * of[1] + from, cols, pool)?)
            }
            _ => None,
        };
        let panel_bytes = layout.panel_bytes(cols).unwrap_or(0);
        Ok(Filling { layout, cols, panel_bytes, tensor, part, columns, panels: 0 })
    }

    /// Whether every panel is full.
    pub fn is_done(&self) -> bool {
        self.panels * LANES >= self.part.rows
    }

    /// Rows whose panels are full.
    pub fn rows(&self) -> usize {
        (self.panels * LANES).min(self.part.rows)
    }

    /// Bytes of full panels.
    pub fn bytes(&self) -> u64 {
        (self.panels * self.panel_bytes) as u64
    }

    /// Fills the next panels, shared among the pool's workers: as many as are given and left.
    pub fn step<'a>(&mut self, supply: &Supply, panels: impl Iterator<Item = &'a mut [u8]>, pool: &Pool) -> Result<()> {
        let (layout, cols, first) = (self.layout, self.cols, self.panels);
        let (tensor, part, columns) = (&self.tensor, &self.part, &self.columns);
        let panels: Vec<Mutex<&mut [u8]>> = panels.take(part.rows.div_ceil(LANES) - first).map(Mutex::new).collect();
        let counter = AtomicUsize::new(0);
        let failure: Mutex<Option<Error>> = Mutex::new(None);
        // Few panels go one by one, so that every worker has some.
        let each = (panels.len() / (4 * pool.count())).clamp(1, 4);
        pool.run(&|worker| {
            let mut scratch = Scratch::default();
            worker.each(&counter, panels.len(), each, |range| {
                for place in range {
                    let index = first + place;
                    let rows = index * LANES..((index + 1) * LANES).min(part.rows);
                    let mut panel = panels[place].lock().unwrap_or_else(PoisonError::into_inner);
                    let done = match (tensor, supply) {
                        (Some(_), _) if columns.is_some() && layout.is_integer() => {
                            let values = columns.as_deref().unwrap_or_default();
                            scratch
                                .rows(rows.len(), cols)
                                .map(|out| out.copy_from_slice(&values[rows.start * cols..rows.end * cols]))
                                .and_then(|()| fill_values(DType::Q8_0, layout, cols, rows.len(), &mut panel, &mut scratch))
                        }
                        (Some(_), _) if columns.is_some() => {
                            let values = columns.as_deref().unwrap_or_default();
                            let rows: Vec<&[f32]> = rows.map(|row| &values[row * cols..][..cols]).collect();
                            layout.fill_f32(cols, &mut panel, &rows)
                        }
                        (Some(stored), _) => fill(stored, part, layout, cols, rows, &mut panel, &mut scratch),
                        (None, Supply::Random(random)) => scratch
                            .rows(rows.len(), cols)
                            .map(|values| {
                                for (lane, row) in values.chunks_mut(cols).enumerate() {
                                    random.matrix_row(&part.tensor, part.stored(index * LANES + lane), row);
                                }
                            })
                            .and_then(|()| fill_values(random.dtype, layout, cols, rows.len(), &mut panel, &mut scratch)),
                        (None, Supply::Checkpoint(_)) => Ok(()),
                    };
                    if let Err(e) = done {
                        failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
                    }
                }
            });
        })?;
        let filled = panels.len();
        drop(panels);
        match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some(e) => Err(e),
            None => {
                self.panels += filled;
                Ok(())
            }
        }
    }
}

/// A worker's buffers.
#[derive(Default)]
pub(super) struct Scratch {
    values: Vec<f32>,
    halves: Vec<u16>,
    codes: Vec<i8>,
    scale: Vec<f32>,
    min: Vec<f32>,
    stored: Vec<u8>,
}

/// Resizes a buffer that is used again.
fn sized<T: Clone + Default>(v: &mut Vec<T>, n: usize) -> Result<&mut [T]> {
    let more = n.saturating_sub(v.len());
    crate::error::reserve(v, more, "a buffer for packing weights")?;
    v.resize(n, T::default());
    Ok(v)
}

impl Scratch {
    fn rows(&mut self, rows: usize, cols: usize) -> Result<&mut [f32]> {
        sized(&mut self.values, rows * cols)
    }
}

/// A transposed part as rows in f32: stored rows are decoded one by one, and the part's columns of each kept.
fn columns(tensor: &Stored, part: &Part, width: usize, start: usize, cols: usize, pool: &Pool) -> Result<Vec<f32>> {
    const STRIP: usize = 64;
    let mut values = vec_filled(part.rows.saturating_mul(cols), 0.0f32, "a transposed matrix")?;
    // Each worker decodes a strip of stored rows and writes it as a strip of every output row.
    let rows: Vec<Mutex<Vec<&mut [f32]>>> = {
        let mut strips: Vec<Vec<&mut [f32]>> = (0..cols.div_ceil(STRIP)).map(|_| Vec::with_capacity(part.rows)).collect();
        for row in values.chunks_mut(cols.max(1)) {
            row.chunks_mut(STRIP).zip(&mut strips).for_each(|(piece, strip)| strip.push(piece));
        }
        strips.into_iter().map(Mutex::new).collect()
    };
    let (counter, failure) = (AtomicUsize::new(0), Mutex::new(None));
    pool.run(&|worker| {
        let mut stored = vec![0.0f32; width];
        worker.each(&counter, rows.len(), 1, |range| {
            for strip in range {
                let mut out = rows[strip].lock().unwrap_or_else(PoisonError::into_inner);
                for k in 0..STRIP.min(cols - strip * STRIP) {
                    if let Err(e) = tensor.decode_row(start + strip * STRIP + k, &mut stored) {
                        failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
                        return;
                    }
                    out.iter_mut().enumerate().for_each(|(row, piece)| piece[k] = stored[part.stored(row)]);
                }
            }
        });
    })?;
    drop(rows);
    match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(e) => Err(e),
        None => Ok(values),
    }
}

/// Fills one panel from stored rows.
pub(super) fn fill(
    stored: &Stored,
    part: &Part,
    layout: Layout,
    cols: usize,
    rows: Range<usize>,
    panel: &mut [u8],
    scratch: &mut Scratch,
) -> Result<()> {
    if let Form::Plain(dtype) = stored.form()
        && rows.len() == LANES
        && simd::table().fill(
            dtype,
            layout,
            cols,
            &std::array::from_fn(|lane| stored.plain_row(part.stored(rows.start + lane), cols)),
            panel,
        )
    {
        return Ok(());
    }
    match (stored.form(), layout) {
        // Asked for by a precision rule, not what the checkpoint's own codes become.
        (form, super::precision::Q8_0) if !layout_for(form, cols, Compute::Fast).is_ok_and(|own| own == layout) => {
            for (row, values) in rows.clone().zip(scratch.rows(rows.len(), cols)?.chunks_mut(cols)) {
                stored.decode_row(part.stored(row), values)?;
            }
            fill_values(DType::Q8_0, layout, cols, rows.len(), panel, scratch)
        }
        (Form::Plain(dtype), _)
            if layout.is_integer() || matches!((dtype, layout), (DType::BF16, Layout::Bf16) | (DType::F16, Layout::F16)) =>
        {
            let row = |lane| if rows.start + lane < rows.end { stored.plain_row(part.stored(rows.start + lane), cols) } else { &[] };
            let stored: [&[u8]; LANES] = std::array::from_fn(row);
            fill_stored(dtype, layout, cols, &stored[..rows.len()], panel, scratch)
        }
        (_, Layout::F8) => fill_f8(stored, part, cols, rows, panel, scratch),
        (Form::Codes(form), _) if layout.is_integer() => fill_codes(stored, form, part, layout, cols, rows, panel, scratch),
        _ => {
            for (row, values) in rows.clone().zip(scratch.rows(rows.len(), cols)?.chunks_mut(cols)) {
                stored.decode_row(part.stored(row), values)?;
            }
            let rows: Vec<&[f32]> = scratch.values.chunks(cols).collect();
            layout.fill_f32(cols, panel, &rows)
        }
    }
}

/// Fills one integer panel from rows whose codes and scales are tensors of their own.
fn fill_codes(
    stored: &Stored,
    form: CodeForm,
    part: &Part,
    layout: Layout,
    cols: usize,
    rows: Range<usize>,
    panel: &mut [u8],
    scratch: &mut Scratch,
) -> Result<()> {
    let blocks = cols / form.block;
    let mins = if form.min { blocks } else { 0 };
    let codes = sized(&mut scratch.codes, rows.len() * cols)?;
    let scale = sized(&mut scratch.scale, rows.len() * blocks)?;
    let min = sized(&mut scratch.min, rows.len() * mins)?;
    let mut gains = [1.0f32; LANES];
    for (lane, row) in rows.clone().enumerate() {
        let codes = &mut codes[lane * cols..][..cols];
        gains[lane] =
            stored.code_row(part.stored(row), form, codes, &mut scale[lane * blocks..][..blocks], &mut min[lane * mins..][..mins])?;
    }
    let row = |lane: usize| CodeRow {
        codes: &codes[lane * cols..][..cols],
        scale: &scale[lane * blocks..][..blocks],
        min: &min[lane * mins..][..mins],
        gain: gains[lane],
    };
    let rows: Vec<CodeRow<'_>> = (0..rows.len()).map(row).collect();
    layout.fill_codes(cols, panel, &rows)
}

/// Fills one panel of 8-bit floats from rows that are such.
fn fill_f8(stored: &Stored, part: &Part, cols: usize, rows: Range<usize>, panel: &mut [u8], scratch: &mut Scratch) -> Result<()> {
    let runs = cols.div_ceil(F8_RUN);
    let mut scale = sized(&mut scratch.scale, rows.len() * runs)?.chunks_mut(runs);
    let rows: Vec<F8Row<'_>> =
        rows.zip(&mut scale).map(|(row, scale)| F8Row { codes: stored.f8_row(part.stored(row), cols, scale), scale }).collect();
    Layout::F8.fill_f8(cols, panel, &rows)
}

fn fill_stored(dtype: DType, layout: Layout, cols: usize, stored: &[&[u8]], panel: &mut [u8], scratch: &mut Scratch) -> Result<()> {
    let rows = stored.len();
    match layout {
        Layout::Bf16 | Layout::F16 => {
            let halves = sized(&mut scratch.halves, rows * cols)?;
            for (row, bytes) in halves.chunks_mut(cols).zip(stored) {
                for (v, b) in row.iter_mut().zip(bytes.chunks_exact(2)) {
                    *v = u16::from_le_bytes([b[0], b[1]]);
                }
            }
            let rows: Vec<&[u16]> = scratch.halves.chunks(cols).collect();
            layout.fill_u16(cols, panel, &rows)
        }
        Layout::F32 => {
            let values = sized(&mut scratch.values, rows * cols)?;
            for (row, bytes) in values.chunks_mut(cols).zip(stored) {
                quant::decode(dtype, bytes, row)?;
            }
            let rows: Vec<&[f32]> = scratch.values.chunks(cols).collect();
            layout.fill_f32(cols, panel, &rows)
        }
        _ => {
            let block = layout.block();
            let blocks = cols / block;
            sized(&mut scratch.codes, rows * cols)?;
            sized(&mut scratch.scale, rows * blocks)?;
            sized(&mut scratch.min, rows * blocks)?;
            let mut unpacked = Unpacked::new();
            // Formats with a table unpack to its values; the panel wants the codes.
            let codes = match layout {
                Layout::I4Table { table, .. } => Some(codes_of(&table)),
                _ => None,
            };
            for (lane, bytes) in stored.iter().enumerate() {
                for (index, bytes) in bytes.chunks_exact(dtype.block_bytes()).enumerate() {
                    quant::unpack(dtype, bytes, &mut unpacked)?;
                    if unpacked.sub_len != block {
                        bail!(Internal, "{dtype} has a scale per {}, {layout:?} one per {block}", unpacked.sub_len);
                    }
                    let (len, subs) = (unpacked.len, unpacked.len / block);
                    if let Some(codes) = &codes {
                        unpacked.codes[..len].iter_mut().for_each(|c| *c = codes[usize::from(*c as u8)]);
                    }
                    scratch.codes[lane * cols + index * len..][..len].copy_from_slice(&unpacked.codes[..len]);
                    scratch.scale[lane * blocks + index * subs..][..subs].copy_from_slice(&unpacked.scale[..subs]);
                    scratch.min[lane * blocks + index * subs..][..subs].copy_from_slice(&unpacked.min[..subs]);
                }
            }
            let rows: Vec<CodeRow<'_>> = (0..rows)
                .map(|lane| CodeRow {
                    codes: &scratch.codes[lane * cols..][..cols],
                    scale: &scratch.scale[lane * blocks..][..blocks],
                    min: if layout.has_min() { &scratch.min[lane * blocks..][..blocks] } else { &[] },
                    gain: 1.0,
                })
                .collect();
            layout.fill_codes(cols, panel, &rows)
        }
    }
}

/// By value (as a byte), the code of a table that stands for it.
fn codes_of(table: &[i8; 16]) -> [i8; 256] {
    let mut codes = [0; 256];
    table.iter().enumerate().rev().for_each(|(code, value)| codes[usize::from(*value as u8)] = code as i8);
    codes
}

/// Fills one panel from the values in `scratch`, stored as `dtype` first.
fn fill_values(dtype: DType, layout: Layout, cols: usize, rows: usize, panel: &mut [u8], scratch: &mut Scratch) -> Result<()> {
    if layout == Layout::F8 {
        let rows: Vec<&[f32]> = scratch.values.chunks(cols).take(rows).collect();
        return layout.fill_f32(cols, panel, &rows);
    }
    let Some(row_bytes) = dtype.bytes(cols) else { bail!(Unsupported, "rows of {cols} elements are no whole blocks of {dtype}") };
    let mut stored = std::mem::take(&mut scratch.stored);
    sized(&mut stored, rows * row_bytes)?;
    for (values, bytes) in scratch.values.chunks(cols).zip(stored.chunks_mut(row_bytes)) {
        quant::encode(dtype, values, bytes)?;
    }
    let views: Vec<&[u8]> = stored.chunks(row_bytes).collect();
    let done = fill_stored(dtype, layout, cols, &views, panel, scratch);
    scratch.stored = stored;
    done
}

#[cfg(test)]
mod tests {
    use super::super::making::{Making, Room};
    use super::*;
    use crate::weights::Declarations;

    /// `[2, 6, 32]`, element `i` is `i` in BF16-exact small numbers, and a vector `[2, 6]`.
    fn checkpoint(name: &str) -> (std::path::PathBuf, Supply) {
        let folder = std::env::temp_dir().join(format!("metrale-pack-{}-{name}", std::process::id()));
        std::fs::create_dir_all(&folder).unwrap();
        let header = br#"{"t":{"dtype":"F32","shape":[2,6,32],"data_offsets":[0,1536]},"b":{"dtype":"F32","shape":[2,6],"data_offsets":[1536,1584]}}"#;
        let values = (0..384).chain(0..12).flat_map(|i| (i as f32).to_le_bytes());
        let bytes: Vec<u8> = (header.len() as u64).to_le_bytes().into_iter().chain(header.iter().copied()).chain(values).collect();
        std::fs::write(folder.join("model.safetensors"), bytes).unwrap();
        std::fs::write(folder.join("config.json"), b"{}").unwrap();
        let opened = Checkpoint::open(&folder).unwrap();
        (folder, Supply::Checkpoint(Arc::new(opened)))
    }

    #[test]
    fn parts_pick_rows_and_columns_of_stacked_tensors() {
        let (folder, supply) = checkpoint("picks");
        let pool = Pool::new(2).unwrap();
        let mut d = Declarations::default();
        // Of output-major experts every second row; of input-major ones columns, from a row on.
        let slice = |e: usize| vec![Part::slice("t", [2, 6, 32], e, 3).rows_from(1, 2), Part::slice("t", [2, 6, 32], e, 1)];
        let turned = |e: usize| vec![Part::transposed("t", [2, 6, 32], e, 17).rows_from(4, 1).columns_from(2)];
        let rows = d.experts("rows", vec![slice(0), slice(1)], 32);
        let columns = d.experts("columns", vec![turned(0), turned(1)], 4);
        let biases =
            d.vector_parts("biases", vec![Part::slice("b", [2, 6, 1], 1, 3).rows_from(1, 2), Part::slice("b", [2, 6, 1], 0, 2)], 0.5);
        let read = |id: crate::ops::WeightId| {
            let spec = &d.weights[id.0 as usize];
            let layouts = vec![Layout::F32; spec.parts().count()];
            let mut making = Making::default();
            let region = Region::new(crate::runtime::Class::Other, 0, "test").unwrap();
            loop {
                // One panel at a time.
                if let Some(weight) =
                    making.step(&supply, spec, &layouts, &Room { pool: &pool, region: &region, packs_rows: false, late: None }, 1).unwrap()
                {
                    return weight;
                }
            }
        };
        let weight = read(rows);
        let mut row = [0.0; 32];
        for e in 0..2 {
            for (r, stored) in [1, 3, 5, 0].into_iter().enumerate() {
                weight.experts()[e].decode_row(r, &mut row);
                assert!((0..32).all(|k| row[k] == (e * 192 + stored * 32 + k) as f32), "expert {e} row {r}: {row:?}");
            }
        }
        let weight = read(columns);
        let mut row = [0.0; 4];
        for e in 0..2 {
            for r in 0..17 {
                weight.experts()[e].decode_row(r, &mut row);
                assert!((0..4).all(|k| row[k] == (e * 192 + (k + 2) * 32 + r + 4) as f32), "expert {e} row {r}: {row:?}");
            }
        }
        assert_eq!(read(biases).vector(), [7.5, 9.5, 11.5, 0.5, 1.5]);
        let _ = std::fs::remove_dir_all(folder);
    }

    #[test]
    fn parts_outside_of_their_tensor_have_no_shape() {
        let of = [2, 6, 32];
        assert_eq!(Part::slice("t", of, 1, 6).shape(32).unwrap(), of);
        for part in [
            Part::slice("t", of, 2, 6),
            Part::slice("t", of, 0, 7),
            Part::slice("t", of, 0, 3).rows_from(2, 2),
            Part::transposed("t", of, 0, 33),
            Part::transposed("t", of, 0, 32).columns_from(1),
        ] {
            let cols = if matches!(part.pick, Pick::Slice { .. }) { 32 } else { 6 };
            assert_eq!(part.shape(cols).unwrap_err().kind(), Kind::Mismatch, "{part:?}");
        }
        assert!(Part::slice("t", of, 0, 6).shape(31).is_err());
    }
}
