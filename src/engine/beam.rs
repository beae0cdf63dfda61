//! Beam search: the likeliest continuations of a sequence, several at a time.
//!
//! A continuation's score is the sum of its log-probabilities divided by a power of its length. The search stops when no beam
//! that still runs could overtake the results there are: sums only fall.

use super::{Sequence, forward};
use crate::ensure;
use crate::error::{Error, Kind, Result, vec_with_capacity};
use crate::sampling;
use std::cmp::Ordering;

/// How to search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BeamOptions {
    /// Continuations kept at each step.
    pub beams: usize,
    /// Most tokens of a continuation, the one that ends it included.
    pub max_tokens: usize,
    /// Power of the length that sums are divided by; more than 0 favours long ones.
    pub length_penalty: f32,
    /// Tokens that end a generation count as ordinary ones.
    pub ignore_end: bool,
}

/// A continuation.
#[derive(Clone, Debug, PartialEq)]
pub struct Hypothesis {
    /// Its tokens, without the one that ended it.
    pub tokens: Vec<i32>,
    /// Sum of log-probabilities over length to the power of the penalty.
    pub score: f32,
    /// Whether a token ended it, rather than the limit.
    pub ended: bool,
}

/// Most beams.
pub const MOST_BEAMS: usize = 1024;

/// A continuation that still runs.
struct Beam {
    sequence: Sequence,
    tokens: Vec<i32>,
    sum: f64,
}

/// One more token for a beam.
#[derive(Clone, Copy)]
struct Candidate {
    sum: f64,
    parent: usize,
    token: i32,
}

/// Up to `beams` continuations of `start`, best first. `start` holds the prompt (for a translation: its source was encoded, and it
/// holds the decoder's first token and the language) and stays as it is.
pub fn beam(start: &Sequence, options: &BeamOptions) -> Result<Vec<Hypothesis>> {
    let BeamOptions { beams, max_tokens, .. } = *options;
    ensure!((1..=MOST_BEAMS).contains(&beams), InvalidArgument, "{beams} beams; 1 to {MOST_BEAMS} are possible");
    ensure!(max_tokens > 0, InvalidArgument, "max_tokens is 0");
    ensure!(options.length_penalty.is_finite(), InvalidArgument, "the length penalty is {}", options.length_penalty);
    // The last token's row is never computed.
    let room = start.capacity() - start.len() + 1;
    if max_tokens > room {
        let text = format!("{max_tokens} tokens do not fit behind the {} that are there; {room} do", start.len());
        return Err(Error::new(Kind::ContextFull, text).sizes(max_tokens as u64, room as u64));
    }
    start.logits()?;
    let mut sequence = start.fork()?;
    // Beams come by the dozen, and nobody will ask for most of them again.
    sequence.forget_when_freed();
    let mut live = vec![Beam { sequence, tokens: Vec::new(), sum: 0.0 }];
    let mut done: Vec<Hypothesis> = Vec::new();
    for length in 1..=max_tokens {
        let chosen = step(start, options, &live, length, &mut done)?;
        done.sort_by(|a, b| b.score.total_cmp(&a.score));
        done.truncate(beams);
        if length == max_tokens {
            for c in &chosen {
                done.push(Hypothesis { tokens: grown(&live[c.parent], c.token)?, score: score(c.sum, length, options), ended: false });
            }
            break;
        }
        let overtakes = |c: &Candidate| done.last().is_none_or(|worst| best_score(c.sum, length, options) > worst.score);
        if chosen.is_empty() || (done.len() == beams && !chosen.iter().any(overtakes)) {
            break;
        }
        live = advance(live, &chosen)?;
    }
    done.sort_by(|a, b| b.score.total_cmp(&a.score));
    done.truncate(beams);
    Ok(done)
}

fn score(sum: f64, length: usize, options: &BeamOptions) -> f32 {
    (sum / (length as f64).powf(f64::from(options.length_penalty))) as f32
}

/// The most a beam of this sum may still come to, as its sum only falls.
fn best_score(sum: f64, length: usize, options: &BeamOptions) -> f32 {
    score(sum, if options.length_penalty > 0.0 { options.max_tokens } else { length + 1 }, options)
}

fn grown(beam: &Beam, token: i32) -> Result<Vec<i32>> {
    let mut tokens = vec_with_capacity(beam.tokens.len() + 1, "a beam's tokens")?;
    tokens.extend_from_slice(&beam.tokens);
    tokens.push(token);
    Ok(tokens)
}

/// The candidates to go on with; those that end become results.
fn step(start: &Sequence, options: &BeamOptions, live: &[Beam], length: usize, done: &mut Vec<Hypothesis>) -> Result<Vec<Candidate>> {
    let engine = start.engine();
    let ends = |token| !options.ignore_end && engine.is_end(token);
    let end_tokens = if options.ignore_end { 0 } else { engine.info().end_tokens.len() };
    // So many that enough are left however many of them end.
    let wanted = options.beams * (1 + end_tokens);
    let mut candidates = Vec::new();
    for (parent, beam) in live.iter().enumerate() {
        best(beam, parent, wanted, &mut candidates)?;
    }
    candidates.sort_by(|a, b| b.sum.total_cmp(&a.sum).then(a.parent.cmp(&b.parent)).then(a.token.cmp(&b.token)));
    let mut chosen = vec_with_capacity(options.beams, "the list of beams")?;
    for (rank, c) in candidates.into_iter().enumerate() {
        if chosen.len() == options.beams {
            break;
        }
        if !ends(c.token) {
            chosen.push(c);
        } else if rank < options.beams {
            let mut tokens = vec_with_capacity(live[c.parent].tokens.len(), "a beam's tokens")?;
            tokens.extend_from_slice(&live[c.parent].tokens);
            done.push(Hypothesis { tokens, score: score(c.sum, length, options), ended: true });
        }
    }
    Ok(chosen)
}

/// The `count` likeliest next tokens of a beam; ties go to the lower id.
fn best(beam: &Beam, parent: usize, count: usize, out: &mut Vec<Candidate>) -> Result<()> {
    let row = beam.sequence.logits()?;
    let normaliser = sampling::log_sum(row).map_err(|e| beam.sequence.located(e))?;
    let mut order = vec_with_capacity(row.len(), "the order of a row")?;
    order.extend(0..row.len() as u32);
    // No total order: minus zero ties with zero.
    let before = |a: &u32, b: &u32| row[*b as usize].partial_cmp(&row[*a as usize]).unwrap_or(Ordering::Equal).then(a.cmp(b));
    if count < order.len() {
        order.select_nth_unstable_by(count, before);
        order.truncate(count);
    }
    crate::error::reserve(out, order.len(), "the list of candidates")?;
    out.extend(order.iter().map(|&i| Candidate { sum: beam.sum + f64::from(row[i as usize]) - normaliser, parent, token: i as i32 }));
    Ok(())
}

/// The chosen candidates as beams with their rows computed. A parent's last child takes its sequence over, others fork.
fn advance(live: Vec<Beam>, chosen: &[Candidate]) -> Result<Vec<Beam>> {
    let tokens: Vec<Vec<i32>> = chosen.iter().map(|c| grown(&live[c.parent], c.token)).collect::<Result<_>>()?;
    let mut parents: Vec<Option<Sequence>> = live.into_iter().map(|b| Some(b.sequence)).collect();
    let mut next = vec_with_capacity(chosen.len(), "the list of beams")?;
    for (index, (c, tokens)) in chosen.iter().zip(tokens).enumerate() {
        let needed = chosen[index + 1..].iter().any(|later| later.parent == c.parent);
        let parent = &mut parents[c.parent];
        let sequence = match parent.take() {
            Some(sequence) if needed => {
                let fork = sequence.fork()?;
                *parent = Some(sequence);
                fork
            }
            Some(sequence) => sequence,
            None => crate::bail!(Internal, "beam {} was taken over before its last child", c.parent),
        };
        next.push(Beam { sequence, tokens, sum: c.sum });
    }
    let mut sequences: Vec<&mut Sequence> = next.iter_mut().map(|b| &mut b.sequence).collect();
    let newest: Vec<i32> = chosen.iter().map(|c| c.token).collect();
    forward(&mut sequences, &newest)?;
    Ok(next)
}
