//! Sharded checkpoints: `model.safetensors.index.json` says which file holds which tensor.

use crate::error::{Error, Kind, Result};
use serde_json::Value;
use std::path::{Component, Path};

/// Shard files in order of first mention, and for each tensor its name and shard.
#[derive(Debug)]
pub(super) struct Index {
    pub shards: Vec<String>,
    pub tensors: Vec<(String, usize)>,
}

/// Reads a parsed index. File names that lead out of the folder are refused: an index is data from elsewhere.
pub(super) fn read(json: &Value, label: &str) -> Result<Index> {
    let corrupt = |text: String| Error::new(Kind::CorruptFile, format!("{label}: {text}")).named(label);
    let Some(map) = json.get("weight_map").and_then(Value::as_object) else {
        return Err(corrupt("there is no object \"weight_map\"".into()));
    };
    let mut index = Index { shards: Vec::new(), tensors: Vec::new() };
    let mut known = std::collections::HashMap::new();
    for (tensor, file) in map {
        let Some(file) = file.as_str() else {
            return Err(corrupt(format!("the file of tensor {tensor:?} is {file}, expected a string")));
        };
        if !stays_inside(file) {
            return Err(corrupt(format!("tensor {tensor:?} is said to be in {file:?}, which is not a file of this folder")).named(tensor));
        }
        let shard = *known.entry(file).or_insert_with(|| {
            index.shards.push(file.to_owned());
            index.shards.len() - 1
        });
        index.tensors.push((tensor.clone(), shard));
    }
    Ok(index)
}

/// Whether a relative path has names only: no root, no `..`, no drive.
pub(super) fn stays_inside(file: &str) -> bool {
    let mut parts = Path::new(file).components().peekable();
    parts.peek().is_some() && parts.all(|part| matches!(part, Component::Normal(_))) && !file.contains(['\\', '\0'])
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn shards_are_listed_once() {
        let index = read(&json!({"weight_map": {"a": "1.st", "b": "2.st", "c": "1.st"}}), "i").unwrap();
        assert_eq!(index.shards, ["1.st", "2.st"]);
        assert_eq!(index.tensors, [("a".into(), 0), ("b".into(), 1), ("c".into(), 0)]);
    }

    #[test]
    fn names_that_leave_the_folder_are_refused() {
        for file in ["../x", "/etc/passwd", "a/../../x", "", ".", "..", "a\\b", "x\0"] {
            let error = read(&json!({"weight_map": {"a": file}}), "i").unwrap_err();
            assert_eq!(error.kind(), Kind::CorruptFile, "{file:?}");
        }
        for json in [json!({}), json!([]), json!({"weight_map": 3}), json!({"weight_map": {"a": 1}})] {
            assert_eq!(read(&json, "i").unwrap_err().kind(), Kind::CorruptFile, "{json}");
        }
    }
}
