//! Steps that a device goes on with by itself: while one runs, the one behind it is queued already, and its batch is made on the device of the tokens
//! that the first finds ([`ADVANCE`]).
//!
//! A step sent that way is a graph like any other, but for its beginning. At most two are under way. What orders them, and what is not touched meanwhile:
//! - a graph begins when all before it in the stream has ended, so a step reads whole what the one before it wrote: tokens, keys, states;
//! - the host's copy of the batch and the list of what is new stay as they are until all have ended, since the first step's copies may still read
//!   them; only then does the copy follow the device ([`BatchImage::follow`](crate::ops::BatchImage::follow));
//! - what is found goes to two places by turns, and a step is queued only when the one before the last has been waited for: the place that the
//!   host looks at is written again by a step that is not queued yet;
//! - the event of a place is recorded again only then, too;
//! - states turn among three: a step reads what the one before it wrote and writes neither that nor what that one read, so whichever of the two the
//!   host takes for its sequences' state is whole;
//! - pages were made the sequences' own ahead by the host, and their lists say so since the first step; what a step that nobody wants has written
//!   there lies behind the sequences' ends.

use super::device::{DeviceWorkspace, Step};
use super::found::Keep;
use super::program::Program;
use crate::backend::cpu::pause::Control;
use crate::backend::cuda::launch::{Launch, bytes_of};
use crate::backend::cuda::{Device, Event, Queue, Stream};
use crate::ensure;
use crate::error::{Error, Kind, Result};
use crate::ops::{ADVANCE, AdvanceArgs, Batch, GpuWeight, batch_grid};
use std::sync::Arc;
use std::time::Instant;

/// Steps that were queued without waiting for them.
pub(super) struct Sent {
    /// Their ends, by turns.
    ends: [Event; 2],
    /// How many since the host made a batch, and how many of them were waited for.
    queued: usize,
    ended: usize,
}

impl Sent {
    pub(super) fn new(device: &Arc<Device>) -> Result<Sent> {
        Ok(Sent { ends: [Event::new(device, false)?, Event::new(device, false)?], queued: 0, ended: 0 })
    }

    /// Counts one that was queued just now.
    fn note(&mut self, stream: &Stream) -> Result<()> {
        self.ends[self.queued % 2].record(stream)?;
        self.queued += 1;
        Ok(())
    }
}

impl DeviceWorkspace {
    /// Whether a run of this batch is one graph, so that [`DeviceWorkspace::send`] takes it.
    pub fn sends(&self, program: &Program, batch: &Batch, keep: Keep) -> bool {
        let whole = program.inputs().is_empty() && program.asides().next().is_none();
        let captures = self.captures && !self.stream.times_kernels() && self.place == 0;
        whole && captures && !keep.candidates && Step::of(program, 0, batch, Some(keep)).is_some()
    }

    /// Queues a step as [`DeviceWorkspace::run`] would, and does not wait for it. The states of `batch` say where those of the step behind it go.
    pub fn send(&mut self, program: &Program, batch: &Batch, weights: &[GpuWeight], keep: Keep) -> Result<()> {
        let queued = self.queue(program, batch, weights, Some(keep), Control::none());
        queued.and_then(|_| self.sent.note(&self.stream)).inspect_err(|_| self.lose())
    }

    /// Queues the step behind the one that is under way. `batch` is what the device will make of its own: the next positions and states, and tokens
    /// that are not known yet.
    pub fn send_next(&mut self, program: &Program, batch: &Batch, weights: &[GpuWeight], keep: Keep) -> Result<()> {
        ensure!(self.sent.queued == self.sent.ended + 1, Internal, "a step is queued behind one that is under way");
        let step = Step::of(program, 0, batch, Some(keep)).ok_or_else(|| Error::new(Kind::Internal, "a batch that is no step"))?;
        let queued = self.step(program, batch, weights, step.fed());
        queued.and_then(|_| self.sent.note(&self.stream)).inspect_err(|_| self.lose())
    }

    /// Waits for the older of the steps under way. What it has found is looked at until the next wait.
    pub fn wait(&mut self) -> Result<()> {
        ensure!(self.sent.ended < self.sent.queued, Internal, "a wait for no step");
        let turn = self.sent.ended % 2;
        let begun = Instant::now();
        let ended = self.sent.ends[turn].wait();
        self.waited += begun.elapsed();
        ended.inspect_err(|_| self.lose())?;
        self.sent.ended += 1;
        self.found.look(turn);
        Ok(())
    }

    /// Ends what [`DeviceWorkspace::send`] began. With the batch of the last step, where all were waited for; a step that was not is waited for now,
    /// and counts for nothing.
    pub fn settle(&mut self, last: Option<&Batch>) -> Result<()> {
        let Sent { queued, ended, .. } = self.sent;
        let Some(fed) = queued.checked_sub(1) else { return Ok(()) };
        (self.sent.queued, self.sent.ended) = (0, 0);
        if let (true, Some(batch)) = (queued == ended, last) {
            return self.image.follow(batch, fed, self.host.as_mut_slice(), self.news.as_mut_slice()).inspect_err(|_| self.image.forget());
        }
        self.image.forget();
        let begun = Instant::now();
        let ended = self.stream.synchronize();
        self.waited += begun.elapsed();
        ended
    }

    /// After an error: whatever was queued uses memory that its owners may now free. The error that is told is the first one.
    fn lose(&mut self) {
        let _ = self.stream.synchronize();
        (self.sent.queued, self.sent.ended) = (0, 0);
        self.image.forget();
        self.restart();
    }

    /// Queues what makes the next step's batch. As in `take_up`, the kernels after it wait for it.
    pub(super) fn advance(&self, queue: &Queue<'_>) -> Result<()> {
        let batch = self.batch.address();
        let [next, turn] = self.places.ahead().map(|place| batch + place);
        queue.launch(ADVANCE, batch_grid(), bytes_of(&AdvanceArgs { batch, found: self.found.tokens(), next, turn }))?;
        queue.settle();
        Ok(())
    }
}
