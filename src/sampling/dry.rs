//! DRY, "don't repeat yourself" (described by p-e-w, 2024): tokens that would make a repeated passage longer are made less likely, the
//! more so the longer it is already.
//!
//! The length of a repeated passage is that of the longest ending of the history that occurs before, followed by the token; it does
//! not reach over a breaker. All lengths come from one pass of the Z algorithm over the history read backwards, so the work grows
//! with the window, not with its square.

use super::candidates::{Candidates, reserve};
use super::penalty::{Counts, newest};
use crate::error::Result;

/// The numbers of a DRY stage.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Dry {
    /// Subtracted for a passage of `allowed` tokens; 0 changes nothing.
    pub multiplier: f32,
    /// How much more with each further token.
    pub base: f32,
    /// Passages shorter than this are free.
    pub allowed: u32,
    /// Newest tokens looked at; 0 takes all.
    pub window: u32,
}

/// Buffers that are kept.
#[derive(Default)]
pub(super) struct Lengths(Vec<u32>);

impl Dry {
    /// Changes the logits of tokens that would go on with a passage. `breaks` says which tokens end a passage.
    pub(super) fn apply(
        &self,
        list: &mut Candidates,
        vocab: usize,
        history: &[i32],
        breaks: impl Fn(i32) -> bool,
        lengths: &mut Lengths,
        counts: &mut Counts,
    ) -> Result<()> {
        let recent = newest(history, self.window);
        let longest = recent.iter().rev().position(|&t| breaks(t)).unwrap_or(recent.len());
        if self.multiplier == 0.0 || longest == 0 || recent.len() < 2 {
            return Ok(());
        }
        counts.fit(vocab)?;
        lengths.endings(recent)?;
        // `lengths[b]`: how many tokens before and at place `end = len - 1 - b` equal the history's ending.
        for (back, &length) in lengths.0.iter().enumerate().skip(1) {
            let (length, next) = ((length as usize).min(longest), recent[recent.len() - back]);
            if length >= self.allowed as usize && !breaks(next) {
                counts.raise(next, length as u32);
            }
        }
        counts.change(list, recent, |logit, length| {
            let penalty = f64::from(self.multiplier) * f64::from(self.base).powf(f64::from(length - self.allowed));
            // Less likely, but not ruled out.
            (f64::from(logit) - penalty).max(f64::from(f32::MIN)) as f32
        });
        Ok(())
    }
}

impl Lengths {
    /// `self.0[b]`: the longest ending of `tokens` that is also an ending of all but its last `b` tokens.
    fn endings(&mut self, tokens: &[i32]) -> Result<()> {
        let count = tokens.len();
        // In powers of two: a history that grows by a token each time must not ask for memory each time.
        reserve(&mut self.0, count.next_power_of_two().max(4096))?;
        let back = |i: usize| tokens[count - 1 - i];
        self.0.clear();
        self.0.push(count as u32);
        // Tokens `left .. right`, counted from the end, are known to equal the first ones.
        let (mut left, mut right) = (0, 0);
        for i in 1..count {
            let mut length = if i < right { (self.0[i - left] as usize).min(right - i) } else { 0 };
            while i + length < count && back(length) == back(i + length) {
                length += 1;
            }
            if i + length > right {
                (left, right) = (i, i + length);
            }
            self.0.push(length as u32);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passages_have_their_length() {
        let mut lengths = Lengths::default();
        lengths.endings(&[1, 2, 3, 1, 2, 3, 9, 2, 3]).unwrap();
        assert_eq!(lengths.0, [9, 0, 0, 2, 0, 0, 2, 0, 0]);
        lengths.endings(&[7; 5]).unwrap();
        assert_eq!(lengths.0, [5, 4, 3, 2, 1]);
    }

    /// 100,000 equal tokens are the worst case of a search that compares place by place: ten thousand million comparisons.
    #[test]
    fn a_long_monotone_history_is_quick() {
        let history = vec![3; 100_000];
        let dry = Dry { multiplier: 0.8, base: 1.75, allowed: 2, window: 0 };
        let mut list = Candidates::default();
        list.load(&[1.0; 8]).unwrap();
        let begun = std::time::Instant::now();
        dry.apply(&mut list, 8, &history, |_| false, &mut Lengths::default(), &mut Counts::default()).unwrap();
        assert_eq!(list.items[3].logit, f32::MIN);
        assert!(list.items.iter().all(|c| c.id == 3 || c.logit == 1.0));
        assert!(begun.elapsed().as_secs() < 4, "{:?}", begun.elapsed());
    }
}
