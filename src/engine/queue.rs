//! Tokens that wait to be read by [`super::step`].
//!
//! A token leaves the queue when the slice it is in is done, so what a dropped slice had begun is simply read again.

use super::Sequence;
use super::prefix::Taken;
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
    /// Tokens put in since it was last empty.
    fed: usize,
    /// Whether the prefix tree was asked for what waits.
    asked: bool,
    /// The length at which the sequence is to be put in the prefix tree, on its way through the queue.
    stop: Option<usize>,
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
            (self.read, self.fed, self.asked, self.stop) = (0, 0, false, None);
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
        self.queue.fed += tokens.len();
        self.queue.asked = false;
        Ok(())
    }

    /// Tokens that wait.
    pub fn queued(&self) -> usize {
        self.queue.waiting().len()
    }

    /// Takes up what the prefix tree has of the tokens that wait: how many are done with it, and how many are once the next slice is. Asks
    /// once for each feed, until something it found is made use of.
    pub(super) fn take_queued(&mut self) -> (usize, usize) {
        if std::mem::replace(&mut self.queue.asked, true) {
            return (0, 0);
        }
        // Out of the way, since both are this sequence's.
        let tokens = std::mem::take(&mut self.queue.tokens);
        let waiting = &tokens[self.queue.read..];
        let (taken, borrowed) = match self.engine().is_recurrent() {
            true => (self.take_prefix(waiting), 0),
            false => (Taken::default(), self.borrow_prefix(waiting)),
        };
        self.queue.tokens = tokens;
        self.queue.stop = taken.stop;
        self.queue.asked = borrowed == 0;
        self.advance_queue(taken.count);
        (taken.count, borrowed)
    }

    /// Appends `count` tokens from the front of the queue, whose pages were borrowed.
    pub(super) fn take_borrowed(&mut self, count: usize) {
        let tokens = std::mem::take(&mut self.queue.tokens);
        self.append_taken(&tokens[self.queue.read..][..count]);
        self.queue.tokens = tokens;
        self.queue.advance(count);
        self.queue.asked = true;
    }

    /// Most tokens of the next slice: up to the place at which the sequence is to be kept, if there is one.
    pub(super) fn next_slice(&self) -> usize {
        self.queue.stop.and_then(|stop| stop.checked_sub(self.len())).filter(|count| *count > 0).unwrap_or(usize::MAX).min(self.queued())
    }

    /// Takes `count` tokens that were read from the queue, and puts the sequence in the prefix tree where it is to be.
    pub(super) fn advance_queue(&mut self, count: usize) {
        let (fed, stop) = (self.queue.fed, self.queue.stop);
        self.queue.advance(count);
        if stop == Some(self.len()) {
            self.queue.stop = None;
            self.keep_prefix();
        } else if count > 0 && self.queued() == 0 {
            self.keep_prompt(fed);
        }
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
            self.counters.cancelled += 1;
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
        (self.queue.asked, self.queue.stop) = (false, None);
        self.queue.heard = self.canceller().count();
        // Pages that were made for the begun work go back, too.
        self.drop_to(self.len());
    }
}
