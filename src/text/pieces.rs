//! The bytes of every token, in one block.
//!
//! Filled once while loading, in order of id; afterwards a lookup is two numbers and a slice. Ids without a token (holes in
//! a vocabulary, rows that only pad a matrix) are known as such and are refused.

use crate::ensure;
use crate::error::{self, Error, Kind, Result};

/// What a token is, as far as showing its text is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PieceKind {
    /// No token has this id.
    Hole,
    /// Ordinary text.
    Text,
    /// A control token: shown only on request, parsed only on request.
    Special,
}

/// Token id to bytes.
#[derive(Debug)]
pub(super) struct Pieces {
    /// `ends[id]` is where the bytes of `id` end; they begin at the end of the one before.
    ends: Vec<u32>,
    kinds: Vec<PieceKind>,
    bytes: Vec<u8>,
}

impl Pieces {
    /// An empty table with room for `count` tokens.
    pub(super) fn with_capacity(count: usize) -> Result<Self> {
        Ok(Pieces {
            ends: error::vec_with_capacity(count, "token table")?,
            kinds: error::vec_with_capacity(count, "token kinds")?,
            bytes: error::vec_with_capacity(count.saturating_mul(8), "token bytes")?,
        })
    }

    /// Appends the next id.
    pub(super) fn push(&mut self, kind: PieceKind, bytes: &[u8]) -> Result<()> {
        self.push_with(kind, |all| all.extend_from_slice(bytes))
    }

    /// Appends the next id, whose bytes `add` puts behind those that are there.
    pub(super) fn push_with(&mut self, kind: PieceKind, add: impl FnOnce(&mut Vec<u8>)) -> Result<()> {
        add(&mut self.bytes);
        let end = self.bytes.len();
        let Ok(end) = u32::try_from(end) else {
            return Err(Error::new(Kind::TooLarge, format!("the tokens' texts together pass {} bytes", u32::MAX)));
        };
        self.ends.push(end);
        self.kinds.push(kind);
        Ok(())
    }

    /// Number of ids, holes included.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// The kind of `id`; ids outside the table are holes.
    pub(super) fn kind(&self, id: i32) -> PieceKind {
        usize::try_from(id).ok().and_then(|at| self.kinds.get(at).copied()).unwrap_or(PieceKind::Hole)
    }

    /// The bytes of `id`.
    pub(super) fn get(&self, id: i32) -> Result<&[u8]> {
        ensure!(self.kind(id) != PieceKind::Hole, InvalidToken, "token {id} is not in the vocabulary of {} tokens", self.len());
        let at = id as usize;
        let start = if at == 0 { 0 } else { self.ends[at - 1] };
        Ok(&self.bytes[start as usize..self.ends[at] as usize])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keeps_bytes_and_refuses_the_rest() {
        let mut pieces = Pieces::with_capacity(3).unwrap();
        pieces.push(PieceKind::Text, b"a\xff").unwrap();
        pieces.push(PieceKind::Hole, b"").unwrap();
        pieces.push(PieceKind::Special, b"<s>").unwrap();
        assert_eq!(pieces.get(0).unwrap(), b"a\xff");
        assert_eq!(pieces.get(2).unwrap(), b"<s>");
        for id in [1, 3, -1, i32::MAX, i32::MIN] {
            assert_eq!(pieces.get(id).unwrap_err().kind(), Kind::InvalidToken, "{id}");
        }
    }
}
