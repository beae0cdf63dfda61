//! What a device keeps of rows of logits: each row behind its sequence's recurrent state, and what is found in it, its highest logit alone or
//! all that tokens may be drawn from, for the host.
//!
//! Kernels write what they find into the host's memory. The highest logit has two places there, since the step that follows may be queued before
//! the host has looked (see `ahead.rs`), and its token a third one on the device, which that step begins with.
#![allow(unsafe_code)] // argument structs

use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::backend::cuda::{Block, Device, Pinned};
use crate::error::Result;
use crate::ops::{Gpu, Value, View};
use std::sync::Arc;

/// Chunks that a row of logits is cut into.
const CHUNKS: usize = 64;

pub(super) const LOGITS: Kernel = Kernel { file: "logits", name: "logits" };
const LOGITS_BEST: Kernel = Kernel { file: "logits", name: "logits_best" };

#[derive(Clone, Copy)]
#[repr(C)]
struct LogitsArgs {
    x: View,
    batch: u64,
    parts: u64,
    best: [u64; 2],
    turn: u64,
    tokens: u64,
    slots: u32,
    chunks: u32,
}

// SAFETY: the struct of kernels/logits.cu.
unsafe impl Args for LogitsArgs {}

const CANDIDATES: Kernel = Kernel { file: "logits", name: "logits_candidates" };
const CANDIDATES_BEST: Kernel = Kernel { file: "logits", name: "logits_candidates_best" };

#[derive(Clone, Copy)]
#[repr(C)]
struct CandidatesArgs {
    x: View,
    batch: u64,
    parts: u64,
    part_sums: u64,
    part_candidates: u64,
    best: u64,
    sums: u64,
    candidates: u64,
    slots: u32,
    chunks: u32,
}

// SAFETY: the struct of kernels/logits.cu.
unsafe impl Args for CandidatesArgs {}

/// Bytes of a `Best`, of a sum, of a `Candidate`, and of a token.
const BEST: usize = 16;
const SUM: usize = 8;
const CANDIDATE: usize = 8;
const TOKEN: usize = 4;
/// Candidates that a row leaves: as in kernels/logits.cu.
const MOST_CANDIDATES: usize = 128;
/// Bytes of what is found in a row, or in a chunk of one.
const FOUND: usize = BEST + SUM + MOST_CANDIDATES * CANDIDATE;

/// What a run keeps of its output rows, which are logits.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Keep {
    /// Floats of the recurrent slots, which rows are kept behind.
    pub slots: usize,
    /// Whether the highest logits of each row are found.
    pub candidates: bool,
}

/// What is found in rows of logits, each kind for itself.
pub struct Found {
    /// By sequence and chunk.
    parts: Block,
    /// By sequence, in the host's memory; behind it the other place for the highest logits.
    rows: Pinned,
    /// By sequence: the tokens of the highest.
    tokens: Block,
    /// Sequences that there is room for.
    sequences: usize,
    /// Which place of the two the run that was waited for last wrote.
    turn: usize,
}

impl Found {
    /// For batches of so many sequences.
    pub(super) fn new(device: &Arc<Device>, sequences: usize) -> Result<Found> {
        let what = "the highest logits";
        Ok(Found {
            parts: Block::new(device, FOUND * sequences * CHUNKS, what)?,
            rows: Pinned::new(device, (FOUND + BEST) * sequences, what)?,
            tokens: Block::new(device, TOKEN * sequences, what)?,
            sequences,
            turn: 0,
        })
    }

    /// Bytes of the device that it takes.
    pub(super) fn bytes(sequences: usize) -> usize {
        (FOUND * CHUNKS + TOKEN) * sequences
    }

    /// Where the tokens are on the device.
    pub(super) fn tokens(&self) -> u64 {
        self.tokens.address()
    }

    /// What is looked at from now on: what a run of that turn has found.
    pub(super) fn look(&mut self, turn: usize) {
        self.turn = turn;
    }

    /// Queues what is kept of rows of logits; `turn` is where the batch says whose turn it is.
    pub(super) fn launch(&self, gpu: &Gpu<'_>, output: Value, turn: u64, keep: Keep) -> Result<()> {
        let rows = gpu.rows(output);
        let (x, batch, slots, chunks) = (gpu.view(output), gpu.batch_at(), keep.slots as u32, CHUNKS as u32);
        let (parts, best) = (self.parts.address(), self.rows.address());
        if !keep.candidates {
            let best = [best, best + (FOUND * self.sequences) as u64];
            let args = LogitsArgs { x, batch, parts, best, turn, tokens: self.tokens.address(), slots, chunks };
            gpu.launch(LOGITS, Grid::new([rows, CHUNKS, 1], 256).early(), &args)?;
            return gpu.launch(LOGITS_BEST, Grid::new([rows, 1, 1], 32).early(), &args);
        }
        let [part_sums, part_candidates] = places(self.sequences * CHUNKS).map(|place| parts + place as u64);
        let [sums, candidates] = places(self.sequences).map(|place| best + place as u64);
        let args = CandidatesArgs { x, batch, parts, part_sums, part_candidates, best, sums, candidates, slots, chunks };
        gpu.launch(CANDIDATES, Grid::new([rows, CHUNKS, 1], 256).early(), &args)?;
        gpu.launch(CANDIDATES_BEST, Grid::new([rows, 1, 1], 256).early(), &args)
    }

    /// After a run that was to find them: the highest logits of a sequence's row with their tokens, in order, of several alike the lower token
    /// first; and the sum of e^(logit - highest) over the whole row.
    pub fn candidates(&self, sequence: usize) -> (f64, impl ExactSizeIterator<Item = (u32, f32)>) {
        let [sums, candidates] = places(self.sequences);
        let bytes = self.rows.as_slice();
        let sum = f64::from_ne_bytes(bytes[sums + SUM * sequence..][..SUM].try_into().expect("eight bytes"));
        let words = bytes[candidates + CANDIDATE * MOST_CANDIDATES * sequence..][..CANDIDATE * MOST_CANDIDATES].as_chunks::<4>().0;
        let (pairs, _) = words.as_chunks::<2>();
        (sum, pairs.iter().map(|[value, token]| (u32::from_ne_bytes(*token), f32::from_ne_bytes(*value))))
    }

    /// The token of the highest logit of a sequence's row, the lowest of several; none where the row holds what is no number, or nothing else
    /// than minus infinity.
    pub fn best(&self, sequence: usize) -> Option<i32> {
        let place = FOUND * self.sequences * self.turn + BEST * sequence;
        let words = self.rows.part(place..place + BEST).as_chunks::<4>().0;
        let [token, bad] = [words[1], words[2]].map(u32::from_ne_bytes);
        (bad == 0 && f32::from_ne_bytes(words[0]) > f32::NEG_INFINITY).then_some(token as i32)
    }
}

/// Where sums and candidates of `count` rows, or chunks, begin, behind as many highest logits.
fn places(count: usize) -> [usize; 2] {
    [BEST * count, (BEST + SUM) * count]
}
