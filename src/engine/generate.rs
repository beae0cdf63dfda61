//! One step of generation: choose a token for each sequence, append them all, compute the rows that follow.
//!
//! A step happens as a whole or not at all: tokens are chosen first, and when a choice or the computation fails every
//! generator goes back to where it was. Nothing here allocates; the caller brings the room.

use std::sync::Arc;

use super::Sequence;
use super::forward::append_for_all;
use crate::ensure;
use crate::error::{Error, Kind, Result};
use crate::sampling::{self, Constraint, Sampler, Shortlist};

/// How a sequence's next token is chosen, and what is remembered about it.
pub struct Chooser {
    /// The stages and the generator.
    pub sampler: Sampler,
    /// The grammar that tokens follow, if any. Only tokens that are chosen here count; a prompt does not.
    pub constraint: Option<Constraint>,
    /// Tokens that end generation count as ordinary ones.
    pub ignore_end: bool,
    /// Whether the log-probability of each chosen token is kept.
    pub record_logprob: bool,
    /// Log-probability of the newest chosen token, before any stage.
    pub last_logprob: Option<f32>,
    /// The one before, for a step that fails.
    pub(super) before_logprob: Option<f32>,
}

impl Chooser {
    /// Chooses with `sampler`, stops at end tokens, keeps no log-probability.
    pub fn new(sampler: Sampler) -> Chooser {
        Chooser { sampler, constraint: None, ignore_end: false, record_logprob: false, last_logprob: None, before_logprob: None }
    }

    /// A chooser that will choose the same.
    pub fn fork(&self) -> Chooser {
        Chooser { sampler: self.sampler.clone(), constraint: self.constraint.clone(), ..*self }
    }

    /// A token for the row after the tokens of `sequence`. A call that fails changes nothing.
    pub(super) fn choose(&mut self, sequence: &Sequence) -> Result<i32> {
        // What a device has found is often enough, and the row stays there.
        if self.constraint.is_none()
            && let Some(token) = self.choose_found(sequence).map_err(|e| sequence.located(e))?
        {
            return Ok(token);
        }
        self.choose_from(sequence, sequence.logits()?).map_err(|e| sequence.located(e))
    }

    /// Whether it would draw from the highest logits alone.
    pub(super) fn draws(&self) -> bool {
        self.constraint.is_none() && (self.sampler.draws_from_the_highest() || (self.record_logprob && self.sampler.takes_the_highest()))
    }

    /// Whether it takes the highest logit, of which nothing else is remembered.
    pub(super) fn takes_the_highest(&self) -> bool {
        self.constraint.is_none() && !self.record_logprob && self.sampler.takes_the_highest()
    }

    /// As `choose`, from what a device has found in the row; `None`, and nothing changed, where the row itself is needed.
    fn choose_found(&mut self, sequence: &Sequence) -> Result<Option<i32>> {
        let Some(best) = sequence.state.best() else { return Ok(None) };
        let vocab = sequence.engine().info().vocab;
        let list = sequence.state.candidates().and_then(|(tokens, sum)| Shortlist::new(tokens, sum, vocab));
        let token = match (self.sampler.take_highest(best), &list) {
            (Some(token), _) => token,
            (None, Some(list)) => match self.sampler.sample_from(list, sequence.tokens())? {
                Some(token) => token,
                None => return Ok(None),
            },
            (None, None) => return Ok(None),
        };
        let mut logprob = None;
        if self.record_logprob {
            logprob = list.and_then(|list| list.logprob(token));
            if logprob.is_none() {
                self.sampler.undo();
                return Ok(None);
            }
        }
        self.before_logprob = self.last_logprob;
        if logprob.is_some() {
            self.last_logprob = logprob;
        }
        Ok(Some(token))
    }

    fn choose_from(&mut self, sequence: &Sequence, row: &[f32]) -> Result<i32> {
        let token = match &mut self.constraint {
            Some(constraint) => {
                let token = self.sampler.sample_under(constraint, row, sequence.tokens())?;
                if let Err(e) = constraint.take(token, sequence.len()) {
                    self.sampler.undo();
                    return Err(e);
                }
                token
            }
            None => self.sampler.sample(row, sequence.tokens())?,
        };
        self.before_logprob = self.last_logprob;
        if self.record_logprob {
            let mut logprob = [0.0];
            if let Err(e) = sampling::logprob(row, &[token], &mut logprob) {
                self.undo();
                return Err(e);
            }
            self.last_logprob = Some(logprob[0]);
        }
        Ok(token)
    }

    /// Takes the last choice back.
    pub(super) fn undo(&mut self) {
        self.sampler.undo();
        if let Some(constraint) = &mut self.constraint {
            constraint.undo();
        }
        self.last_logprob = self.before_logprob;
    }
}

/// One token for each sequence, chosen by the chooser of the same index, appended and written to `tokens`; all slices
/// have the same length. Returns whether every sequence has just produced a token that ends generation. On error
/// sequences and choosers are as before, and `tokens` means nothing.
pub fn decode_step(sequences: &mut [&mut Sequence], choosers: &mut [&mut Chooser], tokens: &mut [i32]) -> Result<bool> {
    sequences.iter_mut().for_each(|sequence| sequence.begin_call());
    step(sequences, choosers, tokens)?;
    Ok((0..sequences.len()).all(|index| has_ended(index, sequences, choosers, tokens)))
}

/// A step of the call that began on the sequences ([`Sequence::begin_call`]).
pub(super) fn step(sequences: &mut [&mut Sequence], choosers: &mut [&mut Chooser], tokens: &mut [i32]) -> Result<()> {
    choose(sequences, choosers, tokens)?;
    let draws = choosers.iter().any(|chooser| chooser.draws());
    append_for_all(sequences, tokens, draws).inspect_err(|_| choosers.iter_mut().for_each(|c| c.undo()))
}

/// Chooses a token for each sequence. On error no chooser has changed.
pub(super) fn choose(sequences: &[&mut Sequence], choosers: &mut [&mut Chooser], tokens: &mut [i32]) -> Result<()> {
    let count = sequences.len();
    ensure!(choosers.len() == count && tokens.len() == count, Internal, "a step over slices of different lengths");
    check(sequences)?;
    for index in 0..count {
        match choosers[index].choose(sequences[index]) {
            Ok(token) => tokens[index] = token,
            Err(e) => {
                choosers[..index].iter_mut().for_each(|c| c.undo());
                return Err(at(e, index));
            }
        }
    }
    Ok(())
}

/// Whether the token that was just produced for a sequence ends generation.
pub(super) fn has_ended(index: usize, sequences: &[&mut Sequence], choosers: &[&mut Chooser], tokens: &[i32]) -> bool {
    !choosers[index].ignore_end && sequences[index].engine().is_end(tokens[index])
}

/// What can be seen to fail before anything is chosen.
fn check(sequences: &[&mut Sequence]) -> Result<()> {
    for (index, sequence) in sequences.iter().enumerate() {
        if !Arc::ptr_eq(sequence.engine(), sequences[0].engine()) {
            return Err(at(Error::new(Kind::InvalidArgument, "it belongs to another model than the first one"), index));
        }
        if sequence.tokens().is_empty() {
            return Err(at(Error::new(Kind::InvalidState, "it holds no token yet; prefill it first"), index));
        }
        if sequence.len() >= sequence.capacity() {
            let e = Error::new(Kind::ContextFull, format!("its context of {} tokens is full", sequence.capacity()));
            return Err(at(e.sizes(1, 0), index));
        }
    }
    Ok(())
}

/// Names the sequence an error is about.
fn at(e: Error, index: usize) -> Error {
    e.context(format!("sequence {index}")).at(index as u64)
}
