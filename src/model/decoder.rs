//! A decoder-only language model: embedding, layers, final norm, output matrix.

use super::{Dims, Model, TransformerLayer};
use crate::circuit::Tape;
use crate::layers::{Linear, RmsNorm, Ropes};
use crate::ops::{Embed, LastRows, Softcap, Value, WeightId};
use crate::weights::Declarations;

/// Embedding and output matrix, one weight where they are tied.
#[derive(Clone, Debug)]
pub struct Head {
    /// `[vocab, hidden]`.
    pub embedding: WeightId,
    /// `[vocab, hidden]`.
    pub output: Linear,
}

impl Head {
    /// Tensors `<embedding>` and `<output>.weight`; the first serves as both when `tied`.
    pub fn new(d: &mut Declarations, embedding: &str, output: &str, vocab: usize, hidden: usize, tied: bool) -> Head {
        if tied {
            let weight = d.matrix(embedding, vocab, hidden);
            Head { embedding: weight, output: Linear { weight, bias: None } }
        } else {
            let embedding = d.rows(embedding, vocab, hidden);
            Head { embedding, output: Linear::new(d, output, vocab, hidden, false) }
        }
    }
}

/// What embeddings pass before the first layer.
pub trait Entry: Send + Sync {
    /// Records it; `x` are the embeddings.
    fn record(&self, t: &mut Tape<'_>, x: Value) -> Value;

    /// Records what layers read beside the residual, if anything, from what [`Entry::record`] returned. They find it after the rotary tables.
    fn beside(&self, _t: &mut Tape<'_>, _x: Value) -> Value {
        Value::NONE
    }
}

/// The model.
pub struct Decoder {
    /// Vocabulary, width, layers, context.
    pub dims: Dims,
    /// Embedding and output.
    pub head: Head,
    /// Factor on embeddings.
    pub embed_factor: f32,
    /// What embeddings pass before the first layer, if anything.
    pub entry: Option<Box<dyn Entry>>,
    /// Rotary tables.
    pub ropes: Ropes,
    /// Layers in order.
    pub layers: Vec<Box<dyn TransformerLayer>>,
    /// Before the output matrix.
    pub norm: RmsNorm,
    /// Factor on logits.
    pub logit_factor: f32,
    /// Bound on logits.
    pub logit_softcap: Option<f32>,
}

impl Model for Decoder {
    fn dims(&self) -> &Dims {
        &self.dims
    }

    fn record(&self, t: &mut Tape<'_>) -> Value {
        let mut x = t.op(Embed { table: self.head.embedding, factor: self.embed_factor, y: Value::NONE });
        if let Some(entry) = &self.entry {
            x = entry.record(t, x);
        }
        t.name(x, "embedding");
        let mut ropes = self.ropes.record(t);
        let beside = self.entry.as_ref().map_or(Value::NONE, |entry| entry.beside(t, x));
        if beside.is_some() {
            ropes.push(beside);
        }
        for (index, layer) in self.layers.iter().enumerate() {
            t.set_layer(Some(index));
            x = layer.record(t, x, &ropes);
            t.name(x, format!("layer.{index}"));
        }
        t.set_layer(None);
        if !t.all_logits() {
            x = t.op(LastRows { x, y: Value::NONE });
        }
        let x = self.norm.record(t, x);
        t.name(x, "hidden");
        let logits = self.head.output.record(t, x);
        let mut logits = t.scale(logits, self.logit_factor);
        if let Some(cap) = self.logit_softcap {
            logits = t.op(Softcap { x: logits, cap, y: Value::NONE });
        }
        t.name(logits, "logits");
        logits
    }
}
