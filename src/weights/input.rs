//! Where a checkpoint's bytes come from: a path, memory, an open file, or a function of the host's.
//!
//! What lies in memory or can be mapped is there at once. What has to be read is read piece by piece by [`Reading`], so
//! that a caller decides when, and for how long. An [`Input`] is cheap to clone and can be loaded any number of times.

use super::detect::{self, Found};
use super::headers;
use super::index::stays_inside;
use super::source::{self, Access, Source};
use super::store::Checkpoint;
use crate::error::{Error, Kind, Result, vec_with_capacity};
use crate::{bail, ensure};
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Bytes by position. Called only by whoever drives a [`Reading`], on its thread.
pub trait ReadAt: Send + Sync {
    /// Fills all of `into` from `offset` on, or says why not.
    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()>;
}

/// A checkpoint's bytes, not looked at yet.
#[derive(Clone)]
pub enum Input {
    /// A folder, or a file that may have others beside it.
    Path(PathBuf, Access),
    /// One file, in memory or mapped.
    Ready(Arc<Source>),
    /// One file, to be read.
    Reader {
        /// Stands in errors where a path would.
        label: String,
        /// Bytes in all.
        len: u64,
        /// Gives them.
        reader: Arc<dyn ReadAt>,
    },
    /// The files of a folder by name, each of another kind.
    Folder(Arc<Vec<(String, Input)>>),
}

impl Input {
    /// A path. A single file that shall not be mapped is opened now, so that it can be read piece by piece.
    pub fn path(path: &Path, access: Access) -> Result<Input> {
        let found = match access {
            Access::Read => detect::identify(path),
            Access::Map => return Ok(Input::Path(path.into(), access)),
        };
        let file = match found {
            Ok(Found::Gguf(file)) if detect::split_part(&file.file_name().unwrap_or_default().to_string_lossy()).is_none() => Some(file),
            Ok(_) => None,
            // Any file may be part of a folder.
            Err(e) if e.kind() == Kind::NotAModel && path.is_file() => Some(path.to_path_buf()),
            Err(e) => return Err(e),
        };
        if let Some(file) = file {
            let (opened, len) = source::open_regular(&file)?;
            let label = file.display().to_string();
            return Ok(Input::Reader { reader: Arc::new(Opened { file: opened, start: 0, label: label.clone() }), len, label });
        }
        Ok(Input::Path(path.into(), access))
    }

    /// `len` bytes of an open regular file from `offset` on; a `len` of 0 is all that is left. The file's own position is
    /// neither used nor moved.
    pub fn file(file: File, offset: u64, len: u64, access: Access, label: &str) -> Result<Input> {
        let metadata = file.metadata().map_err(|e| source::io_error(label, "looking at the file", &e))?;
        ensure!(metadata.is_file(), NotAModel, "{label} is {}, a regular file is needed", source::describe(&metadata));
        let size = metadata.len();
        let left = size.checked_sub(offset).filter(|&left| len <= left);
        let Some(left) = left else {
            let text = format!("{label}: {len} bytes from byte {offset} on were asked for, the file has {size}");
            return Err(Error::new(Kind::CorruptFile, text).named(label).at(offset).sizes(offset.saturating_add(len), size));
        };
        let len = if len == 0 { left } else { len };
        let label = format!("{label}, from byte {offset} on");
        if access == Access::Read || len == 0 {
            return Ok(Input::Reader { reader: Arc::new(Opened { file, start: offset, label: label.clone() }), len, label });
        }
        Ok(Input::Ready(Arc::new(Source::map(&file, offset, addressable(len, &label)?, &label)?)))
    }
}

/// An open file from a byte on.
struct Opened {
    file: File,
    start: u64,
    label: String,
}

impl ReadAt for Opened {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let at = self.start.saturating_add(offset);
        #[cfg(unix)]
        let done = std::os::unix::fs::FileExt::read_exact_at(&self.file, into, at);
        #[cfg(not(unix))]
        let done = {
            use std::io::{Read, Seek, SeekFrom};
            let mut file = &self.file;
            file.seek(SeekFrom::Start(at)).and_then(|_| file.read_exact(into))
        };
        done.map_err(|e| source::io_error(&self.label, &format!("reading {} bytes at byte {at}", into.len()), &e).at(at))
    }
}

/// An input on its way into memory.
pub struct Reading {
    input: Input,
    /// What each reader of the input gave, the last one perhaps not all yet.
    files: Vec<Vec<u8>>,
}

impl Reading {
    /// Starts; nothing is read yet.
    pub fn new(input: Input) -> Reading {
        Reading { input, files: Vec::new() }
    }

    fn parts(input: &Input) -> impl Iterator<Item = &Input> {
        let inside = match input {
            Input::Folder(parts) => &parts[..],
            _ => &[],
        };
        inside.iter().map(|(_, part)| part).chain(std::iter::once(input).filter(|_| inside.is_empty()))
    }

    /// Readers in order: label, length, and who reads.
    fn readers(input: &Input) -> impl Iterator<Item = (&str, u64, &Arc<dyn ReadAt>)> {
        Self::parts(input).filter_map(|part| match part {
            Input::Reader { label, len, reader } => Some((label.as_str(), *len, reader)),
            _ => None,
        })
    }

    /// Bytes to read in all; 0 where there is nothing to read.
    pub fn total(&self) -> u64 {
        Self::readers(&self.input).fold(0, |sum, (_, len, _)| sum.saturating_add(len))
    }

    /// Bytes read.
    pub fn done(&self) -> u64 {
        self.files.iter().map(|file| file.len() as u64).sum()
    }

    /// Reads up to `most` more bytes, of one reader. Whether all are there now.
    pub fn step(&mut self, most: usize) -> Result<bool> {
        let at = self.files.len().saturating_sub(1);
        let (mut readers, mut index) = (Self::readers(&self.input), at);
        let Some((mut label, mut len, mut reader)) = readers.nth(at) else { return Ok(true) };
        if self.files.get(at).is_some_and(|file| file.len() as u64 == len) {
            (label, len, reader) = match readers.next() {
                Some(next) => next,
                None => return Ok(true),
            };
            index += 1;
        }
        let len = addressable(len, label)?;
        if index == self.files.len() {
            self.files.try_reserve(1).map_err(|_| Error::new(Kind::OutOfMemory, "the list of files"))?;
            self.files.push(vec_with_capacity(len, label)?);
        }
        let bytes = &mut self.files[index];
        let piece: Range<usize> = bytes.len()..bytes.len().saturating_add(most.max(1)).min(len);
        bytes.resize(piece.end, 0);
        if !piece.is_empty()
            && let Err(e) = reader.read_at(piece.start as u64, &mut bytes[piece.clone()])
        {
            bytes.truncate(piece.start);
            return Err(e);
        }
        Ok(bytes.len() == len && readers.next().is_none())
    }

    /// A checkpoint of which headers are all that will be looked at.
    pub fn headers(input: Input, config_only: bool) -> Result<Checkpoint> {
        let opened = |part: &Input| match part {
            Input::Reader { label, len, reader } => Ok(Input::Ready(Arc::new(headers::read(label, addressable(*len, label)?, &**reader)?))),
            other => Ok(other.clone()),
        };
        let input = match &input {
            Input::Folder(parts) => {
                let mut all = vec_with_capacity(parts.len(), "the list of parts")?;
                for (name, part) in parts.iter() {
                    all.push((name.clone(), opened(part)?));
                }
                Input::Folder(Arc::new(all))
            }
            single => opened(single)?,
        };
        Reading::new(input).open(config_only)
    }

    /// The checkpoint, once all bytes are there. With `config_only`, a folder needs no weights.
    pub fn open(self, config_only: bool) -> Result<Checkpoint> {
        let mut files = self.files.into_iter();
        match self.input {
            Input::Path(path, _) if config_only => Checkpoint::open_config(&path),
            Input::Path(path, access) => Checkpoint::open_with(&path, access),
            Input::Ready(source) => Checkpoint::from_source(source),
            Input::Reader { label, .. } => Checkpoint::from_bytes(&label, files.next().unwrap_or_default()),
            Input::Folder(parts) => {
                let mut found = vec_with_capacity(parts.len(), "the list of parts")?;
                for (name, part) in parts.iter() {
                    let source = match part {
                        Input::Path(path, access) => Source::open(path, *access)?.named(name),
                        Input::Ready(source) => source.named(name),
                        Input::Reader { .. } => Source::from_bytes(name, files.next().unwrap_or_default()),
                        Input::Folder(_) => bail!(Internal, "{name}: a folder inside a folder"),
                    };
                    found.push((name.clone(), Arc::new(source)));
                }
                Checkpoint::open_parts(found.into(), config_only)
            }
        }
    }
}

/// Most parts of a folder, far above any published checkpoint.
const MOST_PARTS: usize = 4096;

impl Input {
    /// A folder without files.
    pub fn folder() -> Input {
        Input::Folder(Arc::default())
    }

    /// Puts one file into a folder, under a name of its own. On error nothing changed.
    pub fn add(&mut self, name: &str, part: Input) -> Result<()> {
        let refuse = |kind, text: String| Err(Error::new(kind, text).named("name"));
        let Input::Folder(parts) = self else { bail!(InvalidArgument, "the source is no folder that parts could be added to") };
        if !stays_inside(name) {
            return refuse(Kind::InvalidArgument, format!("{name:?} is not a file name inside a folder"));
        }
        if parts.iter().any(|(known, _)| known == name) {
            return refuse(Kind::InvalidArgument, format!("the folder has a part called {name:?} already"));
        }
        if parts.len() == MOST_PARTS {
            return refuse(Kind::LimitExceeded, format!("{name:?}: a folder has at most {MOST_PARTS} parts"));
        }
        ensure!(!matches!(part, Input::Folder(_)), InvalidArgument, "{name:?}: a folder cannot be part of a folder");
        let parts = Arc::make_mut(parts);
        parts.try_reserve(1).map_err(|_| Error::new(Kind::OutOfMemory, "the list of parts"))?;
        parts.push((name.to_owned(), part));
        Ok(())
    }
}

fn addressable(len: u64, label: &str) -> Result<usize> {
    usize::try_from(len)
        .ok()
        .filter(|&n| isize::try_from(n).is_ok())
        .ok_or_else(|| Error::new(Kind::TooLarge, format!("{label}: {len} bytes cannot be addressed")).named(label))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Mutex;

    /// Notes what is asked for; fails from a position on.
    struct Noted(Mutex<Vec<(u64, usize)>>, u64);

    impl ReadAt for Noted {
        fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
            ensure!(offset + into.len() as u64 <= self.1, Io, "no more");
            self.0.lock().unwrap().push((offset, into.len()));
            into.iter_mut().enumerate().for_each(|(i, b)| *b = (offset as usize + i) as u8);
            Ok(())
        }
    }

    #[test]
    fn bytes_arrive_in_pieces_each_asked_for_once() {
        let reader = Arc::new(Noted(Mutex::default(), 1000));
        let mut reading = Reading::new(Input::Reader { label: "x".into(), len: 1000, reader: reader.clone() });
        let mut steps = 1;
        while !reading.step(300).unwrap() {
            steps += 1;
        }
        assert_eq!(steps, 4);
        assert_eq!(*reader.0.lock().unwrap(), [(0, 300), (300, 300), (600, 300), (900, 100)]);
        assert!(reading.files[0].iter().enumerate().all(|(i, &b)| b == i as u8));
        let failing = Arc::new(Noted(Mutex::default(), 500));
        let mut reading = Reading::new(Input::Reader { label: "x".into(), len: 1000, reader: failing });
        assert!(!reading.step(300).unwrap());
        assert_eq!(reading.step(300).unwrap_err().kind(), Kind::Io);
        assert_eq!(reading.done(), 300);
        let mut impossible = Reading::new(Input::Reader { label: "x".into(), len: u64::MAX, reader });
        assert_eq!(impossible.step(1).unwrap_err().kind(), Kind::TooLarge);
    }
}
