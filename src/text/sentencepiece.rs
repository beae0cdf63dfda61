//! The merge list of a SentencePiece BPE vocabulary.
//!
//! SentencePiece merges the neighbours whose joint piece has the best score; the `tokenizers` crate wants a ranked list of
//! pairs. Every way to cut a piece into two pieces of the vocabulary is such a pair, ranked by the score of the piece.
//! Among equal scores the order is the one that published conversions use: longer left part first, then longer right part,
//! then the order of ids.

use tokenizers::models::bpe::{Merges, Vocab};

use crate::error::{self, Result};

/// A piece that merges may produce.
pub(super) struct Piece<'a> {
    pub(super) text: &'a str,
    pub(super) score: f32,
}

struct Cut<'a> {
    score: f32,
    left_chars: u32,
    right_chars: u32,
    left: &'a str,
    right: &'a str,
}

/// The merges of `pieces` (in order of id), whose halves must be in `vocab`.
pub(super) fn merges<'a>(vocab: &Vocab, pieces: impl Iterator<Item = Piece<'a>>) -> Result<Merges> {
    let mut cuts: Vec<Cut<'a>> = Vec::new();
    let mut local: Vec<(u32, u32, Cut<'a>)> = Vec::new();
    for piece in pieces {
        let chars = piece.text.chars().count() as u32;
        for (number, (at, _)) in piece.text.char_indices().enumerate().skip(1) {
            let (left, right) = piece.text.split_at(at);
            let Some(&left_id) = vocab.get(left) else { continue };
            let Some(&right_id) = vocab.get(right) else { continue };
            let left_chars = number as u32;
            local.push((left_id, right_id, Cut { score: piece.score, left_chars, right_chars: chars - left_chars, left, right }));
        }
        local.sort_by_key(|&(left, right, _)| (left, right));
        cuts.extend(local.drain(..).map(|(_, _, cut)| cut));
    }
    cuts.sort_by(|a, b| {
        b.score.total_cmp(&a.score).then(b.left_chars.cmp(&a.left_chars)).then(b.right_chars.cmp(&a.right_chars))
    });
    let mut merges = error::vec_with_capacity(cuts.len(), "merges")?;
    merges.extend(cuts.into_iter().map(|cut| (cut.left.to_string(), cut.right.to_string())));
    Ok(merges)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn best_score_first_then_longer_left() {
        let texts = ["a", "b", "c", "ab", "bc", "abc"];
        let vocab: Vocab = texts.iter().enumerate().map(|(id, text)| (text.to_string(), id as u32)).collect();
        let scores = [0.0, 0.0, 0.0, -2.0, -1.0, -1.5];
        let pieces = texts.iter().zip(scores).map(|(text, score)| Piece { text, score });
        let expected = [("b", "c"), ("ab", "c"), ("a", "bc"), ("a", "b")].map(|(a, b)| (a.to_string(), b.to_string()));
        assert_eq!(merges(&vocab, pieces).unwrap(), expected);
    }
}
