//! The files of a checkpoint by their names in its folder: a folder of the system's, or parts that a host put together.

use super::source::{self, Access, Source};
use super::{detect, json};
use crate::error::{Error, Kind, Result};
use crate::text::Files;
use serde_json::Value;
use std::borrow::Cow;
use std::path::PathBuf;
use std::sync::Arc;

/// Where a checkpoint's files are looked for.
#[derive(Clone)]
pub enum Folder {
    /// A directory.
    Path(PathBuf),
    /// Names, with `/` between folder and file, and what they stand for.
    Parts(Arc<[(String, Arc<Source>)]>),
}

impl Folder {
    /// What messages call a file.
    pub(super) fn label(&self, name: &str) -> String {
        match self {
            Folder::Path(folder) => folder.join(name).display().to_string(),
            Folder::Parts(_) => name.to_owned(),
        }
    }

    /// What messages call the folder.
    pub(super) fn name(&self) -> String {
        match self {
            Folder::Path(folder) => folder.display().to_string(),
            Folder::Parts(_) => "the source".to_owned(),
        }
    }

    fn part<'a>(parts: &'a [(String, Arc<Source>)], name: &str) -> Option<&'a Arc<Source>> {
        parts.iter().find(|(known, _)| known == name).map(|(_, source)| source)
    }

    /// Whether there is a file of this name.
    pub(super) fn exists(&self, name: &str) -> Result<bool> {
        match self {
            Folder::Path(folder) => detect::exists(&folder.join(name)),
            Folder::Parts(parts) => Ok(Self::part(parts, name).is_some()),
        }
    }

    /// Bytes of a file, 0 where there is none.
    pub fn size(&self, name: &str) -> u64 {
        match self {
            Folder::Path(folder) => std::fs::metadata(folder.join(name)).map_or(0, |facts| facts.len()),
            Folder::Parts(parts) => Self::part(parts, name).map_or(0, |source| source.bytes().len() as u64),
        }
    }

    /// The first `n` bytes of a file, and its size.
    pub(super) fn start(&self, name: &str, n: usize) -> Result<(Vec<u8>, u64)> {
        match self {
            Folder::Path(folder) => source::read_start(&folder.join(name), n),
            Folder::Parts(_) => {
                let source = self.open(name, Access::Map)?;
                let bytes = source.bytes();
                Ok((bytes[..n.min(bytes.len())].to_vec(), bytes.len() as u64))
            }
        }
    }

    /// A whole file. `access` is for files that are opened here; parts are what they are.
    pub(super) fn open(&self, name: &str, access: Access) -> Result<Arc<Source>> {
        match self {
            Folder::Path(folder) => Source::open(&folder.join(name), access).map(Arc::new),
            Folder::Parts(parts) => Self::part(parts, name)
                .cloned()
                .ok_or_else(|| Error::new(Kind::NotFound, format!("the source has no part called {name:?}")).named(name)),
        }
    }

    /// A small file's bytes, `None` where it does not exist.
    pub(super) fn bytes(&self, name: &str, limit: u64) -> Result<Option<Cow<'_, [u8]>>> {
        match self {
            Folder::Path(folder) => Ok(source::read_small(&folder.join(name), limit)?.map(Cow::Owned)),
            Folder::Parts(parts) => {
                let Some(source) = Self::part(parts, name) else { return Ok(None) };
                let len = source.bytes().len() as u64;
                if len > limit {
                    let text = format!("{name}: {len} bytes, at most {limit} are read");
                    return Err(Error::new(Kind::TooLarge, text).named(name).sizes(len, limit));
                }
                Ok(Some(Cow::Borrowed(source.bytes())))
            }
        }
    }

    /// A JSON file, `None` where it does not exist.
    pub(super) fn json(&self, name: &str, limit: u64) -> Result<Option<Value>> {
        match self.bytes(name, limit)? {
            Some(bytes) => json::parse(&bytes, &self.label(name)).map(Some),
            None => Ok(None),
        }
    }
}

impl Files for Folder {
    fn label(&self, name: &str) -> String {
        Folder::label(self, name)
    }

    fn read(&self, name: &str, limit: u64) -> Result<Option<Cow<'_, [u8]>>> {
        match self {
            Folder::Path(folder) => Files::read(folder, name, limit),
            Folder::Parts(_) => self.bytes(name, limit),
        }
    }

    fn list(&self, folder: &str) -> Vec<String> {
        match self {
            Folder::Path(path) => Files::list(path, folder),
            Folder::Parts(parts) => {
                let inside = |name: &String| name.strip_prefix(folder)?.strip_prefix('/').map(str::to_owned);
                parts.iter().filter_map(|(name, _)| inside(name)).filter(|name| !name.contains('/')).collect()
            }
        }
    }
}
