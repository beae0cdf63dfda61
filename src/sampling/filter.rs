//! Stages that scale the list or make it shorter: greedy, temperature, top-k, top-p, min-p.
//!
//! None sorts more than it keeps: a selection brings the best to the front, and only those are put in order.

use super::candidates::{Candidates, Order, descending};

/// Keeps only the highest logit; ties go to the lowest id.
pub(super) fn best(list: &mut Candidates) {
    if let Some(best) = list.items.iter().copied().min_by(descending) {
        list.items.clear();
        list.items.push(best);
        list.order = Order::Descending;
    }
}

/// Divides every logit by `t`, which is at least `COLDEST`.
pub(super) fn temperature(list: &mut Candidates, t: f32) {
    if t != 1.0 {
        for c in &mut list.items {
            // A finite logit stays finite: a row of large negative logits must not rule out every token.
            if c.logit != f32::NEG_INFINITY {
                c.logit = (c.logit / t).clamp(f32::MIN, f32::MAX);
            }
        }
        // Two logits may have been rounded onto each other, and then their ids decide.
        list.disturbed();
    }
}

/// Keeps the `k` highest logits, in descending order.
pub(super) fn top_k(list: &mut Candidates, k: usize) {
    if k == 0 || k >= list.items.len() {
        return;
    }
    if list.order != Order::Descending {
        list.items.select_nth_unstable_by(k - 1, descending);
        list.items.truncate(k);
        list.items.sort_unstable_by(descending);
        list.order = Order::Descending;
    }
    list.items.truncate(k);
}

/// Keeps the likeliest tokens until their probabilities reach `p`, in descending order; at least one stays.
pub(super) fn top_p(list: &mut Candidates, p: f32) {
    let max = list.maximum();
    if p >= 1.0 || max == f32::NEG_INFINITY {
        return;
    }
    let weight = |logit: f32| f64::from((logit - max).exp());
    let total: f64 = list.items.iter().map(|c| weight(c.logit)).sum();
    let target = total * f64::from(p);
    if list.order == Order::Descending {
        let mut reached = 0.0;
        let kept = list.items.iter().position(|c| {
            reached += weight(c.logit);
            reached >= target
        });
        list.items.truncate(kept.map_or(list.items.len(), |last| last + 1));
    } else {
        list.keep_until(target, descending, |c| weight(c.logit));
    }
    list.order = Order::Descending;
}

/// Keeps tokens at least `p` times as likely as the likeliest. The order stays.
pub(super) fn min_p(list: &mut Candidates, p: f32) {
    let max = list.maximum();
    if p <= 0.0 || max == f32::NEG_INFINITY {
        return;
    }
    // p(i) >= p * p(max) is the same as logit(i) - max >= ln p, which needs no exponential.
    let least = f64::from(p).ln();
    let before = list.items.len();
    list.items.retain(|c| f64::from(c.logit) - f64::from(max) >= least);
    if list.items.len() < before {
        list.shortened();
    }
}
