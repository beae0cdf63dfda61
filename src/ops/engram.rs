//! Engram (DeepSeek-V4.1): n-gram memory. Hashes of the last tokens' folded ids choose rows of a table; what they expand to is added
//! to each residual stream, as far as the stream agrees with the row's key.
#![allow(unsafe_code)] // argument structs

use super::records::GpuRecords;
use super::tokens::bits;
use super::{Frame, Gpu, Op, Port, Records, Rows, Shape, Shapes, StateId, Value, View, WeightId};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_by_row, op_common};

/// Numbers that turn tokens into rows of one layer's table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EngramHash {
    /// One for each token of the longest n-gram.
    pub multipliers: Vec<i64>,
    /// A modulus for each column; the columns of the bigrams first, then of the trigrams, and so on.
    pub primes: Vec<u32>,
    /// First row of each column's share of the table.
    pub offsets: Vec<u32>,
}

/// Rows of one layer's table for each row of the batch.
#[derive(Clone, Debug)]
pub struct EngramRows {
    /// Tokens of the sequence, one a position.
    pub history: Records,
    /// `[vocabulary]`: folded id of each token, as whole numbers; -1 ends an n-gram.
    pub map: WeightId,
    /// Folded id that stands where an n-gram has ended.
    pub pad: i64,
    /// The hash.
    pub hash: EngramHash,
    /// `[rows, columns]`, as bits.
    pub y: Value,
}

/// Tokens of the longest n-gram there is room for.
pub const MOST_TOKENS: usize = 16;

impl EngramRows {
    fn row(&self, frame: &Frame<'_>, row: usize, y: &mut [f32]) {
        let segment = frame.segment_of(row);
        let position = frame.batch.positions[row] as usize;
        let pages = frame.pages(segment, self.history.state);
        let map = frame.weight(self.map).vector();
        let tokens = self.hash.multipliers.len();
        let heads = y.len() / (tokens - 1);
        let mut ended = false;
        let mut folded = |i: usize| {
            ended = ended || i > position;
            if !ended {
                let token = self.history.read(&pages, position - i, &mut [0.0])[0] as usize;
                let id = map[token] as i64;
                ended = id < 0;
                if !ended {
                    return id;
                }
            }
            self.pad
        };
        let mut mixed = folded(0).wrapping_mul(self.hash.multipliers[0]);
        for i in 1..tokens {
            mixed ^= folded(i).wrapping_mul(self.hash.multipliers[i]);
            for column in (i - 1) * heads..i * heads {
                let bucket = mixed.rem_euclid(i64::from(self.hash.primes[column])) as u32;
                y[column] = bits(bucket + self.hash.offsets[column]);
            }
        }
    }
}

const ROWS: Kernel = Kernel { file: "engram", name: "engram_rows" };
const INJECT: Kernel = Kernel { file: "engram", name: "engram_inject" };
/// Columns of a launch.
const COLUMNS: usize = 64;

#[derive(Clone, Copy)]
#[repr(C)]
struct EngramRowsArgs {
    y: View,
    batch: u64,
    history: GpuRecords,
    map: u64,
    pad: i64,
    vocabulary: u32,
    tokens: u32,
    heads: u32,
    start: u32,
    columns: u32,
    spare: u32,
    multiplier: [i64; MOST_TOKENS],
    prime: [u32; COLUMNS],
    offset: [u32; COLUMNS],
}

// SAFETY: the struct of kernels/engram.cu.
unsafe impl Args for EngramRowsArgs {}

impl Op for EngramRows {
    op_common!("engram_rows");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::Out, &mut self.y)]
    }

    fn states(&self) -> Vec<(Port, StateId)> {
        vec![(Port::In, self.history.state)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        self.history.check(shapes)?;
        let (tokens, columns) = (self.hash.multipliers.len(), self.hash.primes.len());
        ensure!((2..=MOST_TOKENS).contains(&tokens), Unsupported, "engram: n-grams of {tokens} tokens; 2 to {MOST_TOKENS} are possible");
        ensure!(
            columns > 0
                && columns.is_multiple_of(tokens - 1)
                && self.hash.offsets.len() == columns
                && self.hash.primes.iter().all(|p| *p > 0),
            Internal,
            "engram: {columns} columns for n-grams of {tokens}"
        );
        Ok(vec![Shape::f32(Rows::All, columns)])
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let (tokens, columns) = (self.hash.multipliers.len(), self.hash.primes.len());
        let mut args = EngramRowsArgs {
            y: gpu.view(self.y),
            batch: gpu.batch_at(),
            history: self.history.gpu(gpu),
            map: gpu.vector(Some(self.map)),
            pad: self.pad,
            vocabulary: gpu.vector_len(Some(self.map)) as u32,
            tokens: tokens as u32,
            heads: (columns / (tokens - 1)) as u32,
            start: 0,
            columns: 0,
            spare: 0,
            multiplier: [0; MOST_TOKENS],
            prime: [1; COLUMNS],
            offset: [0; COLUMNS],
        };
        args.multiplier[..tokens].copy_from_slice(&self.hash.multipliers);
        for (index, primes) in self.hash.primes.chunks(COLUMNS).enumerate() {
            let (start, count) = (index * COLUMNS, primes.len());
            (args.start, args.columns) = (start as u32, count as u32);
            args.prime[..count].copy_from_slice(primes);
            args.offset[..count].copy_from_slice(&self.hash.offsets[start..start + count]);
            gpu.launch(ROWS, Grid::new([gpu.rows(self.y).div_ceil(64), count, 1], 64), &args)?;
        }
        Ok(())
    }

    op_by_row!(8);
}

/// `y_c = x_c + sigmoid(root(dot_c)) value`, with `dot_c = norm(x_c) q_c . norm(key_c) k_c / sqrt(width)` and
/// `root(d) = sign(d) sqrt(|d|)`.
#[derive(Clone, Debug)]
pub struct EngramInject {
    /// `[rows, streams * width]`.
    pub x: Value,
    /// `[rows, (streams + 1) * width]`: a key for each stream, then the value.
    pub kv: Value,
    /// `[streams * width]`.
    pub q: WeightId,
    /// `[streams * width]`.
    pub k: WeightId,
    /// Streams.
    pub streams: usize,
    /// Of both norms.
    pub eps: f32,
    /// `[rows, streams * width]`.
    pub y: Value,
}

impl EngramInject {
    fn row(&self, frame: &Frame<'_>, row: usize, y: &mut [f32]) {
        let (x, kv) = (frame.row(self.x, row), frame.row(self.kv, row));
        let (q, k) = (frame.weight(self.q).vector(), frame.weight(self.k).vector());
        let width = x.len() / self.streams;
        let value = &kv[x.len()..];
        for c in 0..self.streams {
            let span = c * width..(c + 1) * width;
            let (x, key, q, k) = (&x[span.clone()], &kv[span.clone()], &q[span.clone()], &k[span.clone()]);
            let (mut dot, mut xx, mut kk) = (0.0f64, 0.0f64, 0.0f64);
            for d in 0..width {
                let (x, key) = (f64::from(x[d]), f64::from(key[d]));
                dot += x * key * f64::from(q[d]) * f64::from(k[d]);
                xx += x * x;
                kk += key * key;
            }
            let n = width as f64;
            let dot = dot / ((xx / n + f64::from(self.eps)) * (kk / n + f64::from(self.eps)) * n).sqrt();
            let gate = 1.0 / (1.0 + (-dot.abs().max(1e-6).sqrt().copysign(dot)).exp());
            for ((y, x), v) in y[span].iter_mut().zip(x).zip(value) {
                *y = x + gate as f32 * v;
            }
        }
    }
}

#[derive(Clone, Copy)]
#[repr(C)]
struct EngramInjectArgs {
    x: View,
    kv: View,
    y: View,
    q: u64,
    k: u64,
    streams: u32,
    eps: f32,
}

// SAFETY: the struct of kernels/engram.cu.
unsafe impl Args for EngramInjectArgs {}

impl Op for EngramInject {
    op_common!("engram_inject");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.x), (Port::In, &mut self.kv), (Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let (x, kv) = (shapes.value(self.x), shapes.value(self.kv));
        let weights = [self.q, self.k].map(|id| shapes.weight(id).1);
        ensure!(
            self.streams > 0
                && x.width.is_multiple_of(self.streams)
                && kv.width == x.width + x.width / self.streams
                && weights == [x.width; 2],
            Internal,
            "engram_inject: {x:?}, {kv:?}, weights of {weights:?} for {} streams",
            self.streams
        );
        Ok(vec![Shape::f32(x.rows, x.width)])
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let args = EngramInjectArgs {
            x: gpu.view(self.x),
            kv: gpu.view(self.kv),
            y: gpu.view(self.y),
            q: gpu.vector(Some(self.q)),
            k: gpu.vector(Some(self.k)),
            streams: self.streams as u32,
            eps: self.eps,
        };
        gpu.launch(INJECT, Grid::new([gpu.rows(self.y), self.streams, 1], 256), &args)
    }

    op_by_row!(2);
}
