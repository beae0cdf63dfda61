//! How a sequence's tokens are chosen, as bytes: the part of a saved sequence in front of its snapshot.
//!
//! Stages, hook and grammar are the host's and are not kept: it sets them on the sequence that is restored. What has changed since
//! is: the generator, mirostat's number, the newest log-probability, and the places of the tokens that the grammar took, from which
//! its parser is made anew.

use super::fingerprint::checksum;
use super::generate::Chooser;
use super::snapshot::Reader;
use crate::error::{Error, Kind, Result, vec_with_capacity};
use crate::sampling::{Constraint, State};
use crate::{bail, ensure};

/// Opens it; the last digit is the format's version.
const MAGIC: &[u8; 8] = b"mtrlchs1";

/// Bytes besides the places of a grammar's tokens.
const FIXED: usize = 8 * 7;

/// A chooser that was saved.
pub struct SavedChooser {
    state: State,
    last_logprob: Option<f32>,
    /// Of the grammar that was followed.
    grammar: Option<u64>,
    positions: Vec<usize>,
}

impl Chooser {
    /// Size of what [`Chooser::write_bytes`] writes.
    pub fn byte_len(&self) -> usize {
        FIXED + 4 * self.constraint.as_ref().map_or(0, Constraint::taken)
    }

    /// Appends the bytes, for which there is room: magic, generator, mu, log-probability, fingerprint of the grammar (0: none), number of
    /// its tokens, their places, checksum.
    pub fn write_bytes(&self, out: &mut Vec<u8>) {
        let start = out.len();
        out.extend_from_slice(MAGIC);
        self.sampler.state().to_bits().iter().for_each(|word| out.extend_from_slice(&word.to_le_bytes()));
        out.extend_from_slice(&u64::from(self.last_logprob.unwrap_or(f32::NAN).to_bits()).to_le_bytes());
        let (fingerprint, count) = self.constraint.as_ref().map_or((0, 0), |c| (c.grammar().fingerprint(), c.taken()));
        out.extend_from_slice(&fingerprint.to_le_bytes());
        out.extend_from_slice(&(count as u64).to_le_bytes());
        if let Some(constraint) = &self.constraint {
            // Contexts are counted by far fewer than 32 bits.
            constraint.positions().for_each(|position| out.extend_from_slice(&(position as u32).to_le_bytes()));
        }
        let sum = checksum(&out[start..]);
        out.extend_from_slice(&sum.to_le_bytes());
    }

    /// Goes to where a saved one was; `constraint` is what [`SavedChooser::constraint`] gave for it.
    pub fn resume(&mut self, saved: &SavedChooser, constraint: Option<Constraint>) {
        self.sampler.restore(saved.state);
        self.last_logprob = saved.last_logprob;
        self.before_logprob = saved.last_logprob;
        self.constraint = constraint;
    }
}

impl SavedChooser {
    /// Reads one from the front; what follows it is left over.
    pub fn from_bytes(bytes: &[u8]) -> Result<(SavedChooser, &[u8])> {
        let mut reader = Reader { bytes, at: 0 };
        ensure!(reader.take(8)? == MAGIC, CorruptFile, "saved sequence: does not begin with {:?}", String::from_utf8_lossy(MAGIC));
        let mut word = || -> Result<u64> { Ok(u64::from_le_bytes(*reader.chunk()?)) };
        let state = State::from_bits([word()?, word()?]);
        let last_logprob = Some(f32::from_bits(word()? as u32)).filter(|x| !x.is_nan());
        let (grammar, count) = (word()?, word()?);
        let size = usize::try_from(count).ok().and_then(|count| count.checked_mul(4));
        let Some(size) = size else { bail!(CorruptFile, "saved sequence: {count} tokens of a grammar") };
        let places = reader.take(size)?;
        let sum = checksum(&bytes[..reader.at]);
        ensure!(sum == u64::from_le_bytes(*reader.chunk()?), CorruptFile, "saved sequence: the checksum of its first part is another");
        let mut positions = vec_with_capacity(places.len() / 4, "places of a grammar's tokens")?;
        positions.extend(places.as_chunks().0.iter().map(|b| u32::from_le_bytes(*b) as usize));
        Ok((SavedChooser { state, last_logprob, grammar: (grammar != 0).then_some(grammar), positions }, &bytes[reader.at..]))
    }

    /// The constraint as it was, made from the one that is in force and the sequence's tokens as they were; `None` where none was.
    pub fn constraint(&self, current: Option<&Constraint>, tokens: &[i32]) -> Result<Option<Constraint>> {
        let Some(wanted) = self.grammar else { return Ok(None) };
        let Some(grammar) = current.map(Constraint::grammar).filter(|grammar| grammar.fingerprint() == wanted) else {
            let found = if current.is_some() { "another one" } else { "none" };
            let text = format!("the saved sequence follows a grammar; set the same one before it is restored (in force is {found})");
            return Err(Error::new(Kind::Mismatch, text).named("grammar"));
        };
        Constraint::resumed(grammar, &self.positions, tokens).map(Some)
    }
}
