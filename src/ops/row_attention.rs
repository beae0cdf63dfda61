//! What `attention` and `source_attention` launch on a GPU: rows of short segments one by one (kernels/attention_decode.cu, other widths
//! kernels/attention.cu), those of long ones in tiles (kernels/attention_prompt.cu).
#![allow(unsafe_code)] // argument structs

use super::{Gpu, Kv, KvSpec, KvType, PAGE, StateId, Value, View, WeightId};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;

/// What is to be attended to.
pub(super) struct RowAttention {
    pub q: Value,
    pub y: Value,
    pub state: StateId,
    pub spec: KvSpec,
    pub heads: usize,
    pub scale: f32,
    pub window: Option<usize>,
    pub softcap: Option<f32>,
    pub sinks: Option<WeightId>,
    /// Whether all of the segment's source is seen.
    pub source: bool,
}

const fn kernel(name: &'static str) -> Kernel {
    Kernel { file: "attention", name }
}

/// By the query heads that share a pass over keys and values.
const HALF: [(usize, Kernel); 3] = [(1, kernel("attention_half_1")), (4, kernel("attention_half_4")), (8, kernel("attention_half_8"))];
const FLOAT: [(usize, Kernel); 2] = [(1, kernel("attention_float_1")), (4, kernel("attention_float_4"))];
const COMBINE: Kernel = kernel("attention_combine");

/// As in kernels/common/attention.cuh and kernels/attention.cu.
const TILE: usize = 64;
const THREADS: usize = 128;
/// Warps of a block of kernels/attention_decode.cu; of the kernel for many rows.
const DECODE_WARPS: usize = 8;
const MANY_WARPS: usize = 4;
const MOST_CHUNKS: usize = 64;
/// As in kernels/attention_prompt.cu.
const PROMPT_WARPS: usize = 4;
const PROMPT_QUERIES: usize = 64;
/// Rows from which on a segment is taken in tiles.
const PROMPT_ROWS: usize = 8;
/// Elements of keys and of values in kernels/attention_group.cu.
const GROUP_DIM: usize = 128;
/// Elements of the widest keys and values that tiles are made for.
const WIDEST: usize = 256;
/// Bytes of shared memory that a block may have on every device.
const MOST_SHARED: usize = 99 << 10;
/// Most rows whose positions are cut into chunks: more fill the device by themselves.
const FEW_ROWS: usize = 64;

#[derive(Clone, Copy)]
#[repr(C)]
struct AttentionArgs {
    q: View,
    y: View,
    batch: u64,
    sinks: u64,
    partial: u64,
    kv: Kv,
    state: u32,
    heads: u32,
    window: u32,
    scale: f32,
    softcap: f32,
    chunks: u32,
    partial_rows: u32,
    source: u32,
    most_rows: u32,
    stages: u32,
    most_chunks: u32,
    first: u32,
    least_tiles: u32,
    spare: u32,
}

// SAFETY: the struct of kernels/attention.cu.
unsafe impl Args for AttentionArgs {}

/// Chunks that a row's positions are cut into at most: many rows fill the device with few each, and a captured grid has all of them.
fn most_chunks(rows: usize) -> usize {
    match rows {
        ..5 => MOST_CHUNKS,
        5..17 => MOST_CHUNKS / 4,
        _ => MOST_CHUNKS / 8,
    }
}

/// Chunks that `positions` are cut into; the first tile may begin before the first one that is seen.
fn chunks(positions: usize, rows: usize) -> usize {
    (positions.div_ceil(TILE) + 1).min(most_chunks(rows))
}

/// The kernel of kernels/attention_decode.cu for keys and values of a width, and the query heads that share a block.
fn decode_kernel(spec: &KvSpec, group: usize) -> Option<(Kernel, usize)> {
    let named = |name| Kernel { file: "attention_decode", name };
    if spec.dtype != KvType::F16 || spec.key_dim != spec.value_dim {
        return None;
    }
    match (spec.key_dim, group) {
        (64, ..5) => Some((named("attention_decode_64_4"), 4)),
        (64, _) => Some((named("attention_decode_64_8"), 8)),
        (128, ..5) => Some((named("attention_decode_128_4"), 4)),
        (128, _) => Some((named("attention_decode_128_8"), 8)),
        (256, _) => Some((named("attention_decode_256_4"), 4)),
        _ => None,
    }
}

/// Chunks that rows of `tiles` are cut into for `blocks` rows and heads: as many as fill the device, but none where a warp has one tile, or two and
/// half the device is busy anyway.
fn decode_chunks(tiles: usize, blocks: usize, processors: usize) -> usize {
    if tiles <= DECODE_WARPS || tiles <= 2 * DECODE_WARPS && 2 * blocks > processors {
        return 1;
    }
    let fill = (2 * processors).div_ceil(blocks.max(1));
    // Long rows among short ones end last: what they have is cut up even where all together fill the device.
    fill.max(tiles / (8 * DECODE_WARPS)).min(tiles.div_ceil(DECODE_WARPS))
}

/// Tiles of a chunk where a row's chunks are to depend on its own positions alone; more where there would be too many of them.
const FIXED_TILES: usize = 16;
/// Most rows of a grid.
const MOST_GRID: usize = 65535;

/// Most such chunks of a row of up to `tiles`: `span_of` of kernels/common/attention.cuh.
fn fixed_chunks(tiles: usize) -> usize {
    tiles.div_ceil(FIXED_TILES).clamp(1, MOST_CHUNKS)
}

fn partial_bytes(rows: usize, heads: usize, spec: &KvSpec, chunks: usize) -> usize {
    if chunks == 1 { 0 } else { rows * heads * chunks * (2 + spec.value_dim) * 4 }
}

impl RowAttention {
    /// Bytes for the chunks' results.
    pub fn scratch(rows: usize, heads: usize, spec: &KvSpec, context: usize) -> usize {
        (1..=rows.min(FEW_ROWS)).map(|rows| partial_bytes(rows, heads, spec, chunks(context, rows))).max().unwrap_or(0)
    }

    /// The arguments, for rows of segments shorter than `most_rows`.
    fn args(&self, gpu: &Gpu<'_>, chunks: usize, most_rows: u32) -> AttentionArgs {
        AttentionArgs {
            q: gpu.view(self.q),
            y: gpu.view(self.y),
            batch: gpu.batch_at(),
            sinks: gpu.vector(self.sinks),
            partial: gpu.scratch().0,
            kv: self.spec.into(),
            state: gpu.kv_index(self.state),
            heads: self.heads as u32,
            window: self.window.map_or(0, |w| u32::try_from(w).unwrap_or(u32::MAX)),
            scale: self.scale,
            softcap: self.softcap.unwrap_or(0.0),
            chunks: chunks as u32,
            partial_rows: gpu.rows(self.y) as u32,
            source: u32::from(self.source),
            most_rows,
            stages: 0,
            most_chunks: most_chunks(gpu.rows(self.y)) as u32,
            first: 0,
            least_tiles: 0,
            spare: 0,
        }
    }

    /// Positions that the batch's longest row sees.
    fn longest(&self, gpu: &Gpu<'_>) -> usize {
        let batch = gpu.batch;
        let seen = if self.source {
            batch.sources.iter().copied().max().unwrap_or(0)
        } else {
            batch.segments.iter().map(|s| s.position + s.rows.len()).max().unwrap_or(0)
        };
        self.window.unwrap_or(usize::MAX).min(seen)
    }

    /// Queues the kernels for all rows.
    pub fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let (spec, group) = (&self.spec, self.heads / self.spec.heads);
        spec.on_gpu()?;
        if gpu.fixed_order() {
            return self.fixed(gpu);
        }
        let fits = spec.dtype == KvType::F16 && spec.key_dim.is_multiple_of(16) && spec.value_dim.is_multiple_of(8);
        if !fits || spec.key_dim.max(spec.value_dim) > WIDEST || group > PROMPT_QUERIES {
            return self.short(gpu, u32::MAX);
        }
        let lengths = || gpu.batch.segments.iter().map(|s| s.rows.len());
        let tiles = |queries: usize| lengths().filter(|n| *n >= PROMPT_ROWS).map(|n| n.div_ceil(queries / group)).sum();
        if tiles(PROMPT_QUERIES) == 0 {
            return self.short(gpu, u32::MAX);
        }
        if gpu.has_groups() && gpu.rounds() && spec.key_dim == GROUP_DIM && spec.value_dim == GROUP_DIM {
            self.grouped(gpu, tiles(2 * PROMPT_QUERIES))?;
        } else {
            self.long(gpu, tiles(PROMPT_QUERIES))?;
        }
        if lengths().all(|n| n >= PROMPT_ROWS) {
            return Ok(());
        }
        self.short(gpu, PROMPT_ROWS as u32)
    }

    /// Queues the kernel for segments of at least [`PROMPT_ROWS`] rows, which make `tiles`, by products of groups of warps.
    fn grouped(&self, gpu: &Gpu<'_>, tiles: usize) -> Result<()> {
        // Two tiles of 128 keys and values, queries, and what aligns them and counts.
        let shared = 2 * 2 * 128 * GROUP_DIM * 2 + 2 * PROMPT_QUERIES * GROUP_DIM * 2 + 2048;
        let grid = Grid::new([self.spec.heads, tiles, 1], 384).shared(shared).early();
        let name = if self.softcap.is_some() { "attention_group_128_softcap" } else { "attention_group_128" };
        gpu.launch(Kernel { file: "attention_group", name }, grid, &self.args(gpu, 1, PROMPT_ROWS as u32))
    }

    /// Queues the kernel for segments of at least [`PROMPT_ROWS`] rows, which make `tiles`.
    fn long(&self, gpu: &Gpu<'_>, tiles: usize) -> Result<()> {
        let spec = &self.spec;
        let fast = gpu.rounds();
        let limbs = if fast { 1 } else { 2 };
        let queries = PROMPT_WARPS * spec.key_dim / 16 * limbs * 512 + PROMPT_QUERIES * 4;
        let tile = PAGE * 2 * (spec.key_dim + spec.value_dim.next_multiple_of(64));
        let stages = if queries + 2 * tile <= MOST_SHARED { 2 } else { 1 };
        let name = match (spec.value_dim, fast) {
            (..65, false) => "attention_prompt_64",
            (..65, true) => "attention_prompt_64_fast",
            (65..129, false) => "attention_prompt_128",
            (65..129, true) => "attention_prompt_128_fast",
            (_, false) => "attention_prompt_256",
            (_, true) => "attention_prompt_256_fast",
        };
        let args = AttentionArgs { stages, ..self.args(gpu, 1, PROMPT_ROWS as u32) };
        let grid = Grid::new([tiles, spec.heads, 1], PROMPT_WARPS * 32).shared(queries + stages as usize * tile).early();
        gpu.launch(Kernel { file: "attention_prompt", name }, grid, &args)
    }

    /// Queues the kernels for all rows one by one, with chunks that a row's own positions say: prompts too.
    fn fixed(&self, gpu: &Gpu<'_>) -> Result<()> {
        let (rows, spec) = (gpu.rows(self.y), &self.spec);
        // A tile more where the first one begins before what is seen.
        let chunks = fixed_chunks(self.longest(gpu).div_ceil(TILE) + usize::from(self.window.is_some()));
        let room = gpu.scratch().1 / partial_bytes(1, self.heads, spec, chunks).max(1);
        let most = if chunks == 1 { MOST_GRID } else { room.clamp(1, MOST_GRID) };
        for first in (0..rows).step_by(most) {
            let count = most.min(rows - first);
            let args = AttentionArgs {
                most_chunks: MOST_CHUNKS as u32,
                first: first as u32,
                partial_rows: count as u32,
                least_tiles: FIXED_TILES as u32,
                ..self.args(gpu, chunks, u32::MAX)
            };
            match decode_kernel(spec, self.heads / spec.heads) {
                Some((kernel, together)) => self.launch_decode(gpu, (kernel, DECODE_WARPS), together, count, &args)?,
                None => self.launch_simple(gpu, count, &args)?,
            }
        }
        Ok(())
    }

    /// Queues the kernels for rows of segments shorter than `most_rows`.
    fn short(&self, gpu: &Gpu<'_>, most_rows: u32) -> Result<()> {
        match decode_kernel(&self.spec, self.heads / self.spec.heads) {
            Some((kernel, together)) => self.decode(gpu, kernel, together, most_rows),
            None => self.simple(gpu, most_rows),
        }
    }

    /// As `short`, on tensor cores.
    fn decode(&self, gpu: &Gpu<'_>, kernel: Kernel, together: usize, most_rows: u32) -> Result<()> {
        let (rows, spec) = (gpu.rows(self.y), &self.spec);
        let blocks = spec.heads * (self.heads / spec.heads).div_ceil(together);
        // A tile more where the first one begins before what is seen.
        let longest = self.longest(gpu);
        let tiles = longest.div_ceil(TILE) + usize::from(self.window.is_some());
        let mut most = chunks(longest, rows).min(decode_chunks(tiles, rows * blocks, gpu.processors()));
        if rows > FEW_ROWS || partial_bytes(rows, self.heads, spec, most) > gpu.scratch().1 {
            most = 1;
        }
        // Where there are more blocks than multiprocessors, two small ones share one.
        let many = Kernel { file: "attention_decode", name: "attention_decode_128_4_many" };
        let (kernel, warps) = if kernel.name == "attention_decode_128_4" && most * blocks * rows > gpu.processors() {
            (many, MANY_WARPS)
        } else {
            (kernel, DECODE_WARPS)
        };
        let args = AttentionArgs { most_chunks: most as u32, ..self.args(gpu, most, most_rows) };
        self.launch_decode(gpu, (kernel, warps), together, rows, &args)
    }

    fn launch_decode(
        &self,
        gpu: &Gpu<'_>,
        (kernel, warps): (Kernel, usize),
        together: usize,
        rows: usize,
        args: &AttentionArgs,
    ) -> Result<()> {
        let spec = &self.spec;
        let blocks = spec.heads * (self.heads / spec.heads).div_ceil(together);
        let shared = together * (spec.key_dim * 4 + 4 + warps * (2 + spec.value_dim) * 4);
        let grid = Grid::new([args.chunks as usize, blocks, rows], warps * 32).shared(shared).early();
        gpu.launch(kernel, grid, args)?;
        self.combine(gpu, rows, args)
    }

    /// As `short`, for every width.
    fn simple(&self, gpu: &Gpu<'_>, most_rows: u32) -> Result<()> {
        let (rows, spec) = (gpu.rows(self.y), &self.spec);
        let mut chunks = if rows <= FEW_ROWS { chunks(self.longest(gpu), rows) } else { 1 };
        if partial_bytes(rows, self.heads, spec, chunks) > gpu.scratch().1 {
            chunks = 1;
        }
        self.launch_simple(gpu, rows, &self.args(gpu, chunks, most_rows))
    }

    fn launch_simple(&self, gpu: &Gpu<'_>, rows: usize, args: &AttentionArgs) -> Result<()> {
        let spec = &self.spec;
        let group = self.heads / spec.heads;
        let half = spec.dtype == KvType::F16;
        let kernels: &[(usize, Kernel)] = if half { &HALF } else { &FLOAT };
        // Queries of wide heads are many floats of shared memory.
        let most = if spec.key_dim > 512 { 4 } else { 8 };
        let (together, kernel) = *kernels.iter().find(|(n, _)| *n >= group.min(most)).unwrap_or(&kernels[kernels.len() - 1]);
        let elements = if half { 8 } else { 4 };
        let shares = THREADS / spec.value_dim.div_ceil(elements);
        let shared = 4 * ((together * (spec.key_dim + 2 * TILE + 3)).next_multiple_of(4) + together * shares * spec.value_dim);
        let grid = Grid::new([args.chunks as usize, spec.heads * group.div_ceil(together), rows], THREADS).shared(shared).early();
        gpu.launch(kernel, grid, args)?;
        self.combine(gpu, rows, args)
    }

    /// Queues what puts chunks together.
    fn combine(&self, gpu: &Gpu<'_>, rows: usize, args: &AttentionArgs) -> Result<()> {
        if args.chunks == 1 {
            return Ok(());
        }
        let threads = self.spec.value_dim.next_multiple_of(32).clamp(MOST_CHUNKS, 256);
        gpu.launch(COMBINE, Grid::new([self.heads, rows, 1], threads).early(), args)
    }
}
