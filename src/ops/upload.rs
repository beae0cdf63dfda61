//! Weights on their way to a device: packed parts as they are, tables of experts, vectors.

use super::{GpuWeight, LayoutKind, Matrix, Part, Weight};
use crate::backend::cpu::pack::{Layout, Packed};
use crate::backend::cuda::launch::{Args, bytes_of};
use crate::error::Result;

/// Memory of a device that bytes are put into.
pub trait Place {
    /// Puts the bytes somewhere, on a boundary of 256; the address.
    fn put(&mut self, bytes: &[u8], what: &str) -> Result<u64>;
}

/// How a packed part is described to kernels, at `data`; `first` is the first of its rows in the whole matrix.
pub fn part(layout: Layout, rows: usize, cols: usize, panel_bytes: usize, first: usize, data: u64) -> Part {
    let (kind, table) = match layout {
        Layout::F32 => (LayoutKind::F32, [0; 16]),
        Layout::Bf16 => (LayoutKind::Bf16, [0; 16]),
        Layout::F16 => (LayoutKind::F16, [0; 16]),
        Layout::F8 => (LayoutKind::F8, [0; 16]),
        Layout::I8 { .. } => (LayoutKind::I8, [0; 16]),
        Layout::I4 { .. } => (LayoutKind::I4, [0; 16]),
        Layout::I4Table { table, .. } => (LayoutKind::Table, table),
    };
    Part {
        data,
        panel_bytes: panel_bytes as u64,
        rows: rows as u32,
        cols: cols as u32,
        first: first as u32,
        kind,
        block: layout.block() as u32,
        min: u32::from(layout.has_min()),
        table,
    }
}

fn parts(matrix: &Matrix, place: &mut dyn Place) -> Result<Vec<Part>> {
    let mut first = 0;
    let put = |packed: &Packed| {
        let data = place.put(packed.data(), "packed weights")?;
        let part = part(packed.layout(), packed.rows(), packed.cols(), packed.panel_bytes(), first, data);
        first += packed.rows();
        Ok(part)
    };
    matrix.parts.iter().map(put).collect()
}

/// Puts a weight into a device's memory.
pub fn upload(weight: &Weight, place: &mut dyn Place) -> Result<GpuWeight> {
    match weight {
        Weight::Matrix(matrix) => Ok(GpuWeight::Matrix(parts(matrix, place)?)),
        Weight::Experts(experts) => {
            let parts = experts.iter().map(|matrix| parts(matrix, place)).collect::<Result<Vec<_>>>()?;
            experts_of(parts, place)
        }
        Weight::Vector(values) => {
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_ne_bytes()).collect();
            Ok(GpuWeight::Vector { data: place.put(&bytes, "a vector")?, len: values.len() })
        }
        Weight::Stored(_) | Weight::Paged(_) | Weight::OnDevice(_) => {
            crate::bail!(Unsupported, "weights that stay in their file cannot be put on a device")
        }
    }
}

/// Experts whose parts are there already; puts the table of them.
pub fn experts_of(parts: Vec<Vec<Part>>, place: &mut dyn Place) -> Result<GpuWeight> {
    let bytes: Vec<u8> = parts.iter().flatten().flat_map(|part| bytes_of(part).to_vec()).collect();
    let table = place.put(&bytes, "the table of experts")?;
    Ok(GpuWeight::Experts { parts, table })
}

#[allow(unsafe_code)]
// SAFETY: the struct `Part` of kernels/common/frame.cuh, without padding.
unsafe impl Args for Part {}
