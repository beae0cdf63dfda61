//! Paths that hold a checkpoint in some layout, and paths that hold anything else.

mod support;

use metrale::error::Kind;
use metrale::weights::{Access, Checkpoint};
use std::path::Path;
use support::{GgufWriter, Scratch, fixtures};

/// A safetensors file with one tensor of 4 bytes per name.
fn safetensors(names: &[&str]) -> Vec<u8> {
    let entries: Vec<String> = names
        .iter()
        .enumerate()
        .map(|(i, name)| format!(r#""{name}":{{"dtype":"F32","shape":[1],"data_offsets":[{},{}]}}"#, 4 * i, 4 * i + 4))
        .collect();
    let header = format!("{{{}}}", entries.join(","));
    let data: Vec<u8> = (0..names.len()).flat_map(|i| (i as f32).to_le_bytes()).collect();
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &data].concat()
}

fn refused(path: &Path, kind: Kind, text: &str) {
    let error = Checkpoint::open(path).err().unwrap_or_else(|| panic!("{} was accepted", path.display()));
    assert_eq!(error.kind(), kind, "{}: {error}", path.display());
    assert!(error.message().contains(text), "{}: {error} should say {text:?}", path.display());
}

#[test]
fn a_folder_opens_by_itself_and_by_its_file() {
    let folder = fixtures().join("llama");
    for path in [folder.clone(), folder.join("model.safetensors")] {
        for access in [Access::Map, Access::Read] {
            let c = Checkpoint::open_with(&path, access).unwrap();
            assert_eq!(c.config()["model_type"], "llama");
            assert_eq!(c.generation_config().unwrap()["do_sample"], false);
            assert_eq!(c.folder(), Some(folder.as_path()));
            assert_eq!(c.tensor("model.embed_tokens.weight").unwrap().shape, [320, 64]);
            assert!(c.tensor("model.embed_tokens.weight2").is_none() && c.gguf().is_none());
            let d = c.describe();
            assert_eq!((d.format.as_str(), d.tensors, d.files.len()), ("safetensors", c.names().count(), 1));
            assert!(d.tensor_bytes < d.files[0].1);
            assert_eq!(c.read_json("golden.json").unwrap().unwrap()["family"], "llama");
            assert_eq!(c.read_json("absent.json").unwrap(), None);
            assert_eq!(c.read_json("../llama/golden.json").unwrap_err().kind(), Kind::InvalidArgument);
        }
    }
}

#[test]
fn values_are_what_the_safetensors_crate_reads() {
    let c = Checkpoint::open(&fixtures().join("llama")).unwrap();
    let bytes = std::fs::read(fixtures().join("llama/model.safetensors")).unwrap();
    let theirs = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(theirs.len(), c.names().count());
    for (name, view) in theirs.tensors() {
        let ours = c.tensor(&name).unwrap();
        assert_eq!((ours.shape.as_slice(), ours.data), (view.shape(), view.data()), "{name}");
    }
}

#[test]
fn shards_follow_their_index() {
    let s = Scratch::new("shards");
    s.file("config.json", r#"{"model_type": "x", "limit": [0.0, Infinity]}"#);
    let index = |map: &str| s.file("model.safetensors.index.json", format!(r#"{{"metadata": {{}}, "weight_map": {{{map}}}}}"#));
    s.file("m-1.safetensors", safetensors(&["a", "b", "unlisted"]));
    s.file("m-2.safetensors", safetensors(&["c"]));
    index(r#""c": "m-2.safetensors", "a": "m-1.safetensors", "b": "m-1.safetensors""#);
    for path in [s.path().to_owned(), s.path().join("m-2.safetensors")] {
        let c = Checkpoint::open(&path).unwrap();
        assert_eq!(c.names().collect::<Vec<_>>(), ["c", "a", "b"]);
        assert_eq!(c.tensor("b").unwrap().data, 1f32.to_le_bytes());
        assert_eq!(c.config()["limit"][1].as_f64().unwrap() as f32, f32::INFINITY);
        assert_eq!(c.describe().files.len(), 2);
    }
    index(r#""a": "m-1.safetensors", "d": "m-2.safetensors""#);
    refused(s.path(), Kind::CorruptFile, "\"d\" into \"m-2.safetensors\"");
    index(r#""a": "m-1.safetensors", "d": "m-3.safetensors""#);
    refused(s.path(), Kind::NotFound, "m-3.safetensors");
    index(r#""a": "../m-1.safetensors""#);
    refused(s.path(), Kind::CorruptFile, "not a file of this folder");
    index(r#""a": "m-1.safetensors", "c": "m-4.safetensors""#);
    s.file("m-4.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4\n");
    refused(s.path(), Kind::NotAModel, "LFS");
    s.file("m-4.safetensors", &safetensors(&["c"])[..30]);
    refused(s.path(), Kind::CorruptFile, "cut short");
    s.file("m-4.safetensors", "");
    refused(s.path(), Kind::NotAModel, "empty");
    s.file("model.safetensors.index.json", "{}");
    refused(s.path(), Kind::CorruptFile, "weight_map");
}

#[test]
fn a_folder_without_the_right_files_says_so() {
    let s = Scratch::new("folders");
    refused(&s.path().join("absent"), Kind::NotFound, "absent");
    refused(s.path(), Kind::NotAModel, "without config.json");
    s.file("loose.safetensors", safetensors(&["a"]));
    refused(&s.path().join("loose.safetensors"), Kind::NotFound, "no config.json beside it");
    s.file("params.json", "{}");
    refused(s.path(), Kind::NotFound, "neither model.safetensors");
    s.file("config.json", "[1, 2]");
    refused(s.path(), Kind::NotFound, "neither model.safetensors");
    s.file("pytorch_model.bin", "PK\x03\x04");
    refused(s.path(), Kind::Unsupported, "pickles");
    s.file("model.safetensors", safetensors(&["a"]));
    refused(s.path(), Kind::CorruptFile, "no JSON object");
    s.file("config.json", "{\"model_type\": ");
    refused(s.path(), Kind::CorruptFile, "not valid JSON");
    s.file("config.json", "{\"model_type\": \"x\"}");
    assert_eq!(Checkpoint::open(s.path()).unwrap().names().count(), 1);
    s.file("generation_config.json", "nonsense");
    refused(s.path(), Kind::CorruptFile, "generation_config.json");
}

#[test]
fn a_config_alone_is_enough_for_planning() {
    let s = Scratch::new("config-only");
    s.file("config.json", "{\"model_type\": \"x\"}");
    let c = Checkpoint::open_config(s.path()).unwrap();
    assert_eq!((c.config()["model_type"].as_str(), c.names().count()), (Some("x"), 0));
}

#[test]
fn what_people_hand_over_by_mistake_is_named() {
    let s = Scratch::new("mistakes");
    for (name, contents, text) in [
        ("page.gguf", &b"<!DOCTYPE html>\n<html><head>"[..], "HTML"),
        ("model.zip", b"PK\x03\x04\x14\0\0\0\x08\0", "ZIP"),
        ("empty.gguf", b"", "an empty file"),
        ("pointer.gguf", b"version https://git-lfs.github.com/spec/v1\noid sha256:00\n", "LFS"),
        ("config.json", b"{\"model_type\": \"llama\"}", "JSON"),
        ("short.gguf", b"GGU", "too short"),
        ("notes.txt", b"this is where the model used to be", "text"),
    ] {
        refused(&s.file(name, contents), Kind::NotAModel, text);
    }
    // Names do not decide: a GGUF is one under any name.
    let path = s.file("weights.bin", GgufWriter::llama().bytes());
    assert_eq!(Checkpoint::open(&path).unwrap().config()["model_type"], "llama");
}

#[cfg(unix)]
#[test]
fn pipes_and_devices_do_not_block() {
    let s = Scratch::new("pipes");
    let fifo = |name: &str| {
        let path = s.path().join(name);
        assert!(std::process::Command::new("mkfifo").arg(&path).status().unwrap().success());
        path
    };
    refused(&fifo("model.gguf"), Kind::NotAModel, "FIFO");
    refused(s.path(), Kind::NotAModel, "FIFO");
    refused(Path::new("/dev/zero"), Kind::NotAModel, "a device");
    fifo("config.json");
    fifo("model.safetensors");
    refused(s.path(), Kind::NotAModel, "FIFO");
    std::fs::remove_file(s.path().join("model.safetensors")).unwrap();
    s.file("model.safetensors", safetensors(&["a"]));
    refused(s.path(), Kind::NotAModel, "config.json is a pipe");
}

#[test]
fn a_gguf_is_found_in_its_folder() {
    let s = Scratch::new("gguf-folder");
    s.file("a.gguf", GgufWriter::llama().bytes());
    s.file("README.md", "text");
    let c = Checkpoint::open(s.path()).unwrap();
    assert_eq!((c.folder(), c.names().next()), (Some(s.path()), Some("model.embed_tokens.weight")));
    s.file("b.gguf", GgufWriter::llama().bytes());
    refused(s.path(), Kind::InvalidArgument, "2 GGUF files (a.gguf, b.gguf");
    assert!(Checkpoint::open(&s.path().join("b.gguf")).is_ok());
}

#[test]
fn parts_of_a_split_gguf_are_one_checkpoint() {
    let s = Scratch::new("split");
    let mut first = GgufWriter::llama();
    first.raw("split.count", 2, &2u16.to_le_bytes());
    let mut second = GgufWriter::new();
    second.tensor("output_norm.weight", &[4], 24, &[9, 8, 7, 6]);
    second.tensor("output.weight", &[4], 24, &[1, 1, 1, 1]);
    s.file("m-00001-of-00002.gguf", first.bytes());
    refused(s.path(), Kind::NotFound, "m-00002-of-00002.gguf");
    s.file("m-00002-of-00002.gguf", second.bytes());
    let c = Checkpoint::open(s.path()).unwrap();
    assert_eq!(c.tensor("model.norm.weight").unwrap().data, [9, 8, 7, 6]);
    assert_eq!(c.config()["tie_word_embeddings"], false, "the other part's output matrix counts");
    assert_eq!(c.describe().files.len(), 2);
    let renamed = s.file("renamed.gguf", first.bytes());
    refused(&renamed, Kind::InvalidArgument, "one of 2 parts");
    second.tensor("token_embd.weight", &[32, 8], 0, &[0; 1024]);
    s.file("m-00002-of-00002.gguf", second.bytes());
    refused(&s.path().join("m-00001-of-00002.gguf"), Kind::CorruptFile, "same name");
}
