//! Top-n-sigma (Tang et al. 2024): tokens within some standard deviations of the highest logit.

use super::candidates::Candidates;

/// Keeps logits of at least `max - n * sigma`, where sigma is the standard deviation of the logits that were not ruled out. The order
/// stays.
pub(super) fn top_n_sigma(list: &mut Candidates, n: f32) {
    let max = f64::from(list.maximum());
    if max == f64::NEG_INFINITY {
        return;
    }
    let possible = || list.items.iter().map(|c| f64::from(c.logit)).filter(|&l| l > f64::NEG_INFINITY);
    let count = possible().count() as f64;
    let mean = possible().sum::<f64>() / count;
    let variance = possible().map(|l| (l - mean) * (l - mean)).sum::<f64>() / count;
    let least = max - f64::from(n) * variance.sqrt();
    let before = list.items.len();
    list.items.retain(|c| f64::from(c.logit) >= least);
    if list.items.len() < before {
        list.shortened();
    }
}
