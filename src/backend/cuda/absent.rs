//! What stands for NVIDIA devices in a library that was built without them: the same names, and no device that anything could be done with.
#![allow(missing_docs)] // as the modules that it stands for

use super::launch::{Grid, Kernel, Launch};
use crate::backend::cpu::arena::Buffer;
use crate::error::{Error, Kind, Result};
use std::ffi::CStr;
use std::ops::Range;
use std::sync::Arc;

/// Why there is no device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The library was built without the feature `cuda`.
    NotBuilt,
}

impl std::fmt::Display for Reason {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "this library was built without support for NVIDIA devices")
    }
}

pub fn devices() -> Result<&'static [Info], Reason> {
    Err(Reason::NotBuilt)
}

macro_rules! never {
    ($($name:ident)*) => {
        $(
            #[derive(Debug)]
            pub enum $name {}
        )*
    };
}

never! { Device Block Pinned Stream Event Graph Never }

#[derive(Debug)]
pub struct Info {
    pub name: String,
    pub processors: usize,
    never: Never,
}

impl Info {
    pub fn name_text(&self) -> &CStr {
        match self.never {}
    }
    pub fn architecture_text(&self) -> &CStr {
        match self.never {}
    }
}

impl Device {
    pub fn open(_: usize) -> Result<Arc<Device>> {
        Err(Error::new(Kind::DeviceUnsupported, Reason::NotBuilt.to_string()))
    }
    pub fn info(&self) -> &'static Info {
        match *self {}
    }
    pub fn ready(&self, _: &[&'static str], _: usize) -> Result<()> {
        match *self {}
    }
    pub fn may_have_groups(&self) -> bool {
        match *self {}
    }
    pub fn has_groups(&self) -> Result<bool> {
        match *self {}
    }
    pub fn memory(&self) -> Result<(u64, u64)> {
        match *self {}
    }
}

impl Block {
    pub fn new(device: &Arc<Device>, _: usize, _: &str) -> Result<Block> {
        match **device {}
    }
    pub fn address(&self) -> u64 {
        match *self {}
    }
    pub fn len(&self) -> usize {
        match *self {}
    }
    pub fn is_empty(&self) -> bool {
        match *self {}
    }
}

impl Pinned {
    pub fn new(device: &Arc<Device>, _: usize, _: &str) -> Result<Pinned> {
        match **device {}
    }
    pub fn of(device: &Arc<Device>, _: Buffer, _: &str) -> Result<Pinned> {
        match **device {}
    }
    pub fn as_slice(&self) -> &[u8] {
        match *self {}
    }
    pub fn part(&self, _: Range<usize>) -> &[u8] {
        match *self {}
    }
    pub fn address(&self) -> u64 {
        match *self {}
    }
    pub fn as_mut_slice(&mut self) -> &mut [u8] {
        match *self {}
    }
}

#[allow(unsafe_code)] // as in a library that has them
impl Stream {
    pub fn new(device: &Arc<Device>, _: bool) -> Result<Stream> {
        match **device {}
    }
    pub fn device(&self) -> &Arc<Device> {
        match *self {}
    }
    pub fn another(&self) -> Result<Stream> {
        match *self {}
    }
    pub fn write(&self, _: u64, _: &[u8]) -> Result<()> {
        match *self {}
    }
    /// # Safety
    /// Cannot be called.
    pub unsafe fn write_pinned(&self, _: u64, _: &Pinned, _: Range<usize>) -> Result<()> {
        match *self {}
    }
    pub fn read(&self, _: u64, _: &mut [u8]) -> Result<()> {
        match *self {}
    }
    /// # Safety
    /// Cannot be called.
    pub unsafe fn read_pinned(&self, _: u64, _: &mut Pinned, _: Range<usize>) -> Result<()> {
        match *self {}
    }
    pub fn copy(&self, _: u64, _: u64, _: usize) -> Result<()> {
        match *self {}
    }
    pub fn zero(&self, _: u64, _: usize) -> Result<()> {
        match *self {}
    }
    pub fn synchronize(&self) -> Result<()> {
        match *self {}
    }
    pub fn queue(&self) -> Result<Queue<'_>> {
        match *self {}
    }
    pub fn time_kernels(&self) {
        match *self {}
    }
    pub fn times_kernels(&self) -> bool {
        match *self {}
    }
    pub fn kernel_times(&self) -> Result<Vec<super::KernelTime>> {
        match *self {}
    }
    pub fn capture(&self, _: &Stream, _: impl FnOnce(&Queue<'_>) -> Result<()>) -> Result<Graph> {
        match *self {}
    }
}

impl Event {
    pub fn new(device: &Arc<Device>, _: bool) -> Result<Event> {
        match **device {}
    }
    pub fn record(&self, _: &Stream) -> Result<()> {
        match *self {}
    }
    pub fn wait(&self) -> Result<()> {
        match *self {}
    }
}

impl Graph {
    pub fn launch(&mut self, _: &Stream) -> Result<()> {
        match *self {}
    }
}

pub struct Queue<'a>(&'a Never);

impl Queue<'_> {
    pub fn settle(&self) {
        match *self.0 {}
    }
}

impl Launch for Queue<'_> {
    fn launch(&self, _: Kernel, _: Grid, _: &[u8]) -> Result<()> {
        match *self.0 {}
    }
    fn write(&self, _: u64, _: &[u8]) -> Result<()> {
        match *self.0 {}
    }
    fn processors(&self) -> usize {
        match *self.0 {}
    }
    fn has_groups(&self) -> bool {
        match *self.0 {}
    }
}
