//! The headers of a file that somebody else reads: as much of its beginning as they take, and zeros for the rest, which is
//! address space and no memory.

use super::detect::{self, Content};
use super::gguf::Gguf;
use super::input::ReadAt;
use super::safetensors::MAX_HEADER;
use super::source::Source;
use crate::backend::cpu::arena::Buffer;
use crate::error::{Error, Kind, Result};
use std::sync::Arc;

/// Read at first; most headers without a vocabulary are shorter.
const FIRST: usize = 1 << 20;
/// A longer beginning is this many times the last one.
const GROWTH: usize = 4;
/// Bytes asked for at once.
const PIECE: usize = 8 << 20;

/// Reads the beginning of a file of `len` bytes up to the end of its headers. Files of other kinds are read whole.
pub(super) fn read(label: &str, len: usize, reader: &dyn ReadAt) -> Result<Source> {
    let mut buffer = Buffer::new(len, label)?;
    let (mut have, mut want) = (0, FIRST.min(len));
    loop {
        while have < want {
            let end = want.min(have + PIECE);
            reader.read_at(have as u64, &mut buffer.as_mut_slice()[have..end])?;
            have = end;
        }
        if have == len {
            return Ok(Source::beginning(label, buffer));
        }
        let bytes = buffer.as_slice();
        match detect::content(&bytes[..have.min(512)], len as u64) {
            Content::Safetensors => {
                let header = bytes.first_chunk::<8>().map_or(0, |b| u64::from_le_bytes(*b)).min(MAX_HEADER) as usize;
                want = (8 + header).min(len);
                if have >= want {
                    return Ok(Source::beginning(label, buffer));
                }
            }
            Content::Gguf => {
                let source = Arc::new(Source::beginning(label, buffer));
                // Zeros are no metadata, so what is cut off by them is an error; the whole file then says which.
                if Gguf::read(Arc::clone(&source)).is_ok_and(|gguf| gguf.data_start() <= have) {
                    return Arc::into_inner(source).ok_or_else(|| Error::new(Kind::Internal, "a header that somebody keeps"));
                }
                let again = Arc::into_inner(source).and_then(Source::into_beginning);
                buffer = again.ok_or_else(|| Error::new(Kind::Internal, "a header that somebody keeps"))?;
                want = have.saturating_mul(GROWTH).min(len);
            }
            Content::Other(_) => want = len,
        }
    }
}
