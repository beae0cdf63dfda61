//! Raw arguments into Rust values, each checked before it is touched: NULL, alignment, sizes that overflow.
//!
//! What cannot be checked (that a pointer of the right shape points to live memory) is the caller's promise, and the
//! header says so.

use std::ffi::{CStr, c_char};
use std::path::Path;

use crate::error::{Error, Kind, Result};
use crate::{bail, ensure};

use super::status::{METRALE_MORE, METRALE_OK, metrale_status};

/// A place the caller gave for one result. Written once, at the end, so that a failed call writes nothing.
pub(super) struct Out<T>(*mut T);

impl<T> Out<T> {
    /// Hands the result over.
    pub(super) fn set(self, value: T) {
        // SAFETY: `out` saw that the place is not NULL and aligned; the caller promises that it is a writable `T`.
        unsafe { self.0.write(value) }
    }
}

/// Checks a place for a result. `name` is the parameter's.
pub(super) fn out<T>(place: *mut T, name: &str) -> Result<Out<T>> {
    present(place, name)?;
    Ok(Out(place))
}

/// Places for `count` results, written once, at the end.
pub(super) struct OutSlice<T>(*mut T, usize);

impl<T: Copy> OutSlice<T> {
    /// Hands the results over one by one.
    pub(super) fn set_with(self, value: impl Fn(usize) -> T) {
        for index in 0..self.1 {
            // SAFETY: as in `set`.
            unsafe { self.0.add(index).write(value(index)) }
        }
    }

    /// Hands the results over; there are as many as places.
    pub(super) fn set(self, values: &[T]) {
        let count = self.1.min(values.len());
        // SAFETY: `out_slice` saw `self.1` places that are not NULL and aligned; `values` is ours and elsewhere.
        unsafe { std::ptr::copy_nonoverlapping(values.as_ptr(), self.0, count) }
    }
}

/// Checks places for `count` results.
pub(super) fn out_slice<T>(places: *mut T, count: usize, name: &str) -> Result<OutSlice<T>> {
    if count == 0 {
        return Ok(OutSlice(std::ptr::dangling_mut(), 0));
    }
    present(places, name)?;
    fits::<T>(count, name)?;
    Ok(OutSlice(places, count))
}

/// The two-call pattern: writes all of `values` and `METRALE_OK`, or nothing and `METRALE_MORE`; the size either way.
pub(super) fn sized<T: Copy>(values: &[T], places: *mut T, capacity: usize, size: Out<usize>) -> Result<metrale_status> {
    if values.len() > capacity {
        size.set(values.len());
        return Ok(METRALE_MORE);
    }
    let places = out_slice(places, values.len(), "out")?;
    places.set(values);
    size.set(values.len());
    Ok(METRALE_OK)
}

/// An array of `count` elements; NULL is fine when there are none.
pub(super) fn slice<'a, T>(start: *const T, count: usize, name: &str) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    present(start, name)?;
    fits::<T>(count, name)?;
    // SAFETY: not NULL, aligned, and of a size that exists; the caller promises `count` readable elements that do
    // not change during the call, which is as long as the result is used.
    Ok(unsafe { std::slice::from_raw_parts(start, count) })
}

/// Bytes that must be UTF-8.
pub(super) fn utf8<'a>(start: *const u8, len: usize, name: &str) -> Result<&'a str> {
    str::from_utf8(slice(start, len, name)?).map_err(|e| {
        let at = e.valid_up_to() as u64;
        Error::new(Kind::InvalidArgument, format!("{name} is not UTF-8 at byte {at}")).named(name).at(at)
    })
}

/// A C string.
pub(super) fn string<'a>(start: *const c_char, name: &str) -> Result<&'a CStr> {
    present(start, name)?;
    // SAFETY: not NULL; the caller promises a terminated string that does not change during the call.
    Ok(unsafe { CStr::from_ptr(start) })
}

/// A file's path: bytes as the system takes them.
pub(super) fn path<'a>(start: *const c_char, name: &str) -> Result<&'a Path> {
    let text = string(start, name)?;
    ensure!(!text.is_empty(), InvalidArgument, "{name} is empty");
    #[cfg(unix)]
    let path = Path::new(<std::ffi::OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(text.to_bytes()));
    #[cfg(not(unix))]
    let path = Path::new(text.to_str().map_err(|_| Error::new(Kind::InvalidArgument, format!("{name} is not UTF-8")))?);
    Ok(path)
}

/// A count or size from a 64-bit field.
pub(super) fn size(value: u64, name: &str) -> Result<usize> {
    usize::try_from(value).map_err(|_| Error::new(Kind::TooLarge, format!("{name} is {value}, more than this machine can count")))
}

/// Refuses bits outside `known`.
pub(super) fn flags(value: u64, known: u64, name: &str) -> Result<()> {
    let unknown = value & !known;
    if unknown != 0 {
        let text = format!("{name} has the unknown bits {unknown:#x}; known are {known:#x}");
        return Err(Error::new(Kind::UnknownOption, text).named(name));
    }
    Ok(())
}

fn present<T>(pointer: *const T, name: &str) -> Result<()> {
    if pointer.is_null() {
        return Err(Error::new(Kind::InvalidArgument, format!("{name} is NULL")).named(name));
    }
    if !pointer.is_aligned() {
        let text = format!("{name} is {:#x}, which is not a multiple of {}", pointer.addr(), align_of::<T>());
        return Err(Error::new(Kind::InvalidArgument, text).named(name));
    }
    Ok(())
}

fn fits<T>(count: usize, name: &str) -> Result<()> {
    match count.checked_mul(size_of::<T>()) {
        Some(bytes) if bytes <= isize::MAX as usize => Ok(()),
        _ => bail!(TooLarge, "{name}: {count} elements of {} bytes cannot exist", size_of::<T>()),
    }
}
