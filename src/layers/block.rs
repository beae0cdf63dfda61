//! A decoder layer of attention and feed-forward, with norms before or after each, or both.

use super::{Attention, GatedMlp, RmsNorm};
use crate::circuit::Tape;
use crate::ops::Value;

/// A feed-forward part: one MLP, or many experts.
pub trait FeedForward: Send + Sync {
    /// Records the part.
    fn record(&self, t: &mut Tape<'_>, x: Value) -> Value;
}

/// The part of a layer in which positions meet: attention, or what stands in its place.
pub trait Mixer: Send + Sync {
    /// Records the part; `ropes` are the tables of this circuit.
    fn record(&self, t: &mut Tape<'_>, x: Value, ropes: &[Value]) -> Value;
}

/// `h = x + post(attention(pre(x)))`, `y = h + post(mlp(pre(h)))`; an absent norm passes its input on.
#[derive(Clone, Debug)]
pub struct Block<A = Attention, M = GatedMlp> {
    /// Before attention.
    pub attention_pre: Option<RmsNorm>,
    /// Attention.
    pub attention: A,
    /// After attention, before the sum.
    pub attention_post: Option<RmsNorm>,
    /// Before the feed-forward.
    pub mlp_pre: Option<RmsNorm>,
    /// Feed-forward.
    pub mlp: M,
    /// After the feed-forward, before the sum.
    pub mlp_post: Option<RmsNorm>,
}

fn norm(t: &mut Tape<'_>, norm: &Option<RmsNorm>, x: Value) -> Value {
    match norm {
        Some(norm) => norm.record(t, x),
        None => x,
    }
}

impl<A: Mixer, M: FeedForward> Block<A, M> {
    /// Records the layer.
    pub fn record(&self, t: &mut Tape<'_>, x: Value, ropes: &[Value]) -> Value {
        let h = norm(t, &self.attention_pre, x);
        let h = self.attention.record(t, h, ropes);
        let h = norm(t, &self.attention_post, h);
        let x = t.add(x, h);
        let h = norm(t, &self.mlp_pre, x);
        let h = self.mlp.record(t, h);
        let h = norm(t, &self.mlp_post, h);
        t.add(x, h)
    }
}
