//! From a row of logits to a token: an ordered list of stages, then a draw.
//!
//! A sampler is a recipe (the stages, shared and immutable) and a little state (the generator), so a copy of the
//! state is a snapshot and costs nothing. Stages run in the order the host gave them, because their order changes
//! the result and nobody but the host knows which one is meant. Buffers are kept between tokens: once they have
//! seen a vocabulary, sampling allocates nothing.

mod candidates;
mod filter;
pub mod grammar;
mod greedy;
mod logprobs;
mod penalty;
mod rng;
mod stage;

use std::sync::Arc;

use crate::error::{self, Result};
use crate::{bail, ensure};
use candidates::Candidates;
use penalty::Counts;
use rng::Rng;

pub use grammar::{Constraint, Grammar, Vocabulary};
pub use greedy::argmax;
pub use logprobs::{TokenLogprob, logprob, top_logprobs};
pub use stage::Stage;

/// Turns logits into tokens. Cloning copies recipe and state, not the buffers.
pub struct Sampler {
    stages: Arc<[Stage]>,
    state: State,
    /// The state before the last token, for `undo`.
    before: State,
    candidates: Candidates,
    counts: Counts,
}

/// What changes from token to token. A copy of it is a snapshot of the sampler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    rng: Rng,
}

impl State {
    /// The state as bits, for saving.
    pub fn to_bits(self) -> u64 {
        self.rng.bits()
    }

    /// A state from its bits; every number is one.
    pub fn from_bits(bits: u64) -> State {
        State { rng: Rng::new(bits) }
    }
}

impl Sampler {
    /// A sampler that runs `stages` in order and then draws from what is left. No stage at all means greedy.
    pub fn new(stages: &[Stage], seed: u64) -> Result<Sampler> {
        let mut checked = error::vec_with_capacity(stages.len(), "sampler stages")?;
        for (index, stage) in stages.iter().enumerate() {
            stage.check().map_err(|e| e.context(format!("sampler stage {index}")).at(index as u64))?;
            checked.push(*stage);
        }
        Ok(Sampler::with(checked.into(), State { rng: Rng::new(seed) }))
    }

    /// The sampler that always takes the highest logit.
    pub fn greedy() -> Sampler {
        Sampler::with(Arc::new([]), State { rng: Rng::new(0) })
    }

    fn with(stages: Arc<[Stage]>, state: State) -> Sampler {
        Sampler { stages, state, before: state, candidates: Candidates::default(), counts: Counts::default() }
    }

    /// Starts the generator anew.
    pub fn reseed(&mut self, seed: u64) {
        self.state.rng = Rng::new(seed);
        self.before = self.state;
    }

    /// Refuses a recipe that names tokens outside a vocabulary of `vocab` entries.
    pub fn check_vocab(&self, vocab: usize) -> Result<()> {
        for (index, stage) in self.stages.iter().enumerate() {
            if let Stage::Bias { token, .. } = *stage {
                let known = usize::try_from(token).is_ok_and(|t| t < vocab);
                ensure!(known, InvalidToken, "sampler stage {index}: token {token} is outside the vocabulary of {vocab}");
            }
        }
        Ok(())
    }

    /// A snapshot of everything that changes from token to token.
    pub fn state(&self) -> State {
        self.state
    }

    /// Goes back to a snapshot.
    pub fn restore(&mut self, state: State) {
        self.state = state;
        self.before = state;
    }

    /// Takes the last `sample` back, as when the step it was made for failed.
    pub fn undo(&mut self) {
        self.state = self.before;
    }

    /// The next token. `logits[i]` belongs to token `i`; `history` holds the sequence's tokens, oldest first.
    /// A call that fails leaves the state as it was.
    pub fn sample(&mut self, logits: &[f32], history: &[i32]) -> Result<i32> {
        self.before = self.state;
        let token = match self.stages.first() {
            // Nothing changes the row before its maximum is taken, so the row need not be copied.
            None | Some(Stage::Greedy) => argmax(logits)? as i32,
            Some(stage) if stage.is_greedy() => argmax(logits)? as i32,
            Some(_) => self.run(logits, history)?,
        };
        Ok(token)
    }

    /// As `sample`, with only the tokens that a grammar allows next. A call that fails leaves the state as it was.
    pub fn sample_under(&mut self, constraint: &mut Constraint, logits: &[f32], history: &[i32]) -> Result<i32> {
        self.before = self.state;
        // Faults are looked for in the whole row: the grammar must not hide them.
        greedy::maximum(logits)?;
        self.sample(constraint.mask(logits)?, history)
    }

    fn run(&mut self, logits: &[f32], history: &[i32]) -> Result<i32> {
        self.candidates.load(logits)?;
        for stage in self.stages.iter() {
            match *stage {
                Stage::Greedy => filter::best(&mut self.candidates),
                Stage::Temperature(_) if stage.is_greedy() => filter::best(&mut self.candidates),
                Stage::Temperature(t) => filter::temperature(&mut self.candidates, t),
                Stage::TopK(k) => filter::top_k(&mut self.candidates, k as usize),
                Stage::TopP(p) => filter::top_p(&mut self.candidates, p),
                Stage::MinP(p) => filter::min_p(&mut self.candidates, p),
                Stage::Repetition { penalty, window } => {
                    let change = |logit: f32, _| if logit > 0.0 { logit / penalty } else { logit * penalty };
                    self.counts.apply(&mut self.candidates, logits.len(), history, window, change)?;
                }
                Stage::Presence { penalty, window } => {
                    let change = |logit: f32, _| logit - penalty;
                    self.counts.apply(&mut self.candidates, logits.len(), history, window, change)?;
                }
                Stage::Frequency { penalty, window } => {
                    let change = |logit: f32, count: u32| logit - penalty * count as f32;
                    self.counts.apply(&mut self.candidates, logits.len(), history, window, change)?;
                }
                Stage::Bias { token, value } => self.candidates.add(token, value),
            }
        }
        match self.candidates.draw(&mut self.state.rng)? {
            Some(id) => Ok(id as i32),
            None => {
                self.undo();
                bail!(NoValidToken, "the sampler's stages leave no token: every one is ruled out by its bias")
            }
        }
    }
}

impl Clone for Sampler {
    fn clone(&self) -> Sampler {
        Sampler { before: self.before, ..Sampler::with(self.stages.clone(), self.state) }
    }
}

#[cfg(test)]
mod tests;
