//! The generator behind every draw: SplitMix64 (Steele, Lea, Flood 2014).
//!
//! One 64-bit word of state makes snapshots free, every seed is a good seed, and the numbers are the same on every
//! machine. It is no source of secrets.

/// A generator; copying it copies its future.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rng(u64);

impl Rng {
    /// A generator whose numbers depend on `seed` alone.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// The state: `new` of it is this generator again.
    pub fn bits(self) -> u64 {
        self.0
    }

    /// The next 64 random bits.
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number in `[0, 1)`, a multiple of 2^-53. Takes one step of the generator.
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The published numbers for seed 1234567.
    #[test]
    fn known_numbers() {
        let mut rng = Rng::new(1234567);
        let expected = [6457827717110365317u64, 3203168211198807973, 9817491932198370423, 4593380528125082431, 16408922859458223821];
        for e in expected {
            assert_eq!(rng.next(), e);
        }
    }

    #[test]
    fn unit_stays_below_one() {
        let mut rng = Rng::new(7);
        let mut sum = 0.0;
        for _ in 0..100_000 {
            let u = rng.unit();
            assert!((0.0..1.0).contains(&u));
            sum += u;
        }
        assert!((sum / 100_000.0 - 0.5).abs() < 0.005, "mean {}", sum / 100_000.0);
    }
}
