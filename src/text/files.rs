//! Files of a tokenizer's folder by name, wherever they are kept.

use crate::ensure;
use crate::error::{Error, Kind, Result};
use std::borrow::Cow;
use std::fs;
use std::path::PathBuf;

/// Something that has files with names.
pub trait Files: Sync {
    /// What messages call a file.
    fn label(&self, name: &str) -> String;

    /// A file's bytes; `None` if there is none of this name, an error if it has more than `limit`.
    fn read(&self, name: &str, limit: u64) -> Result<Option<Cow<'_, [u8]>>>;

    /// Names of the files in a folder inside this one; none where there is no such folder.
    fn list(&self, folder: &str) -> Vec<String>;
}

impl Files for PathBuf {
    fn label(&self, name: &str) -> String {
        self.join(name).display().to_string()
    }

    fn read(&self, name: &str, limit: u64) -> Result<Option<Cow<'_, [u8]>>> {
        let (path, label) = (self.join(name), self.label(name));
        let io = |e: std::io::Error| Error::new(Kind::Io, format!("{label}: {e}")).named(label.clone());
        let facts = match fs::metadata(&path) {
            Ok(facts) => facts,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(io(e)),
        };
        ensure!(facts.is_file(), CorruptFile, "{label} is not a regular file");
        if facts.len() > limit {
            return Err(Error::new(Kind::TooLarge, format!("{label} has {} bytes", facts.len())).sizes(facts.len(), limit));
        }
        fs::read(&path).map(|bytes| Some(Cow::Owned(bytes))).map_err(io)
    }

    fn list(&self, folder: &str) -> Vec<String> {
        let entries = fs::read_dir(self.join(folder)).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
    }
}
