//! Tokens that wait to be read by [`super::step`].
//!
//! A token leaves the queue when the slice it is in is done, so what a dropped slice had begun is simply read again.

use super::Sequence;
use crate::error::{Error, Kind, Result};

/// The waiting tokens of a sequence, and what is known of the work on it between two steps.
#[derive(Default)]
pub(super) struct Queue {
    tokens: Vec<i32>,
    /// Tokens at the front that were read already.
    read: usize,
    /// Cancels seen so far.
    heard: u64,
    /// The state's stamp when a step left off in the middle of this sequence's work.
    begun: Option<u64>,
}

impl Queue {
    /// What waits, in order.
    pub(super) fn waiting(&self) -> &[i32] {
        &self.tokens[self.read..]
    }

    /// Takes `count` tokens from the front.
    pub(super) fn advance(&mut self, count: usize) {
        self.read += count;
        if self.read >= self.tokens.len() {
            self.tokens.clear();
            self.read = 0;
        }
    }
}

impl Sequence {
    /// Puts tokens at the end of the queue that [`super::step`] reads from. On error nothing changed. Other calls leave the
    /// queue alone; forks, marks and snapshots do not have it.
    pub fn feed(&mut self, tokens: &[i32]) -> Result<()> {
        super::forward::check(self.engine(), self, tokens, self.queued())?;
        crate::runtime::fallible(|| self.queue.tokens.try_reserve(tokens.len()))
            .map_err(|_| Error::new(Kind::OutOfMemory, "a sequence's queue of tokens"))?;
        self.hear();
        if self.queued() == 0 && !tokens.is_empty() {
            // A token that a step had begun to produce is no longer wanted.
            self.state.renew();
        }
        self.queue.tokens.extend_from_slice(tokens);
        Ok(())
    }

    /// Tokens that wait.
    pub fn queued(&self) -> usize {
        self.queue.waiting().len()
    }

    /// Whether a step has something left to do: tokens wait, or a token is under way.
    pub fn is_busy(&self) -> bool {
        self.queued() > 0 || self.has_begun()
    }

    fn has_begun(&self) -> bool {
        self.queue.begun == Some(self.state.stamp())
    }

    /// Remembers that a step left off in the middle of this sequence's work.
    pub(super) fn leave_begun(&mut self) {
        self.queue.begun = Some(self.state.stamp());
    }

    /// Takes notice of cancels; true where one meant work that was waiting or begun, which is dropped.
    pub(super) fn hear(&mut self) -> bool {
        let count = self.canceller().count();
        let meant = count != self.queue.heard && self.is_busy();
        self.queue.heard = count;
        if meant {
            self.drop_work();
        }
        meant
    }

    /// Whether a cancel came since the last look.
    pub(super) fn is_cancelled(&self) -> bool {
        self.canceller().count() != self.queue.heard
    }

    /// Forgets waiting tokens and begun work.
    pub(super) fn drop_work(&mut self) {
        self.queue.advance(self.queued());
        self.queue.heard = self.canceller().count();
        // Pages that were made for the begun work go back, too.
        self.drop_to(self.len());
    }
}
