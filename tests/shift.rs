//! Tokens taken out of the middle of a sequence: the cache that is left, against a model in f64 that turns its keys itself.

mod support;

use metrale::engine::{self, Engine, Sequence, SequenceOptions};
use metrale::error::Kind;
use metrale::options::{Compute, KvChoice, LoadOptions, Synthetic};
use metrale::tensor::DType;
use serde_json::json;
use std::path::Path;
use std::sync::Arc;
use support::llama64::{Llama, difference};
use support::{Random, Scratch};

fn load(path: &Path, compute: Compute, kv_type: KvChoice, synthetic: bool) -> Arc<Engine> {
    let synthetic = synthetic.then_some(Synthetic::of(DType::F32, 3));
    let options =
        LoadOptions { compute: Some(compute), kv_type: Some(kv_type), context: 600, threads: 2, synthetic, ..LoadOptions::default() };
    engine::load(path, &options, None).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn empty(engine: &Arc<Engine>) -> Sequence {
    Sequence::new(engine, &SequenceOptions::default()).unwrap()
}

fn bits(sequence: &Sequence) -> Vec<u32> {
    sequence.logits().unwrap().iter().map(|v| v.to_bits()).collect()
}

fn tokens(seed: u64, vocab: usize, n: usize) -> Vec<i32> {
    let mut random = Random(seed);
    (0..n).map(|_| random.below(vocab) as i32).collect()
}

/// At the borders of pages, off them, short and long, once and again.
const SHIFTS: [&[(usize, usize)]; 8] =
    [&[(4, 1)], &[(0, 32)], &[(31, 33)], &[(4, 90)], &[(64, 64)], &[(100, 98)], &[(4, 50), (4, 50)], &[(30, 1), (7, 60), (0, 3)]];

#[test]
fn a_shifted_cache_is_attention_over_what_is_left() {
    let folder = support::fixtures().join("llama");
    let model = Llama::read(&folder);
    let all = tokens(17, 320, 206);
    let (prompt, next) = all.split_at(200);
    let cases = [
        (Compute::F32, KvChoice::Auto, 2e-5),
        (Compute::Fast, KvChoice::Auto, 3e-2),
        (Compute::F32, KvChoice::Bf16, 3e-2),
        (Compute::F32, KvChoice::Q8, 3e-2),
    ];
    for (compute, kv_type, allowed) in cases {
        let engine = load(&folder, compute, kv_type, false);
        for shifts in SHIFTS {
            let mut past = model.past();
            let mut sequence = empty(&engine);
            let row = model.read_all(&mut past, prompt);
            sequence.prefill(prompt).unwrap();
            assert!(difference(sequence.logits().unwrap(), &row) < allowed, "{compute:?}: before");
            let before = bits(&sequence);
            let mut left = prompt.to_vec();
            for &(from, count) in shifts {
                past.shift(from, count);
                sequence.shift(from, count).unwrap();
                left.drain(from..from + count);
            }
            assert!(sequence.tokens() == left && bits(&sequence) == before, "the row stays");
            let row = model.read_all(&mut past, next);
            sequence.prefill(next).unwrap();
            let off = difference(sequence.logits().unwrap(), &row);
            assert!(off < allowed, "{compute:?} {kv_type:?} {shifts:?}: {off}");
            // And is something else than a fresh run over what is left, else this would say nothing.
            let mut fresh = empty(&engine);
            fresh.prefill(sequence.tokens()).unwrap();
            assert!(allowed > 1e-4 || difference(fresh.logits().unwrap(), &row) > 10.0 * allowed, "{shifts:?}");
        }
    }
}

/// With one layer keys and values are those of tokens and positions alone, so that a fresh run has the same ones.
#[test]
fn with_one_layer_a_shift_is_a_fresh_run() {
    let folder = Scratch::new("shift-one");
    let config = json!({
        "model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 1024, "rope_theta": 10000.0,
    });
    folder.file("config.json", config.to_string());
    let cases = [
        (Compute::F32, KvChoice::Auto, 1e-5),
        (Compute::Fast, KvChoice::Auto, 1e-2),
        (Compute::F32, KvChoice::Bf16, 1e-2),
        (Compute::F32, KvChoice::Q8, 1e-2),
    ];
    for (compute, kv_type, allowed) in cases {
        let engine = load(folder.path(), compute, kv_type, true);
        let prompt = tokens(5, 64, 200);
        for shifts in SHIFTS {
            let (mut shifted, mut fresh, mut left) = (empty(&engine), empty(&engine), prompt.clone());
            shifted.prefill(&prompt).unwrap();
            for &(from, count) in shifts {
                shifted.shift(from, count).unwrap();
                left.drain(from..from + count);
            }
            fresh.prefill(&left).unwrap();
            for sequence in [&mut shifted, &mut fresh] {
                sequence.prefill(&[1, 2, 3]).unwrap();
            }
            let row: Vec<f64> = fresh.logits().unwrap().iter().map(|v| f64::from(*v)).collect();
            let off = difference(shifted.logits().unwrap(), &row);
            assert!(off < allowed, "{compute:?} {shifts:?}: {off}");
        }
    }
}

#[test]
fn forks_marks_and_ends_are_as_they_should_be() {
    let engine = load(&support::fixtures().join("llama"), Compute::Fast, KvChoice::Auto, false);
    let prompt = tokens(23, 320, 100);
    let mut sequence = empty(&engine);
    sequence.prefill(&prompt[..20]).unwrap();
    let early = sequence.mark().unwrap();
    let at_mark = bits(&sequence);
    sequence.prefill(&prompt[20..60]).unwrap();
    let late = sequence.mark().unwrap();
    sequence.prefill(&prompt[60..]).unwrap();
    let mut fork = sequence.fork().unwrap();
    let before = bits(&sequence);
    sequence.shift(30, 20).unwrap();
    // The fork keeps its pages.
    fork.prefill(&[1, 2]).unwrap();
    let mut fresh = empty(&engine);
    fresh.prefill(&[&prompt[..], &[1, 2]].concat()).unwrap();
    assert!(bits(&fork) == bits(&fresh));
    assert_eq!(sequence.rollback(late).unwrap_err().kind(), Kind::InvalidState);
    for (from, count) in [(0, 81), (81, 0), (80, 1), (usize::MAX, 2), (2, usize::MAX)] {
        let refused = sequence.shift(from, count);
        assert!(matches!(&refused, Err(e) if e.kind() == Kind::InvalidArgument), "{from} {count}: {refused:?}");
    }
    sequence.shift(5, 0).unwrap();
    assert!(bits(&sequence) == before && sequence.len() == 80);
    sequence.rollback(early).unwrap();
    assert!(bits(&sequence) == at_mark && sequence.tokens() == &prompt[..20]);
    // Nothing follows: a cut.
    sequence.prefill(&prompt[20..]).unwrap();
    sequence.shift(20, 80).unwrap();
    assert!(bits(&sequence) == at_mark);
    sequence.shift(0, 20).unwrap();
    assert!(sequence.is_empty());
}

#[test]
fn a_full_sequence_goes_on_without_end() {
    let engine = load(&support::fixtures().join("llama"), Compute::Fast, KvChoice::Auto, false);
    let mut sequence = Sequence::new(&engine, &SequenceOptions { context: 70 }).unwrap();
    for (index, token) in tokens(29, 320, 500).into_iter().enumerate() {
        if sequence.len() == sequence.capacity() {
            assert_eq!(sequence.prefill(&[token]).unwrap_err().kind(), Kind::ContextFull);
            sequence.shift(4, 33).unwrap();
        }
        sequence.prefill(&[token]).unwrap();
        assert!(sequence.logits().unwrap().iter().all(|v| v.is_finite()), "{index}");
    }
}

/// Every family moves its past or says why not, and then nothing has changed.
#[test]
fn families_shift_or_say_why_not() {
    let (mut moved, mut refused) = (Vec::new(), Vec::new());
    for path in support::golden::folders() {
        let options = LoadOptions { compute: Some(Compute::Fast), context: 128, threads: 2, ..LoadOptions::default() };
        let Ok(engine) = engine::load(&path, &options, None) else { continue };
        let kind = engine.info().model_type.clone();
        if moved.contains(&kind) || refused.contains(&kind) {
            continue;
        }
        let mut sequence = empty(&engine);
        if engine.has_encoder() {
            sequence.encode(&[5, 6, 7]).unwrap();
        }
        sequence.prefill(&tokens(3, engine.info().vocab, 60)).unwrap();
        let (before, held) = (bits(&sequence), sequence.tokens().to_vec());
        match sequence.shift(10, 20) {
            Ok(()) => {
                assert_eq!(sequence.tokens(), [&held[..10], &held[30..]].concat());
                sequence.prefill(&[1]).unwrap();
                assert!(sequence.logits().unwrap().iter().all(|v| v.is_finite()), "{kind}");
                moved.push(kind);
            }
            Err(e) => {
                assert!(e.kind() == Kind::Unsupported && e.message().contains("cannot be taken out of the middle"), "{kind}: {e}");
                println!("{kind}: {e}");
                assert!(bits(&sequence) == before && sequence.tokens() == held, "{kind}");
                refused.push(kind);
            }
        }
    }
    println!("shifts: {moved:?}");
    for kind in ["llama", "mixtral", "olmo3", "phi3", "smollm3", "gpt_oss", "gemma3_text"] {
        assert!(moved.iter().any(|m| m == kind), "{kind} does not shift");
    }
    for kind in ["lfm2", "nemotron_h"] {
        assert!(refused.iter().any(|m| m == kind), "{kind} shifts");
    }
    let never = ["deepseek", "kimi", "mamba", "qwen3_next", "qwen3_5", "longcat", "m2m", "nllb", "mistral4", "glm5"];
    assert!(moved.iter().all(|m| never.iter().all(|n| !m.starts_with(n))), "{moved:?}");
}
