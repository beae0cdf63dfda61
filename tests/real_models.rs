//! Real models as their publishers quantised them, beside the same models run by transformers in f32.
//!
//! The story teller of `tests/fixtures` is always there. The others are looked for where `examples/get_model.py` puts them,
//! and skipped, saying so, where they are not. With METRALE_TEST_DEVICE they run on an NVIDIA device. We follow the golden's
//! own tokens, so that one choice between equals does not spoil what comes after it.

mod support;

use metrale::engine::{self, Engine, Sequence, SequenceOptions};
use metrale::options::{Compute, LoadOptions};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Models with goldens. The first lies in the repository, the others in the cache of `examples/get_model.py`.
const MODELS: [&str; 4] = ["stories260k", "smollm2-135m-instruct", "gemma-3-270m", "qwen2.5-coder-0.5b-instruct"];

/// What the order of summation explains (seen: 1e-4).
const EXACT: f32 = 1e-3;

/// How much further than the peer's run a device's may be from the golden: both distances are of one draw of the rounding of 8-bit activations,
/// which another order of sums draws anew (seen: 1.04).
const DRAW: f32 = 1.25;

/// How far llama.cpp's run of the same file is from the golden in one of the best logits, as far as both agree on the prefix: what
/// the fast mode's 8-bit activations may cost at most on the processor.
fn peer_distance(golden: &Value) -> f32 {
    let mut most = 0.0f32;
    for (exact, peer) in list(&golden["runs"]["hf_f32"]["results"]).iter().zip(list(&golden["runs"]["llama_cpp_gguf"]["results"])) {
        for (step, (a, b)) in list(&exact["top5"]).iter().zip(list(&peer["top5"])).enumerate() {
            for pair in list(a) {
                let same = list(b).iter().find(|other| other[0] == pair[0]);
                most = same.map_or(most, |other| most.max((number(&pair[1]) - number(&other[1])).abs()));
            }
            if exact["generated"][step] != peer["generated"][step] {
                break;
            }
        }
    }
    assert!(most > 0.0, "the golden has no run of the peer");
    if support::is_on_device() { DRAW * most } else { most }
}

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures")
}

/// Where `examples/get_model.py` keeps models.
fn cache() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base = || variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
    variable("METRALE_CACHE").or_else(|| Some(base()?.join("metrale")))
}

/// The model's file and its golden; `None`, saying so, where the file is not.
fn find(name: &str) -> Option<(PathBuf, Value)> {
    let own = fixtures().join(name);
    let (file, golden) = match own.is_dir() {
        true => (own.join("model.gguf"), own.join("golden.json")),
        false => (cache()?.join(name).join("model.gguf"), fixtures().join(format!("real_models/{name}.json"))),
    };
    if !file.is_file() {
        println!("{name}: SKIPPED, not in the cache; `make models` fetches it");
        return None;
    }
    let golden = std::fs::read(&golden).unwrap_or_else(|e| panic!("{}: {e}", golden.display()));
    Some((file, serde_json::from_slice(&golden).expect("the golden is JSON")))
}

fn load(path: &Path, compute: Compute) -> Arc<Engine> {
    let options = LoadOptions { compute: Some(compute), context: 256, device: support::device(), ..LoadOptions::default() };
    engine::load(path, &options, None).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn list(value: &Value) -> &[Value] {
    value.as_array().expect("a list")
}

fn ids(value: &Value) -> Vec<i32> {
    list(value).iter().map(|id| id.as_i64().expect("an id") as i32).collect()
}

fn number(value: &Value) -> f32 {
    value.as_f64().expect("a number") as f32
}

/// Natural logarithm of the probability that a row of logits gives to `id`.
fn logprob(row: &[f32], id: i32) -> f32 {
    let best = row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = row.iter().map(|&logit| f64::from(logit - best).exp()).sum();
    (f64::from(row[id as usize] - best) - sum.ln()) as f32
}

fn best(row: &[f32]) -> i32 {
    let first_of_best = |best: usize, id: usize| if row[id] > row[best] { id } else { best };
    (0..row.len()).fold(0, first_of_best) as i32
}

/// Largest differences along one prompt: of the prompt's log-probabilities, and of the best logits of each step.
fn follow(engine: &Arc<Engine>, prompt: &[i32], golden: &Value, tolerance: f32) -> (f32, f32) {
    let mut sequence = Sequence::new(engine, &SequenceOptions::default()).expect("a sequence fits");
    let (mut in_prompt, mut in_steps) = (0.0f32, 0.0f32);
    sequence.prefill(&prompt[..1]).expect("one token fits");
    for (&token, expected) in prompt[1..].iter().zip(list(&golden["prompt_logprobs"])) {
        in_prompt = in_prompt.max((logprob(sequence.logits().expect("it holds tokens"), token) - number(expected)).abs());
        sequence.prefill(&[token]).expect("a token fits");
    }
    for (step, (token, top)) in ids(&golden["generated"]).into_iter().zip(list(&golden["top5"])).enumerate() {
        let row = sequence.logits().expect("it holds tokens");
        let top: Vec<(usize, f32)> = list(top).iter().map(|pair| (pair[0].as_u64().expect("an id") as usize, number(&pair[1]))).collect();
        top.iter().for_each(|&(id, logit)| in_steps = in_steps.max((row[id] - logit).abs()));
        if top[0].1 - top[1].1 > 2.0 * tolerance {
            assert_eq!(best(row), token, "step {step}: the golden chose {token} by {}", top[0].1 - top[1].1);
        }
        sequence.prefill(&[token]).expect("a token fits");
    }
    (in_prompt, in_steps)
}

/// Every prompt of one run, within `tolerance`.
fn check(name: &str, path: &Path, compute: Compute, golden: &Value, run: &str, tolerance: f32) {
    let engine = load(path, compute);
    let (prompts, results) = (list(&golden["prompts"]), list(&golden["runs"][run]["results"]));
    assert!(!prompts.is_empty() && prompts.len() == results.len(), "{name}: the golden is incomplete");
    for (prompt, result) in prompts.iter().zip(results) {
        let (in_prompt, in_steps) = follow(&engine, &ids(&prompt["ids"]), result, tolerance);
        println!("{name} {compute:?} against {run}: prompt {in_prompt:.1e}, steps {in_steps:.1e}, limit {tolerance}");
        assert!(in_prompt.max(in_steps) <= tolerance, "{name} {compute:?}: off by {in_prompt} and {in_steps}, limit {tolerance}");
    }
}

#[test]
fn exact_arithmetic_gives_the_goldens_logits() {
    for name in MODELS {
        let Some((file, golden)) = find(name) else { continue };
        check(name, &file, Compute::F32, &golden, "hf_f32", EXACT);
    }
}

/// The folder form holds the file's values rounded to bf16; the goldens have a run of their own for it.
#[test]
fn folders_give_the_logits_of_their_rounded_weights() {
    for name in MODELS {
        let Some((file, golden)) = find(name) else { continue };
        let folder = file.with_file_name("hf");
        if folder.join("config.json").is_file() {
            check(name, &folder, Compute::F32, &golden, "hf_bf16_weights", EXACT);
        } else {
            println!("{name}: SKIPPED, there is no folder beside the file");
        }
    }
}

#[test]
fn fast_arithmetic_is_nearer_than_the_peer() {
    for name in MODELS {
        let Some((file, golden)) = find(name) else { continue };
        check(name, &file, Compute::Fast, &golden, "hf_f32", peer_distance(&golden));
    }
}

/// Where the processor multiplies bfloat16 pairs, activations are rounded to bfloat16; elsewhere only the cache is narrower.
#[test]
fn fast_arithmetic_of_folders_is_near_their_rounded_weights() {
    for name in MODELS {
        let Some((file, golden)) = find(name) else { continue };
        let folder = file.with_file_name("hf");
        if folder.join("config.json").is_file() {
            check(name, &folder, Compute::Fast, &golden, "hf_bf16_weights", peer_distance(&golden));
        } else {
            println!("{name}: SKIPPED, there is no folder beside the file");
        }
    }
}

#[test]
fn prompts_become_the_goldens_tokens() {
    for name in MODELS {
        let Some((file, golden)) = find(name) else { continue };
        let engine = load(&file, Compute::Fast);
        let tokenizer = engine.tokenizer().expect("the file holds one");
        for prompt in list(&golden["prompts"]) {
            let text = prompt["text"].as_str().expect("a text");
            assert_eq!(tokenizer.encode(text, true, true).expect("it is text"), ids(&prompt["ids"]), "{name}: {text:?}");
        }
    }
}
