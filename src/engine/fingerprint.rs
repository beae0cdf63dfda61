//! Which model this is, as one number: the same for models whose states fit each other.

use super::load::Engine;
use super::prepare::Prepared;
use crate::error::{Result, reserve};
use crate::ops::{PAGE, Weight};
use crate::weights::WeightSpec;
use std::fmt::{Display, Formatter};
use std::ops::Range;

/// Tells models apart, and ways of loading one that change what its states mean. No protection against somebody who wants two to agree.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint(pub u128);

impl Display for Fingerprint {
    fn fmt(&self, f: &mut Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

/// Rows of each weight that are looked at, evenly spread; all would take as long as a load.
const ROWS: usize = 16;

impl Engine {
    /// The model's fingerprint: of its shapes, how it computes, and rows of every weight. Made when first asked for.
    pub fn fingerprint(&self) -> Result<Fingerprint> {
        if let Some(made) = self.fingerprint.get() {
            return Ok(*made);
        }
        let made = self.make_fingerprint()?;
        Ok(*self.fingerprint.get_or_init(|| made))
    }

    fn make_fingerprint(&self) -> Result<Fingerprint> {
        let mut maker = Maker::new(&self.prepared);
        for (spec, weight) in self.prepared.declarations.weights.iter().zip(self.weights()) {
            maker.add(spec, weight)?;
        }
        Ok(maker.end())
    }
}

/// A fingerprint in the making, weight after weight in their order: a load onto a device makes it while they pass.
pub(super) struct Maker {
    sums: Sums,
    row: Vec<f32>,
    /// Rows of the weight that passes, and how many of those that are looked at have passed.
    all: usize,
    passed: usize,
}

impl Maker {
    pub fn new(prepared: &Prepared) -> Maker {
        let declared = &prepared.declarations;
        let mut sums = Sums::default();
        let shapes = format!("{} {:?} {PAGE} {:?} {:?}", prepared.model_type, prepared.compute, declared.kv, declared.slots);
        sums.add(shapes.as_bytes());
        Maker { sums, row: Vec::new(), all: 0, passed: 0 }
    }

    /// Adds rows of a weight.
    pub fn add(&mut self, spec: &WeightSpec, weight: &Weight) -> Result<()> {
        self.begin(spec)?;
        self.pass(0..self.all, |row, out| weight.decode_row(row, out))
    }

    /// The next weight, whose rows then pass in their order.
    pub fn begin(&mut self, spec: &WeightSpec) -> Result<()> {
        let WeightSpec { name, rows, cols, .. } = spec;
        self.sums.add(format!("{name} {rows} {cols} {}", spec.experts()).as_bytes());
        self.row.clear();
        reserve(&mut self.row, *cols, "a row of a weight")?;
        self.row.resize(*cols, 0.0f32);
        (self.all, self.passed) = (rows * spec.experts(), 0);
        Ok(())
    }

    /// Adds those of the next rows that are looked at; `decode` writes one.
    pub fn pass(&mut self, rows: Range<usize>, decode: impl Fn(usize, &mut [f32]) -> Result<()>) -> Result<()> {
        while self.passed < self.all.min(ROWS) {
            let row = if self.all <= ROWS { self.passed } else { self.passed * (self.all - 1) / (ROWS - 1) };
            if row >= rows.end {
                break;
            }
            decode(row, &mut self.row)?;
            self.row.iter().for_each(|v| self.sums.word(u64::from(v.to_bits())));
            self.passed += 1;
        }
        Ok(())
    }

    pub fn end(self) -> Fingerprint {
        self.sums.end()
    }
}

/// Two sums that mix each word in differently.
struct Sums(u64, u64);

impl Default for Sums {
    fn default() -> Sums {
        Sums(BASIS, !BASIS)
    }
}

const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
const PRIME: u64 = 0x0000_0100_0000_01b3;

impl Sums {
    fn word(&mut self, word: u64) {
        self.0 = mix(self.0, word);
        self.1 = (self.1 ^ word.wrapping_add(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xbf58_476d_1ce4_e5b9).rotate_left(31);
    }

    /// Some bytes and their number, so that what is added next cannot be taken for a part of them.
    fn add(&mut self, bytes: &[u8]) {
        self.word(bytes.len() as u64);
        self.word(checksum(bytes));
    }

    fn end(self) -> Fingerprint {
        Fingerprint(u128::from(self.0) << 64 | u128::from(self.1))
    }
}

fn mix(sum: u64, word: u64) -> u64 {
    (sum ^ word).wrapping_mul(PRIME).rotate_left(23)
}

/// FNV-1a over words, then over the bytes that are left, turned so that high bits count. One changed word always changes the sum.
pub(super) fn checksum(bytes: &[u8]) -> u64 {
    let (words, rest) = bytes.as_chunks();
    let words = words.iter().map(|word| u64::from_le_bytes(*word));
    words.chain(rest.iter().map(|b| u64::from(*b))).fold(BASIS, mix)
}
