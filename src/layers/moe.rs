//! Mixture of experts (Shazeer et al., 2017): a router, the experts it picks, and the shared expert beside them.

use super::{Experts, FeedForward, GatedMlp, Linear, RmsNorm};
use crate::circuit::Tape;
use crate::ops::{Combine, Groups, HashRoute, Route, Scoring, Softcap, Value, WeightId};

/// How rows find their experts.
#[derive(Clone, Debug)]
pub struct Router {
    /// `[choices, hidden]`.
    pub logits: Linear,
    /// Bound on the logits.
    pub softcap: Option<f32>,
    /// From logits to scores.
    pub scoring: Scoring,
    /// `[choices]`, added to scores for the choice only.
    pub correction: Option<WeightId>,
    /// `[vocabulary, top_k]`: the experts of each token, where they are not chosen by scores.
    pub table: Option<WeightId>,
    /// Where the choice is limited to groups.
    pub groups: Option<Groups>,
    /// Experts a row meets.
    pub top_k: usize,
    /// Whether weights are made to sum to one.
    pub normalize: bool,
    /// Factor on the weights.
    pub scale: f32,
    /// `[choices]`: a factor for each expert's weight (Gemma 4).
    pub gain: Option<WeightId>,
}

impl Router {
    /// Softmax over all experts, weights made to sum to one.
    pub fn softmax(logits: Linear, top_k: usize) -> Router {
        Router {
            logits,
            softcap: None,
            scoring: Scoring::Softmax,
            correction: None,
            table: None,
            groups: None,
            top_k,
            normalize: true,
            scale: 1.0,
            gain: None,
        }
    }

    /// Sigmoid scores with a correction of the choice, weights made to sum to one.
    pub fn sigmoid(logits: Linear, correction: Option<WeightId>, top_k: usize, scale: f32) -> Router {
        Router { scoring: Scoring::Sigmoid, correction, scale, ..Router::softmax(logits, top_k) }
    }

    /// Records the route, `[rows, 2 * top_k]`.
    pub fn record(&self, t: &mut Tape<'_>, x: Value) -> Value {
        let mut logits = self.logits.record(t, x);
        if let Some(cap) = self.softcap {
            logits = t.op(Softcap { x: logits, cap, y: Value::NONE });
        }
        if let Some(table) = self.table {
            return t.op(HashRoute { logits, table, normalize: self.normalize, scale: self.scale, y: Value::NONE });
        }
        t.op(Route {
            logits,
            scoring: self.scoring,
            bias: self.correction,
            groups: self.groups,
            top_k: self.top_k,
            normalize: self.normalize,
            scale: self.scale,
            gain: self.gain,
            y: Value::NONE,
        })
    }
}

/// A narrower space the experts work in (Nemotron 3, Kimi K3). Router and shared expert see the full width.
#[derive(Clone, Debug)]
pub struct Latent {
    /// `[latent, hidden]`.
    pub down: Linear,
    /// On the experts' sum.
    pub norm: Option<RmsNorm>,
    /// `[hidden, latent]`.
    pub up: Linear,
}

/// A feed-forward of routed experts.
#[derive(Clone, Debug)]
pub struct Moe {
    /// Picks the experts.
    pub router: Router,
    /// The experts.
    pub experts: Experts,
    /// An expert every row meets.
    pub shared: Option<GatedMlp>,
    /// `[1, hidden]`: how much of it counts, before a sigmoid (Qwen).
    pub shared_gate: Option<Linear>,
    /// Whether choices beyond the experts hand on their input (LongCat).
    pub identity: bool,
    /// Where the experts work in a latent space.
    pub latent: Option<Latent>,
}

impl Moe {
    /// Routed experts alone.
    pub fn new(router: Router, experts: Experts) -> Moe {
        Moe { router, experts, shared: None, shared_gate: None, identity: false, latent: None }
    }
}

impl FeedForward for Moe {
    fn record(&self, t: &mut Tape<'_>, x: Value) -> Value {
        let route = self.router.record(t, x);
        let experts = self.experts.count();
        if let Some(latent) = &self.latent {
            let inside = latent.down.record(t, x);
            let answers = self.experts.record(t, inside, route);
            let none = Value::NONE;
            let mut sum = t.op(Combine { x: answers, route, shared: none, gate: none, identity: none, experts, y: none });
            if let Some(norm) = &latent.norm {
                sum = norm.record(t, sum);
            }
            let y = latent.up.record(t, sum);
            return match &self.shared {
                Some(shared) => {
                    let shared = shared.record(t, x);
                    t.add(y, shared)
                }
                None => y,
            };
        }
        let answers = self.experts.record(t, x, route);
        let shared = self.shared.as_ref().map_or(Value::NONE, |s| s.record(t, x));
        let gate = self.shared_gate.as_ref().map_or(Value::NONE, |g| g.record(t, x));
        let identity = if self.identity { x } else { Value::NONE };
        t.op(Combine { x: answers, route, shared, gate, identity, experts, y: Value::NONE })
    }
}
