//! From a checkpoint's tensors to weights as operations use them: panels filled in parallel, vectors decoded.

use super::synthetic::Random;
use crate::backend::cpu::pack::{CodeRow, LANES, Layout, Packed};
use crate::backend::cpu::pool::Pool;
use crate::bail;
use crate::error::{Error, Kind, Result, vec_filled};
use crate::ops::{Matrix, StoredRows, Weight};
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

/// Reads one weight.
pub(super) fn read(supply: &Supply, spec: &WeightSpec, layouts: &[Layout], pool: &Pool) -> Result<Weight> {
    let one = |parts: &[Part], layouts: &[Layout]| -> Result<Matrix> {
        let mut packed = Vec::with_capacity(parts.len());
        for (part, layout) in parts.iter().zip(layouts) {
            packed.push(matrix(supply, part, spec.cols, *layout, pool).map_err(|e| e.context(&part.tensor))?);
        }
        Ok(Matrix { parts: packed })
    };
    match (&spec.source, spec.role) {
        (Source::Constant(values), _) => Ok(Weight::Vector(values.clone())),
        (Source::Tensors(parts), Role::Vector { add }) => vector(supply, parts, add).map(Weight::Vector),
        (Source::Tensors(parts), Role::Rows) => stored(supply, parts, spec.cols),
        (Source::Tensors(parts), _) => one(parts, layouts).map(Weight::Matrix),
        (Source::Experts(experts), _) => {
            let mut layouts = layouts;
            let mut matrices = crate::error::vec_with_capacity(experts.len(), "the list of experts")?;
            for parts in experts {
                let (own, rest) = layouts.split_at(parts.len().min(layouts.len()));
                matrices.push(one(parts, own)?);
                layouts = rest;
            }
            Ok(Weight::Experts(matrices))
        }
    }
}

fn find(checkpoint: &Checkpoint, name: &str) -> Result<Stored> {
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
    for part in parts {
        let piece = &mut out[at..at + part.rows];
        match supply {
            Supply::Checkpoint(checkpoint) => {
                let stored = find(checkpoint, &part.tensor)?.values()?;
                piece.iter_mut().enumerate().for_each(|(row, v)| *v = stored[part.stored(row)]);
            }
            Supply::Random(random) => random.vector(&part.tensor, piece),
        }
        at += part.rows;
    }
    out.iter_mut().for_each(|v| *v += add);
    Ok(out)
}

/// Rows that stay where the checkpoint has them.
struct InFile {
    stored: Stored,
    part: Part,
}

impl StoredRows for InFile {
    fn decode_row(&self, row: usize, out: &mut [f32]) {
        self.stored.decode_row(self.part.stored(row), out).expect("shape and type were checked when the weight was made");
    }
}

/// Random rows in BF16.
struct InMemory(Vec<u8>);

impl StoredRows for InMemory {
    fn decode_row(&self, row: usize, out: &mut [f32]) {
        quant::decode(DType::BF16, &self.0[row * out.len() * 2..][..out.len() * 2], out).expect("two bytes an element");
    }
}

/// Rows of several tensors, one after another: the number of the first row of each, and its rows.
struct Shards(Vec<(usize, Box<dyn StoredRows>)>);

impl StoredRows for Shards {
    fn decode_row(&self, row: usize, out: &mut [f32]) {
        let after = self.0.partition_point(|(first, _)| *first <= row);
        let (first, rows) = &self.0[after - 1];
        rows.decode_row(row - first, out);
    }
}

fn stored(supply: &Supply, parts: &[Part], cols: usize) -> Result<Weight> {
    if let [part] = parts {
        return stored_rows(supply, part, cols).map(Weight::Stored);
    }
    let mut shards = crate::error::vec_with_capacity(parts.len(), "the list of a table's shards")?;
    let mut first = 0;
    for part in parts {
        shards.push((first, stored_rows(supply, part, cols)?));
        first += part.rows;
    }
    Ok(Weight::Stored(Box::new(Shards(shards))))
}

fn stored_rows(supply: &Supply, part: &Part, cols: usize) -> Result<Box<dyn StoredRows>> {
    Ok(match supply {
        Supply::Checkpoint(checkpoint) => {
            let stored = find(checkpoint, &part.tensor)?;
            // Once now, so that a type nobody decodes is an error here and not a surprise later.
            stored.decode_row(part.stored(0), &mut vec_filled(cols, 0.0, "a row")?)?;
            Box::new(InFile { part: oriented(part, &stored), stored })
        }
        Supply::Random(random) => Box::new(InMemory(random.rows(&part.tensor, part.rows, cols)?)),
    })
}

/// Packs one tensor, panels shared among the pool's workers.
fn matrix(supply: &Supply, part: &Part, cols: usize, layout: Layout, pool: &Pool) -> Result<Packed> {
    let mut packed = Packed::new(layout, part.rows, cols)?;
    let tensor = match supply {
        Supply::Checkpoint(checkpoint) => Some(find(checkpoint, &part.tensor)?),
        Supply::Random(_) => None,
    };
    let part = &tensor.as_ref().map_or_else(|| part.clone(), |stored| oriented(part, stored));
    let columns = match (&tensor, part.pick) {
        (Some(stored), Pick::Transposed { of, index, from, .. }) => Some(columns(stored, part, of[2], index * of[1] + from, cols, pool)?),
        _ => None,
    };
    let panels: Vec<Mutex<&mut [u8]>> = packed.panels_mut().map(Mutex::new).collect();
    let counter = AtomicUsize::new(0);
    let failure: Mutex<Option<Error>> = Mutex::new(None);
    pool.run(&|worker| {
        let mut scratch = Scratch::default();
        worker.each(&counter, panels.len(), 4, |range| {
            for index in range {
                let rows = index * LANES..((index + 1) * LANES).min(part.rows);
                let mut panel = panels[index].lock().unwrap_or_else(PoisonError::into_inner);
                let done = match (&tensor, supply) {
                    (Some(_), _) if columns.is_some() => {
                        let values = columns.as_deref().unwrap_or_default();
                        let rows: Vec<&[f32]> = rows.map(|row| &values[row * cols..][..cols]).collect();
                        layout.fill_f32(cols, &mut panel, &rows)
                    }
                    (Some(stored), _) => fill(stored, part, layout, cols, rows, &mut panel, &mut scratch),
                    (None, Supply::Random(random)) => {
                        scratch.rows(rows.len(), cols).and_then(|values| {
                            for (lane, row) in values.chunks_mut(cols).enumerate() {
                                random.matrix_row(&part.tensor, part.stored(index * LANES + lane), row);
                            }
                            Ok(())
                        }).and_then(|()| fill_values(random.dtype, layout, cols, rows.len(), &mut panel, &mut scratch))
                    }
                    (None, Supply::Checkpoint(_)) => Ok(()),
                };
                if let Err(e) = done {
                    failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(e);
                }
            }
        });
    })?;
    drop(panels);
    match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(e) => Err(e),
        None => Ok(packed),
    }
}

/// A worker's buffers.
#[derive(Default)]
struct Scratch {
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
    v.try_reserve(more).map_err(|_| Error::new(Kind::OutOfMemory, "a buffer for packing weights"))?;
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
fn fill(stored: &Stored, part: &Part, layout: Layout, cols: usize, rows: Range<usize>, panel: &mut [u8], scratch: &mut Scratch) -> Result<()> {
    match (stored.form(), layout) {
        (Form::Plain(dtype), _) if layout.is_integer() || matches!((dtype, layout), (DType::BF16, Layout::Bf16) | (DType::F16, Layout::F16)) => {
            let row = |lane| if rows.start + lane < rows.end { stored.plain_row(part.stored(rows.start + lane), cols) } else { &[] };
            let stored: [&[u8]; LANES] = std::array::from_fn(row);
            fill_stored(dtype, layout, cols, &stored[..rows.len()], panel, scratch)
        }
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
fn fill_codes(stored: &Stored, form: CodeForm, part: &Part, layout: Layout, cols: usize, rows: Range<usize>, panel: &mut [u8], scratch: &mut Scratch) -> Result<()> {
    let blocks = cols / form.block;
    let mins = if form.min { blocks } else { 0 };
    let codes = sized(&mut scratch.codes, rows.len() * cols)?;
    let scale = sized(&mut scratch.scale, rows.len() * blocks)?;
    let min = sized(&mut scratch.min, rows.len() * mins)?;
    let mut gains = [1.0f32; LANES];
    for (lane, row) in rows.clone().enumerate() {
        let codes = &mut codes[lane * cols..][..cols];
        gains[lane] = stored.code_row(part.stored(row), form, codes, &mut scale[lane * blocks..][..blocks], &mut min[lane * mins..][..mins])?;
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
            for (lane, bytes) in stored.iter().enumerate() {
                for (index, bytes) in bytes.chunks_exact(dtype.block_bytes()).enumerate() {
                    quant::unpack(dtype, bytes, &mut unpacked)?;
                    if unpacked.sub_len != block {
                        bail!(Internal, "{dtype} has a scale per {}, {layout:?} one per {block}", unpacked.sub_len);
                    }
                    let (len, subs) = (unpacked.len, unpacked.len / block);
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

/// Fills one panel from the values in `scratch`, stored as `dtype` first.
fn fill_values(dtype: DType, layout: Layout, cols: usize, rows: usize, panel: &mut [u8], scratch: &mut Scratch) -> Result<()> {
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
