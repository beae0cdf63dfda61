//! What an operation sees while it runs: its values' memory, the batch, the weights, the sequences' states.
//!
//! The typed views here are where raw workspace memory becomes slices. They rest on two facts that the circuit's
//! layout guarantees: an operation's outputs overlap none of its inputs, and `Turn::each` hands every chunk to one worker.
#![allow(unsafe_code)]

use super::{Failure, Kind, Rows, SlotId, StateId, Value, WeightId};
use crate::backend::cpu::activations::{Activations, Q8_BLOCK, Q8Block};
use crate::backend::cpu::pack::Packed;
use crate::backend::cpu::simd::Table;
use crate::error::Result;
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;

/// The pages of one layer of one sequence: position `p` lives in page `p / PAGE`.
#[derive(Clone, Copy, Debug)]
pub struct KvPages {
    pages: *const *mut u8,
    count: usize,
}

// SAFETY: the pointer is only followed through `Frame`, inside a run whose sequences are exclusively borrowed.
unsafe impl Send for KvPages {}
// SAFETY: as above; writers of a page are disjoint by head and position.
unsafe impl Sync for KvPages {}

impl KvPages {
    /// Borrows a sequence's page pointers; they must outlive the run.
    pub fn new(pages: &[*mut u8]) -> KvPages {
        KvPages { pages: pages.as_ptr(), count: pages.len() }
    }

    /// First bytes of the pages, in order.
    pub fn pages(&self) -> &[*mut u8] {
        // SAFETY: `new` borrowed this slice, which outlives the run.
        unsafe { std::slice::from_raw_parts(self.pages, self.count) }
    }

    /// First byte of page `index`.
    pub fn page(&self, index: usize) -> *mut u8 {
        assert!(index < self.count, "the scheduler reserved pages for every position of the batch");
        // SAFETY: `index` is inside the slice `new` borrowed, which outlives the run.
        unsafe { *self.pages.add(index) }
    }
}

/// A recurrent slot: what a layer carries from one position to the next, the same number of floats at any length.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct SlotSpec {
    /// Name in messages: the layer's and what it holds.
    pub name: String,
    /// Floats; all zero before the first position.
    pub elements: usize,
}

/// The recurrent slots of one sequence during a run: the floats before it, and where those after it go. Both are the
/// same memory where the run goes on from one that is not committed yet.
#[derive(Clone, Copy, Debug)]
pub struct StatePointers {
    read: *const f32,
    write: *mut f32,
    len: usize,
    /// As addresses of a device, of the slots that lie there.
    on_device: [u64; 3],
}

// SAFETY: the pointers are only followed through `Frame`, inside a run whose sequences are exclusively borrowed.
unsafe impl Send for StatePointers {}
// SAFETY: as above; workers touch disjoint pieces.
unsafe impl Sync for StatePointers {}

impl StatePointers {
    /// `len` floats at each place, which must outlive the run; `write` belongs to the run alone.
    pub fn new(read: *const f32, write: *mut f32, len: usize) -> StatePointers {
        StatePointers { read, write, len, on_device: [0; 3] }
    }

    /// The same with slots that lie on a device: where their floats before the run are, and where those after it go.
    pub fn and_device(self, read: u64, write: u64) -> StatePointers {
        StatePointers { on_device: [read, write, 0], ..self }
    }

    /// Where the floats before the run lie on the device.
    pub fn read_address(&self) -> u64 {
        self.on_device[0]
    }

    /// Where those after it go.
    pub fn write_address(&self) -> u64 {
        self.on_device[1]
    }

    /// The same, and where the floats after the step that follows go on the device, should it begin that step by itself.
    pub fn and_next(self, next: u64) -> StatePointers {
        let [read, write, _] = self.on_device;
        StatePointers { on_device: [read, write, next], ..self }
    }

    /// Where the floats after the step that follows go; 0 where nobody has said.
    pub fn next_address(&self) -> u64 {
        self.on_device[2]
    }

    /// For models without recurrent slots.
    pub const fn none() -> StatePointers {
        StatePointers { read: std::ptr::null(), write: std::ptr::null_mut(), len: 0, on_device: [0; 3] }
    }
}

/// One slot of one sequence, as an operation carries it forward.
#[derive(Clone, Copy)]
pub struct SlotState<'a> {
    read: *const f32,
    write: *mut f32,
    len: usize,
    _life: PhantomData<&'a mut [f32]>,
}

impl<'a> SlotState<'a> {
    /// Elements `range` as the rows before left them, to be updated in place. Whatever an operation does not take
    /// this way is lost, so it takes every piece of the slot, each once.
    ///
    /// # Safety
    /// Nobody else holds an element of this range now: chunks come from `Turn::each`, or the caller is alone.
    pub unsafe fn piece(&self, range: Range<usize>) -> &'a mut [f32] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: the range is inside the slot, both places hold `len` floats (`StatePointers::new`) and are either the
        // same or apart; the caller keeps pieces disjoint.
        unsafe {
            let write = self.write.add(range.start);
            if !std::ptr::eq(self.read, self.write) {
                std::ptr::copy_nonoverlapping(self.read.add(range.start), write, range.len());
            }
            std::slice::from_raw_parts_mut(write, range.len())
        }
    }
}

/// Consecutive rows of a batch that belong to one sequence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Rows of the batch.
    pub rows: Range<usize>,
    /// Position of the first row in its sequence.
    pub position: usize,
}

/// The metadata of one run: which tokens, where they stand, whose states they use.
#[derive(Default, Debug)]
pub struct Batch {
    /// Token of each row.
    pub tokens: Vec<i32>,
    /// Position of each row in its sequence.
    pub positions: Vec<u32>,
    /// Rows by sequence, in row order.
    pub segments: Vec<Segment>,
    /// Key/value pages: `[segment][kv state]`.
    pub kv: Vec<KvPages>,
    /// What names a segment's page lists, by segment: the same number, the same pages in them. 0, or no number, for lists without a name.
    pub stamps: Vec<u64>,
    /// Key/value states of the model: the stride of `kv`.
    pub kv_states: usize,
    /// Recurrent slots, by segment; empty where the model has none.
    pub states: Vec<StatePointers>,
    /// Where each slot lies in a sequence's recurrent state, by [`SlotId`].
    pub slots: Arc<[Range<usize>]>,
    /// Tokens of the source that each segment's sequence has read; empty where the model reads none.
    pub sources: Vec<usize>,
}

impl Batch {
    /// Tokens of the source of a segment's sequence.
    pub fn source(&self, segment: usize) -> usize {
        self.sources.get(segment).copied().unwrap_or(0)
    }

    /// Becomes the batch of the step that follows, as a device does by itself ([`super::ADVANCE`]). Tokens stay until they are known; of slots, those on
    /// the device alone go on.
    pub fn advance(&mut self) {
        self.positions.iter_mut().for_each(|position| *position += 1);
        self.segments.iter_mut().for_each(|segment| segment.position += 1);
        self.states.iter_mut().for_each(|state| state.on_device.rotate_left(1));
    }

    /// Rows of a value.
    pub fn rows(&self, rows: Rows) -> usize {
        match rows {
            Rows::All => self.tokens.len(),
            Rows::Last => self.segments.len(),
        }
    }
}

/// Where a value lies in the workspace.
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    /// Bytes from the workspace's start; a multiple of 64.
    pub offset: usize,
    /// Row count, symbolic.
    pub rows: Rows,
    /// Elements in a row.
    pub width: usize,
    /// Elements from one row to the next; more than `width` where the value is a column range of another.
    pub stride: usize,
    /// Kind of element.
    pub kind: Kind,
}

/// A matrix `[rows, cols]`, stored as one packed part for each tensor it was put together from (parts may differ in format).
pub struct Matrix {
    /// Parts, stacked along the rows.
    pub parts: Vec<Packed>,
}

impl Matrix {
    /// Output features.
    pub fn rows(&self) -> usize {
        self.parts.iter().map(Packed::rows).sum()
    }

    /// Decodes row `row` into `out`, which has the matrix's width.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) {
        let mut first = 0;
        for part in &self.parts {
            if row < first + part.rows() {
                return part.decode_row(row - first, out).expect("the row is inside, and `out` has the weight's width");
            }
            first += part.rows();
        }
        panic!("row {row} of a matrix of {first}: tokens are checked against the vocabulary");
    }

    /// Bytes of memory it holds.
    pub fn bytes(&self) -> usize {
        self.parts.iter().map(Packed::len).sum()
    }
}

/// A weight as operations use it.
pub enum Weight {
    /// Packed for products; also serves row look-ups.
    Matrix(Matrix),
    /// A matrix for each expert, all of one shape.
    Experts(Vec<Matrix>),
    /// A matrix for each expert, packed when a row meets it.
    Paged(super::PagedExperts),
    /// A vector in f32 (norms, biases, factors).
    Vector(Vec<f32>),
    /// Rows as the checkpoint stores them, decoded when looked up (an embedding that is no output matrix).
    Stored(Box<dyn StoredRows>),
    /// On a device, which alone uses it; so many bytes there.
    OnDevice(usize),
}

/// Rows that are decoded one by one: in a mapped file, or owned.
pub trait StoredRows: Send + Sync {
    /// Writes row `row`, which exists, into `out`, which has the table's width.
    fn decode_row(&self, row: usize, out: &mut [f32]);
}

impl Weight {
    /// The vector, for operations whose check asked for one.
    pub fn vector(&self) -> &[f32] {
        match self {
            Weight::Vector(v) => v,
            _ => panic!("the tape's check asked for a vector"),
        }
    }

    /// The matrix, for operations whose check asked for one.
    pub fn matrix(&self) -> &Matrix {
        match self {
            Weight::Matrix(m) => m,
            _ => panic!("the tape's check asked for a matrix"),
        }
    }

    /// The experts' matrices, for operations whose check asked for them.
    pub fn experts(&self) -> &[Matrix] {
        match self {
            Weight::Experts(experts) => experts,
            Weight::Matrix(m) => std::slice::from_ref(m),
            _ => panic!("the tape's check asked for experts"),
        }
    }

    /// Decodes row `row` into `out`; experts' rows are counted one expert after the other. Only those left in their file can fail.
    pub fn decode_row(&self, row: usize, out: &mut [f32]) -> Result<()> {
        match self {
            Weight::Vector(v) => out.copy_from_slice(&v[row * out.len()..][..out.len()]),
            Weight::Matrix(m) => m.decode_row(row, out),
            Weight::Experts(experts) => {
                let rows = experts.first().map_or(1, Matrix::rows).max(1);
                experts[row / rows].decode_row(row % rows, out);
            }
            Weight::Paged(paged) => return paged.decode_row(row / paged.rows(), row % paged.rows(), out),
            Weight::Stored(rows) => rows.decode_row(row, out),
            Weight::OnDevice(_) => panic!("weights on a device are looked up there"),
        }
        Ok(())
    }

    /// Bytes of memory it holds (mapped files do not count).
    pub fn bytes(&self) -> usize {
        match self {
            Weight::Matrix(m) => m.bytes(),
            Weight::Experts(experts) => experts.iter().map(Matrix::bytes).sum(),
            Weight::Paged(paged) => paged.bytes() as usize,
            Weight::Vector(v) => size_of_val(v.as_slice()),
            Weight::Stored(_) => 0,
            Weight::OnDevice(bytes) => *bytes,
        }
    }
}

/// One run of a program, as its operations see it.
pub struct Frame<'a> {
    /// First byte of the workspace.
    pub(crate) base: *mut u8,
    /// By value.
    pub(crate) slots: &'a [Slot],
    /// The rows.
    pub batch: &'a Batch,
    /// By weight.
    pub weights: &'a [Weight],
    /// Fast bodies for this processor.
    pub simd: &'static Table,
    /// Workers that may take part; how work is cut may depend on it, its bits not.
    pub workers: usize,
    /// Whether bfloat16 weights meet activations rounded alike; then `simd` has the products for it.
    pub rounds: bool,
    /// Where an operation leaves what it could not do.
    pub failure: &'a Failure,
    pub(crate) _workspace: PhantomData<&'a mut [u8]>,
}

// SAFETY: the workspace is borrowed exclusively for the run; workers touch disjoint output chunks (module comment).
unsafe impl Sync for Frame<'_> {}

impl<'a> Frame<'a> {
    /// Where a value lies.
    pub fn slot(&self, value: Value) -> Slot {
        self.slots[value.0 as usize]
    }

    /// Rows of a value in this batch.
    pub fn rows(&self, value: Value) -> usize {
        self.batch.rows(self.slot(value).rows)
    }

    /// All rows of an input that is no column range of another value.
    pub fn input(&self, value: Value) -> &'a [f32] {
        let slot = self.slot(value);
        debug_assert!(slot.kind != Kind::Q8 && slot.stride == slot.width);
        // SAFETY: layout gave this value `rows * width` floats at `offset`; it was written by an earlier operation.
        unsafe { std::slice::from_raw_parts(self.base.add(slot.offset).cast(), self.batch.rows(slot.rows) * slot.width) }
    }

    /// One row of an input.
    pub fn row(&self, value: Value, row: usize) -> &'a [f32] {
        let slot = self.slot(value);
        debug_assert_ne!(slot.kind, Kind::Q8);
        assert!(row < self.batch.rows(slot.rows));
        // SAFETY: layout gave this value rows of `width` floats, `stride` apart, at `offset`; an earlier operation wrote it.
        unsafe { std::slice::from_raw_parts(self.base.add(slot.offset).cast::<f32>().add(row * slot.stride), slot.width) }
    }

    /// The rows of an output, to be written in disjoint pieces.
    pub fn output(&self, value: Value) -> OutRows<'a> {
        let slot = self.slot(value);
        debug_assert_ne!(slot.kind, Kind::Q8);
        // SAFETY: `offset` lies inside the workspace.
        let base = unsafe { self.base.add(slot.offset).cast() };
        OutRows { base, rows: self.batch.rows(slot.rows), width: slot.width, stride: slot.stride, _life: PhantomData }
    }

    /// An 8-bit input.
    pub fn input_q8(&self, value: Value) -> Activations<'a> {
        let slot = self.slot(value);
        debug_assert_eq!(slot.kind, Kind::Q8);
        let stride = slot.width / Q8_BLOCK;
        // SAFETY: layout gave this value `rows * width / 32` blocks at `offset` (a multiple of 64); an earlier operation wrote them.
        let blocks = unsafe { std::slice::from_raw_parts(self.base.add(slot.offset).cast(), self.batch.rows(slot.rows) * stride) };
        Activations::Q8 { blocks, stride }
    }

    /// One row of an 8-bit output.
    ///
    /// # Safety
    /// Each row is written by one worker.
    pub unsafe fn output_q8(&self, value: Value, row: usize) -> &'a mut [Q8Block] {
        let slot = self.slot(value);
        debug_assert_eq!(slot.kind, Kind::Q8);
        assert!(row < self.batch.rows(slot.rows));
        let blocks = slot.width / Q8_BLOCK;
        // SAFETY: as `input_q8`; the caller keeps rows apart.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(slot.offset).cast::<Q8Block>().add(row * blocks), blocks) }
    }

    /// A weight.
    pub fn weight(&self, id: WeightId) -> &'a Weight {
        &self.weights[id.0 as usize]
    }

    /// As [`Weight::decode_row`]; a failure is the run's.
    pub fn decode_row(&self, id: WeightId, row: usize, out: &mut [f32]) {
        if let Err(e) = self.weight(id).decode_row(row, out) {
            self.failure.note(e);
        }
    }

    /// The segment a row belongs to.
    pub fn segment_of(&self, row: usize) -> usize {
        self.batch.segments.partition_point(|s| s.rows.end <= row)
    }

    /// The recurrent slot of a segment's layer.
    pub fn state(&self, segment: usize, slot: SlotId) -> SlotState<'a> {
        let (state, range) = (&self.batch.states[segment], &self.batch.slots[slot.0 as usize]);
        assert!(range.end <= state.len, "the state was made for this model's slots");
        // SAFETY: the range is inside the sequence's state, checked just above.
        let (read, write) = unsafe { (state.read.add(range.start), state.write.add(range.start)) };
        SlotState { read, write, len: range.len(), _life: PhantomData }
    }

    /// The key/value pages of a segment's layer.
    pub fn pages(&self, segment: usize, state: StateId) -> KvPages {
        self.batch.kv[segment * self.batch.kv_states + state.0 as usize]
    }
}

/// The rows of an output value; pieces are handed out by row or by column range.
#[derive(Clone, Copy)]
pub struct OutRows<'a> {
    base: *mut f32,
    rows: usize,
    width: usize,
    stride: usize,
    _life: PhantomData<&'a mut [f32]>,
}

// SAFETY: see the module comment: chunks are disjoint.
unsafe impl Send for OutRows<'_> {}
// SAFETY: as above.
unsafe impl Sync for OutRows<'_> {}

impl<'a> OutRows<'a> {
    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements in a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// One row.
    ///
    /// # Safety
    /// Nobody else holds a piece of this row now: chunks come from `Turn::each`, or the caller is alone.
    pub unsafe fn row(&self, row: usize) -> &'a mut [f32] {
        // SAFETY: the caller keeps rows apart.
        unsafe { self.piece(row, 0..self.width) }
    }

    /// Columns `cols` of one row.
    ///
    /// # Safety
    /// As [`OutRows::row`], for these columns.
    pub unsafe fn piece(&self, row: usize, cols: Range<usize>) -> &'a mut [f32] {
        assert!(row < self.rows && cols.start <= cols.end && cols.end <= self.width);
        // SAFETY: the piece is inside the value, and disjoint from others by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(row * self.stride + cols.start), cols.len()) }
    }

    /// First element, for kernels that write a column range of many rows, `stride` apart.
    pub fn as_mut_ptr(&self) -> *mut f32 {
        self.base
    }

    /// Elements from one row to the next.
    pub fn stride(&self) -> usize {
        self.stride
    }
}
