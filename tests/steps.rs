//! Bounded work against the blocking calls: the same bits however the work is cut, and a sequence exactly as before wherever work
//! was cancelled, dropped or is still under way.
//!
//! Weights are made up, so that the tests need no checkpoint: bits are compared, not meanings.

mod support;

use metrale::engine::{self, Chooser, Engine, Sequence, SequenceOptions, StepState, Stepped, decode_step, step, step_estimate};
use metrale::error::Kind;
use metrale::options::{Compute, LoadOptions, Synthetic};
use metrale::sampling::{Sampler, Stage};
use metrale::tensor::DType;
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use support::models::VOCAB;
use support::{Random, Scratch, models};

fn load(name: &str, config: &Value, threads: usize) -> Arc<Engine> {
    let folder = Scratch::new(&format!("steps-{name}-{threads}-{:?}", std::thread::current().id()));
    folder.file("config.json", config.to_string());
    let synthetic = Some(Synthetic::of(DType::Q8_0, 7));
    let options = LoadOptions {
        compute: Some(Compute::Fast),
        threads,
        synthetic,
        device: support::device(),
        deterministic: true,
        ..LoadOptions::default()
    };
    engine::load(folder.path(), &options, None).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn empty(engine: &Arc<Engine>) -> Sequence {
    Sequence::new(engine, &SequenceOptions { context: 1000 }).unwrap()
}

fn chooser(seed: u64) -> Chooser {
    let mut chooser = Chooser::new(Sampler::new(&[Stage::Temperature(0.9)], seed).unwrap());
    chooser.ignore_end = true;
    chooser
}

fn bits(sequence: &Sequence) -> Vec<u32> {
    sequence.logits().map_or(Vec::new(), |row| row.iter().map(|v| v.to_bits()).collect())
}

fn tokens(random: &mut Random, n: usize) -> Vec<i32> {
    (0..n).map(|_| random.below(VOCAB) as i32).collect()
}

/// A sequence with its chooser, and its blocking twin.
struct Pair {
    sequence: Sequence,
    chooser: Chooser,
    twin: Sequence,
    twin_chooser: Chooser,
}

impl Pair {
    fn new(engine: &Arc<Engine>, seed: u64) -> Pair {
        Pair { sequence: empty(engine), chooser: chooser(seed), twin: empty(engine), twin_chooser: chooser(seed) }
    }

    /// Does with the twin what the step said it did.
    fn follow(&mut self, stepped: &Stepped, read: &[i32], what: &str) {
        if stepped.read > 0 {
            self.twin.prefill(&read[..stepped.read]).unwrap();
        }
        if let Some(token) = stepped.token {
            let mut produced = [-1];
            decode_step(&mut [&mut self.twin], &mut [&mut self.twin_chooser], &mut produced).unwrap();
            assert_eq!(produced[0], token, "{what}: another token");
        }
        self.same(what);
    }

    fn same(&self, what: &str) {
        assert_eq!(self.sequence.tokens(), self.twin.tokens(), "{what}");
        assert!(bits(&self.sequence) == bits(&self.twin), "{what}: bits differ after {} tokens", self.twin.len());
    }
}

/// Budgets from nothing at all to more than any slice takes.
fn budget(random: &mut Random) -> Option<Duration> {
    match random.below(8) {
        0 => Some(Duration::from_nanos(1)),
        1 => None,
        n => Some(Duration::from_nanos(1000 + random.below(20_000 << n) as u64)),
    }
}

#[test]
fn steps_give_the_bits_of_blocking_calls_however_they_are_cut() {
    for (name, config) in models::wide() {
        for threads in [1, 2] {
            let engine = load(name, &config, threads);
            let mut random = Random(0xfeed + threads as u64);
            let mut pairs: Vec<Pair> = (0..3).map(|i| Pair::new(&engine, i)).collect();
            let mut queues: Vec<Vec<i32>> = vec![Vec::new(); 3];
            let mut unfinished = 0;
            for round in 0..120 {
                let what = format!("{name}, {threads} threads, round {round}");
                for (pair, queue) in pairs.iter_mut().zip(&mut queues) {
                    if pair.sequence.is_empty() && queue.is_empty() || pair.sequence.len() < 300 && random.below(25) == 0 {
                        let n = 1 + random.below(90);
                        let more = tokens(&mut random, n);
                        pair.sequence.feed(&more).unwrap();
                        queue.extend(more);
                    }
                }
                // Now and then something else is done with a sequence whose slice is under way.
                let one = random.below(3);
                match random.below(14) {
                    0 => {
                        let more = tokens(&mut random, 3);
                        pairs[one].sequence.prefill(&more).unwrap();
                        pairs[one].twin.prefill(&more).unwrap();
                    }
                    1 => {
                        let fork = pairs[one].sequence.fork().unwrap();
                        assert!(fork.tokens() == pairs[one].twin.tokens() && bits(&fork) == bits(&pairs[one].twin), "{what}: fork");
                    }
                    2 if !pairs[one].sequence.is_empty() => {
                        let bytes = pairs[one].sequence.snapshot().unwrap().to_bytes().unwrap();
                        let kept = engine::Snapshot::from_bytes(&engine, &bytes).unwrap();
                        pairs[one].sequence.restore(&kept).unwrap();
                    }
                    _ => {}
                }
                pairs.iter().for_each(|p| p.same(&what));
                let few = random.below(6) == 0;
                let mut sequences: Vec<&mut Sequence> = Vec::new();
                let mut choosers: Vec<&mut Chooser> = Vec::new();
                let listed = if few { one..one + 1 } else { 0..3 };
                for pair in &mut pairs[listed.clone()] {
                    sequences.push(&mut pair.sequence);
                    choosers.push(&mut pair.chooser);
                }
                let mut out = vec![Stepped::default(); sequences.len()];
                step(&mut sequences, &mut choosers, budget(&mut random), &mut out).unwrap();
                for (index, stepped) in listed.zip(&out) {
                    unfinished += usize::from(matches!(stepped.state, StepState::Unfinished));
                    pairs[index].follow(stepped, &queues[index], &what);
                    queues[index].drain(..stepped.read);
                    assert_eq!(pairs[index].sequence.queued(), queues[index].len(), "{what}");
                }
            }
            assert!(unfinished > 20, "{name}: only {unfinished} of the results were unfinished");
            // Without a limit everything is read, and then each produces.
            for round in 0..2 {
                for (pair, queue) in pairs.iter_mut().zip(&mut queues) {
                    let wanted = queue.len();
                    let mut out = [Stepped::default()];
                    step(&mut [&mut pair.sequence], &mut [&mut pair.chooser], None, &mut out).unwrap();
                    assert!(matches!(out[0].state, StepState::Complete) && out[0].read == wanted, "{name} {round}: {:?}", out[0]);
                    assert_eq!(out[0].token.is_some(), wanted == 0);
                    pair.follow(&out[0], queue, name);
                    queue.clear();
                }
            }
        }
    }
}

/// Whatever arrives first, the cancel or the end: the sequence is as before, or holds all of it.
#[test]
fn a_cancelled_call_changes_nothing() {
    for (name, config) in models::wide() {
        let engine = load(name, &config, 2);
        let mut random = Random(3);
        let mut pair = Pair::new(&engine, 1);
        let start = tokens(&mut random, 20);
        pair.sequence.prefill(&start).unwrap();
        pair.twin.prefill(&start).unwrap();
        let (mut cancelled, mut done) = (0, 0);
        // A fast machine needs shorter waits to meet a call in its middle.
        for round in 0..240 {
            if round >= 24 && cancelled > 0 {
                break;
            }
            let what = format!("{name}, round {round}");
            let more = tokens(&mut random, 250);
            let wait = random.below(4000 >> (round / 24)) as u64;
            let canceller = Arc::clone(pair.sequence.canceller());
            let whole = round % 3 == 0;
            let begun = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let (engine, begun) = (&engine, &begun);
                scope.spawn(move || {
                    while !begun.load(Ordering::Acquire) {
                        std::hint::spin_loop();
                    }
                    std::thread::sleep(Duration::from_micros(wait));
                    if whole { engine.cancel() } else { canceller.cancel() }
                });
                begun.store(true, Ordering::Release);
                match pair.sequence.prefill(&more) {
                    Ok(()) => {
                        done += 1;
                        assert_eq!(pair.sequence.len(), 270, "{what}");
                        pair.sequence.truncate(20).unwrap();
                    }
                    Err(e) => {
                        cancelled += 1;
                        assert!(e.kind() == Kind::Cancelled && e.retry(), "{what}: {e}");
                    }
                }
            });
            pair.same(&what);
            let mut produced = [[-1], [-1]];
            decode_step(&mut [&mut pair.sequence], &mut [&mut pair.chooser], &mut produced[0]).unwrap();
            decode_step(&mut [&mut pair.twin], &mut [&mut pair.twin_chooser], &mut produced[1]).unwrap();
            assert_eq!(produced[0], produced[1], "{what}");
            pair.same(&what);
            pair.sequence.truncate(20).unwrap();
            pair.twin.truncate(20).unwrap();
        }
        assert!(cancelled > 0, "{name}: none of {done} calls was cancelled");
    }
}

#[test]
fn a_cancel_drops_what_waits_and_touches_nothing_else() {
    let (name, config) = models::wide().swap_remove(0);
    let engine = load(name, &config, 1);
    let mut random = Random(5);
    let mut pairs: Vec<Pair> = (0..2).map(|i| Pair::new(&engine, i)).collect();
    // With nothing to do, a cancel does nothing.
    pairs[0].sequence.canceller().cancel();
    let prompt = tokens(&mut random, 200);
    for pair in &mut pairs {
        pair.sequence.feed(&prompt).unwrap();
    }
    let [a, b] = &mut pairs[..] else { unreachable!() };
    let mut out = vec![Stepped::default(); 2];
    let mut go = |a: &mut Pair, b: &mut Pair, budget| {
        step(&mut [&mut a.sequence, &mut b.sequence], &mut [&mut a.chooser, &mut b.chooser], budget, &mut out).unwrap();
        out.clone()
    };
    let out = go(a, b, Some(Duration::from_nanos(1)));
    assert!(matches!(out[0].state, StepState::Unfinished) && a.sequence.is_busy() && a.sequence.is_empty());
    a.sequence.canceller().cancel();
    let out = go(a, b, None);
    assert!(matches!(out[0].state, StepState::Cancelled) && out[0].read == 0 && !a.sequence.is_busy(), "{:?}", out[0]);
    assert!(matches!(out[1].state, StepState::Complete) && out[1].read == 200, "{:?}", out[1]);
    b.follow(&out[1], &prompt, "the other one");
    // The next step has nothing to do for the first one: it holds no token.
    let out = go(a, b, None);
    assert!(matches!(&out[0].state, StepState::Failed(e) if e.kind() == Kind::InvalidState), "{:?}", out[0]);
    b.follow(&out[1], &[], "the other one");
    // Fed again, it works again.
    a.sequence.feed(&prompt).unwrap();
    assert!(step_estimate(&[&a.sequence, &b.sequence]).unwrap() > Duration::ZERO);
    let out = go(a, b, None);
    a.follow(&out[0], &prompt, "fed again");
    b.follow(&out[1], &[], "the other one");
}

#[test]
fn what_cannot_be_read_is_refused_when_it_is_fed() {
    let (name, config) = models::wide().swap_remove(0);
    let engine = load(name, &config, 1);
    let mut sequence = Sequence::new(&engine, &SequenceOptions { context: 10 }).unwrap();
    assert_eq!(sequence.feed(&[1, VOCAB as i32]).unwrap_err().kind(), Kind::InvalidToken);
    sequence.feed(&[1; 6]).unwrap();
    let e = sequence.feed(&[1; 5]).unwrap_err();
    assert_eq!((e.kind(), e.available()), (Kind::ContextFull, Some(4)));
    assert_eq!(sequence.queued(), 6);
    // Another call took the room.
    sequence.prefill(&[2; 8]).unwrap();
    let mut out = [Stepped::default()];
    step(&mut [&mut sequence], &mut [&mut chooser(1)], None, &mut out).unwrap();
    assert!(matches!(&out[0].state, StepState::Failed(e) if e.kind() == Kind::ContextFull), "{:?}", out[0]);
    assert_eq!((sequence.len(), sequence.queued()), (8, 6));
}

/// Blocking calls on other sequences, from another thread, while a slice is under way.
#[test]
fn blocking_calls_run_beside_steps() {
    let (name, config) = models::wide().swap_remove(1);
    let engine = load(name, &config, 2);
    let mut random = Random(9);
    let prompt = tokens(&mut random, 300);
    let mut expected = empty(&engine);
    expected.prefill(&prompt).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for _ in 0..6 {
                let mut sequence = empty(&engine);
                sequence.prefill(&prompt).unwrap();
                assert!(bits(&sequence) == bits(&expected), "blocking");
            }
        });
        for _ in 0..3 {
            let mut pair = Pair::new(&engine, 4);
            pair.sequence.feed(&prompt).unwrap();
            let mut out = [Stepped::default()];
            while pair.sequence.queued() > 0 {
                step(&mut [&mut pair.sequence], &mut [&mut pair.chooser], Some(Duration::from_micros(50)), &mut out).unwrap();
            }
            assert!(bits(&pair.sequence) == bits(&expected), "steps");
        }
    });
}
