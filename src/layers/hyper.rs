//! Hyper-connections around a sublayer (see [`crate::ops::HyperMix`] for the mathematics and the papers).

use super::{Config, Linear};
use crate::circuit::Tape;
use crate::ensure;
use crate::error::Result;
use crate::ops::{HyperCollapse, HyperExpand, HyperMix, MOST_STREAMS, Norm, NormKind, Value, WeightId};
use crate::weights::Declarations;

/// What all sites of a model share.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Streams {
    /// Residual streams.
    pub count: usize,
    /// Width of a stream.
    pub hidden: usize,
    /// Rounds of Sinkhorn's divisions.
    pub rounds: usize,
    /// `hc_eps`.
    pub eps: f32,
    /// Of the norm over all streams.
    pub norm_eps: f32,
}

impl Streams {
    /// Reads `hc_mult`, `hc_sinkhorn_iters`, `hc_eps`.
    pub fn read(c: &Config<'_>, hidden: usize, norm_eps: f32) -> Result<Streams> {
        let count = c.usize_or("hc_mult", 4)?;
        ensure!(
            count <= MOST_STREAMS,
            Unsupported,
            "config.json: hc_mult is {count}; at most {MOST_STREAMS} residual streams are possible"
        );
        Ok(Streams {
            count,
            hidden,
            rounds: c.usize_or("hc_sinkhorn_iters", 20)?.min(1000),
            eps: c.f64_or("hc_eps", 1e-6)? as f32,
            norm_eps,
        })
    }

    /// Records the start: every stream a copy of `x`.
    pub fn begin(&self, t: &mut Tape<'_>, x: Value) -> Value {
        t.op(HyperExpand { out: x, x: Value::NONE, mix: Value::NONE, streams: self.count, y: Value::NONE })
    }

    /// Records the sum of the streams weighed by `pre`, or their mean.
    pub fn collapse(&self, t: &mut Tape<'_>, x: Value, pre: Value) -> Value {
        t.op(HyperCollapse { x, pre, streams: self.count, y: Value::NONE })
    }

    /// Records the streams after a sublayer that computed `out`.
    pub fn expand(&self, t: &mut Tape<'_>, out: Value, x: Value, mix: Value) -> Value {
        t.op(HyperExpand { out, x, mix, streams: self.count, y: Value::NONE })
    }
}

/// The projection that mixing weights come from.
#[derive(Clone, Debug)]
pub struct HyperSite {
    streams: Streams,
    project: Linear,
    base: WeightId,
    scale: WeightId,
}

impl HyperSite {
    /// Tensors `<name>_fn`, `<name>_base`, `<name>_scale`.
    pub fn new(d: &mut Declarations, name: &str, streams: Streams) -> HyperSite {
        HyperSite::wide(d, name, streams, (2 + streams.count) * streams.count, 3)
    }

    fn wide(d: &mut Declarations, name: &str, streams: Streams, width: usize, scales: usize) -> HyperSite {
        HyperSite {
            streams,
            project: Linear { weight: d.matrix(&format!("{name}_fn"), width, streams.count * streams.hidden), bias: None },
            base: d.vector(&format!("{name}_base"), width, 0.0),
            scale: d.vector(&format!("{name}_scale"), scales, 0.0),
        }
    }

    /// Records the mixing weights of the streams `x`.
    pub fn mix(&self, t: &mut Tape<'_>, x: Value) -> Value {
        let s = &self.streams;
        let h = t.op(Norm { kind: NormKind::Rms, x, weight: None, bias: None, group: 0, eps: s.norm_eps, y: Value::NONE });
        let m = self.project.record(t, h);
        t.op(HyperMix { m, scale: self.scale, base: self.base, streams: s.count, rounds: s.rounds, eps: s.eps, y: Value::NONE })
    }
}

/// The end of a model, where streams become one by weights of their own.
#[derive(Clone, Debug)]
pub struct HyperHead(HyperSite);

impl HyperHead {
    /// Tensors `<name>_fn`, `<name>_base`, `<name>_scale`.
    pub fn new(d: &mut Declarations, name: &str, streams: Streams) -> HyperHead {
        HyperHead(HyperSite::wide(d, name, streams, streams.count, 1))
    }

    /// Records the weighted sum.
    pub fn record(&self, t: &mut Tape<'_>, x: Value) -> Value {
        let pre = self.0.mix(t, x);
        self.0.streams.collapse(t, x, pre)
    }
}
