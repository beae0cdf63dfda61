//! Where pages and recurrent states live: in the host's memory, or in a device's.
//!
//! Whoever handles them works with addresses and counts; the few places that move bytes ask the home to. On the host that is a plain copy.
//! On a device it is queued behind the work that was queued before, so what a run wrote is what is copied.
#![allow(unsafe_code)] // pages are raw memory; see `pages.rs`

use crate::backend::cpu::arena::Buffer;
use crate::backend::cuda::{Block, Stream};
use crate::error::Result;
use crate::runtime::Class;
use std::sync::{Arc, Mutex, PoisonError};

/// Whose memory it is.
#[derive(Clone, Default)]
pub enum Home {
    /// The host's.
    #[default]
    Host,
    /// A device's, reached through this stream, which the runs over it are queued on too.
    Device(Arc<Stream>, Arc<Room>),
}

/// Memory of a home, zeros at first.
pub(super) enum Memory {
    Host(Buffer),
    Device(Piece),
}

/// Memory of a device for the next pieces: the driver takes tens of microseconds for each block, and a step that reaches a new page in every layer
/// asks for many pieces.
#[derive(Default)]
pub struct Room(Mutex<Option<(Arc<Block>, usize)>>);

/// A part of a block, which is given back with its last piece.
pub(super) struct Piece {
    block: Arc<Block>,
    start: usize,
    len: usize,
}

impl Piece {
    /// Where it is: an address of the device.
    pub fn address(&self) -> u64 {
        self.block.address() + self.start as u64
    }
}

/// Most pieces of a block, and most bytes of one with several.
const TOGETHER: usize = 16;
const LONGEST: usize = 32 << 20;
/// Pieces start on a multiple of this.
const ALIGN: usize = 256;

/// Bytes of a piece in its block, and of the block that is asked for with it; the same where it gets one of its own.
fn shares(len: usize) -> (usize, usize) {
    let whole = len.checked_next_multiple_of(ALIGN).unwrap_or(len);
    (whole, whole * TOGETHER.min(LONGEST / whole.max(1)).max(1))
}

impl Piece {
    /// A zeroed block of its own.
    fn alone(stream: &Stream, len: usize, what: &str) -> Result<Piece> {
        Ok(Piece { block: zeroed(stream, len, what)?, start: 0, len })
    }
}

fn zeroed(stream: &Stream, len: usize, what: &str) -> Result<Arc<Block>> {
    let block = Block::new(stream.device(), len, what)?;
    if len > 0 {
        stream.zero(block.address(), len)?;
    }
    Ok(Arc::new(block))
}

impl Room {
    /// `len` zeroed bytes for `what`.
    fn take(&self, stream: &Stream, len: usize, what: &str) -> Result<Piece> {
        let (whole, together) = shares(len);
        if together == whole {
            return Piece::alone(stream, len, what);
        }
        let mut room = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((block, used)) = &mut *room
            && block.len() - *used >= whole
        {
            let start = *used;
            *used += whole;
            return Ok(Piece { block: Arc::clone(block), start, len });
        }
        // Where there is little left, it goes to whoever asks.
        let Ok(fresh) = zeroed(stream, together, what) else { return Piece::alone(stream, len, what) };
        *room = Some((Arc::clone(&fresh), whole));
        Ok(Piece { block: fresh, start: 0, len })
    }
}

impl Memory {
    /// First byte: an address of the home.
    pub fn first(&self) -> *mut u8 {
        match self {
            Memory::Host(buffer) => buffer.as_ptr(),
            Memory::Device(piece) => std::ptr::without_provenance_mut(piece.address() as usize),
        }
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        match self {
            Memory::Host(buffer) => buffer.len(),
            Memory::Device(piece) => piece.len,
        }
    }
}

impl Home {
    /// A device's, reached through `stream`.
    pub fn device(stream: &Arc<Stream>) -> Home {
        Home::Device(Arc::clone(stream), Arc::default())
    }

    /// Whether it is a device's.
    pub fn is_device(&self) -> bool {
        matches!(self, Home::Device(..))
    }

    /// `len` zeroed bytes for `what`.
    pub(super) fn memory(&self, len: usize, what: &str) -> Result<Memory> {
        match self {
            Home::Host => Ok(Memory::Host(Buffer::of(Class::Cache, len, what)?)),
            Home::Device(stream, _) => Ok(Memory::Device(Piece::alone(stream, len, what)?)),
        }
    }

    /// As [`Home::memory`], for what is asked for again and again: on a device from a block that several share.
    pub(super) fn shared_memory(&self, len: usize, what: &str) -> Result<Memory> {
        match self {
            Home::Host => self.memory(len, what),
            Home::Device(stream, room) => Ok(Memory::Device(room.take(stream, len, what)?)),
        }
    }

    /// Most bytes of a device that lie unused at the end of shared memory of `len` bytes each.
    pub(super) fn spare(len: usize) -> usize {
        let (whole, together) = shares(len);
        together - whole
    }

    /// Copies within the home.
    ///
    /// # Safety
    /// `len` bytes at both places are this home's, apart, and nobody else writes to either.
    pub(super) unsafe fn copy(&self, from: *const u8, to: *mut u8, len: usize) -> Result<()> {
        match self {
            // SAFETY: the caller's promise.
            Home::Host => unsafe { std::ptr::copy_nonoverlapping(from, to, len) },
            Home::Device(stream, _) => stream.copy(to.addr() as u64, from.addr() as u64, len)?,
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
            Home::Device(stream, _) => stream.read(from.addr() as u64, out)?,
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
            Home::Device(stream, _) => stream.write(to.addr() as u64, bytes)?,
        }
        Ok(())
    }
}
