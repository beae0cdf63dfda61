//! A device in use: its context, and whether it is lost.
//!
//! The primary context is the one that the host's own use of CUDA shares; it is current on a thread only while we call (`enter`). A status that
//! means that the context is spoiled marks the device lost: later calls fail without reaching the driver, and frees still do what they can.
#![allow(unsafe_code)] // calls of the driver

use super::kernels::Kernels;
use super::probe::{self, Info};
use super::sys::{self, Api, CUcontext, Code};
use crate::error::{Error, Kind, Result};
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

/// A device in use.
pub struct Device {
    api: &'static Api,
    info: &'static Info,
    context: CUcontext,
    /// The status that lost it; 0 while it is well.
    lost: AtomicU32,
    pub(super) kernels: Kernels,
}

// SAFETY: a context may be current on any number of threads, and the driver's functions may be called from any.
unsafe impl Send for Device {}
// SAFETY: as above.
unsafe impl Sync for Device {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({:?})", self.info)
    }
}

impl Device {
    /// Device `index` of those that the driver shows.
    pub fn open(index: usize) -> Result<Arc<Device>> {
        let unsupported = |text: String| Error::new(Kind::DeviceUnsupported, text);
        let devices = probe::devices().map_err(|reason| unsupported(reason.to_string()))?;
        let Some(info) = devices.get(index) else {
            return Err(
                Error::new(Kind::NotFound, format!("there is no NVIDIA device {index}; there are {}", devices.len())).at(index as u64)
            );
        };
        if !info.is_supported() {
            let (major, minor) = info.capability;
            return Err(unsupported(format!("{}: compute capability {major}.{minor}; 8.0 or later is needed", info.name)));
        }
        let api = probe::driver().map_err(|reason| unsupported(reason.to_string()))?;
        let mut context = std::ptr::null_mut();
        // SAFETY: a device of the driver's; writes the context.
        let code = unsafe { (api.cuDevicePrimaryCtxRetain)(&mut context, info.handle) };
        if code != 0 {
            return Err(unsupported(format!("{}: {}", info.name, probe::text(api, code))));
        }
        let kernels = Kernels::new(info.capability);
        Ok(Arc::new(Device { api, info, context, lost: AtomicU32::new(0), kernels }))
    }

    /// What it is.
    pub fn info(&self) -> &'static Info {
        self.info
    }

    /// Whether it stopped answering.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed) != 0
    }

    /// Bytes that are free at the moment, and in all.
    pub fn memory(&self) -> Result<(u64, u64)> {
        let at = self.enter()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: writes two numbers.
        at.check(unsafe { (at.api().cuMemGetInfo_v2)(&mut free, &mut total) }, "memory of the device")?;
        Ok((free as u64, total as u64))
    }

    /// Loads kernel files, of those that have to be compiled as many at a time as `threads` says.
    pub fn ready(&self, files: &[&'static str], threads: usize) -> Result<()> {
        self.kernels.ready(&self.enter()?, files, threads)
    }

    /// Whether it may have kernels with products of groups of warps.
    pub fn may_have_groups(&self) -> bool {
        self.info.capability == (9, 0)
    }

    /// Whether it has them.
    pub fn has_groups(&self) -> Result<bool> {
        Ok(self.kernels.has_groups(&self.enter()?))
    }

    /// Makes the context current on this thread until the guard goes.
    pub(super) fn enter(&self) -> Result<Entered<'_>> {
        let lost = self.lost.load(Ordering::Relaxed);
        if lost != 0 {
            return Err(Error::new(Kind::DeviceLost, format!("{}: the device was lost: {}", self.info.name, probe::text(self.api, lost))));
        }
        self.enter_anyway().ok_or_else(|| Error::new(Kind::DeviceLost, format!("{}: its context is gone", self.info.name)))
    }

    /// As `enter`, to free what a lost device held.
    pub(super) fn enter_anyway(&self) -> Option<Entered<'_>> {
        // SAFETY: the context is retained as long as the device lives.
        (unsafe { (self.api.cuCtxPushCurrent_v2)(self.context) } == 0).then_some(Entered(self))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if let Some(at) = self.enter_anyway() {
            self.kernels.unload(at.api());
        }
        // SAFETY: retained once; nothing of ours is left in it.
        unsafe { (self.api.cuDevicePrimaryCtxRelease_v2)(self.info.handle) };
    }
}

/// The context is current on this thread.
pub(super) struct Entered<'a>(&'a Device);

impl Entered<'_> {
    pub(super) fn api(&self) -> &'static Api {
        self.0.api
    }

    /// A status as a result; `what` was being done.
    pub(super) fn check(&self, code: Code, what: &str) -> Result<()> {
        if code == 0 {
            return Ok(());
        }
        let text = format!("{}: {what}: {}", self.0.info.name, probe::text(self.0.api, code));
        Err(match code {
            sys::OUT_OF_MEMORY => Error::new(Kind::OutOfMemory, text),
            code if is_fatal(code) => {
                self.0.lost.store(code, Ordering::Relaxed);
                Error::new(Kind::DeviceLost, text)
            }
            _ => Error::new(Kind::Internal, text),
        })
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut context = std::ptr::null_mut();
        // SAFETY: the one that was pushed.
        unsafe { (self.0.api.cuCtxPopCurrent_v2)(&mut context) };
    }
}

/// Whether a context is of no use after this status: errors of running kernels, hardware, a driver that is gone.
fn is_fatal(code: Code) -> bool {
    matches!(code, 3 | 4 | 46 | 201 | 214 | 220 | 700 | 702 | 709..=710 | 714..=719 | 721 | 999)
}
