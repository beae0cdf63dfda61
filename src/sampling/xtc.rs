//! Exclude top choices (described by p-e-w, 2024): now and then the obvious tokens are left out, and the least obvious of them stays.

use super::candidates::{Candidates, descending};
use super::rng::Rng;

/// In a share of `probability` of all cases: of the tokens that are at least `threshold` likely, all but the least likely go (of several
/// equal ones the highest id stays). Spends one number of the generator where the probability leaves a choice.
pub(super) fn xtc(list: &mut Candidates, threshold: f32, probability: f32, rng: &mut Rng) {
    let happens = match probability {
        p if p <= 0.0 => false,
        p if p >= 1.0 => true,
        p => rng.unit() < f64::from(p),
    };
    let max = list.maximum();
    if !happens || max == f32::NEG_INFINITY {
        return;
    }
    let weight = |logit: f32| (f64::from(logit) - f64::from(max)).exp();
    let least = f64::from(threshold) * list.items.iter().map(|c| weight(c.logit)).sum::<f64>();
    let obvious = |logit: f32| logit > f32::NEG_INFINITY && weight(logit) >= least;
    let Some(stays) = list.items.iter().filter(|c| obvious(c.logit)).max_by(|a, b| descending(a, b)).copied() else { return };
    let before = list.items.len();
    list.items.retain(|c| c.id == stays.id || !obvious(c.logit));
    if list.items.len() < before {
        list.shortened();
    }
}
