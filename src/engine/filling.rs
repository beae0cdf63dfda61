//! Rows of a tensor as panels: in the form that multiplications read, whatever the checkpoint stores, a panel at a time by each worker.

use super::layouts::layout_for;
use super::pack::{Supply, find, oriented};
use crate::backend::cpu::pack::{CodeRow, F8_RUN, F8Row, LANES, Layout};
use crate::backend::cpu::pool::Pool;
use crate::backend::cpu::simd;
use crate::bail;
use crate::error::{Error, Result, vec_filled};
use crate::options::Compute;
use crate::quant::{self, Unpacked};
use crate::tensor::DType;
use crate::weights::{CodeForm, Form, Part, Pick, Stored};
use std::ops::Range;
use std::sync::atomic::AtomicUsize;
use std::sync::{Mutex, PoisonError};

/// A tensor whose panels are filled one after the other, wherever they lie.
pub(super) struct Filling {
    layout: Layout,
    cols: usize,
    panel_bytes: usize,
    /// Where the values are; `None` for random ones.
    tensor: Option<Stored>,
    /// The part as it reads the tensor.
    pub part: Part,
    /// A transposed part's values as rows.
    columns: Option<Vec<f32>>,
    /// Panels that are full.
    pub panels: usize,
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

    /// Whether panels hold what is stored bit for bit, so that a device can put rows of it into their places.
    pub fn is_as_stored(&self) -> bool {
        let form = self.tensor.as_ref().filter(|_| self.columns.is_none()).map(Stored::form);
        matches!((form, self.layout), (Some(Form::Plain(DType::BF16)), Layout::Bf16) | (Some(Form::Plain(DType::F16)), Layout::F16))
    }

    /// A row of the part, as exact numbers.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) -> Result<()> {
        self.tensor.as_ref().map_or(Ok(()), |stored| stored.decode_row(self.part.stored(row), out))
    }

    /// Copies rows that are as stored, `stride` bytes apart.
    pub fn copy(&self, rows: Range<usize>, to: &mut [u8], stride: usize) {
        let Some(stored) = &self.tensor else { return };
        for (row, to) in rows.zip(to.chunks_mut(stride)) {
            let row = stored.plain_row(self.part.stored(row), self.cols);
            to[..row.len()].copy_from_slice(row);
        }
    }

    /// Fills the next panels, shared among the pool's workers: as many as are given and left.
    pub fn step<'a>(&mut self, supply: &Supply, panels: impl Iterator<Item = &'a mut [u8]>, pool: &Pool) -> Result<()> {
        let first = self.panels;
        let panels: Vec<Mutex<&mut [u8]>> = panels.take(self.part.rows.div_ceil(LANES) - first).map(Mutex::new).collect();
        let counter = AtomicUsize::new(0);
        let failure: Mutex<Option<Error>> = Mutex::new(None);
        // Few panels go one by one, so that every worker has some.
        let each = (panels.len() / (4 * pool.count())).clamp(1, 4);
        pool.run(&|worker| {
            let mut scratch = Scratch::default();
            worker.each(&counter, panels.len(), each, |range| {
                for place in range {
                    let mut panel = panels[place].lock().unwrap_or_else(PoisonError::into_inner);
                    if let Err(e) = self.panel(supply, first + place, &mut panel, &mut scratch) {
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

    /// Fills one panel.
    pub fn panel(&self, supply: &Supply, index: usize, panel: &mut [u8], scratch: &mut Scratch) -> Result<()> {
        let (layout, cols, part) = (self.layout, self.cols, &self.part);
        let rows = index * LANES..((index + 1) * LANES).min(part.rows);
        match (&self.tensor, &self.columns, supply) {
            (Some(_), Some(values), _) if layout.is_integer() => {
                scratch.rows(rows.len(), cols)?.copy_from_slice(&values[rows.start * cols..rows.end * cols]);
                fill_values(DType::Q8_0, layout, cols, rows.len(), panel, scratch)
            }
            (Some(_), Some(values), _) => {
                let rows: Vec<&[f32]> = rows.map(|row| &values[row * cols..][..cols]).collect();
                layout.fill_f32(cols, panel, &rows)
            }
            (Some(stored), None, _) => fill(stored, part, layout, cols, rows, panel, scratch),
            (None, _, Supply::Random(random)) => {
                for (row, values) in rows.clone().zip(scratch.rows(rows.len(), cols)?.chunks_mut(cols)) {
                    random.matrix_row(&part.tensor, part.stored(row), values);
                }
                fill_values(random.options.dtype_of(&part.tensor), layout, cols, rows.len(), panel, scratch)
            }
            (None, _, Supply::Checkpoint(_)) => Ok(()),
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
    // What takes no bytes of this type takes the values.
    let takes_values = match layout {
        Layout::Bf16 => dtype != DType::BF16,
        Layout::F16 => dtype != DType::F16,
        _ => layout == Layout::F8,
    };
    if takes_values {
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
