//! What `linear` launches on a GPU: which kernel takes which shape.
//!
//! Few rows read each weight once and multiply in f32, more of them meet it in tensor cores; shapes that those do not take are left to the
//! simple kernel.
#![allow(unsafe_code)] // argument structs

use super::linear::Linear;
use super::linear_plan::Plan;
use super::{GatedLinear, Gpu, LayoutKind, Part, Value, View, Words};
use crate::backend::cpu::pack::{F8_RUN, Layout};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;

const LINEAR: Kernel = Kernel { file: "linear", name: "linear" };

#[derive(Clone, Copy)]
#[repr(C)]
struct LinearArgs {
    x: View,
    q: View,
    y: View,
    bias: u64,
    part: Part,
}

// SAFETY: the struct of kernels/linear.cu.
unsafe impl Args for LinearArgs {}

/// Parts that a launch takes together.
const TOGETHER: usize = 4;

/// Whether a product's two parts are a gate and what it is multiplied with, and the gate's activation: kernels/common/rows.cuh.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Gating {
    pub on: u32,
    linear: f32,
    cubic: f32,
}

impl Gating {
    pub const NONE: Gating = Gating { on: 0, linear: 0.0, cubic: 0.0 };
}

#[derive(Clone, Copy)]
#[repr(C)]
struct VectorArgs {
    x: View,
    q: View,
    y: View,
    bias: u64,
    parts: u32,
    panels: u32,
    part: [Part; TOGETHER],
    gating: Gating,
    spare: u32,
}

// SAFETY: the struct of kernels/linear_vector.cu.
unsafe impl Args for VectorArgs {}

#[derive(Clone, Copy)]
#[repr(C)]
struct PrepareArgs {
    x: View,
    q: View,
    rows: u64,
    words: u64,
    factors: u64,
    exponents: u64,
    first: u32,
    cols: u32,
    tiles: u32,
    limbs: u32,
    order: u32,
    spare: u32,
}

// SAFETY: the struct of kernels/linear_prepare.cu.
unsafe impl Args for PrepareArgs {}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct TensorArgs {
    y: View,
    bias: u64,
    words: u64,
    factors: u64,
    exponents: u64,
    first: u32,
    tiles: u32,
    limbs: u32,
    parts: u32,
    part: [Part; TOGETHER],
}

// SAFETY: the struct of kernels/formats/fragments.cuh.
unsafe impl Args for TensorArgs {}

#[derive(Clone, Copy)]
#[repr(C)]
struct GatedArgs {
    product: TensorArgs,
    gating: Gating,
    spare: u32,
}

// SAFETY: the struct of kernels/linear_group.cu.
unsafe impl Args for GatedArgs {}

/// Queues the kernels.
pub(super) fn launch(op: &Linear, gpu: &Gpu<'_>) -> Result<()> {
    let parts = gpu.parts(op.weight);
    let mut start = 0;
    while start < parts.len() {
        let alike = parts[start..].iter().take(TOGETHER).take_while(|p| format_of(p) == format_of(&parts[start])).count();
        same_layout(op, gpu, &parts[start..start + alike])?;
        start += alike;
    }
    Ok(())
}

/// What kernels are made for.
fn format_of(part: &Part) -> (LayoutKind, u32, u32, [i8; 16]) {
    (part.kind, part.block, part.min, part.table)
}

fn panels(parts: &[Part]) -> usize {
    parts.iter().map(|p| (p.rows as usize).div_ceil(16)).sum()
}

/// Parts of one layout.
fn same_layout(op: &Linear, gpu: &Gpu<'_>, parts: &[Part]) -> Result<()> {
    let rows = gpu.rows(op.y);
    if !parts[0].cols.is_multiple_of(32) {
        return simple(op, gpu, parts);
    }
    // The kernel for few rows adds in an order of its own.
    if (rows <= FEW && !gpu.fixed_order()) || parts[0].kind == LayoutKind::F32 {
        return vector(op, gpu, parts);
    }
    let format = Format::for_rows(&parts[0], rows, gpu);
    if gpu.words(op.x).is_some() {
        return slice(op, gpu, parts, &format, 0, rows);
    }
    // As many rows at a time as there is room for.
    let room = gpu.scratch().1;
    let mut most = rows.min(if gpu.fixed_order() { NARROW } else { SLICE });
    while format.bytes(parts[0].cols as usize, tiles_for(most)) > room && most > TILE {
        most = most / 2 / TILE * TILE;
    }
    if format.bytes(parts[0].cols as usize, tiles_for(most)) > room {
        return vector(op, gpu, parts);
    }
    (0..rows).step_by(most).try_for_each(|first| slice(op, gpu, parts, &format, first, most.min(rows - first)))
}

/// Rows that read weights once and multiply in f32.
const FEW: usize = 4;
/// Rows of x that a product takes.
const TILE: usize = 8;
/// Most rows of the kernel that reads weights straight into tensor cores.
const NARROW: usize = 32;
/// Most rows that are prepared at once.
const SLICE: usize = 2048;
/// Tiles of the largest block of the kernel for many rows.
const WIDE_TILES: usize = 32;
/// Panels of its blocks.
const GROUP_PANELS: usize = 8;

/// Tiles that rows are padded to.
fn tiles_for(rows: usize) -> usize {
    let tiles = rows.div_ceil(TILE);
    if tiles <= NARROW / TILE { tiles.next_power_of_two() } else { tiles.next_multiple_of(WIDE_TILES) }
}

/// Tiles and order of the words that products of bfloat16 take for so many rows; none where they take f32.
pub(super) fn words(rows: usize, gpu: &Gpu<'_>) -> Option<(usize, Words)> {
    let order = if rows > NARROW && gpu.has_groups() { Words::Groups } else { Words::Tiles };
    (rows > FEW).then(|| (tiles_for(rows), order))
}

/// Columns that rows of words come in multiples of.
pub const PREPARED_COLUMNS: usize = 64;

/// Whether products with parts of a layout take rows of words, which they would round to otherwise.
pub fn takes_prepared(layout: Layout, cols: usize) -> bool {
    // 8-bit floats: whole runs, without which no kernel for many rows takes their order.
    layout == Layout::Bf16 || layout == Layout::F8 && cols.is_multiple_of(F8_RUN)
}

/// Bytes of a value of `rows` rows as words; `None` on overflow.
pub fn prepared_bytes(rows: usize, width: usize) -> Option<usize> {
    tiles_for(rows).checked_mul(TILE)?.checked_mul(width)?.checked_mul(2)
}

/// Bytes of scratch.
pub(super) fn scratch(op: &Linear, width: &dyn Fn(Value) -> usize, rows: usize) -> usize {
    let tiles = tiles_for(rows.clamp(NARROW, SLICE));
    let need = |value: Value, format: Format| if value.is_some() { format.bytes(width(value), tiles) } else { 0 };
    let floats = Format { order: Order::Bf16, limbs: 3, integer: false, exponents: false };
    let integers = Format { order: Order::I8, limbs: 1, integer: true, exponents: false };
    need(op.x, floats).max(need(op.q, integers)).max(need(op.q, integers.in_groups()))
}

/// The order of activations that a format's products take: kernels/formats/fragments.cuh.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u32)]
pub(super) enum Order {
    Bf16,
    F16,
    I8,
    I4,
    Table,
}

/// How activations are laid for a layout.
#[derive(Clone, Copy)]
pub(super) struct Format {
    order: Order,
    /// Pieces that an element is cut into.
    pub limbs: usize,
    /// Whether products are those of integers.
    pub integer: bool,
    /// Whether rows are divided by powers of two, so that f16 holds them.
    exponents: bool,
}

/// A kernel for many rows: `rows` of x by 128 weight rows in a block.
struct Block {
    kernel: Kernel,
    rows: usize,
    threads: usize,
    shared: usize,
}

impl Format {
    /// For products of `rows` rows.
    fn for_rows(part: &Part, rows: usize, gpu: &Gpu<'_>) -> Format {
        let format = Format::of(part, gpu.rounds());
        let grouped = format.integer && rows > NARROW && !gpu.fixed_order() && group_kernels(part, gpu).is_some();
        if grouped { format.in_groups() } else { format }
    }

    /// Integers as f16, in the same order.
    fn in_groups(self) -> Format {
        Format { integer: false, exponents: true, ..self }
    }

    fn of(part: &Part, rounds: bool) -> Format {
        let (order, limbs, integer) = match part.kind {
            // Three pieces of bfloat16 are all bits of an f32; two of f16 and the row's exponent are nearly all.
            LayoutKind::F32 | LayoutKind::Bf16 | LayoutKind::F8 => (Order::Bf16, if rounds { 1 } else { 3 }, false),
            LayoutKind::F16 => (Order::F16, 2, false),
            LayoutKind::I8 => (Order::I8, 1, true),
            LayoutKind::I4 => (Order::I4, 1, true),
            LayoutKind::Table => (Order::Table, 1, true),
        };
        Format { order, limbs, integer, exponents: order == Order::F16 }
    }

    /// Steps of k that are prepared.
    fn steps(&self, cols: usize) -> usize {
        if self.integer { cols.div_ceil(32).next_multiple_of(2) } else { cols / 16 }
    }

    /// Bytes of the words of all steps and limbs.
    fn word_bytes(&self, cols: usize, tiles: usize) -> usize {
        self.limbs * self.steps(cols) * tiles * 256
    }

    /// Bytes in all: words, then factors of blocks or exponents of rows.
    fn bytes(&self, cols: usize, tiles: usize) -> usize {
        let more = if self.integer { self.steps(cols) * tiles * TILE * 8 } else { tiles * TILE * 4 };
        self.word_bytes(cols, tiles) + more
    }
}

/// Rows `first ..` of x by tensor cores.
fn slice(op: &Linear, gpu: &Gpu<'_>, parts: &[Part], format: &Format, first: usize, rows: usize) -> Result<()> {
    let (cols, tiles) = (parts[0].cols as usize, tiles_for(rows));
    let prepared = gpu.words(op.x).is_some();
    let words = if prepared { gpu.view(op.x).data } else { gpu.scratch().0 };
    let after = words + format.word_bytes(cols, tiles) as u64;
    let factors = if format.integer { after } else { 0 };
    let exponents = if format.exponents { after } else { 0 };
    let (x, q, y, bias) = (gpu.view(op.x), gpu.view(op.q), gpu.view(op.y), gpu.vector(op.bias));
    let first = first as u32;
    let mut part = [Part::NONE; TOGETHER];
    part[..parts.len()].copy_from_slice(parts);
    let (limbs, count) = (format.limbs as u32, parts.len() as u32);
    let blocks = |panels: usize| -> usize { parts.iter().map(|p| (p.rows as usize).div_ceil(16 * panels)).sum() };
    let args = TensorArgs { y, bias, words, factors, exponents, first, tiles: tiles as u32, limbs, parts: count, part };
    let (narrow, wide) = tensor_kernels(&parts[0]);
    let plan = (tiles <= NARROW / TILE).then(|| match gpu.fixed_order() {
        // How warps share k is the order of a sum: the same for any number of rows.
        true => Plan::new(&parts[0], format, blocks(2), NARROW / TILE, Gating::NONE, gpu).for_tiles(&parts[0], format, tiles, gpu),
        false => Plan::new(&parts[0], format, blocks(2), tiles, Gating::NONE, gpu),
    });
    let prepare = PrepareArgs {
        x,
        q,
        rows: y.rows,
        words,
        factors,
        exponents,
        first,
        cols: cols as u32,
        tiles: tiles as u32,
        limbs,
        order: format.order as u32,
        spare: 0,
    };
    let named = |name| Kernel { file: "linear_prepare", name };
    if exponents != 0 {
        gpu.launch(named("prepare_exponents"), Grid::new([tiles * TILE, 1, 1], 256).early(), &prepare)?;
    }
    let grouped = if plan.is_some() { None } else { group_kernels(&parts[0], gpu) };
    let (kernel, grid) = match (&grouped, format.integer) {
        (Some(_), _) if q != View::NONE => ("prepare_group_codes", [cols / 64, tiles / 4, 1]),
        (Some(_), _) => ("prepare_group", [cols / 64, tiles / 4, 1]),
        (None, true) => ("prepare_codes", [format.steps(cols).div_ceil(8), tiles, 1]),
        (None, false) => ("prepare_floats", [format.steps(cols).div_ceil(8), tiles, 1]),
    };
    if !prepared {
        gpu.launch(named(kernel), Grid::new(grid, 256).early(), &prepare)?;
    }
    if let Some(plan) = plan {
        return plan.launch(gpu, narrow.map(|names| names[tiles.ilog2() as usize]), args);
    }
    let both = grouped.unwrap_or_else(|| wide_kernels(&parts[0], wide));
    let Block { kernel, rows: most, threads, shared } = fitting(both, rows, blocks(GROUP_PANELS), gpu);
    gpu.launch(kernel, Grid::new([rows.div_ceil(most), blocks(GROUP_PANELS), 1], threads).shared(shared).early(), &args)
}

/// Queues a product with its activation in one kernel, where there is one; whether it did.
pub(super) fn gated(op: &GatedLinear, gpu: &Gpu<'_>) -> Result<bool> {
    let (linear, parts, rows) = (&op.linear, gpu.parts(op.linear.weight), gpu.rows(op.act.y));
    let ([first, second], Some((a, b))) = (parts, op.act.act.as_sigmoid()) else { return Ok(false) };
    let takes = matches!(first.kind, LayoutKind::Bf16 | LayoutKind::F8) && first.kind == second.kind;
    if !takes || first.rows != second.rows || !first.cols.is_multiple_of(32) {
        return Ok(false);
    }
    let gating = Gating { on: 1, linear: a, cubic: b };
    let both = if op.up_first { [*second, *first] } else { [*first, *second] };
    let (y, bias) = (gpu.view(op.act.y), gpu.vector(linear.bias));
    if rows <= FEW {
        if first.kind == LayoutKind::F8 {
            return Ok(false);
        }
        vector_of(&both, linear, y, rows, gating, gpu)?;
        return Ok(true);
    }
    let Some((tiles, order)) = gpu.words(linear.x) else { return Ok(false) };
    let (words, mut part) = (gpu.view(linear.x).data, [Part::NONE; TOGETHER]);
    part[..2].copy_from_slice(&both);
    let product = TensorArgs { y, bias, words, factors: 0, exponents: 0, first: 0, tiles: tiles as u32, limbs: 1, parts: 2, part };
    if rows <= NARROW {
        let pairs = 2 * (first.rows as usize).div_ceil(32);
        let plan = Plan::new(first, &Format::of(first, true), pairs, tiles, gating, gpu);
        plan.launch(gpu, tensor_kernels(first).0.map(|names| names[tiles.ilog2() as usize]), product)?;
        return Ok(true);
    }
    if order != Words::Groups {
        return Ok(false);
    }
    let blocks = (first.rows as usize).div_ceil(16 * GROUP_PANELS / 2);
    let names = if first.kind == LayoutKind::F8 { ["gated_f8_128", "gated_f8_256"] } else { ["gated_bf16_128", "gated_bf16_256"] };
    let Block { kernel, rows: most, threads, shared } = fitting(group_blocks(names), rows, blocks, gpu);
    let grid = Grid::new([rows.div_ceil(most), blocks, 1], threads).shared(shared).early();
    gpu.launch(kernel, grid, &GatedArgs { product, gating, spare: 0 })?;
    Ok(true)
}

/// The large block where it fills the device with `blocks` of weights, else the small one.
fn fitting([small, large]: [Block; 2], rows: usize, blocks: usize, gpu: &Gpu<'_>) -> Block {
    let fills = rows > 64 && rows.div_ceil(large.rows) * blocks * 10 >= gpu.processors() * 9;
    if fills { large } else { small }
}

/// By `mma.sync`: any device.
fn wide_kernels(part: &Part, names: [&'static str; 2]) -> [Block; 2] {
    let integer = part.kind >= LayoutKind::I8;
    let block = |name, tiles: usize, stages: usize| Block {
        kernel: Kernel { file: "linear_wide", name },
        rows: tiles * TILE,
        threads: 256,
        shared: stages * (8 * stage_bytes(part) + tiles * (512 + if integer { 128 } else { 0 })),
    };
    [block(names[0], 8, 4), if integer { block(names[1], WIDE_TILES / 2, 4) } else { block(names[1], WIDE_TILES, 3) }]
}

/// By products of groups of warps, where the device and the shape take them.
fn group_kernels(part: &Part, gpu: &Gpu<'_>) -> Option<[Block; 2]> {
    macro_rules! named {
        ($name:literal) => {
            [concat!("group_", $name, "_128"), concat!("group_", $name, "_256")]
        };
    }
    let names = match (part.kind, part.block, part.min) {
        (LayoutKind::F32, ..) => return None,
        (LayoutKind::Bf16, ..) => named!("bf16"),
        (LayoutKind::F16, ..) => named!("f16"),
        (LayoutKind::F8, ..) => named!("f8"),
        // Integers are rounded to f16 there.
        _ if !gpu.rounds() => return None,
        (LayoutKind::I8, 16, 0) => named!("i8_half"),
        (LayoutKind::I8, 16, _) => named!("i8_half_min"),
        (LayoutKind::I8, _, 0) => named!("i8"),
        (LayoutKind::I8, ..) => named!("i8_min"),
        (LayoutKind::I4, 16, 0) => named!("i4_half"),
        (LayoutKind::I4, 16, _) => named!("i4_half_min"),
        (LayoutKind::I4, _, 0) => named!("i4"),
        (LayoutKind::I4, ..) => named!("i4_min"),
        (LayoutKind::Table, 16, _) => named!("table_half"),
        (LayoutKind::Table, ..) => named!("table"),
    };
    // Stages of 64; of 8-bit floats whole runs.
    if !gpu.has_groups() || !part.cols.is_multiple_of(part.block.max(64)) {
        return None;
    }
    Some(group_blocks(names))
}

/// The kernels of kernels/linear_group.cu for 128 and 256 rows.
fn group_blocks(names: [&'static str; 2]) -> [Block; 2] {
    let block = |name, rows: usize, stages: usize| Block {
        kernel: Kernel { file: "linear_group", name },
        rows,
        threads: 384,
        shared: stages * rows * 128 + 2048,
    };
    [block(names[0], 128, 8), block(names[1], 256, 6)]
}

/// Bytes of a panel's two steps.
pub(super) fn stage_bytes(part: &Part) -> usize {
    let scales = if part.block == 16 { 128 } else { 64 } * (1 + part.min as usize);
    match part.kind {
        LayoutKind::F32 | LayoutKind::Bf16 | LayoutKind::F16 => 1024,
        // Scales lie in front of the panel.
        LayoutKind::F8 => 512,
        LayoutKind::I8 => 1024 + scales,
        LayoutKind::I4 | LayoutKind::Table => 512 + scales,
    }
}

/// The kernels for 8, 16 and 32 rows, of kernels/linear_narrow.cu and kernels/linear_stream.cu, and those for many.
fn tensor_kernels(part: &Part) -> ([[&'static str; 3]; 2], [&'static str; 2]) {
    macro_rules! named {
        ($name:literal, $large:literal) => {
            (
                [
                    [concat!("narrow_", $name, "_1"), concat!("narrow_", $name, "_2"), concat!("narrow_", $name, "_4")],
                    [concat!("stream_", $name, "_1"), concat!("stream_", $name, "_2"), concat!("stream_", $name, "_4")],
                ],
                [concat!("wide_", $name, "_8"), concat!("wide_", $name, "_", $large)],
            )
        };
    }
    match (part.kind, part.block, part.min) {
        (LayoutKind::F32 | LayoutKind::Bf16, ..) => named!("bf16", "32"),
        (LayoutKind::F16, ..) => named!("f16", "32"),
        (LayoutKind::F8, ..) => named!("f8", "32"),
        (LayoutKind::I8, 16, 0) => named!("i8_half", "16"),
        (LayoutKind::I8, 16, _) => named!("i8_half_min", "16"),
        (LayoutKind::I8, _, 0) => named!("i8", "16"),
        (LayoutKind::I8, ..) => named!("i8_min", "16"),
        (LayoutKind::I4, 16, 0) => named!("i4_half", "16"),
        (LayoutKind::I4, 16, _) => named!("i4_half_min", "16"),
        (LayoutKind::I4, _, 0) => named!("i4", "16"),
        (LayoutKind::I4, ..) => named!("i4_min", "16"),
        (LayoutKind::Table, 16, _) => named!("table_half", "16"),
        (LayoutKind::Table, ..) => named!("table", "16"),
    }
}

/// Any shape.
fn simple(op: &Linear, gpu: &Gpu<'_>, parts: &[Part]) -> Result<()> {
    let (x, q, y, bias) = (gpu.view(op.x), gpu.view(op.q), gpu.view(op.y), gpu.vector(op.bias));
    for &part in parts {
        let grid = Grid::new([(part.rows as usize).div_ceil(16), gpu.rows(op.y).div_ceil(4), 1], 256).early();
        gpu.launch(LINEAR, grid, &LinearArgs { x, q, y, bias, part })?;
    }
    Ok(())
}

/// The kernel for one row, and the one for four.
fn vector_kernels(part: &Part) -> [Kernel; 2] {
    let named = |names: [&'static str; 2]| names.map(|name| Kernel { file: "linear_vector", name });
    named(match (part.kind, part.block, part.min) {
        (LayoutKind::F32, ..) => ["vector_f32_1", "vector_f32_4"],
        (LayoutKind::Bf16, ..) => ["vector_bf16_1", "vector_bf16_4"],
        (LayoutKind::F16, ..) => ["vector_f16_1", "vector_f16_4"],
        (LayoutKind::F8, ..) => ["vector_f8_1", "vector_f8_4"],
        (LayoutKind::I8, 16, 0) => ["vector_i8_half_1", "vector_i8_half_4"],
        (LayoutKind::I8, 16, _) => ["vector_i8_half_min_1", "vector_i8_half_min_4"],
        (LayoutKind::I8, _, 0) => ["vector_i8_1", "vector_i8_4"],
        (LayoutKind::I8, ..) => ["vector_i8_min_1", "vector_i8_min_4"],
        (LayoutKind::I4, 16, 0) => ["vector_i4_half_1", "vector_i4_half_4"],
        (LayoutKind::I4, 16, _) => ["vector_i4_half_min_1", "vector_i4_half_min_4"],
        (LayoutKind::I4, _, 0) => ["vector_i4_1", "vector_i4_4"],
        (LayoutKind::I4, ..) => ["vector_i4_min_1", "vector_i4_min_4"],
        (LayoutKind::Table, 16, _) => ["vector_table_half_1", "vector_table_half_4"],
        (LayoutKind::Table, ..) => ["vector_table_1", "vector_table_4"],
    })
}

/// Warps that share a panel's `steps`: as even as they come.
fn warps(steps: usize) -> usize {
    let rounds = steps.div_ceil(MOST_WARPS).max(1);
    steps.div_ceil(rounds).clamp(1, MOST_WARPS)
}

/// As in kernels/linear_vector.cu.
const MOST_WARPS: usize = 8;

/// Blocks that a multiprocessor has at a time, as kernels/linear_vector.cu says.
fn resident(part: &Part) -> usize {
    match (part.kind, part.block, part.min) {
        (LayoutKind::F8 | LayoutKind::I8, ..) | (LayoutKind::I4, 16, 1) | (LayoutKind::Table, 16, _) => 2,
        _ => 3,
    }
}

/// Each weight is read once for up to four rows.
fn vector(op: &Linear, gpu: &Gpu<'_>, parts: &[Part]) -> Result<()> {
    vector_of(parts, op, gpu.view(op.y), gpu.rows(op.y), Gating::NONE, gpu)
}

/// As `vector`, for `rows` rows that are written to `y`.
fn vector_of(parts: &[Part], op: &Linear, y: View, rows: usize, gating: Gating, gpu: &Gpu<'_>) -> Result<()> {
    let gated = ["gated_bf16_1", "gated_bf16_4"].map(|name| Kernel { file: "linear_vector", name });
    let [one, four] = if gating.on == 1 { gated } else { vector_kernels(&parts[0]) };
    let (kernel, together) = if rows == 1 && !gpu.fixed_order() { (one, 1) } else { (four, 4) };
    let step = match parts[0].kind {
        LayoutKind::F32 => 8,
        LayoutKind::Bf16 | LayoutKind::F16 => 16,
        LayoutKind::F8 => 128,
        _ => 256,
    };
    let panels = panels(parts);
    // One row of activations for tensor cores; more of them than there is room for go the other way.
    let shared = if parts[0].kind == LayoutKind::F8 && rows == 1 { (parts[0].cols as usize).div_ceil(step) * 516 } else { 0 };
    let (kernel, together, shared) = if shared > gpu.shared() - (2 << 10) { (four, 4, 0) } else { (kernel, together, shared) };
    let threads = 32 * warps((parts[0].cols as usize).div_ceil(step));
    let mut part = [Part::NONE; TOGETHER];
    part[..parts.len()].copy_from_slice(parts);
    let (x, q, bias) = (gpu.view(op.x), gpu.view(op.q), gpu.vector(op.bias));
    let args = VectorArgs { x, q, y, bias, parts: parts.len() as u32, panels: panels as u32, part, gating, spare: 0 };
    // A gate and its other factor are a block's.
    let blocks = (panels / if gating.on == 1 { 2 } else { 1 }).min(gpu.processors() * resident(&parts[0]));
    gpu.launch(kernel, Grid::new([blocks, rows.div_ceil(together), 1], threads).shared(shared).early(), &args)
}
