//! What a sequence has done so far, and what memory it holds.

use super::sequence::Sequence;
use std::sync::Arc;
use std::time::Duration;

/// Counts since the sequence was made. Calls that fail leave no trace but in `cancelled`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Tokens of prompts, with those that were taken up instead of computed.
    pub read: u64,
    /// Tokens of prompts that were taken up from the prefix tree.
    pub reused: u64,
    /// Tokens that were chosen.
    pub generated: u64,
    /// Passes through the model that it took part in.
    pub passes: u64,
    /// Calls and steps that a cancel ended.
    pub cancelled: u64,
    /// Time of passes over prompts, shared ones in full.
    pub prefill: Duration,
    /// Time of passes over chosen tokens, shared ones in full.
    pub decode: Duration,
}

impl Counters {
    /// Notes what a pass, or several, did: `count` tokens, chosen or read.
    pub(super) fn note(&mut self, count: usize, chosen: bool, spent: Duration) {
        let (tokens, time) = if chosen { (&mut self.generated, &mut self.decode) } else { (&mut self.read, &mut self.prefill) };
        *tokens += count as u64;
        *time = time.saturating_add(spent);
    }
}

/// Bytes a sequence holds: alone, and together with forks, marks' owners or the prefix tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Key/value pages nobody else holds.
    pub kv_owned: u64,
    /// Key/value pages that others hold, too.
    pub kv_shared: u64,
    /// Recurrent states with their row of logits, those of marks included, that nobody else holds.
    pub state_owned: u64,
    /// Such states that others hold, too.
    pub state_shared: u64,
}

impl Sequence {
    /// What it has done since it was made. A fork starts anew.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Bytes it holds now.
    pub fn held(&self) -> Held {
        let mut held = Held::default();
        for pages in self.pages.iter() {
            let (owned, shared) = pages.shares();
            held.kv_owned += owned;
            held.kv_shared += shared;
        }
        for (state, here) in self.state.held(self.marked()) {
            let place = if Arc::strong_count(state) == here { &mut held.state_owned } else { &mut held.state_shared };
            *place += state.bytes() as u64;
        }
        held
    }
}
