//! The same bits wherever a model's bytes come from, in every format a fixture has.

mod support;

use metrale::engine::{Engine, Loader, Sequence, SequenceOptions, load, load_from};
use metrale::error::{Error, Kind, Result};
use metrale::options::LoadOptions;
use metrale::weights::{Access, FileBytes, Input, ReadAt};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use support::{Scratch, fixtures};

fn options() -> LoadOptions {
    LoadOptions { threads: 1, ..LoadOptions::default() }
}

fn bits(engine: &Arc<Engine>) -> Vec<u32> {
    let mut s = Sequence::new(engine, &SequenceOptions::default()).unwrap();
    s.prefill(&[1, 5, 9, 2, 7]).unwrap();
    s.logits().unwrap().iter().map(|v| v.to_bits()).collect()
}

/// GGUF files among the fixtures.
fn files() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(fixtures()).unwrap();
    let mut files: Vec<PathBuf> = entries.map(|e| e.unwrap().path().join("model.gguf")).filter(|p| p.exists()).collect();
    files.sort();
    assert!(files.len() >= 8, "{files:?}");
    files
}

/// A host's file that ends, or fails, at a byte.
struct Host(Vec<u8>, u64);

impl ReadAt for Host {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let end = offset + into.len() as u64;
        if end > self.1 {
            return Err(Error::new(Kind::Io, format!("nothing at offset {offset}")).at(offset));
        }
        into.copy_from_slice(&self.0[offset as usize..end as usize]);
        Ok(())
    }
}

#[test]
fn every_format_from_every_kind_of_source() {
    let scratch = Scratch::new("sources");
    for (number, path) in files().iter().enumerate() {
        let expected = bits(&load(path, &options(), None).unwrap());
        let bytes = std::fs::read(path).unwrap();
        let same = |input: Input, what: &str| {
            let engine = load_from(input, &options(), None).unwrap();
            assert!(bits(&engine) == expected, "{}: {what}", path.display());
        };
        same(Input::path(path, Access::Read).unwrap(), "path, read");
        same(Input::Reader { label: "x".into(), len: bytes.len() as u64, reader: Arc::new(Host(bytes.clone(), u64::MAX)) }, "reader");
        // Offsets that no alignment divides, and one of a page; other ones for each file.
        for offset in [1 + number, 32 + number, 63 - number, 4096] {
            let mut container = vec![0x5a; offset];
            container.extend(&bytes);
            container.extend([0x5a; 100]);
            let file = scratch.file(&format!("container-{offset}"), &container);
            for access in [Access::Map, Access::Read] {
                let opened = File::open(&file).unwrap();
                same(
                    Input::file(opened, offset as u64, bytes.len() as u64, access, "container").unwrap(),
                    &format!("file at {offset}, {access:?}"),
                );
            }
            let lent: &'static [u8] = Box::leak(container.into_boxed_slice());
            same(Input::Ready(Arc::new(FileBytes::lent("lent", &lent[offset..][..bytes.len()]))), &format!("buffer at {offset}"));
        }
    }
}

/// Slices of one byte fill one panel each, which changes nothing.
#[test]
fn the_smallest_slices_make_the_same_model() {
    for path in files() {
        let expected = bits(&load(&path, &options(), None).unwrap());
        let mut loader = Loader::new(Input::path(&path, Access::Map).unwrap(), &options());
        let (mut steps, mut done) = (0, 0);
        let engine = loop {
            if let Some(engine) = loader.step(1).unwrap() {
                break engine;
            }
            let progress = loader.progress();
            assert!(
                progress.done_bytes >= done && (progress.total_bytes == 0 || progress.done_bytes <= progress.total_bytes),
                "{progress:?}"
            );
            (steps, done) = (steps + 1, progress.done_bytes);
        };
        assert!(steps > 20, "{steps}");
        assert!(bits(&engine) == expected, "{}", path.display());
        assert_eq!(loader.step(1).err().map(|e| e.kind()), Some(Kind::InvalidState));
    }
}

#[test]
fn a_failed_read_says_where() {
    let path = &files()[0];
    let bytes = std::fs::read(path).unwrap();
    let len = bytes.len() as u64;
    for end in [0, len / 2, len - 1] {
        let reader = Arc::new(Host(bytes.clone(), end));
        let mut loader = Loader::new(Input::Reader { label: "x".into(), len, reader }, &options());
        let error = loop {
            match loader.step(1000) {
                Ok(engine) => assert!(engine.is_none()),
                Err(e) => break e,
            }
        };
        assert_eq!((error.kind(), error.offset()), (Kind::Io, Some(end / 1000 * 1000)), "{error}");
    }
    // A file that became shorter after its source was made.
    let scratch = Scratch::new("sources-short");
    let file = scratch.file("model.gguf", &bytes);
    let input = Input::file(File::open(&file).unwrap(), 0, 0, Access::Read, "short").unwrap();
    std::fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    assert_eq!(load_from(input, &options(), None).err().map(|e| e.kind()), Some(Kind::Io));
    let beyond = Input::file(File::open(&file).unwrap(), 1, len, Access::Map, "short").err().unwrap();
    assert_eq!((beyond.kind(), beyond.wanted(), beyond.available()), (Kind::CorruptFile, Some(len + 1), Some(len / 2)));
}

/// Checkpoints of several files among the fixtures.
fn folders() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(fixtures()).unwrap();
    let mut folders: Vec<PathBuf> = entries.map(|e| e.unwrap().path()).filter(|p| p.join("model.safetensors").exists()).collect();
    folders.sort();
    assert!(folders.len() >= 6, "{folders:?}");
    folders
}

fn lent(bytes: &[u8], offset: usize) -> Input {
    let moved: &'static [u8] = Box::leak([&vec![0x5a; offset][..], bytes].concat().into_boxed_slice());
    Input::Ready(Arc::new(FileBytes::lent("lent", &moved[offset..])))
}

/// A folder source of the files of `folder`, each from another kind of source and at another offset.
fn folder_source(folder: &Path, scratch: &Scratch, turn: usize) -> Input {
    let mut source = Input::folder();
    let names = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap());
    for (index, name) in names.filter(|name| name != "golden.safetensors").enumerate() {
        let (path, offset) = (folder.join(&name), (7 * index + turn) % 64);
        let bytes = std::fs::read(&path).unwrap();
        let part = match (index + turn) % 5 {
            0 => lent(&bytes, offset),
            1 => Input::Reader { label: name.clone(), len: bytes.len() as u64, reader: Arc::new(Host(bytes, u64::MAX)) },
            2 => Input::path(&path, Access::Read).unwrap(),
            3 => Input::path(&path, Access::Map).unwrap(),
            _ => {
                let container = scratch.file(&format!("{turn}-{index}"), [&vec![0x5a; offset][..], &bytes, b"tail"].concat());
                Input::file(File::open(container).unwrap(), offset as u64, bytes.len() as u64, Access::Map, "container").unwrap()
            }
        };
        source.add(&name, part).unwrap();
    }
    source
}

#[test]
fn folders_out_of_parts_are_the_folders() {
    let scratch = Scratch::new("parts");
    for folder in folders() {
        let model = load(&folder, &options(), None).unwrap();
        // What translates is tried in tests/nllb.rs.
        if model.has_encoder() {
            continue;
        }
        let expected = bits(&model);
        for turn in 0..5 {
            let engine = load_from(folder_source(&folder, &scratch, turn), &options(), None).unwrap();
            assert!(bits(&engine) == expected, "{}, turn {turn}", folder.display());
            assert_eq!(engine.tokenizer().is_ok(), model.tokenizer().is_ok(), "{}", folder.display());
            if let (Ok(ours), Ok(theirs)) = (engine.tokenizer(), model.tokenizer()) {
                assert_eq!(ours.encode("once upon a time", true, true).unwrap(), theirs.encode("once upon a time", true, true).unwrap());
            }
            assert_eq!(engine.chat_template().is_ok(), model.chat_template().is_ok(), "{}", folder.display());
            assert_eq!(engine.info().end_tokens, model.info().end_tokens, "{}", folder.display());
        }
    }
}

/// Row 25: weights at every offset modulo 64, in memory and in a container.
#[test]
fn safetensors_at_every_offset() {
    let scratch = Scratch::new("parts-offsets");
    let folder = fixtures().join("llama");
    let expected = bits(&load(&folder, &options(), None).unwrap());
    let (config, weights) = (std::fs::read(folder.join("config.json")).unwrap(), std::fs::read(folder.join("model.safetensors")).unwrap());
    for offset in 0..64 {
        let container = scratch.file("container", [&vec![0x5a; offset][..], &weights, b"tail"].concat());
        let file = Input::file(File::open(container).unwrap(), offset as u64, weights.len() as u64, Access::Map, "container").unwrap();
        for part in [lent(&weights, offset), file] {
            let mut source = Input::folder();
            source.add("model.safetensors", part).unwrap();
            source.add("config.json", lent(&config, 63 - offset)).unwrap();
            assert!(bits(&load_from(source, &options(), None).unwrap()) == expected, "offset {offset}");
        }
    }
}

/// A checkpoint in shards and a split GGUF are folders, too; what is missing is named.
#[test]
fn shards_are_found_by_name_and_missing_parts_are_named() {
    let folder = fixtures().join("llama");
    let read = |name: &str| std::fs::read(folder.join(name)).unwrap();
    let (config, weights) = (read("config.json"), read("model.safetensors"));
    let expected = bits(&load(&folder, &options(), None).unwrap());
    let names: Vec<String> = safetensors::SafeTensors::deserialize(&weights).unwrap().names().into_iter().map(str::to_owned).collect();
    let map: serde_json::Map<String, serde_json::Value> = names.iter().map(|name| (name.clone(), "a.safetensors".into())).collect();
    let index = serde_json::json!({"weight_map": map}).to_string();
    let with = |parts: &[(&str, &[u8])]| {
        let mut source = Input::folder();
        parts.iter().for_each(|(name, bytes)| source.add(name, lent(bytes, 3)).unwrap());
        load_from(source, &options(), None)
    };
    let (named, index) = ("model.safetensors.index.json", index.as_bytes());
    assert!(bits(&with(&[("config.json", &config), (named, index), ("a.safetensors", &weights)]).unwrap()) == expected);
    for (parts, kind, text) in [
        (&[("config.json", &config[..]), (named, index)][..], Kind::NotFound, "a.safetensors"),
        (&[("config.json", &config)], Kind::NotFound, "model.safetensors"),
        (&[("model.safetensors", &weights)], Kind::NotAModel, "config.json"),
        (&[], Kind::NotAModel, "0 parts"),
        (&[("config.json", b"[]"), ("model.safetensors", &weights)], Kind::CorruptFile, "config.json: holds no JSON object"),
        (&[("config.json", &config), ("model.safetensors", &weights[..weights.len() / 2])], Kind::CorruptFile, "model.safetensors"),
        (&[("config.json", &config), ("model.safetensors", b"GGUF")], Kind::NotAModel, "GGUF"),
        (&[("a.gguf", b"GGUF"), ("b.gguf", b"GGUF")], Kind::InvalidArgument, "more than one"),
    ] {
        let error = with(parts).err().unwrap();
        assert!(error.kind() == kind && error.message().contains(text), "{error}");
    }
    let mut source = Input::folder();
    source.add("config.json", lent(&config, 0)).unwrap();
    for (name, kind) in [
        ("config.json", Kind::InvalidArgument),
        ("", Kind::InvalidArgument),
        ("../a", Kind::InvalidArgument),
        ("/a", Kind::InvalidArgument),
    ] {
        assert_eq!(source.add(name, lent(&config, 0)).unwrap_err().kind(), kind, "{name:?}");
    }
    assert_eq!(source.add("inner", Input::folder()).unwrap_err().kind(), Kind::InvalidArgument);
    assert_eq!(lent(&config, 0).add("a", lent(&config, 0)).unwrap_err().kind(), Kind::InvalidArgument);
}
