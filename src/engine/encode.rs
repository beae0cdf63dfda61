//! Sources: the text a translating model reads before it writes. The encoder runs once over the whole of it; what the decoder's
//! layers need of it stays with the sequence.

use super::forward::{runner, until_done};
use super::load::Engine;
use super::runner::Work;
use super::sequence::Sequence;
use crate::cache::LayerPages;
use crate::ensure;
use crate::error::{Error, Kind, Result};
use crate::ops::StatePointers;
use std::sync::Arc;

impl Engine {
    /// Whether the model reads a source before it writes ([`Sequence::encode`]).
    pub fn has_encoder(&self) -> bool {
        self.prepared.model.encoder().is_some()
    }

    /// Fresh pages for a source of `len` tokens; those of the tokens to come stay empty.
    pub(super) fn source_pages(&self, len: usize) -> Result<Vec<LayerPages>> {
        let new = |(pool, of_source): (_, &bool)| {
            let mut pages = LayerPages::new(pool, len)?;
            if *of_source {
                pages.reserve(0, len)?;
            }
            Ok(pages)
        };
        self.pools().iter().zip(&self.prepared.declarations.of_source).map(new).collect()
    }

    /// Checks a source before it is read.
    pub(super) fn check_source(&self, source: &[i32], room: usize) -> Result<()> {
        ensure!(
            self.has_encoder(),
            Unsupported,
            "the model ({}) has no encoder, it only continues its prompt; prefill it instead",
            self.info().model_type
        );
        ensure!(!source.is_empty(), InvalidArgument, "the source has no tokens");
        if source.len() > room {
            let text = format!("a source of {} tokens; at most {room} fit", source.len());
            return Err(Error::new(Kind::ContextFull, text).sizes(source.len() as u64, room as u64));
        }
        self.check_tokens(source)
    }
}

impl Sequence {
    /// Reads a source, for models that translate one: language, text and end as the model was trained with. The sequence must hold no
    /// token; what it is given afterwards continues a translation of this source, and cutting it to 0 begins another one. Marks
    /// end. On error the sequence is as before.
    pub fn encode(&mut self, source: &[i32]) -> Result<()> {
        let engine = Arc::clone(self.engine());
        engine.check_source(source, self.capacity())?;
        ensure!(
            self.is_empty(),
            InvalidState,
            "the sequence holds {} tokens that belong to another source; truncate it to 0 first",
            self.len()
        );
        let fresh = engine.source_pages(source.len())?;
        let work = Work { tokens: source, position: 0, source: source.len(), pages: &fresh, stamp: 0, state: StatePointers::none() };
        let (canceller, count) = (self.canceller(), self.canceller().count());
        let cancelled = || canceller.count() != count;
        let mut runner = runner(&engine, &cancelled)?;
        runner.set([work]);
        until_done(&engine, &cancelled, |control| runner.encode(&engine, control))?;
        drop(runner);
        self.take_source(source.len(), fresh);
        Ok(())
    }
}
