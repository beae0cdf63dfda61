//! Log-probabilities of a row: the natural logarithm of its softmax, in f64 inside.

use std::cmp::Ordering;

use crate::ensure;
use crate::error::{self, Result};

use super::candidates::{Candidate, descending};
use super::greedy;

/// A token and the natural logarithm of its probability.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token: i32,
    /// ln of its probability; minus infinity for a token the model rules out.
    pub logprob: f32,
}

/// ln(sum(exp(logit))) of a row, which is checked.
pub fn log_sum(logits: &[f32]) -> Result<f64> {
    let max = f64::from(greedy::maximum(logits)?);
    let sum: f64 = logits.iter().map(|&l| (f64::from(l) - max).exp()).sum();
    Ok(max + sum.ln())
}

/// The log-probability of each of `tokens`, written to `out` of the same length. `out` is untouched on error.
pub fn logprob(logits: &[f32], tokens: &[i32], out: &mut [f32]) -> Result<()> {
    ensure!(tokens.len() == out.len(), Internal, "{} tokens, room for {}", tokens.len(), out.len());
    let log_sum = log_sum(logits)?;
    for (index, &token) in tokens.iter().enumerate() {
        let known = usize::try_from(token).is_ok_and(|t| t < logits.len());
        ensure!(known, InvalidToken, "token {index} is {token}, the row has {} logits", logits.len());
    }
    for (out, &token) in out.iter_mut().zip(tokens) {
        *out = (f64::from(logits[token as usize]) - log_sum) as f32;
    }
    Ok(())
}

/// The `count` likeliest tokens, likeliest first, ties by id.
pub fn top_logprobs(logits: &[f32], count: usize) -> Result<Vec<TokenLogprob>> {
    ensure!(count <= logits.len(), InvalidArgument, "{count} of the likeliest tokens asked for, the row has {}", logits.len());
    let log_sum = log_sum(logits)?;
    if count == 0 {
        return Ok(Vec::new());
    }
    // Twice the wanted number is gathered before the worse half is thrown away: linear in the row, small in memory.
    let room = count.saturating_mul(2).min(logits.len());
    let mut best: Vec<Candidate> = error::vec_with_capacity(room, "log-probabilities")?;
    let mut floor: Option<Candidate> = None;
    for (id, &logit) in logits.iter().enumerate() {
        let candidate = Candidate { id: id as u32, logit };
        if floor.is_some_and(|f| descending(&candidate, &f) == Ordering::Greater) {
            continue;
        }
        if best.len() == room {
            best.select_nth_unstable_by(count - 1, descending);
            best.truncate(count);
            floor = best.last().copied();
            if floor.is_some_and(|f| descending(&candidate, &f) == Ordering::Greater) {
                continue;
            }
        }
        best.push(candidate);
    }
    best.sort_unstable_by(descending);
    best.truncate(count);
    let mut out = error::vec_with_capacity(count, "log-probabilities")?;
    out.extend(best.iter().map(|c| TokenLogprob { token: c.id as i32, logprob: (f64::from(c.logit) - log_sum) as f32 }));
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;
    use crate::sampling::tests::row;

    #[test]
    fn agrees_with_the_definition() {
        for n in [1usize, 2, 5, 33, 500] {
            let logits = row(n, 11 + n as u64);
            let sum: f64 = logits.iter().map(|&l| f64::from(l).exp()).sum();
            let tokens: Vec<i32> = (0..n as i32).collect();
            let mut all = vec![0.0; n];
            logprob(&logits, &tokens, &mut all).unwrap();
            for i in 0..n {
                let expected = (f64::from(logits[i]).exp() / sum).ln();
                assert!((f64::from(all[i]) - expected).abs() < 1e-5, "token {i} of {n}: {} and {expected}", all[i]);
            }
            let mut order: Vec<i32> = tokens.clone();
            order.sort_by(|&a, &b| logits[b as usize].partial_cmp(&logits[a as usize]).unwrap().then(a.cmp(&b)));
            for count in [0, 1, n / 3, n] {
                let top = top_logprobs(&logits, count).unwrap();
                assert_eq!(top.iter().map(|t| t.token).collect::<Vec<_>>(), order[..count], "{count} of {n}");
                for t in top {
                    assert_eq!(t.logprob, all[t.token as usize]);
                }
            }
        }
    }

    #[test]
    fn refuses() {
        assert_eq!(top_logprobs(&[1.0], 2).unwrap_err().kind(), Kind::InvalidArgument);
        assert_eq!(top_logprobs(&[f32::NAN], 1).unwrap_err().kind(), Kind::NumericFault);
        let mut out = [7.0, 7.0];
        for bad in [-1, 1, i32::MAX, i32::MIN] {
            assert_eq!(logprob(&[1.0], &[0, bad], &mut out).unwrap_err().kind(), Kind::InvalidToken);
        }
        assert_eq!(out, [7.0, 7.0]);
    }

    #[test]
    fn a_ruled_out_token_is_minus_infinity() {
        let mut out = [0.0, 0.0];
        logprob(&[0.0, f32::NEG_INFINITY], &[0, 1], &mut out).unwrap();
        assert_eq!(out, [0.0, f32::NEG_INFINITY]);
    }
}
