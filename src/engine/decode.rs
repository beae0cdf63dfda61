//! Several steps of generation in one call.
//!
//! The result is that of as many calls of [`decode_step`](super::decode_step). What one call knows and many do not is that another step follows, so
//! that a device need not wait for the host between two of them (`ahead.rs`).

use super::Sequence;
use super::ahead::stretch;
use super::generate::{Chooser, has_ended, step};
use crate::error::{Error, Kind, Result};

/// As `steps` calls of [`decode_step`](super::decode_step), whose tokens go to `tokens`, `[steps][sequences]`: the same tokens, bits and errors. Stops
/// behind the first step in which some sequence has produced a token that ends generation, so that it can be taken out.
///
/// Returns how many steps were done, and whether every sequence has ended in the last of them. After an error or a cancel the steps before it
/// stay, and are counted; the one that failed has changed nothing.
pub fn decode(sequences: &mut [&mut Sequence], choosers: &mut [&mut Chooser], steps: usize, tokens: &mut [i32]) -> (usize, Result<bool>) {
    let count = sequences.len();
    if count == 0 || steps == 0 {
        return (0, Ok(false));
    }
    if choosers.len() != count || steps.checked_mul(count) != Some(tokens.len()) {
        return (0, Err(Error::new(Kind::Internal, "steps over slices of different lengths")));
    }
    sequences.iter_mut().for_each(|sequence| sequence.begin_call());
    let mut done = 0;
    while done < steps {
        let rest = &mut tokens[done * count..];
        let (more, went) = match stretch(sequences, choosers, rest) {
            (0, Ok(())) => match step(sequences, choosers, &mut rest[..count]) {
                Ok(()) => (1, Ok(())),
                Err(e) => (0, Err(e)),
            },
            went => went,
        };
        done += more;
        if let Err(e) = went {
            return (done, Err(e));
        }
        let last = &tokens[(done - 1) * count..][..count];
        let ended = (0..count).filter(|index| has_ended(*index, sequences, choosers, last)).count();
        if ended > 0 || done == steps {
            return (done, Ok(ended == count));
        }
    }
    (done, Ok(false))
}
