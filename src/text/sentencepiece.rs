//! The merge list of a SentencePiece BPE vocabulary.
//!
//! SentencePiece merges the neighbours whose joint piece has the best score; the `tokenizers` crate wants a ranked list of
//! pairs. Every way to cut a piece into two pieces of the vocabulary is such a pair, ranked by the score of the piece.
//! Among equal scores the order is the one that published conversions use: longer left part first, then longer right part,
//! then the order of ids.

use super::bpe::Merge;
use super::texts::Texts;
use crate::error::{self, Result};

/// A piece that merges may produce.
pub(super) struct Piece<'a> {
    pub(super) id: u32,
    pub(super) text: &'a str,
    pub(super) score: f32,
}

struct Cut {
    score: f32,
    left_chars: u32,
    right_chars: u32,
    merge: Merge,
}

/// The merges of `pieces` (in order of id), whose halves must be in `vocab`.
pub(super) fn merges<'a>(vocab: &Texts, pieces: impl Iterator<Item = Piece<'a>>) -> Result<Vec<Merge>> {
    let mut cuts: Vec<Cut> = Vec::new();
    for piece in pieces {
        let first = cuts.len();
        let chars = piece.text.chars().count() as u32;
        for (number, (at, _)) in piece.text.char_indices().enumerate().skip(1) {
            let (left, right) = piece.text.split_at(at);
            let Some(left) = vocab.get(left) else { continue };
            let Some(right) = vocab.get(right) else { continue };
            let left_chars = number as u32;
            let merge = Merge { left, right, merged: piece.id };
            cuts.push(Cut { score: piece.score, left_chars, right_chars: chars - left_chars, merge });
        }
        cuts[first..].sort_by_key(|cut| (cut.merge.left, cut.merge.right));
    }
    cuts.sort_by(|a, b| b.score.total_cmp(&a.score).then(b.left_chars.cmp(&a.left_chars)).then(b.right_chars.cmp(&a.right_chars)));
    let mut merges = error::vec_with_capacity(cuts.len(), "merges")?;
    merges.extend(cuts.iter().map(|cut| cut.merge));
    Ok(merges)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn best_score_first_then_longer_left() {
        let texts = ["a", "b", "c", "ab", "bc", "abc"];
        let vocab = Texts::of(texts.iter().enumerate().map(|(id, text)| (*text, id as u32))).unwrap();
        let scores = [0.0, 0.0, 0.0, -2.0, -1.0, -1.5];
        let pieces = texts.iter().zip(scores).enumerate().map(|(id, (text, score))| Piece { id: id as u32, text, score });
        let expected = [(1, 2, 4), (3, 2, 5), (0, 4, 5), (0, 1, 3)].map(|(left, right, merged)| Merge { left, right, merged });
        assert_eq!(merges(&vocab, pieces).unwrap(), expected);
    }
}
