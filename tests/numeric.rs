//! Weights that are not numbers: a sequence whose logits are ruined by them gives an error that names the layer, never a token.

mod support;

use metrale::engine::{self, Chooser, Engine, Sequence, SequenceOptions, decode_step, step};
use metrale::error::Kind;
use metrale::options::{Compute, LoadOptions};
use metrale::sampling::{Sampler, Stage};
use safetensors::tensor::Dtype;
use std::path::Path;
use std::sync::Arc;
use support::copies::{Copy, Tensor};
use support::{Scratch, fixtures};

/// Prompts: of several tokens, of one.
const PROMPTS: [&[i32]; 2] = [&[3, 5, 9, 11, 4, 7], &[6]];

fn engine(path: &Path, compute: Compute) -> Arc<Engine> {
    let options = LoadOptions { compute: Some(compute), threads: 2, ..LoadOptions::default() };
    engine::load(path, &options, None).unwrap()
}

/// Overwrites one element; false where the tensor's type has no such value.
fn poison(tensor: &mut Tensor, index: usize, value: f32) -> bool {
    match tensor.dtype {
        Dtype::F32 => tensor.bytes[4 * index..][..4].copy_from_slice(&value.to_le_bytes()),
        Dtype::BF16 => tensor.bytes[2 * index..][..2].copy_from_slice(&value.to_le_bytes()[2..]),
        _ => return false,
    }
    true
}

fn is_ok(row: &[f32]) -> bool {
    row.iter().all(|x| x.is_finite())
}

/// What the layer's error is called, for a token chosen in each way there is; `None` where the row is sound.
fn verdict(engine: &Arc<Engine>, prompt: &[i32]) -> Option<String> {
    let mut names = Vec::new();
    for stages in [&[][..], &[Stage::TopK(5), Stage::Temperature(0.7)]] {
        let mut sequence = Sequence::new(engine, &SequenceOptions::default()).unwrap();
        sequence.prefill(prompt).unwrap();
        if is_ok(sequence.logits().unwrap()) {
            return None;
        }
        let before: Vec<u32> = sequence.logits().unwrap().iter().map(|x| x.to_bits()).collect();
        let mut chooser = Chooser::new(Sampler::new(stages, 3).unwrap());
        let state = chooser.sampler.state();
        let mut tokens = [-7];
        let e = decode_step(&mut [&mut sequence], &mut [&mut chooser], &mut tokens).unwrap_err();
        assert_eq!((e.kind(), tokens), (Kind::NumericFault, [-7]), "{e}");
        let mut stepped = [engine::Stepped::default()];
        step(&mut [&mut sequence], &mut [&mut chooser], None, &mut stepped).unwrap();
        let engine::StepState::Failed(other) = &stepped[0].state else { panic!("{:?}", stepped[0]) };
        assert_eq!((other.kind(), other.name(), stepped[0].token), (Kind::NumericFault, e.name(), None));
        // As before the calls, and usable.
        let after: Vec<u32> = sequence.logits().unwrap().iter().map(|x| x.to_bits()).collect();
        assert!(before == after && sequence.tokens() == prompt && chooser.sampler.state() == state);
        sequence.truncate(0).unwrap();
        sequence.prefill(&prompt[..1]).unwrap();
        names.push(e.name().expect("the place is named").to_string());
    }
    assert_eq!(names[0], names[1]);
    names.pop()
}

/// Every tensor of every layer, NaN and infinities at its first, middle and last element. A NaN in a tensor that every token uses must
/// be found; an infinity may be masked by the mathematics, but a row that it ruins is blamed on its layer.
#[test]
fn a_poisoned_layer_is_named() {
    let (mut found, mut tried) = (0, 0);
    for (folder, dense) in [("llama", true), ("lfm2", true), ("olmo3", true), ("phi3", true), ("gemma3_text", true), ("mixtral", false)] {
        let source = Copy::read(&fixtures().join(folder));
        let scratch = Scratch::new(&format!("numeric-{folder}"));
        let names: Vec<String> = source.tensors.iter().map(|t| t.name.clone()).collect();
        for (at, name) in names.iter().enumerate() {
            let Some(layer) = name.split_once("layers.").and_then(|(_, rest)| rest.split('.').next()?.parse::<usize>().ok()) else {
                continue;
            };
            let elements: usize = source.tensors[at].shape.iter().product();
            // Other experts and values than the first are the same kind again.
            if name.contains(".experts.") && !name.contains(".experts.0.") {
                continue;
            }
            let cases =
                [(0, f32::NAN), (elements / 2, f32::NAN), (elements - 1, f32::NAN), (elements / 2, f32::INFINITY), (0, f32::NEG_INFINITY)];
            for (case, (index, value)) in cases.into_iter().enumerate() {
                // All of one family; of the others two for each tensor, in turn.
                if folder != "llama" && case != at % 3 && case != 3 + at % 2 {
                    continue;
                }
                let mut copy = source.clone();
                if !poison(&mut copy.tensors[at], index, value) {
                    continue;
                }
                copy.write(&scratch);
                let compute = if case % 2 == 0 { Compute::Fast } else { Compute::F32 };
                let engine = engine(scratch.path(), compute);
                for prompt in PROMPTS {
                    tried += 1;
                    let verdict = verdict(&engine, prompt);
                    found += usize::from(verdict.is_some());
                    match verdict {
                        Some(named) => assert_eq!(named, format!("layer.{layer}"), "{folder}: {name}[{index}] = {value}, {compute:?}"),
                        // One key makes no choice: its score does not matter.
                        None if value.is_nan() && dense => panic!("{folder}: {name}[{index}] = {value}, {compute:?}, {prompt:?}: not seen"),
                        None => {}
                    }
                }
            }
        }
    }
    println!("{tried} poisoned elements, {found} with ruined logits, all named");
    assert!(found > tried / 2);
}

/// Outside the layers: the embedding of a token that is there, the last norm and the head.
#[test]
fn what_is_no_layer_is_named_too() {
    let source = Copy::read(&fixtures().join("llama"));
    let scratch = Scratch::new("numeric-ends");
    let mut seen = Vec::new();
    for (name, expected) in [("embed_tokens", "embedding"), ("model.norm", "hidden"), ("lm_head", "logits")] {
        let mut copy = source.clone();
        let Some(tensor) = copy.tensors.iter_mut().find(|t| t.name.contains(name)) else { continue };
        // Of the embedding the row of token 7, the prompt's last.
        let index = if expected == "embedding" { 7 * tensor.shape[1] + 3 } else { 0 };
        assert!(poison(tensor, index, f32::NAN));
        copy.write(&scratch);
        assert_eq!(verdict(&engine(scratch.path(), Compute::F32), PROMPTS[0]).as_deref(), Some(expected));
        seen.push(expected);
    }
    assert!(seen.contains(&"embedding") && seen.contains(&"hidden"), "{seen:?}");
}

#[test]
fn beams_fail_alike() {
    let mut copy = Copy::read(&fixtures().join("llama"));
    let scratch = Scratch::new("numeric-beam");
    let tensor = copy.tensors.iter_mut().find(|t| t.name.contains("layers.1.mlp.down_proj")).unwrap();
    assert!(poison(tensor, 0, f32::NAN));
    copy.write(&scratch);
    let mut sequence = Sequence::new(&engine(scratch.path(), Compute::F32), &SequenceOptions::default()).unwrap();
    sequence.prefill(PROMPTS[0]).unwrap();
    let options = engine::BeamOptions { beams: 2, max_tokens: 3, length_penalty: 1.0, ignore_end: false };
    let e = engine::beam(&sequence, &options).unwrap_err();
    assert_eq!((e.kind(), e.name()), (Kind::NumericFault, Some("layer.1")));
}
