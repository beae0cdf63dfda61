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

/// What a layer of one part does.
pub enum Part {
    /// Positions meet.
    Mixer(Box<dyn Mixer>),
    /// Each by itself.
    FeedForward(Box<dyn FeedForward>),
}

/// A layer of one part: `y = x + part(norm(x))` (Nemotron-H).
pub struct OnePart {
    /// Before the part.
    pub norm: RmsNorm,
    /// The part.
    pub part: Part,
}

impl OnePart {
    /// Records the layer.
    pub fn record(&self, t: &mut Tape<'_>, x: Value, ropes: &[Value]) -> Value {
        let h = self.norm.record(t, x);
        let h = match &self.part {
            Part::Mixer(mixer) => mixer.record(t, h, ropes),
            Part::FeedForward(part) => part.record(t, h),
        };
        t.add(x, h)
    }
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

impl<P: Mixer + ?Sized> Mixer for Box<P> {
    fn record(&self, t: &mut Tape<'_>, x: Value, ropes: &[Value]) -> Value {
        (**self).record(t, x, ropes)
    }
}

impl<P: FeedForward + ?Sized> FeedForward for Box<P> {
    fn record(&self, t: &mut Tape<'_>, x: Value) -> Value {
        (**self).record(t, x)
    }
}
