//! Engram layers: which numbers hash the last tokens, and what their rows do to the residual streams (see [`crate::ops::EngramRows`]).
//!
//! A safetensors checkpoint holds none of the numbers. Moduli are the next unused primes from a given size up; multipliers are what
//! numpy's `default_rng(10007 * layer)` draws, so its generator is rebuilt here: a seed sequence, PCG64 (O'Neill, 2014), and
//! bounded integers by multiplication (Lemire, 2019).

use super::{Linear, Streams};
use crate::circuit::Tape;
use crate::ops::{EngramHash, EngramInject, EngramRows, Lookup, Records, Value, WeightId};
use crate::weights::{Declarations, Part};

/// The next primes from `size` up that nobody has taken yet; each row of the result starts again at `size`.
pub fn unused_primes(seen: &mut Vec<u32>, size: u32, rows: usize, columns: usize) -> Option<Vec<u32>> {
    let mut out = Vec::new();
    for _ in 0..rows {
        let mut current = size.checked_sub(1)?;
        for _ in 0..columns {
            current = current.checked_add(1)?;
            while !is_prime(current) || seen.contains(&current) {
                current = current.checked_add(1)?;
            }
            seen.push(current);
            out.push(current);
        }
    }
    Some(out)
}

fn is_prime(n: u32) -> bool {
    let root = u64::from(n).isqrt() as u32;
    n > 1 && (2..=root).all(|d| !n.is_multiple_of(d))
}

/// `count` odd multipliers of layer `layer`, for ids below `ids`.
pub fn multipliers(layer: u32, ids: u64, count: usize) -> Vec<i64> {
    let bound = (i64::MAX as u64 / ids.max(1) / 2).max(1);
    let mut random = Pcg64::new(10007u64.wrapping_mul(u64::from(layer)));
    (0..count).map(|_| (random.below(bound) * 2 + 1) as i64).collect()
}

/// numpy's default generator.
struct Pcg64 {
    state: u128,
    increment: u128,
}

impl Pcg64 {
    fn new(seed: u64) -> Pcg64 {
        let words = seed_words(seed);
        let wide = |i: usize| u128::from(words[i]) << 64 | u128::from(words[i + 1]);
        let mut random = Pcg64 { state: 0, increment: wide(2) << 1 | 1 };
        random.step();
        random.state = random.state.wrapping_add(wide(0));
        random.step();
        random
    }

    fn step(&mut self) {
        const FACTOR: u128 = 0x2360_ED05_1FC6_5DA4_4385_DF64_9FCC_F645;
        self.state = self.state.wrapping_mul(FACTOR).wrapping_add(self.increment);
    }

    fn next(&mut self) -> u64 {
        self.step();
        let folded = (self.state >> 64) as u64 ^ self.state as u64;
        folded.rotate_right((self.state >> 122) as u32)
    }

    /// Below `bound`, which is more than 2^32: smaller bounds draw from half words, and no vocabulary makes them.
    fn below(&mut self, bound: u64) -> u64 {
        loop {
            let product = u128::from(self.next()) * u128::from(bound);
            if product as u64 >= bound.wrapping_neg() % bound {
                return (product >> 64) as u64;
            }
        }
    }
}

/// The first four words of numpy's seed sequence.
fn seed_words(seed: u64) -> [u64; 4] {
    fn hash(value: u32, constant: &mut u32, factor: u32) -> u32 {
        let value = value ^ *constant;
        *constant = constant.wrapping_mul(factor);
        let value = value.wrapping_mul(*constant);
        value ^ value >> 16
    }
    let mut constant = 0x43b0_d7e5;
    let mut pool = [seed as u32, (seed >> 32) as u32, 0, 0].map(|word| hash(word, &mut constant, 0x931e_8875));
    for from in 0..4 {
        for to in (0..4).filter(|to| *to != from) {
            let other = hash(pool[from], &mut constant, 0x931e_8875);
            let mixed = pool[to].wrapping_mul(0xca01_f9dd).wrapping_sub(other.wrapping_mul(0x4973_f715));
            pool[to] = mixed ^ mixed >> 16;
        }
    }
    let mut constant = 0x8b51_f9dd;
    let half: [u32; 8] = std::array::from_fn(|i| hash(pool[i % 4], &mut constant, 0x58f3_8ded));
    std::array::from_fn(|i| u64::from(half[2 * i]) | u64::from(half[2 * i + 1]) << 32)
}

/// One engram layer.
#[derive(Clone, Debug)]
pub struct Engram {
    streams: Streams,
    history: Records,
    map: WeightId,
    pad: i64,
    hash: EngramHash,
    table: WeightId,
    kv: Linear,
    q: WeightId,
    k: WeightId,
}

/// What all engram layers of a model share.
#[derive(Clone, Copy, Debug)]
pub struct EngramDims {
    /// Tokens so far.
    pub history: Records,
    /// Folded ids by token.
    pub map: WeightId,
    /// Folded id of padding.
    pub pad: i64,
    /// Elements of a table's row.
    pub dim: usize,
    /// Rows of this layer's table.
    pub rows: usize,
}

impl Engram {
    /// Tensors `<name>.embed.weight`, `wkv.weight`, `q_weight`, `k_weight`.
    pub fn new(d: &mut Declarations, name: &str, streams: Streams, dims: EngramDims, hash: EngramHash) -> Engram {
        let part = |p: &str| format!("{name}.{p}");
        let (q, k) = (part("q_weight"), part("k_weight"));
        let flat = |d: &mut Declarations, name: &str| d.vector_parts(name, vec![Part::flat(name, [1, streams.count, streams.hidden])], 0.0);
        Engram {
            streams,
            history: dims.history,
            map: dims.map,
            pad: dims.pad,
            table: d.rows(&part("embed.weight"), dims.rows, dims.dim),
            kv: Linear::new(d, &part("wkv"), streams.hidden * (streams.count + 1), hash.primes.len() * dims.dim, false),
            q: flat(d, &q),
            k: flat(d, &k),
            hash,
        }
    }

    /// Records the streams `x` with the memory added.
    pub fn record(&self, t: &mut Tape<'_>, x: Value) -> Value {
        let count = self.hash.primes.len();
        let ids = t.op(EngramRows { history: self.history, map: self.map, pad: self.pad, hash: self.hash.clone(), y: Value::NONE });
        let rows = t.op(Lookup { ids, column: 0, count, table: self.table, y: Value::NONE });
        let kv = self.kv.record(t, rows);
        let s = &self.streams;
        t.op(EngramInject { x, kv, q: self.q, k: self.k, streams: s.count, eps: s.norm_eps, y: Value::NONE })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn multipliers_are_numpys() {
        // numpy 2.4: default_rng(10007 * layer).integers(0, (2**63 - 1) // ids // 2, 4) * 2 + 1.
        assert_eq!(multipliers(1, 249, 4), [30496496632187281, 1926076312604913, 14310505419554071, 29443988929425803]);
        assert_eq!(multipliers(20, 249, 2), [24615068920804037, 19285641681120157]);
        assert_eq!(multipliers(1, 100_000, 4), [75936276614145, 4795930018387, 35633158494689, 73315532434269]);
    }

    #[test]
    fn primes_are_taken_once() {
        let mut seen = Vec::new();
        assert_eq!(unused_primes(&mut seen, 64, 3, 2).unwrap(), [67, 71, 73, 79, 83, 89]);
        assert_eq!(unused_primes(&mut seen, 64, 1, 2).unwrap(), [97, 101]);
        assert_eq!(unused_primes(&mut seen, 0, 1, 1), None);
        assert_eq!(unused_primes(&mut seen, u32::MAX, 1, 1), None);
    }
}
