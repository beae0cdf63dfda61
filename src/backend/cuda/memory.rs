//! Memory of a device, and memory of the host that it copies from and to without a detour.
#![allow(unsafe_code)] // calls of the driver, pinned memory as slices

use super::device::Device;
use crate::backend::cpu::arena::Buffer;
use crate::bail;
use crate::error::{Error, Kind, Result};
use crate::runtime::{Charge, Class};
use std::ptr::NonNull;
use std::sync::Arc;

/// Memory of a device; its bytes are anything at first.
#[derive(Debug)]
pub struct Block {
    device: Arc<Device>,
    address: u64,
    len: usize,
}

impl Block {
    /// `len` bytes for `what`.
    pub fn new(device: &Arc<Device>, len: usize, what: &str) -> Result<Block> {
        let at = device.enter()?;
        let mut address = 0;
        if len > 0 {
            // SAFETY: writes an address.
            at.check(unsafe { (at.api().cuMemAlloc_v2)(&mut address, len) }, what).map_err(|e| match e.kind() {
                Kind::OutOfMemory => {
                    let free = device.memory().map_or(0, |m| m.0);
                    let text = format!("{what}: {len} bytes could not be allocated on {}, {free} are free", device.info().name);
                    Error::new(Kind::OutOfMemory, text).sizes(len as u64, free).named(what)
                }
                _ => e,
            })?;
        }
        Ok(Block { device: Arc::clone(device), address, len })
    }

    /// Where it is: an address of the device.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        if self.address != 0
            && let Some(at) = self.device.enter_anyway()
        {
            // SAFETY: allocated by `new`, and nobody else knows it any more; the driver waits for work that uses it.
            unsafe { (at.api().cuMemFree_v2)(self.address) };
        }
    }
}

/// Memory of the host that stays where it is.
pub struct Pinned {
    device: Arc<Device>,
    ptr: NonNull<u8>,
    len: usize,
    origin: Origin,
}

/// Where pinned memory comes from.
enum Origin {
    Driver { _charge: Charge },
    Buffer { _buffer: Buffer },
}

// SAFETY: plain memory, owned.
unsafe impl Send for Pinned {}
// SAFETY: as above; `&Pinned` only reads.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// `len` zeroed bytes for `what`.
    pub fn new(device: &Arc<Device>, len: usize, what: &str) -> Result<Pinned> {
        let at = device.enter()?;
        let fail = || Error::new(Kind::OutOfMemory, format!("{what}: {len} bytes of the host could not be allocated")).named(what);
        let charge = Charge::new(Class::Other, len, len).ok_or_else(fail)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes an address.
        at.check(unsafe { (at.api().cuMemHostAlloc)(&mut raw, len.max(1), 0) }, what)?;
        let ptr = NonNull::new(raw.cast::<u8>()).ok_or_else(fail)?;
        // SAFETY: `len` bytes that the driver just gave.
        unsafe { ptr.write_bytes(0, len) };
        Ok(Pinned { device: Arc::clone(device), ptr, len, origin: Origin::Driver { _charge: charge } })
    }

    /// Memory that is there already: large pages are pinned in a tenth of the time that the driver takes to give as much.
    pub fn of(device: &Arc<Device>, buffer: Buffer, what: &str) -> Result<Pinned> {
        let at = device.enter()?;
        let (raw, len) = (buffer.as_ptr(), buffer.len());
        let ptr = NonNull::new(raw).filter(|_| len > 0);
        let Some(ptr) = ptr else { bail!(Internal, "{what}: no bytes to pin") };
        // SAFETY: the buffer's memory, which stays where it is until it is given back.
        at.check(unsafe { (at.api().cuMemHostRegister_v2)(raw.cast(), len, 0) }, what)?;
        Ok(Pinned { device: Arc::clone(device), ptr, len, origin: Origin::Buffer { _buffer: buffer } })
    }

    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        // SAFETY: `len` initialised bytes, as long as `self` lives.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr(), self.len) }
    }

    /// Some of the bytes: the only ones that copies and kernels under way must not write.
    pub fn part(&self, range: std::ops::Range<usize>) -> &[u8] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: as above, and inside.
        unsafe { std::slice::from_raw_parts(self.ptr.as_ptr().add(range.start), range.len()) }
    }

    /// Where they are: for kernels too, which find them over the bus.
    pub fn address(&self) -> u64 {
        self.ptr.as_ptr().expose_provenance() as u64
    }

    /// The bytes, to write. Copies from or to them that are under way must be waited for first.
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes this the only reference.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.as_ptr(), self.len) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if let Some(at) = self.device.enter_anyway() {
            let start = self.ptr.as_ptr().cast();
            // SAFETY: allocated by `new`, or registered by `of`.
            unsafe {
                match self.origin {
                    Origin::Driver { .. } => (at.api().cuMemFreeHost)(start),
                    Origin::Buffer { .. } => (at.api().cuMemHostUnregister)(start),
                }
            };
        }
    }
}
