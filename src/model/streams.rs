//! A decoder whose residual is several streams (hyper-connections), and whose layers hand on more than the residual: what one
//! layer's indexer selected serves the layers after it.

use super::{Dims, Head, Model};
use crate::circuit::Tape;
use crate::layers::{GatedSite, HyperHead, RmsNorm, Ropes, Streams};
use crate::ops::{Embed, GroupRopeTable, LastRows, RecordWrite, Records, TokenIds, Value};

/// What a layer receives and hands on.
#[derive(Clone, Copy, Debug)]
pub struct Carry {
    /// `[rows, streams * hidden]`.
    pub x: Value,
    /// Mixing weights of the sublayer before, where sublayers are collapsed one late.
    pub mix: Value,
    /// What the last indexer selected.
    pub selection: Value,
    /// Blocks that indexers choose among.
    pub blocks: Value,
}

/// A layer.
pub trait StreamLayer: Send + Sync {
    /// Records the layer. `ropes` are the circuit's tables: plain ones first, then those of groups.
    fn record(&self, t: &mut Tape<'_>, carry: &mut Carry, ropes: &[Value]);
}

/// How streams become one row after the last layer.
pub enum StreamEnd {
    /// Their mean.
    Mean,
    /// By weights of their own.
    Weighted(HyperHead),
    /// By the last sublayer's mixing weights.
    Carried,
    /// Normed and gated; no norm follows.
    Gated(GatedSite),
}

/// The model.
pub struct StreamDecoder {
    /// Vocabulary, width, layers, context.
    pub dims: Dims,
    /// Embedding and output.
    pub head: Head,
    /// The streams.
    pub streams: Streams,
    /// Rotary tables.
    pub ropes: Ropes,
    /// Tables at the first positions of groups: index of the plain table, positions of a group.
    pub group_ropes: Vec<(usize, usize)>,
    /// Tokens so far, where layers hash them.
    pub history: Option<Records>,
    /// Layers in order.
    pub layers: Vec<Box<dyn StreamLayer>>,
    /// The end.
    pub end: StreamEnd,
    /// Before the output matrix, unless the end norms.
    pub norm: Option<RmsNorm>,
}

impl Model for StreamDecoder {
    fn dims(&self) -> &Dims {
        &self.dims
    }

    fn record(&self, t: &mut Tape<'_>) -> Value {
        if let Some(records) = self.history {
            let x = t.op(TokenIds { y: Value::NONE });
            t.record(RecordWrite { x, records });
        }
        let x = t.op(Embed { table: self.head.embedding, factor: 1.0, y: Value::NONE });
        t.name(x, "embedding");
        let mut ropes = self.ropes.record(t);
        for &(index, every) in &self.group_ropes {
            let (frequencies, factor) = self.ropes.parameters(index);
            ropes.push(t.op(GroupRopeTable { frequencies, factor, every, y: Value::NONE }));
        }
        let x = self.streams.begin(t, x);
        let mut carry = Carry { x, mix: Value::NONE, selection: Value::NONE, blocks: Value::NONE };
        for (index, layer) in self.layers.iter().enumerate() {
            t.set_layer(Some(index));
            layer.record(t, &mut carry, &ropes);
            t.name(carry.x, format!("layer.{index}"));
        }
        t.set_layer(None);
        let last = |t: &mut Tape<'_>, x: Value| if t.all_logits() { x } else { t.op(LastRows { x, y: Value::NONE }) };
        let x = last(t, carry.x);
        let x = match &self.end {
            StreamEnd::Mean => self.streams.collapse(t, x, Value::NONE),
            StreamEnd::Weighted(head) => head.record(t, x),
            StreamEnd::Carried => {
                let mix = last(t, carry.mix);
                self.streams.collapse(t, x, mix)
            }
            StreamEnd::Gated(site) => site.read(t, x).0,
        };
        let x = match &self.norm {
            Some(norm) => norm.record(t, x),
            None => x,
        };
        t.name(x, "hidden");
        let logits = self.head.output.record(t, x);
        t.name(logits, "logits");
        logits
    }
}
