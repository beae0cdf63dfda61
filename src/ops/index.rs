//! Sparse attention's indexer: cheap scores of compressed keys, and the best of them as a selection (DeepSeek-V3.2's lightning
//! indexer, 2025; over pooled keys in GLM-5.3, in two steps over blocks in DeepSeek-V4.1).
//!
//! A selection is a row of indices as whole numbers, ascending, -1 where there are fewer. Ties go to the lower index.
#![allow(unsafe_code)] // rows of outputs, disjoint by `Turn::each`

use super::lanes::dot64;
use super::records::GpuRecords;
use super::{Frame, Gpu, Op, Port, Records, Shape, Shapes, StateId, Turn, Value, View, scratch};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_common};

/// What scores are computed from: `score_j = sum_h weight_h relu(q_h . k_j)`.
#[derive(Clone, Copy, Debug)]
pub struct Indexer {
    /// `[rows, heads * width]`.
    pub q: Value,
    /// `[rows, heads]`; none means 1.
    pub weights: Value,
    /// Keys; a query at `p` may meet the first `(p + 1) / every`.
    pub keys: Records,
}

impl Indexer {
    /// Keys a row may meet.
    fn visible(&self, frame: &Frame<'_>, row: usize) -> usize {
        (frame.batch.positions[row] as usize + 1) / self.keys.every
    }

    /// The score of key `j`. Constant positive factors are left out: they move no choice.
    fn score(&self, frame: &Frame<'_>, segment: usize, row: usize, j: usize, key: &mut [f32]) -> f32 {
        let key = self.keys.read(&frame.pages(segment, self.keys.state), j, key);
        let heads = frame.row(self.q, row).chunks(key.len());
        match self.weights.is_some() {
            true => heads.zip(frame.row(self.weights, row)).map(|(q, w)| w * frame.simd.dot(q, key).max(0.0)).sum(),
            false => heads.map(|q| frame.simd.dot(q, key).max(0.0)).sum(),
        }
    }

    fn score64(&self, frame: &Frame<'_>, segment: usize, row: usize, j: usize, key: &mut [f32]) -> f64 {
        let key = self.keys.read(&frame.pages(segment, self.keys.state), j, key);
        let weight = |h: usize| if self.weights.is_some() { f64::from(frame.row(self.weights, row)[h]) } else { 1.0 };
        frame.row(self.q, row).chunks(key.len()).enumerate().map(|(h, q)| weight(h) * dot64(q, key).max(0.0)).sum()
    }

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        let weights = self.weights.is_some().then_some((Port::In, &mut self.weights));
        [(Port::In, &mut self.q)].into_iter().chain(weights).collect()
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Shape> {
        let q = shapes.value(self.q);
        self.keys.check(shapes)?;
        if !self.weights.is_some() {
            ensure!(q.width > 0 && q.width.is_multiple_of(self.keys.width), Internal, "indexer: {q:?} over keys of {}", self.keys.width);
            return Ok(q);
        }
        let weights = shapes.value(self.weights);
        ensure!(
            q.width == weights.width * self.keys.width && q.rows == weights.rows,
            Internal,
            "indexer: {q:?} and {weights:?} over keys of {}",
            self.keys.width
        );
        Ok(q)
    }
}

const SCORES: Kernel = Kernel { file: "index", name: "index_scores" };
const BEST: Kernel = Kernel { file: "index", name: "index_best" };
const SELECT: Kernel = Kernel { file: "index", name: "index_select" };
/// Bytes for scores that a launch uses at most, unless one row needs more; more rows go one launch after the other.
const SCRATCH: usize = 64 << 20;
/// Widest keys: 32 of them and 16 heads of a query are in shared memory.
const MOST_WIDTH: usize = 240;

#[derive(Clone, Copy)]
#[repr(C)]
struct IndexArgs {
    q: View,
    weights: View,
    blocks: View,
    y: View,
    batch: u64,
    keys: GpuRecords,
    values: u64,
    stride: u32,
    best_stride: u32,
    first_row: u32,
    rows: u32,
    block: u32,
    top_k: u32,
    whole_blocks: u32,
    positions: u32,
}

// SAFETY: the struct of kernels/index.cu.
unsafe impl Args for IndexArgs {}

/// Bytes of shared memory that scores take.
fn score_bytes(width: usize) -> usize {
    let wide = width.next_multiple_of(4);
    (32 * (wide + 1) + 16 * wide).next_multiple_of(4) * 4
}

/// What is chosen on a GPU.
struct Choice {
    /// Candidates, or none for all; keys of a block.
    blocks: Value,
    block: usize,
    top_k: usize,
    /// Blocks are chosen.
    whole_blocks: bool,
    positions: bool,
    y: Value,
}

impl Indexer {
    /// Scores, then the best of them: as many rows at a time as there is memory for.
    fn launch(&self, gpu: &Gpu<'_>, choice: &Choice) -> Result<()> {
        let width = self.keys.width;
        ensure!(width <= MOST_WIDTH, Unsupported, "indexer: keys of {width} elements; a GPU scores at most {MOST_WIDTH}");
        let longest = gpu.batch.positions.iter().max().map_or(0, |p| *p as usize + 1);
        let visible = longest / self.keys.every;
        let candidates = match choice.blocks.is_some() {
            true => gpu.width(choice.blocks).min(visible.div_ceil(choice.block)) * choice.block,
            false => visible,
        };
        // A row of numbers takes at least one, so that addresses differ.
        let (stride, best) = (candidates.max(1), if choice.whole_blocks { candidates.div_ceil(choice.block).max(1) } else { 0 });
        let (values, bytes) = gpu.scratch();
        let (rows, at_once) = (gpu.rows(choice.y), bytes / (4 * (stride + best)));
        ensure!(at_once > 0 || rows == 0, Internal, "indexer: {bytes} bytes for {stride} scores");
        for first in (0..rows).step_by(at_once.clamp(1, 65535)) {
            let count = at_once.min(65535).min(rows - first);
            let args = IndexArgs {
                q: gpu.view(self.q),
                weights: gpu.view(self.weights),
                blocks: gpu.view(choice.blocks),
                y: gpu.view(choice.y),
                batch: gpu.batch_at(),
                keys: self.keys.gpu(gpu),
                values,
                stride: stride as u32,
                best_stride: best as u32,
                first_row: first as u32,
                rows: count as u32,
                block: choice.block as u32,
                top_k: choice.top_k as u32,
                whole_blocks: u32::from(choice.whole_blocks),
                positions: u32::from(choice.positions),
            };
            gpu.launch(SCORES, Grid::new([candidates.div_ceil(32), count, 1], 128).shared(score_bytes(width)), &args)?;
            if choice.whole_blocks {
                gpu.launch(BEST, Grid::new([best.div_ceil(128), count, 1], 128), &args)?;
            }
            gpu.launch(SELECT, Grid::new([count, 1, 1], 256), &args)?;
        }
        Ok(())
    }

    /// Bytes for `rows` rows of `candidates` numbers.
    fn gpu_scratch(rows: usize, candidates: usize) -> usize {
        let row = (candidates + 2).saturating_mul(4);
        rows.saturating_mul(row).min(SCRATCH).max(row)
    }
}

/// Whether `a` comes before `b`: a higher score, or the same at a lower index. What is not a number comes last.
fn before(scores: &[f32], a: u32, b: u32) -> std::cmp::Ordering {
    let value = |i: u32| if scores[i as usize].is_nan() { f32::NEG_INFINITY } else { scores[i as usize] };
    value(b).total_cmp(&value(a)).then(a.cmp(&b))
}

/// Moves the best `k` of `list` to its front, ascending; returns how many there are.
fn keep_best(scores: &[f32], list: &mut [u32], k: usize) -> usize {
    let k = k.min(list.len());
    if k > 0 && k < list.len() {
        list.select_nth_unstable_by(k - 1, |a, b| before(scores, *a, *b));
    }
    list[..k].sort_unstable();
    k
}

/// The best `top_k` keys of each row.
#[derive(Clone, Debug)]
pub struct IndexSelect {
    /// Scores.
    pub indexer: Indexer,
    /// Keys to keep.
    pub top_k: usize,
    /// `[rows, n]`: blocks of keys to choose among (see [`IndexBlocks`]), or none.
    pub blocks: Value,
    /// Keys of a block.
    pub block: usize,
    /// Whether the selection names positions instead of groups: all of each group kept, and those after the last complete group.
    pub positions: bool,
    /// `[rows, top_k]`, or `[rows, top_k * every + every - 1]` of positions.
    pub y: Value,
}

impl IndexSelect {
    /// Writes indices of the groups in `list`, which is ascending.
    fn write(&self, frame: &Frame<'_>, row: usize, list: &[u32], y: &mut [f32]) {
        y.fill(-1.0);
        let every = self.indexer.keys.every;
        if !self.positions {
            y.iter_mut().zip(list).for_each(|(y, j)| *y = *j as f32);
            return;
        }
        let end = frame.batch.positions[row] as usize + 1;
        let members = list.iter().flat_map(|j| (0..every).map(move |i| *j as usize * every + i));
        y.iter_mut().zip(members.chain(end / every * every..end)).for_each(|(y, p)| *y = p as f32);
    }

    /// Calls `f` with every key the row chooses among, ascending.
    fn candidates(&self, frame: &Frame<'_>, row: usize, mut f: impl FnMut(usize)) {
        let count = self.indexer.visible(frame, row);
        if self.blocks.is_some() {
            for b in frame.row(self.blocks, row).iter().filter(|b| **b >= 0.0) {
                let first = *b as usize * self.block;
                (first..(first + self.block).min(count)).for_each(&mut f);
            }
        } else {
            (0..count).for_each(f);
        }
    }

    fn row(&self, frame: &Frame<'_>, segment: usize, row: usize, s: &mut scratch::Scratch, y: &mut [f32]) {
        let mut n = 0;
        self.candidates(frame, row, |_| n += 1);
        let list = scratch::sized(&mut s.pairs, n);
        let mut at = 0;
        self.candidates(frame, row, |j| {
            list[at] = j as u32;
            at += 1;
        });
        // Where all are kept, scores do not matter.
        let mut kept = n;
        if n > self.top_k {
            let count = self.indexer.visible(frame, row);
            let (scores, key) = scratch::sized(&mut s.a, count + self.indexer.keys.width).split_at_mut(count);
            for &j in &*list {
                scores[j as usize] = self.indexer.score(frame, segment, row, j as usize, key);
            }
            kept = keep_best(scores, list, self.top_k);
        }
        self.write(frame, row, &list[..kept], y);
    }
}

impl Op for IndexSelect {
    op_common!("index_select");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        let mut ports = self.indexer.ports();
        if self.blocks.is_some() {
            ports.push((Port::In, &mut self.blocks));
        }
        ports.push((Port::Out, &mut self.y));
        ports
    }

    fn states(&self) -> Vec<(Port, StateId)> {
        vec![(Port::In, self.indexer.keys.state)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let q = self.indexer.check(shapes)?;
        ensure!(
            self.top_k > 0 && (!self.blocks.is_some() || self.block > 0),
            Unsupported,
            "index_select: the best {} of blocks of {}",
            self.top_k,
            self.block
        );
        let every = self.indexer.keys.every;
        Ok(vec![Shape::f32(q.rows, if self.positions { self.top_k * every + every - 1 } else { self.top_k })])
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        for (index, segment) in frame.batch.segments.iter().enumerate() {
            for row in segment.rows.clone() {
                let mut list: Vec<(f64, u32)> = Vec::new();
                let mut key = vec![0.0; self.indexer.keys.width];
                self.candidates(frame, row, |j| list.push((self.indexer.score64(frame, index, row, j, &mut key), j as u32)));
                list.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
                let mut best: Vec<u32> = list.iter().take(self.top_k).map(|l| l.1).collect();
                best.sort_unstable();
                // SAFETY: alone.
                self.write(frame, row, &best, unsafe { y.row(row) });
            }
        }
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let IndexSelect { blocks, block, top_k, positions, y, .. } = *self;
        self.indexer.launch(gpu, &Choice { blocks, block, top_k, whole_blocks: false, positions, y })
    }

    fn gpu_scratch(&self, rows: usize, _segments: usize, context: usize, _processors: usize) -> usize {
        // Keys of blocks are counted whole, however few of the last block's there are.
        let blocks = if self.blocks.is_some() { self.block } else { 0 };
        Indexer::gpu_scratch(rows, context / self.indexer.keys.every + blocks)
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let y = frame.output(self.y);
        turn.pieces(y.rows(), 1, |range| {
            for row in range {
                // SAFETY: `each` gives a row to one worker.
                scratch::with(|s| self.row(frame, frame.segment_of(row), row, s, unsafe { y.row(row) }));
            }
        });
    }
}

/// The best blocks of keys, by each block's best key; the block of the newest key is always among them.
#[derive(Clone, Debug)]
pub struct IndexBlocks {
    /// Scores.
    pub indexer: Indexer,
    /// Keys of a block.
    pub block: usize,
    /// Blocks to keep.
    pub top_k: usize,
    /// `[rows, top_k]`.
    pub y: Value,
}

impl IndexBlocks {
    fn row(&self, frame: &Frame<'_>, segment: usize, row: usize, s: &mut scratch::Scratch, y: &mut [f32]) {
        let count = self.indexer.visible(frame, row);
        let blocks = count.div_ceil(self.block);
        let list = scratch::sized(&mut s.pairs, blocks);
        list.iter_mut().enumerate().for_each(|(i, b)| *b = i as u32);
        let mut kept = blocks;
        if blocks > self.top_k {
            let (best, key) = scratch::sized(&mut s.a, blocks + self.indexer.keys.width).split_at_mut(blocks);
            best.fill(f32::NEG_INFINITY);
            for j in 0..count {
                let score = self.indexer.score(frame, segment, row, j, key);
                best[j / self.block] = best[j / self.block].max(score);
            }
            best[blocks - 1] = f32::INFINITY;
            kept = keep_best(best, list, self.top_k);
        }
        y.fill(-1.0);
        y.iter_mut().zip(&list[..kept]).for_each(|(y, b)| *y = *b as f32);
    }
}

impl Op for IndexBlocks {
    op_common!("index_blocks");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        self.indexer.ports().into_iter().chain([(Port::Out, &mut self.y)]).collect()
    }

    fn states(&self) -> Vec<(Port, StateId)> {
        vec![(Port::In, self.indexer.keys.state)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let q = self.indexer.check(shapes)?;
        ensure!(self.top_k > 0 && self.block > 0, Unsupported, "index_blocks: the best {} blocks of {}", self.top_k, self.block);
        Ok(vec![Shape::f32(q.rows, self.top_k)])
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        for (index, segment) in frame.batch.segments.iter().enumerate() {
            for row in segment.rows.clone() {
                let mut key = vec![0.0; self.indexer.keys.width];
                let scores: Vec<f64> =
                    (0..self.indexer.visible(frame, row)).map(|j| self.indexer.score64(frame, index, row, j, &mut key)).collect();
                let mut best: Vec<(f64, usize)> =
                    scores.chunks(self.block).enumerate().map(|(b, s)| (s.iter().copied().fold(f64::NEG_INFINITY, f64::max), b)).collect();
                if let Some(newest) = best.last_mut() {
                    newest.0 = f64::INFINITY;
                }
                best.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
                let mut kept: Vec<usize> = best.iter().take(self.top_k).map(|b| b.1).collect();
                kept.sort_unstable();
                // SAFETY: alone.
                let y = unsafe { y.row(row) };
                y.fill(-1.0);
                y.iter_mut().zip(kept).for_each(|(y, b)| *y = b as f32);
            }
        }
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let IndexBlocks { block, top_k, y, .. } = *self;
        self.indexer.launch(gpu, &Choice { blocks: Value::NONE, block, top_k, whole_blocks: true, positions: false, y })
    }

    fn gpu_scratch(&self, rows: usize, _segments: usize, context: usize, _processors: usize) -> usize {
        let keys = context / self.indexer.keys.every;
        Indexer::gpu_scratch(rows, keys + keys.div_ceil(self.block))
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let y = frame.output(self.y);
        turn.pieces(y.rows(), 1, |range| {
            for row in range {
                // SAFETY: `each` gives a row to one worker.
                scratch::with(|s| self.row(frame, frame.segment_of(row), row, s, unsafe { y.row(row) }));
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_come_out_ascending_and_ties_keep_the_lower() {
        let mut list: Vec<u32> = (0..6).collect();
        let n = keep_best(&[1.0, 3.0, 2.0, 3.0, 2.0, f32::NAN], &mut list, 3);
        assert_eq!(list[..n], [1, 2, 3]);
        let mut list: Vec<u32> = (0..2).collect();
        assert_eq!(keep_best(&[0.0, 1.0], &mut list, 5), 2);
    }
}
