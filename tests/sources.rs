//! The same bits wherever a model's bytes come from, in every format a fixture has.

mod support;

use metrale::engine::{Engine, Loader, Sequence, SequenceOptions, load, load_from};
use metrale::error::{Error, Kind, Result};
use metrale::options::LoadOptions;
use metrale::weights::{Access, FileBytes, Input, ReadAt};
use std::fs::File;
use std::path::PathBuf;
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
