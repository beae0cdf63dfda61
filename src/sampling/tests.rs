//! Every stage against its definition written out in f64, draws against the probabilities they should have.

use proptest::prelude::{Just, ProptestConfig, Strategy, any, prop, prop_assert, prop_assert_eq, prop_oneof, proptest};

use super::*;
use crate::error::Kind;

/// `n` logits that look like a model's: a few high, most low, all multiples of 1/8 (so that many of them tie).
pub fn row(n: usize, seed: u64) -> Vec<f32> {
    let mut rng = Rng::new(seed);
    (0..n).map(|_| ((rng.unit() + rng.unit() - 1.0) * 64.0).round() as f32 / 8.0).collect()
}

/// What the stages keep, with logits in f64; `None` when a threshold is too close to call in f32.
fn by_definition(stages: &[Stage], logits: &[f32], history: &[i32]) -> Option<Vec<(usize, f64)>> {
    let mut list: Vec<(usize, f64)> = logits.iter().map(|&l| f64::from(l)).enumerate().collect();
    let newest = |window: u32| &history[if window == 0 { 0 } else { history.len().saturating_sub(window as usize) }..];
    let best_first = |a: &(usize, f64), b: &(usize, f64)| b.1.partial_cmp(&a.1).unwrap().then(a.0.cmp(&b.0));
    for stage in stages {
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
                        c.1 = if c.1 > 0.0 { c.1 / f64::from(penalty) } else { c.1 * f64::from(penalty) };
                    }
                }
            }
            Stage::Presence { penalty, window } => {
                for c in &mut list {
                    if newest(window).contains(&(c.0 as i32)) {
                        c.1 -= f64::from(penalty);
                    }
                }
            }
            Stage::Frequency { penalty, window } => {
                for c in &mut list {
                    c.1 -= f64::from(penalty) * newest(window).iter().filter(|&&t| t == c.0 as i32).count() as f64;
                }
            }
            Stage::Bias { token, value } => {
                list.iter_mut().filter(|c| c.0 as i32 == token).for_each(|c| c.1 += f64::from(value));
            }
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
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..Default::default() })]

    #[test]
    fn stages_agree_with_their_definition(
        stages in prop::collection::vec(any_stage(1200), 1..6),
        size in 1usize..1200,
        seed in any::<u64>(),
        history in prop::collection::vec(-2i32..1210, 0..40),
    ) {
        let logits = row(size, seed);
        let Some(expected) = by_definition(&stages, &logits, &history) else { return Ok(()) };
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

/// Draws `draws` tokens and checks each frequency against its probability: within five standard deviations.
fn check_frequencies(stages: &[Stage], logits: &[f32], history: &[i32], draws: u32) {
    let list = by_definition(stages, logits, history).expect("thresholds are not close");
    let max = list.iter().map(|c| c.1).fold(f64::NEG_INFINITY, f64::max);
    let total: f64 = list.iter().map(|c| (c.1 - max).exp()).sum();
    let mut sampler = Sampler::new(stages, 42).unwrap();
    let mut seen = vec![0u32; logits.len()];
    for _ in 0..draws {
        seen[sampler.sample(logits, history).unwrap() as usize] += 1;
    }
    for (id, &count) in seen.iter().enumerate() {
        let p = list.iter().find(|c| c.0 == id).map_or(0.0, |c| (c.1 - max).exp() / total);
        let deviation = (p * (1.0 - p) * f64::from(draws)).sqrt();
        let expected = p * f64::from(draws);
        assert!((f64::from(count) - expected).abs() <= 5.0 * deviation + 1e-9, "{stages:?}: token {id} came {count} times, not {expected}");
    }
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
    let mut sampler = Sampler::new(&[Stage::TopP(0.99)], 3).unwrap();
    for _ in 0..10 {
        let state = sampler.state();
        let first = sampler.sample(&logits, &[]).unwrap();
        sampler.undo();
        assert_eq!(sampler.state(), state);
        let mut twin = sampler.clone();
        assert_eq!(sampler.sample(&logits, &[]).unwrap(), first);
        assert_eq!(twin.sample(&logits, &[]).unwrap(), first);
        let ahead: Vec<i32> = (0..5).map(|_| twin.sample(&logits, &[]).unwrap()).collect();
        twin.restore(state);
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
    ];
    for stage in bad {
        let e = Sampler::new(&[Stage::Greedy, stage], 1).err().unwrap_or_else(|| panic!("{stage:?} was accepted"));
        assert_eq!((e.kind(), e.offset()), (Kind::InvalidArgument, Some(1)), "{stage:?}");
    }
    assert_eq!(Sampler::new(&[Stage::Bias { token: -1, value: 0.0 }], 1).err().map(|e| e.kind()), Some(Kind::InvalidToken));
    let sampler = Sampler::new(&[Stage::Bias { token: 10, value: 0.0 }], 1).unwrap();
    assert!(sampler.check_vocab(11).is_ok());
    assert_eq!(sampler.check_vocab(10).unwrap_err().kind(), Kind::InvalidToken);
}
