//! Devices that models can run on.

use std::ffi::CString;
use std::sync::OnceLock;

use super::c_string;
use super::guard::{guard, guard_value};
use super::library;
use super::status::metrale_status;
use super::types::{METRALE_DEVICE_CPU, METRALE_DEVICE_CUDA, metrale_device, metrale_error};
use super::versioned;
use crate::backend::cpu::{available_threads, device, simd};
use crate::backend::cuda;
use crate::error::{Error, Kind, Result};

/// Number of devices that models can run on; at least 1, since device 0 is the processor. Others are NVIDIA devices, for which the first call
/// looks for a driver: `libcuda.so.1` is opened where it is installed. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_device_count() -> usize {
    guard_value(1, || Some(1 + cuda::devices().map_or(0, <[_]>::len)))
}

/// Fills `*out`, whose `struct_size` must be set, with what device `index` is, and what it has free at the moment. For an NVIDIA device that
/// takes a context on it for as long as the call. Any thread.
///
/// Statuses: `METRALE_INVALID_ARGUMENT`, `METRALE_NOT_FOUND` (there is no device of this index; the message says why there is no NVIDIA
/// device), `METRALE_DEVICE_LOST`, `METRALE_DEVICE_UNSUPPORTED` (it is there, and too old).
#[unsafe(no_mangle)]
pub extern "C" fn metrale_device_info(index: usize, out: *mut metrale_device, err: *mut *mut metrale_error) -> metrale_status {
    guard(err, || {
        let out = versioned::out(out)?;
        let described = match index.checked_sub(1) {
            None => processor(),
            Some(place) => nvidia(place).map_err(|e| e.at(index as u64))?,
        };
        out.set(&described);
        Ok(())
    })
}

fn processor() -> metrale_device {
    let (total, free) = device::memory();
    metrale_device {
        struct_size: size_of::<metrale_device>(),
        kind: METRALE_DEVICE_CPU,
        threads: u32::try_from(available_threads()).unwrap_or(u32::MAX),
        memory_total: total.unwrap_or(0),
        memory_free: free.unwrap_or(0),
        name: texts().name.as_ptr(),
        kernels: texts().kernels.as_ptr(),
        instruction_sets: texts().sets.as_ptr(),
    }
}

fn nvidia(place: usize) -> Result<metrale_device> {
    let missing =
        |why: String| Error::new(Kind::NotFound, format!("there is no device {}; device 0 is the processor, and {why}", place + 1));
    let found = cuda::devices().map_err(|reason| missing(reason.to_string()))?;
    let Some(info) = found.get(place) else { return Err(missing(format!("NVIDIA devices are 1 to {}", found.len()))) };
    let (free, total) = cuda::Device::open(place)?.memory()?;
    Ok(metrale_device {
        struct_size: size_of::<metrale_device>(),
        kind: METRALE_DEVICE_CUDA,
        threads: u32::try_from(info.processors).unwrap_or(u32::MAX),
        memory_total: total,
        memory_free: free,
        name: info.name_text().as_ptr(),
        kernels: info.architecture_text().as_ptr(),
        instruction_sets: c"".as_ptr(),
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
