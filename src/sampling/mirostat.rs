//! Mirostat (Basu et al. 2020): a feedback that keeps the surprise of the text near a target.
//!
//! The state is one number, mu. Before a draw it says how many tokens stay: by the exponent of Zipf's law in the first version, by
//! each token's own surprise in the second. After it, mu moves against the error of the surprise that was seen. Surprises are in
//! bits, of the distribution that reaches the stage, before it cuts.

use std::f64::consts::LN_2;

use super::candidates::{Candidates, descending};
use super::filter;

/// One mirostat stage. `version` 1 looks at the likeliest `looked_at` tokens for the exponent; 2 does not use it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Mirostat {
    /// 1 or 2.
    pub version: u8,
    /// The surprise aimed at, in bits.
    pub target: f32,
    /// How much of an error is corrected at once.
    pub rate: f32,
    /// Tokens that the exponent is estimated from (first version).
    pub looked_at: u32,
}

/// What is needed after the draw: the surprise of a logit is `base - logit`, both in bits.
#[derive(Clone, Copy)]
pub(super) struct Seen {
    base: f64,
}

/// Beyond this mu is not moved: everything is kept, or only the likeliest token.
const FARTHEST: f64 = 1e6;

impl Mirostat {
    /// Mu before the first token.
    pub(super) fn start(&self) -> f64 {
        2.0 * f64::from(self.target)
    }

    /// Cuts the list by `mu`; at least the likeliest token stays. `None` when every token has been ruled out.
    pub(super) fn cut(&self, list: &mut Candidates, mu: f64) -> Option<Seen> {
        let max = f64::from(list.maximum());
        if max == f64::NEG_INFINITY {
            return None;
        }
        let total: f64 = list.items.iter().map(|c| (f64::from(c.logit) - max).exp()).sum();
        let base = max / LN_2 + total.log2();
        match self.version {
            1 => {
                let possible = list.items.iter().filter(|c| c.logit > f32::NEG_INFINITY).count();
                let kept = kept(exponent(list, self.looked_at as usize), mu, possible);
                filter::top_k(list, kept);
            }
            _ => {
                let surprise = |logit: f32| base - f64::from(logit) / LN_2;
                let best = list.items.iter().copied().min_by(descending)?;
                list.items.retain(|c| c.id == best.id || surprise(c.logit) <= mu);
                list.shortened();
            }
        }
        Some(Seen { base })
    }

    /// Mu after a token with this logit was drawn.
    pub(super) fn learn(&self, mu: f64, seen: Seen, logit: f32) -> f64 {
        let error = seen.base - f64::from(logit) / LN_2 - f64::from(self.target);
        (mu - f64::from(self.rate) * error).clamp(-FARTHEST, FARTHEST)
    }
}

/// The exponent s of Zipf's law, by least squares over the `most` likeliest tokens (equation 30 of the paper): the mean of
/// b_i = ln(p_i / p_(i+1)) against t_i = ln((i + 1) / i). The list is put in order as far as it is looked at.
fn exponent(list: &mut Candidates, most: usize) -> f64 {
    let looked_at = most.min(list.items.len());
    list.bring_forward(looked_at);
    let (mut both, mut squares) = (0.0, 0.0);
    for (i, pair) in list.items[..looked_at].windows(2).enumerate() {
        if pair[1].logit == f32::NEG_INFINITY {
            break;
        }
        let t = ((i + 2) as f64 / (i + 1) as f64).ln();
        both += t * (f64::from(pair[0].logit) - f64::from(pair[1].logit));
        squares += t * t;
    }
    if squares > 0.0 { both / squares } else { 0.0 }
}

/// How many of `n` tokens stay: k = (e 2^mu / (1 - n^-e))^(1 / s) with e = s - 1.
fn kept(s: f64, mu: f64, n: usize) -> usize {
    let (e, count) = (s - 1.0, n as f64);
    // At s = 1 the fraction goes towards 1 / ln n.
    let share = if e.abs() < 1e-9 { 1.0 / count.ln() } else { e / (1.0 - count.powf(-e)) };
    let k = (share * mu.exp2()).powf(1.0 / s);
    // Without a slope, or where powers leave the numbers, nothing is cut.
    if k.is_nan() { n } else { (k.round() as usize).clamp(1, n) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::tests::row;

    fn loaded(logits: &[f32]) -> Candidates {
        let mut list = Candidates::default();
        list.load(logits).unwrap();
        list
    }

    /// On a row that follows Zipf's law exactly the estimate is its exponent, and so many tokens stay that the last one's surprise is
    /// about mu (the paper's formula replaces a sum by an integral).
    #[test]
    fn the_exponent_of_a_zipf_row_is_found() {
        for s in [0.7f64, 1.0, 1.2, 2.0] {
            let logits: Vec<f32> = (0..5000).map(|i| (-s * f64::from(i + 1).ln()) as f32).collect();
            let found = exponent(&mut loaded(&logits), 100);
            assert!((found - s).abs() < 1e-3, "{found} for {s}");
            let total: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
            for mu in [7.0, 9.0, 11.0] {
                let k = kept(found, mu, logits.len());
                let surprise = total.log2() - f64::from(logits[k - 1]) / LN_2;
                assert!((surprise - mu).abs() < 0.8, "s {s}, mu {mu}: k {k}, {surprise} bits");
            }
        }
    }

    #[test]
    fn degenerate_rows_keep_a_token() {
        for version in [1, 2] {
            for mu in [-1e6, -1.0, 0.0, 1.0, 1e6] {
                for logits in [&[0.0f32; 7][..], &[1.0], &[f32::MAX, f32::MIN, f32::NEG_INFINITY], &[3e38, 3e38, -3e38, 0.0]] {
                    let mut list = loaded(logits);
                    let miro = Mirostat { version, target: 3.0, rate: 0.1, looked_at: 100 };
                    let seen = miro.cut(&mut list, mu).unwrap();
                    assert!(list.maximum() > f32::NEG_INFINITY);
                    assert!(miro.learn(mu, seen, list.maximum()).is_finite());
                }
            }
        }
    }

    /// Over many draws from unchanging rows the mean surprise comes to the target.
    #[test]
    fn surprise_comes_to_its_target() {
        use crate::sampling::{Sampler, Stage};
        for version in [1, 2] {
            for target in [3.0f32, 5.0] {
                let miro = Mirostat { version, target, rate: 0.1, looked_at: 100 };
                let mut sampler = Sampler::new(&[Stage::Mirostat(miro)], 11).unwrap();
                let (mut sum, draws) = (0.0, 3000);
                for draw in 0..draws {
                    // Zipf's law with noise: the likeliest token is below every target, the entropy above.
                    let noise = row(2000, draw);
                    let logits: Vec<f32> = (0..2000).map(|i| noise[i] / 16.0 - 1.2 * ((i + 1) as f32).ln()).collect();
                    let token = sampler.sample(&logits, &[]).unwrap();
                    let total: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
                    sum += total.log2() - f64::from(logits[token as usize]) / LN_2;
                }
                let mean = sum / draws as f64;
                assert!((mean - f64::from(target)).abs() < 0.15, "version {version}: {mean} bits for {target}");
            }
        }
    }
}
