//! Prompts that begin like earlier ones: what a model keeps of the sequences it had, and how a sequence takes it up.
//!
//! A sequence is put in when a prompt has been read and when it is freed; a prompt that is read takes up the longest beginning there
//! is, and computes the rest. What is taken up has the bits that computing would have given, so nobody can tell but by the clock
//! and the counters. Only states that follow from their tokens alone are put in: none that was shifted, restored from
//! bytes of unknown origin, or left by a call that met a defect.
//!
//! Where a model carries recurrent state, a beginning can only be taken up at a place whose state was kept. So a prompt that
//! leaves the tree between two such places is computed to there first, and the state there is kept: the next one finds it.

use super::load::Engine;
use super::sequence::Sequence;
use crate::cache::{Found, Kept, LayerPages, PrefixTree, TreeCounts};
use crate::error::vec_with_capacity;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Which tree a sequence belongs to. All sequences of a model compute alike; whatever makes some compute otherwise has to go in here.
const KEY: u64 = 0;
/// Prompts shorter than this are put in with the sequence, not by themselves: a host that appends token by token would pay for
/// each of them.
const SHORTEST: usize = 16;

/// The tree, where the model was loaded with a budget for it.
#[derive(Default)]
pub(super) struct Prefixes(Option<Mutex<PrefixTree>>);

impl Prefixes {
    /// A tree of `budget` bytes; none for 0.
    pub(super) fn new(budget: u64, recurrent: bool) -> Prefixes {
        Prefixes((budget > 0).then(|| Mutex::new(PrefixTree::new(budget, recurrent))))
    }

    /// Forgets all prompts.
    pub(super) fn clear(&self) {
        if let Some(mut tree) = self.tree() {
            tree.clear();
        }
    }

    fn tree(&self) -> Option<MutexGuard<'_, PrefixTree>> {
        // A tree is sound between any two of its steps.
        Some(self.0.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Engine {
    /// Numbers of what is kept for prompts that begin alike.
    pub fn prefix_counts(&self) -> TreeCounts {
        self.prefixes.tree().map_or(TreeCounts::default(), |tree| tree.counts())
    }
}

/// What a sequence took up.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Taken {
    /// Tokens of the prompt that need not be computed.
    pub count: usize,
    /// The length at which the sequence should be kept, on its way to the end of the prompt.
    pub stop: Option<usize>,
}

impl Sequence {
    /// Takes up what is kept of the tokens held and the prompt after them. Where the model has recurrent slots the state comes along, so
    /// that the sequence is whole. Elsewhere the row of logits is missing: the rest of the prompt, one token at least, has to follow at
    /// once, or what was taken up has to go.
    pub(super) fn take_prefix(&mut self, prompt: &[i32]) -> Taken {
        let (found, stop) = self.find_prefix(prompt);
        let held = self.len();
        let count = found.len.saturating_sub(held);
        if count > 0 {
            self.adopt_pages(&found.pages);
            self.append_taken(&prompt[..count]);
            if let Some(state) = &found.state {
                self.adopt_state(state, held);
            }
        }
        Taken { count, stop }
    }

    /// As [`Sequence::take_prefix`] for models without recurrent slots, but takes up pages alone: the tokens follow when the work on what comes
    /// after them is done ([`Sequence::append_taken`]). Until then the sequence is as before.
    pub(super) fn borrow_prefix(&mut self, prompt: &[i32]) -> usize {
        let (found, _) = self.find_prefix(prompt);
        let count = found.len.saturating_sub(self.len());
        if count > 0 {
            self.adopt_pages(&found.pages);
        }
        count
    }

    fn find_prefix(&self, prompt: &[i32]) -> (Found, Option<usize>) {
        let held = self.len();
        if !self.is_exact() || (held > 0 && prompt.len() < SHORTEST) {
            return Default::default();
        }
        let Some(mut tree) = self.engine().prefixes.tree() else { return Default::default() };
        let Ok(mut tokens) = vec_with_capacity(held + prompt.len(), "a prompt") else { return Default::default() };
        tokens.extend_from_slice(&self.tokens);
        tokens.extend_from_slice(prompt);
        let found = tree.find(KEY, &tokens, held);
        let branches = self.engine().is_recurrent() && found.matched > found.len.max(held) && found.matched < tokens.len();
        let stop = branches.then_some(found.matched);
        (found, stop)
    }

    /// Puts the sequence in.
    pub(super) fn keep_prefix(&self) {
        if self.len() < 2 || !self.is_exact() {
            return;
        }
        let Some(mut tree) = self.engine().prefixes.tree() else { return };
        if let Ok(mut pages) = vec_with_capacity::<&LayerPages>(self.pages.len(), "a list of pages") {
            pages.extend(self.pages.iter());
            tree.insert(KEY, &Kept { tokens: &self.tokens, pages: &pages, state: &self.state.share() });
        }
    }

    /// Puts the sequence in after a prompt of `count` tokens.
    pub(super) fn keep_prompt(&self, count: usize) {
        if count >= SHORTEST {
            self.keep_prefix();
        }
    }
}
