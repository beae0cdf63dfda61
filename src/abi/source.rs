//! Sources: a path, a buffer, an open file, a host's function, or a folder of these, as something to load from.

use std::ffi::{c_char, c_void};
use std::sync::{Arc, Mutex, PoisonError};

use super::guard::{guard, guard_value};
use super::handle;
use super::pointer;
use super::status::metrale_status;
use super::types::{METRALE_SOURCE_COPY, METRALE_SOURCE_READ, metrale_error, metrale_read_at_fn, metrale_source};
use crate::error::{Error, Kind, Result, vec_with_capacity};
use crate::weights::{Access, FileBytes, Input, ReadAt};

/// A source; what is loaded from it keeps what it needs of it.
pub(super) struct SourceObject {
    input: Mutex<Input>,
}

impl SourceObject {
    /// What it is now; a folder may get further parts later.
    pub(super) fn input(&self) -> Input {
        self.input.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Hands a source to the host.
fn hand_over(out: pointer::Out<*mut metrale_source>, input: Input) -> Result<()> {
    out.set(handle::insert(Arc::new(SourceObject { input: Mutex::new(input) }))?);
    Ok(())
}

fn access(flags: u64) -> Access {
    if flags & METRALE_SOURCE_READ != 0 { Access::Read } else { Access::Map }
}

/// A GGUF file (of a split one the first part) or a folder with `config.json`, as for `metrale_load`. `path` is
/// NUL-terminated, in the system's encoding, and copied. `flags` is 0, which maps files, or `METRALE_SOURCE_READ`; a
/// folder's files and those of a split model are then read in one step of the load. On success `*out` is a handle for
/// `metrale_source_free`. What the path leads to is looked at when it is loaded. Any thread.
///
/// Statuses: `METRALE_INVALID_ARGUMENT`, `METRALE_UNKNOWN_OPTION`; with `METRALE_SOURCE_READ` also `METRALE_NOT_FOUND`,
/// `METRALE_IO`, `METRALE_NOT_A_MODEL`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_source_path(
    path: *const c_char,
    flags: u64,
    out: *mut *mut metrale_source,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || {
        let out = pointer::out(out, "out")?;
        let path = pointer::path(path, "path")?;
        pointer::flags(flags, METRALE_SOURCE_READ, "flags")?;
        hand_over(out, Input::path(path, access(flags))?)
    })
}

/// One whole file in memory, at any address: a GGUF file, or a file of a folder. With `flags` 0 nothing is copied: the `len` bytes must stay, and stay
/// the same, until the source, its loads, and the models made from it with all their sequences are gone. With
/// `METRALE_SOURCE_COPY` they are copied at once. On success `*out` is a handle for `metrale_source_free`. Any thread.
///
/// Statuses: `METRALE_INVALID_ARGUMENT`, `METRALE_UNKNOWN_OPTION`, `METRALE_OUT_OF_MEMORY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_source_buffer(
    bytes: *const u8,
    len: usize,
    flags: u64,
    out: *mut *mut metrale_source,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || {
        let out = pointer::out(out, "out")?;
        let bytes: &'static [u8] = pointer::slice(bytes, len, "bytes")?;
        pointer::flags(flags, METRALE_SOURCE_COPY, "flags")?;
        let source = if flags & METRALE_SOURCE_COPY == 0 {
            // As long as the host promises above, which is as long as anything here looks at them.
            FileBytes::lent(BUFFER, bytes)
        } else {
            let mut copy = vec_with_capacity(len, BUFFER)?;
            copy.extend_from_slice(bytes);
            FileBytes::from_bytes(BUFFER, copy)
        };
        hand_over(out, Input::Ready(Arc::new(source)))
    })
}

/// What messages call a buffer.
const BUFFER: &str = "the buffer";

/// One whole file (GGUF, or of a folder) inside an open regular file: `len` bytes from `offset` on, or all from there with `len` 0.
/// `offset` may be any number, so that a model can lie inside a container. `fd` is duplicated: the host may close it at
/// once, and its position is neither used nor moved. `flags` is 0, which maps the bytes, or `METRALE_SOURCE_READ`. On
/// success `*out` is a handle for `metrale_source_free`. Any thread.
///
/// Statuses: `METRALE_INVALID_ARGUMENT` (no open file), `METRALE_UNKNOWN_OPTION`, `METRALE_NOT_A_MODEL` (a pipe, a device,
/// a directory), `METRALE_CORRUPT_FILE` (the file ends earlier), `METRALE_IO`, `METRALE_UNSUPPORTED` (not on this system).
///
/// A file that somebody else shortens while its bytes are mapped ends the process with SIGBUS.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_source_fd(
    fd: i32,
    offset: u64,
    len: u64,
    flags: u64,
    out: *mut *mut metrale_source,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || {
        let out = pointer::out(out, "out")?;
        pointer::flags(flags, METRALE_SOURCE_READ, "flags")?;
        hand_over(out, Input::file(duplicate(fd)?, offset, len, access(flags), &format!("fd {fd}"))?)
    })
}

/// A file of our own for the host's descriptor.
#[cfg(unix)]
fn duplicate(fd: i32) -> Result<std::fs::File> {
    if fd >= 0 {
        // SAFETY: not -1, and used only for the duplication; of a descriptor that is not open the kernel says so.
        match unsafe { std::os::fd::BorrowedFd::borrow_raw(fd) }.try_clone_to_owned() {
            Ok(own) => return Ok(own.into()),
            Err(e) if e.raw_os_error() != Some(libc::EBADF) => {
                return Err(Error::new(Kind::Io, format!("fd {fd}: duplicating failed: {e}")).named("fd"));
            }
            Err(_) => {}
        }
    }
    Err(Error::new(Kind::InvalidArgument, format!("fd is {fd}, which is not an open file")).named("fd"))
}

#[cfg(not(unix))]
fn duplicate(fd: i32) -> Result<std::fs::File> {
    crate::bail!(Unsupported, "fd {fd}: this system has no file descriptors; give a path or a function")
}

/// One whole file (GGUF, or of a folder) of `len` bytes that the host reads: see `metrale_read_at_fn` for what `read_at` has to do. Its
/// bytes stay in memory as long as a model made from them. `user` is handed to `read_at` and must stay valid until the
/// source and its loads are gone; a finished model needs neither. Loads of one source on several threads call `read_at`
/// on several threads. `flags` must be 0. On success `*out` is a handle for `metrale_source_free`. Any thread.
///
/// Statuses: `METRALE_INVALID_ARGUMENT`, `METRALE_UNKNOWN_OPTION`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_source_reader(
    read_at: metrale_read_at_fn,
    user: *mut c_void,
    len: u64,
    flags: u64,
    out: *mut *mut metrale_source,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || {
        let out = pointer::out(out, "out")?;
        pointer::flags(flags, 0, "flags")?;
        let Some(read_at) = read_at else {
            return Err(Error::new(Kind::InvalidArgument, "read_at is NULL").named("read_at"));
        };
        let reader = Arc::new(HostReader { read_at, user });
        hand_over(out, Input::Reader { label: READER.into(), len, reader })
    })
}

/// What messages call a host's function.
const READER: &str = "the host's reader";

/// A folder without files, which `metrale_source_add` fills: what a checkpoint of several files is loaded from where they do
/// not lie in a directory. `flags` must be 0. On success `*out` is a handle for `metrale_source_free`. Any thread.
///
/// Statuses: `METRALE_INVALID_ARGUMENT`, `METRALE_UNKNOWN_OPTION`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_source_folder(flags: u64, out: *mut *mut metrale_source, err: *mut *mut metrale_error) -> metrale_status {
    guard(err, || {
        let out = pointer::out(out, "out")?;
        pointer::flags(flags, 0, "flags")?;
        hand_over(out, Input::folder())
    })
}

/// Puts `part` into `folder` under the name that its file has in a directory: `config.json`, `tokenizer.json`,
/// `tokenizer_config.json`, `chat_template.jinja`, `generation_config.json`, `model.safetensors`, or
/// `model.safetensors.index.json` and all that it names; or the one `.gguf` file, or all parts of a split one. `name` is
/// NUL-terminated UTF-8 and copied; `part` is any source but a folder, of any file (a path then is the file's own), may be
/// put into several folders, and may be freed at once. What loads have begun with stays as it was. Any thread.
///
/// Statuses: `METRALE_INVALID_ARGUMENT` (no folder, no file name, or a name that is there), `METRALE_INVALID_HANDLE`,
/// `METRALE_LIMIT_EXCEEDED` (4,096 parts), `METRALE_OUT_OF_MEMORY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_source_add(
    folder: *mut metrale_source,
    name: *const c_char,
    part: *const metrale_source,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || {
        let name = pointer::string(name, "name")?;
        let name = pointer::utf8(name.as_ptr().cast(), name.count_bytes(), "name")?;
        // Not both locks at once: somebody may put a folder into itself.
        let part = handle::get(part)?.input();
        let folder = handle::get(folder)?;
        folder.input.lock().unwrap_or_else(PoisonError::into_inner).add(name, part)
    })
}

/// Gives up a source. Loads that have begun and models made from it go on. NULL and handles that are none are ignored.
/// Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_source_free(source: *mut metrale_source) {
    guard_value((), || handle::remove(source).map(drop))
}

/// A host's function with what it is called with.
struct HostReader {
    read_at: unsafe extern "C" fn(*mut c_void, u64, *mut c_void, usize) -> i64,
    user: *mut c_void,
}

// SAFETY: `user` is never followed here; the header tells the host on which threads its function gets it.
unsafe impl Send for HostReader {}
// SAFETY: as above.
unsafe impl Sync for HostReader {}

impl ReadAt for HostReader {
    fn read_at(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let len = into.len();
        // SAFETY: the host gave a function of this type; `into` has `len` writable bytes, initialised before.
        let filled = unsafe { (self.read_at)(self.user, offset, into.as_mut_ptr().cast(), len) };
        let text = match usize::try_from(filled) {
            Ok(n) if n == len => return Ok(()),
            Ok(n) => format!("{READER} filled {n} of {len} bytes at offset {offset}"),
            Err(_) => format!("{READER} failed with {filled} for {len} bytes at offset {offset}"),
        };
        Err(Error::new(Kind::Io, text).named("read_at").at(offset).sizes(len as u64, u64::try_from(filled).unwrap_or(0)))
    }
}
