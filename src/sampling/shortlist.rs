//! Tokens from the highest logits of a row, where the others cannot matter: a device that computed a row hands out these, and the row stays there.
//!
//! The stages run over the short list as they would over the row. Of the tokens that are missing two things are known: none has a higher logit
//! than the list's last, and what their probabilities come to. The first stage that leaves only the highest (greedy, top-k, top-p, min-p) has the
//! row's own result where that follows from these two; from there on nothing is missing. Everywhere else the row itself is asked for, so what is
//! drawn is the same token in either case, bit for bit.

use super::candidates::{Candidate, Candidates, Order, descending};
use super::dry::Dry;
use super::stage::Stage;

/// The highest logits of a row without a fault.
#[derive(Clone, Copy)]
pub struct Shortlist<'a> {
    /// Tokens with their logits, highest first, of several alike the lower token.
    pub(super) tokens: &'a [(u32, f32)],
    /// The sum of e^(logit - highest) over the whole row, to within [`SUM_ERROR`] of itself.
    sum: f64,
    pub(super) vocab: usize,
}

/// What two orders of adding a row in f64, and two exponentials, differ by at most.
const SUM_ERROR: f64 = 1e-10;
/// The same of sums in which each share was rounded to f32, from logits that were.
const ROUNDED: f64 = 1e-4;
/// What single precision makes of a row's smallest shares.
const TINY: f64 = 1e-30;
/// Logits beyond it are rounded too coarsely for `ROUNDED`.
const LARGE: f32 = 500.0;

impl<'a> Shortlist<'a> {
    /// Of a row of `vocab` logits, if there are more of them than the list holds.
    pub fn new(tokens: &'a [(u32, f32)], sum: f64, vocab: usize) -> Option<Shortlist<'a>> {
        let sound = !tokens.is_empty() && tokens.len() < vocab && sum.is_finite() && sum >= 0.5;
        sound.then_some(Shortlist { tokens, sum, vocab })
    }

    /// The row's highest logit.
    fn highest(&self) -> f32 {
        self.tokens[0].1
    }

    /// The list's lowest.
    fn lowest(&self) -> f32 {
        self.tokens[self.tokens.len() - 1].1
    }

    /// Bounds of the sum of e^(logit - highest) over what is not in the list.
    fn outside(&self) -> [f64; 2] {
        let highest = f64::from(self.highest());
        let inside: f64 = self.tokens.iter().map(|t| (f64::from(t.1) - highest).exp()).sum();
        let (outside, error) = (self.sum - inside, self.sum * 2.0 * SUM_ERROR);
        [(outside - error).max(0.0), (outside + error).max(0.0)]
    }

    /// ln of a token's probability as `logprob` gives it for the row; `None` where the list does not say.
    pub fn logprob(&self, token: i32) -> Option<f32> {
        let logit = self.tokens.iter().find(|(id, _)| i64::from(*id) == i64::from(token))?.1;
        let exact = f64::from(logit) - (f64::from(self.highest()) + self.sum.ln());
        let (low, high) = ((exact - SUM_ERROR) as f32, (exact + SUM_ERROR) as f32);
        (low == high).then_some(low)
    }
}

/// What a stage does to the tokens that are missing in the list.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Effect {
    /// They stay behind the list, and the stage is to be run.
    Along,
    /// The stage is to be run and leaves none of them.
    Gone,
    /// As `Gone`, if what it keeps is above them.
    GoneIfAbove,
    /// None of them is left, and the stage was run.
    Done,
    /// Nothing is known.
    Unknown,
}

/// What is known of them.
pub(super) struct Others<'a> {
    list: Shortlist<'a>,
    /// No logit is higher, as the stages have left it.
    ceiling: f32,
    /// What all logits were divided by.
    temperature: f64,
    /// Whether a stage may have made some of them smaller.
    lowered: bool,
    /// Whether no logit was changed, so that of several alike those in the list come first.
    untouched: bool,
}

impl<'a> Others<'a> {
    pub(super) fn new(list: Shortlist<'a>) -> Others<'a> {
        Others { list, ceiling: list.lowest(), temperature: 1.0, lowered: false, untouched: true }
    }

    /// What a stage that is next does to them.
    pub(super) fn meet(&mut self, stage: &Stage, list: &mut Candidates) -> Effect {
        match *stage {
            _ if stage.is_greedy() => Effect::GoneIfAbove,
            Stage::DryBreaker(_) => Effect::Along,
            Stage::Temperature(t) => {
                if t != 1.0 {
                    self.temperature *= f64::from(t);
                    self.untouched = false;
                    if self.ceiling != f32::NEG_INFINITY {
                        self.ceiling = (self.ceiling / t).clamp(f32::MIN, f32::MAX);
                    }
                }
                Effect::Along
            }
            Stage::Repetition { penalty, .. } => self.lower(penalty >= 1.0),
            Stage::Presence { penalty, .. } | Stage::Frequency { penalty, .. } => self.lower(penalty >= 0.0),
            Stage::Dry(Dry { .. }) => self.lower(true),
            Stage::Bias { token, value } => self.lower(value <= 0.0 || list.items.iter().any(|c| i64::from(c.id) == i64::from(token))),
            Stage::TopK(0) => Effect::Along,
            Stage::TopK(k) if (k as usize) < list.items.len() => Effect::GoneIfAbove,
            Stage::TopP(p) if p >= 1.0 => Effect::Along,
            Stage::TopP(p) if self.top_p(list, p) => Effect::Done,
            Stage::MinP(p) if p <= 0.0 => Effect::Along,
            // They are as far below the highest as the stage throws out.
            Stage::MinP(p) if f64::from(self.ceiling) - f64::from(list.maximum()) < f64::from(p).ln() => Effect::Gone,
            _ => Effect::Unknown,
        }
    }

    /// Logits were made smaller, and none larger, of those that are missing.
    fn lower(&mut self, does: bool) -> Effect {
        self.lowered = true;
        self.untouched = false;
        if does { Effect::Along } else { Effect::Unknown }
    }

    /// Whether all that is kept is higher than any of them.
    pub(super) fn are_below(&self, list: &Candidates) -> bool {
        list.items.iter().all(|c| self.is_below(c))
    }

    fn is_below(&self, kept: &Candidate) -> bool {
        kept.logit > self.ceiling || (self.untouched && kept.logit > f32::NEG_INFINITY)
    }

    /// Runs the stage, where the sum over the row is known well enough.
    fn top_p(&self, list: &mut Candidates, p: f32) -> bool {
        let max = list.maximum();
        if !(max > self.ceiling && max.abs() < LARGE && self.list.highest().abs() < LARGE) {
            return false;
        }
        let weight = |c: &Candidate| f64::from((c.logit - max).exp());
        let inside: f64 = list.items.iter().map(weight).sum();
        let [least, most] = self.bounds(f64::from(max)).map(|outside| (inside + outside) * f64::from(p));
        let (least, most) = (least * (1.0 - 1e-9), most * (1.0 + 1e-9));
        list.items.sort_unstable_by(descending);
        let mut reached = 0.0;
        let last = list.items.iter().position(|c| {
            reached += weight(c);
            reached >= least
        });
        // Whatever the sum is between its bounds, the same token is the last one.
        let Some(last) = last.filter(|last| reached >= most && self.is_below(&list.items[*last])) else { return false };
        list.items.truncate(last + 1);
        list.order = Order::Descending;
        true
    }

    /// Bounds of the sum of e^(logit - max) over them, as the stages have left them. Inlined, its powers are computed where there are no others too, from
    /// what nobody wrote, and thrown away: no fault, but Valgrind cannot know.
    #[inline(never)]
    fn bounds(&self, max: f64) -> [f64; 2] {
        let [least, most] = self.list.outside();
        let (shrink, highest) = (1.0 / self.temperature, f64::from(self.list.highest()));
        let [least, most] = if self.temperature == 1.0 {
            [least, most]
        } else if self.temperature < 1.0 {
            // A share w becomes w^shrink = w w^(shrink - 1), and w is at most the ceiling's.
            let largest = (f64::from(self.list.lowest()) - highest).exp();
            [0.0, most * largest.powf(shrink - 1.0)]
        } else {
            // By the inequality of power means; and w^shrink is at least w.
            [least, ((self.list.vocab - self.list.tokens.len()) as f64).powf(1.0 - shrink) * most.powf(shrink)]
        };
        let scale = (highest * shrink - max).exp();
        let least = if self.lowered { 0.0 } else { least };
        [(least * scale * (1.0 - ROUNDED) - TINY).max(0.0), most * scale * (1.0 + ROUNDED) + TINY]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::rng::Rng;
    use crate::sampling::{Mirostat, Sampler, logprob};

    const VOCAB: usize = 700;
    const MOST: usize = 128;

    /// A row like a model's: few logits are high, by `peak` for each time that tokens become fewer by e. Multiples of 1/8 where `ties`.
    fn row(rng: &mut Rng, peak: f64, ties: bool) -> Vec<f32> {
        let one = |rng: &mut Rng| peak * (rng.unit() + 1e-9).ln().abs();
        (0..VOCAB).map(|_| if ties { (one(rng) * 8.0).round() as f32 / 8.0 } else { one(rng) as f32 }).collect()
    }

    /// The highest by a plain sort, and the sum.
    fn highest(row: &[f32]) -> (Vec<(u32, f32)>, f64) {
        let mut list: Vec<(u32, f32)> = row.iter().enumerate().map(|(i, v)| (i as u32, *v)).collect();
        list.sort_by(|a, b| b.1.partial_cmp(&a.1).unwrap());
        let sum = row.iter().map(|v| (f64::from(*v) - f64::from(list[0].1)).exp()).sum();
        list.truncate(MOST);
        (list, sum)
    }

    fn stage(rng: &mut Rng) -> Stage {
        let one_of = |rng: &mut Rng, values: &[f32]| values[(rng.next() % values.len() as u64) as usize];
        let window = (rng.next() % 3 * 10) as u32;
        match rng.next() % 16 {
            0..=2 => Stage::Temperature(one_of(rng, &[0.0, 0.3, 0.7, 1.0, 1.0, 1.3])),
            3 | 4 => Stage::TopK([0, 1, 5, 40, 127, 128, 300][(rng.next() % 7) as usize]),
            5 | 6 => Stage::TopP(one_of(rng, &[0.0, 0.3, 0.8, 0.95, 1.0])),
            7 | 8 => Stage::MinP(one_of(rng, &[0.0, 0.02, 0.1, 1.0])),
            9 => Stage::Repetition { penalty: one_of(rng, &[1.0, 1.2, 0.9]), window },
            10 => Stage::Presence { penalty: one_of(rng, &[0.5, -0.5]), window },
            11 => Stage::Frequency { penalty: one_of(rng, &[0.3, -0.1]), window },
            12 => Stage::Bias { token: (rng.next() % VOCAB as u64) as i32, value: one_of(rng, &[-2.0, 3.0, f32::NEG_INFINITY]) },
            13 => Stage::Xtc { threshold: 0.1, probability: 0.5 },
            14 => Stage::Typical(0.9),
            _ => Stage::Dry(Dry { multiplier: 0.8, base: 1.75, allowed: 2, window }),
        }
    }

    /// Random recipes over random rows: where the short list is enough, token and generator are those of the row; nothing else is changed.
    #[test]
    fn what_is_drawn_is_what_the_row_gives() {
        let mut rng = Rng::new(20_261_130);
        let (mut enough, mut asked) = (0, 0);
        for case in 0..6000u64 {
            let mut stages: Vec<Stage> = (0..1 + rng.next() % 4).map(|_| stage(&mut rng)).collect();
            if case % 7 == 0 {
                stages.push(Stage::Mirostat(Mirostat { version: 2, target: 3.0, rate: 0.1, looked_at: 100 }));
            }
            let peak = [0.2, 1.0, 3.0][(case % 3) as usize];
            let row = row(&mut rng, peak, case % 2 == 0);
            let (tokens, sum) = highest(&row);
            let history: Vec<i32> = (0..40)
                .map(|_| if rng.next().is_multiple_of(2) { tokens[(rng.next() % 20) as usize].0 as i32 } else { (rng.next() % 700) as i32 })
                .collect();
            let mut whole = Sampler::new(&stages, case).unwrap();
            let mut short = whole.clone();
            let list = Shortlist::new(&tokens, sum, VOCAB).unwrap();
            let before = short.state();
            let wanted = whole.sample(&row, &history);
            match short.sample_from(&list, &history) {
                Ok(Some(token)) => {
                    assert_eq!((token, short.state()), (wanted.unwrap(), whole.state()), "case {case}: {stages:?}");
                    enough += 1;
                }
                Ok(None) => assert_eq!(short.state(), before, "case {case}"),
                Err(e) => assert_eq!(e.kind(), wanted.unwrap_err().kind(), "case {case}: {stages:?}"),
            }
            asked += usize::from(short.draws_from_the_highest());
        }
        assert!(enough > 1500 && asked > 1500, "{enough} of {asked} drawn from short lists");
    }

    /// What hosts set is served from the list: the usual orders, over rows as sharp as a model's.
    #[test]
    fn usual_recipes_need_no_row() {
        let (t, k, p, m) = (Stage::Temperature(0.7), Stage::TopK(40), Stage::TopP(0.9), Stage::MinP(0.05));
        let penalty = Stage::Repetition { penalty: 1.1, window: 64 };
        let recipes = [vec![k, p, m, t], vec![t, k, p], vec![penalty, t, k], vec![m, t], vec![t, p], vec![p], vec![Stage::TopK(127)]];
        let mut rng = Rng::new(5);
        for stages in recipes {
            let mut served = 0;
            for case in 0..100 {
                let row = row(&mut rng, 3.0, false);
                let (tokens, sum) = highest(&row);
                let list = Shortlist::new(&tokens, sum, VOCAB).unwrap();
                let mut sampler = Sampler::new(&stages, case).unwrap();
                assert!(sampler.draws_from_the_highest());
                served += usize::from(sampler.sample_from(&list, &[3, 4, 5]).unwrap().is_some());
            }
            assert!(served >= 95, "{stages:?}: {served} of 100");
        }
    }

    /// A sum that is off is found out by the comparison above: the bounds follow from it.
    #[test]
    fn a_wrong_sum_gives_another_cut() {
        let mut rng = Rng::new(9);
        let stages = [Stage::TopP(0.5)];
        let differ = (0..200).any(|case| {
            let row = row(&mut rng, 1.0, false);
            let (tokens, sum) = highest(&row);
            let list = Shortlist::new(&tokens, sum * 1.5, VOCAB).unwrap();
            let (mut whole, mut short) = (Sampler::new(&stages, case).unwrap(), Sampler::new(&stages, case).unwrap());
            short.sample_from(&list, &[]).unwrap().is_some_and(|token| token != whole.sample(&row, &[]).unwrap())
        });
        assert!(differ);
    }

    #[test]
    fn log_probabilities_are_those_of_the_row() {
        let mut rng = Rng::new(77);
        let mut said = 0;
        for _ in 0..300 {
            let row = row(&mut rng, 1.5, false);
            let (tokens, sum) = highest(&row);
            let list = Shortlist::new(&tokens, sum, VOCAB).unwrap();
            for &(token, _) in &tokens[..5] {
                let mut exact = [0.0];
                logprob(&row, &[token as i32], &mut exact).unwrap();
                if let Some(found) = list.logprob(token as i32) {
                    assert_eq!(found.to_bits(), exact[0].to_bits());
                    said += 1;
                }
            }
            assert_eq!(list.logprob(-1), None);
        }
        assert!(said > 1200, "{said} of 1500");
    }
}
