//! Golden outputs beside reference checkpoints: `golden.safetensors` and `golden.json`.

use safetensors::{Dtype, SafeTensors};
use std::path::{Path, PathBuf};

/// A checkpoint's goldens.
pub struct Golden {
    pub prompt: Vec<i32>,
    pub prompt_logits: Vec<f32>,
    pub decode_ids: Vec<i32>,
    pub decode_logits: Vec<f32>,
    /// `layer.N`, in order.
    pub layers: Vec<(String, Vec<f32>)>,
    /// Of a translation: what the encoder makes of the prompt, the decoder's tokens, and its logits at each of them.
    pub translation: Option<Translation>,
    /// How far the reference is from itself when computed with a cache.
    pub uncertainty: f32,
}

/// Goldens of a model that reads a source (the prompt) and writes its translation.
pub struct Translation {
    pub encoded: Vec<f32>,
    pub tokens: Vec<i32>,
    pub logits: Vec<f32>,
}

fn words(file: &SafeTensors<'_>, name: &str) -> Option<(Dtype, Vec<[u8; 4]>)> {
    let view = file.tensor(name).ok()?;
    Some((view.dtype(), view.data().chunks_exact(4).map(|b| [b[0], b[1], b[2], b[3]]).collect()))
}

fn floats(file: &SafeTensors<'_>, name: &str) -> Option<Vec<f32>> {
    let (dtype, words) = words(file, name)?;
    assert_eq!(dtype, Dtype::F32, "{name}");
    Some(words.into_iter().map(f32::from_le_bytes).collect())
}

fn ints(file: &SafeTensors<'_>, name: &str) -> Option<Vec<i32>> {
    let (dtype, words) = words(file, name)?;
    assert_eq!(dtype, Dtype::I32, "{name}");
    Some(words.into_iter().map(i32::from_le_bytes).collect())
}

impl Golden {
    /// Reads a folder's goldens.
    pub fn read(folder: &Path) -> Golden {
        let bytes = std::fs::read(folder.join("golden.safetensors")).expect("golden.safetensors");
        let file = SafeTensors::deserialize(&bytes).expect("a sound golden");
        let json: serde_json::Value =
            serde_json::from_slice(&std::fs::read(folder.join("golden.json")).expect("golden.json")).expect("JSON");
        let mut layers: Vec<(usize, String)> =
            file.names().into_iter().filter_map(|n| Some((n.strip_prefix("layer.")?.parse().ok()?, n.to_string()))).collect();
        layers.sort();
        Golden {
            prompt: ints(&file, "input_ids").expect("input_ids"),
            prompt_logits: floats(&file, "prompt_logits").unwrap_or_default(),
            decode_ids: ints(&file, "decode_ids").unwrap_or_default(),
            decode_logits: floats(&file, "decode_logits").unwrap_or_default(),
            layers: layers.into_iter().filter_map(|(_, n)| floats(&file, &n).map(|v| (n, v))).collect(),
            translation: floats(&file, "encoder_output").map(|encoded| Translation {
                encoded,
                tokens: ints(&file, "decoder_input_ids").expect("decoder_input_ids"),
                logits: floats(&file, "decoder_logits").expect("decoder_logits"),
            }),
            uncertainty: json.get("max_abs_diff_full_vs_cached").and_then(|v| v.as_f64()).unwrap_or(0.0) as f32,
        }
    }
}

/// Folders with goldens: the fixtures', and all reference checkpoints where they lie beside the project. `METRALE_REFERENCE` names a folder
/// to walk instead.
pub fn folders() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = Vec::new();
    let places = match std::env::var_os("METRALE_REFERENCE") {
        Some(place) => vec![PathBuf::from(place)],
        None => vec![root.join("tests/fixtures/models"), root.join("../shared/reference/models")],
    };
    for place in places {
        let Ok(entries) = std::fs::read_dir(place) else { continue };
        found.extend(
            entries
                .flatten()
                .map(|e| e.path())
                .filter(|p| p.join("golden.safetensors").exists() && !p.join("adapter_config.json").exists()),
        );
    }
    found.sort();
    found
}
