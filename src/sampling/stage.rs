//! The stages a host can put into a sampler, and which of their values make sense.

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

    /// Refuses values without a meaning.
    pub(super) fn check(&self) -> Result<()> {
        match *self {
            Stage::Greedy | Stage::TopK(_) => {}
            Stage::Temperature(t) => {
                ensure!(t.is_finite() && t >= 0.0, InvalidArgument, "temperature is {t}; it must be finite and at least 0")
            }
            Stage::TopP(p) => ensure!((0.0..=1.0).contains(&p), InvalidArgument, "top-p is {p}; it must lie in [0, 1]"),
            Stage::MinP(p) => ensure!((0.0..=1.0).contains(&p), InvalidArgument, "min-p is {p}; it must lie in [0, 1]"),
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
