//! Broken copies of every checkpoint folder: each fault has its error, found before anything is allocated.
//!
//! Walks the reference folders that hold one safetensors file and load as they are; copies get one fault each.

mod support;

use metrale::engine;
use metrale::error::{Error, Kind};
use metrale::options::LoadOptions;
use serde_json::{Map, Value, json};
use std::path::Path;
use support::{Scratch, golden::folders};

/// A checkpoint in memory: config, tensor headers, tensor bytes.
struct Copy {
    config: Value,
    header: Map<String, Value>,
    data: Vec<u8>,
}

impl Copy {
    fn read(folder: &Path) -> Option<Copy> {
        let config = serde_json::from_slice(&std::fs::read(folder.join("config.json")).ok()?).ok()?;
        let bytes = std::fs::read(folder.join("model.safetensors")).ok()?;
        let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let header = serde_json::from_slice(&bytes[8..8 + length]).ok()?;
        Some(Copy { config, header, data: bytes[8 + length..].to_vec() })
    }

    fn write(&self, to: &Scratch, cut: usize) {
        let header = serde_json::to_vec(&self.header).unwrap();
        let mut bytes = (header.len() as u64).to_le_bytes().to_vec();
        bytes.extend(header);
        bytes.extend(&self.data);
        bytes.truncate(bytes.len() - cut);
        to.file("model.safetensors", bytes);
        to.file("config.json", serde_json::to_vec(&self.config).unwrap());
    }

    /// The object with the language model's numbers.
    fn text(&mut self) -> &mut Map<String, Value> {
        let nested = self.config.get("text_config").is_some_and(Value::is_object);
        let config = if nested { &mut self.config["text_config"] } else { &mut self.config };
        config.as_object_mut().unwrap()
    }

    /// The embedding, which every model needs.
    fn embedding(&self) -> Option<String> {
        let ends = ["embed_tokens.weight", "embed.weight", "embeddings.weight", "embed_tokens.embedder.weight", "shared.weight"];
        ends.iter().find_map(|end| self.header.keys().find(|name| name.ends_with(end) && !name.contains("mtp")).cloned())
    }
}

/// A fault: what it does to the copy (false: it does not apply), which kinds may follow, and what the message names.
struct Fault {
    name: &'static str,
    make: fn(&mut Copy) -> bool,
    kinds: &'static [Kind],
    /// Text of which one must be in the message.
    names: &'static [&'static str],
    /// Bytes that are missing at the file's end.
    cut: usize,
}

const COUNTS: [&str; 5] = ["num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_layer"];

const FAULTS: &[Fault] = &[
    Fault {
        name: "missing tensor",
        make: |c| c.embedding().is_some_and(|name| c.header.remove(&name).is_some()),
        kinds: &[Kind::CorruptFile],
        names: &["embed", "shared"],
        cut: 0,
    },
    Fault {
        name: "wrong shape",
        make: |c| {
            let Some(name) = c.embedding() else { return false };
            let shape = c.header[&name]["shape"].as_array_mut().unwrap();
            shape.reverse();
            true
        },
        kinds: &[Kind::Mismatch],
        names: &["embed", "shared"],
        cut: 0,
    },
    Fault {
        name: "one expert too many",
        make: |c| {
            let Some(key) = COUNTS.iter().find(|key| c.text().contains_key(**key)) else { return false };
            let Some(count) = c.text()[*key].as_u64() else { return false };
            c.text().insert((*key).into(), json!(count + 1));
            true
        },
        kinds: &[Kind::CorruptFile, Kind::Mismatch],
        names: &["expert", "gate", "router", "group"],
        cut: 0,
    },
    Fault {
        name: "more experts for a token than there are",
        make: |c| {
            if !c.text().contains_key("num_experts_per_tok") || !COUNTS.iter().any(|key| c.text().contains_key(*key)) {
                return false;
            }
            c.text().insert("num_experts_per_tok".into(), json!(100_000));
            true
        },
        kinds: &[Kind::Mismatch, Kind::CorruptFile, Kind::LimitExceeded],
        names: &["100000", "expert"],
        cut: 0,
    },
    Fault { name: "truncated", make: |_| true, kinds: &[Kind::CorruptFile], names: &["model.safetensors"], cut: 1000 },
    Fault {
        name: "unknown quant method",
        make: |c| {
            c.config["quantization_config"] = json!({"quant_method": "spiral"});
            true
        },
        kinds: &[Kind::Unsupported],
        names: &["spiral"],
        cut: 0,
    },
    Fault {
        name: "missing config key",
        make: |c| c.text().remove("hidden_size").is_some(),
        kinds: &[Kind::Mismatch, Kind::CorruptFile],
        names: &["hidden_size"],
        cut: 0,
    },
    Fault {
        name: "odd config value",
        make: |c| c.text().contains_key("num_hidden_layers") && c.text().insert("num_hidden_layers".into(), json!("many")).is_some_and(|v| !v.is_null()),
        kinds: &[Kind::Mismatch, Kind::CorruptFile],
        names: &["num_hidden_layers"],
        cut: 0,
    },
    Fault {
        name: "layers beyond measure",
        make: |c| c.text().contains_key("num_hidden_layers") && c.text().insert("num_hidden_layers".into(), json!(2_000_000_000)).is_some_and(|v| !v.is_null()),
        kinds: &[Kind::LimitExceeded],
        names: &["num_hidden_layers"],
        cut: 0,
    },
    Fault {
        name: "a model type that nobody knows",
        make: |c| {
            c.config["model_type"] = json!("perceptron");
            true
        },
        kinds: &[Kind::Unsupported],
        names: &["perceptron"],
        cut: 0,
    },
];

fn plan(folder: &Path) -> Result<(), Error> {
    engine::plan(folder, &LoadOptions::default(), 1).map(|_| ())
}

#[test]
fn each_fault_has_its_error() {
    let only = std::env::var("METRALE_ONLY").unwrap_or_default();
    let (mut checked, mut wrong) = (0, Vec::new());
    for path in folders() {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if !only.is_empty() && !only.split(',').any(|o| o == name) || Copy::read(&path).is_none() || plan(&path).is_err() {
            continue;
        }
        for (index, fault) in FAULTS.iter().enumerate() {
            let mut copy = Copy::read(&path).unwrap();
            // The scheme is read from a file of its own there.
            if !(fault.make)(&mut copy) || path.join("hf_quant_config.json").exists() && fault.name == "unknown quant method" {
                continue;
            }
            let scratch = Scratch::new(&format!("broken-{name}-{index}"));
            copy.write(&scratch, fault.cut);
            checked += 1;
            match std::panic::catch_unwind(|| plan(scratch.path())) {
                Err(_) => wrong.push(format!("{name}, {}: panicked", fault.name)),
                Ok(Ok(())) => wrong.push(format!("{name}, {}: nothing was found", fault.name)),
                Ok(Err(e)) if !fault.kinds.contains(&e.kind()) || !fault.names.iter().any(|n| e.message().contains(n)) => {
                    wrong.push(format!("{name}, {}: {:?} {e}", fault.name, e.kind()));
                }
                Ok(Err(_)) => {}
            }
        }
    }
    wrong.iter().for_each(|w| println!("{w}"));
    println!("{checked} broken copies");
    assert!(wrong.is_empty(), "{} faults have other errors", wrong.len());
}
