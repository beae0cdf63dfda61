//! Every stage against its definition written out in f64, draws against the probabilities they should have.

use proptest::prelude::{Just, ProptestConfig, Strategy, any, prop, prop_assert, prop_assert_eq, prop_oneof, proptest};

use super::*;
use crate::error::Kind;

/// `n` logits that look like a model's: a few high, most low, all multiples of 1/8 (so that many of them tie).
pub fn row(n: usize, seed: u64) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    (0..n).map(|_| ((rng.unit() + rng.unit() - 1.0) * 64.0).round() as f32 / 8.0).collect()
}

/// What the stages keep, with logits in f64 (rounded to f32 where they are changed); `None` when a threshold is too close to call
/// in f32. `seed` is the sampler's: a stage may spend random numbers.
fn by_definition(stages: &[Stage], logits: &[f32], history: &[i32], seed: u64) -> Option<Vec<(usize, f64)>> {
    let mut rng = Rng::new(seed);
    let rounded = |x: f64| f64::from(x as f32);
    let mut list: Vec<(usize, f64)> = logits.iter().map(|&l| f64::from(l)).enumerate().collect();
    let newest = |window: u32| &history[if window == 0 { 0 } else { history.len().saturating_sub(window as usize) }..];
    let best_first = |a: &(usize, f64), b: &(usize, f64)| b.1.partial_cmp(&a.1).unwrap().then(a.0.cmp(&b.0));
    for stage in stages {
        // Nothing is left of tokens that were ruled out, however a stage's formula would treat them.
        if list.iter().all(|c| c.1 == f64::NEG_INFINITY) {
            break;
        }
        let max = list.iter().map(|c| c.1).fold(f64::NEG_INFINITY, f64::max);
        match *stage {
            Stage::Greedy | Stage::Temperature(0.0) => {
                list.sort_by(best_first);
                list.truncate(1);
            }
            Stage::Temperature(t) => list.iter_mut().for_each(|c| c.1 /= f64::from(t)),
            Stage::TopK(0) => {}
            Stage::TopK(k) => {
                list.sort_by(best_first);
                list.truncate(k as usize);
            }
            Stage::TopP(p) if p < 1.0 => {
                list.sort_by(best_first);
                let total: f64 = list.iter().map(|c| (c.1 - max).exp()).sum();
                let (mut reached, mut kept) = (0.0, 0);
                for c in &list {
                    reached += (c.1 - max).exp() / total;
                    kept += 1;
                    if (reached - f64::from(p)).abs() < 1e-5 {
                        return None;
                    }
                    if reached >= f64::from(p) {
                        break;
                    }
                }
                list.truncate(kept);
            }
            Stage::TopP(_) => {}
            Stage::MinP(p) => {
                let share = |c: &(usize, f64)| (c.1 - max).exp();
                if list.iter().any(|c| (share(c) - f64::from(p)).abs() < 1e-6 && p > 0.0) {
                    return None;
                }
                list.retain(|c| share(c) >= f64::from(p));
            }
            Stage::Repetition { penalty, window } => {
                for c in &mut list {
                    if newest(window).contains(&(c.0 as i32)) {
                        c.1 = rounded(if c.1 > 0.0 { c.1 / f64::from(penalty) } else { c.1 * f64::from(penalty) });
                    }
                }
            }
            Stage::Presence { penalty, window } => {
                for c in &mut list {
                    if newest(window).contains(&(c.0 as i32)) {
                        c.1 = rounded(c.1 - f64::from(penalty));
                    }
                }
            }
            Stage::Frequency { penalty, window } => {
                for c in &mut list {
                    c.1 = rounded(c.1 - f64::from(penalty) * newest(window).iter().filter(|&&t| t == c.0 as i32).count() as f64);
                }
            }
            Stage::Bias { token, value } => {
                list.iter_mut().filter(|c| c.0 as i32 == token).for_each(|c| c.1 = rounded(c.1 + f64::from(value)));
            }
            Stage::Typical(p) if p < 1.0 => {
                let total: f64 = list.iter().map(|c| (c.1 - max).exp()).sum();
                let chance = |c: &(usize, f64)| (c.1 - max).exp() / total;
                let entropy: f64 = list.iter().map(chance).filter(|&p| p > 0.0).map(|p| -p * p.ln()).sum();
                let distance = |c: &(usize, f64)| (-chance(c).ln() - entropy).abs();
                let near = |a: &(usize, f64), b: &(usize, f64)| (distance(a) - distance(b)).abs() < 1e-6;
                list.sort_by(|a, b| match a.1 == b.1 {
                    true => a.0.cmp(&b.0),
                    false => distance(a).partial_cmp(&distance(b)).unwrap(),
                });
                let mut reached = 0.0;
                let last = list.iter().position(|c| {
                    reached += chance(c);
                    reached >= f64::from(p)
                });
                if list
                    .iter()
                    .scan(0.0, |sum, c| {
                        *sum += chance(c);
                        Some(*sum)
                    })
                    .any(|sum| (sum - f64::from(p)).abs() < 1e-5)
                {
                    return None;
                }
                let kept = last.map_or(list.len(), |last| last + 1);
                // Two tokens on both sides of the entropy at the same distance: rounding decides.
                if kept < list.len() && list.iter().any(|c| c.1 != list[kept - 1].1 && near(c, &list[kept - 1])) {
                    return None;
                }
                list.truncate(kept);
            }
            Stage::Typical(_) => {}
            Stage::TopNSigma(n) => {
                let possible: Vec<f64> = list.iter().map(|c| c.1).filter(|&l| l > f64::NEG_INFINITY).collect();
                let mean = possible.iter().sum::<f64>() / possible.len() as f64;
                let square = possible.iter().map(|l| l * l).sum::<f64>() / possible.len() as f64;
                let least = max - f64::from(n) * (square - mean * mean).max(0.0).sqrt();
                if possible.iter().any(|l| l.abs() > 1e6 || (n > 0.0 && (l - least).abs() < 1e-5)) {
                    return None;
                }
                list.retain(|c| c.1 >= least);
            }
            Stage::Xtc { threshold, probability } => {
                let spends = probability > 0.0 && probability < 1.0;
                let happens = if spends { rng.unit() < f64::from(probability) } else { probability == 1.0 };
                if !happens {
                    continue;
                }
                let total: f64 = list.iter().map(|c| (c.1 - max).exp()).sum();
                let chance = |c: &(usize, f64)| (c.1 - max).exp() / total;
                if list.iter().any(|c| (chance(c) - f64::from(threshold)).abs() < 1e-9 && threshold > 0.0) {
                    return None;
                }
                list.sort_by(best_first);
                let obvious = list.iter().filter(|c| c.1 > f64::NEG_INFINITY && chance(c) >= f64::from(threshold)).count();
                list.drain(..obvious.saturating_sub(1));
            }
            Stage::Mirostat(Mirostat { version, target, looked_at, .. }) => {
                let mu = 2.0 * f64::from(target);
                let total: f64 = list.iter().map(|c| (c.1 - max).exp()).sum();
                let chance = |c: &(usize, f64)| (c.1 - max).exp() / total;
                list.sort_by(best_first);
                if version == 2 {
                    if list.iter().any(|c| (-chance(c).log2() - mu).abs() < 1e-6) {
                        return None;
                    }
                    let kept = list.iter().filter(|c| -chance(c).log2() <= mu).count();
                    list.truncate(kept.max(1));
                    continue;
                }
                let possible = list.iter().filter(|c| c.1 > f64::NEG_INFINITY).count();
                let looked_at = possible.min(looked_at as usize);
                // ln(p_i / p_(i + 1)), where probabilities themselves would be zero.
                let slopes: Vec<(f64, f64)> =
                    (1..looked_at).map(|i| (((i + 1) as f64 / i as f64).ln(), list[i - 1].1 - list[i].1)).collect();
                let s = slopes.iter().map(|(t, b)| t * b).sum::<f64>() / slopes.iter().map(|(t, _)| t * t).sum::<f64>();
                let k = ((s - 1.0) * 2f64.powf(mu) / (1.0 - (possible as f64).powf(1.0 - s))).powf(1.0 / s);
                if looked_at < 2 || s < 1e-3 || (s - 1.0).abs() < 1e-3 || (k.fract() - 0.5).abs() < 1e-6 * k.max(1.0) {
                    return None;
                }
                list.truncate((k.round() as usize).clamp(1, list.len()));
            }
            Stage::Dry(Dry { multiplier, base, allowed, window }) => {
                let breaks = |token: i32| stages.contains(&Stage::DryBreaker(token));
                let tokens = newest(window);
                for c in &mut list {
                    let mut longest = 0;
                    // Each place where the token occurs, and how far what is before it equals the end.
                    for at in (0..tokens.len()).filter(|&at| tokens[at] == c.0 as i32 && !breaks(tokens[at])) {
                        let same = |n: &usize| tokens[at - n] == tokens[tokens.len() - n] && !breaks(tokens[at - n]);
                        longest = longest.max((1..=at).take_while(same).count());
                    }
                    if longest >= allowed as usize && multiplier > 0.0 {
                        let penalty = f64::from(multiplier) * f64::from(base).powi((longest - allowed as usize) as i32);
                        c.1 = rounded(c.1 - penalty);
                    }
                }
            }
            Stage::DryBreaker(_) => {}
            // Tested on its own.
            Stage::Hook => return None,
        }
    }
    Some(list)
}

/// Values are dyadic, so f32 and f64 agree on every logit and differ in the softmax only.
fn any_stage(vocab: i32) -> impl Strategy<Value = Stage> {
    let eighth = |range: std::ops::Range<i32>| range.prop_map(|n| n as f32 / 8.0);
    prop_oneof![
        1 => Just(Stage::Greedy),
        3 => prop_oneof![Just(0.0f32), Just(0.5), Just(1.0), Just(2.0)].prop_map(Stage::Temperature),
        3 => (0u32..300).prop_map(Stage::TopK),
        3 => (0.0f32..=1.0).prop_map(Stage::TopP),
        3 => (0.0f32..=1.0).prop_map(Stage::MinP),
        2 => (prop_oneof![Just(0.5f32), Just(1.0), Just(2.0)], 0u32..20).prop_map(|(penalty, window)| Stage::Repetition { penalty, window }),
        2 => (eighth(-16..16), 0u32..20).prop_map(|(penalty, window)| Stage::Presence { penalty, window }),
        2 => (eighth(-16..16), 0u32..20).prop_map(|(penalty, window)| Stage::Frequency { penalty, window }),
        2 => (0..vocab, prop_oneof![eighth(-80..80), Just(f32::NEG_INFINITY)]).prop_map(|(token, value)| Stage::Bias { token, value }),
        3 => (0.0f32..=1.0).prop_map(Stage::Typical),
        3 => eighth(0..40).prop_map(Stage::TopNSigma),
        3 => (0.0f32..0.6, prop_oneof![Just(0.0f32), Just(0.5), Just(1.0)])
            .prop_map(|(threshold, probability)| Stage::Xtc { threshold, probability }),
        4 => (prop_oneof![Just(0.0f32), Just(0.5), Just(1.0)], prop_oneof![Just(1.0f32), Just(2.0)], 1u32..4, 0u32..50)
            .prop_map(|(multiplier, base, allowed, window)| Stage::Dry(Dry { multiplier, base, allowed, window })),
        2 => (0..6i32).prop_map(Stage::DryBreaker),
    ]
}

/// Some stages, and sometimes mirostat as the last.
fn any_chain(vocab: i32) -> impl Strategy<Value = Vec<Stage>> {
    let mirostat = (1u8..3, 0.0f32..8.0, 2u32..150)
        .prop_map(|(version, target, looked_at)| Stage::Mirostat(Mirostat { version, target, rate: 0.1, looked_at }));
    (prop::collection::vec(any_stage(vocab), 0..6), prop::option::of(mirostat))
        .prop_map(|(stages, last)| stages.into_iter().chain(last).collect())
}

/// Tokens that repeat, and some that are none.
fn any_history() -> impl Strategy<Value = Vec<i32>> {
    prop::collection::vec(prop_oneof![4 => 0..4i32, 1 => -2i32..1210], 0..50)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..Default::default() })]

    #[test]
    fn stages_agree_with_their_definition(
        stages in any_chain(1200),
        size in 1usize..1200,
        seed in any::<u64>(),
        history in any_history(),
    ) {
        let logits = row(size, seed);
        let Some(expected) = by_definition(&stages, &logits, &history, seed) else { return Ok(()) };
        let mut sampler = Sampler::new(&stages, seed).unwrap();
        let got = sampler.run(&logits, &history);
        let possible: Vec<_> = expected.iter().filter(|c| c.1 > f64::NEG_INFINITY).collect();
        match got {
            Ok(token) => prop_assert!(possible.iter().any(|c| c.0 as i32 == token), "{token} is not in {possible:?}"),
            Err(e) => {
                prop_assert_eq!(e.kind(), Kind::NoValidToken);
                prop_assert!(possible.is_empty());
            }
        }
        let mut kept: Vec<(usize, f64)> = sampler.candidates.items.iter().map(|c| (c.id as usize, f64::from(c.logit))).collect();
        kept.retain(|c| c.1 > f64::NEG_INFINITY);
        kept.sort_by_key(|c| c.0);
        let mut possible: Vec<(usize, f64)> = possible.into_iter().copied().collect();
        possible.sort_by_key(|c| c.0);
        prop_assert_eq!(kept, possible);
        prop_assert!(sampler.counts.is_zero());
    }

    #[test]
    fn the_greedy_road_is_the_general_one(size in 1usize..400, seed in any::<u64>()) {
        let logits = row(size, seed);
        let general = Sampler::new(&[Stage::TopK(0), Stage::Greedy], 1).unwrap().sample(&logits, &[]).unwrap();
        for stages in [&[][..], &[Stage::Greedy], &[Stage::Temperature(0.0)], &[Stage::Temperature(1e-9), Stage::TopP(0.5)]] {
            prop_assert_eq!(Sampler::new(stages, 5).unwrap().sample(&logits, &[]).unwrap(), general);
        }
    }
}

/// What each token's probability should be. A stage that acts in a share of all cases gives a mixture.
fn probabilities(stages: &[Stage], logits: &[f32], history: &[i32]) -> Vec<f64> {
    let uncertain = stages.iter().position(|s| matches!(s, Stage::Xtc { probability, .. } if *probability > 0.0 && *probability < 1.0));
    if let Some(index) = uncertain {
        let Stage::Xtc { threshold, probability } = stages[index] else { unreachable!() };
        let with = |probability| {
            let mut stages = stages.to_vec();
            stages[index] = Stage::Xtc { threshold, probability };
            probabilities(&stages, logits, history)
        };
        let share = f64::from(probability);
        return with(1.0).iter().zip(with(0.0)).map(|(a, b)| share * a + (1.0 - share) * b).collect();
    }
    let list = by_definition(stages, logits, history, 0).expect("thresholds are not close");
    let max = list.iter().map(|c| c.1).fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = list.iter().map(|c| (c.1 - max).exp()).sum();
    (0..logits.len()).map(|id| list.iter().find(|c| c.0 == id).map_or(0.0, |c| (c.1 - max).exp() / total)).collect()
}

/// Draws `draws` tokens: each frequency lies within five standard deviations of its probability, and the sum of their squared
/// deviations (Pearson's chi square) is no more than chance explains once in millions of tries.
fn check_frequencies(stages: &[Stage], logits: &[f32], history: &[i32], draws: u32) {
    let chances = probabilities(stages, logits, history);
    let mut sampler = Sampler::new(stages, 42).unwrap();
    let mut seen = vec![0u32; logits.len()];
    for _ in 0..draws {
        seen[sampler.sample(logits, history).unwrap() as usize] += 1;
    }
    let (mut square, mut bins) = (0.0, 0);
    for (id, (&count, &p)) in seen.iter().zip(&chances).enumerate() {
        let expected = p * f64::from(draws);
        let deviation = (expected * (1.0 - p)).sqrt();
        assert!((f64::from(count) - expected).abs() <= 5.0 * deviation + 1e-9, "{stages:?}: token {id} came {count} times, not {expected}");
        if expected >= 5.0 {
            square += (f64::from(count) - expected).powi(2) / expected;
            bins += 1;
        }
    }
    let freedom = f64::from((bins - 1).max(1));
    assert!(square < freedom + 6.0 * (2.0 * freedom).sqrt(), "{stages:?}: chi square {square} over {bins} tokens");
}

#[test]
fn draws_follow_the_probabilities() {
    let logits = [1.0, 0.5, -1.0, 2.0, 0.0, f32::NEG_INFINITY, 1.5, -4.0];
    let history = [3, 3, 6, 0];
    check_frequencies(&[Stage::Temperature(1.0)], &logits, &history, 40_000);
    check_frequencies(&[Stage::Temperature(0.5)], &logits, &history, 40_000);
    check_frequencies(&[Stage::TopK(3), Stage::Temperature(2.0)], &logits, &history, 40_000);
    check_frequencies(&[Stage::TopP(0.7)], &logits, &history, 40_000);
    check_frequencies(&[Stage::MinP(0.3), Stage::Temperature(0.5)], &logits, &history, 40_000);
    let repetition = Stage::Repetition { penalty: 2.0, window: 0 };
    let frequency = Stage::Frequency { penalty: 0.5, window: 3 };
    check_frequencies(&[repetition, frequency, Stage::Bias { token: 7, value: 4.0 }], &logits, &history, 40_000);
    check_frequencies(&[Stage::Typical(0.8)], &logits, &history, 40_000);
    check_frequencies(&[Stage::TopNSigma(0.9), Stage::Temperature(2.0)], &logits, &history, 40_000);
    check_frequencies(&[Stage::Xtc { threshold: 0.15, probability: 0.25 }], &logits, &history, 40_000);
    let dry = Stage::Dry(Dry { multiplier: 1.5, base: 2.0, allowed: 1, window: 0 });
    check_frequencies(&[dry], &logits, &[3, 6, 1, 3, 6], 40_000);
    let still = |version, target| Stage::Mirostat(Mirostat { version, target, rate: 0.0, looked_at: 100 });
    check_frequencies(&[still(1, 1.0)], &logits, &history, 40_000);
    check_frequencies(&[still(2, 1.2)], &logits, &history, 40_000);
}

/// The whole chain in an order that hosts use, over a vocabulary of some size.
#[test]
fn a_long_chain_draws_what_it_should() {
    let logits: Vec<f32> = row(400, 5).iter().map(|l| l / 2.0).collect();
    let history: Vec<i32> = (0..60).map(|i| (i * i) % 23).collect();
    let chain = [
        Stage::Bias { token: 17, value: 3.0 },
        Stage::Repetition { penalty: 1.25, window: 16 },
        Stage::Presence { penalty: 0.5, window: 8 },
        Stage::Frequency { penalty: 0.25, window: 0 },
        Stage::Dry(Dry { multiplier: 0.75, base: 1.5, allowed: 2, window: 0 }),
        Stage::DryBreaker(13),
        Stage::TopNSigma(2.5),
        Stage::TopK(60),
        Stage::Typical(0.97),
        Stage::TopP(0.95),
        Stage::MinP(0.02),
        Stage::Xtc { threshold: 0.05, probability: 0.5 },
        Stage::Temperature(1.5),
    ];
    check_frequencies(&chain, &logits, &history, 60_000);
}

#[test]
fn a_seed_decides_everything() {
    let logits = row(300, 9);
    let stages = [Stage::Temperature(1.0)];
    let tokens = |seed| -> Vec<i32> {
        let mut sampler = Sampler::new(&stages, seed).unwrap();
        (0..50).map(|_| sampler.sample(&logits, &[]).unwrap()).collect()
    };
    assert_eq!(tokens(1), tokens(1));
    assert_ne!(tokens(1), tokens(2));
    let mut reseeded = Sampler::new(&stages, 8).unwrap();
    reseeded.reseed(1);
    assert_eq!((0..50).map(|_| reseeded.sample(&logits, &[]).unwrap()).collect::<Vec<_>>(), tokens(1));
}

#[test]
fn snapshots_and_undo_bring_the_same_tokens_back() {
    let logits = row(300, 9);
    let mirostat = Stage::Mirostat(Mirostat { version: 2, target: 3.0, rate: 0.5, looked_at: 0 });
    let mut sampler = Sampler::new(&[Stage::Xtc { threshold: 0.1, probability: 0.5 }, mirostat], 3).unwrap();
    for _ in 0..10 {
        let state = sampler.state();
        let first = sampler.sample(&logits, &[]).unwrap();
        sampler.undo();
        assert_eq!(sampler.state(), state);
        let mut twin = sampler.clone();
        assert_eq!(sampler.sample(&logits, &[]).unwrap(), first);
        assert_eq!(twin.sample(&logits, &[]).unwrap(), first);
        let ahead: Vec<i32> = (0..5).map(|_| twin.sample(&logits, &[]).unwrap()).collect();
        assert_ne!(twin.state().to_bits()[1], state.to_bits()[1], "mu moves");
        twin.restore(State::from_bits(state.to_bits()));
        assert_eq!(twin.sample(&logits, &[]).unwrap(), first);
        assert_eq!((0..5).map(|_| twin.sample(&logits, &[]).unwrap()).collect::<Vec<_>>(), ahead);
    }
}

#[test]
fn faults_never_become_tokens() {
    let plain = Stage::Temperature(1.0);
    for stages in [&[][..], &[plain], &[Stage::TopK(2), plain], &[Stage::Bias { token: 0, value: f32::NEG_INFINITY }]] {
        for place in [0, 4, 8] {
            for bad in [f32::NAN, f32::INFINITY] {
                let mut logits = row(9, 1);
                logits[place] = bad;
                let mut sampler = Sampler::new(stages, 1).unwrap();
                let state = sampler.state();
                let e = sampler.sample(&logits, &[]).unwrap_err();
                assert_eq!((e.kind(), e.offset()), (Kind::NumericFault, Some(place as u64)));
                assert_eq!(sampler.state(), state);
            }
        }
        let e = Sampler::new(stages, 1).unwrap().sample(&[f32::NEG_INFINITY; 9], &[]).unwrap_err();
        assert_eq!(e.kind(), Kind::NumericFault);
    }
}

#[test]
fn nothing_left_is_no_valid_token() {
    let ban = |token| Stage::Bias { token, value: f32::NEG_INFINITY };
    let mut sampler = Sampler::new(&[ban(0), ban(1), Stage::Bias { token: 1, value: 9.0 }, Stage::TopP(0.5), Stage::MinP(0.1)], 1).unwrap();
    assert_eq!(sampler.sample(&[1.0, 2.0], &[]).unwrap_err().kind(), Kind::NoValidToken);
    assert_eq!(sampler.sample(&[1.0, 2.0, -9.0], &[]).unwrap(), 2);
}

#[test]
fn extreme_values_stay_numbers() {
    let stages = [
        Stage::Frequency { penalty: f32::MIN, window: 0 },
        Stage::Repetition { penalty: f32::MIN_POSITIVE, window: 0 },
        Stage::Temperature(stage::COLDEST),
        Stage::TopP(0.9),
    ];
    let token = Sampler::new(&stages, 1).unwrap().sample(&[f32::MIN, f32::MAX, f32::NEG_INFINITY, 1.0], &[0, 0, 1, 1, 2, 2]).unwrap();
    assert!((0..2).contains(&token), "{token}");
    let cold = Sampler::new(&[Stage::Temperature(stage::COLDEST)], 1).unwrap().sample(&[-3e38, -2e38], &[]);
    assert!(cold.is_ok());
}

#[test]
fn meaningless_stages_are_refused() {
    let bad = [
        Stage::Temperature(-1.0),
        Stage::Temperature(f32::NAN),
        Stage::Temperature(f32::INFINITY),
        Stage::TopP(1.5),
        Stage::TopP(f32::NAN),
        Stage::MinP(-0.1),
        Stage::Repetition { penalty: 0.0, window: 0 },
        Stage::Presence { penalty: f32::INFINITY, window: 0 },
        Stage::Frequency { penalty: f32::NAN, window: 0 },
        Stage::Bias { token: 0, value: f32::INFINITY },
        Stage::Bias { token: 0, value: f32::NAN },
        Stage::Typical(1.1),
        Stage::TopNSigma(-1.0),
        Stage::TopNSigma(f32::INFINITY),
        Stage::Xtc { threshold: -0.1, probability: 0.5 },
        Stage::Xtc { threshold: 0.1, probability: f32::NAN },
        Stage::Mirostat(Mirostat { version: 2, target: f32::NAN, rate: 0.1, looked_at: 0 }),
        Stage::Mirostat(Mirostat { version: 2, target: 1.0, rate: -0.1, looked_at: 0 }),
        Stage::Mirostat(Mirostat { version: 1, target: 1.0, rate: 0.1, looked_at: 1 }),
        Stage::Dry(Dry { multiplier: -1.0, base: 1.0, allowed: 1, window: 0 }),
        Stage::Dry(Dry { multiplier: 1.0, base: 0.5, allowed: 1, window: 0 }),
        Stage::Dry(Dry { multiplier: 1.0, base: 1.0, allowed: 0, window: 0 }),
    ];
    for stage in bad {
        let e = Sampler::new(&[Stage::Greedy, stage], 1).err().unwrap_or_else(|| panic!("{stage:?} was accepted"));
        assert_eq!((e.kind(), e.offset()), (Kind::InvalidArgument, Some(1)), "{stage:?}");
    }
    assert_eq!(Sampler::new(&[Stage::Bias { token: -1, value: 0.0 }], 1).err().map(|e| e.kind()), Some(Kind::InvalidToken));
    for stage in [Stage::Bias { token: 10, value: 0.0 }, Stage::DryBreaker(10)] {
        let sampler = Sampler::new(&[stage], 1).unwrap();
        assert!(sampler.check_vocab(11).is_ok());
        assert_eq!(sampler.check_vocab(10).unwrap_err().kind(), Kind::InvalidToken);
    }
    let mirostat = Stage::Mirostat(Mirostat { version: 2, target: 1.0, rate: 0.1, looked_at: 0 });
    let e = Sampler::new(&[Stage::TopK(3), mirostat, Stage::TopP(0.5)], 1).err().unwrap();
    assert_eq!((e.kind(), e.offset()), (Kind::InvalidArgument, Some(1)));
}

/// What a greedy stage leaves can still be ruled out by one after it.
#[test]
fn stages_after_greedy_count() {
    let out = |token| Stage::Bias { token, value: f32::NEG_INFINITY };
    let run = |stages: &[Stage]| Sampler::new(stages, 1).unwrap().sample(&[1.0, 2.0], &[]).map_err(|e| e.kind());
    assert_eq!(run(&[Stage::Greedy, out(1)]), Err(Kind::NoValidToken));
    assert_eq!(run(&[Stage::Greedy, out(0)]), Ok(1));
    assert_eq!(run(&[out(1), Stage::Greedy]), Ok(0));
}

/// A hook that keeps what it saw and does what it is told.
struct Scripted {
    seen: std::sync::Mutex<Vec<(Vec<f32>, Vec<i32>)>>,
    does: fn(&mut [f32]) -> Result<()>,
}

impl Hook for Scripted {
    fn call(&self, row: &mut [f32], history: &[i32]) -> Result<()> {
        assert!(in_hook());
        self.seen.lock().unwrap().push((row.to_vec(), history.to_vec()));
        (self.does)(row)
    }
}

fn hooked(stages: &[Stage], does: fn(&mut [f32]) -> Result<()>) -> (Sampler, Arc<Scripted>) {
    let hook = Arc::new(Scripted { seen: Default::default(), does });
    let mut sampler = Sampler::new(stages, 1).unwrap();
    assert!(sampler.wants_hook());
    sampler.set_hook(Some(Arc::clone(&hook) as Arc<dyn Hook>));
    (sampler, hook)
}

#[test]
fn a_hook_stands_at_its_place() {
    let out = f32::NEG_INFINITY;
    // After a cut it sees what is left, and can turn it around, but not bring back what is gone.
    let (mut sampler, hook) = hooked(&[Stage::TopK(2), Stage::Hook, Stage::Greedy], |row| {
        row[0] = 9.0;
        row[2] = -1.0;
        Ok(())
    });
    assert_eq!(sampler.sample(&[0.0, 1.0, 2.0], &[5, 6]).unwrap(), 1);
    assert_eq!(*hook.seen.lock().unwrap(), [(vec![out, 1.0, 2.0], vec![5, 6])]);
    // First, it sees all.
    let (mut sampler, hook) = hooked(&[Stage::Hook], |row| {
        row.fill(f32::NEG_INFINITY);
        row[1] = 0.0;
        Ok(())
    });
    assert_eq!(sampler.sample(&[3.0, out, 2.0], &[]).unwrap_err().kind(), Kind::NoValidToken);
    assert_eq!(sampler.sample(&[3.0, -8.0, 2.0], &[]).unwrap(), 1);
    assert_eq!(hook.seen.lock().unwrap()[1].0, [3.0, -8.0, 2.0]);
    assert!(!in_hook());
}

#[test]
fn a_hook_that_fails_changes_nothing() {
    let coin = Stage::Xtc { threshold: 0.9, probability: 0.5 };
    let (mut sampler, _) = hooked(&[coin, Stage::Hook], |_| Err(Error::new(Kind::Busy, "later")));
    let state = sampler.state();
    assert_eq!(sampler.sample(&[1.0, 2.0], &[]).unwrap_err().kind(), Kind::Busy);
    assert_eq!(sampler.state(), state);
    let bad: [fn(&mut [f32]) -> Result<()>; 2] = [
        |row| {
            row[1] = f32::NAN;
            Ok(())
        },
        |row| {
            row[1] = f32::INFINITY;
            Ok(())
        },
    ];
    for does in bad {
        let (mut sampler, _) = hooked(&[Stage::Hook], does);
        let e = sampler.sample(&[1.0, 2.0], &[]).unwrap_err();
        assert_eq!((e.kind(), e.name(), e.offset()), (Kind::NumericFault, Some("hook"), Some(1)));
    }
    let mut without = Sampler::new(&[Stage::Hook], 1).unwrap();
    assert_eq!(without.sample(&[1.0], &[]).unwrap_err().kind(), Kind::InvalidState);
}
