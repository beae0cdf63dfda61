//! Byte-pair encoding with merges by id.
//!
//! The model of the `tokenizers` crate wants every merge as two strings and keeps the vocabulary twice; with half a million
//! merges that is most of the time a model takes to load. This one takes ids, answers the same (the tests compare both),
//! keeps no cache, and refuses what does not fit together.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::texts::{Table, Texts};
use super::turns::pass;
use crate::error::{Error, Kind, Result};

/// Two neighbours and the token they become. The place in a list is the rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Merge {
    pub(super) left: u32,
    pub(super) right: u32,
    pub(super) merged: u32,
}

/// What differs between models.
#[derive(Clone, Debug, Default)]
pub(super) struct BpeOptions {
    /// Stands for a character that is not in the vocabulary; without it such characters vanish.
    pub(super) unk: Option<u32>,
    /// A run of unknown characters is one token.
    pub(super) fuse_unk: bool,
    /// Unknown characters become their bytes, where the vocabulary has `<0x..>` tokens.
    pub(super) byte_fallback: bool,
    /// A word that is a token is taken whole.
    pub(super) ignore_merges: bool,
    /// Put before every character of a word but the first.
    pub(super) continuing_prefix: String,
    /// Put after the last character of a word.
    pub(super) word_end: String,
}

/// A byte-pair model.
pub(super) struct Bpe {
    vocab: Texts,
    merges: Merges,
    options: BpeOptions,
    /// The tokens of single bytes.
    bytes: Vec<Option<u32>>,
}

/// What says which neighbours merge, and in which order.
pub(super) enum Merges {
    /// A list, and places in it by pair. Of equal pairs the last one counts.
    Listed(Vec<Merge>, Table),
    /// Neighbours merge where their joint text is a token with a score: by id, the score as a number that is less the better it is,
    /// `NONE` without. This is the list that `sentencepiece` makes, without making it.
    Scored(Vec<u32>),
}

impl Merges {
    /// The merges of a list.
    pub(super) fn listed(list: Vec<Merge>) -> Result<Merges> {
        let mut table = Table::new(list.len(), "merges")?;
        for (place, merge) in list.iter().enumerate() {
            pass(0)?;
            let hash = table.hash_number(pair(merge.left, merge.right));
            table.put(hash, place, |other| (list[other].left, list[other].right) == (merge.left, merge.right));
        }
        Ok(Merges::Listed(list, table))
    }

    /// The merges of tokens by their scores: the best first, of equal ones that with the longer left part, then with the longer right
    /// part, then the lesser id. `None` where that order does not follow from numbers this small.
    pub(super) fn scored(vocab: &Texts, scores: impl Iterator<Item = Option<f32>>) -> Result<Option<Merges>> {
        let mut order = crate::error::vec_with_capacity(vocab.len(), "scores of a vocabulary")?;
        for (id, score) in scores.enumerate() {
            pass(0)?;
            let Some(score) = score else {
                order.push(NONE);
                continue;
            };
            let bits = score.to_bits();
            // As `total_cmp` has it, the largest first.
            let place = if bits >> 31 == 1 { bits } else { bits ^ 0x7fff_ffff };
            if place == NONE || vocab.text(id as u32).len() > usize::from(u16::MAX) {
                return Ok(None);
            }
            order.push(place);
        }
        Ok((!vocab.repeats()).then_some(Merges::Scored(order)))
    }

    /// Order and result of merging two neighbours.
    fn find(&self, vocab: &Texts, left: u32, right: u32) -> Option<(u64, u32)> {
        match self {
            Merges::Listed(list, table) => {
                let place = table.find(table.hash_number(pair(left, right)), |at| (list[at].left, list[at].right) == (left, right))?;
                Some((place as u64, list[place].merged))
            }
            Merges::Scored(order) => {
                let (left, right) = (vocab.text(left), vocab.text(right));
                if left.is_empty() || right.is_empty() {
                    return None;
                }
                let mut short = [0; 64];
                let merged = match short.get_mut(..left.len() + right.len()) {
                    Some(joined) => {
                        let (a, b) = joined.split_at_mut(left.len());
                        a.copy_from_slice(left);
                        b.copy_from_slice(right);
                        vocab.find(joined)
                    }
                    None => vocab.find(&[left, right].concat()),
                }?;
                let score = order.get(merged as usize).copied().filter(|&score| score != NONE)?;
                // Fewer characters come later; texts are short enough for 16 bits.
                let chars = |text: &[u8]| u64::from(u16::MAX) - text.iter().filter(|&&b| b & 0xc0 != 0x80).count() as u64;
                Some((u64::from(score) << 32 | chars(left) << 16 | chars(right), merged))
            }
        }
    }
}

fn pair(left: u32, right: u32) -> u64 {
    u64::from(left) << 32 | u64::from(right)
}

/// A token in a word that is being merged; a list linked by index.
#[derive(Clone, Copy)]
struct Symbol {
    /// `NONE` once it is merged into its left neighbour.
    id: u32,
    previous: u32,
    next: u32,
}

/// No symbol. Texts are far shorter than this, and token ids are at most `i32::MAX`.
const NONE: u32 = u32::MAX;

impl Bpe {
    pub(super) fn new(vocab: Texts, merges: Merges, options: BpeOptions) -> Bpe {
        let byte = |b: u8| if options.byte_fallback { vocab.get(&format!("<0x{b:02X}>")) } else { None };
        Bpe { bytes: (0..=255).map(byte).collect(), vocab, merges, options }
    }

    /// The id of a text.
    pub(super) fn id(&self, text: &str) -> Option<u32> {
        self.vocab.get(text)
    }

    /// The tokens of one word.
    pub(super) fn tokens(&self, word: &str) -> Vec<u32> {
        if self.options.ignore_merges
            && let Some(id) = self.vocab.get(word)
        {
            return vec![id];
        }
        let ids = self.characters(word);
        if ids.len() < 2 { ids } else { self.merge(&ids) }
    }

    /// The tokens of the characters.
    fn characters(&self, word: &str) -> Vec<u32> {
        let mut ids: Vec<u32> = Vec::with_capacity(word.len());
        let mut after_unk = false;
        let mut written = String::new();
        for (at, c) in word.char_indices() {
            let end = at + c.len_utf8();
            let prefix = if at == 0 { "" } else { self.options.continuing_prefix.as_str() };
            let suffix = if end == word.len() { self.options.word_end.as_str() } else { "" };
            let text = if prefix.is_empty() && suffix.is_empty() {
                &word[at..end]
            } else {
                written.clear();
                written.extend([prefix, &word[at..end], suffix]);
                written.as_str()
            };
            if let Some(id) = self.vocab.get(text) {
                ids.push(id);
                after_unk = false;
            } else if let Some(bytes) = self.fallback(text) {
                ids.extend(bytes);
                after_unk = false;
            } else if let Some(unk) = self.options.unk {
                if !(after_unk && self.options.fuse_unk) {
                    ids.push(unk);
                }
                after_unk = true;
            }
        }
        ids
    }

    fn fallback(&self, text: &str) -> Option<Vec<u32>> {
        if self.options.byte_fallback { text.bytes().map(|b| self.bytes[usize::from(b)]).collect() } else { None }
    }

    /// Merges the pair of lowest rank, the leftmost of equals, until none is left.
    fn merge(&self, ids: &[u32]) -> Vec<u32> {
        let count = ids.len() as u32;
        let link = |(at, &id): (u32, &u32)| Symbol {
            id,
            previous: at.checked_sub(1).unwrap_or(NONE),
            next: if at + 1 == count { NONE } else { at + 1 },
        };
        let mut symbols: Vec<Symbol> = (0..count).zip(ids).map(link).collect();
        // Order, result and place of merging the symbol at `left` with the next one.
        let candidate = |symbols: &[Symbol], left: u32| -> Option<Reverse<(u64, u32, u32)>> {
            let symbol = symbols.get(left as usize)?;
            let right = symbols.get(symbol.next as usize)?;
            let (rank, merged) = self.merges.find(&self.vocab, symbol.id, right.id)?;
            Some(Reverse((rank, merged, left)))
        };
        let mut queue: BinaryHeap<_> = (0..count).filter_map(|at| candidate(&symbols, at)).collect();
        while let Some(entry) = queue.pop() {
            let Reverse((_, merged, left)) = entry;
            // An entry is stale when either neighbour has changed since; a newer one is then in the queue.
            if candidate(&symbols, left) != Some(entry) {
                continue;
            }
            let right = symbols[left as usize].next as usize;
            let after = symbols[right].next;
            symbols[right] = Symbol { id: NONE, previous: NONE, next: NONE };
            symbols[left as usize].id = merged;
            symbols[left as usize].next = after;
            if let Some(after) = symbols.get_mut(after as usize) {
                after.previous = left;
            }
            queue.extend(candidate(&symbols, symbols[left as usize].previous));
            queue.extend(candidate(&symbols, left));
        }
        symbols.iter().map(|symbol| symbol.id).filter(|&id| id != NONE).collect()
    }
}

/// Ids for merges that a file lists as texts, or the place and text of one that does not fit the vocabulary.
pub(super) fn resolve<'a>(
    vocab: &Texts,
    continuing_prefix: &str,
    pairs: impl ExactSizeIterator<Item = (&'a str, &'a str)>,
) -> Result<Vec<Merge>> {
    let mut merges = crate::error::vec_with_capacity(pairs.len(), "merges")?;
    let mut joined: [String; AHEAD] = Default::default();
    let mut next: Vec<(&str, &str)> = Vec::with_capacity(AHEAD);
    let mut pairs = pairs.fuse();
    loop {
        pass(0)?;
        next.clear();
        next.extend(pairs.by_ref().take(AHEAD));
        if next.is_empty() {
            return Ok(merges);
        }
        // Three texts for each, in a table larger than the caches: all are asked for before the first is needed.
        for (&(left, right), joined) in next.iter().zip(&mut joined) {
            joined.clear();
            joined.push_str(left);
            joined.push_str(right.strip_prefix(continuing_prefix).unwrap_or(right));
            [left, right, joined].into_iter().for_each(|text| vocab.warm(text));
        }
        for (&(left, right), joined) in next.iter().zip(&joined) {
            let at = merges.len();
            let find = |text: &str| {
                vocab.get(text).ok_or_else(|| {
                    let message = format!("merge {at} ('{left}' and '{right}') needs the token '{text}', which is not in the vocabulary");
                    Error::new(Kind::CorruptFile, message).at(at as u64)
                })
            };
            merges.push(Merge { left: find(left)?, right: find(right)?, merged: find(joined)? });
        }
    }
}

/// Merges whose texts are asked for together.
const AHEAD: usize = 8;

#[cfg(test)]
mod tests {
    use super::super::sentencepiece::{self, Piece};
    use super::*;
    use proptest::prelude::*;
    use tokenizers::models::bpe::{BPE, Vocab};
    use tokenizers::tokenizer::Model;

    const TEXTS: [&str; 22] = [
        "a", "b", "c", "ab", "bc", "abc", "aa", "aaa", "ca", "cab", "é", "aé", "<unk>", "<0xC3>", "<0xB1>", "##a", "##b", "##c", "c</w>",
        "bc</w>", "##c</w>", "##b</w>",
    ];
    const PAIRS: [(&str, &str); 10] =
        [("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc"), ("a", "a"), ("aa", "a"), ("c", "a"), ("ca", "b"), ("a", "é"), ("b", "c</w>")];

    fn texts() -> Texts {
        Texts::of(TEXTS.iter().enumerate().map(|(id, text)| (*text, id as u32))).unwrap()
    }

    fn listed(continuing_prefix: &str, pairs: &[(&str, &str)]) -> Merges {
        Merges::listed(resolve(&texts(), continuing_prefix, pairs.iter().copied()).unwrap()).unwrap()
    }

    fn vocab() -> Vocab {
        TEXTS.iter().enumerate().map(|(id, text)| (text.to_string(), id as u32)).collect()
    }

    proptest! {
        #[test]
        fn like_the_tokenizers_crate(word in "[abcéñx]{0,12}", order in Just(PAIRS.to_vec()).prop_shuffle(),
                                     fuse in any::<bool>(), fallback in any::<bool>(), ignore in any::<bool>(), end in any::<bool>()) {
            let word_end = if end { "</w>" } else { "" }.to_string();
            let options = BpeOptions {
                unk: Some(12), fuse_unk: fuse, byte_fallback: fallback, ignore_merges: ignore,
                continuing_prefix: String::new(), word_end: word_end.clone(),
            };
            let ours = Bpe::new(texts(), listed("", &order), options);
            let strings = order.iter().map(|(a, b)| (a.to_string(), b.to_string())).collect();
            let mut theirs = BPE::builder().vocab_and_merges(vocab(), strings).cache_capacity(0).unk_token("<unk>".into())
                .fuse_unk(fuse).byte_fallback(fallback).ignore_merges(ignore);
            if end {
                theirs = theirs.end_of_word_suffix(word_end);
            }
            // The crate puts an unknown character after bytes that follow it; there is nothing to compare with then.
            prop_assume!(!(fallback && word.contains('ñ') && (word.contains('x') || end)));
            let expected: Vec<u32> = theirs.build().unwrap().tokenize(&word).unwrap().iter().map(|t| t.id).collect();
            prop_assert_eq!(ours.tokens(&word), expected);
        }
    }

    proptest! {
        /// Scores give the tokens that the list gives which follows from them.
        #[test]
        fn scores_are_a_list(word in "[abcé]{0,14}", scores in proptest::collection::vec(-2i8..3, 22), none in 0usize..22) {
            let score = |id: usize| (id != none).then(|| f32::from(scores[id]) / 2.0);
            let pieces = TEXTS.iter().enumerate().filter_map(|(id, text)| Some(Piece { id: id as u32, text, score: score(id)? }));
            let merges = |scored| if scored {
                let mut texts = Texts::with_capacity(TEXTS.len()).unwrap();
                TEXTS.iter().for_each(|text| texts.push(text, true).unwrap());
                Merges::scored(&texts.done(), (0..TEXTS.len()).map(score)).unwrap().unwrap()
            } else {
                Merges::listed(sentencepiece::merges(&texts(), pieces.clone()).unwrap()).unwrap()
            };
            let of = |scored| Bpe::new(texts(), merges(scored), BpeOptions::default()).tokens(&word);
            prop_assert_eq!(of(true), of(false));
        }
    }

    #[test]
    fn prefixes() {
        let merges = listed("##", &[("a", "##b"), ("b", "##c")]);
        let options = BpeOptions { continuing_prefix: "##".into(), ..Default::default() };
        let bpe = Bpe::new(texts(), merges, options);
        assert_eq!(bpe.tokens("abc"), [3, 17]);
        assert_eq!(bpe.tokens("cab"), [2, 15, 16]);
    }

    #[test]
    fn long_words_take_no_quadratic_time() {
        let bpe = Bpe::new(texts(), listed("", &PAIRS), BpeOptions::default());
        let start = std::time::Instant::now();
        assert_eq!(bpe.tokens(&"a".repeat(1 << 20)).len(), (1 << 20) / 2);
        assert!(start.elapsed().as_secs() < 60);
    }

    #[test]
    fn merges_outside_the_vocabulary_are_named() {
        let error = resolve(&texts(), "", [("a", "b"), ("b", "a")].into_iter()).unwrap_err();
        assert_eq!((error.kind(), error.offset()), (Kind::CorruptFile, Some(1)));
        assert!(error.message().contains("'ba'"));
    }
}
