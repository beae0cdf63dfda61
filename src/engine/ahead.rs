//! Steps that a device goes on with by itself: the stretch of a [`decode`](super::decode()) in which nothing but the highest logit is asked for.
//!
//! While a step runs, the one behind it is queued; the device makes its batch of the tokens that the first finds. The host follows: it waits for
//! a step, takes the tokens that it knows then as the next step's choice, and only by that makes that step one of its own. So all that can be
//! said of a sequence at any moment is what single steps would say, and a step that nobody wants (a cancel, a row that no token can be chosen
//! from, an error) is waited for and forgotten. What can be seen to need the host ends the stretch, and the caller goes on as usual:
//! the context's end, a state that somebody holds, pages that are not there, another call that waits for its turn.

use super::Sequence;
use super::forward::{check, conclude, until_done};
use super::generate::{Chooser, choose, has_ended};
use super::load::Engine;
use super::runner::{Runner, Work};
use crate::ensure;
use crate::error::{Error, Kind, Result};
use crate::ops::PAGE;
use std::sync::Arc;
use std::time::Instant;

/// Most steps of a stretch, for which pages are reserved ahead: two pages of each list.
const MOST_STEPS: usize = 2 * PAGE;

/// Takes steps as long as it may, of the call that began on the sequences: `tokens` has places for `[steps][sequences]`. How many were done, and
/// what came between; none and no error where the step has to be taken as usual.
pub(super) fn stretch(sequences: &mut [&mut Sequence], choosers: &mut [&mut Chooser], tokens: &mut [i32]) -> (usize, Result<()>) {
    let count = sequences.len();
    let engine = Arc::clone(sequences[0].engine());
    let known = |sequence: &&mut Sequence| Arc::ptr_eq(sequence.engine(), &engine) && sequence.state.best().is_some();
    let room = sequences.iter().map(|sequence| sequence.capacity() - sequence.len()).min().unwrap_or(0);
    let most = (tokens.len() / count).min(room).min(MOST_STEPS);
    if most < 2 || engine.device.is_none() || count > engine.shapes().most_sequences() {
        return (0, Ok(()));
    }
    // Where the device has not found a row's token, that row is looked at, and told of if nothing can be chosen from it.
    if !sequences.iter().all(known) || !choosers.iter().all(|chooser| chooser.takes_the_highest()) {
        return (0, Ok(()));
    }
    let Some(mut runner) = engine.runner_if_free() else { return (0, Ok(())) };
    runner.begin();
    let mut stretch = Stretch { engine: &engine, runner: &mut runner, sequences, choosers, done: 0 };
    let went = stretch.go(tokens, most);
    let done = stretch.done;
    if done < most {
        sequences.iter_mut().for_each(|sequence| sequence.give_back());
    }
    (done, went)
}

struct Stretch<'a, 'b, 'c> {
    engine: &'a Engine,
    runner: &'a mut Runner,
    sequences: &'a mut [&'b mut Sequence],
    choosers: &'a mut [&'c mut Chooser],
    /// Steps that are the sequences'.
    done: usize,
}

impl Stretch<'_, '_, '_> {
    fn go(&mut self, tokens: &mut [i32], most: usize) -> Result<()> {
        let count = self.sequences.len();
        choose(self.sequences, self.choosers, &mut tokens[..count])?;
        let mut started = Instant::now();
        self.note_before();
        let first = self.begin(&tokens[..count], most);
        let sends = first.as_ref().is_ok_and(|sends| *sends);
        let mut begun = first.map(|_| ());
        loop {
            let current = &tokens[self.done * count..][..count];
            // The next one, while this one runs.
            let next = begun.is_ok() && sends && self.done + 1 < most && self.may_send(current);
            let sent = if next { self.runner.send(self.engine, true) } else { Ok(()) };
            // A step that could not be queued takes the one before it with it.
            let ended = begun.and(sent).and_then(|()| if sends { self.runner.wait() } else { Ok(()) });
            if ended.is_ok() {
                for (row, sequence) in self.sequences.iter_mut().enumerate() {
                    sequence.tokens.push(current[row]);
                    sequence.counters.passes += 1;
                    self.runner.logits(row, &mut sequence.state);
                }
            }
            conclude(self.sequences, &ended, 1, true, started.elapsed());
            if ended.is_err() {
                self.choosers.iter_mut().for_each(|chooser| chooser.undo());
                return ended;
            }
            started = Instant::now();
            self.done += 1;
            if !next {
                return if sends { self.runner.settle(Some(current)) } else { Ok(()) };
            }
            // It is under way, and becomes the sequences' own unless it is not wanted.
            if self.sequences.iter().any(|sequence| sequence.state.best().is_none()) {
                return self.runner.settle(None);
            }
            let place = self.done * count;
            if self.is_cancelled() {
                self.note_before();
                let cancelled = Err(Error::new(Kind::Cancelled, "the call was cancelled"));
                // What the device says then is for the next call to tell.
                let _ = self.runner.settle(None);
                conclude(self.sequences, &cancelled, 1, true, started.elapsed());
                return cancelled;
            }
            if let Err(e) = choose(self.sequences, self.choosers, &mut tokens[place..][..count]) {
                let _ = self.runner.settle(None);
                return Err(e);
            }
            self.note_before();
            self.sequences.iter_mut().for_each(|sequence| sequence.state.begin_third());
            begun = Ok(());
        }
    }

    fn note_before(&mut self) {
        self.sequences.iter_mut().for_each(|sequence| sequence.note_before());
    }

    fn is_cancelled(&self) -> bool {
        self.sequences.iter().any(|sequence| sequence.is_call_cancelled())
    }

    /// Begins the first step, with room for `most`. Whether it is under way, and others may be sent behind it; else it is done.
    fn begin(&mut self, tokens: &[i32], most: usize) -> Result<bool> {
        for (row, sequence) in self.sequences.iter_mut().enumerate() {
            check(self.engine, sequence, &tokens[row..=row], 0)?;
            sequence.reserve(1)?;
            sequence.state.begin()?;
        }
        ensure!(!self.is_cancelled(), Cancelled, "the call was cancelled");
        // Without memory for more the first step is all there is.
        let ahead = self.sequences.iter_mut().try_for_each(|sequence| sequence.reserve(most).and_then(|()| sequence.state.begin_two()));
        let ahead = ahead.is_ok();
        self.runner.set(self.sequences.iter().enumerate().map(|(row, sequence)| Work {
            tokens: &tokens[row..=row],
            position: sequence.len(),
            source: sequence.source(),
            pages: sequence.pages.for_run(),
            stamp: sequence.pages.stamp(),
            state: if ahead { sequence.state.pointers_of_three() } else { sequence.state.pointers(false) },
        }));
        if ahead && self.runner.sends(self.engine) {
            self.runner.send(self.engine, false)?;
            return Ok(true);
        }
        let (sequences, runner, engine) = (&*self.sequences, &mut *self.runner, self.engine);
        let cancelled = || sequences.iter().any(|sequence| sequence.is_call_cancelled());
        until_done(engine, &cancelled, |control| runner.run(engine, control)).map(|()| false)
    }

    /// Whether another step follows the one under way, whose tokens are `tokens`, as far as can be said yet.
    fn may_send(&mut self, tokens: &[i32]) -> bool {
        let ends = (0..tokens.len()).any(|index| has_ended(index, self.sequences, self.choosers, tokens));
        !ends && !self.engine.is_wanted() && !self.is_cancelled() && self.sequences.iter_mut().all(|sequence| sequence.state.has_third())
    }
}
