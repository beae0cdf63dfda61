//! Reference checkpoints: every family's logits and greedy tokens against goldens made by an independent implementation.
//!
//! Walks `tests/fixtures/models` and, where it is there, `../shared/reference/models`. One line a folder, then a table by family and format.

mod support;

use metrale::engine::{self, Bodies, Engine, Sequence, SequenceOptions};
use metrale::options::{Compute, LoadOptions};
use metrale::weights::Checkpoint;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use support::golden::{Golden, Translation, folders};

/// The README's limit on f32 logits; the goldens' own uncertainty widens it for families that say so.
const TOLERANCE: f32 = 1e-3;

fn exact(path: &Path, threads: usize) -> Result<Arc<Engine>, String> {
    let options = LoadOptions { compute: Some(Compute::F32), threads, device: support::device(), ..LoadOptions::default() };
    engine::load(path, &options, None).map_err(|e| e.to_string())
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| if a.is_finite() && b.is_finite() { (a - b).abs() } else { f32::INFINITY }).fold(0.0, f32::max)
}

/// The first layer whose output departs, where the golden has layers.
fn first_departure(engine: &Arc<Engine>, golden: &Golden) -> String {
    for (name, expected) in &golden.layers {
        let Ok(found) = engine.capture(&golden.prompt, 64, &[name], Bodies::Fast) else { return format!("{name}: not captured") };
        let d = largest_difference(&found[0].values, expected);
        if d > TOLERANCE {
            return format!("{name} departs first, by {d:.2e}");
        }
    }
    "no layer departs".into()
}

/// A translation: the encoder's output, and the decoder's logits token by token; the language token is forced.
fn check_translation(engine: &Arc<Engine>, golden: &Golden, expected: &Translation) -> Result<(f32, f32), String> {
    let text = |e: metrale::error::Error| e.to_string();
    let encoded = engine.capture_source(&golden.prompt, &["encoded"], Bodies::Fast).map_err(text)?;
    let encoded = largest_difference(&encoded[0].values, &expected.encoded);
    let mut sequence = Sequence::new(engine, &SequenceOptions::default()).map_err(text)?;
    sequence.encode(&golden.prompt).map_err(text)?;
    let mut decode = 0.0f32;
    for (i, (token, expected)) in expected.tokens.iter().zip(expected.logits.chunks(engine.info().vocab)).enumerate() {
        sequence.prefill(&[*token]).map_err(text)?;
        let row = sequence.logits().map_err(text)?;
        decode = decode.max(largest_difference(row, expected));
        let best = row.iter().enumerate().rev().max_by(|a, b| a.1.total_cmp(b.1)).map_or(0, |(i, _)| i as i32);
        // What follows the first token is the forced language, whatever the row says.
        if i > 0 && best != golden.decode_ids[i - 1] {
            return Err(format!("step {i}: picked {best}, the golden has {} (encoder {encoded:.2e})", golden.decode_ids[i - 1]));
        }
    }
    let tolerance = TOLERANCE.max(10.0 * golden.uncertainty);
    if encoded > tolerance || decode > tolerance {
        return Err(format!("encoder {encoded:.2e}, decode {decode:.2e}, limit {tolerance:.0e}"));
    }
    Ok((encoded, decode))
}

fn check(path: &Path) -> Result<(f32, f32), String> {
    let golden = Golden::read(path);
    let engine = exact(path, 2)?;
    if let Some(translation) = &golden.translation {
        return check_translation(&engine, &golden, translation);
    }
    let tolerance = TOLERANCE.max(10.0 * golden.uncertainty);
    let logits = engine.capture(&golden.prompt, 64, &["logits"], Bodies::Fast).map_err(|e| e.to_string())?;
    let prompt = largest_difference(&logits[0].values, &golden.prompt_logits);
    let mut sequence = Sequence::new(&engine, &SequenceOptions::default()).map_err(|e| e.to_string())?;
    sequence.prefill(&golden.prompt).map_err(|e| e.to_string())?;
    let vocab = engine.info().vocab;
    let mut decode = 0.0f32;
    for (i, expected) in golden.decode_logits.chunks(vocab).enumerate() {
        let row = sequence.logits().map_err(|e| e.to_string())?;
        decode = decode.max(largest_difference(row, expected));
        let best = row.iter().enumerate().rev().max_by(|a, b| a.1.total_cmp(b.1)).map_or(0, |(i, _)| i as i32);
        if best != golden.decode_ids[i] {
            return Err(format!(
                "step {i}: picked {best}, the golden has {} ({prompt:.2e}; {})",
                golden.decode_ids[i],
                first_departure(&engine, &golden)
            ));
        }
        sequence.prefill(&[best]).map_err(|e| e.to_string())?;
    }
    if prompt > tolerance || decode > tolerance {
        return Err(format!("prompt {prompt:.2e}, decode {decode:.2e}, limit {tolerance:.0e}; {}", first_departure(&engine, &golden)));
    }
    Ok((prompt, decode))
}

/// A folder's family, and the types that most of its bytes have, with the name of the scheme that they are quantised by.
fn kind(path: &Path) -> [String; 2] {
    let Ok(checkpoint) = Checkpoint::open(path) else { return ["unreadable".into(), String::new()] };
    let (told, config) = (checkpoint.describe(), checkpoint.config());
    let many = told.by_dtype.iter().filter(|(_, bytes)| bytes * 8 >= told.tensor_bytes);
    let types: Vec<&str> = many.map(|(dtype, _)| dtype.name()).collect();
    let scheme = config.pointer("/quantization_config/quant_method").and_then(|name| name.as_str());
    let scheme = scheme.map(String::from).or(told.format.starts_with("GGUF").then(|| "GGUF".into()));
    [told.model_type.unwrap_or_default(), scheme.into_iter().chain([types.join(" + ")]).collect::<Vec<_>>().join(" ")]
}

#[test]
fn every_folder_agrees_with_its_golden() {
    let mut failures = Vec::new();
    let mut passed = 0;
    // Folders that agree, those that do not, and the largest difference, by kind.
    let mut table: BTreeMap<[String; 2], (usize, usize, f32)> = BTreeMap::new();
    let only = std::env::var("METRALE_ONLY").unwrap_or_default();
    for path in folders() {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if !only.is_empty() && !only.split(',').any(|o| o == name) {
            continue;
        }
        match std::panic::catch_unwind(|| check(&path)).unwrap_or_else(|e| Err(e.downcast_ref::<String>().cloned().unwrap_or_default())) {
            Ok((prompt, decode)) => {
                passed += 1;
                let row = table.entry(kind(&path)).or_default();
                *row = (row.0 + 1, row.1, row.2.max(prompt).max(decode));
                println!("{name:<24} ok      prompt {prompt:.1e}  decode {decode:.1e}");
            }
            Err(e) => {
                println!("{name:<24} FAILED  {e}");
                table.entry(kind(&path)).or_default().1 += 1;
                failures.push(name);
            }
        }
    }
    for ([family, format], (agree, differ, worst)) in &table {
        println!("| `{family}` | {format} | {agree} | {differ} | {worst:.0e} |");
    }
    println!("{passed} folders agree");
    assert!(passed > 0 && failures.is_empty(), "failed: {failures:?}");
}

/// One folder of each kind, on the kernels on the host; METRALE_TEST_DEVICE=1 takes all of them to a real device.
#[test]
fn folders_agree_on_a_device() {
    let folders = "llama,llama-gguf-q4_k,gemma3_text,gpt_oss-mxfp4,qwen3_next,nemotron_h";
    support::run_on_device(support::cuda::Mode::Plain, folders, &["every_folder_agrees_with_its_golden"]);
}
