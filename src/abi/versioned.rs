//! Structs that may grow: `struct_size` comes first and says how much of the struct its host knows.
//!
//! Zero is the default of every field, so a shorter struct (an older host) reads as if its missing end were zero,
//! and a longer one (a newer host) is fine as long as the end we do not know is zero.

use std::mem::MaybeUninit;

use crate::error::{Error, Kind, Result};
use crate::{bail, ensure};

/// A struct that begins with `size_t struct_size`.
///
/// # Safety
/// `#[repr(C)]`, first field `usize`, and every field may hold all zero bits.
pub(super) unsafe trait Versioned: Copy {
    /// The C name.
    const NAME: &'static str;
}

/// No struct of ours will come near this; beyond it `struct_size` was simply not set.
const LARGEST: usize = 4096;

/// Reads options. NULL is all defaults.
pub(super) fn read<T: Versioned>(host: *const T) -> Result<T> {
    let mut ours = MaybeUninit::<T>::zeroed();
    if !host.is_null() {
        let size = host_size(host)?;
        let known = size.min(size_of::<T>());
        let bytes = host.cast::<u8>();
        for offset in known..size {
            // SAFETY: the host says that its struct has `size` bytes.
            if unsafe { bytes.add(offset).read() } != 0 {
                let text = format!("{}: byte {offset} is set, this library knows {known}; the host is newer", T::NAME);
                return Err(Error::new(Kind::VersionMismatch, text).named(T::NAME).at(offset as u64).sizes(size as u64, known as u64));
            }
        }
        // SAFETY: both structs have `known` bytes.
        unsafe { std::ptr::copy_nonoverlapping(bytes, ours.as_mut_ptr().cast::<u8>(), known) };
    }
    // SAFETY: zero bits are a valid `T`, and so are the bits of the host's `T` over its first fields: sizes are
    // multiples of the alignment, so none is cut inside its 8 bytes.
    Ok(unsafe { ours.assume_init() })
}

/// A place for a struct that the library fills.
pub(super) struct OutStruct<T> {
    host: *mut T,
    size: usize,
}

/// Checks a place whose `struct_size` the host has set.
pub(super) fn out<T: Versioned>(host: *mut T) -> Result<OutStruct<T>> {
    ensure!(!host.is_null(), InvalidArgument, "the {} to fill is NULL", T::NAME);
    Ok(OutStruct { host, size: host_size(host)? })
}

impl<T: Versioned> OutStruct<T> {
    /// Fills as much as the host knows; what only the host knows becomes zero. `struct_size` stays the host's.
    pub(super) fn set(self, value: &T) {
        let known = self.size.min(size_of::<T>());
        let head = size_of::<usize>();
        // SAFETY: the host's struct has `size` bytes, ours has `known` of them, and `known` is at least `head`.
        unsafe {
            let bytes = self.host.cast::<u8>();
            std::ptr::copy_nonoverlapping(std::ptr::from_ref(value).cast::<u8>().add(head), bytes.add(head), known - head);
            std::ptr::write_bytes(bytes.add(known), 0, self.size - known);
        }
    }
}

/// Places for an array of such structs, as far apart as the host's struct is large.
pub(super) struct OutStructs<T> {
    host: *mut T,
    size: usize,
    count: usize,
}

/// Checks an array in which the host has set every `struct_size`.
pub(super) fn out_array<T: Versioned>(host: *mut T, count: usize) -> Result<OutStructs<T>> {
    if count == 0 {
        return Ok(OutStructs { host, size: 0, count });
    }
    let size = out(host)?.size;
    ensure!(count <= isize::MAX as usize / size, TooLarge, "{count} structs {} cannot exist", T::NAME);
    for index in 1..count {
        let other = host_size(host.wrapping_byte_add(index * size))?;
        ensure!(other == size, InvalidArgument, "{}.struct_size is {other} at {index} and {size} at 0", T::NAME);
    }
    Ok(OutStructs { host, size, count })
}

impl<T: Versioned> OutStructs<T> {
    /// Fills each, as [`OutStruct::set`] does one.
    pub(super) fn set_with(self, value: impl Fn(usize) -> T) {
        for index in 0..self.count {
            OutStruct { host: self.host.wrapping_byte_add(index * self.size), size: self.size }.set(&value(index));
        }
    }
}

fn host_size<T: Versioned>(host: *const T) -> Result<usize> {
    if !host.is_aligned() {
        bail!(InvalidArgument, "the {} at {:#x} is not aligned to {}", T::NAME, host.addr(), align_of::<T>());
    }
    // SAFETY: not NULL, aligned, and every such struct begins with its size.
    let size = unsafe { host.cast::<usize>().read() };
    let sound = (size_of::<usize>()..=LARGEST).contains(&size) && size.is_multiple_of(align_of::<T>());
    if !sound {
        let text = format!("{}.struct_size is {size}; set it to sizeof({})", T::NAME, T::NAME);
        return Err(Error::new(Kind::InvalidArgument, text).named("struct_size").sizes(size as u64, size_of::<T>() as u64));
    }
    Ok(size)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Clone, Copy, Debug, PartialEq)]
    struct New {
        struct_size: usize,
        a: u64,
        b: u64,
    }
    #[repr(C)]
    struct Old {
        struct_size: usize,
        a: u64,
    }
    #[repr(C)]
    struct Newer {
        new: New,
        c: u64,
    }
    // SAFETY: repr(C), size first, integers.
    unsafe impl Versioned for New {
        const NAME: &'static str = "new";
    }

    #[test]
    fn sizes_of_all_ages() {
        assert_eq!(read::<New>(std::ptr::null()).unwrap(), New { struct_size: 0, a: 0, b: 0 });
        let old = Old { struct_size: size_of::<Old>(), a: 5 };
        assert_eq!(read((&raw const old).cast::<New>()).unwrap(), New { struct_size: 16, a: 5, b: 0 });
        let mut newer = Newer { new: New { struct_size: size_of::<Newer>(), a: 5, b: 6 }, c: 0 };
        assert_eq!(read((&raw const newer).cast::<New>()).unwrap(), newer.new);
        newer.c = 1 << 40;
        let e = read((&raw const newer).cast::<New>()).unwrap_err();
        assert_eq!((e.kind(), e.offset()), (Kind::VersionMismatch, Some(29)));
        for size in [0, 1, 7, 9, 23, 5000, usize::MAX] {
            newer.new.struct_size = size;
            assert_eq!(read((&raw const newer).cast::<New>()).unwrap_err().kind(), Kind::InvalidArgument, "{size}");
        }
        let bytes = [0u8; 64];
        let odd = bytes.as_ptr().wrapping_add(bytes.as_ptr().align_offset(8) + 1);
        assert_eq!(read(odd.cast::<New>()).unwrap_err().kind(), Kind::InvalidArgument);
    }

    #[test]
    fn filling_stays_inside_the_host_struct() {
        let value = New { struct_size: 0, a: 1, b: 2 };
        let mut guarded = [16u64, 7, 7, 7];
        out(guarded.as_mut_ptr().cast::<New>()).unwrap().set(&value);
        assert_eq!(guarded, [16, 1, 7, 7]);
        let mut newer = [40u64, 7, 7, 7, 7, 7];
        out(newer.as_mut_ptr().cast::<New>()).unwrap().set(&value);
        assert_eq!(newer, [40, 1, 2, 0, 0, 7]);
        assert!(out::<New>(std::ptr::null_mut()).is_err());
        let mut array = [32u64, 7, 7, 7, 32, 7, 7, 7, 9];
        out_array(array.as_mut_ptr().cast::<New>(), 2).unwrap().set_with(|i| New { a: i as u64, ..value });
        assert_eq!(array, [32, 0, 2, 0, 32, 1, 2, 0, 9]);
        array[4] = 24;
        assert!(out_array(array.as_mut_ptr().cast::<New>(), 2).is_err());
    }
}
