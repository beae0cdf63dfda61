//! Causal depthwise convolution over time: a few taps for each channel, the last inputs carried in a slot.
//!
//! A row depends on the inputs before it alone, in a fixed order of taps, so a prompt split any way gives the same bits.
#![allow(unsafe_code)] // pieces of outputs and slots, disjoint by segment and channel block

use super::{Activation, Frame, Gpu, Op, Port, Rows, Segment, Shape, Shapes, SlotId, Turn, Value, View, WeightId};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_common};
use std::ops::Range;

/// `y[t][c] = act(b[c] + sum_j w[c][j] x[t - (taps - 1 - j) * dilation][c])`; inputs before the sequence are 0.
#[derive(Clone, Debug)]
pub struct Conv {
    /// `[rows, channels]`.
    pub x: Value,
    /// `[channels * taps]`, the current input's tap last.
    pub weight: WeightId,
    /// `[channels]`.
    pub bias: Option<WeightId>,
    /// Taps of a channel.
    pub taps: usize,
    /// Positions from one tap to the next.
    pub dilation: usize,
    /// SiLU after the sum.
    pub silu: bool,
    /// `[tail, channels]`: the last `(taps - 1) * dilation` inputs, oldest first.
    pub slot: SlotId,
    /// `[rows, channels]`.
    pub y: Value,
}

/// Most taps; published models have 3 or 4.
const MOST_TAPS: usize = 16;
/// Most inputs a slot keeps; published models have up to 9.
const MOST_TAIL: usize = 32;
/// Channels of a chunk, for few and for many rows.
const BLOCKS: (usize, usize) = (512, 64);
/// A factor that changes nothing.
static ONES: [f32; BLOCKS.0] = [1.0; BLOCKS.0];

impl Conv {
    /// Inputs the slot keeps.
    pub fn tail(taps: usize, dilation: usize) -> usize {
        (taps - 1) * dilation
    }

    /// The tail's rows for some channels, as slices to update.
    fn tail_rows<'a>(&self, frame: &Frame<'a>, segment: usize, channels: &Range<usize>) -> impl Fn(usize) -> &'a mut [f32] {
        let (state, width) = (frame.state(segment, self.slot), frame.slot(self.x).width);
        let channels = channels.clone();
        // SAFETY: a chunk's channels of this segment belong to it alone, and each row is taken once.
        move |t| unsafe { state.piece(t * width + channels.start..t * width + channels.end) }
    }

    /// Moves the tail forward over a segment's rows.
    fn advance(&self, frame: &Frame<'_>, rows: &Range<usize>, channels: &Range<usize>, tail: &mut [&mut [f32]]) {
        let (kept, count) = (tail.len(), rows.len());
        for t in 0..kept {
            if t + count < kept {
                let (older, newer) = tail.split_at_mut(t + count);
                older[t].copy_from_slice(newer[0]);
            } else {
                tail[t].copy_from_slice(&frame.row(self.x, rows.end - (kept - t))[channels.clone()]);
            }
        }
    }
}

const CONV: Kernel = Kernel { file: "conv", name: "conv" };
const ROWS: Kernel = Kernel { file: "conv", name: "conv_rows" };
const TAIL: Kernel = Kernel { file: "conv", name: "conv_tail" };

#[derive(Clone, Copy)]
#[repr(C)]
struct ConvArgs {
    x: View,
    y: View,
    batch: u64,
    weight: u64,
    bias: u64,
    slot: u64,
    taps: u32,
    dilation: u32,
    silu: u32,
    spare: u32,
}

// SAFETY: the struct of kernels/conv.cu.
unsafe impl Args for ConvArgs {}

impl Op for Conv {
    op_common!("conv");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.x), (Port::Out, &mut self.y)]
    }

    fn slots(&self) -> Vec<SlotId> {
        vec![self.slot]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let x = shapes.value(self.x);
        let known = (1..=MOST_TAPS).contains(&self.taps) && (1..=MOST_TAIL).contains(&self.dilation);
        ensure!(
            known && Conv::tail(self.taps, self.dilation) <= MOST_TAIL,
            Unsupported,
            "conv: {} taps {} apart; at most {MOST_TAPS} taps over {MOST_TAIL} earlier positions are known",
            self.taps,
            self.dilation
        );
        let weight = shapes.weight(self.weight).1;
        ensure!(weight == x.width * self.taps && x.rows == Rows::All, Internal, "conv: {weight} weights for {} taps of {x:?}", self.taps);
        if let Some(bias) = self.bias {
            ensure!(shapes.weight(bias).1 == x.width, Internal, "conv: a bias of {} for {x:?}", shapes.weight(bias).1);
        }
        let (slot, tail) = (shapes.slot(self.slot), Conv::tail(self.taps, self.dilation));
        ensure!(slot == tail * x.width, Internal, "conv: a slot of {slot} for {tail} rows of {}", x.width);
        Ok(vec![Shape::f32(x.rows, x.width)])
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        let weight = frame.weight(self.weight).vector();
        let bias = self.bias.map(|id| frame.weight(id).vector());
        for (index, segment) in frame.batch.segments.iter().enumerate() {
            let channels = 0..y.width();
            let tail_row = self.tail_rows(frame, index, &channels);
            let mut tail: Vec<&mut [f32]> = (0..Conv::tail(self.taps, self.dilation)).map(tail_row).collect();
            for (t, row) in segment.rows.clone().enumerate() {
                // SAFETY: alone.
                for (c, y) in unsafe { y.row(row) }.iter_mut().enumerate() {
                    let sum: f64 = (0..self.taps)
                        .map(|j| {
                            let back = (self.taps - 1 - j) * self.dilation;
                            let x = if t >= back { frame.row(self.x, row - back)[c] } else { tail[tail.len() - (back - t)][c] };
                            f64::from(weight[c * self.taps + j]) * f64::from(x)
                        })
                        .sum();
                    let sum = sum + bias.map_or(0.0, |b| f64::from(b[c]));
                    *y = if self.silu { Activation::Silu.of(sum) } else { sum } as f32;
                }
            }
            self.advance(frame, &segment.rows, &channels, &mut tail);
        }
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let args = ConvArgs {
            x: gpu.view(self.x),
            y: gpu.view(self.y),
            batch: gpu.batch_at(),
            weight: gpu.vector(Some(self.weight)),
            bias: gpu.vector(self.bias),
            slot: gpu.slot(self.slot).start as u64,
            taps: self.taps as u32,
            dilation: self.dilation as u32,
            silu: u32::from(self.silu),
            spare: 0,
        };
        let (rows, segments, width) = (gpu.rows(self.y), gpu.segments(), gpu.width(self.y));
        if rows < 8 * segments {
            return gpu.launch(CONV, Grid::cells(segments, width, 128), &args);
        }
        gpu.launch(ROWS, Grid::cells(rows, width, 128), &args)?;
        gpu.launch(TAIL, Grid::cells(segments, width, 128), &args)
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let width = frame.slot(self.y).width;
        let few = frame.batch.tokens.len() < 8 * frame.batch.segments.len();
        let block = if few { BLOCKS.0 } else { BLOCKS.1 };
        let blocks = width.div_ceil(block);
        turn.each(frame.batch.segments.len() * blocks, 1, |range| {
            for item in range {
                let (segment, start) = (item / blocks, item % blocks * block);
                self.block(frame, segment, &frame.batch.segments[segment], start..(start + block).min(width));
            }
        });
    }
}

impl Conv {
    /// Some channels of one segment, row by row.
    fn block(&self, frame: &Frame<'_>, index: usize, segment: &Segment, channels: Range<usize>) {
        let taps = self.taps;
        let weight = &frame.weight(self.weight).vector()[channels.start * taps..channels.end * taps];
        let bias = self.bias.map(|id| &frame.weight(id).vector()[channels.clone()]);
        let tail_row = self.tail_rows(frame, index, &channels);
        let mut tail: [&mut [f32]; MOST_TAIL] = std::array::from_fn(|_| Default::default());
        let tail = &mut tail[..Conv::tail(taps, self.dilation)];
        tail.iter_mut().enumerate().for_each(|(t, row)| *row = tail_row(t));
        let (y, mut sums) = (frame.output(self.y), [0.0f32; BLOCKS.0]);
        let sums = &mut sums[..channels.len()];
        for (t, row) in segment.rows.clone().enumerate() {
            let mut inputs: [&[f32]; MOST_TAPS] = [&[]; MOST_TAPS];
            for (j, x) in inputs[..taps].iter_mut().enumerate() {
                let back = (taps - 1 - j) * self.dilation;
                *x = if t >= back { &frame.row(self.x, row - back)[channels.clone()] } else { &*tail[tail.len() - (back - t)] };
            }
            match bias {
                Some(bias) => sums.copy_from_slice(bias),
                None => sums.fill(0.0),
            }
            frame.simd.taps(weight, &inputs[..taps], sums);
            // SAFETY: the chunk's channels of this segment's rows belong to it alone.
            let y = unsafe { y.piece(row, channels.clone()) };
            if self.silu {
                frame.simd.silu_mul(sums, &ONES[..sums.len()], y);
            } else {
                y.copy_from_slice(sums);
            }
        }
        self.advance(frame, &segment.rows, &channels, tail);
    }
}
