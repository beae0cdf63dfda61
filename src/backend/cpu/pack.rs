//! Weights in the order the kernels read them: panels of 16 output rows, a vector lane per row.
//!
//! Within a panel k runs ascending, so a product streams each panel once from start to end with aligned loads, and an activation is one
//! broadcast for 16 rows. Per panel:
//!
//! - `F32`: `[k][16] f32`. `F16`: `[k][16] f16`. `Bf16`: `[k / 2][16]` pairs; a 32-bit lane holds k even (low half) and k odd (high
//!   half), so a shift and a mask give two f32 vectors.
//! - `F8`: the f32 scales `[k / 128][16]`, then E4M3 codes `[k / 2][16][2]`. An element is exactly `scale * code`; sums of 128 are scaled as a whole.
//! - integers: 16 f32 gains (one per row, applied to the finished sum), then per 64 k: the f16 scales
//!   `[64 / block][16]`, the f16 minimums likewise, the codes of two 32-blocks. 8-bit codes are `[k / 4][16][4]` with 128 added, because the dot instruction wants
//!   one unsigned side; the activations carry the correction. 4-bit codes are `[k / 8][16][4]` bytes, the low nibble for the first 4 k's and
//!   the high nibble for the next 4.
//!
//! A packed weight is `gain * (scale * code - min)`. Scales that f16 holds exactly stay exact (gain 1); otherwise a power of two moves
//! into the gain so that the largest scale of the row has all its bits. Rows beyond the last are zeros.

use super::arena::{Buffer, Region};
use super::late::{Desk, GROUP, Late, Panels, Rows};
use crate::error::{Error, Kind, Result, vec_filled};
use crate::runtime::Class;
use crate::{bail, ensure};
use half::{bf16, f16};
use std::sync::Arc;
use std::sync::atomic::AtomicU8;

/// Output rows in a panel.
pub const LANES: usize = 16;
/// Elements that share one stretch of codes and scales in the integer layouts.
pub const SUPER: usize = 64;
/// Bytes of the per-row gains in front of an integer panel.
pub const GAINS: usize = LANES * 4;
/// Elements of a row that share a scale in `Layout::F8`.
pub const F8_RUN: usize = 128;

/// How packed weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// 32-bit floats.
    F32,
    /// bfloat16.
    Bf16,
    /// Half floats.
    F16,
    /// 8-bit floats (E4M3), an f32 scale per [`F8_RUN`].
    F8,
    /// Signed 8-bit codes, a scale per `block` (16 or 32), and a minimum per block if `min`.
    I8 {
        /// Elements per scale.
        block: usize,
        /// Whether blocks have a minimum.
        min: bool,
    },
    /// 4-bit codes: -8..=7 without minimum, 0..=15 with.
    I4 {
        /// Elements per scale: 16 or 32.
        block: usize,
        /// Whether blocks have a minimum.
        min: bool,
    },
    /// 4-bit codes 0..=15 that stand for the values of a table.
    I4Table {
        /// Elements per scale: 16 or 32.
        block: usize,
        /// What each code stands for.
        table: [i8; 16],
    },
}

/// A row of unpacked codes: element `k` is `gain * (scale[k / block] * code[k] - min[k / block])`.
#[derive(Clone, Copy)]
pub struct CodeRow<'a> {
    /// One code per column.
    pub codes: &'a [i8],
    /// One scale per block.
    pub scale: &'a [f32],
    /// One minimum per block; empty where the layout has none.
    pub min: &'a [f32],
    /// Multiplies the whole row (the global scale of NVFP4, for example); 1 where there is none.
    pub gain: f32,
}

/// A row of 8-bit floats: element `k` is `scale[k / F8_RUN] * code[k]`.
#[derive(Clone, Copy)]
pub struct F8Row<'a> {
    /// One E4M3 code per column.
    pub codes: &'a [u8],
    /// One scale per run.
    pub scale: &'a [f32],
}

/// A weight matrix `[rows, cols]` (out features, in features) in panels.
pub struct Packed {
    layout: Layout,
    rows: usize,
    cols: usize,
    panel_bytes: usize,
    data: Buffer,
    /// How far it is, where panels are filled when products meet them.
    late: Option<Late>,
}

impl Layout {
    /// Whether products take 8-bit activations (`Activations::Q8`).
    pub fn is_integer(self) -> bool {
        !matches!(self, Layout::F32 | Layout::Bf16 | Layout::F16 | Layout::F8)
    }

    /// Elements per scale; 1 for floats without.
    pub fn block(self) -> usize {
        match self {
            Layout::F32 | Layout::Bf16 | Layout::F16 => 1,
            Layout::F8 => F8_RUN,
            Layout::I8 { block, .. } | Layout::I4 { block, .. } | Layout::I4Table { block, .. } => block,
        }
    }

    /// Whether blocks have a minimum.
    pub fn has_min(self) -> bool {
        matches!(self, Layout::I8 { min: true, .. } | Layout::I4 { min: true, .. })
    }

    /// Bytes of the codes of 64 elements of 16 rows, integer layouts only.
    pub(super) fn super_codes(self) -> usize {
        if matches!(self, Layout::I8 { .. }) { SUPER * LANES } else { SUPER * LANES / 2 }
    }

    /// Bytes of one stretch of 64 elements of 16 rows, integer layouts only.
    pub(super) fn super_bytes(self) -> usize {
        let scales = SUPER / self.block() * LANES * 2;
        self.super_codes() + scales * (1 + self.has_min() as usize)
    }

    /// Bytes of one panel, a multiple of 64, or `None` where `cols` does not fit the layout or the size overflows.
    pub fn panel_bytes(self, cols: usize) -> Option<usize> {
        match self {
            Layout::F32 => cols.checked_mul(4 * LANES),
            Layout::Bf16 => cols.div_ceil(2).checked_mul(4 * LANES),
            Layout::F16 => cols.checked_mul(2 * LANES)?.checked_next_multiple_of(64),
            Layout::F8 if !cols.is_multiple_of(32) => None,
            Layout::F8 => cols.checked_mul(LANES)?.checked_add(cols.div_ceil(F8_RUN) * 4 * LANES),
            _ if !matches!(self.block(), 16 | 32) || !cols.is_multiple_of(32) => None,
            _ => cols.div_ceil(SUPER).checked_mul(self.super_bytes())?.checked_add(GAINS),
        }
    }

    /// Fills one panel of a float layout from up to 16 rows of `cols` elements. Rounds to nearest even; 8-bit floats under the scale that
    /// gives a run's largest the largest code.
    pub fn fill_f32(self, cols: usize, panel: &mut [u8], rows: &[&[f32]]) -> Result<()> {
        self.check_panel(cols, panel, rows.len())?;
        for (lane, row) in rows.iter().enumerate() {
            ensure!(row.len() == cols, Mismatch, "row {lane} of a panel has {} elements, the matrix has {cols} columns", row.len());
        }
        let at = |lane: usize, k: usize| rows.get(lane).map_or(0.0, |row| row.get(k).copied().unwrap_or(0.0));
        match self {
            Layout::F32 => {
                for (k, group) in panel.chunks_exact_mut(4 * LANES).enumerate() {
                    for (lane, slot) in group.chunks_exact_mut(4).enumerate() {
                        slot.copy_from_slice(&at(lane, k).to_le_bytes());
                    }
                }
            }
            Layout::Bf16 => {
                for (pair, group) in panel.chunks_exact_mut(4 * LANES).enumerate() {
                    for (lane, slot) in group.chunks_exact_mut(4).enumerate() {
                        let half = |k| bf16::from_f32(at(lane, k)).to_bits() as u32;
                        slot.copy_from_slice(&(half(2 * pair) | half(2 * pair + 1) << 16).to_le_bytes());
                    }
                }
            }
            Layout::F16 => {
                for (k, group) in panel.chunks_exact_mut(2 * LANES).enumerate() {
                    for (lane, slot) in group.chunks_exact_mut(2).enumerate() {
                        slot.copy_from_slice(&f16::from_f32(at(lane, k)).to_le_bytes());
                    }
                }
            }
            Layout::F8 => {
                panel.fill(0);
                let (mut codes, mut scale) =
                    (vec_filled(cols, 0u8, "8-bit floats")?, vec_filled(cols.div_ceil(F8_RUN), 0.0f32, "8-bit floats")?);
                for (lane, row) in rows.iter().enumerate() {
                    for ((values, codes), scale) in row.chunks(F8_RUN).zip(codes.chunks_mut(F8_RUN)).zip(&mut scale) {
                        *scale = values.iter().fold(0.0f32, |m, v| m.max(v.abs())) / E4M3_MOST;
                        codes.iter_mut().zip(values).for_each(|(code, v)| *code = to_e4m3(if *scale > 0.0 { v / *scale } else { *v }));
                    }
                    fill_f8_lane(panel, lane, &F8Row { codes: &codes, scale: &scale });
                }
            }
            _ => bail!(Internal, "layout {self:?} is filled from codes, not from floats"),
        }
        Ok(())
    }

    /// Fills one panel of 8-bit floats from up to 16 rows of codes with scales.
    ///
    /// A run that holds a NaN becomes NaN as a whole. One whose scale is less than 2^-64 of the row's largest becomes zeros under another run's
    /// scale, so that kernels may divide one scale of a row by the next.
    pub fn fill_f8(self, cols: usize, panel: &mut [u8], rows: &[F8Row<'_>]) -> Result<()> {
        ensure!(self == Layout::F8, Internal, "layout {self:?} is not filled from 8-bit floats");
        self.check_panel(cols, panel, rows.len())?;
        panel.fill(0);
        for (lane, row) in rows.iter().enumerate() {
            let (found, expected) = ((row.codes.len(), row.scale.len()), (cols, cols.div_ceil(F8_RUN)));
            ensure!(found == expected, Mismatch, "row {lane} of a panel has {found:?} codes and scales, {expected:?} were expected");
            fill_f8_lane(panel, lane, row);
        }
        Ok(())
    }

    /// Fills one panel of a 16-bit layout from up to 16 rows of `cols` bit patterns of the same type, untouched.
    pub fn fill_u16(self, cols: usize, panel: &mut [u8], rows: &[&[u16]]) -> Result<()> {
        self.check_panel(cols, panel, rows.len())?;
        for (lane, row) in rows.iter().enumerate() {
            ensure!(row.len() == cols, Mismatch, "row {lane} of a panel has {} elements, the matrix has {cols} columns", row.len());
        }
        ensure!(matches!(self, Layout::Bf16 | Layout::F16), Internal, "layout {self:?} is not filled from 16-bit floats");
        panel.fill(0);
        // k goes in strips that keep the strip's part of the panel in the first cache while 16 rows pass over it.
        const STRIP: usize = 256;
        for start in (0..cols).step_by(STRIP) {
            for (lane, row) in rows.iter().enumerate() {
                for (k, &bits) in row.iter().enumerate().skip(start).take(STRIP) {
                    let at = match self {
                        Layout::Bf16 => k / 2 * 4 * LANES + lane * 4 + k % 2 * 2,
                        _ => k * 2 * LANES + lane * 2,
                    };
                    panel[at..at + 2].copy_from_slice(&bits.to_le_bytes());
                }
            }
        }
        Ok(())
    }

    /// Fills one panel of an integer layout from up to 16 rows of codes.
    pub fn fill_codes(self, cols: usize, panel: &mut [u8], rows: &[CodeRow<'_>]) -> Result<()> {
        ensure!(self.is_integer(), Internal, "layout {self:?} is filled from floats, not from codes");
        self.check_panel(cols, panel, rows.len())?;
        panel.fill(0);
        let blocks = cols / self.block();
        let (low, high) = match self {
            Layout::I8 { .. } => (-128, 127),
            Layout::I4 { min: false, .. } => (-8, 7),
            _ => (0, 15),
        };
        for (lane, row) in rows.iter().enumerate() {
            let mins = if self.has_min() { blocks } else { 0 };
            let found = (row.codes.len(), row.scale.len(), row.min.len());
            ensure!(
                found == (cols, blocks, mins),
                Mismatch,
                "row {lane} of a panel has {found:?} codes, scales and minimums, {:?} were expected",
                (cols, blocks, mins)
            );
            if let Some(k) = row.codes.iter().position(|c| !(low..=high).contains(c)) {
                bail!(Internal, "row {lane}: code {} at column {k} is outside {low}..={high} of {self:?}", row.codes[k]);
            }
            self.fill_lane(panel, lane, row);
        }
        Ok(())
    }

    /// Writes one checked row into its lane of a zeroed integer panel.
    fn fill_lane(self, panel: &mut [u8], lane: usize, row: &CodeRow<'_>) {
        let shift = common_gain(row);
        panel[lane * 4..lane * 4 + 4].copy_from_slice(&(row.gain * shift).to_le_bytes());
        let per_super = SUPER / self.block();
        for (index, stretch) in panel[GAINS..].chunks_exact_mut(self.super_bytes()).enumerate() {
            let (scales, codes) = stretch.split_at_mut(self.super_bytes() - self.super_codes());
            for (i, &code) in row.codes.iter().skip(index * SUPER).take(SUPER).enumerate() {
                match self {
                    Layout::I8 { .. } => codes[i / 4 * 64 + lane * 4 + i % 4] = (code as u8) ^ 0x80,
                    _ => {
                        let bias = if matches!(self, Layout::I4 { min: false, .. }) { 8 } else { 0 };
                        codes[i / 8 * 64 + lane * 4 + i % 4] |= ((code + bias) as u8) << (i / 4 % 2 * 4);
                    }
                }
            }
            let mut put = |slot: usize, value: f32| {
                let at = (slot * LANES + lane) * 2;
                scales[at..at + 2].copy_from_slice(&f16::from_f32(value / shift).to_le_bytes());
            };
            for j in 0..per_super.min(row.scale.len() - index * per_super) {
                put(j, row.scale[index * per_super + j]);
                if self.has_min() {
                    put(per_super + j, row.min[index * per_super + j]);
                }
            }
        }
    }

    fn check_panel(self, cols: usize, panel: &[u8], rows: usize) -> Result<()> {
        let bytes = self.panel_bytes(cols);
        ensure!(bytes == Some(panel.len()), Internal, "a panel of {cols} columns as {self:?} takes {bytes:?} bytes, {} given", panel.len());
        ensure!(rows <= LANES, Internal, "a panel has {LANES} rows, {rows} given");
        Ok(())
    }
}

/// The largest 8-bit float.
const E4M3_MOST: f32 = 448.0;

/// Writes one row into its lane of a zeroed panel of 8-bit floats.
fn fill_f8_lane(panel: &mut [u8], lane: usize, row: &F8Row<'_>) {
    let (scales, codes) = panel.split_at_mut(row.scale.len() * 4 * LANES);
    let largest = row.scale.iter().fold(0.0f32, |m, s| if s.is_finite() { m.max(s.abs()) } else { m });
    let mut last = if largest > 0.0 { largest } else { 1.0 };
    for (index, (run, &scale)) in row.codes.chunks(F8_RUN).zip(row.scale).enumerate() {
        let zero = scale.abs() <= largest * 2f32.powi(-64);
        if !zero {
            last = if scale.is_finite() { scale } else { last };
            for (pair, group) in run.chunks_exact(2).zip(codes[index * F8_RUN * LANES..].chunks_exact_mut(2 * LANES)) {
                group[lane * 2..lane * 2 + 2].copy_from_slice(pair);
            }
        }
        let shown = if run.iter().any(|code| code & 0x7f == 0x7f) {
            f32::NAN
        } else if zero {
            last
        } else {
            scale
        };
        let at = (index * LANES + lane) * 4;
        scales[at..at + 4].copy_from_slice(&shown.to_le_bytes());
    }
}

/// What an 8-bit float stands for; NaN is left to scales.
fn from_e4m3(code: u8) -> f32 {
    // As a half float it has the same fields, eight powers of two lower.
    f16::from_bits(u16::from(code & 0x80) << 8 | u16::from(code & 0x7f) << 7).to_f32() * 256.0
}

/// The nearest 8-bit float, ties to even; what is too large becomes the largest, NaN stays.
fn to_e4m3(x: f32) -> u8 {
    let (sign, size) = ((x.to_bits() >> 24) as u8 & 0x80, x.abs());
    sign | match size {
        _ if size.is_nan() => 0x7f,
        _ if size >= E4M3_MOST => 0x7e,
        // Below 2^-6 the steps are even.
        _ if size < 0.015625 => (size * 512.0).round_ties_even() as u8,
        _ => {
            let bits = size.to_bits();
            (((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3)) as u8
        }
    }
}

/// Power of two that moves from the scales of a row into its gain: 1 if f16 holds every scale and minimum exactly, and a scale's products with
/// codes.
fn common_gain(row: &CodeRow<'_>) -> f32 {
    let values = || row.scale.iter().chain(row.min);
    if values().all(|&v| f16::from_f32(v).to_f32() == v && v.abs() <= MOST_SCALE) {
        return 1.0;
    }
    let largest = values().fold(0.0f32, |m, v| m.max(v.abs()));
    if !largest.is_normal() {
        return 1.0; // Zeros, or something not finite that is to stay visible.
    }
    gain_of(largest)
}

/// Largest scale: f16 holds its products with codes of 8 bits (kernels/linear_group.cu).
pub(super) const MOST_SCALE: f32 = 256.0;

/// The power of two by which a row's largest factor, a normal number, fits f16 with all its bits, and its products with codes of 8 bits too.
pub(super) fn gain_of(largest: f32) -> f32 {
    // The largest value lands in 2^6..2^7.
    let exponent = (largest.to_bits() >> 23) as i32 - 127 - 6;
    f32::from_bits(((exponent.clamp(-126, 127) + 127) as u32) << 23)
}

impl Packed {
    /// Bytes that a packed matrix takes, exactly; `None` where `cols` does not fit the layout or the size overflows.
    pub fn bytes(layout: Layout, rows: usize, cols: usize) -> Option<usize> {
        rows.div_ceil(LANES).checked_mul(layout.panel_bytes(cols)?)
    }

    /// A zeroed matrix, to be filled panel by panel.
    pub fn new(layout: Layout, rows: usize, cols: usize) -> Result<Packed> {
        Packed::new_in(layout, rows, cols, None)
    }

    /// As [`Packed::new`], in a region while it has room.
    pub fn new_in(layout: Layout, rows: usize, cols: usize, region: Option<&Arc<Region>>) -> Result<Packed> {
        let sizes = || {
            Error::new(
                Kind::Unsupported,
                format!("a [{rows}, {cols}] matrix cannot be packed as {layout:?}: columns come in 32s, scales per 16 or 32"),
            )
        };
        let panel_bytes = layout.panel_bytes(cols).ok_or_else(sizes)?;
        let bytes = Packed::bytes(layout, rows, cols).ok_or_else(sizes)?;
        let data = match region.and_then(|region| region.take(bytes)) {
            Some(data) => data,
            None => Buffer::of(Class::Weights, bytes, "packed weights")?,
        };
        Ok(Packed { layout, rows, cols, panel_bytes, data, late: None })
    }

    /// How the weights are stored.
    pub fn layout(&self) -> Layout {
        self.layout
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Panels of 16 rows.
    pub fn panels(&self) -> usize {
        self.rows.div_ceil(LANES)
    }

    /// Bytes from one panel to the next.
    pub fn panel_bytes(&self) -> usize {
        self.panel_bytes
    }

    /// Leaves the panels, none of which is filled yet, to the products that meet them.
    pub fn filled_late(mut self, from: Box<dyn Rows>, desk: &Arc<Desk>) -> Result<Packed> {
        let count = self.panels().div_ceil(GROUP);
        let mut groups = crate::error::vec_with_capacity(count, "the state of panels")?;
        groups.resize_with(count, AtomicU8::default);
        self.late = Some(Late::new(from, groups, desk));
        Ok(self)
    }

    /// The panels in their place, and how far they are where that is not yet so.
    pub(super) fn places(&self) -> (Panels<'_>, Option<&Late>) {
        (Panels { data: &self.data, panel_bytes: self.panel_bytes, count: self.panels() }, self.late.as_ref())
    }

    /// Bytes of all panels.
    pub fn len(&self) -> usize {
        self.data.len()
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    /// All bytes; fills panels that are not yet.
    pub fn data(&self) -> &[u8] {
        if let (own, Some(late)) = self.places() {
            late.finish_all(&own);
        }
        self.data.as_slice()
    }

    /// The panels in order, each to be filled by one thread with `layout().fill_*`.
    pub fn panels_mut(&mut self) -> std::slice::ChunksExactMut<'_, u8> {
        self.data.as_mut_slice().chunks_exact_mut(self.panel_bytes.max(1))
    }

    /// Row `row` as floats: what the embedding lookup reads.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) -> Result<()> {
        ensure!(row < self.rows, InvalidArgument, "row {row} of a matrix of {} rows", self.rows);
        ensure!(out.len() == self.cols, Internal, "a row of {} columns does not fit {} floats", self.cols, out.len());
        match self.places() {
            (own, Some(late)) => late.panel(&own, row / LANES, |panel| self.layout.decode(panel, row % LANES, out)),
            _ => self.layout.decode(&self.data.as_slice()[row / LANES * self.panel_bytes..][..self.panel_bytes], row % LANES, out),
        }
        Ok(())
    }
}

impl Layout {
    /// A panel's row as floats.
    pub fn decode(self, panel: &[u8], lane: usize, out: &mut [f32]) {
        let half_at = |at: usize| u16::from_le_bytes([panel[at], panel[at + 1]]);
        let word_at = |at: usize| u32::from_le_bytes([panel[at], panel[at + 1], panel[at + 2], panel[at + 3]]);
        match self {
            Layout::F32 => (0..out.len()).for_each(|k| out[k] = f32::from_bits(word_at(k * 4 * LANES + lane * 4))),
            Layout::Bf16 => {
                (0..out.len()).for_each(|k| out[k] = bf16::from_bits(half_at(k / 2 * 4 * LANES + lane * 4 + k % 2 * 2)).to_f32())
            }
            Layout::F16 => (0..out.len()).for_each(|k| out[k] = f16::from_bits(half_at(k * 2 * LANES + lane * 2)).to_f32()),
            Layout::F8 => {
                let codes = out.len().div_ceil(F8_RUN) * 4 * LANES;
                for (k, value) in out.iter_mut().enumerate() {
                    let scale = f32::from_bits(word_at((k / F8_RUN * LANES + lane) * 4));
                    *value = scale * from_e4m3(panel[codes + k / 2 * 2 * LANES + lane * 2 + k % 2]);
                }
            }
            layout => {
                let gain = f32::from_bits(word_at(lane * 4));
                let per_super = SUPER / layout.block();
                let scales = layout.super_bytes() - layout.super_codes();
                for (k, value) in out.iter_mut().enumerate() {
                    let start = GAINS + k / SUPER * layout.super_bytes();
                    let codes = start + scales;
                    let i = k % SUPER;
                    let factor = |slot: usize| f16::from_bits(half_at(start + (slot * LANES + lane) * 2)).to_f32();
                    let nibble = || panel[codes + i / 8 * 64 + lane * 4 + i % 4] >> (i / 4 % 2 * 4) & 15;
                    let code = match layout {
                        Layout::I8 { .. } => (panel[codes + i / 4 * 64 + lane * 4 + i % 4] ^ 0x80) as i8,
                        Layout::I4 { min: false, .. } => nibble() as i8 - 8,
                        Layout::I4Table { table, .. } => table[nibble() as usize],
                        _ => nibble() as i8,
                    };
                    let min = if layout.has_min() { factor(per_super + i / layout.block()) } else { 0.0 };
                    *value = gain * (factor(i / layout.block()) * code as f32 - min);
                }
            }
        }
    }
}
