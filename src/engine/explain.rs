//! Looking inside: a program as text, and any named tensor of a run.

use super::load::Engine;
use super::prepare::{self, Prepared, Programs};
use super::runner::{self, Keeping, Reached, Room, Shape, Work};
use super::sequence::{Sequence, SequenceOptions};
use crate::backend::cpu::pause::Control;
use crate::circuit::{self, Circuit};
use crate::ensure;
use crate::error::Result;
use crate::ops::{Batch, StatePointers, Value};
use crate::options::LoadOptions;
use std::path::Path;
use std::sync::Arc;

/// The program a checkpoint becomes, one operation a line. Reads headers only.
pub fn explain(path: &Path, options: &LoadOptions) -> Result<String> {
    let mut prepared = Prepared::new(path, options)?;
    let mut programs = Programs::default();
    while prepared.device.is_some() && !programs.step(&mut prepared)? {}
    let parts = prepared.parts(false, false)?;
    let text = |part: &Circuit| circuit::explain(part, &prepared.declarations);
    let mut out = match (&parts.host, &parts.device) {
        (Some(host), Some(device)) => format!("on the processor:\n{}on the device:\n{}", text(host), text(device)),
        (one, other) => one.as_ref().or(other.as_ref()).map_or_else(String::new, text),
    };
    for (index, aside) in parts.asides.iter().enumerate() {
        out.push_str(&format!("aside {index}, on the processor:\n{}", text(aside)));
    }
    Ok(out)
}

/// A named tensor: one row for each token.
#[derive(Clone, Debug, PartialEq)]
pub struct Captured {
    /// Elements in a row.
    pub width: usize,
    /// Rows, one after another.
    pub values: Vec<f32>,
}

/// Which bodies a captured run uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bodies {
    /// Fused circuit, fast bodies, on the pool.
    Fast,
    /// The circuit as recorded, fast bodies, on the pool: what fusion is tested against.
    Unfused,
    /// The circuit as recorded, every operation by its definition.
    Definition,
}

impl Engine {
    /// Runs `tokens` from an empty state, `slice` rows at a time, and returns the named tensors (`logits`, `layer.3`) with a row for
    /// every token. For tests and for people who look for where a number comes from.
    pub fn capture(self: &Arc<Self>, tokens: &[i32], slice: usize, names: &[&str], bodies: Bodies) -> Result<Vec<Captured>> {
        ensure!(!self.has_encoder(), InvalidState, "the model translates a source; it is captured by capture_translation");
        self.capture_translation(&[], tokens, slice, names, bodies)
    }

    /// As [`Engine::capture`], after the model has read `source`; none for a model that reads none.
    pub fn capture_translation(
        self: &Arc<Self>,
        source: &[i32],
        tokens: &[i32],
        slice: usize,
        names: &[&str],
        bodies: Bodies,
    ) -> Result<Vec<Captured>> {
        ensure!(
            (1..=self.shapes().most_rows()).contains(&slice),
            InvalidArgument,
            "slices of {slice} rows; 1 to {} run",
            self.shapes().most_rows()
        );
        self.check_bodies(bodies)?;
        let parts = self.prepared.parts(true, bodies != Bodies::Fast)?;
        let (mut program, values) = prepare::compiled(parts, Shape { rows: slice, sequences: slice }, names)?;
        let mut room = Room::of(self, &program)?;
        let mut sequence = Sequence::new(self, &SequenceOptions::default())?;
        // Other bodies may give other bits, which no sequence may take up.
        sequence.forget_when_freed();
        if self.has_encoder() || !source.is_empty() {
            sequence.encode(source)?;
        }
        let mut out: Vec<Captured> = values.iter().map(|v| Captured { width: program.slot(*v).width, values: Vec::new() }).collect();
        let mut batch = Batch { slots: Arc::clone(self.states().0.layout().slots()), ..Batch::default() };
        let mut rows = Vec::new();
        for piece in tokens.chunks(slice) {
            sequence.reserve(piece.len())?;
            sequence.state.begin()?;
            let (position, pages, state) = (sequence.len(), &sequence.pages, sequence.state.pointers(false));
            runner::fill(&mut batch, [Work { tokens: piece, position, source: sequence.source(), pages, stamp: 0, state }]);
            if bodies != Bodies::Definition || !room.run_scalar(self, &program, &batch)? {
                room.run(self, &mut program, &batch, &mut Reached::default(), Keeping::Nothing, Control::none())?;
            }
            sequence.state.commit(Some(position));
            sequence.tokens.extend_from_slice(piece);
            for (value, captured) in values.iter().zip(&mut out) {
                room.read(&program, &batch, *value, &mut rows)?;
                captured.values.extend_from_slice(&rows);
            }
        }
        Ok(out)
    }

    fn check_bodies(&self, bodies: Bodies) -> Result<()> {
        let host = self.device.is_none() || bodies != Bodies::Definition;
        crate::ensure!(host, Unsupported, "definitions run on the processor alone; load the model for device 0");
        Ok(())
    }

    /// Reads a source and returns the encoder's own named tensors (`encoded`, `layer.1`), as [`Engine::capture`] does for tokens.
    pub fn capture_source(self: &Arc<Self>, source: &[i32], names: &[&str], bodies: Bodies) -> Result<Vec<Captured>> {
        self.check_bodies(bodies)?;
        self.check_source(source, self.info().context)?;
        let Some(parts) = self.prepared.encoder_parts(bodies != Bodies::Fast)? else { return Ok(Vec::new()) };
        let (mut program, values) = prepare::compiled(parts, Shape { rows: source.len(), sequences: 1 }, names)?;
        let mut room = Room::of(self, &program)?;
        let pages = self.source_pages(source.len())?;
        let mut batch = Batch::default();
        let work = Work { tokens: source, position: 0, source: source.len(), pages: &pages, stamp: 0, state: StatePointers::none() };
        runner::fill(&mut batch, [work]);
        if bodies != Bodies::Definition || !room.run_scalar(self, &program, &batch)? {
            room.run(self, &mut program, &batch, &mut Reached::default(), Keeping::Nothing, Control::none())?;
        }
        let captured = |value: &Value| {
            let mut rows = Vec::new();
            room.read(&program, &batch, *value, &mut rows)?;
            Ok(Captured { width: program.slot(*value).width, values: rows })
        };
        values.iter().map(captured).collect()
    }
}
