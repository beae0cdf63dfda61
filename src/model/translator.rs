//! An encoder and a decoder (Vaswani et al., 2017) with norms before each part: the encoder reads the source once, the decoder writes
//! token by token, and each of its layers looks at the whole source.

use super::{Dims, Encoder, Head, Model};
use crate::circuit::Tape;
use crate::layers::{Attention, CrossAttention, EncoderAttention, GatedMlp, LayerNorm};
use crate::ops::{Embed, LastRows, Sinusoid, Value, WeightId};

/// A layer of the encoder.
pub struct EncoderLayer {
    /// Before attention.
    pub attention_norm: LayerNorm,
    /// Over the whole source.
    pub attention: EncoderAttention,
    /// Before the feed-forward.
    pub mlp_norm: LayerNorm,
    /// Feed-forward.
    pub mlp: GatedMlp,
}

/// A layer of the decoder.
pub struct DecoderLayer {
    /// Before attention.
    pub attention_norm: LayerNorm,
    /// Over the tokens so far.
    pub attention: Attention,
    /// Before the look at the source.
    pub cross_norm: LayerNorm,
    /// Over the encoder's output.
    pub cross: CrossAttention,
    /// Before the feed-forward.
    pub mlp_norm: LayerNorm,
    /// Feed-forward.
    pub mlp: GatedMlp,
}

/// The model.
pub struct Translator {
    /// Vocabulary, width, decoder layers, context.
    pub dims: Dims,
    /// Embedding of both sides, and output.
    pub head: Head,
    /// Factor on embeddings.
    pub embed_factor: f32,
    /// Frequencies of positions.
    pub frequencies: WeightId,
    /// Number of the first position.
    pub first_position: usize,
    /// The encoder.
    pub encoder: Vec<EncoderLayer>,
    /// At the encoder's end.
    pub encoder_norm: LayerNorm,
    /// The decoder.
    pub decoder: Vec<DecoderLayer>,
    /// Before the output matrix.
    pub decoder_norm: LayerNorm,
}

impl Translator {
    fn embed(&self, t: &mut Tape<'_>) -> Value {
        let x = t.op(Embed { table: self.head.embedding, factor: self.embed_factor, y: Value::NONE });
        let x = t.op(Sinusoid { x, frequencies: self.frequencies, offset: self.first_position, y: Value::NONE });
        t.name(x, "embedding");
        x
    }
}

impl Encoder for Translator {
    fn record(&self, t: &mut Tape<'_>) -> Value {
        let mut x = self.embed(t);
        for (index, layer) in self.encoder.iter().enumerate() {
            t.set_layer(Some(index));
            let h = layer.attention_norm.record(t, x);
            let h = layer.attention.record(t, h);
            x = t.add(x, h);
            let h = layer.mlp_norm.record(t, x);
            let h = layer.mlp.record(t, h);
            x = t.add(x, h);
            t.name(x, format!("layer.{index}"));
        }
        t.set_layer(None);
        let x = self.encoder_norm.record(t, x);
        t.name(x, "encoded");
        for (index, layer) in self.decoder.iter().enumerate() {
            t.set_layer(Some(index));
            layer.cross.remember(t, x);
        }
        t.set_layer(None);
        x
    }
}

impl Model for Translator {
    fn dims(&self) -> &Dims {
        &self.dims
    }

    fn record(&self, t: &mut Tape<'_>) -> Value {
        let mut x = self.embed(t);
        for (index, layer) in self.decoder.iter().enumerate() {
            t.set_layer(Some(index));
            let h = layer.attention_norm.record(t, x);
            let h = layer.attention.record(t, h, &[]);
            x = t.add(x, h);
            let h = layer.cross_norm.record(t, x);
            let h = layer.cross.record(t, h);
            x = t.add(x, h);
            let h = layer.mlp_norm.record(t, x);
            let h = layer.mlp.record(t, h);
            x = t.add(x, h);
            t.name(x, format!("layer.{index}"));
        }
        t.set_layer(None);
        if !t.all_logits() {
            x = t.op(LastRows { x, y: Value::NONE });
        }
        let x = self.decoder_norm.record(t, x);
        t.name(x, "hidden");
        let logits = self.head.output.record(t, x);
        t.name(logits, "logits");
        logits
    }

    fn encoder(&self) -> Option<&dyn Encoder> {
        Some(self)
    }
}
