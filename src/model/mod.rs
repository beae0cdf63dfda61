//! Models: what a family builds from a config, small enough to hold in the head: record, state needs, facts.

mod decoder;
mod streams;
mod translator;

pub use decoder::{Decoder, Entry, Head};
pub use streams::{Carry, StreamDecoder, StreamEnd, StreamLayer};
pub use translator::{DecoderLayer, EncoderLayer, Translator};

use crate::circuit::Tape;
use crate::error::Result;
use crate::layers::{Block, Config, FeedForward, Mixer, OnePart};
use crate::ops::{KvType, Value};
use crate::tensor::DType;
use crate::weights::{Checkpoint, Declarations};

/// Numbers every host asks for.
#[derive(Clone, Debug, PartialEq)]
pub struct Dims {
    /// Tokens the embedding knows.
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Decoder layers.
    pub layers: usize,
    /// Longest sequence the model was made for.
    pub context: usize,
}

/// A model: records its circuit.
pub trait Model: Send + Sync {
    /// Vocabulary, width, layers, context.
    fn dims(&self) -> &Dims;

    /// Records one step and returns the logits: of each sequence's last row, or of every row (`Tape::all_logits`).
    fn record(&self, t: &mut Tape<'_>) -> Value;

    /// The encoder, of a model that reads a source before it writes.
    fn encoder(&self) -> Option<&dyn Encoder> {
        None
    }
}

/// The ability to read a source text whole, once, before the first token is written.
pub trait Encoder: Send + Sync {
    /// Records the pass over a source and returns the encoder's output; what the decoder's layers need of it goes to pages declared
    /// by [`Declarations::source_kv`].
    fn record(&self, t: &mut Tape<'_>) -> Value;
}

/// A layer of a decoder.
pub trait TransformerLayer: Send + Sync {
    /// Records the layer; `ropes` are the tables of this circuit.
    fn record(&self, t: &mut Tape<'_>, x: Value, ropes: &[Value]) -> Value;
}

impl<A: Mixer, M: FeedForward> TransformerLayer for Block<A, M> {
    fn record(&self, t: &mut Tape<'_>, x: Value, ropes: &[Value]) -> Value {
        Block::record(self, t, x, ropes)
    }
}

impl TransformerLayer for OnePart {
    fn record(&self, t: &mut Tape<'_>, x: Value, ropes: &[Value]) -> Value {
        OnePart::record(self, t, x, ropes)
    }
}

/// What a family is told besides its config.
#[derive(Clone, Copy)]
pub struct Build<'a> {
    /// Longest sequence to be run.
    pub context: usize,
    /// Element type of cached keys and values.
    pub kv_type: KvType,
    /// For the few layouts that only the tensors tell apart; without tensors where weights are made up.
    pub checkpoint: &'a Checkpoint,
}

impl Build<'_> {
    /// The shape of a stored tensor, in whatever form the checkpoint holds it.
    pub fn shape(&self, tensor: &str) -> Option<Vec<usize>> {
        self.checkpoint.stored(tensor).ok().flatten().map(|stored| stored.shape)
    }

    /// The whole numbers of a small stored tensor of 64-bit integers.
    pub fn integers(&self, tensor: &str) -> Option<Vec<i64>> {
        let view = self.checkpoint.tensor(tensor).filter(|view| view.dtype == DType::I64)?;
        Some(view.data.as_chunks::<8>().0.iter().map(|b| i64::from_le_bytes(*b)).collect())
    }
}

/// Turns a config into a model, declaring its weights: one for each family.
pub type ModelWeightLoader = fn(&Config<'_>, &Build<'_>, &mut Declarations) -> Result<Box<dyn Model>>;
