//! Routing: which experts a row goes to, and with what weight each answer counts.
//!
//! Covers the routers in use: softmax over all experts or over the picked ones, sigmoid scores, a correction that enters the choice
//! but not the weight (DeepSeek V3), a choice limited to the best groups, weights that are made to sum to one, a common factor.
//! The result travels as f32: `top_k` ids, best first, then their weights. f32 holds ids up to 2^24.
#![allow(unsafe_code)] // rows of outputs, disjoint by `Turn::each_row`

use super::{Frame, Gpu, Op, Port, Shape, Shapes, Turn, Value, View, WeightId, row_grain, scratch};
use crate::backend::cuda::launch::{Args, Grid, Kernel};
use crate::error::Result;
use crate::{ensure, op_common};

/// How a router's logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// Softmax over all experts.
    Softmax,
    /// Softmax over the picked experts alone.
    SoftmaxPicked,
    /// Each by itself.
    Sigmoid,
    /// `sqrt(ln(1 + exp(x)))` (DeepSeek V4).
    SqrtSoftplus,
}

/// A choice in two steps: groups of neighbouring experts first, then experts inside the kept groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Groups {
    /// Groups the experts are cut into.
    pub count: usize,
    /// Groups that are kept.
    pub keep: usize,
    /// Whether a group's score is the sum of its best two (DeepSeek V3), or its best (V2).
    pub best_two: bool,
}

/// `ids = top_k(score(logits) + bias)`, `weights = scale * gain[id] * score[id] (/ their sum)`. Ties go to the lowest id.
#[derive(Clone, Debug)]
pub struct Route {
    /// `[rows, choices]`: experts, and after them any that compute nothing (see [`super::Combine`]).
    pub logits: Value,
    /// From logits to scores.
    pub scoring: Scoring,
    /// `[choices]`, added to scores for the choice only.
    pub bias: Option<WeightId>,
    /// Where the choice is limited to groups.
    pub groups: Option<Groups>,
    /// Experts a row goes to.
    pub top_k: usize,
    /// Whether the weights are divided by their sum.
    pub normalize: bool,
    /// Factor on all weights.
    pub scale: f32,
    /// `[choices]`: a factor for each expert's weight (Gemma 4).
    pub gain: Option<WeightId>,
    /// `[rows, 2 * top_k]`.
    pub y: Value,
}

/// Keeps scores that all vanished from being divided by zero.
const TINY: f32 = 1e-20;
/// Most groups.
const MOST_GROUPS: usize = 64;

impl Route {
    fn vectors<'a>(&self, frame: &Frame<'a>) -> [Option<&'a [f32]>; 2] {
        [self.bias, self.gain].map(|id| id.map(|id| frame.weight(id).vector()))
    }

    /// Whether logits are in the order of the choice, so that near scores are told apart before they are rounded.
    fn by_logits(&self) -> bool {
        self.bias.is_none() && self.groups.is_none()
    }

    /// Softmax over all that is then normalised is softmax over the picked.
    fn picked_only(&self) -> bool {
        self.scoring == Scoring::SoftmaxPicked || (self.scoring == Scoring::Softmax && self.normalize && self.by_logits())
    }

    /// One row in f32. `scores` and `choice` have an element for each choice.
    fn row(&self, logits: &[f32], [bias, gain]: [Option<&[f32]>; 2], scores: &mut [f32], choice: &mut [f32], y: &mut [f32]) {
        match self.scoring {
            _ if self.picked_only() => scores.copy_from_slice(logits),
            Scoring::Softmax | Scoring::SoftmaxPicked => {
                let most = largest(logits);
                let mut total = 0.0;
                for (s, x) in scores.iter_mut().zip(logits) {
                    *s = (x - most).exp();
                    total += *s;
                }
                scores.iter_mut().for_each(|s| *s /= total);
            }
            Scoring::Sigmoid => scores.iter_mut().zip(logits).for_each(|(s, x)| *s = 1.0 / (1.0 + (-x).exp())),
            Scoring::SqrtSoftplus => scores.iter_mut().zip(logits).for_each(|(s, x)| *s = softplus(*x).sqrt()),
        }
        choice.copy_from_slice(if self.by_logits() { logits } else { scores });
        if let Some(bias) = bias {
            choice.iter_mut().zip(bias).for_each(|(c, b)| *c += b);
        }
        // What is not a number is never preferred.
        choice.iter_mut().filter(|c| c.is_nan()).for_each(|c| *c = f32::NEG_INFINITY);
        if let Some(groups) = self.groups {
            limit(choice, groups);
        }
        let (ids, weights) = y.split_at_mut(self.top_k);
        for slot in 0..self.top_k {
            let most = largest(choice);
            let found = choice.iter().position(|c| *c == most && most > f32::NEG_INFINITY);
            // Nothing is left to prefer: the lowest that is not taken.
            let id = found.or_else(|| (0..choice.len()).find(|id| !ids[..slot].contains(&(*id as f32)))).unwrap_or(0);
            choice[id] = f32::NEG_INFINITY;
            ids[slot] = id as f32;
            weights[slot] = scores[id];
        }
        if self.picked_only() {
            let most = largest(weights);
            weights.iter_mut().for_each(|w| *w = (*w - most).exp());
        }
        let total = if self.picked_only() || self.normalize { weights.iter().sum::<f32>() + TINY } else { 1.0 };
        for (w, id) in weights.iter_mut().zip(&*ids) {
            *w = *w / total * (self.scale * gain.map_or(1.0, |g| g[*id as usize]));
        }
    }
}

/// Largest element, by lanes so that it vectorises; -inf of nothing.
fn largest(x: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 16];
    let chunks = x.chunks_exact(16);
    let rest = chunks.remainder();
    let keep = |m: &mut f32, v: &f32| *m = if *v > *m { *v } else { *m };
    chunks.for_each(|c| lanes.iter_mut().zip(c).for_each(|(m, v)| keep(m, v)));
    let mut most = f32::NEG_INFINITY;
    lanes.iter().chain(rest).for_each(|v| keep(&mut most, v));
    most
}

fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { x.exp().ln_1p() }
}

/// Leaves the kept groups' choices; all others become -inf.
fn limit(choice: &mut [f32], groups: Groups) {
    let size = choice.len() / groups.count;
    let mut scores = [0.0f32; MOST_GROUPS];
    let scores = &mut scores[..groups.count];
    for (score, group) in scores.iter_mut().zip(choice.chunks(size)) {
        let (mut first, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for &v in group {
            if v > first {
                (first, second) = (v, first);
            } else if v > second {
                second = v;
            }
        }
        *score = if groups.best_two && size > 1 { first + second } else { first };
    }
    for (g, group) in choice.chunks_mut(size).enumerate() {
        let ahead = (0..groups.count).filter(|&o| scores[o] > scores[g] || (scores[o] == scores[g] && o < g)).count();
        if ahead >= groups.keep {
            group.fill(f32::NEG_INFINITY);
        }
    }
}

const ROUTE: Kernel = Kernel { file: "route", name: "route" };
/// Most choices: two floats of each are in shared memory.
const MOST_CHOICES: usize = 5888;

#[derive(Clone, Copy)]
#[repr(C)]
struct RouteArgs {
    logits: View,
    y: View,
    bias: u64,
    gain: u64,
    top_k: u32,
    scoring: u32,
    by_logits: u32,
    picked_only: u32,
    groups: u32,
    keep: u32,
    best_two: u32,
    normalize: u32,
    scale: f32,
    spare: u32,
}

// SAFETY: the struct of kernels/route.cu.
unsafe impl Args for RouteArgs {}

impl Op for Route {
    op_common!("route");

    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::In, &mut self.logits), (Port::Out, &mut self.y)]
    }

    fn check(&self, shapes: &dyn Shapes) -> Result<Vec<Shape>> {
        let logits = shapes.value(self.logits);
        let choices = logits.width;
        ensure!(self.top_k > 0 && self.top_k <= choices, Mismatch, "{} experts are picked of {choices}", self.top_k);
        ensure!(choices < 1 << 24, Unsupported, "{choices} experts; at most 16777215 have a number of their own");
        for id in [self.bias, self.gain].into_iter().flatten() {
            ensure!(shapes.weight(id).1 == choices, Internal, "route: a vector of {} for {choices} experts", shapes.weight(id).1);
        }
        if let Some(Groups { count, keep, .. }) = self.groups {
            ensure!(
                (1..=MOST_GROUPS).contains(&count) && choices.is_multiple_of(count) && (1..=count).contains(&keep),
                Unsupported,
                "{choices} experts in {count} groups of which {keep} are kept; at most {MOST_GROUPS} equal groups are possible"
            );
            ensure!(
                self.top_k <= keep * (choices / count),
                Mismatch,
                "{} experts are picked of {keep} groups of {}",
                self.top_k,
                choices / count
            );
        }
        Ok(vec![Shape::f32(logits.rows, 2 * self.top_k)])
    }

    fn solo(&self, frame: &Frame<'_>) -> bool {
        frame.rows(self.y) <= row_grain(frame.slot(self.logits).width * self.top_k)
    }

    fn scalar(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        let [bias, gain] = self.vectors(frame);
        for r in 0..y.rows() {
            let logits: Vec<f64> = frame.row(self.logits, r).iter().map(|v| f64::from(*v)).collect();
            let softmax = |over: &[usize]| -> Vec<f64> {
                let most = over.iter().map(|&i| logits[i]).fold(f64::NEG_INFINITY, f64::max);
                let total: f64 = over.iter().map(|&i| (logits[i] - most).exp()).sum();
                (0..logits.len()).map(|i| (logits[i] - most).exp() / total).collect()
            };
            let everyone: Vec<usize> = (0..logits.len()).collect();
            let scores: Vec<f64> = match self.scoring {
                Scoring::Softmax => softmax(&everyone),
                Scoring::SoftmaxPicked => logits.clone(),
                Scoring::Sigmoid => logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect(),
                Scoring::SqrtSoftplus => logits.iter().map(|x| (x.max(0.0) + (-x.abs()).exp().ln_1p()).sqrt()).collect(),
            };
            let choice: Vec<f64> = (0..logits.len()).map(|i| scores[i] + bias.map_or(0.0, |b| f64::from(b[i]))).collect();
            let mut order = everyone;
            order.sort_by(|&a, &b| choice[b].total_cmp(&choice[a]).then(a.cmp(&b)));
            if let Some(groups) = self.groups {
                let size = logits.len() / groups.count;
                let value = |g: usize| -> f64 {
                    let members = order.iter().filter(|&&i| i / size == g);
                    members.take(if groups.best_two { 2 } else { 1 }).map(|&i| choice[i]).sum()
                };
                let mut kept: Vec<usize> = (0..groups.count).collect();
                kept.sort_by(|&a, &b| value(b).total_cmp(&value(a)).then(a.cmp(&b)));
                kept.truncate(groups.keep);
                order.retain(|i| kept.contains(&(i / size)));
            }
            order.truncate(self.top_k);
            let picked = if self.scoring == Scoring::SoftmaxPicked { softmax(&order) } else { scores };
            let total: f64 = if self.normalize { order.iter().map(|&i| picked[i]).sum() } else { 1.0 };
            // SAFETY: alone.
            let y = unsafe { y.row(r) };
            for (slot, &id) in order.iter().enumerate() {
                y[slot] = id as f32;
                y[self.top_k + slot] = (picked[id] / total * f64::from(self.scale) * gain.map_or(1.0, |g| f64::from(g[id]))) as f32;
            }
        }
    }

    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let choices = gpu.width(self.logits);
        ensure!(choices <= MOST_CHOICES, Unsupported, "route: {choices} experts; a GPU chooses among at most {MOST_CHOICES}");
        let scoring = match self.scoring {
            _ if self.picked_only() => 0,
            Scoring::Softmax | Scoring::SoftmaxPicked => 1,
            Scoring::Sigmoid => 2,
            Scoring::SqrtSoftplus => 3,
        };
        let args = RouteArgs {
            logits: gpu.view(self.logits),
            y: gpu.view(self.y),
            bias: gpu.vector(self.bias),
            gain: gpu.vector(self.gain),
            top_k: self.top_k as u32,
            scoring,
            by_logits: u32::from(self.by_logits()),
            picked_only: u32::from(self.picked_only()),
            groups: self.groups.map_or(0, |g| g.count as u32),
            keep: self.groups.map_or(0, |g| g.keep as u32),
            best_two: u32::from(self.groups.is_some_and(|g| g.best_two)),
            normalize: u32::from(self.normalize),
            scale: self.scale,
            spare: 0,
        };
        gpu.launch(ROUTE, Grid::new([gpu.rows(self.y), 1, 1], 32).shared(8 * choices), &args)
    }

    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        let y = frame.output(self.y);
        let vectors = self.vectors(frame);
        let choices = frame.slot(self.logits).width;
        scratch::with(|scratch| {
            let (scores, choice) = scratch::sized(&mut scratch.a, 2 * choices).split_at_mut(choices);
            turn.each_row(y.rows(), choices * self.top_k, |r| {
                // SAFETY: `each_row` gives a row to one worker.
                self.row(frame.row(self.logits, r), vectors, scores, choice, unsafe { y.row(r) });
            });
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pick(op: &Route, logits: &[f32], bias: Option<&[f32]>) -> Vec<f32> {
        let n = logits.len();
        let mut y = vec![0.0; 2 * op.top_k];
        op.row(logits, [bias, None], &mut vec![0.0; n], &mut vec![0.0; n], &mut y);
        y
    }

    fn op(scoring: Scoring, top_k: usize) -> Route {
        let (logits, y) = (Value::NONE, Value::NONE);
        Route { logits, scoring, bias: None, groups: None, top_k, normalize: true, scale: 1.0, gain: None, y }
    }

    #[test]
    fn ties_go_to_the_lowest_id() {
        assert_eq!(pick(&op(Scoring::Softmax, 3), &[1.0, 2.0, 2.0, 1.0], None)[..3], [1.0, 2.0, 0.0]);
    }

    #[test]
    fn a_correction_moves_the_choice_and_not_the_weight() {
        let op = Route { bias: Some(WeightId(0)), normalize: false, ..op(Scoring::Sigmoid, 1) };
        let y = pick(&op, &[0.0, 3.0], Some(&[1.0, 0.0]));
        assert_eq!(y, [0.0, 0.5]);
    }

    #[test]
    fn groups_are_judged_by_their_best_two() {
        // One brilliant expert beside a poor one loses to two good ones.
        let groups = Some(Groups { count: 2, keep: 1, best_two: true });
        let y = pick(&Route { groups, ..op(Scoring::Sigmoid, 2) }, &[9.0, -9.0, 1.0, 1.0], None);
        assert_eq!(y[..2], [2.0, 3.0]);
        let groups = Some(Groups { count: 2, keep: 1, best_two: false });
        assert_eq!(pick(&Route { groups, ..op(Scoring::Sigmoid, 2) }, &[9.0, -9.0, 1.0, 1.0], None)[..2], [0.0, 1.0]);
    }

    #[test]
    fn what_is_not_a_number_still_gives_distinct_experts() {
        let y = pick(&op(Scoring::Softmax, 3), &[f32::NAN; 4], None);
        assert_eq!(y[..3], [0.0, 1.0, 2.0]);
        assert!(y[3..].iter().all(|w| w.is_nan()));
    }
}
