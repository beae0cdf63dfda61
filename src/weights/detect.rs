//! What a path holds, judged by content: names lie, and a wrong file deserves a sentence about what it looks like.
//!
//! Only the first bytes of a file or the names in a folder are looked at, and nothing that could block is opened.

use super::safetensors::MAX_HEADER;
use super::source;
use crate::error::{Error, Kind, Result};
use std::path::{Path, PathBuf};

/// What a path leads to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found {
    /// A folder with `config.json`, or `params.json` in Mistral's own layout.
    Folder(PathBuf),
    /// A GGUF file, given by itself or as the only one of its folder.
    Gguf(PathBuf),
    /// A safetensors file, whose folder may have the config.
    Safetensors(PathBuf),
}

/// Decides what `path` is, or says why it is no model.
pub fn identify(path: &Path) -> Result<Found> {
    let label = path.display().to_string();
    let metadata = std::fs::metadata(path).map_err(|e| source::io_error(&label, "opening", &e))?;
    if metadata.is_dir() {
        return folder(path);
    }
    if !metadata.is_file() {
        return Err(not_a_model(&label, source::describe(&metadata)));
    }
    let (start, size) = source::read_start(path, 512)?;
    match content(&start, size) {
        Content::Gguf => Ok(Found::Gguf(path.into())),
        Content::Safetensors => Ok(Found::Safetensors(path.into())),
        Content::Other(what) => Err(not_a_model(&label, what)),
    }
}

/// What a file's first bytes say.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    Gguf,
    Safetensors,
    /// Something else, with its article.
    Other(&'static str),
}

/// Signatures of what people hand over by mistake.
const SIGNATURES: [(&[u8], &str); 16] = [
    (b"version https://git-lfs", "a Git LFS pointer; the real file has to be fetched with `git lfs pull`"),
    (b"PK\x03\x04", "a ZIP archive (PyTorch checkpoints are ZIP archives too; convert them to safetensors)"),
    (b"PK\x05\x06", "an empty ZIP archive"),
    (b"\x80\x02", "a Python pickle; convert it to safetensors"),
    (b"\x1f\x8b", "a gzip archive"),
    (b"\xfd7zXZ", "an xz archive"),
    (b"\x28\xb5\x2f\xfd", "a zstd archive"),
    (b"7z\xbc\xaf", "a 7z archive"),
    (b"BZh", "a bzip2 archive"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x7fELF", "a program or library"),
    (b"lmgg", "a GGML file from before GGUF; convert it again"),
    (b"fmgg", "a GGML file from before GGUF; convert it again"),
    (b"tjgg", "a GGML file from before GGUF; convert it again"),
    (b"%PDF", "a PDF document"),
];

/// Judges a file of `size` bytes by its first ones.
pub(super) fn content(start: &[u8], size: u64) -> Content {
    if start.is_empty() {
        return Content::Other("an empty file");
    }
    if start.starts_with(b"GGUF") {
        return Content::Gguf;
    }
    if let Some((_, what)) = SIGNATURES.iter().find(|(signature, _)| start.starts_with(signature)) {
        return Content::Other(what);
    }
    // A header length that the format allows, and a JSON object where the header begins. Whether the file is as long as
    // it says is for the parser, which can tell what is missing.
    if let Some(length) = start.first_chunk::<8>()
        && (2..=MAX_HEADER).contains(&u64::from_le_bytes(*length))
        && start.get(8) == Some(&b'{')
    {
        return Content::Safetensors;
    }
    if start.get(257..262) == Some(b"ustar") {
        return Content::Other("a tar archive");
    }
    let text = start.trim_ascii_start();
    Content::Other(match text.first() {
        Some(b'<') => "an HTML or XML page; was it downloaded from a page that shows the file?",
        Some(b'{' | b'[') => "a JSON file; give the folder that holds it",
        None => "nothing but white space",
        _ if start.iter().all(|&b| b == 0) => "zeros; was the download finished?",
        _ if size < 24 => "too short for any model",
        _ if is_text(start) => "a text file",
        _ => "of an unknown format",
    })
}

/// UTF-8 (whose last character may be cut) without control characters other than white space.
fn is_text(start: &[u8]) -> bool {
    let valid = std::str::from_utf8(start).map_or_else(|e| e.error_len().is_none(), |_| true);
    valid && start.iter().all(|b| !b.is_ascii_control() || b.is_ascii_whitespace())
}

fn folder(path: &Path) -> Result<Found> {
    if exists(&path.join("config.json"))? {
        return Ok(Found::Folder(path.into()));
    }
    let label = path.display();
    let mut ggufs = Vec::new();
    for entry in std::fs::read_dir(path).map_err(|e| source::io_error(&label.to_string(), "listing", &e))? {
        let entry = entry.map_err(|e| source::io_error(&label.to_string(), "listing", &e))?;
        let file = entry.path();
        if file.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf")) && !is_later_part(&file) {
            ggufs.push(file);
        }
    }
    ggufs.sort();
    match ggufs.as_slice() {
        [one] => match identify(one)? {
            Found::Gguf(path) => Ok(Found::Gguf(path)),
            _ => Err(not_a_model(&one.display().to_string(), "a safetensors file under the name of a GGUF")),
        },
        // Mistral's own layout.
        [] if exists(&path.join(super::native::PARAMS))? => Ok(Found::Folder(path.into())),
        [] => Err(not_a_model(&label.to_string(), "a folder without config.json and without a .gguf file")),
        [a, b, ..] => Err(Error::new(
            Kind::InvalidArgument,
            format!("{label} holds {} GGUF files ({}, {} ...); name one of them", ggufs.len(), file_name(a), file_name(b)),
        )),
    }
}

/// Whether a GGUF file is the second or a later part of a split one (`-00002-of-00005.gguf`).
fn is_later_part(path: &Path) -> bool {
    split_part(&file_name(path)).is_some_and(|(_, part, _)| part > 1)
}

/// Stem, number and count of a split GGUF's file name.
pub(super) fn split_part(name: &str) -> Option<(&str, u32, u32)> {
    let rest = name.strip_suffix(".gguf")?;
    let (rest, count) = rest.rsplit_once("-of-")?;
    let (stem, part) = rest.rsplit_once('-')?;
    let number = |s: &str| if s.len() == 5 { s.parse().ok() } else { None };
    Some((stem, number(part)?, number(count)?))
}

fn file_name(path: &Path) -> String {
    path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default()
}

/// Whether a name exists; a failure other than absence is an error, not a no.
pub(super) fn exists(path: &Path) -> Result<bool> {
    path.try_exists().map_err(|e| source::io_error(&path.display().to_string(), "looking for it", &e))
}

pub(super) fn not_a_model(label: &str, what: &str) -> Error {
    Error::new(
        Kind::NotAModel,
        format!("{label} is no model: it is {what}. A folder with config.json and safetensors, or a .gguf file, is needed"),
    )
    .named(label)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn content_is_told_apart_by_its_first_bytes() {
        let mut tar = vec![b'x'; 512];
        tar[257..262].copy_from_slice(b"ustar");
        for (start, expected) in [
            (&b""[..], "empty"),
            (b"<!DOCTYPE html><html>", "HTML"),
            (b"\n\t <html lang=en>", "HTML"),
            (b"PK\x03\x04............", "ZIP"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "LFS"),
            (b"\x80\x02\x8a\x0al\xfc\x9c", "pickle"),
            (b"{\"model_type\": \"llama\"}", "JSON"),
            (b"tjgg\x03\0\0\0", "before GGUF"),
            (b"Access denied: token missing", "a text file"),
            (b"GGU", "too short"),
            (&[0; 512], "zeros"),
            (&[0xA5; 512], "unknown"),
            (&tar, "tar"),
            (b"\x00\x00\x00\x00\x00\x00\x01\x00{\"a\"................", "unknown"),
        ] {
            match content(start, start.len() as u64) {
                Content::Other(what) => assert!(what.contains(expected), "{what:?} should say {expected:?}"),
                other => panic!("{expected}: found {other:?}"),
            }
        }
        assert_eq!(content(b"GGUF\x03\0\0\0", 8), Content::Gguf);
        assert_eq!(content(b"\x40\0\0\0\0\0\0\0{\"__metadata__\"", 22), Content::Safetensors);
    }

    #[test]
    fn parts_of_split_files_are_recognised() {
        assert_eq!(split_part("m-q4-00002-of-00003.gguf"), Some(("m-q4", 2, 3)));
        assert_eq!(split_part("m-q4.gguf"), None);
        assert_eq!(split_part("m-2-of-3.gguf"), None);
    }
}
