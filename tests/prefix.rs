//! Prompts that begin like earlier ones, against a model that keeps nothing: the same bits in every family, however prompts meet, split and
//! end, and never more bytes than were granted.
//!
//! Some weights are made up, so that every kind of recurrent state is there without a checkpoint: bits are compared, not meanings.

mod support;

use metrale::engine::{self, Chooser, Engine, Sequence, SequenceOptions, Snapshot, StepState, Stepped, forward, step};
use metrale::error::Kind;
use metrale::options::{Compute, LoadOptions, Synthetic};
use metrale::sampling::Sampler;
use metrale::tensor::DType;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use support::{Random, Scratch, models};

fn load(path: &Path, synthetic: bool, prefix_bytes: u64) -> Arc<Engine> {
    let synthetic = synthetic.then_some(Synthetic::of(DType::BF16, 7));
    let options = LoadOptions {
        compute: Some(Compute::Fast),
        context: 700,
        threads: 2,
        synthetic,
        prefix_bytes,
        device: support::device(),
        ..LoadOptions::default()
    };
    engine::load(path, &options, None).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn empty(engine: &Arc<Engine>) -> Sequence {
    Sequence::new(engine, &SequenceOptions::default()).unwrap()
}

fn bits(sequence: &Sequence) -> Vec<u32> {
    sequence.logits().unwrap().iter().map(|v| v.to_bits()).collect()
}

/// Rows of a model that keeps nothing, by tokens.
struct Fresh {
    engine: Arc<Engine>,
    rows: HashMap<Vec<i32>, Vec<u32>>,
}

impl Fresh {
    fn row(&mut self, tokens: &[i32]) -> &[u32] {
        self.rows.entry(tokens.to_vec()).or_insert_with(|| {
            let mut fresh = empty(&self.engine);
            fresh.prefill(tokens).unwrap();
            bits(&fresh)
        })
    }

    fn agrees(&mut self, sequence: &Sequence, tokens: &[i32], what: &str) {
        assert_eq!(sequence.tokens(), tokens, "{what}");
        assert!(bits(sequence) == self.row(tokens), "{what}: bits differ after {} tokens", tokens.len());
    }
}

fn tokens(random: &mut Random, vocab: usize, n: usize) -> Vec<i32> {
    (0..n).map(|_| random.below(vocab) as i32).collect()
}

/// Reads `prompt` in steps; what the sequence is between two of them is a fresh run's, too.
fn read_in_steps(fresh: &mut Fresh, sequence: &mut Sequence, prompt: &[i32], budget: Option<Duration>) -> usize {
    let mut chooser = Chooser::new(Sampler::greedy());
    sequence.feed(prompt).unwrap();
    let mut read = 0;
    for _ in 0..100_000 {
        let mut out = [Stepped::default()];
        step(&mut [&mut *sequence], &mut [&mut chooser], budget, &mut out).unwrap();
        read += out[0].read;
        match out[0].state {
            StepState::Unfinished if sequence.is_empty() => {}
            StepState::Unfinished => {
                let held = sequence.tokens().to_vec();
                fresh.agrees(sequence, &held, "between steps");
            }
            StepState::Complete => return read,
            ref other => panic!("{other:?}"),
        }
    }
    panic!("a prompt without end");
}

/// Conversations that branch off one another at any place, in `rounds`; what was reused of how many tokens.
fn converse(name: &str, fresh: &mut Fresh, engine: &Arc<Engine>, rounds: usize) -> (u64, u64) {
    let mut random = Random(0x5eed_0001 + rounds as u64 + name.len() as u64);
    let vocab = engine.info().vocab.min(300);
    let budget = engine.prefix_counts().budget;
    // Cut and continued again and again.
    let mut told: Vec<Vec<i32>> = vec![tokens(&mut random, vocab, 40)];
    let mut parked: Vec<Sequence> = Vec::new();
    let (mut reused, mut read) = (0, 0);
    for round in 0..rounds {
        let earlier = &told[random.below(told.len())];
        let whole = random.below(2) == 0;
        let cut = if whole { earlier.len() } else { 1 + random.below(earlier.len()) };
        let mut held = earlier[..cut].to_vec();
        if held.len() > 400 {
            held.truncate(100);
        }
        let more = 1 + random.below(70);
        held.extend(tokens(&mut random, vocab, more));
        let what = format!("{name} round {round}");
        let mut sequence = empty(engine);
        // In one piece, in pieces, or in steps that end anywhere.
        match random.below(4) {
            0 => sequence.prefill(&held).unwrap(),
            1 => {
                let piece = 1 + random.below(held.len());
                held.chunks(piece).for_each(|piece| sequence.prefill(piece).unwrap());
            }
            2 => assert_eq!(read_in_steps(fresh, &mut sequence, &held, None), held.len(), "{what}"),
            _ => {
                let (first, rest) = held.split_at(held.len() / 2);
                assert_eq!(read_in_steps(fresh, &mut sequence, first, Some(Duration::from_micros(30))), first.len(), "{what}");
                assert_eq!(read_in_steps(fresh, &mut sequence, rest, Some(Duration::from_micros(30))), rest.len(), "{what}");
            }
        }
        fresh.agrees(&sequence, &held, &what);
        let counters = sequence.counters();
        assert!(
            counters.read as usize == held.len() && counters.reused <= counters.read && counters.generated == 0,
            "{what}: {counters:?}"
        );
        (reused, read) = (reused + counters.reused, read + counters.read);
        // A second prompt is undone as a whole, whatever was taken up for it.
        let before = held.len();
        let next = [&told[0][..], &held[..5.min(held.len())]].concat();
        sequence.prefill(&next).unwrap();
        let longer = [&held[..], &next[..]].concat();
        fresh.agrees(&sequence, &longer, &what);
        if random.below(2) == 0 {
            sequence.truncate(before).unwrap();
            fresh.agrees(&sequence, &held, &what);
        } else {
            held = longer;
        }
        for token in tokens(&mut random, vocab, 2) {
            forward(&mut [&mut sequence], &[token]).unwrap();
            held.push(token);
        }
        fresh.agrees(&sequence, &held, &what);
        assert_eq!(sequence.counters().generated, 2, "{what}");
        // Some live on beside the tree, some leave their end to it.
        if random.below(3) == 0 {
            parked.push(sequence);
        } else if random.below(2) == 0 {
            drop(sequence.fork().unwrap());
        }
        parked.truncate(3);
        told.push(held);
        let counts = engine.prefix_counts();
        assert!(counts.bytes <= budget, "{what}: {counts:?}");
    }
    (reused, read)
}

fn folders() -> Vec<PathBuf> {
    let plain = |p: &PathBuf| {
        let name = p.file_name().unwrap().to_string_lossy().into_owned();
        !name.contains('-') || p.starts_with(support::fixtures())
    };
    support::golden::folders().into_iter().filter(plain).collect()
}

#[test]
fn what_is_taken_up_has_the_bits_of_a_fresh_run() {
    let mut engines: Vec<(String, PathBuf, bool, Option<Scratch>)> = Vec::new();
    for (name, config) in models::narrow() {
        let folder = Scratch::new(&format!("prefix-{name}"));
        folder.file("config.json", config.to_string());
        engines.push((name.to_string(), folder.path().to_path_buf(), true, Some(folder)));
    }
    for path in folders() {
        engines.push((path.file_name().unwrap().to_string_lossy().into_owned(), path, false, None));
    }
    for (name, path, synthetic, _folder) in engines {
        let options = LoadOptions { compute: Some(Compute::Fast), context: 700, threads: 2, ..LoadOptions::default() };
        if !synthetic && engine::load(&path, &options, None).is_ok_and(|engine| engine.has_encoder()) {
            let refused = engine::load(&path, &LoadOptions { prefix_bytes: 1, ..options }, None).err().expect("an encoder");
            assert_eq!((refused.kind(), refused.name()), (Kind::Unsupported, Some("prefix_bytes")), "{name}");
            continue;
        }
        let mut fresh = Fresh { engine: load(&path, synthetic, 0), rows: HashMap::new() };
        let rounds = if synthetic { 60 } else { 5 };
        let ample = load(&path, synthetic, 1 << 30);
        let (reused, read) = converse(&name, &mut fresh, &ample, rounds);
        let counts = ample.prefix_counts();
        assert!(counts.evicted == 0 && counts.reused >= reused, "{name}: {counts:?}");
        // A few rounds may miss the places where a state was kept.
        assert!(reused > 0 || !synthetic && ample.is_recurrent(), "{name}: {counts:?}");
        println!("{name}: {reused} of {read} tokens reused, {} bytes in {} entries", counts.bytes, counts.entries);
        assert_eq!(fresh.engine.prefix_counts(), engine::TreeCounts::default());
        if !synthetic {
            continue;
        }
        // Little enough that much has to give way.
        let scarce = load(&path, synthetic, counts.bytes / 5);
        converse(&name, &mut fresh, &scarce, rounds);
        assert!(scarce.prefix_counts().evicted > 0, "{name}: {:?}", scarce.prefix_counts());
    }
}

/// The place where prompts part is kept for models that need a state there, so that the third prompt takes it up.
#[test]
fn recurrent_models_find_the_place_where_prompts_part() {
    for (name, config) in models::narrow() {
        let folder = Scratch::new(&format!("prefix-part-{name}"));
        folder.file("config.json", config.to_string());
        let engine = load(folder.path(), true, 1 << 24);
        let mut fresh = Fresh { engine: load(folder.path(), true, 0), rows: HashMap::new() };
        let mut random = Random(77);
        let system = tokens(&mut random, 48, 150);
        for (turn, least) in [(0, 0), (1, 0), (2, 150), (3, 150)] {
            let prompt = [&system[..], &[turn], &tokens(&mut random, 48, 30)[..]].concat();
            let mut sequence = empty(&engine);
            if turn % 2 == 0 {
                sequence.prefill(&prompt).unwrap()
            } else {
                _ = read_in_steps(&mut fresh, &mut sequence, &prompt, None)
            }
            let reused = sequence.counters().reused;
            assert!(reused >= least && (turn > 0 || reused == 0), "{name} turn {turn}: {reused}");
            assert!(engine.is_recurrent() || turn == 0 || reused == 150, "{name} turn {turn}: {reused}");
        }
        // The same prompt as a whole: a state brings its row, other models compute one token.
        let mut sequence = empty(&engine);
        sequence.prefill(&system).unwrap();
        assert_eq!(sequence.counters().reused, if engine.is_recurrent() { 150 } else { 149 }, "{name}");
        assert_eq!(sequence.counters().passes, u64::from(!engine.is_recurrent()), "{name}");
    }
}

/// Only states that follow from their tokens alone are for others.
#[test]
fn what_came_about_otherwise_is_not_kept() {
    let (name, config) = models::narrow().remove(0);
    let folder = Scratch::new(&format!("prefix-otherwise-{name}"));
    folder.file("config.json", config.to_string());
    let (engine, plain) = (load(folder.path(), true, 1 << 24), load(folder.path(), true, 0));
    let mut fresh = Fresh { engine: plain, rows: HashMap::new() };
    let prompt = tokens(&mut Random(5), 48, 120);
    let mut shifted = empty(&engine);
    shifted.prefill(&prompt).unwrap();
    let before = engine.prefix_counts();
    shifted.shift(10, 30).unwrap();
    let left = shifted.tokens().to_vec();
    shifted.prefill(&prompt[..20]).unwrap();
    let fork = shifted.fork().unwrap();
    let kept = shifted.snapshot().unwrap();
    let mut restored = empty(&engine);
    restored.restore(&kept).unwrap();
    restored.prefill(&prompt[..30]).unwrap();
    drop((shifted, fork, restored));
    let mut saved = empty(&engine);
    saved.restore(&Snapshot::from_bytes(&engine, &kept.to_bytes().unwrap()).unwrap()).unwrap();
    saved.prefill(&prompt[..40]).unwrap();
    drop(saved);
    assert_eq!(engine.prefix_counts().tokens, before.tokens);
    let mut again = empty(&engine);
    again.prefill(&left).unwrap();
    assert_eq!(again.counters().reused, 10);
    fresh.agrees(&again, &left, "after a shift");
    // Cut back to what is exact, a sequence is like any other.
    let mut cut = empty(&engine);
    cut.prefill(&prompt).unwrap();
    cut.shift(50, 10).unwrap();
    cut.truncate(45).unwrap();
    cut.prefill(&left).unwrap();
    fresh.agrees(&cut, &[&prompt[..45], &left[..]].concat(), "after a cut");
    let tokens = engine.prefix_counts().tokens;
    drop(cut);
    assert!(engine.prefix_counts().tokens >= tokens && tokens > before.tokens);
}

/// Sequences of several threads fill and drain one tree.
#[test]
fn threads_share_a_tree() {
    for (name, config) in models::narrow() {
        let folder = Scratch::new(&format!("prefix-threads-{name}"));
        folder.file("config.json", config.to_string());
        let engine = load(folder.path(), true, 40_000);
        let mut fresh = Fresh { engine: load(folder.path(), true, 0), rows: HashMap::new() };
        let mut random = Random(99);
        let system = tokens(&mut random, 48, 60);
        let prompts: Vec<Vec<i32>> = (0..12).map(|i| [&system[..30 + i * 2], &tokens(&mut random, 48, 10 + i * 9)[..]].concat()).collect();
        let rows: Vec<Vec<u32>> = prompts.iter().map(|p| fresh.row(p).to_vec()).collect();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (engine, prompts, rows, name) = (&engine, &prompts, &rows, &name);
                scope.spawn(move || {
                    let mut random = Random(3 + thread);
                    for _ in 0..40 {
                        let which = random.below(prompts.len());
                        let mut sequence = empty(engine);
                        sequence.prefill(&prompts[which]).unwrap();
                        assert!(bits(&sequence) == rows[which], "{name}: thread {thread}");
                        assert!(engine.prefix_counts().bytes <= 40_000);
                    }
                });
            }
        });
        let counts = engine.prefix_counts();
        assert!(counts.hits > 20 && counts.evicted > 0, "{name}: {counts:?}");
    }
}

/// A prompt that is cancelled leaves its sequence as before, what it had taken up included.
#[test]
fn a_failed_prompt_gives_back_what_it_took_up() {
    for (name, config) in models::narrow() {
        let folder = Scratch::new(&format!("prefix-fail-{name}"));
        folder.file("config.json", config.to_string());
        let engine = load(folder.path(), true, 1 << 24);
        let mut random = Random(31);
        let prompt = tokens(&mut random, 48, 300);
        empty(&engine).prefill(&prompt).unwrap();
        let mut sequence = empty(&engine);
        sequence.prefill(&prompt[..20]).unwrap();
        let (before, mut held) = (bits(&sequence), sequence.counters().read);
        let canceller = Arc::clone(sequence.canceller());
        let mut cancelled = 0;
        for _ in 0..300 {
            // Half of it is known, the other half never was.
            let next = [&prompt[20..300], &tokens(&mut random, 48, 300)[..]].concat();
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    std::thread::sleep(Duration::from_micros(100));
                    canceller.cancel();
                });
                match sequence.prefill(&next) {
                    Ok(()) => {
                        sequence.truncate(20).unwrap();
                        held = sequence.counters().read;
                    }
                    Err(e) => {
                        assert_eq!(e.kind(), Kind::Cancelled, "{name}: {e}");
                        cancelled += 1;
                        assert_eq!(sequence.counters().read, held, "{name}");
                    }
                }
            });
            assert!(sequence.tokens() == &prompt[..20] && bits(&sequence) == before, "{name}");
            if cancelled > 2 {
                break;
            }
        }
        assert!(cancelled > 0 && sequence.counters().cancelled == cancelled, "{name}: {cancelled}");
    }
}

/// The plan has room for what is kept.
#[test]
fn plans_count_the_budget() {
    let model = support::fixtures().join("../stories260k/model.gguf");
    let options = LoadOptions { threads: 1, prefix_bytes: 3 << 20, ..LoadOptions::default() };
    let planned = engine::plan(&model, &options, 1).unwrap();
    let without = engine::plan(&model, &LoadOptions { prefix_bytes: 0, ..options.clone() }, 1).unwrap();
    assert!((3 << 20..(3 << 20) + (1 << 20)).contains(&(planned.kv - without.kv)), "{planned:?} {without:?}");
    let engine = engine::load(&model, &options, None).unwrap();
    for first in 0..60 {
        let mut sequence = empty(&engine);
        sequence.prefill(&tokens(&mut Random(first + 1), 500, 200)).unwrap();
    }
    assert!(engine.prefix_counts().evicted > 0 && engine.cache_bytes() <= planned.kv, "{} of {}", engine.cache_bytes(), planned.kv);
}
