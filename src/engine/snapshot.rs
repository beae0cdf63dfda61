//! A kept moment of a sequence: its tokens, keys and values, recurrent state and logits, to start any number of sequences of the
//! same model from. It shares memory with them until somebody writes.

use super::load::Engine;
use super::sequence::Sequence;
use crate::cache::{LayerPages, State};
use crate::ensure;
use crate::error::{Result, vec_with_capacity};
use std::sync::Arc;

/// What a sequence was at one moment.
pub struct Snapshot {
    engine: Arc<Engine>,
    tokens: Vec<i32>,
    source: usize,
    pages: Vec<LayerPages>,
    state: Arc<State>,
}

impl Snapshot {
    /// The tokens.
    pub fn tokens(&self) -> &[i32] {
        &self.tokens
    }
}

impl Sequence {
    /// Keeps this moment.
    pub fn snapshot(&self) -> Result<Snapshot> {
        let mut tokens = vec_with_capacity(self.len(), "a snapshot's tokens")?;
        tokens.extend_from_slice(&self.tokens);
        let pages = self.pages.iter().map(|pages| pages.fork(self.len())).collect::<Result<_>>()?;
        Ok(Snapshot { engine: Arc::clone(self.engine()), tokens, source: self.source(), pages, state: self.state.share() })
    }

    /// Becomes what the snapshot kept, bit for bit; its own tokens and marks are gone. On error it is as before.
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<()> {
        ensure!(Arc::ptr_eq(self.engine(), &snapshot.engine), Mismatch, "the snapshot was taken from a sequence of another loaded model");
        self.take(&snapshot.tokens, snapshot.source, &snapshot.pages, &snapshot.state)
    }
}
