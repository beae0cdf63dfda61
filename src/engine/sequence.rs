//! One timeline of tokens: its state, and the logits after its last token.

use super::forward::append;
use super::load::Engine;
use crate::cache::LayerPages;
use crate::ensure;
use crate::error::{Error, Kind, Result, vec_filled, vec_with_capacity};
use crate::ops::KvPages;
use std::sync::Arc;

/// Options of a sequence.
#[derive(Clone, Copy, Debug, Default)]
pub struct SequenceOptions {
    /// Most tokens it may hold; 0 takes the engine's limit.
    pub context: usize,
}

/// A sequence. Its logits are those after every token it holds.
pub struct Sequence {
    engine: Arc<Engine>,
    pub(super) tokens: Vec<i32>,
    pub(super) pages: Vec<LayerPages>,
    /// The row after the last token; valid when there is a token.
    pub(super) logits: Vec<f32>,
    /// Where a step writes its row before it is known to succeed.
    pub(super) next_logits: Vec<f32>,
    capacity: usize,
}

impl Sequence {
    /// An empty sequence.
    pub fn new(engine: &Arc<Engine>, options: &SequenceOptions) -> Result<Sequence> {
        let limit = engine.info().context;
        let capacity = if options.context == 0 { limit } else { options.context };
        if capacity > limit {
            return Err(Error::new(Kind::LimitExceeded, format!("a sequence of {capacity} tokens was asked for; the model was loaded for {limit}"))
                .named("context")
                .sizes(capacity as u64, limit as u64));
        }
        let vocab = engine.info().vocab;
        let pages = engine.pools().iter().map(|pool| LayerPages::new(pool, capacity)).collect::<Result<_>>()?;
        Ok(Sequence {
            engine: Arc::clone(engine),
            tokens: vec_with_capacity(capacity, "a sequence's tokens")?,
            pages,
            logits: vec_filled(vocab, 0.0, "a row of logits")?,
            next_logits: vec_filled(vocab, 0.0, "a row of logits")?,
            capacity,
        })
    }

    /// Tokens it holds.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    /// Most tokens it may hold.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The tokens.
    pub fn tokens(&self) -> &[i32] {
        &self.tokens
    }

    /// The model it runs on.
    pub fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// The row of logits after the last token.
    pub fn logits(&self) -> Result<&[f32]> {
        ensure!(!self.tokens.is_empty(), InvalidState, "the sequence holds no token, so there are no logits yet; prefill first");
        Ok(&self.logits)
    }

    /// Appends tokens and computes their state. On error the sequence is as before.
    pub fn prefill(&mut self, tokens: &[i32]) -> Result<()> {
        let engine = Arc::clone(&self.engine);
        append(&engine, &mut [(self, tokens)])
    }

    /// Drops tokens from the end until `len` are left, and computes the row after the last one again.
    pub fn truncate(&mut self, len: usize) -> Result<()> {
        ensure!(len <= self.tokens.len(), InvalidArgument, "the sequence holds {} tokens, it cannot be cut to {len}", self.tokens.len());
        if len == self.tokens.len() {
            return Ok(());
        }
        if len == 0 {
            self.drop_to(0);
            return Ok(());
        }
        // The last token that stays runs again: same position, same earlier keys, so the same bits as when it was new.
        let tail: Vec<i32> = self.tokens[len - 1..].to_vec();
        self.tokens.truncate(len - 1);
        match self.prefill(&tail[..1]) {
            Ok(()) => {
                self.drop_to(len);
                Ok(())
            }
            Err(e) => {
                // Rewriting the tail cannot fail for want of room: it was there before.
                self.tokens.extend_from_slice(&tail);
                Err(e)
            }
        }
    }

    /// Forgets tokens past `len`; pages past it go back.
    pub(super) fn drop_to(&mut self, len: usize) {
        self.tokens.truncate(len);
        for pages in &mut self.pages {
            pages.truncate(len);
        }
    }

    /// Makes room for `count` more tokens in every layer.
    pub(super) fn reserve(&mut self, count: usize) -> Result<()> {
        let (from, to) = (self.tokens.len(), self.tokens.len() + count);
        self.pages.iter_mut().try_for_each(|pages| pages.reserve(from, to))
    }

    /// Borrows the pages for a run.
    pub(super) fn kv(&self) -> Vec<KvPages> {
        self.pages.iter().map(|pages| KvPages::new(pages.pointers())).collect()
    }
}
