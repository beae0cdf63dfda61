//! Devices that models can run on.

use std::ffi::CString;
use std::sync::OnceLock;

use super::c_string;
use super::guard::{guard, guard_value};
use super::library;
use super::status::metrale_status;
use super::types::{METRALE_DEVICE_CPU, metrale_device, metrale_error};
use super::versioned;
use crate::backend::cpu::{available_threads, device, simd};
use crate::error::{Error, Kind};

/// Number of devices that models can run on; at least 1, since device 0 is the processor. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_device_count() -> usize {
    guard_value(1, || Some(1))
}

/// Fills `*out`, whose `struct_size` must be set, with what device `index` is, and what it has free at the moment. Any
/// thread.
///
/// Statuses: `METRALE_INVALID_ARGUMENT`, `METRALE_NOT_FOUND` (there is no device of this index).
#[unsafe(no_mangle)]
pub extern "C" fn metrale_device_info(index: usize, out: *mut metrale_device, err: *mut *mut metrale_error) -> metrale_status {
    guard(err, || {
        let out = versioned::out(out)?;
        if index != 0 {
            let text = format!("there is no device {index}; there is 1, and it is device 0");
            return Err(Error::new(Kind::NotFound, text).at(index as u64));
        }
        let (total, free) = device::memory();
        out.set(&metrale_device {
            struct_size: size_of::<metrale_device>(),
            kind: METRALE_DEVICE_CPU,
            threads: u32::try_from(available_threads()).unwrap_or(u32::MAX),
            memory_total: total.unwrap_or(0),
            memory_free: free.unwrap_or(0),
            name: texts().name.as_ptr(),
            kernels: texts().kernels.as_ptr(),
            instruction_sets: texts().sets.as_ptr(),
        });
        Ok(())
    })
}

/// What is told of the processor, made once.
struct Texts {
    name: CString,
    kernels: CString,
    sets: CString,
}

fn texts() -> &'static Texts {
    static TEXTS: OnceLock<Texts> = OnceLock::new();
    TEXTS.get_or_init(|| {
        // These stay, so they belong to no runtime.
        let _outside = crate::runtime::outside();
        Texts {
            name: c_string(device::name()),
            kernels: c_string(simd::table().name()),
            sets: c_string(&library::instruction_sets().join(" ")),
        }
    })
}
