//! Where numbers went wrong: the first tensor of a sequence's last step that is not finite.
//!
//! Nothing is watched while all is well. Once a row of logits turns out to be unfit, a token is computed once more, on a copy, by a
//! program that keeps what each layer puts out. Keys and values carry a fault to all later tokens, so the first token that has it
//! is sought by halves; where recurrent states are gone the newest token has to do, whose own state has carried the fault into the
//! same layer. This takes some steps of one token, beyond any budget.

use super::runner::{self, Keeping, Reached, Room, Work};
use super::sequence::Sequence;
use crate::backend::cpu::pause::Control;
use crate::circuit::Segments;
use crate::error::{Error, Kind, Result};
use crate::ops::{Batch, Value};
use std::sync::Arc;

impl Sequence {
    /// Adds to a `NumericFault` of this sequence's logits which layer it comes from. Other errors stay as they are.
    pub fn located(&self, e: Error) -> Error {
        if e.kind() != Kind::NumericFault || e.name().is_some() {
            return e;
        }
        // Looking may fail as well, for want of memory; the fault is news without its place.
        match self.first_unfit() {
            Ok(Some(name)) => e.context(format!("the first tensor that is not finite is {name}")).named(name),
            _ => e,
        }
    }

    /// The first of the embedding, the layers' outputs and the last norm's output that is not finite; `logits` where all are.
    fn first_unfit(&self) -> Result<Option<String>> {
        let Some(last) = self.len().checked_sub(1) else { return Ok(None) };
        let mut probe = Probe::new(self)?;
        let (mut first, mut found) = (last, probe.at(last)?);
        let mut sound = if self.engine().is_recurrent() { last } else { 0 };
        while sound < first {
            let middle = sound.midpoint(first);
            match probe.at(middle)? {
                None => sound = middle + 1,
                unfit => (first, found) = (middle, unfit),
            }
        }
        Ok(Some(found.map_or("logits".into(), |index| probe.watched.swap_remove(index).1)))
    }
}

/// A program that computes one token and keeps what is looked at.
struct Probe<'a> {
    sequence: &'a Sequence,
    program: Segments,
    room: Room,
    /// In the order in which they are computed.
    watched: Vec<(Value, String)>,
    batch: Batch,
    row: Vec<f32>,
}

impl<'a> Probe<'a> {
    fn new(sequence: &'a Sequence) -> Result<Probe<'a>> {
        let engine = sequence.engine();
        let parts = engine.prepared.parts(true, false)?;
        let layers = (0..).map(|index| format!("layer.{index}")).take_while(|name| parts.named(name).is_some());
        let names = std::iter::once("embedding".to_string()).chain(layers).chain(["hidden".into()]);
        let watched: Vec<_> = names.filter_map(|name| Some((parts.named(&name)?, name))).collect();
        let values: Vec<_> = watched.iter().map(|(value, _)| *value).collect();
        let program = Segments::new(parts, 1, 1, &values)?;
        let room = Room::of(engine, &program)?;
        let batch = Batch { slots: Arc::clone(engine.states().0.layout().slots()), ..Batch::default() };
        Ok(Probe { sequence, program, room, watched, batch, row: Vec::new() })
    }

    /// Computes the token at `position` again; the index of the first that is not finite.
    fn at(&mut self, position: usize) -> Result<Option<usize>> {
        let engine = self.sequence.engine();
        let tokens = &self.sequence.tokens()[position..=position];
        let mut copy = self.sequence.fork()?;
        // Its state is not that of its tokens, which nobody may take up.
        copy.forget_when_freed();
        copy.drop_to(position);
        copy.reserve(1)?;
        copy.state.begin()?;
        let (source, pages, state) = (copy.source(), &copy.pages, copy.state.pointers(false));
        runner::fill(&mut self.batch, [Work { tokens, position, source, pages, stamp: 0, state }]);
        self.room.run(engine, &mut self.program, &self.batch, &mut Reached::default(), Keeping::Nothing, Control::none())?;
        for (index, (value, _)) in self.watched.iter().enumerate() {
            self.room.read(&self.program, &self.batch, *value, &mut self.row)?;
            if self.row.iter().any(|x| !x.is_finite()) {
                return Ok(Some(index));
            }
        }
        Ok(None)
    }
}
