//! Locally typical sampling (Meister et al. 2022): tokens whose surprise is close to the one to be expected.

use std::cmp::Ordering;

use super::candidates::{Candidate, Candidates, Order, descending};

/// Keeps tokens, those first whose surprise -ln p(i) is nearest to the entropy of the row, until their probabilities reach `p`;
/// at least one stays. Equally near tokens are taken likeliest first, then by id.
pub(super) fn typical(list: &mut Candidates, p: f32) {
    let max = list.maximum();
    if p >= 1.0 || max == f32::NEG_INFINITY {
        return;
    }
    let below = |c: &Candidate| f64::from(c.logit) - f64::from(max);
    let (mut total, mut weighted) = (0.0, 0.0);
    for c in &list.items {
        let weight = below(c).exp();
        total += weight;
        // A weight that is no longer a number above zero has no surprise that counts.
        weighted += if weight > 0.0 { weight * below(c) } else { 0.0 };
    }
    // H = ln(total) - mean(below), and the surprise is ln(total) - below, so that their distance needs no logarithm.
    let mean = weighted / total;
    let distance = |c: &Candidate| (mean - below(c)).abs();
    let nearest = |a: &Candidate, b: &Candidate| distance(a).partial_cmp(&distance(b)).unwrap_or(Ordering::Equal).then(descending(a, b));
    list.keep_until(total * f64::from(p), nearest, |c| below(c).exp());
    list.order = Order::Other;
}
