//! The texts of a vocabulary: found by id and by text, in one block of bytes and one table of numbers.
//!
//! A map of strings takes an allocation for each of up to hundreds of thousands of texts, which is most of what loading a
//! vocabulary costs. Files are not trusted, so hashing starts from a number that they cannot know.

use std::hash::{BuildHasher, Hasher, RandomState};

use super::turns::pass;
use crate::ensure;
use crate::error::{Result, reserve, vec_filled, vec_with_capacity};

/// Texts with ids. Of equal texts the last one counts.
pub(super) struct Texts {
    bytes: Vec<u8>,
    /// Where each text ends; it begins at the end of the one before.
    ends: Vec<u32>,
    /// The id of each text; empty where that is its place.
    ids: Vec<u32>,
    table: Table,
    /// Whether two texts were equal.
    repeats: bool,
    /// Hashes and places that are not in the table yet: a table is larger than the caches, and one wait serves several.
    waiting: Vec<(u64, usize)>,
}

/// Most that wait.
const BATCH: usize = 32;

/// Places by hash: open addressing, the low bits a place and one, the rest some of its hash; 0 is empty.
pub(super) struct Table {
    slots: Vec<u32>,
    seed: u64,
}

/// Most places: what a slot has bits for.
pub(super) const MOST: usize = (1 << PLACE_BITS) - 2;
const PLACE_BITS: u32 = 25;

impl Table {
    /// Room for `count` places, of which half the slots stay empty.
    pub(super) fn new(count: usize, what: &str) -> Result<Table> {
        ensure!(count <= MOST, TooLarge, "{what}: {count} entries; at most {MOST} are supported");
        let slots = vec_filled((count.max(4) * 2).next_power_of_two(), 0u32, what)?;
        Ok(Table { slots, seed: RandomState::new().build_hasher().finish() })
    }

    /// The hash of bytes.
    pub(super) fn hash(&self, bytes: &[u8]) -> u64 {
        let mut hash = self.seed ^ (bytes.len() as u64).wrapping_mul(MIX);
        let (words, rest) = bytes.as_chunks::<8>();
        for word in words {
            hash = fold(hash ^ u64::from_le_bytes(*word));
        }
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        fold(fold(hash ^ u64::from_le_bytes(last)) ^ self.seed)
    }

    /// The hash of a number.
    pub(super) fn hash_number(&self, number: u64) -> u64 {
        fold(fold(number ^ self.seed) ^ self.seed.rotate_left(32))
    }

    /// The place with this hash of which `is` says that it is the one.
    pub(super) fn find(&self, hash: u64, is: impl Fn(usize) -> bool) -> Option<usize> {
        let mask = self.slots.len() - 1;
        let (mut at, tag) = (hash as usize & mask, tag(hash));
        loop {
            let slot = self.slots[at];
            if slot == 0 {
                return None;
            }
            if slot >> PLACE_BITS == tag && is(place(slot)) {
                return Some(place(slot));
            }
            at = (at + 1) & mask;
        }
    }

    /// Has the memory behind a hash on its way, for a `find` or `put` a little later.
    pub(super) fn warm(&self, hash: u64) {
        std::hint::black_box(self.slots[hash as usize & (self.slots.len() - 1)]);
    }

    /// Puts `new` where `find` looks for it, in the stead of a place that `is` the same. Whether there was one.
    pub(super) fn put(&mut self, hash: u64, new: usize, is: impl Fn(usize) -> bool) -> bool {
        let mask = self.slots.len() - 1;
        let (mut at, tag) = (hash as usize & mask, tag(hash));
        loop {
            let slot = self.slots[at];
            if slot == 0 || slot >> PLACE_BITS == tag && is(place(slot)) {
                self.slots[at] = tag << PLACE_BITS | (new as u32 + 1);
                return slot != 0;
            }
            at = (at + 1) & mask;
        }
    }
}

/// An odd number without a pattern.
const MIX: u64 = 0x9E37_79B9_7F4A_7C15;

fn fold(x: u64) -> u64 {
    let product = u128::from(x) * u128::from(MIX);
    (product ^ (product >> 64)) as u64
}

fn tag(hash: u64) -> u32 {
    (hash >> (32 + PLACE_BITS)) as u32
}

fn place(slot: u32) -> usize {
    (slot & ((1 << PLACE_BITS) - 1)) as usize - 1
}

impl Texts {
    /// No texts, and room for `count`.
    pub(super) fn with_capacity(count: usize) -> Result<Texts> {
        Ok(Texts {
            bytes: vec_with_capacity(count.saturating_mul(8), "texts of a vocabulary")?,
            ends: vec_with_capacity(count, "texts of a vocabulary")?,
            ids: Vec::new(),
            table: Table::new(count, "the table of a vocabulary")?,
            repeats: false,
            waiting: vec_with_capacity(BATCH, "texts of a vocabulary")?,
        })
    }

    /// Texts with ids of any order.
    pub(super) fn of<'a>(pairs: impl ExactSizeIterator<Item = (&'a str, u32)>) -> Result<Texts> {
        let mut texts = Texts::with_capacity(pairs.len())?;
        texts.ids = vec_with_capacity(pairs.len(), "ids of a vocabulary")?;
        for (text, id) in pairs {
            pass(0)?;
            texts.ids.push(id);
            texts.push(text, true)?;
        }
        Ok(texts.done())
    }

    /// Appends a text, whose id is the number of those before it; unless `known`, it is not found by its text.
    pub(super) fn push(&mut self, text: &str, known: bool) -> Result<()> {
        let place = self.ends.len();
        ensure!(place * 2 < self.table.slots.len(), Internal, "more texts than there was room for");
        reserve(&mut self.bytes, text.len(), "texts of a vocabulary")?;
        self.bytes.extend_from_slice(text.as_bytes());
        let end = u32::try_from(self.bytes.len());
        let Ok(end) = end else { crate::bail!(TooLarge, "the texts of a vocabulary together pass {} bytes", u32::MAX) };
        self.ends.push(end);
        if known {
            let hash = self.table.hash(text.as_bytes());
            self.table.warm(hash);
            self.waiting.push((hash, place));
            if self.waiting.len() == BATCH {
                self.settle();
            }
        }
        Ok(())
    }

    /// Ends the pushing; before, nothing is found.
    pub(super) fn done(mut self) -> Texts {
        self.settle();
        self
    }

    fn settle(&mut self) {
        let (bytes, ends) = (&self.bytes, &self.ends);
        for (hash, place) in self.waiting.drain(..) {
            let text = slice(bytes, ends, place);
            self.repeats |= self.table.put(hash, place, |other| slice(bytes, ends, other) == text);
        }
    }

    /// Has the memory that `get` will look at on its way.
    pub(super) fn warm(&self, text: &str) {
        self.table.warm(self.table.hash(text.as_bytes()));
    }

    /// The id of a text.
    pub(super) fn get(&self, text: &str) -> Option<u32> {
        self.find(text.as_bytes())
    }

    /// As `get`, of bytes.
    pub(super) fn find(&self, text: &[u8]) -> Option<u32> {
        let place = self.table.find(self.table.hash(text), |place| slice(&self.bytes, &self.ends, place) == text)?;
        Some(self.ids.get(place).copied().unwrap_or(place as u32))
    }

    /// The text of an id, where ids are places.
    pub(super) fn text(&self, id: u32) -> &[u8] {
        if (id as usize) < self.ends.len() { slice(&self.bytes, &self.ends, id as usize) } else { &[] }
    }

    /// Texts in all.
    pub(super) fn len(&self) -> usize {
        self.ends.len()
    }

    /// Whether two texts that can be found are equal.
    pub(super) fn repeats(&self) -> bool {
        self.repeats
    }
}

fn slice<'a>(bytes: &'a [u8], ends: &[u32], place: usize) -> &'a [u8] {
    let start = if place == 0 { 0 } else { ends[place - 1] };
    &bytes[start as usize..ends[place] as usize]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashMap;

    #[test]
    fn finds_what_a_map_finds() {
        let words: Vec<String> =
            (0..5000u32).map(|i| format!("{:x}{}", i.wrapping_mul(2654435761) % 2048, "é".repeat(i as usize % 16))).collect();
        let (mut texts, mut map) = (Texts::with_capacity(words.len()).unwrap(), HashMap::new());
        for (id, word) in words.iter().enumerate() {
            let known = id % 7 != 3;
            texts.push(word, known).unwrap();
            if known {
                map.insert(word.as_str(), id as u32);
            }
        }
        let texts = texts.done();
        assert!(texts.repeats());
        for (id, word) in words.iter().enumerate() {
            assert_eq!(texts.get(word), map.get(word.as_str()).copied());
            assert_eq!(texts.text(id as u32), word.as_bytes());
            assert_eq!(texts.get(&format!("{word}?")), None);
        }
        assert_eq!((texts.get(""), texts.text(5000), texts.len()), (None, &[][..], 5000));
        let texts = Texts::of([("a", 9), ("b", 9), ("", 1)].into_iter()).unwrap();
        assert_eq!(["a", "b", "", "c"].map(|t| texts.get(t)), [Some(9), Some(9), Some(1), None]);
        assert!(!texts.repeats() && texts.push_refused());
    }

    impl Texts {
        fn push_refused(mut self) -> bool {
            (0..100).any(|_| self.push("x", true).is_err())
        }
    }
}
