//! Tokens drawn from what a device hands out of a row of logits, beside the same recipes over the row itself, which stays on the device otherwise.
#![allow(unsafe_code)] // a function of the driver on the host

mod support;

use metrale::engine::{self, Chooser, Engine, Sequence, SequenceOptions, decode_step, forward};
use metrale::options::{Compute, LoadOptions, Synthetic};
use metrale::sampling::{Dry, Sampler, Stage, logprob};
use metrale::tensor::DType;
use serde_json::json;
use std::sync::Arc;
use support::Scratch;

const VOCAB: usize = 1000;
const STEPS: usize = 6;

fn load() -> Arc<Engine> {
    let config = json!({
        "model_type": "llama", "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32, "max_position_embeddings": 256, "rope_theta": 10000.0,
    });
    let folder = Scratch::new("draws");
    folder.file("config.json", config.to_string());
    let synthetic = Some(Synthetic::of(DType::BF16, 7));
    let options = LoadOptions { compute: Some(Compute::Fast), threads: 1, synthetic, device: 1, ..LoadOptions::default() };
    engine::load(folder.path(), &options, None).unwrap()
}

/// Bytes that the driver on the host has copied to it; a real one does not tell.
fn copied() -> Option<u64> {
    // SAFETY: the driver is open, since a model was loaded with it, and its function takes nothing.
    unsafe {
        let driver = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        let function = libc::dlsym(driver, c"shim_copied".as_ptr());
        (!function.is_null()).then(|| std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> u64>(function)())
    }
}

fn prompts(engine: &Arc<Engine>) -> [Sequence; 2] {
    [[3, 1, 4, 1, 5], [2, 7, 1, 8, 2]].map(|prompt| {
        let mut sequence = Sequence::new(engine, &SequenceOptions::default()).unwrap();
        sequence.prefill(&prompt).unwrap();
        sequence
    })
}

fn chooser(stages: &[Stage], seed: u64, record_logprob: bool) -> Chooser {
    let mut chooser = Chooser::new(Sampler::new(stages, seed).unwrap());
    (chooser.ignore_end, chooser.record_logprob) = (true, record_logprob);
    chooser
}

/// A run's tokens and their log-probabilities, the bytes that came from the device after the first step, and the rows after the last.
type Run = (Vec<[i32; 2]>, Vec<[Option<f32>; 2]>, Option<u64>, [Vec<f32>; 2]);

/// As hosts do it.
fn steps(engine: &Arc<Engine>, stages: &[Stage], record_logprob: bool) -> Run {
    let (mut all, mut run) = (prompts(engine), (Vec::new(), Vec::new(), None, [Vec::new(), Vec::new()]));
    let mut choosers = [1, 2].map(|seed| chooser(stages, seed, record_logprob));
    let mut before = None;
    for step in 0..STEPS {
        let mut tokens = [0; 2];
        decode_step(&mut all.iter_mut().collect::<Vec<_>>(), &mut choosers.iter_mut().collect::<Vec<_>>(), &mut tokens).unwrap();
        run.0.push(tokens);
        run.1.push([0, 1].map(|i: usize| choosers[i].last_logprob));
        if step == 0 {
            before = copied();
        }
    }
    run.2 = before.zip(copied()).map(|(before, after)| after - before);
    run.3 = [0, 1].map(|i| all[i].logits().unwrap().to_vec());
    run
}

/// With every row looked at here.
fn by_rows(engine: &Arc<Engine>, stages: &[Stage]) -> Run {
    let (mut all, mut run) = (prompts(engine), (Vec::new(), Vec::new(), None, [Vec::new(), Vec::new()]));
    let mut samplers = [1, 2].map(|seed| Sampler::new(stages, seed).unwrap());
    for _ in 0..STEPS {
        let (mut tokens, mut logprobs) = ([0; 2], [None; 2]);
        for (i, (sequence, sampler)) in all.iter().zip(&mut samplers).enumerate() {
            tokens[i] = sampler.sample(sequence.logits().unwrap(), sequence.tokens()).unwrap();
            let mut found = [0.0];
            logprob(sequence.logits().unwrap(), &[tokens[i]], &mut found).unwrap();
            logprobs[i] = Some(found[0]);
        }
        forward(&mut all.iter_mut().collect::<Vec<_>>(), &tokens).unwrap();
        run.0.push(tokens);
        run.1.push(logprobs);
    }
    run.3 = [0, 1].map(|i| all[i].logits().unwrap().to_vec());
    run
}

#[test]
fn tokens_are_those_of_the_whole_row() {
    if !support::is_child("tokens_are_those_of_the_whole_row", &[]) {
        return;
    }
    let engine = load();
    let (hot, k, p, m) = (Stage::Temperature(0.8), Stage::TopK(40), Stage::TopP(0.9), Stage::MinP(0.3));
    let penalty = Stage::Repetition { penalty: 1.3, window: 0 };
    let dry = Stage::Dry(Dry { multiplier: 0.8, base: 1.75, allowed: 1, window: 0 });
    // Recipes, and whether no row may be needed for them.
    let recipes: [(&[Stage], bool); 8] = [
        (&[], true),
        (&[k, p, hot], true),
        (&[hot, k], true),
        (&[penalty, dry, k, Stage::Typical(0.9), hot], true),
        (&[Stage::TopK(127), Stage::Xtc { threshold: 0.001, probability: 0.5 }], true),
        (&[hot, m], false),
        (&[hot, p], false),
        (&[hot], false),
    ];
    for (stages, without_rows) in recipes {
        let (tokens, logprobs, bytes, rows) = steps(&engine, stages, false);
        let wanted = by_rows(&engine, stages);
        assert_eq!(tokens, wanted.0, "{stages:?}");
        assert!(rows == wanted.3, "{stages:?}: the rows themselves");
        assert!(logprobs.iter().flatten().all(Option::is_none));
        println!("{stages:?}: {bytes:?} bytes of rows");
        assert!(!without_rows || bytes.is_none_or(|bytes| bytes == 0), "{stages:?}: {bytes:?} bytes");
        let (tokens, logprobs, ..) = steps(&engine, stages, true);
        assert_eq!((tokens, logprobs), (wanted.0, wanted.1), "{stages:?}");
    }
    // A recipe without any cut does need rows, so the count is one.
    let (.., bytes, _) = steps(&engine, &[hot], false);
    assert!(bytes.is_none_or(|bytes| bytes as usize >= (STEPS - 1) * 2 * VOCAB * 4), "{bytes:?}");
}
