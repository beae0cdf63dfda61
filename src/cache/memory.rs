//! Where pages and recurrent states live: in the host's memory, or in a device's.
//!
//! Whoever handles them works with addresses and counts; the few places that move bytes ask the home to. On the host that is a plain copy.
//! On a device it is queued behind the work that was queued before, so what a run wrote is what is copied.
#![allow(unsafe_code)] // pages are raw memory; see `pages.rs`

use crate::backend::cpu::arena::Buffer;
use crate::backend::cuda::{Block, Stream};
use crate::error::Result;
use crate::runtime::Class;
use std::sync::Arc;

/// Whose memory it is.
#[derive(Clone, Default)]
pub enum Home {
    /// The host's.
    #[default]
    Host,
    /// A device's, reached through this stream, which the runs over it are queued on too.
    Device(Arc<Stream>),
}

/// Memory of a home, zeros at first.
pub(super) enum Memory {
    Host(Buffer),
    Device(Block),
}

impl Memory {
    /// First byte: an address of the home.
    pub fn first(&self) -> *mut u8 {
        match self {
            Memory::Host(buffer) => buffer.as_ptr(),
            Memory::Device(block) => std::ptr::without_provenance_mut(block.address() as usize),
        }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        match self {
            Memory::Host(buffer) => buffer.len(),
            Memory::Device(block) => block.len(),
        }
    }
}

impl Home {
    /// Whether it is a device's.
    pub fn is_device(&self) -> bool {
        matches!(self, Home::Device(_))
    }

    /// `len` zeroed bytes for `what`.
    pub(super) fn memory(&self, len: usize, what: &str) -> Result<Memory> {
        match self {
            Home::Host => Ok(Memory::Host(Buffer::of(Class::Cache, len, what)?)),
            Home::Device(stream) => {
                let block = Block::new(stream.device(), len, what)?;
                if len > 0 {
                    stream.zero(block.address(), len)?;
                }
                Ok(Memory::Device(block))
            }
        }
    }

    /// Copies within the home.
    ///
    /// # Safety
    /// `len` bytes at both places are this home's, apart, and nobody else writes to either.
    pub(super) unsafe fn copy(&self, from: *const u8, to: *mut u8, len: usize) -> Result<()> {
        match self {
            // SAFETY: the caller's promise.
            Home::Host => unsafe { std::ptr::copy_nonoverlapping(from, to, len) },
            Home::Device(stream) => stream.copy(to.addr() as u64, from.addr() as u64, len)?,
        }
        Ok(())
    }

    /// Copies out of the home.
    ///
    /// # Safety
    /// As many bytes at `from` are this home's, and nobody writes to them.
    pub(super) unsafe fn read(&self, from: *const u8, out: &mut [u8]) -> Result<()> {
        match self {
            // SAFETY: the caller's promise.
            Home::Host => unsafe { std::ptr::copy_nonoverlapping(from, out.as_mut_ptr(), out.len()) },
            Home::Device(stream) => stream.read(from.addr() as u64, out)?,
        }
        Ok(())
    }

    /// Copies into the home.
    ///
    /// # Safety
    /// As many bytes at `to` are this home's, and nobody else reads or writes them.
    pub(super) unsafe fn write(&self, to: *mut u8, bytes: &[u8]) -> Result<()> {
        match self {
            // SAFETY: the caller's promise.
            Home::Host => unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len()) },
            Home::Device(stream) => stream.write(to.addr() as u64, bytes)?,
        }
        Ok(())
    }
}
