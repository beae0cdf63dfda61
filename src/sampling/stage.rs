//! The stages a host can put into a sampler, and which of their values make sense.

use super::dry::Dry;
use super::mirostat::Mirostat;
use crate::ensure;
use crate::error::Result;

/// One step on the way from logits to a token. `window` counts the newest tokens of the sequence, prompt included;
/// 0 takes all of them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Stage {
    /// Keeps only the highest logit; ties go to the lowest id.
    Greedy,
    /// Divides every logit. 0 (and anything below `COLDEST`) is `Greedy`.
    Temperature(f32),
    /// Keeps the `k` highest logits; 0 keeps all.
    TopK(u32),
    /// Keeps the likeliest tokens until their probabilities reach `p`, and at least one.
    TopP(f32),
    /// Keeps tokens at least `p` times as likely as the likeliest; 0 keeps all.
    MinP(f32),
    /// Keeps the most typical tokens until their probabilities reach `p`, and at least one.
    Typical(f32),
    /// Keeps logits within `n` standard deviations of the highest.
    TopNSigma(f32),
    /// Now and then leaves out all but the least likely of the obvious tokens.
    Xtc {
        /// From this probability on a token is obvious.
        threshold: f32,
        /// In this share of all cases.
        probability: f32,
    },
    /// Cuts by a number that follows the surprise of what is drawn. The last stage.
    Mirostat(Mirostat),
    /// Divides a positive and multiplies a negative logit of every token in the window by `penalty`.
    Repetition {
        /// Above 1 discourages, below 1 encourages, 1 changes nothing.
        penalty: f32,
        /// Newest tokens looked at.
        window: u32,
    },
    /// Subtracts `penalty` from the logit of every token in the window.
    Presence {
        /// Subtracted once.
        penalty: f32,
        /// Newest tokens looked at.
        window: u32,
    },
    /// Subtracts `penalty` times its count from the logit of every token in the window.
    Frequency {
        /// Subtracted for every occurrence.
        penalty: f32,
        /// Newest tokens looked at.
        window: u32,
    },
    /// Subtracts from the logit of every token that would make a repeated passage longer.
    Dry(Dry),
    /// A token over which no repeated passage reaches, for every `Dry` of the sampler.
    DryBreaker(i32),
    /// What the host does.
    Hook,
    /// Adds `value` to one token's logit; minus infinity rules the token out.
    Bias {
        /// The token.
        token: i32,
        /// What is added.
        value: f32,
    },
}

/// Below this temperature differences between logits no longer fit f32, and only the highest one is left anyway.
pub(super) const COLDEST: f32 = 1e-5;

impl Stage {
    /// Whether the stage leaves exactly the highest logit.
    pub(super) fn is_greedy(&self) -> bool {
        matches!(*self, Stage::Greedy) || matches!(*self, Stage::Temperature(t) if t < COLDEST)
    }

    /// Whether the stage leaves the highest logit the highest, whatever the row.
    pub(super) fn keeps_the_highest(&self) -> bool {
        self.is_greedy() || matches!(*self, Stage::Temperature(_) | Stage::TopK(_) | Stage::TopP(_) | Stage::MinP(_) | Stage::DryBreaker(_))
    }

    /// Whether the stage takes no token out of the list, as far as is known without the row.
    pub(super) fn is_without_cut(&self) -> bool {
        match *self {
            Stage::Temperature(_) => !self.is_greedy(),
            Stage::TopK(k) => k == 0,
            Stage::TopP(p) => p >= 1.0,
            Stage::MinP(p) => p <= 0.0,
            Stage::Repetition { .. } | Stage::Presence { .. } | Stage::Frequency { .. } => true,
            Stage::Dry(_) | Stage::DryBreaker(_) | Stage::Bias { .. } => true,
            _ => false,
        }
    }

    /// Whether the stage keeps the highest logits, few where most of the probability is in few.
    pub(super) fn cuts_to_the_highest(&self) -> bool {
        self.is_greedy() || matches!(*self, Stage::TopK(_) | Stage::TopP(_) | Stage::MinP(_))
    }

    /// The token that the stage names.
    pub(super) fn token(&self) -> Option<i32> {
        match *self {
            Stage::Bias { token, .. } | Stage::DryBreaker(token) => Some(token),
            _ => None,
        }
    }

    /// Refuses values without a meaning.
    pub(super) fn check(&self) -> Result<()> {
        match *self {
            Stage::Greedy | Stage::TopK(_) | Stage::Hook => {}
            Stage::Temperature(t) => {
                ensure!(t.is_finite() && t >= 0.0, InvalidArgument, "temperature is {t}; it must be finite and at least 0")
            }
            Stage::TopP(p) => ensure!((0.0..=1.0).contains(&p), InvalidArgument, "top-p is {p}; it must lie in [0, 1]"),
            Stage::MinP(p) => ensure!((0.0..=1.0).contains(&p), InvalidArgument, "min-p is {p}; it must lie in [0, 1]"),
            Stage::Typical(p) => ensure!((0.0..=1.0).contains(&p), InvalidArgument, "typical p is {p}; it must lie in [0, 1]"),
            Stage::TopNSigma(n) => {
                ensure!(n.is_finite() && n >= 0.0, InvalidArgument, "n of top-n-sigma is {n}; it must be finite and at least 0")
            }
            Stage::Xtc { threshold, probability } => {
                ensure!((0.0..=1.0).contains(&threshold), InvalidArgument, "XTC's threshold is {threshold}; it must lie in [0, 1]");
                ensure!((0.0..=1.0).contains(&probability), InvalidArgument, "XTC's probability is {probability}; it must lie in [0, 1]");
            }
            Stage::Mirostat(Mirostat { version, target, rate, looked_at }) => {
                let sound = target.is_finite() && target >= 0.0;
                ensure!(sound, InvalidArgument, "mirostat's target is {target} bits; it must be finite and at least 0");
                let sound = rate.is_finite() && rate >= 0.0;
                ensure!(sound, InvalidArgument, "mirostat's rate is {rate}; it must be finite and at least 0");
                ensure!(version != 1 || looked_at >= 2, InvalidArgument, "mirostat looks at {looked_at} tokens; it needs 2 for a slope");
            }
            Stage::Dry(Dry { multiplier, base, allowed, .. }) => {
                let sound = multiplier.is_finite() && multiplier >= 0.0;
                ensure!(sound, InvalidArgument, "DRY's multiplier is {multiplier}; it must be finite and at least 0");
                ensure!(base.is_finite() && base >= 1.0, InvalidArgument, "DRY's base is {base}; it must be finite and at least 1");
                ensure!(allowed >= 1, InvalidArgument, "DRY's length is 0; passages have at least 1 token");
            }
            Stage::DryBreaker(token) => ensure!(token >= 0, InvalidToken, "DRY breaker {token}; ids start at 0"),
            Stage::Repetition { penalty, .. } => {
                ensure!(penalty.is_finite() && penalty > 0.0, InvalidArgument, "repetition penalty is {penalty}; it must be above 0")
            }
            Stage::Presence { penalty, .. } => {
                ensure!(penalty.is_finite(), InvalidArgument, "presence penalty is {penalty}; it must be finite")
            }
            Stage::Frequency { penalty, .. } => {
                ensure!(penalty.is_finite(), InvalidArgument, "frequency penalty is {penalty}; it must be finite")
            }
            Stage::Bias { token, value } => {
                ensure!(token >= 0, InvalidToken, "bias for token {token}; ids start at 0");
                ensure!(
                    !value.is_nan() && value != f32::INFINITY,
                    InvalidArgument,
                    "bias of token {token} is {value}; it must be finite or minus infinity"
                );
            }
        }
        Ok(())
    }
}
