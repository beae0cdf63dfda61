//! A kept moment of a sequence: its tokens, keys and values, recurrent state and logits, to start any number of sequences of the
//! same model from. It shares memory with them until somebody writes; as bytes it outlives the process.

use super::fingerprint::{Fingerprint, checksum};
use super::load::Engine;
use super::sequence::Sequence;
use crate::cache::{LayerPages, State};
use crate::error::{Error, Kind, Result, vec_with_capacity};
use crate::ops::PAGE;
use crate::{bail, ensure};
use std::sync::Arc;

/// What a sequence was at one moment.
pub struct Snapshot {
    engine: Arc<Engine>,
    tokens: Vec<i32>,
    source: usize,
    pages: Vec<LayerPages>,
    state: Arc<State>,
    /// Leading tokens whose state is known to follow from them alone.
    exact: usize,
}

impl Sequence {
    /// Keeps this moment.
    pub fn snapshot(&self) -> Result<Snapshot> {
        let mut tokens = vec_with_capacity(self.len(), "a snapshot's tokens")?;
        tokens.extend_from_slice(&self.tokens);
        let mut pages: Vec<LayerPages> = self.pages.iter().map(|pages| pages.fork(self.len())).collect::<Result<_>>()?;
        // A step that is under way may have pages past the end.
        let own = pages.iter_mut().zip(self.engine().of_source()).filter(|(_, of_source)| !**of_source);
        own.for_each(|(pages, _)| pages.truncate(self.len()));
        Ok(Snapshot {
            engine: Arc::clone(self.engine()),
            tokens,
            source: self.source(),
            pages,
            state: self.state.share(),
            exact: self.exact(),
        })
    }

    /// Becomes what the snapshot kept, bit for bit; its own tokens and marks are gone. On error it is as before.
    pub fn restore(&mut self, snapshot: &Snapshot) -> Result<()> {
        ensure!(Arc::ptr_eq(self.engine(), &snapshot.engine), Mismatch, "the snapshot was taken from a sequence of another loaded model");
        self.take(&snapshot.tokens, snapshot.source, &snapshot.pages, &snapshot.state, snapshot.exact)
    }
}

/// Opens all bytes; the format's version follows as one digit.
const MAGIC: &[u8; 7] = b"mtrlseq";
/// Grows with every change of what follows.
const VERSION: u8 = b'3';

impl Snapshot {
    /// The tokens.
    pub fn tokens(&self) -> &[i32] {
        &self.tokens
    }

    /// Size of [`Snapshot::to_bytes`].
    pub fn byte_len(&self) -> usize {
        let pages: usize = self.pages.iter().map(|p| p.count() * p.page_bytes()).sum();
        8 * 6 + 4 * (self.tokens.len() + self.state.floats()) + pages
    }

    /// Little-endian bytes: magic, version, fingerprint of the model, length of the source, tokens, recurrent state, pages of each layer, checksum.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        let mut out = vec_with_capacity(self.byte_len(), "a snapshot's bytes")?;
        out.extend_from_slice(MAGIC);
        out.push(VERSION);
        out.extend_from_slice(&self.engine.fingerprint()?.0.to_le_bytes());
        out.extend_from_slice(&(self.source as u64).to_le_bytes());
        out.extend_from_slice(&(self.tokens.len() as u64).to_le_bytes());
        self.tokens.iter().for_each(|t| out.extend_from_slice(&t.to_le_bytes()));
        self.state.write_to(&mut out)?;
        for pages in self.pages.iter() {
            for index in 0..pages.count() {
                pages.append_page(index, &mut out)?;
            }
        }
        let sum = checksum(&out);
        out.extend_from_slice(&sum.to_le_bytes());
        Ok(out)
    }

    /// A snapshot from bytes that a sequence of the same model, loaded the same way, was kept as.
    pub fn from_bytes(engine: &Arc<Engine>, bytes: &[u8]) -> Result<Snapshot> {
        let Some((body, sum)) = bytes.split_last_chunk::<8>() else { bail!(CorruptFile, "snapshot: {} bytes are too few", bytes.len()) };
        ensure!(body.starts_with(MAGIC), CorruptFile, "snapshot: does not begin with {:?}", String::from_utf8_lossy(MAGIC));
        ensure!(
            checksum(body) == u64::from_le_bytes(*sum),
            CorruptFile,
            "snapshot: the checksum of {} bytes is not the one at their end",
            body.len()
        );
        let mut rest = Reader { bytes: body, at: MAGIC.len() };
        let [version] = *rest.chunk()?;
        ensure!(
            version == VERSION,
            VersionMismatch,
            "snapshot: written in format {:?}, this library reads {:?}",
            char::from(version),
            char::from(VERSION)
        );
        let (theirs, ours) = (Fingerprint(u128::from_le_bytes(*rest.chunk()?)), engine.fingerprint()?);
        ensure!(
            theirs == ours,
            Mismatch,
            "snapshot: kept by a model with the fingerprint {theirs}, this one has {ours}: another model, or loaded with other options"
        );
        let (source, most) = (u64::from_le_bytes(*rest.chunk()?), engine.info().context);
        ensure!(source <= most as u64, ContextFull, "snapshot: a source of {source} tokens, the model was loaded for {most}");
        ensure!(source == 0 || engine.has_encoder(), CorruptFile, "snapshot: a source of {source} tokens, the model reads none");
        let source = source as usize;
        let count = u64::from_le_bytes(*rest.chunk()?);
        ensure!(count <= most as u64, ContextFull, "snapshot: {count} tokens, the model was loaded for {most}");
        let count = count as usize;
        let mut tokens = vec_with_capacity(count, "a snapshot's tokens")?;
        tokens.extend(rest.take(4 * count)?.as_chunks().0.iter().map(|b| i32::from_le_bytes(*b)));
        ensure!(count == 0 || source > 0 || !engine.has_encoder(), CorruptFile, "snapshot: {count} tokens of a translation without source");
        engine.check_tokens(&tokens).map_err(|e| Error::new(Kind::CorruptFile, format!("snapshot: {}", e.message())))?;
        let (pool, _) = engine.states();
        let floats = rest.take(4 * pool.layout().floats())?;
        let state = pool.filled(floats.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)))?;
        let mut pages = vec_with_capacity(engine.pools().len(), "a snapshot's pages")?;
        for (pool, of_source) in engine.pools().iter().zip(engine.of_source()) {
            let positions = if *of_source { source } else { count };
            let mut layer = LayerPages::new(pool, positions)?;
            layer.reserve(0, positions)?;
            for index in 0..positions.div_ceil(PAGE) {
                layer.write_page(index, rest.take(layer.page_bytes())?)?;
            }
            pages.push(layer);
        }
        ensure!(rest.at == body.len(), CorruptFile, "snapshot: {} bytes are left over", body.len() - rest.at);
        // Bytes are taken at their word by the sequence that is made of them, and by nobody else.
        Ok(Snapshot { engine: Arc::clone(engine), tokens, source, pages, state, exact: 0 })
    }
}

/// Bytes taken from the front, never past the end.
pub(super) struct Reader<'a> {
    pub bytes: &'a [u8],
    pub at: usize,
}

impl<'a> Reader<'a> {
    pub fn take(&mut self, n: usize) -> Result<&'a [u8]> {
        let taken = self.bytes.get(self.at..).and_then(|rest| rest.get(..n)).ok_or_else(|| {
            Error::new(Kind::CorruptFile, format!("snapshot: {n} bytes at {} are past its end at {}", self.at, self.bytes.len()))
                .at(self.at as u64)
        })?;
        self.at += n;
        Ok(taken)
    }

    pub fn chunk<const N: usize>(&mut self) -> Result<&'a [u8; N]> {
        self.take(N).map(|bytes| bytes.first_chunk().expect("take() gave N bytes"))
    }
}
