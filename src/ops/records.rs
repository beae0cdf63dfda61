//! Records: one row of numbers for each position, or for each group of positions, in a sequence's pages.
//!
//! Latent attention keeps one row a token that all heads share; compressors keep inputs of groups that are not complete and one row
//! for each that is. All are addressed by position, so cutting a sequence back is exact: whatever is read was written
//! for positions that are still there.
#![allow(unsafe_code)] // bytes of pages, disjoint by position

use super::{Frame, Gpu, KvPages, KvSpec, KvType, Op, PAGE, Port, Shape, Shapes, StateId, Turn, Value, View};
use crate::backend::cpu::simd;
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_common};

/// Where and how records are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Records {
    /// The pages.
    pub state: StateId,
    /// Elements of a record.
    pub width: usize,
    /// Positions of a group; record `j` is written when position `j * every + every - 1` is there, and lies on that position's page.
    pub every: usize,
    /// Element type.
    pub dtype: KvType,
}

impl Records {
    /// The pages such records need, as a layer's key/value pages without values.
    pub const fn spec(width: usize, every: usize, dtype: KvType) -> KvSpec {
        let records = (PAGE - 1) / every + 1;
        KvSpec { heads: 1, key_dim: (records * width).div_ceil(PAGE), value_dim: 0, dtype }
    }

    /// The first element of record `index`.
    fn at(&self, pages: &KvPages, index: usize) -> (*mut u8, usize) {
        let position = index * self.every + self.every - 1;
        (pages.page(position / PAGE), position % PAGE / self.every * self.width)
    }

    /// Record `index`; `scratch` (of `width`) holds it where it is not stored as f32.
    pub(super) fn read<'s>(&self, pages: &KvPages, index: usize, scratch: &'s mut [f32]) -> &'s [f32] {
        self.elements(pages, index, 0, self.width, scratch)
    }

    /// As many elements of record `index` as `scratch` has, from element `first` on.
    pub(super) fn read_part<'s>(&self, pages: &KvPages, index: usize, first: usize, scratch: &'s mut [f32]) -> &'s [f32] {
        self.elements(pages, index, first, scratch.len(), scratch)
    }

    fn elements<'s>(&self, pages: &KvPages, index: usize, first: usize, count: usize, scratch: &'s mut [f32]) -> &'s [f32] {
        assert!(first + count <= self.width);
        let (page, at) = self.at(pages, index);
        let at = at + first;
        match self.dtype {
            // SAFETY: the page holds `spec` records; an earlier operation or step wrote this one, nobody writes it now.
            KvType::F32 => unsafe { std::slice::from_raw_parts(page.cast::<f32>().add(at), count) },
            KvType::F16 | KvType::Bf16 => {
                // SAFETY: as above.
                let stored = unsafe { std::slice::from_raw_parts(page.cast::<u16>().add(at), count) };
                let (simd, values) = (simd::table(), &mut scratch[..count]);
                if self.dtype == KvType::F16 {
                    simd.from_f16(stored, values)
                } else {
                    simd.from_bf16(stored, values)
                }
                values
            }
            KvType::Q8 => unreachable!("check() refused it"),
        }
    }

    /// Writes record `index`.
    ///
    /// # Safety
    /// Nobody else touches this record now.
    pub(super) unsafe fn write(&self, pages: &KvPages, index: usize, values: &[f32]) {
        assert!(values.len() <= self.width);
        let (page, at) = self.at(pages, index);
        // SAFETY: inside the page as above; alone by the caller's promise.
        let half = || unsafe { std::slice::from_raw_parts_mut(page.cast::<u16>().add(at), values.len()) };
        match self.dtype {
            // SAFETY: as above.
            KvType::F32 => unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), page.cast::<f32>().add(at), values.len()) },
            KvType::F16 => simd::table().to_f16(values, half()),
            KvType::Bf16 => simd::table().to_bf16(values, half()),
            KvType::Q8 => unreachable!("check() refused it"),
        }
    }

    /// Checks that the state was declared for these records.
    pub(super) fn check(&self, shapes: &dyn Shapes) -> Result<()> {
        let (found, wanted) = (shapes.kv(self.state), Records::spec(self.width, self.every, self.dtype));
        ensure!(self.dtype != KvType::Q8, Unsupported, "records of {} elements are not kept in 8 bits", self.width);
        ensure!(found == wanted, Internal, "records of {} every {}: pages are {found:?}, expected {wanted:?}", self.width, self.every);
        Ok(())
    }
}

/// Appends one record for each row of the batch that completes a group (every row, where `every` is 1).
#[derive(Clone, Debug)]
pub struct RecordWrite {
    /// `[rows, width]`.
    pub x: Value,
    /// Where they go.
    pub records: Records,
}

impl RecordWrite {
    fn rows(&self, frame: &Frame<'_>, range: std::ops::Range<usize>) {
        for (index, segment) in frame.batch.segments.iter().enumerate() {
            let pages = frame.pages(index, self.records.state);
            for row in range.start.max(segment.rows.start)..range.end.min(segment.rows.end) {
                let end = frame.batch.positions[row] as usize + 1;
                if end.is_multiple_of(self.records.every) {
                    // SAFETY: a group's record belongs to the row that completes it, and a row to one worker.
                    unsafe { self.records.write(&pages, end / self.records.every - 1, frame.row(self.x, row)) };
                }
            }
        }
    }
}

const RECORD_WRITE: Kernel = Kernel { file: "records", name: "record_write" };

/// Records as kernels see them: `Records`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct GpuRecords {
    kv: u32,
    width: u32,
    every: u32,
    half: u32,
}

impl GpuRecords {
    /// For what is not connected.
    pub(super) const NONE: GpuRecords = GpuRecords { kv: 0, width: 0, every: 1, half: 0 };
}

impl Records {
    /// The twin of kernels/common/records.cuh.
    pub(super) fn gpu(&self, gpu: &Gpu<'_>) -> GpuRecords {
        let half = u32::from(self.dtype == KvType::F16);
        GpuRecords { kv: gpu.kv_index(self.state), width: self.width as u32, every: self.every as u32, half }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct RecordWriteArgs {
    x: View,
    batch: u64,
    records: GpuRecords,
}

// SAFETY: the struct of kernels/records.cu.
unsafe impl Args for RecordWriteArgs {}

impl Op for RecordWrite {
    op_common!("record_write");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.x)]
    }

    fn states(&self) -> Vec<(Port, StateId)> {
        vec![(Port::Out, self.records.state)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let x = shapes.value(self.x);
        ensure!(x.width == self.records.width && self.records.every > 0, Internal, "record_write: {x:?} into {:?}", self.records);
        self.records.check(shapes)?;
        Ok(Vec::new())
    }

    fn solo(&self, frame: &Frame<'_>) -> bool {
        frame.batch.tokens.len() <= 2
    }

    fn scalar(&self, frame: &Frame<'_>) {
        self.rows(frame, 0..frame.batch.tokens.len());
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        Records::spec(1, 1, self.records.dtype).on_gpu()?;
        let args = RecordWriteArgs { x: gpu.view(self.x), batch: gpu.batch_at(), records: self.records.gpu(gpu) };
        gpu.launch(RECORD_WRITE, Grid::cells(gpu.rows(self.x), self.records.width, 256), &args)
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        turn.each(frame.batch.tokens.len(), 2, |range| self.rows(frame, range));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_of_any_group_size_lie_apart_inside_their_page() {
        for every in [1, 2, 3, 4, 5, 7, 31, 32, 33, 128] {
            for width in [1, 3, 64] {
                let spec = Records::spec(width, every, KvType::F32);
                let records = Records { state: StateId(0), width, every, dtype: KvType::F32 };
                let mut memory = vec![vec![0u8; spec.page_bytes()]; 16];
                let mut pointers: Vec<*mut u8> = memory.iter_mut().map(|m| m.as_mut_ptr()).collect();
                let pages = KvPages::new(&pointers);
                let count = 16 * PAGE / every;
                for j in 0..count {
                    let (page, at) = records.at(&pages, j);
                    assert!((at + width) * 4 <= spec.page_bytes());
                    assert!(pointers.contains(&page));
                    // SAFETY: checked to be inside, single thread.
                    unsafe { records.write(&pages, j, &vec![j as f32; width]) };
                }
                for j in 0..count {
                    assert_eq!(records.read(&pages, j, &mut []), vec![j as f32; width]);
                }
                pointers.clear();
            }
        }
    }
}
