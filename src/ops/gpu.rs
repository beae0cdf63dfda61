//! What an operation sees while it is launched on a GPU: addresses of its values, the batch, the weights.
//!
//! The structs are the twins of those in `kernels/common/frame.cuh`. Addresses are the device's and never followed here. Kernels read the
//! number of rows from the device, so that a graph captured once for a width serves every smaller batch; the host's numbers size grids.
#![allow(unsafe_code)] // argument structs

use super::{Batch, Kind, KvSpec, KvType, Slot, SlotId, StateId, Value, WeightId, linear_launch};
use crate::backend::cuda::launch::{Args, Grid, Kernel, Launch, bytes_of};
use crate::ensure;
use crate::error::Result;
use std::ops::Range;

/// Rows of a value: f32, 8-bit blocks (then `stride` counts blocks), or words that products read (then `tiles` is not 0).
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct View {
    /// First element.
    pub data: u64,
    /// Where the number of rows stands.
    pub rows: u64,
    /// Elements (blocks) from one row to the next.
    pub stride: u32,
    /// Elements in a row.
    pub width: u32,
    /// Tiles of eight rows that are words of bfloat16; 0 for rows of f32 or blocks.
    pub tiles: u32,
    /// Which order such words have.
    pub words: Words,
}

/// The order of words that products read: kernels/linear_prepare.cu.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Words {
    /// For tiles of `mma.sync`.
    Tiles,
    /// For products of groups of warps.
    Groups,
}

impl View {
    /// Not connected: `data` is null.
    pub const NONE: View = View { data: 0, rows: 0, stride: 0, width: 0, tiles: 0, words: Words::Tiles };
}

/// How packed weights are stored: `LayoutKind`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(u32)]
pub enum LayoutKind {
    /// f32.
    F32,
    /// bfloat16.
    Bf16,
    /// Half floats.
    F16,
    /// 8-bit floats with scales.
    F8,
    /// 8-bit codes.
    I8,
    /// 4-bit codes.
    I4,
    /// 4-bit codes of a table.
    Table,
}

/// A packed part of a matrix on the device.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Part {
    /// First panel.
    pub data: u64,
    /// Bytes from one panel to the next.
    pub panel_bytes: u64,
    /// Output features.
    pub rows: u32,
    /// Input features.
    pub cols: u32,
    /// First of its rows in the whole matrix.
    pub first: u32,
    /// Element type.
    pub kind: LayoutKind,
    /// Elements per scale; 1 for floats without.
    pub block: u32,
    /// Whether blocks have a minimum.
    pub min: u32,
    /// What 4-bit codes stand for; zeros elsewhere.
    pub table: [i8; 16],
}

impl Part {
    /// Nothing.
    pub const NONE: Part =
        Part { data: 0, panel_bytes: 0, rows: 0, cols: 0, first: 0, kind: LayoutKind::F32, block: 1, min: 0, table: [0; 16] };
}

/// Dims of key/value pages: `Kv`.
#[derive(Clone, Copy, Debug, PartialEq)]
#[repr(C)]
pub struct Kv {
    /// Key/value heads.
    pub heads: u32,
    /// Elements of a key.
    pub key_dim: u32,
    /// Elements of a value.
    pub value_dim: u32,
    /// Whether elements are half floats; else f32.
    pub half: u32,
}

impl KvSpec {
    /// As kernels see it, which know half floats and f32.
    pub(super) fn on_gpu(&self) -> Result<Kv> {
        let known = matches!(self.dtype, KvType::F32 | KvType::F16);
        ensure!(known, Unsupported, "keys and values are kept in {:?}; a GPU keeps them in f16 or f32", self.dtype);
        Ok((*self).into())
    }
}

impl From<KvSpec> for Kv {
    fn from(spec: KvSpec) -> Kv {
        let (heads, key_dim, value_dim) = (spec.heads as u32, spec.key_dim as u32, spec.value_dim as u32);
        Kv { heads, key_dim, value_dim, half: u32::from(spec.dtype == KvType::F16) }
    }
}

/// A weight on the device.
pub enum GpuWeight {
    /// `[rows, cols]` in parts, also for look-ups.
    Matrix(Vec<Part>),
    /// For each expert its parts; all experts have the same number of parts and layouts. `table` is the address of all parts as an array
    /// `[experts][parts]` on the device.
    Experts {
        /// By expert.
        parts: Vec<Vec<Part>>,
        /// The same on the device.
        table: u64,
    },
    /// f32.
    Vector {
        /// First element.
        data: u64,
        /// Elements.
        len: usize,
    },
}

/// One run of a program, as its operations see it while they are launched.
pub struct Gpu<'a> {
    /// First byte of the workspace.
    pub(crate) base: u64,
    /// By value.
    pub(crate) slots: &'a [Slot],
    /// Rows and segments that grids are sized for; the batch has at most as many.
    pub(crate) rows: usize,
    pub(crate) segments: usize,
    /// Where the `Batch` lies on the device, whose first words are the numbers of rows and of segments.
    pub(crate) batch_at: u64,
    /// The same batch here: what it says of positions and sources sizes grids; its pointers are the device's. While a graph is captured it is
    /// the widest the graph may be used for.
    pub batch: &'a Batch,
    /// By weight.
    pub(crate) weights: &'a [GpuWeight],
    /// Where launches go.
    pub(crate) stream: &'a dyn Launch,
    /// Whether bfloat16 weights may meet activations rounded to bfloat16.
    pub(crate) rounds: bool,
    /// Whether the order of a row's sums must not depend on what else is in the batch.
    pub(crate) fixed_order: bool,
    /// Device memory for an operation's own use between its launches, never between operations.
    pub(crate) scratch: (u64, usize),
}

impl Gpu<'_> {
    /// A value as kernels see it; [`View::NONE`] where it is not connected.
    pub fn view(&self, value: Value) -> View {
        if !value.is_some() {
            return View::NONE;
        }
        let slot = self.slots[value.0 as usize];
        let rows = self.batch_at + if slot.rows == super::Rows::All { 0 } else { 4 };
        let blocks = if slot.kind == Kind::Q8 { 32 } else { 1 };
        let (tiles, words) = self.words(value).map_or((0, Words::Tiles), |(tiles, words)| (tiles as u32, words));
        View { data: self.base + slot.offset as u64, rows, stride: (slot.stride / blocks) as u32, width: slot.width as u32, tiles, words }
    }

    /// Tiles and order of a value that is words in this run.
    pub(super) fn words(&self, value: Value) -> Option<(usize, Words)> {
        let prepared = value.is_some() && self.slots[value.0 as usize].kind == Kind::Prepared;
        prepared.then(|| linear_launch::words(self.rows(value), self)).flatten()
    }

    /// Rows of a value that a grid must cover.
    pub fn rows(&self, value: Value) -> usize {
        if self.slots[value.0 as usize].rows == super::Rows::All { self.rows } else { self.segments }
    }

    /// Segments that a grid must cover.
    pub fn segments(&self) -> usize {
        self.segments
    }

    /// Whether a value is in 8-bit blocks.
    pub fn is_q8(&self, value: Value) -> bool {
        self.slots[value.0 as usize].kind == Kind::Q8
    }

    /// Elements in a row of a value.
    pub fn width(&self, value: Value) -> usize {
        self.slots[value.0 as usize].width
    }

    /// Address of the `Batch`.
    pub fn batch_at(&self) -> u64 {
        self.batch_at
    }

    /// Address of a vector; 0 for none.
    pub fn vector(&self, id: Option<WeightId>) -> u64 {
        match id.map(|id| &self.weights[id.0 as usize]) {
            Some(GpuWeight::Vector { data, .. }) => *data,
            None => 0,
            Some(_) => panic!("the tape's check asked for a vector"),
        }
    }

    /// Elements of a vector; 0 for none.
    pub fn vector_len(&self, id: Option<WeightId>) -> usize {
        match id.map(|id| &self.weights[id.0 as usize]) {
            Some(GpuWeight::Vector { len, .. }) => *len,
            _ => 0,
        }
    }

    /// A weight.
    pub fn weight(&self, id: WeightId) -> &GpuWeight {
        &self.weights[id.0 as usize]
    }

    /// A matrix' parts.
    pub fn parts(&self, id: WeightId) -> &[Part] {
        match self.weight(id) {
            GpuWeight::Matrix(parts) => parts,
            _ => panic!("the tape's check asked for a matrix"),
        }
    }

    /// Calls `f` with each part that a table's rows are in, or with the address of a vector that holds rows of `width`. A row is in one of them.
    pub fn each_part(&self, table: WeightId, width: usize, mut f: impl FnMut(Part, u64) -> Result<()>) -> Result<()> {
        match self.weight(table) {
            GpuWeight::Matrix(parts) => parts.iter().try_for_each(|part| f(*part, 0)),
            GpuWeight::Vector { data, len } => f(Part { rows: (len / width.max(1)) as u32, cols: width as u32, ..Part::NONE }, *data),
            GpuWeight::Experts { .. } => panic!("the tape's check asked for a matrix"),
        }
    }

    /// Floats of a recurrent slot, from the start of a sequence's state.
    pub fn slot(&self, slot: SlotId) -> Range<usize> {
        self.batch.slots[slot.0 as usize].clone()
    }

    /// Index of a key/value state in a segment's row of `Batch::pages`.
    pub fn kv_index(&self, state: StateId) -> u32 {
        state.0
    }

    /// Memory for this operation's own use: address and bytes. What an operation needs at most is told by [`super::Op::gpu_scratch`].
    pub fn scratch(&self) -> (u64, usize) {
        self.scratch
    }

    /// Whether bfloat16 weights may meet activations rounded to bfloat16; else products are those of f32.
    pub fn rounds(&self) -> bool {
        self.rounds
    }

    /// Whether a row's sums have one order, whatever else is in the batch: kernels are picked, and sums cut, by what the row alone says.
    pub fn fixed_order(&self) -> bool {
        self.fixed_order
    }

    /// Multiprocessors of the device.
    pub fn processors(&self) -> usize {
        self.stream.processors()
    }

    /// Whether the device takes kernels with products of groups of warps (compute capability 9.0).
    pub fn has_groups(&self) -> bool {
        self.stream.has_groups()
    }

    /// Bytes of shared memory that a block may have.
    pub fn shared(&self) -> usize {
        self.stream.shared()
    }

    /// Queues a copy to the device.
    pub fn write(&self, to: u64, bytes: &[u8]) -> Result<()> {
        self.stream.write(to, bytes)
    }

    /// Queues a kernel.
    pub fn launch<A: Args>(&self, kernel: Kernel, grid: Grid, args: &A) -> Result<()> {
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        self.stream.launch(kernel, grid, bytes_of(args))
    }
}
