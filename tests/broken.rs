//! Broken copies of every checkpoint: each way to be broken gives its own error, which names the thing and both sides.
//!
//! A row of the table says how to break a copy (or that this does not apply to it), which kinds the error may have, and which words
//! it must contain. Headers are enough to see all of it, so nothing is loaded.

mod support;

use metrale::engine;
use metrale::error::{Error, Kind};
use metrale::options::{Compute, LoadOptions, Precision};
use serde_json::{Value, json};
use std::path::Path;
use support::copies::{Copy, Tensor, sources};
use support::{Scratch, fixtures};

/// What the error of a broken copy must say.
struct Says(&'static [Kind], Vec<String>);

/// One way to be broken; `None` where it does not apply.
type Break = fn(&mut Copy) -> Option<Says>;

const TABLE: &[(&str, Break)] = &[
    ("missing tensor", missing_tensor),
    ("missing embedding", missing_embedding),
    ("missing head", missing_head),
    ("tensor of another shape", wrong_shape),
    ("unknown quantisation", unknown_quantisation),
    ("missing key", missing_key),
    ("key of another type", key_of_another_type),
    ("two wrong keys", two_wrong_keys),
    ("more layers than there are", more_layers),
    ("fewer layers than there are", fewer_layers),
    ("another vocabulary", another_vocabulary),
    ("heads that do not divide", odd_heads),
    ("one expert more", more_experts),
    ("one expert fewer", fewer_experts),
];

fn says(kinds: &'static [Kind], words: &[&str]) -> Option<Says> {
    Some(Says(kinds, words.iter().map(|w| (*w).to_string()).collect()))
}

/// Towers and draft heads, which text alone does not use.
fn is_beside(name: &str) -> bool {
    ["visual", "vision", "mtp", "projector", "engram"].iter().any(|word| name.contains(word))
}

/// A norm of layer 0: always plain, always asked for.
fn norm(copy: &mut Copy) -> Option<&mut Tensor> {
    let is_norm = |t: &Tensor| t.name.contains("layers.0.") && t.name.contains("norm") && t.name.ends_with(".weight") && t.shape.len() == 1;
    copy.tensors.iter_mut().find(|t| is_norm(t) && !is_beside(&t.name))
}

fn missing_tensor(copy: &mut Copy) -> Option<Says> {
    let name = norm(copy)?.name.clone();
    copy.tensors.retain(|t| t.name != name);
    says(&[Kind::CorruptFile], &["no tensor", &name])
}

fn drop_named(copy: &mut Copy, ends: &[&str]) -> Option<String> {
    let at = copy
        .tensors
        .iter()
        .position(|t| !is_beside(&t.name) && ends.iter().any(|end| t.name == *end || t.name.ends_with(&format!(".{end}"))))?;
    Some(copy.tensors.remove(at).name)
}

fn missing_embedding(copy: &mut Copy) -> Option<Says> {
    let name = drop_named(copy, &["embed_tokens.weight", "embed.weight", "embeddings.weight"])?;
    // A family that knows two roots may tell them apart by this very tensor.
    says(&[Kind::CorruptFile], &["no tensor", name.rsplit_once("embed").map_or(&*name, |(_, end)| end)])
}

fn missing_head(copy: &mut Copy) -> Option<Says> {
    let name = drop_named(copy, &["lm_head.weight", "head.weight"])?;
    says(&[Kind::CorruptFile], &["no tensor", &name, "tie_word_embeddings"])
}

fn wrong_shape(copy: &mut Copy) -> Option<Says> {
    let tensor = norm(copy)?;
    let size = tensor.bytes.len() / tensor.shape[0];
    tensor.shape[0] += 1;
    tensor.bytes.extend(vec![0; size]);
    let (found, wanted) = (format!("[{}]", tensor.shape[0]), format!("[{}]", tensor.shape[0] - 1));
    let name = tensor.name.clone();
    says(&[Kind::Mismatch], &[&name, "the checkpoint holds", &found, &wanted])
}

fn unknown_quantisation(copy: &mut Copy) -> Option<Says> {
    copy.config["quantization_config"] = json!({"quant_method": "mystery"});
    says(&[Kind::Unsupported], &["mystery", "fp8"])
}

fn missing_key(copy: &mut Copy) -> Option<Says> {
    copy.text().as_object_mut()?.remove("hidden_size")?;
    says(&[Kind::Mismatch], &["hidden_size", "found nothing"])
}

/// The key with the width of the residual stream.
fn width(copy: &mut Copy) -> &'static str {
    if copy.text().get("d_model").is_some() { "d_model" } else { "hidden_size" }
}

fn key_of_another_type(copy: &mut Copy) -> Option<Says> {
    let key = width(copy);
    copy.text()[key] = json!("wide");
    says(&[Kind::CorruptFile], &[key, "wide", "a whole number"])
}

fn two_wrong_keys(copy: &mut Copy) -> Option<Says> {
    if width(copy) != "hidden_size" {
        return None; // keys of its own, read one by one
    }
    copy.text()["hidden_size"] = json!("wide");
    copy.text()["vocab_size"] = json!(-320);
    says(&[Kind::CorruptFile], &["findings", "hidden_size", "wide", "vocab_size", "-320"])
}

/// The key that counts layers, and its value. Models that translate have two stacks, each with a key of its own; there the first
/// missing tensor is what is said.
fn layers(copy: &mut Copy) -> Option<(&'static str, u64)> {
    let text = copy.text();
    if text.get("encoder_layers").is_some() {
        return None;
    }
    ["num_hidden_layers", "num_layers"].into_iter().find_map(|key| Some((key, text.get(key)?.as_u64()?)))
}

fn more_layers(copy: &mut Copy) -> Option<Says> {
    let (key, n) = layers(copy)?;
    copy.text()[key] = json!(n + 40);
    says(&[Kind::Mismatch], &[key, &(n + 40).to_string(), &n.to_string()])
}

fn fewer_layers(copy: &mut Copy) -> Option<Says> {
    let (key, n) = layers(copy)?;
    if n < 2 {
        return None;
    }
    copy.text()[key] = json!(n - 1);
    // A checkpoint that announces draft layers may have them behind the others.
    copy.text()["num_nextn_predict_layers"] = json!(0);
    says(&[Kind::Mismatch], &[key, &(n - 1).to_string()])
}

fn another_vocabulary(copy: &mut Copy) -> Option<Says> {
    let n = copy.text().get("vocab_size")?.as_u64()?;
    copy.text()["vocab_size"] = json!(n + 8);
    let key = if copy.text().get("d_model").is_some() { "shared" } else { "vocab_size" };
    says(&[Kind::Mismatch], &[key, &(n + 8).to_string(), &n.to_string()])
}

fn odd_heads(copy: &mut Copy) -> Option<Says> {
    let n = copy.text().get("num_attention_heads")?.as_u64()?;
    copy.text()["num_attention_heads"] = json!(n + 3);
    says(&[Kind::Mismatch], &["heads"])
}

fn experts(copy: &mut Copy, change: i64) -> Option<Says> {
    let text = copy.text();
    let (key, n) = ["num_experts", "n_routed_experts", "num_local_experts"]
        .into_iter()
        .find_map(|key| Some((key, text.get(key)?.as_i64().filter(|n| *n > 1)?)))?;
    text[key] = json!(n + change);
    says(&[Kind::Mismatch], &["expert"])
}

fn more_experts(copy: &mut Copy) -> Option<Says> {
    experts(copy, 1)
}

fn fewer_experts(copy: &mut Copy) -> Option<Says> {
    experts(copy, -1)
}

fn plan(path: &Path) -> Result<(), Error> {
    engine::plan(path, &LoadOptions::default(), 1).map(|_| ())
}

/// The error of a path, where there is one and no panic.
fn error(path: &Path) -> Result<Error, String> {
    match std::panic::catch_unwind(|| plan(path)) {
        Err(_) => Err("panicked".into()),
        Ok(Ok(())) => Err("was accepted".into()),
        Ok(Err(e)) => Ok(e),
    }
}

/// Families this build does not have say so before anything else is looked at.
fn supported(path: &Path) -> bool {
    match plan(path) {
        Ok(()) => true,
        Err(e) if e.name() == Some("model_type") => false,
        Err(e) => {
            println!("SKIPPED {}: {e}", path.display());
            false
        }
    }
}

#[test]
fn every_way_to_be_broken_has_its_own_error() {
    let (mut failures, mut tried) = (Vec::new(), 0);
    for source in sources().into_iter().filter(|s| supported(s)) {
        let name = source.file_name().unwrap().to_string_lossy().into_owned();
        let whole = Copy::read(&source);
        for (way, break_it) in TABLE {
            let mut copy = whole.clone();
            let Some(Says(kinds, words)) = break_it(&mut copy) else { continue };
            let scratch = Scratch::new(&format!("broken-{name}"));
            copy.write(&scratch);
            tried += 1;
            match error(scratch.path()) {
                Err(what) => failures.push(format!("{name}, {way}: {what}")),
                Ok(e) => {
                    if !kinds.contains(&e.kind()) {
                        failures.push(format!("{name}, {way}: kind {:?}, expected {kinds:?}: {e}", e.kind()));
                    }
                    failures.extend(
                        words.iter().filter(|w| !e.message().contains(*w)).map(|w| format!("{name}, {way}: should say {w:?}: {e}")),
                    );
                }
            }
        }
    }
    println!("{tried} broken copies");
    assert!(tried >= TABLE.len() - 2, "only {tried} copies were broken");
    assert!(failures.is_empty(), "{} of {tried}:\n{}", failures.len(), failures.join("\n"));
}

#[test]
fn files_that_are_cut_short_or_absent_are_named() {
    for source in sources().into_iter().filter(|s| supported(s)) {
        let copy = Copy::read(&source);
        let bytes = copy.bytes();
        let scratch = Scratch::new("cut");
        copy.write_config(&scratch);
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        for (length, word) in [(bytes.len() - 1, "short"), (header + 1, "short"), (header - 1, "short"), (5, "")] {
            scratch.file("model.safetensors", &bytes[..length]);
            let e = error(scratch.path()).unwrap_or_else(|what| panic!("{} cut to {length} bytes {what}", source.display()));
            assert!(
                matches!(e.kind(), Kind::CorruptFile | Kind::NotAModel)
                    && e.message().contains("model.safetensors")
                    && e.message().contains(word),
                "{e}"
            );
        }
        std::fs::remove_file(scratch.path().join("model.safetensors")).unwrap();
        let first = &copy.tensors[0].name;
        scratch.file("model.safetensors.index.json", json!({"weight_map": {first: "model-00002-of-00002.safetensors"}}).to_string());
        let e = error(scratch.path()).unwrap_or_else(|what| panic!("{} without its shard {what}", source.display()));
        assert!(e.kind() == Kind::NotFound && e.message().contains("model-00002-of-00002.safetensors"), "{e}");
    }
}

fn llama() -> Copy {
    Copy::read(&fixtures().join("llama"))
}

#[test]
fn all_findings_come_at_once_and_alike_ones_as_one_line() {
    let mut copy = llama();
    copy.tensors.retain(|t| !t.name.ends_with("q_proj.weight"));
    norm(&mut copy).unwrap().name.push_str(".old");
    copy.config["vocab_size"] = json!(328);
    let scratch = Scratch::new("findings");
    copy.write(&scratch);
    let e = error(scratch.path()).unwrap();
    let lines: Vec<&str> = e.message().lines().collect();
    assert_eq!(lines.len(), lines[0].split(' ').next().unwrap().parse::<usize>().unwrap() + 1, "{e}");
    let layers = copy.config["num_hidden_layers"].as_u64().unwrap();
    for part in [
        "holds [320, 64], the config asks for [328, 64]; is vocab_size right?",
        &format!("no tensor model.layers.{{0..{}}}.self_attn.q_proj.weight", layers - 1),
        "layers.0.",
    ] {
        assert!(e.message().contains(part), "{part:?} is not in: {e}");
    }
    assert_eq!(e.kind(), Kind::Mismatch, "a wrong number explains more than a missing tensor");
}

#[test]
fn a_bias_that_would_be_left_out_is_found_and_zeros_are_not() {
    for (value, expected) in [(0.0f32, None), (0.5, Some("q_proj.bias"))] {
        let mut copy = llama();
        let q = copy.tensors.iter().find(|t| t.name == "model.layers.1.self_attn.q_proj.weight").unwrap();
        let bytes = std::iter::repeat_n(value.to_le_bytes(), q.shape[0]).flatten().collect();
        let bias =
            Tensor { name: "model.layers.1.self_attn.q_proj.bias".into(), dtype: safetensors::Dtype::F32, shape: vec![q.shape[0]], bytes };
        copy.tensors.push(bias);
        let scratch = Scratch::new("bias");
        copy.write(&scratch);
        match expected {
            None => plan(scratch.path()).unwrap(),
            Some(word) => {
                let e = error(scratch.path()).unwrap();
                assert!(e.kind() == Kind::Mismatch && e.message().contains(word) && e.message().contains("attention_bias"), "{e}");
            }
        }
    }
}

#[test]
fn another_root_is_pointed_out() {
    let mut copy = llama();
    copy.tensors.iter_mut().for_each(|t| t.name = format!("language_model.{}", t.name));
    let scratch = Scratch::new("root");
    copy.write(&scratch);
    let e = error(scratch.path()).unwrap();
    assert!(e.message().contains("begin with language_model.model"), "{e}");
}

#[test]
fn a_model_that_does_not_fit_is_refused_before_it_is_read() {
    let folder = fixtures().join("llama");
    let wanted = engine::plan(&folder, &LoadOptions::default(), 1).unwrap().total();
    let e = engine::load(&folder, &LoadOptions { memory: wanted - 1, ..LoadOptions::default() }, None).err().unwrap();
    assert_eq!((e.kind(), e.wanted(), e.available(), e.name()), (Kind::OutOfMemory, Some(wanted), Some(wanted - 1), Some("memory")));
    assert!(e.message().contains("with a context of") && e.message().contains("weights"), "{e}");
    engine::load(&folder, &LoadOptions { memory: wanted, ..LoadOptions::default() }, None).unwrap();
}

#[test]
fn draft_tensors_are_recognised_and_recurrence_is_as_the_facts_say() {
    let options = LoadOptions { threads: 1, ..LoadOptions::default() };
    let mut drafting = Vec::new();
    for source in sources().into_iter().filter(|s| supported(s)) {
        let engine = engine::load(&source, &options, None).unwrap();
        let name = source.file_name().unwrap().to_string_lossy().into_owned();
        assert_eq!(metrale::families::facts(&engine.info().model_type).recurrent, engine.is_recurrent(), "{name}");
        let has = Copy::read(&source).tensors.iter().any(|t| t.name.contains("eh_proj") || t.name.split('.').any(|w| w == "mtp"));
        assert_eq!(!engine.info().drafts.is_empty(), has, "{name}: {:?}", engine.info().drafts);
        if has {
            drafting.push(name);
        }
    }
    println!("with draft tensors: {drafting:?}");
}

#[test]
fn a_precision_rule_changes_its_layers_and_nothing_else() {
    let folder = fixtures().join("llama");
    let schedule = |rules: &str| {
        let options = LoadOptions { precision: Precision::parse(rules).unwrap(), ..LoadOptions::default() };
        engine::precision(&folder, &options).unwrap()
    };
    let own = schedule("");
    let changed = schedule("layers.1.mlp=q8_0, head=f16");
    assert_eq!(own.len(), changed.len());
    for (own, changed) in own.iter().zip(&changed) {
        let expected = match (own.layer, own.part) {
            (Some(1), "mlp") => vec!["I8 x32".to_string()],
            (None, "head") => vec!["F16".to_string()],
            _ => own.layouts.clone(),
        };
        assert_eq!(changed.layouts, expected, "{own:?}");
    }
    // Logits follow: rounding to 8 bits moves them a little, to f32 not at all.
    let logits = |rules: &str| {
        let options =
            LoadOptions { compute: Some(Compute::F32), threads: 1, precision: Precision::parse(rules).unwrap(), ..LoadOptions::default() };
        let engine = engine::load(&folder, &options, None).unwrap();
        engine.capture(&[1, 2, 3, 4], 4, &["logits"], engine::Bodies::Fast).unwrap().remove(0).values
    };
    let (exact, same, rounded) = (logits(""), logits("*=f32"), logits("*=q8_0"));
    assert_eq!(exact, same);
    let apart = exact.iter().zip(&rounded).map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max);
    let size = exact.iter().map(|v| v.abs()).fold(0.0f32, f32::max);
    assert!(apart > 0.0 && apart < 0.05 * size, "{apart} of {size}");
    let e = engine::precision(
        &folder,
        &LoadOptions {
            precision: Precision {
                rules: vec![metrale::options::PrecisionRule { layers: None, part: None, dtype: metrale::tensor::DType::Q2K }],
            },
            ..LoadOptions::default()
        },
    )
    .err()
    .unwrap();
    assert_eq!(e.kind(), Kind::UnknownOption, "{e}");
}

#[test]
fn a_config_that_is_no_object_is_an_error() {
    for config in
        [json!([]), json!(null), json!(3), json!("x"), json!({"model_type": 7}), json!({"model_type": "llama", "text_config": []})]
    {
        let mut copy = llama();
        copy.config = Value::clone(&config);
        let scratch = Scratch::new("object");
        copy.write(&scratch);
        error(scratch.path()).unwrap_or_else(|what| panic!("{config} {what}"));
    }
}
