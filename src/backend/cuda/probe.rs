//! Whether there are NVIDIA devices that the library can use, and why not.
//!
//! Nothing is opened before somebody asks. What is found stays for the process: drivers do not come and go.
#![allow(unsafe_code)] // first calls into the driver

use super::sys::{self, Api, Code};
use std::ffi::{CStr, CString, c_char, c_int};
use std::fmt;
use std::sync::OnceLock;

/// Why there is no device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The library was built without the feature `cuda`.
    NotBuilt,
    /// `libcuda.so.1` cannot be opened; the system's words.
    NoDriver(String),
    /// The driver lacks a function: it is older than CUDA 12.
    OldDriver(&'static str),
    /// The driver does not start; its code and words.
    NotStarted(u32, String),
    /// The driver finds no device.
    NoDevice,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::NotBuilt => write!(f, "this library was built without support for NVIDIA devices"),
            Reason::NoDriver(text) => write!(f, "there is no NVIDIA driver: {text}"),
            Reason::OldDriver(name) => write!(f, "the NVIDIA driver has no {name}; one for CUDA 12 or later is needed"),
            Reason::NotStarted(code, text) => write!(f, "the NVIDIA driver does not start: {text} ({code})"),
            Reason::NoDevice => write!(f, "the NVIDIA driver finds no device"),
        }
    }
}

/// What is known of a device before it is used.
#[derive(Clone, Debug)]
pub struct Info {
    /// The driver's number.
    pub(super) handle: c_int,
    /// As the driver names it.
    pub name: String,
    name_text: CString,
    architecture_text: CString,
    /// Compute capability.
    pub capability: (u32, u32),
    /// Multiprocessors.
    pub processors: usize,
    /// Bytes of memory.
    pub memory: u64,
    /// Most bytes of shared memory of a block.
    pub shared: usize,
}

impl Info {
    /// The name, for C.
    pub fn name_text(&self) -> &CStr {
        &self.name_text
    }

    /// The architecture that its kernels are made for, for C.
    pub fn architecture_text(&self) -> &CStr {
        &self.architecture_text
    }

    /// Whether kernels are made for it: 8.0 (Ampere) or later.
    pub fn is_supported(&self) -> bool {
        self.capability >= (8, 0)
    }
}

/// The name of the architecture that code for a device is made for. From 9.0 on that is the one with what only it has.
pub(super) fn architecture((major, minor): (u32, u32)) -> String {
    format!("sm_{major}{minor}{}", if major >= 9 { "a" } else { "" })
}

/// The driver, started.
pub(super) fn driver() -> Result<&'static Api, Reason> {
    static DRIVER: OnceLock<Result<Api, Reason>> = OnceLock::new();
    DRIVER
        .get_or_init(|| {
            let _outside = crate::runtime::outside();
            let library = sys::open(c"libcuda.so.1").map_err(Reason::NoDriver)?;
            // SAFETY: the driver's functions have the signatures of its header; the library stays open.
            let api = unsafe { Api::load(library) }.map_err(Reason::OldDriver)?;
            // SAFETY: the first call, as the driver wants it. A toolkit's stub answers with an error.
            match unsafe { (api.cuInit)(0) } {
                0 => Ok(api),
                100 => Err(Reason::NoDevice),
                code => Err(Reason::NotStarted(code, text(&api, code))),
            }
        })
        .as_ref()
        .map_err(Clone::clone)
}

/// The driver's words for a status.
pub(super) fn text(api: &Api, code: Code) -> String {
    let mut parts = [std::ptr::null::<c_char>(); 2];
    // SAFETY: both write a pointer to a string that stays, or fail.
    unsafe {
        (api.cuGetErrorName)(code, &mut parts[0]);
        (api.cuGetErrorString)(code, &mut parts[1]);
    }
    let known = parts.iter().filter(|p| !p.is_null());
    // SAFETY: strings of the driver.
    known.map(|p| unsafe { CStr::from_ptr(*p) }.to_string_lossy()).collect::<Vec<_>>().join(": ")
}

/// All devices that the driver shows, those too old included.
pub fn devices() -> Result<&'static [Info], Reason> {
    static DEVICES: OnceLock<Result<Vec<Info>, Reason>> = OnceLock::new();
    DEVICES
        .get_or_init(|| {
            let _outside = crate::runtime::outside();
            let api = driver()?;
            let failed = |code| Reason::NotStarted(code, text(api, code));
            let mut count = 0;
            // SAFETY: writes a number.
            check(unsafe { (api.cuDeviceGetCount)(&mut count) }).map_err(failed)?;
            let list = (0..count).map(|ordinal| info(api, ordinal)).collect::<Result<Vec<_>, Code>>().map_err(failed)?;
            if list.is_empty() { Err(Reason::NoDevice) } else { Ok(list) }
        })
        .as_ref()
        .map(Vec::as_slice)
        .map_err(Clone::clone)
}

fn check(code: Code) -> Result<(), Code> {
    if code == 0 { Ok(()) } else { Err(code) }
}

fn info(api: &Api, ordinal: c_int) -> Result<Info, Code> {
    let (mut handle, mut name, mut memory) = (0, [0 as c_char; 128], 0);
    // SAFETY: each writes a number, or at most as many bytes as are told, with a NUL.
    unsafe {
        check((api.cuDeviceGet)(&mut handle, ordinal))?;
        check((api.cuDeviceGetName)(name.as_mut_ptr(), name.len() as c_int - 1, handle))?;
        check((api.cuDeviceTotalMem_v2)(&mut memory, handle))?;
    }
    let attribute = |which| {
        let mut value = 0;
        // SAFETY: writes a number.
        check(unsafe { (api.cuDeviceGetAttribute)(&mut value, which, handle) })?;
        Ok::<u32, Code>(u32::try_from(value).unwrap_or(0))
    };
    // SAFETY: the last byte is NUL whatever was written.
    let name = unsafe { CStr::from_ptr(name.as_ptr()) };
    let capability = (attribute(sys::CAPABILITY_MAJOR)?, attribute(sys::CAPABILITY_MINOR)?);
    Ok(Info {
        handle,
        name: name.to_string_lossy().into_owned(),
        name_text: name.into(),
        architecture_text: CString::new(architecture(capability)).unwrap_or_default(),
        capability,
        processors: attribute(sys::MULTIPROCESSORS)? as usize,
        memory: memory as u64,
        shared: attribute(sys::MOST_SHARED)? as usize,
    })
}
