//! Where numbers went wrong: the first tensor of a sequence's last step that is not finite.
//!
//! Nothing is watched while all is well. Once a row of logits turns out to be unfit, the sequence's last token is computed once
//! more, on a copy, by a program that keeps what each layer puts out; that takes the time of a step, beyond any budget. Where earlier tokens brought the fault about, their keys and
//! values or recurrent state carry it into the same layer.

use super::runner::{self, Work};
use super::sequence::Sequence;
use crate::backend::cpu::pause::Control;
use crate::circuit::{self, Workspace};
use crate::error::{Error, Kind, Result};
use crate::ops::Batch;
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
        let Some(&last) = self.tokens().last() else { return Ok(None) };
        let engine = self.engine();
        let circuit = engine.prepared.circuit(true, false)?;
        let layers = (0..).map(|index| format!("layer.{index}")).take_while(|name| circuit.named(name).is_some());
        let names = std::iter::once("embedding".to_string()).chain(layers).chain(["hidden".into()]);
        let watched: Vec<_> = names.filter_map(|name| Some((circuit.named(&name)?, name))).collect();
        let values: Vec<_> = watched.iter().map(|(value, _)| *value).collect();
        let program = circuit::Program::new(circuit, 1, 1, &values)?;
        let mut workspace = Workspace::new(program.workspace_bytes())?;

        let mut probe = self.fork()?;
        // Its state is not that of its tokens, which nobody may take up.
        probe.forget_when_freed();
        probe.drop_to(self.len() - 1);
        probe.reserve(1)?;
        probe.state.begin()?;
        let mut batch = Batch { slots: Arc::clone(engine.states().0.layout().slots()), ..Batch::default() };
        let (position, source, pages, state) = (probe.len(), probe.source(), probe.kv(), probe.state.pointers(false));
        runner::fill(&mut batch, &[Work { tokens: &[last], position, source, pages, state }]);
        program.run(engine.pool(), &mut workspace, &batch, engine.weights(), &mut circuit::Progress::default(), Control::none())?;
        let mut row = Vec::new();
        for (value, name) in watched {
            program.read(&mut workspace, &batch, value, &mut row)?;
            if row.iter().any(|x| !x.is_finite()) {
                return Ok(Some(name));
            }
        }
        Ok(Some("logits".into()))
    }
}
