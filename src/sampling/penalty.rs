//! Stages that look back: how often each token occurs among the newest ones.
//!
//! Counts live in a table over the vocabulary that is all zero between stages; filling and clearing it costs the
//! window, not the vocabulary.

use crate::error::Result;

use super::candidates::{Candidates, Order, changed, reserve};

/// `counts[t]`: occurrences of token `t` in the window; zero between calls.
#[derive(Default)]
pub(super) struct Counts(Vec<u32>);

impl Counts {
    /// Sets `logit = change(logit, count)` for every candidate among the newest `window` tokens of `history`
    /// (0: all). Tokens outside the vocabulary are passed over.
    pub(super) fn apply(
        &mut self,
        list: &mut Candidates,
        vocab: usize,
        history: &[i32],
        window: u32,
        change: impl Fn(f32, u32) -> f32,
    ) -> Result<()> {
        let recent = newest(history, window);
        self.fit(vocab)?;
        for &token in recent {
            if let Some(count) = self.slot(token) {
                *count = count.saturating_add(1);
            }
        }
        self.change(list, recent, change);
        Ok(())
    }

    /// Has a place for each of `vocab` tokens.
    pub(super) fn fit(&mut self, vocab: usize) -> Result<()> {
        if self.0.len() < vocab {
            reserve(&mut self.0, vocab)?;
            self.0.resize(vocab, 0);
        }
        Ok(())
    }

    fn slot(&mut self, token: i32) -> Option<&mut u32> {
        self.0.get_mut(usize::try_from(token).ok()?)
    }

    /// Makes a token's number at least `value`.
    pub(super) fn raise(&mut self, token: i32, value: u32) {
        if let Some(slot) = self.slot(token) {
            *slot = value.max(*slot);
        }
    }

    /// Sets `logit = change(logit, number)` for every candidate whose number is above zero, and all numbers back to zero; `among` holds
    /// every token whose number is not.
    pub(super) fn change(&mut self, list: &mut Candidates, among: &[i32], change: impl Fn(f32, u32) -> f32) {
        if list.order != Order::Ids {
            for c in &mut list.items {
                let count = self.0.get(c.id as usize).copied().unwrap_or(0);
                if count > 0 {
                    c.logit = changed(c.logit, change(c.logit, count));
                }
            }
        }
        for &token in among {
            let Some(slot) = self.slot(token) else { continue };
            let count = std::mem::take(slot);
            // A repeated token finds zero the second time, so it is changed once.
            if count > 0
                && list.order == Order::Ids
                && let Some(c) = list.items.get_mut(token as usize)
            {
                c.logit = changed(c.logit, change(c.logit, count));
            }
        }
        list.disturbed();
    }
}

/// The newest `window` tokens of a history; 0 is all.
pub(super) fn newest(history: &[i32], window: u32) -> &[i32] {
    match window {
        0 => history,
        n => &history[history.len().saturating_sub(n as usize)..],
    }
}

#[cfg(test)]
impl Counts {
    /// Whether the table is as every stage expects to find it.
    pub(super) fn is_zero(&self) -> bool {
        self.0.iter().all(|&c| c == 0)
    }
}
