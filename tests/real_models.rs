//! Real models as their publishers quantised them, beside the same models run by transformers in f32.
//!
//! The story teller of `tests/fixtures` is always there. The others are looked for where `examples/get_model.py` puts them,
//! and skipped, saying so, where they are not. We follow the golden's own tokens, so that one choice between equals does not
//! spoil what comes after it.

use metrale::engine::{self, Engine, Sequence, SequenceOptions};
use metrale::options::{Compute, LoadOptions};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// A model and how far its logits may be off. `exact` is what the order of summation explains; `fast` is what llama.cpp loses on
/// the same file to its 8-bit activations (its run in the golden, as far as both runs agree on the prefix).
struct Case {
    name: &'static str,
    exact: f32,
    fast: f32,
}

const CASES: [Case; 4] = [
    Case { name: "stories260k", exact: 1e-3, fast: 0.0082 },
    Case { name: "smollm2-135m-instruct", exact: 1e-3, fast: 0.9816 },
    Case { name: "gemma-3-270m", exact: 1e-3, fast: 1.3293 },
    Case { name: "qwen2.5-coder-0.5b-instruct", exact: 1e-3, fast: 0.257 },
];

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
    let options = LoadOptions { compute: Some(compute), context: 256, ..LoadOptions::default() };
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

fn check(compute: Compute, tolerance: impl Fn(&Case) -> f32) {
    for case in &CASES {
        let Some((file, golden)) = find(case.name) else { continue };
        let tolerance = tolerance(case);
        let engine = load(&file, compute);
        let results = list(&golden["runs"]["hf_f32"]["results"]);
        let prompts = list(&golden["prompts"]);
        assert!(!prompts.is_empty() && prompts.len() == results.len(), "{}: the golden is incomplete", case.name);
        for (prompt, result) in prompts.iter().zip(results) {
            let (in_prompt, in_steps) = follow(&engine, &ids(&prompt["ids"]), result, tolerance);
            println!("{} {compute:?}: prompt {in_prompt:.1e}, steps {in_steps:.1e}", case.name);
            assert!(
                in_prompt.max(in_steps) <= tolerance,
                "{} {compute:?}: off by {in_prompt} and {in_steps}, limit {tolerance}",
                case.name
            );
        }
    }
}

#[test]
fn exact_arithmetic_gives_the_goldens_logits() {
    check(Compute::F32, |case| case.exact);
}

#[test]
fn fast_arithmetic_stays_near_them() {
    check(Compute::Fast, |case| case.fast);
}

#[test]
fn prompts_become_the_goldens_tokens() {
    for case in &CASES {
        let Some((file, golden)) = find(case.name) else { continue };
        let engine = load(&file, Compute::Fast);
        let tokenizer = engine.tokenizer().expect("the file holds one");
        for prompt in list(&golden["prompts"]) {
            let text = prompt["text"].as_str().expect("a text");
            assert_eq!(tokenizer.encode(text, true, true).expect("it is text"), ids(&prompt["ids"]), "{}: {text:?}", case.name);
        }
    }
}
