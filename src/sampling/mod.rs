//! From a row of logits to a token: an ordered list of stages, then a draw.
//!
//! A sampler is a recipe (the stages, shared and immutable) and a little state (the generator), so a copy of the
//! state is a snapshot and costs nothing. Stages run in the order the host gave them, because their order changes
//! the result and nobody but the host knows which one is meant. Buffers are kept between tokens: once they have
//! seen a vocabulary, sampling allocates nothing.

mod candidates;
mod dry;
mod filter;
pub mod grammar;
mod greedy;
mod hook;
mod logprobs;
mod mirostat;
mod penalty;
mod rng;
mod shortlist;
mod stage;
mod top_n_sigma;
mod typical;
mod xtc;

use std::sync::Arc;

use crate::error::{self, Error, Kind, Result};
use crate::{bail, ensure};
use candidates::Candidates;
use dry::Lengths;
use penalty::Counts;
use rng::Rng;
use shortlist::{Effect, Others};

pub use dry::Dry;
pub use grammar::{Constraint, Grammar, Vocabulary};
pub use greedy::argmax;
pub use hook::{Hook, in_hook};
pub use logprobs::{TokenLogprob, log_sum, logprob, top_logprobs};
pub use mirostat::Mirostat;
pub use shortlist::Shortlist;
pub use stage::Stage;

/// Turns logits into tokens. Cloning copies recipe and state, not the buffers.
pub struct Sampler {
    stages: Arc<[Stage]>,
    hook: Option<Arc<dyn Hook>>,
    state: State,
    /// The state before the last token, for `undo`.
    before: State,
    candidates: Candidates,
    counts: Counts,
    lengths: Lengths,
    /// What the hook sees.
    row: Vec<f32>,
}

/// What changes from token to token. A copy of it is a snapshot of the sampler.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct State {
    rng: Rng,
    /// Bits of mirostat's mu; none where no such stage is.
    mu: Option<u64>,
}

/// Stands for no mu among saved bits: a NaN.
const NO_MU: u64 = u64::MAX;

impl State {
    /// The state as bits, for saving.
    pub fn to_bits(self) -> [u64; 2] {
        [self.rng.bits(), self.mu.unwrap_or(NO_MU)]
    }

    /// A state from its bits; all numbers are one.
    pub fn from_bits([rng, mu]: [u64; 2]) -> State {
        State { rng: Rng::new(rng), mu: f64::from_bits(mu).is_finite().then_some(mu) }
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
        let last = stages.len().saturating_sub(1);
        if let Some(index) = stages.iter().take(last).position(|s| matches!(s, Stage::Mirostat(_))) {
            let text =
                format!("sampler stage {index}: mirostat learns from what is drawn from the tokens it keeps, so it is the last stage");
            return Err(Error::new(Kind::InvalidArgument, text).at(index as u64));
        }
        let state = State { rng: Rng::new(seed), mu: start(&checked) };
        Ok(Sampler::with(checked.into(), state))
    }

    /// The sampler that always takes the highest logit.
    pub fn greedy() -> Sampler {
        Sampler::with(Arc::new([]), State { rng: Rng::new(0), mu: None })
    }

    fn with(stages: Arc<[Stage]>, state: State) -> Sampler {
        Sampler {
            stages,
            hook: None,
            state,
            before: state,
            candidates: Candidates::default(),
            counts: Counts::default(),
            lengths: Lengths::default(),
            row: Vec::new(),
        }
    }

    /// Starts anew, with this seed.
    pub fn reseed(&mut self, seed: u64) {
        self.restore(State { rng: Rng::new(seed), mu: None });
    }

    /// What the stages `Hook` do.
    pub fn set_hook(&mut self, hook: Option<Arc<dyn Hook>>) {
        self.hook = hook;
    }

    /// Whether it was said what they do.
    pub fn has_hook(&self) -> bool {
        self.hook.is_some()
    }

    /// Whether there is a stage `Hook`.
    pub fn wants_hook(&self) -> bool {
        self.stages.contains(&Stage::Hook)
    }

    /// Refuses a recipe that names tokens outside a vocabulary of `vocab` entries.
    pub fn check_vocab(&self, vocab: usize) -> Result<()> {
        for (index, stage) in self.stages.iter().enumerate() {
            if let Some(token) = stage.token() {
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

    /// Goes back to a snapshot. One of a sampler with other stages fits as far as they are the same.
    pub fn restore(&mut self, state: State) {
        let mu = start(&self.stages).map(|start| state.mu.unwrap_or(start));
        self.state = State { mu, ..state };
        self.before = self.state;
    }

    /// Takes the last `sample` back, as when the step it was made for failed.
    pub fn undo(&mut self) {
        self.state = self.before;
    }

    /// The next token. `logits[i]` belongs to token `i`; `history` holds the sequence's tokens, oldest first.
    /// A call that fails leaves the state as it was.
    pub fn sample(&mut self, logits: &[f32], history: &[i32]) -> Result<i32> {
        self.before = self.state;
        // Nothing changes the row before its maximum is taken, nor what is left after, so the row need not be copied.
        if self.takes_the_highest() {
            return argmax(logits).map(|token| token as i32);
        }
        self.run(logits, history).inspect_err(|_| self.state = self.before)
    }

    /// Whether it takes the highest logit, whatever the row.
    pub fn takes_the_highest(&self) -> bool {
        match self.stages.split_first() {
            None => true,
            Some((first, rest)) => first.is_greedy() && rest.iter().all(Stage::keeps_the_highest),
        }
    }

    /// Whether it may draw from the highest logits of a row, without the others.
    pub fn draws_from_the_highest(&self) -> bool {
        let cuts = |stage: &&Stage| !stage.is_without_cut();
        !self.takes_the_highest() && self.stages.iter().find(cuts).is_some_and(Stage::cuts_to_the_highest)
    }

    /// As `sample`, from the highest logits of the row; `None`, and nothing changes, where others might count.
    pub fn sample_from(&mut self, list: &Shortlist<'_>, history: &[i32]) -> Result<Option<i32>> {
        self.before = self.state;
        self.candidates.load_highest(list.tokens)?;
        let others = Others::new(*list);
        let drawn = self.through(list.vocab, history, Some(others));
        if !matches!(drawn, Ok(Some(_))) {
            self.state = self.before;
        }
        drawn
    }

    /// As `sample`, where it is known which token has the highest logit; `None`, and nothing changes, where the row itself is needed.
    pub fn take_highest(&mut self, token: i32) -> Option<i32> {
        self.takes_the_highest().then(|| {
            self.before = self.state;
            token
        })
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
        match self.through(logits.len(), history, None)? {
            Some(token) => Ok(token),
            None => bail!(Internal, "a whole row was not enough to choose from"),
        }
    }

    /// Runs the stages over the candidates, of a vocabulary of `vocab` tokens, and draws. `others` is what is known of tokens that are missing
    /// among them; `None` comes back where they might count.
    fn through(&mut self, vocab: usize, history: &[i32], mut others: Option<Others<'_>>) -> Result<Option<i32>> {
        let mut seen = None;
        for stage in self.stages.iter() {
            let effect = others.as_mut().map(|others| others.meet(stage, &mut self.candidates));
            match effect {
                Some(Effect::Unknown) => return Ok(None),
                Some(Effect::Done) => {
                    others = None;
                    continue;
                }
                Some(Effect::Along | Effect::Gone | Effect::GoneIfAbove) | None => {}
            }
            match *stage {
                Stage::Greedy => filter::best(&mut self.candidates),
                Stage::Temperature(_) if stage.is_greedy() => filter::best(&mut self.candidates),
                Stage::Temperature(t) => filter::temperature(&mut self.candidates, t),
                Stage::TopK(k) => filter::top_k(&mut self.candidates, k as usize),
                Stage::TopP(p) => filter::top_p(&mut self.candidates, p),
                Stage::MinP(p) => filter::min_p(&mut self.candidates, p),
                Stage::Repetition { penalty, window } => {
                    let change = |logit: f32, _| if logit > 0.0 { logit / penalty } else { logit * penalty };
                    self.counts.apply(&mut self.candidates, vocab, history, window, change)?;
                }
                Stage::Presence { penalty, window } => {
                    let change = |logit: f32, _| logit - penalty;
                    self.counts.apply(&mut self.candidates, vocab, history, window, change)?;
                }
                Stage::Frequency { penalty, window } => {
                    let change = |logit: f32, count: u32| logit - penalty * count as f32;
                    self.counts.apply(&mut self.candidates, vocab, history, window, change)?;
                }
                Stage::Bias { token, value } => self.candidates.add(token, value),
                Stage::Typical(p) => typical::typical(&mut self.candidates, p),
                Stage::TopNSigma(n) => top_n_sigma::top_n_sigma(&mut self.candidates, n),
                Stage::Xtc { threshold, probability } => xtc::xtc(&mut self.candidates, threshold, probability, &mut self.state.rng),
                Stage::Dry(dry) => {
                    let breaks = |token| self.stages.contains(&Stage::DryBreaker(token));
                    dry.apply(&mut self.candidates, vocab, history, breaks, &mut self.lengths, &mut self.counts)?;
                }
                Stage::DryBreaker(_) => {}
                Stage::Hook => match &self.hook {
                    Some(hook) => hook::run(&**hook, &mut self.candidates, &mut self.row, vocab, history)?,
                    None => bail!(InvalidState, "the sampler has a stage for a hook, but none was set"),
                },
                Stage::Mirostat(mirostat) => {
                    let mu = self.state.mu.map_or(mirostat.start(), f64::from_bits);
                    seen = mirostat.cut(&mut self.candidates, mu).map(|seen| (mirostat, mu, seen));
                }
            }
            match (effect, &others) {
                (Some(Effect::Gone), _) => {
                    self.candidates.order_by_id();
                    others = None;
                }
                (Some(Effect::GoneIfAbove), Some(known)) => match known.are_below(&self.candidates) {
                    true => others = None,
                    false => return Ok(None),
                },
                _ => {}
            }
        }
        if others.is_some() {
            return Ok(None);
        }
        let Some(drawn) = self.candidates.draw(&mut self.state.rng)? else {
            bail!(NoValidToken, "the sampler's stages leave no token: every one is ruled out by its bias")
        };
        if let Some((mirostat, mu, seen)) = seen {
            self.state.mu = Some(mirostat.learn(mu, seen, drawn.logit).to_bits());
        }
        Ok(Some(drawn.id as i32))
    }
}

/// Mirostat's mu before the first token, where there is such a stage.
fn start(stages: &[Stage]) -> Option<u64> {
    match stages.last() {
        Some(Stage::Mirostat(mirostat)) => Some(mirostat.start().to_bits()),
        _ => None,
    }
}

impl Clone for Sampler {
    fn clone(&self) -> Sampler {
        Sampler { before: self.before, hook: self.hook.clone(), ..Sampler::with(self.stages.clone(), self.state) }
    }
}

#[cfg(test)]
mod tests;
