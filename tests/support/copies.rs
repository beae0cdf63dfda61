//! Copies of checkpoints that a test may break: config and tensors in memory, written to a scratch folder.

use super::Scratch;
use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;
use std::path::{Path, PathBuf};

/// One tensor.
#[derive(Clone)]
pub struct Tensor {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

/// A safetensors checkpoint in memory, shards joined.
#[derive(Clone)]
pub struct Copy {
    pub config: Value,
    pub tensors: Vec<Tensor>,
    source: PathBuf,
}

/// Folders with a `config.json` and safetensors: the fixtures', and the reference checkpoints where they lie beside the project.
pub fn sources() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found: Vec<PathBuf> = Vec::new();
    for place in [root.join("tests/fixtures/models"), root.join("../shared/reference/models")] {
        let Ok(entries) = std::fs::read_dir(&place) else {
            println!("SKIPPED: {} is not here", place.display());
            continue;
        };
        for path in entries.flatten().map(|e| e.path()).filter(|p| p.join("config.json").exists()) {
            if found.iter().all(|other| other.file_name() != path.file_name()) {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

fn weights(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<PathBuf> = std::fs::read_dir(folder)
        .unwrap()
        .map(|e| e.unwrap().path())
        .filter(|p| {
            p.extension().is_some_and(|e| e == "safetensors") && p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("model"))
        })
        .collect();
    files.sort();
    files
}

impl Copy {
    /// Reads a folder.
    pub fn read(folder: &Path) -> Copy {
        let config = serde_json::from_slice(&std::fs::read(folder.join("config.json")).unwrap()).unwrap_or(Value::Null);
        let mut tensors = Vec::new();
        for file in weights(folder) {
            let bytes = std::fs::read(file).unwrap();
            for (name, view) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
                tensors.push(Tensor { name, dtype: view.dtype(), shape: view.shape().to_vec(), bytes: view.data().to_vec() });
            }
        }
        tensors.sort_by(|a, b| a.name.cmp(&b.name));
        Copy { config, tensors, source: folder.into() }
    }

    /// The object that holds the language model's numbers.
    pub fn text(&mut self) -> &mut Value {
        if self.config.get("text_config").is_some_and(Value::is_object) { &mut self.config["text_config"] } else { &mut self.config }
    }

    /// The weights as the bytes of one file.
    pub fn bytes(&self) -> Vec<u8> {
        let views = self.tensors.iter().map(|t| (t.name.as_str(), TensorView::new(t.dtype, t.shape.clone(), &t.bytes).unwrap()));
        safetensors::serialize(views, None).unwrap()
    }

    /// Writes config and weights.
    pub fn write(&self, to: &Scratch) {
        self.write_config(to);
        to.file("model.safetensors", self.bytes());
    }

    /// Writes the config; weights are links to the source's.
    pub fn link(&self, to: &Scratch) {
        self.write_config(to);
        for file in std::fs::read_dir(&self.source).unwrap().map(|e| e.unwrap().path()) {
            let name = file.file_name().unwrap().to_string_lossy().into_owned();
            if name.starts_with("model") {
                let link = to.path().join(&name);
                #[cfg(unix)]
                std::os::unix::fs::symlink(&file, link).unwrap();
                #[cfg(not(unix))]
                std::fs::copy(&file, link).map(|_| ()).unwrap();
            }
        }
    }

    /// Writes the config alone.
    pub fn write_config(&self, to: &Scratch) {
        to.file("config.json", self.config.to_string());
        for file in ["hf_quant_config.json", "tokenizer.json"] {
            if let Ok(bytes) = std::fs::read(self.source.join(file)) {
                to.file(file, bytes);
            }
        }
    }
}
