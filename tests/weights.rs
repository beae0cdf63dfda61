//! Checkpoints against independent readings of them: what the `gguf` package makes of the GGUF fixtures, the configs they
//! were written from, and (where they are at hand) real models in both containers.
//!
//! `METRALE_CACHE` may name a folder of `<model>/{model.gguf,hf/}`; tests that need it say when they skip.

use metrale::tensor::DType;
use metrale::weights::{Access, Checkpoint, to_f32};
use serde_json::Value;
use std::path::{Path, PathBuf};

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models")
}

/// Folders with a `model.gguf` among the fixtures and, where present, the reference checkpoints.
fn gguf_folders() -> Vec<PathBuf> {
    let reference = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/reference/models");
    let mut folders = Vec::new();
    for root in [fixtures(), reference] {
        let Ok(entries) = std::fs::read_dir(&root) else {
            println!("SKIPPED: {} is not here", root.display());
            continue;
        };
        folders.extend(entries.map(|e| e.unwrap().path()).filter(|p| p.join("model.gguf").exists()));
    }
    folders.sort();
    folders
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

/// Keys of `expected` that `found` lacks or says differently. Keys without meaning for inference are left out.
fn differences(expected: &Value, found: &Value) -> Vec<String> {
    const NOT_IN_A_GGUF: [&str; 8] = [
        "attention_dropout",
        "initializer_range",
        "use_cache",
        "torch_dtype",
        "pretraining_tp",
        "max_window_layers",
        "transformers_version",
        "_sliding_window_pattern",
    ];
    let same = |a: &Value, b: &Value| a == b || a.as_f64().zip(b.as_f64()).is_some_and(|(a, b)| a == b);
    expected
        .as_object()
        .unwrap()
        .iter()
        .filter(|(key, value)| !NOT_IN_A_GGUF.contains(&key.as_str()) && !same(value, &found[key.as_str()]))
        .map(|(key, value)| format!("{key} is {}, expected {value}", found[key]))
        .collect()
}

#[test]
fn configs_of_gguf_files_are_those_they_were_written_from() {
    let mut seen = 0;
    for folder in gguf_folders() {
        let golden = json(&folder.join("golden.json"));
        // Goldens made by other scripts say nothing of the config.
        if golden["architecture"] == "deepseek41" || golden["hf_config"].is_null() {
            continue;
        }
        let checkpoint = Checkpoint::open(&folder).unwrap();
        let differences = differences(&golden["hf_config"], checkpoint.config());
        assert!(differences.is_empty(), "{}: {differences:?}", folder.display());
        seen += 1;
    }
    assert!(seen >= 6, "{seen} GGUF folders");
}

#[test]
fn tensors_of_gguf_files_are_what_another_reader_finds() {
    let mut seen = 0;
    for folder in gguf_folders().iter().filter(|f| f.join("expected_tensors.json").exists()) {
        let expected = json(&folder.join("expected_tensors.json"));
        let expected = expected.as_object().unwrap();
        for access in [Access::Map, Access::Read] {
            let checkpoint = Checkpoint::open_with(&folder.join("model.gguf"), access).unwrap();
            assert_eq!(checkpoint.names().count(), expected.len(), "{}", folder.display());
            for (name, want) in expected {
                let view = checkpoint.tensor(name).unwrap_or_else(|| panic!("{name} of {}", folder.display()));
                let shape: Vec<u64> = view.shape.iter().map(|&d| d as u64).collect();
                assert_eq!(serde_json::json!(shape), want["shape"], "{name}");
                let values = to_f32(&view).unwrap();
                for (i, first) in want["first"].as_array().unwrap().iter().enumerate() {
                    // serde_json may be off by the last bit of an f64, never by one of an f32.
                    assert_eq!(values[i], first.as_f64().unwrap() as f32, "{name} element {i} of {}", folder.display());
                }
                let weighted: f64 = values.iter().enumerate().map(|(i, &x)| f64::from(x) * ((i * 7919 % 1009) as f64 / 1009.0)).sum();
                let want = want["weighted_sum"].as_f64().unwrap();
                assert!(
                    (weighted - want).abs() <= 1e-9 * want.abs().max(1.0),
                    "{name} of {}: {weighted}, expected {want}",
                    folder.display()
                );
                checkpoint.release(name);
                assert_eq!(to_f32(&checkpoint.tensor(name).unwrap()).unwrap(), values, "{name} after its pages were given back");
            }
        }
        seen += 1;
    }
    assert!(seen >= 6, "{seen} folders with expected_tensors.json");
}

#[test]
fn a_real_model_is_the_same_in_both_containers() {
    let Some(root) = std::env::var_os("METRALE_CACHE") else {
        println!("SKIPPED: METRALE_CACHE names no folder of real models");
        return;
    };
    for folder in std::fs::read_dir(root).unwrap().map(|e| e.unwrap().path()).filter(|p| p.join("hf/config.json").exists()) {
        let start = std::time::Instant::now();
        let gguf = Checkpoint::open(&folder.join("model.gguf")).unwrap();
        println!("{}: header read in {:?}", folder.display(), start.elapsed());
        let hf = Checkpoint::open(&folder.join("hf")).unwrap();
        let differences = differences(hf.config(), gguf.config());
        assert!(differences.is_empty(), "{}: {differences:?}", folder.display());
        let mut names: Vec<&str> = gguf.names().collect();
        let mut hf_names: Vec<&str> = hf.names().collect();
        names.sort();
        hf_names.sort();
        assert_eq!(names, hf_names, "{}", folder.display());
        for name in names {
            let (a, b) = (gguf.tensor(name).unwrap(), hf.tensor(name).unwrap());
            assert_eq!(a.shape, b.shape, "{name}");
            let rounded = |x: f32| if b.dtype == DType::BF16 { half::bf16::from_f32(x).to_f32() } else { x };
            let (x, y) = (to_f32(&a).unwrap(), to_f32(&b).unwrap());
            for (i, (x, y)) in x.iter().zip(&y).enumerate() {
                assert_eq!(rounded(*x).to_bits(), y.to_bits(), "{name} element {i} of {}", folder.display());
            }
            gguf.release(name);
            hf.release(name);
        }
        println!("{}: {:?}", folder.display(), gguf.describe());
    }
}
