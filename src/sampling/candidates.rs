//! The tokens still in the running, with their logits, and the draw among them.
//!
//! Probabilities are not kept: stages change logits, and a softmax over what is left is taken where a probability
//! is needed. A logit of minus infinity is a token that was ruled out and stays so.

use std::cmp::Ordering;

use crate::error::{Error, Kind, Result};

use super::greedy;
use super::rng::Rng;

/// A token and its logit.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Candidate {
    pub id: u32,
    pub logit: f32,
}

/// How the items are arranged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Order {
    /// Item `i` is token `i`, and every token is there.
    #[default]
    Ids,
    /// Highest logit first, ties by id.
    Descending,
    /// Neither, but always the same for the same input.
    Other,
}

/// The list. `items` and `order` change together.
#[derive(Default)]
pub struct Candidates {
    pub items: Vec<Candidate>,
    pub order: Order,
    weights: Vec<f32>,
}

/// Highest logit first; the lower id wins a tie. There are no NaNs among candidates.
pub fn descending(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.partial_cmp(&a.logit).unwrap_or(Ordering::Equal).then(a.id.cmp(&b.id))
}

impl Candidates {
    /// Starts from a whole row, which is checked first.
    pub fn load(&mut self, logits: &[f32]) -> Result<()> {
        greedy::maximum(logits)?;
        self.items.clear();
        reserve(&mut self.items, logits.len())?;
        reserve(&mut self.weights, logits.len())?;
        self.items.extend(logits.iter().enumerate().map(|(i, &logit)| Candidate { id: i as u32, logit }));
        self.order = Order::Ids;
        Ok(())
    }

    /// Starts from the highest logits of a row that was checked, highest first, of several alike the lower token.
    pub fn load_highest(&mut self, tokens: &[(u32, f32)]) -> Result<()> {
        self.items.clear();
        reserve(&mut self.items, tokens.len())?;
        reserve(&mut self.weights, tokens.len())?;
        self.items.extend(tokens.iter().map(|&(id, logit)| Candidate { id, logit }));
        self.order = Order::Descending;
        Ok(())
    }

    /// Arranges them as they are in a row that tokens were taken out of.
    pub fn order_by_id(&mut self) {
        self.items.sort_unstable_by_key(|c| c.id);
        self.order = Order::Other;
    }

    /// Adds `value` to one token's logit, if the token is still there.
    pub fn add(&mut self, token: i32, value: f32) {
        let Ok(id) = u32::try_from(token) else { return };
        let item = match self.order {
            Order::Ids => self.items.get_mut(id as usize),
            _ => self.items.iter_mut().find(|c| c.id == id),
        };
        if let Some(item) = item {
            item.logit = changed(item.logit, item.logit + value);
        }
        self.disturbed();
    }

    /// Logits were changed one by one, so a descending order may be gone.
    pub fn disturbed(&mut self) {
        if self.order == Order::Descending {
            self.order = Order::Other;
        }
    }

    /// Items were taken out one by one: item `i` is no longer token `i`.
    pub fn shortened(&mut self) {
        if self.order == Order::Ids {
            self.order = Order::Other;
        }
    }

    /// Puts the `n` highest logits to the front, in descending order. Those behind them are in none.
    pub fn bring_forward(&mut self, n: usize) {
        if self.order == Order::Descending || n == 0 {
            return;
        }
        if n < self.items.len() {
            self.items.select_nth_unstable_by(n - 1, descending);
        }
        let n = n.min(self.items.len());
        self.items[..n].sort_unstable_by(descending);
        self.order = Order::Other;
    }

    /// Keeps the first tokens in the order of `compare` until their weights reach `target`; at least one stays. The caller says what
    /// order that leaves.
    pub fn keep_until(&mut self, target: f64, compare: impl Fn(&Candidate, &Candidate) -> Ordering, weight: impl Fn(&Candidate) -> f64) {
        // Few tokens usually hold most of the probability, so order is made for a small head first and extended on demand.
        let (mut reached, mut kept, mut ordered, mut block) = (0.0, 0, 0, 256);
        let len = self.items.len();
        while kept < len {
            if kept == ordered {
                ordered = len.min(kept.saturating_add(block));
                block *= 4;
                let tail = &mut self.items[kept..];
                if ordered < len {
                    tail.select_nth_unstable_by(ordered - kept - 1, &compare);
                }
                tail[..ordered - kept].sort_unstable_by(&compare);
            }
            reached += weight(&self.items[kept]);
            kept += 1;
            if reached >= target {
                break;
            }
        }
        self.items.truncate(kept);
    }

    /// The highest logit; minus infinity when nothing is left.
    pub fn maximum(&self) -> f32 {
        match self.order {
            Order::Descending => self.items.first().map_or(f32::NEG_INFINITY, |c| c.logit),
            _ => self.items.iter().fold(f32::NEG_INFINITY, |a, c| if c.logit > a { c.logit } else { a }),
        }
    }

    /// Draws a token in proportion to its probability: one number of the generator, spent only where there is a
    /// choice. `None` when every token has been ruled out.
    pub fn draw(&mut self, rng: &mut Rng) -> Result<Option<Candidate>> {
        let max = self.maximum();
        if max == f32::NEG_INFINITY {
            return Ok(None);
        }
        if let [only] = self.items[..] {
            return Ok(Some(only));
        }
        self.weights.clear();
        self.weights.extend(self.items.iter().map(|c| (c.logit - max).exp()));
        let total: f64 = self.weights.iter().map(|&w| f64::from(w)).sum();
        let target = rng.unit() * total;
        let mut reached = 0.0;
        let mut last = None;
        for (item, &weight) in self.items.iter().zip(&self.weights) {
            if weight > 0.0 {
                reached += f64::from(weight);
                last = Some(*item);
                if reached > target {
                    break;
                }
            }
        }
        Ok(last)
    }
}

/// A logit after a change: a token that was ruled out stays so, and the result stays below infinity.
pub fn changed(before: f32, after: f32) -> f32 {
    if before == f32::NEG_INFINITY { before } else { after.min(f32::MAX) }
}

/// Room for `n` elements in all, or an error instead of an abort.
pub fn reserve<T>(v: &mut Vec<T>, n: usize) -> Result<()> {
    crate::runtime::fallible(|| v.try_reserve(n.saturating_sub(v.len()))).map_err(|_| {
        let bytes = (n as u64).saturating_mul(size_of::<T>() as u64);
        Error::new(Kind::OutOfMemory, format!("sampler buffer: {bytes} bytes could not be allocated")).sizes(bytes, 0)
    })
}
