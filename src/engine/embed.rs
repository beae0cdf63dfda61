//! Embeddings: what the last layer makes of a text, after the final norm, one row for each token or pooled into one.

use super::forward::{runner, until_done};
use super::load::Engine;
use super::runner::{Runner, Work};
use super::sequence::{Sequence, SequenceOptions};
use crate::cache::LayerPages;
use crate::ensure;
use crate::error::{Error, Kind, Result, vec_filled, vec_with_capacity};
use crate::ops::StatePointers;
use std::sync::Arc;

/// How rows become one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pooling {
    /// Not at all: a row for each token.
    None,
    /// The last token's, which has seen all of a text that is read from left to right.
    Last,
    /// The first token's.
    First,
    /// Their mean.
    Mean,
}

impl Engine {
    /// Floats that [`Engine::embed`] gives for `tokens` tokens.
    pub fn embedding_len(&self, tokens: usize, pooling: Pooling) -> usize {
        if pooling == Pooling::None { tokens.saturating_mul(self.info().hidden) } else { self.info().hidden }
    }

    /// Checks a text to be embedded.
    pub fn check_embedding(&self, tokens: &[i32]) -> Result<()> {
        ensure!(!tokens.is_empty(), InvalidArgument, "there are no tokens to embed");
        let most = self.info().context;
        if tokens.len() > most {
            let text = format!("a text of {} tokens; the model was loaded for {most}", tokens.len());
            return Err(Error::new(Kind::ContextFull, text).sizes(tokens.len() as u64, most as u64));
        }
        self.check_tokens(tokens)
    }

    /// Rows of the last layer after the final norm, of the encoder where the model has one; of length 1 where `normalize` says so.
    pub fn embed(self: &Arc<Self>, tokens: &[i32], pooling: Pooling, normalize: bool) -> Result<Vec<f32>> {
        self.check_embedding(tokens)?;
        let mut pool = Pool::new(self.info().hidden, tokens.len(), pooling)?;
        if self.has_encoder() {
            self.embed_source(tokens, &mut pool)?
        } else {
            self.embed_prompt(tokens, &mut pool)?
        }
        pool.finish(normalize)
    }

    fn embed_prompt(self: &Arc<Self>, tokens: &[i32], pool: &mut Pool) -> Result<()> {
        let mut sequence = Sequence::new(self, &SequenceOptions { context: tokens.len() })?;
        // Its rows of logits are never computed.
        sequence.forget_when_freed();
        let (canceller, count) = (Arc::clone(sequence.canceller()), sequence.canceller().count());
        sequence.state.begin()?;
        for (index, piece) in tokens.chunks(self.shapes().most_rows()).enumerate() {
            sequence.reserve(piece.len())?;
            let (position, pages, state) = (sequence.len(), &sequence.pages, sequence.state.pointers(index > 0));
            let cancelled = || canceller.count() != count;
            let mut runner = runner(self, &cancelled)?;
            runner.set([Work { tokens: piece, position, source: 0, pages, stamp: 0, state }]);
            until_done(self, &cancelled, |control| runner.embed(self, control))?;
            pool.take(&mut runner, Runner::hidden)?;
            drop(runner);
            sequence.tokens.extend_from_slice(piece);
        }
        Ok(())
    }

    fn embed_source(self: &Arc<Self>, tokens: &[i32], pool: &mut Pool) -> Result<()> {
        let fresh: Vec<LayerPages> = self.source_pages(tokens.len())?;
        let canceller = super::Canceller::new(self.alarm());
        let count = canceller.count();
        let cancelled = || canceller.count() != count;
        let mut runner = runner(self, &cancelled)?;
        runner.set([Work { tokens, position: 0, source: tokens.len(), pages: &fresh, stamp: 0, state: StatePointers::none() }]);
        until_done(self, &cancelled, |control| runner.encode(self, control))?;
        pool.take(&mut runner, Runner::encoded)
    }
}

/// Rows as they come, and what they come to.
struct Pool {
    pooling: Pooling,
    width: usize,
    seen: usize,
    sums: Vec<f64>,
    out: Vec<f32>,
    rows: Vec<f32>,
}

impl Pool {
    fn new(width: usize, tokens: usize, pooling: Pooling) -> Result<Pool> {
        let sums = vec_filled(if pooling == Pooling::Mean { width } else { 0 }, 0.0, "a sum of embeddings")?;
        let len = if pooling == Pooling::None { tokens.saturating_mul(width) } else { width };
        Ok(Pool { pooling, width, seen: 0, sums, out: vec_with_capacity(len, "an embedding")?, rows: Vec::new() })
    }

    /// Takes the rows of a run.
    fn take(&mut self, runner: &mut Runner, read: fn(&mut Runner, &mut Vec<f32>) -> Result<()>) -> Result<()> {
        read(runner, &mut self.rows)?;
        match self.pooling {
            Pooling::None => self.out.extend_from_slice(&self.rows),
            Pooling::First if self.seen > 0 => {}
            Pooling::First => self.out.extend_from_slice(&self.rows[..self.width]),
            Pooling::Last => {
                self.out.clear();
                self.out.extend_from_slice(&self.rows[self.rows.len() - self.width..]);
            }
            Pooling::Mean => {
                for row in self.rows.chunks_exact(self.width) {
                    self.sums.iter_mut().zip(row).for_each(|(sum, v)| *sum += f64::from(*v));
                }
            }
        }
        self.seen += self.rows.len() / self.width;
        Ok(())
    }

    fn finish(mut self, normalize: bool) -> Result<Vec<f32>> {
        let seen = self.seen as f64;
        self.out.extend(self.sums.iter().map(|sum| (sum / seen) as f32));
        if let Some(index) = self.out.iter().position(|v| !v.is_finite()) {
            let text = format!("the embedding has {} at index {index}", self.out[index]);
            return Err(Error::new(Kind::NumericFault, text).at(index as u64));
        }
        if normalize {
            for row in self.out.chunks_exact_mut(self.width) {
                let length = row.iter().map(|v| f64::from(*v).powi(2)).sum::<f64>().sqrt();
                // A row of zeros has no direction, and stays.
                if length > 0.0 {
                    row.iter_mut().for_each(|v| *v = (f64::from(*v) / length) as f32);
                }
            }
        }
        Ok(self.out)
    }
}
