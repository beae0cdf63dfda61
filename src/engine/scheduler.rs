//! Bounded work: as much of many sequences' prompts and tokens as fits a budget of time.
//!
//! Work is cut into slices: a batch of next tokens and pieces of prompts. A slice is all or nothing for its sequences. One that
//! is not done in time leaves off between two pieces of an operation and goes on in the next call; meanwhile its sequences are
//! as before it, because tokens are appended and states swapped only at its end. It holds no pointer into them: pages and states
//! are looked up anew, and a sequence's stamp says whether what the slice wrote there still stands. A sequence that is freed,
//! cancelled or used otherwise no longer has that stamp, and the slice is forgotten.

use super::Sequence;
use super::forward::check;
use super::generate::Chooser;
use super::load::Engine;
use super::runner::{MOST_STEP_ROWS, Runner, Work};
use crate::backend::cpu::pause::Control;
use crate::circuit::Outcome;
use crate::ensure;
use crate::error::{Error, Kind, Result};
use crate::sampling::in_hook;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// What a step did for one sequence.
#[derive(Clone, Debug, Default)]
pub struct Stepped {
    /// Tokens read from its queue.
    pub read: usize,
    /// The token that was produced and appended.
    pub token: Option<i32>,
    /// How its work stands.
    pub state: StepState,
}

/// How a sequence's work stands after a step.
#[derive(Clone, Debug, Default)]
pub enum StepState {
    /// The budget ran out: step again.
    #[default]
    Unfinished,
    /// The queue is read, or a token is produced.
    Complete,
    /// A token that ends generation is produced.
    Ended,
    /// A cancel came: what was waiting or begun is dropped.
    Cancelled,
    /// The sequence cannot go on, and is as before; others did.
    Failed(Error),
}

/// Programs, workspace and the slice that was left off. One step runs at a time.
pub(super) struct Stepper {
    runner: Runner,
    slice: Option<Slice>,
    /// Where the next slice begins to look for work, so that everybody's turn comes however short the budgets.
    turn: usize,
    /// The last slice had no room for prompts that wait.
    owed: bool,
    /// Lists of a slice that is over, for the next one.
    spare: Slice,
}

impl Stepper {
    /// Nothing under way.
    pub(super) fn new(runner: Runner) -> Stepper {
        Stepper { runner, slice: None, turn: 0, owed: false, spare: Slice::default() }
    }

    /// Gives back what is kept between runs; a slice under way stays.
    pub(super) fn trim(&mut self) {
        self.runner.trim();
    }
}

/// A batch under way.
#[derive(Default)]
struct Slice {
    parts: Vec<Part>,
    /// Of all parts, in order.
    tokens: Vec<i32>,
    spent: Duration,
    /// Whether the choosers are past the tokens they chose for it.
    chosen: bool,
}

/// One sequence's rows of a slice.
struct Part {
    /// Place in the call.
    index: usize,
    stamp: u64,
    count: usize,
    /// Tokens before them that are not computed: their pages are borrowed from the prefix tree.
    borrowed: usize,
    /// The token was chosen, not read from the queue.
    produced: bool,
}

/// Fewer rows of a prompt than this are not worth a pass over the weights.
const FEWEST_ROWS: usize = 8;
/// As many, where nobody waits for a token: a slice that does not fit goes on in the next step.
const ALONE_ROWS: usize = 32;

/// Works for `budget` (`None`: to the end) on the sequences, all of one model, and writes to `out` what was done. A sequence with
/// a queue reads it; one without produces a token, chosen by the chooser of the same index. Slices that are done stay done,
/// whatever happens to later ones.
pub fn step<'b>(
    sequences: &mut [&'b mut Sequence],
    choosers: &mut [&'b mut Chooser],
    budget: Option<Duration>,
    out: &mut [Stepped],
) -> Result<()> {
    let deadline = budget.and_then(|budget| Instant::now().checked_add(budget));
    let count = sequences.len();
    ensure!(choosers.len() == count && out.len() == count, Internal, "a step over slices of different lengths");
    ensure!(!in_hook(), InvalidState, "a sampler's hook is running on this thread, for a step that must end first");
    let Some(first) = sequences.first() else { return Ok(()) };
    let engine = Arc::clone(first.engine());
    same_engine(&engine, sequences.iter().map(|s| &**s))?;
    for (sequence, out) in sequences.iter_mut().zip(out.iter_mut()) {
        *out = Stepped::default();
        if sequence.hear() {
            out.state = StepState::Cancelled;
        }
    }
    let Some(mut stepper) = engine.stepper_unless(&|| passed(deadline))? else { return Ok(()) };
    Call { engine: &engine, stepper: &mut stepper, sequences, choosers, out, deadline }.run()
}

/// About how long a step without a budget would take now.
pub fn step_estimate(sequences: &[&Sequence]) -> Result<Duration> {
    let Some(first) = sequences.first() else { return Ok(Duration::ZERO) };
    let engine = first.engine();
    same_engine(engine, sequences.iter().copied())?;
    let rows = |s: &Sequence| if s.queued() > 0 { s.queued() } else { usize::from(!s.is_empty()) };
    Ok(engine.cost().time(engine, sequences.iter().map(|s| rows(s)).sum(), engine.shapes().step_rows()))
}

fn same_engine<'a>(engine: &Arc<Engine>, mut sequences: impl Iterator<Item = &'a Sequence>) -> Result<()> {
    match sequences.position(|s| !Arc::ptr_eq(s.engine(), engine)) {
        None => Ok(()),
        Some(index) => {
            Err(Error::new(Kind::InvalidArgument, format!("sequence {index} belongs to another model than sequence 0")).at(index as u64))
        }
    }
}

fn passed(deadline: Option<Instant>) -> bool {
    deadline.is_some_and(|deadline| Instant::now() >= deadline)
}

/// One step.
struct Call<'a, 'b> {
    engine: &'a Engine,
    stepper: &'a mut Stepper,
    sequences: &'a mut [&'b mut Sequence],
    choosers: &'a mut [&'b mut Chooser],
    out: &'a mut [Stepped],
    deadline: Option<Instant>,
}

impl Call<'_, '_> {
    fn run(mut self) -> Result<()> {
        let mut left = self.stepper.slice.take().and_then(|slice| self.adopt(slice));
        loop {
            let slice = match left.take() {
                Some(slice) => slice,
                None => match self.plan()? {
                    Some(slice) => slice,
                    None => return Ok(()),
                },
            };
            if let Some(slice) = self.go(slice)? {
                for part in &slice.parts {
                    self.sequences[part.index].leave_begun();
                }
                self.stepper.slice = Some(slice);
                return Ok(());
            }
            if passed(self.deadline) {
                return Ok(());
            }
        }
    }

    /// Takes up the slice that an earlier call left, if all its sequences are here and as it left them.
    fn adopt(&mut self, mut slice: Slice) -> Option<Slice> {
        for part in &mut slice.parts {
            part.index = self.sequences.iter().position(|s| s.state.stamp() == part.stamp)?;
            let sequence = &mut self.sequences[part.index];
            // A fork made meanwhile may share a page; the copy made here has what the slice wrote so far.
            let from = sequence.len() + part.borrowed;
            sequence.reserve_between(from, from + part.count).ok()?;
        }
        Some(slice)
    }

    /// The next slice: a token for each sequence that wants one, and as much of the prompts as fits.
    fn plan(&mut self) -> Result<Option<Slice>> {
        let mut slice = std::mem::take(&mut self.stepper.spare);
        slice.chosen = true;
        let planned = self.add_produced(&mut slice).and_then(|()| self.add_read(&mut slice));
        if let Err(e) = planned {
            self.undo(&mut slice);
            return Err(e);
        }
        self.stepper.runner.begin();
        self.stepper.turn = self.stepper.turn.wrapping_add(slice.parts.len());
        self.stepper.owed =
            (0..self.sequences.len()).any(|i| self.wants(i) && self.sequences[i].queued() > 0) && slice.parts.iter().all(|p| p.produced);
        if slice.parts.is_empty() {
            self.retire(slice);
            return Ok(None);
        }
        Ok(Some(slice))
    }

    /// All sequences, in the order of this slice.
    fn order(&self) -> impl Iterator<Item = usize> + use<> {
        let (turn, count) = (self.stepper.turn, self.sequences.len());
        (0..count).map(move |i| (turn % count + i) % count)
    }

    fn wants(&self, index: usize) -> bool {
        matches!(self.out[index].state, StepState::Unfinished)
    }

    fn add_produced(&mut self, slice: &mut Slice) -> Result<()> {
        for index in self.order() {
            let sequence = &mut self.sequences[index];
            if !matches!(self.out[index].state, StepState::Unfinished)
                || sequence.queued() > 0
                || slice.parts.len() == self.engine.shapes().most_sequences()
            {
                continue;
            }
            // The order matters: nothing may fail for good once a token is chosen.
            let token = check(self.engine, sequence, &[0], 0).and_then(|()| self.choosers[index].choose(sequence));
            match token {
                Ok(token) => self.add(slice, index, 0, &[token], true)?,
                Err(e) => self.out[index].state = StepState::Failed(e),
            }
        }
        Ok(())
    }

    fn add_read(&mut self, slice: &mut Slice) -> Result<()> {
        let taken = slice.tokens.len();
        let (most, most_sequences) = (self.engine.shapes().step_rows(), self.engine.shapes().most_sequences());
        let fit = match self.deadline {
            Some(deadline) => self.engine.cost().rows(self.engine, deadline.saturating_duration_since(Instant::now())),
            None => most,
        };
        // Produced tokens do not wait for a prompt's slice that does not fit, unless it had to wait before; a slice that is
        // alone is at least worth its pass.
        let fewest = match taken {
            0 => ALONE_ROWS,
            _ if self.stepper.owed => FEWEST_ROWS,
            _ => 0,
        };
        let mut rows = fit.min(most).saturating_sub(taken).clamp(fewest, most - taken);
        for index in self.order() {
            if !self.wants(index) || rows == 0 || self.sequences[index].queued() == 0 || slice.parts.len() == most_sequences {
                continue;
            }
            let sequence = &mut self.sequences[index];
            let (taken, borrowed) = sequence.take_queued();
            self.out[index].read += taken;
            if sequence.queued() == 0 {
                self.out[index].state = StepState::Complete;
                continue;
            }
            let count = (sequence.next_slice() - borrowed).min(rows);
            let mut tokens = [0; MOST_STEP_ROWS];
            let tokens = &mut tokens[..count];
            tokens.copy_from_slice(&sequence.queue.waiting()[borrowed..][..count]);
            match check(self.engine, sequence, tokens, borrowed) {
                Ok(()) => self.add(slice, index, borrowed, tokens, false)?,
                Err(e) => self.out[index].state = StepState::Failed(e),
            }
            rows -= count;
        }
        Ok(())
    }

    /// Adds rows of one sequence. On error its chooser is back, those of earlier parts are not.
    fn add(&mut self, slice: &mut Slice, index: usize, borrowed: usize, tokens: &[i32], produced: bool) -> Result<()> {
        let sequence = &mut self.sequences[index];
        let from = sequence.len() + borrowed;
        if let Err(e) = sequence.reserve_between(from, from + tokens.len()).and_then(|()| sequence.state.begin()) {
            if produced {
                self.choosers[index].undo();
            }
            return Err(e);
        }
        slice.parts.push(Part { index, stamp: sequence.state.stamp(), count: tokens.len(), borrowed, produced });
        slice.tokens.extend_from_slice(tokens);
        Ok(())
    }

    /// Runs a slice: it is given back where time ran out, else it is done or dropped.
    fn go(&mut self, mut slice: Slice) -> Result<Option<Slice>> {
        let rings = self.engine.alarm().rings();
        let mut at = 0;
        let draws = slice.parts.iter().any(|part| self.choosers[part.index].draws());
        self.stepper.runner.expect_draws(draws);
        self.stepper.runner.set(slice.parts.iter().map(|part| {
            let sequence = &self.sequences[part.index];
            let tokens = &slice.tokens[at..][..part.count];
            at += part.count;
            let (position, source) = (sequence.len() + part.borrowed, sequence.source());
            let (pages, stamp) = (sequence.pages.for_run(), sequence.pages.stamp());
            Work { tokens, position, source, pages, stamp, state: sequence.state.pointers(false) }
        }));
        loop {
            // Read before the look: a cancel after it is a ring that the run notices.
            let seen = rings.load(Ordering::SeqCst);
            if slice.parts.iter().any(|part| self.sequences[part.index].is_cancelled()) {
                self.drop_cancelled(slice);
                return Ok(None);
            }
            let started = Instant::now();
            let ran = self.stepper.runner.run(self.engine, Control::new(rings, seen, self.deadline));
            slice.spent += started.elapsed();
            match ran {
                Ok(Outcome::Done) => break,
                Ok(Outcome::Suspended) if passed(self.deadline) => {
                    self.undo(&mut slice);
                    return Ok(Some(slice));
                }
                Ok(Outcome::Suspended) => {}
                Err(e) => {
                    self.undo(&mut slice);
                    return Err(e);
                }
            }
        }
        if self.choose_again(&mut slice) {
            self.finish(&slice);
        }
        self.retire(slice);
        Ok(None)
    }

    /// Brings choosers that went back while a slice was left off to where they were. False, and all are back, where one now
    /// chooses otherwise, because the host changed it.
    fn choose_again(&mut self, slice: &mut Slice) -> bool {
        if slice.chosen {
            return true;
        }
        let mut at = 0;
        for (done, part) in slice.parts.iter().enumerate() {
            if part.produced {
                let chosen = self.choosers[part.index].choose(self.sequences[part.index]);
                if !matches!(&chosen, Ok(token) if *token == slice.tokens[at]) {
                    if chosen.is_ok() {
                        self.choosers[part.index].undo();
                    }
                    slice.parts[..done].iter().filter(|p| p.produced).for_each(|p| self.choosers[p.index].undo());
                    return false;
                }
            }
            at += part.count;
        }
        slice.chosen = true;
        true
    }

    /// Appends a slice's tokens and takes up what it wrote.
    fn finish(&mut self, slice: &Slice) {
        self.engine.cost().learn(slice.tokens.len(), slice.spent);
        let mut rest = &slice.tokens[..];
        for (row, part) in slice.parts.iter().enumerate() {
            let (sequence, out) = (&mut self.sequences[part.index], &mut self.out[part.index]);
            let (tokens, more) = rest.split_at(part.count);
            rest = more;
            let before = sequence.len();
            self.stepper.runner.logits(row, &mut sequence.state);
            if part.borrowed > 0 {
                sequence.take_borrowed(part.borrowed);
                out.read += part.borrowed;
            }
            sequence.tokens.extend_from_slice(tokens);
            sequence.state.commit(Some(before));
            sequence.counters.passes += 1;
            sequence.counters.note(tokens.len(), part.produced, slice.spent);
            if part.produced {
                out.token = Some(tokens[0]);
                let ended = !self.choosers[part.index].ignore_end && self.engine.is_end(tokens[0]);
                out.state = if ended { StepState::Ended } else { StepState::Complete };
            } else {
                out.read += part.count;
                sequence.advance_queue(part.count);
                if sequence.queued() == 0 {
                    out.state = StepState::Complete;
                }
            }
        }
    }

    /// Drops a slice for those of its sequences that were cancelled; the others may go on.
    fn drop_cancelled(&mut self, mut slice: Slice) {
        self.undo(&mut slice);
        for part in &slice.parts {
            if self.sequences[part.index].is_cancelled() {
                self.sequences[part.index].counters.cancelled += 1;
                self.sequences[part.index].drop_work();
                self.out[part.index].state = StepState::Cancelled;
            }
        }
        self.retire(slice);
    }

    /// Keeps the memory of a slice that is over.
    fn retire(&mut self, mut slice: Slice) {
        slice.parts.clear();
        slice.tokens.clear();
        self.stepper.spare = Slice { parts: slice.parts, tokens: slice.tokens, ..Slice::default() };
    }

    /// Takes back what the choosers chose for a slice.
    fn undo(&mut self, slice: &mut Slice) {
        if std::mem::replace(&mut slice.chosen, false) {
            slice.parts.iter().filter(|part| part.produced).for_each(|part| self.choosers[part.index].undo());
        }
    }
}
