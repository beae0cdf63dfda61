//! Bytes of a file: mapped, or read into memory where a mapping is not wanted.
//!
//! A mapping costs nothing until pages are touched and lets a loader hand pages back after packing. Its price is that
//! somebody who truncates the file meanwhile makes the process fault; hosts that cannot rule this out choose
//! [`Access::Read`].
#![allow(unsafe_code)] // mapping a file is unsafe by nature; nothing else in `weights` is

use crate::backend::cpu::arena::Buffer;
use crate::error::{Error, Kind, Result, vec_filled};
use crate::{bail, ensure};
use std::fs::File;
use std::io::{ErrorKind, Read};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

/// How a file's bytes become memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Access {
    /// Map it. Nobody may truncate the file while it is open.
    #[default]
    Map,
    /// Read all of it now.
    Read,
}

/// A whole file, or bytes that a host handed over.
pub struct Source {
    label: String,
    bytes: Arc<Bytes>,
}

enum Bytes {
    Mapped(memmap2::Mmap),
    Owned(Vec<u8>),
    /// A file's beginning, and zeros in the place of its rest.
    Beginning(Buffer),
    /// Somebody else's, for as long as the process runs or as they promised.
    Lent(&'static [u8]),
}

impl Source {
    /// Opens a regular file. Pipes and devices are refused without blocking.
    pub fn open(path: &Path, access: Access) -> Result<Source> {
        let (mut file, len) = open_regular(path)?;
        let label = path.display().to_string();
        let len = usize::try_from(len).map_err(|_| Error::new(Kind::TooLarge, format!("{label}: {len} bytes cannot be addressed")))?;
        if access == Access::Read || len == 0 {
            let bytes = read_exactly(&mut file, len, &label)?;
            return Ok(Source::new(label, Bytes::Owned(bytes)));
        }
        // SAFETY: the mapping is read-only and owned by this value. That the file keeps its length and contents is the
        // caller's promise, stated on `Access::Map`; the length was taken from the opened file itself.
        let map = unsafe { memmap2::MmapOptions::new().len(len).map(&file) }.map_err(|e| io_error(&label, "mapping", &e))?;
        Ok(Source::new(label, Bytes::Mapped(map)))
    }

    /// Maps `len` bytes of an open file from `offset` on, which need not be a page's: the mapping begins at the page before,
    /// and every decoder takes bytes at any address.
    pub fn map(file: &File, offset: u64, len: usize, label: &str) -> Result<Source> {
        // SAFETY: as in `open`; the caller compared `offset + len` with the length of the open file.
        let map = unsafe { memmap2::MmapOptions::new().offset(offset).len(len).map(file) }.map_err(|e| io_error(label, "mapping", &e))?;
        Ok(Source::new(label.to_owned(), Bytes::Mapped(map)))
    }

    /// Bytes that outlive every use of them, without a copy.
    pub fn lent(label: impl Into<String>, bytes: &'static [u8]) -> Source {
        Source::new(label.into(), Bytes::Lent(bytes))
    }

    /// Bytes already in memory; `label` stands in errors where a path would.
    pub fn from_bytes(label: impl Into<String>, bytes: Vec<u8>) -> Source {
        Source::new(label.into(), Bytes::Owned(bytes))
    }

    /// A file of which only headers will be looked at; what follows them is zeros.
    pub(super) fn beginning(label: &str, buffer: Buffer) -> Source {
        Source::new(label.to_owned(), Bytes::Beginning(buffer))
    }

    /// The buffer of a beginning that nobody else holds.
    pub(super) fn into_beginning(self) -> Option<Buffer> {
        match Arc::into_inner(self.bytes)? {
            Bytes::Beginning(buffer) => Some(buffer),
            _ => None,
        }
    }

    fn new(label: String, bytes: Bytes) -> Source {
        Source { label, bytes: Arc::new(bytes) }
    }

    /// The same bytes under another name.
    pub fn named(&self, label: &str) -> Source {
        Source { label: label.to_owned(), bytes: Arc::clone(&self.bytes) }
    }

    /// All bytes.
    pub fn bytes(&self) -> &[u8] {
        match &*self.bytes {
            Bytes::Mapped(map) => map,
            Bytes::Owned(bytes) => bytes,
            Bytes::Beginning(buffer) => buffer.as_slice(),
            Bytes::Lent(bytes) => bytes,
        }
    }

    /// The path, for messages.
    pub fn label(&self) -> &str {
        &self.label
    }

    /// Whether pages come from the file on demand.
    pub fn is_mapped(&self) -> bool {
        matches!(*self.bytes, Bytes::Mapped(_))
    }

    /// Bytes that stay in memory for as long as this does and were not there before.
    pub fn held(&self) -> u64 {
        match &*self.bytes {
            Bytes::Owned(bytes) => bytes.len() as u64,
            Bytes::Beginning(buffer) => buffer.len() as u64,
            Bytes::Mapped(_) | Bytes::Lent(_) => 0,
        }
    }

    /// Gives the pages of a range back to the system; reading them again reads the file again. Advice only.
    pub fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        if let Bytes::Mapped(map) = &*self.bytes
            && range.start < range.end
            && range.end <= map.len()
        {
            // SAFETY: the mapping is a file's, shared and never written to, so a dropped page comes back with the same
            // bytes; the range lies inside it.
            let advised = unsafe { map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, range.start, range.len()) };
            // A system that does not take the advice keeps the pages, which is correct as well.
            let _ = advised;
        }
        #[cfg(not(unix))]
        let _ = range;
    }
}

/// Opens a regular file and takes its length from the open handle.
///
/// The type is looked at before opening, because opening a device can have effects, and the open does not block, because
/// a pipe may have taken the name in between.
pub(super) fn open_regular(path: &Path) -> Result<(File, u64)> {
    let label = path.display();
    let before = std::fs::metadata(path).map_err(|e| io_error(&label.to_string(), "opening", &e))?;
    ensure!(before.is_file(), NotAModel, "{label} is {}, a regular file is needed", describe(&before));
    let mut options = File::options();
    options.read(true);
    #[cfg(unix)]
    {
        use std::os::unix::fs::OpenOptionsExt;
        options.custom_flags(libc::O_NONBLOCK | libc::O_CLOEXEC);
    }
    let file = options.open(path).map_err(|e| io_error(&label.to_string(), "opening", &e))?;
    let opened = file.metadata().map_err(|e| io_error(&label.to_string(), "opening", &e))?;
    ensure!(opened.is_file(), NotAModel, "{label} is {}, a regular file is needed", describe(&opened));
    Ok((file, opened.len()))
}

/// A whole small file (JSON and the like), or `None` where it does not exist.
pub(super) fn read_small(path: &Path, limit: u64) -> Result<Option<Vec<u8>>> {
    let (mut file, len) = match open_regular(path) {
        Ok(opened) => opened,
        Err(e) if e.kind() == Kind::NotFound => return Ok(None),
        Err(e) => return Err(e),
    };
    let label = path.display().to_string();
    if len > limit {
        return Err(Error::new(Kind::TooLarge, format!("{label}: {len} bytes, at most {limit} are read")).named(label).sizes(len, limit));
    }
    read_exactly(&mut file, len as usize, &label).map(Some)
}

/// The first `n` bytes of a file, fewer where it is shorter.
pub(super) fn read_start(path: &Path, n: usize) -> Result<(Vec<u8>, u64)> {
    let (file, len) = open_regular(path)?;
    let mut start = Vec::new();
    file.take(n as u64).read_to_end(&mut start).map_err(|e| io_error(&path.display().to_string(), "reading", &e))?;
    Ok((start, len))
}

fn read_exactly(file: &mut File, len: usize, label: &str) -> Result<Vec<u8>> {
    let mut bytes = vec_filled(len, 0u8, label)?;
    match file.read_exact(&mut bytes) {
        Ok(()) => Ok(bytes),
        Err(e) if e.kind() == ErrorKind::UnexpectedEof => bail!(Io, "{label}: became shorter than {len} bytes while it was read"),
        Err(e) => Err(io_error(label, "reading", &e)),
    }
}

/// What a directory entry is, with its article.
pub(super) fn describe(metadata: &std::fs::Metadata) -> &'static str {
    let kind = metadata.file_type();
    #[cfg(unix)]
    {
        use std::os::unix::fs::FileTypeExt;
        if kind.is_fifo() {
            return "a pipe (FIFO)";
        }
        if kind.is_block_device() || kind.is_char_device() {
            return "a device";
        }
        if kind.is_socket() {
            return "a socket";
        }
    }
    if kind.is_dir() { "a directory" } else { "a file" }
}

pub(super) fn io_error(label: &str, doing: &str, e: &std::io::Error) -> Error {
    let kind = match e.kind() {
        ErrorKind::NotFound | ErrorKind::NotADirectory => Kind::NotFound,
        ErrorKind::OutOfMemory => Kind::OutOfMemory,
        _ => Kind::Io,
    };
    Error::new(kind, format!("{label}: {doing} failed: {e}")).named(label)
}
