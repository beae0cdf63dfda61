//! Work of a device in order: copies, kernels, captured graphs.
//!
//! Addresses are the device's; nothing here checks that they lie in memory that lives. Whoever queues work keeps its memory until the work is
//! done, and memory of the host that a copy uses too.
#![allow(unsafe_code)] // calls of the driver

use super::device::{Device, Entered};
use super::launch::{Grid, Kernel, Launch};
use super::memory::Pinned;
use super::sys::{self, CUevent, CUlaunchAttribute, CUlaunchAttributeID, CUlaunchConfig, CUstream};
use super::times::Times;
use crate::ensure;
use crate::error::Result;
use std::cell::Cell;
use std::ffi::c_void;
use std::ops::Range;
use std::sync::Arc;

/// A queue of work.
pub struct Stream {
    pub(super) device: Arc<Device>,
    pub(super) raw: CUstream,
    pub(super) times: Times,
    low: bool,
}

// SAFETY: a stream may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// A queue; with `low`, work of other streams goes first.
    pub fn new(device: &Arc<Device>, low: bool) -> Result<Stream> {
        let at = device.enter()?;
        let (mut least, mut greatest, mut raw) = (0, 0, std::ptr::null_mut());
        // SAFETY: writes two numbers.
        at.check(unsafe { (at.api().cuCtxGetStreamPriorityRange)(&mut least, &mut greatest) }, "priorities of streams")?;
        let priority = if low { least } else { greatest };
        // SAFETY: writes a stream.
        at.check(unsafe { (at.api().cuStreamCreateWithPriority)(&mut raw, sys::STREAM_NON_BLOCKING, priority) }, "a stream")?;
        Ok(Stream { device: Arc::clone(device), raw, times: Times::default(), low })
    }

    /// Another queue of the same priority.
    pub fn another(&self) -> Result<Stream> {
        Stream::new(&self.device, self.low)
    }

    /// The device.
    pub fn device(&self) -> &Arc<Device> {
        &self.device
    }

    /// Copies to the device. The bytes may be anything afterwards.
    pub fn write(&self, to: u64, bytes: &[u8]) -> Result<()> {
        let at = self.device.enter()?;
        // SAFETY: from memory that is not pinned the driver copies before it returns; see the module on `to`.
        let code = unsafe { (at.api().cuMemcpyHtoDAsync_v2)(to, bytes.as_ptr().cast(), bytes.len(), self.raw) };
        at.check(code, "a copy to the device")
    }

    /// Queues a copy to the device.
    ///
    /// # Safety
    /// The bytes stay as they are until the copy is done.
    pub unsafe fn write_pinned(&self, to: u64, from: &Pinned, range: Range<usize>) -> Result<()> {
        let at = self.device.enter()?;
        let bytes = &from.as_slice()[range];
        // SAFETY: the caller keeps the bytes.
        let code = unsafe { (at.api().cuMemcpyHtoDAsync_v2)(to, bytes.as_ptr().cast(), bytes.len(), self.raw) };
        at.check(code, "a copy to the device")
    }

    /// Copies from the device, after all that was queued.
    pub fn read(&self, from: u64, out: &mut [u8]) -> Result<()> {
        let at = self.device.enter()?;
        // SAFETY: the borrow outlasts the copy, which is waited for.
        let code = unsafe { (at.api().cuMemcpyDtoHAsync_v2)(out.as_mut_ptr().cast(), from, out.len(), self.raw) };
        at.check(code, "a copy from the device")?;
        self.synchronize()
    }

    /// Queues a copy from the device.
    ///
    /// # Safety
    /// Nobody looks at the bytes, and they stay, until the copy is done.
    pub unsafe fn read_pinned(&self, from: u64, to: &mut Pinned, range: Range<usize>) -> Result<()> {
        let at = self.device.enter()?;
        let bytes = &mut to.as_mut_slice()[range];
        // SAFETY: the caller keeps the bytes.
        let code = unsafe { (at.api().cuMemcpyDtoHAsync_v2)(bytes.as_mut_ptr().cast(), from, bytes.len(), self.raw) };
        at.check(code, "a copy from the device")
    }

    /// Queues a copy within the device.
    pub fn copy(&self, to: u64, from: u64, len: usize) -> Result<()> {
        let at = self.device.enter()?;
        // SAFETY: see the module.
        at.check(unsafe { (at.api().cuMemcpyDtoDAsync_v2)(to, from, len, self.raw) }, "a copy within the device")
    }

    /// Queues zeros.
    pub fn zero(&self, to: u64, len: usize) -> Result<()> {
        let at = self.device.enter()?;
        // SAFETY: see the module.
        at.check(unsafe { (at.api().cuMemsetD8Async)(to, 0, len, self.raw) }, "zeros")
    }

    /// Waits until everything is done.
    pub fn synchronize(&self) -> Result<()> {
        let at = self.device.enter()?;
        // SAFETY: the stream lives.
        at.check(unsafe { (at.api().cuStreamSynchronize)(self.raw) }, "work on the device")
    }

    /// Whether everything is done.
    pub fn is_idle(&self) -> Result<bool> {
        let at = self.device.enter()?;
        // SAFETY: the stream lives.
        match unsafe { (at.api().cuStreamQuery)(self.raw) } {
            sys::NOT_READY => Ok(false),
            code => at.check(code, "work on the device").map(|()| true),
        }
    }

    /// To queue kernels from this thread.
    pub fn queue(&self) -> Result<Queue<'_>> {
        Ok(Queue { stream: self, at: self.device.enter()?, settles: Cell::new(false) })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Some(at) = self.device.enter_anyway() {
            // SAFETY: made by `new`; the driver lets queued work finish.
            unsafe { (at.api().cuStreamDestroy_v2)(self.raw) };
        }
    }
}

/// A stream that kernels are queued on; the context is current meanwhile.
pub struct Queue<'a> {
    pub(super) stream: &'a Stream,
    pub(super) at: Entered<'a>,
    settles: Cell<bool>,
}

impl Queue<'_> {
    /// The next kernel begins when all before it have ended, whether or not it could begin early. Those after it see the same from the start.
    pub fn settle(&self) {
        self.settles.set(true);
    }
}

impl Launch for Queue<'_> {
    fn launch(&self, kernel: Kernel, grid: Grid, args: &[u8]) -> Result<()> {
        let most = self.stream.device.info().shared;
        ensure!(grid.shared as usize <= most, Internal, "kernel {}: {} bytes of shared memory, there are {most}", kernel.name, grid.shared);
        let function = self.stream.device.kernels.get(&self.at, kernel, args.len(), grid.shared)?;
        // SAFETY: a union and an enum for which zeros are values (`CU_LAUNCH_ATTRIBUTE_IGNORE`).
        let mut attributes: [CUlaunchAttribute; 1] = unsafe { std::mem::zeroed() };
        let mut count = 0;
        if grid.early && !self.settles.take() {
            attributes[0].id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes[0].value.programmaticStreamSerializationAllowed = 1;
            count = 1;
        }
        let config = CUlaunchConfig {
            gridDimX: grid.blocks[0],
            gridDimY: grid.blocks[1],
            gridDimZ: grid.blocks[2],
            blockDimX: grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared,
            hStream: self.stream.raw,
            attrs: attributes.as_mut_ptr(),
            numAttrs: count,
        };
        let mut parameters = [args.as_ptr().cast_mut().cast::<c_void>()];
        self.stream.times.around(self.stream, kernel.name, || {
            // SAFETY: the kernel takes one struct of this size (`Kernels::get` compared), which the driver copies before it returns.
            let code = unsafe { (self.at.api().cuLaunchKernelEx)(&config, function, parameters.as_mut_ptr(), std::ptr::null_mut()) };
            self.at.check(code, kernel.name)
        })
    }

    fn write(&self, to: u64, bytes: &[u8]) -> Result<()> {
        self.stream.write(to, bytes)
    }

    fn processors(&self) -> usize {
        self.stream.device.info().processors
    }

    fn has_groups(&self) -> bool {
        self.stream.device.kernels.has_groups(&self.at)
    }

    fn shared(&self) -> usize {
        self.stream.device.info().shared
    }
}

/// A place in a stream, to wait for.
pub struct Event {
    device: Arc<Device>,
    raw: CUevent,
}

// SAFETY: an event may be used from any thread.
unsafe impl Send for Event {}
// SAFETY: as above.
unsafe impl Sync for Event {}

impl Event {
    /// Done until it is recorded; with `timed`, times between two can be told.
    pub fn new(device: &Arc<Device>, timed: bool) -> Result<Event> {
        let at = device.enter()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: writes an event.
        at.check(unsafe { (at.api().cuEventCreate)(&mut raw, if timed { 0 } else { sys::EVENT_NO_TIMING }) }, "an event")?;
        Ok(Event { device: Arc::clone(device), raw })
    }

    /// Takes the place behind everything that was queued.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        let at = self.device.enter()?;
        // SAFETY: both live.
        at.check(unsafe { (at.api().cuEventRecord)(self.raw, stream.raw) }, "an event")
    }

    /// Waits until the work before it is done.
    pub fn wait(&self) -> Result<()> {
        let at = self.device.enter()?;
        // SAFETY: the event lives.
        at.check(unsafe { (at.api().cuEventSynchronize)(self.raw) }, "work on the device")
    }

    /// Whether the work before it is done.
    pub fn is_done(&self) -> Result<bool> {
        let at = self.device.enter()?;
        // SAFETY: the event lives.
        match unsafe { (at.api().cuEventQuery)(self.raw) } {
            sys::NOT_READY => Ok(false),
            code => at.check(code, "work on the device").map(|()| true),
        }
    }

    /// Milliseconds since an earlier one; both are timed and done.
    pub fn since(&self, earlier: &Event) -> Result<f32> {
        let at = self.device.enter()?;
        let mut time = 0.0;
        // SAFETY: writes a number.
        at.check(unsafe { (at.api().cuEventElapsedTime)(&mut time, earlier.raw, self.raw) }, "a time")?;
        Ok(time)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Some(at) = self.device.enter_anyway() {
            // SAFETY: made by `new`.
            unsafe { (at.api().cuEventDestroy_v2)(self.raw) };
        }
    }
}
