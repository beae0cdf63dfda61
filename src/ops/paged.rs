//! Experts that stay in their file: panels are packed when a row meets them, and kept as far as a budget allows.
//!
//! What is kept is decided by how often an expert was met of late, not by when: steps walk the layers in a circle, and where the
//! budget is slightly too small, the expert that was not met for longest is the very one wanted next. A newcomer takes a place only if it was
//! met more often than the one that leaves, so a single pass over everything moves nothing. An expert that is not kept is packed again
//! each time, a few panels at once; the bits are those of kept ones.

use crate::backend::cpu::pack::Packed;
use crate::error::Result;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// Rows that are packed at once: what one worker takes at a time.
const CHUNK: usize = 64;
/// Meetings count half after this many meetings for each matrix of the model.
const HALF_LIFE: f64 = 4.0;

/// Packs rows of experts' matrices.
pub trait PanelSource: Send + Sync {
    /// Rows `rows` of part `part` of expert `expert`; `rows` starts at a panel.
    fn pack(&self, expert: usize, part: usize, rows: Range<usize>) -> Result<Packed>;
}

/// The experts of one weight, all of one shape.
pub struct PagedExperts {
    source: Box<dyn PanelSource>,
    /// Rows of each part.
    parts: Vec<usize>,
    cols: usize,
    count: usize,
    cache: Arc<ExpertCache>,
    /// Its first expert's number in the cache.
    first: usize,
}

impl PagedExperts {
    /// `count` experts of parts with these rows, each `bytes` when packed.
    pub fn new(
        source: Box<dyn PanelSource>,
        count: usize,
        parts: Vec<usize>,
        cols: usize,
        bytes: u64,
        cache: &Arc<ExpertCache>,
    ) -> PagedExperts {
        let first = cache.register(count, bytes);
        PagedExperts { source, parts, cols, count, cache: Arc::clone(cache), first }
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.count
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Output features of one expert, at least 1.
    pub fn rows(&self) -> usize {
        self.parts.iter().sum::<usize>().max(1)
    }

    /// Chunks of one expert's matrix.
    pub fn chunks(&self) -> usize {
        self.parts.iter().map(|rows| rows.div_ceil(CHUNK)).sum()
    }

    /// Bytes that are kept now, of this weight alone.
    pub fn bytes(&self) -> u64 {
        let state = self.cache.state();
        state.seen[self.first..self.first + self.count].iter().filter(|s| s.kept.is_some()).map(|s| s.bytes).sum()
    }

    /// Calls `f` with a chunk of an expert and the number of its first output. Whoever takes chunk 0 of an expert, once in an
    /// operation, says so with `meets`: that is what counts as a meeting. Tensors were checked when the model was loaded; what can
    /// still fail is memory for the chunk, and then nothing is kept of it.
    pub fn with(&self, expert: usize, chunk: usize, meets: bool, f: impl FnOnce(&Packed, usize)) -> Result<()> {
        let (mut part, mut index, mut column) = (0, chunk, 0);
        while index >= self.parts[part].div_ceil(CHUNK) {
            index -= self.parts[part].div_ceil(CHUNK);
            column += self.parts[part];
            part += 1;
        }
        let rows = index * CHUNK..((index + 1) * CHUNK).min(self.parts[part]);
        let column = column + rows.start;
        let pack = || self.source.pack(expert, part, rows);
        match self.cache.kept(self.first + expert, meets, self.chunks()) {
            Some(kept) => match kept.chunks[chunk].get() {
                Some(packed) => f(packed, column),
                // Another call may pack it at the same time, to the same bits.
                None => {
                    let packed = pack()?;
                    f(kept.chunks[chunk].get_or_init(|| packed), column);
                }
            },
            None => f(&pack()?, column),
        }
        Ok(())
    }

    /// Row `row` of an expert as floats.
    pub fn decode_row(&self, expert: usize, row: usize, out: &mut [f32]) -> Result<()> {
        let (mut part, mut within) = (0, row);
        while within >= self.parts[part] {
            within -= self.parts[part];
            part += 1;
        }
        let start = within / CHUNK * CHUNK;
        self.source.pack(expert, part, start..(start + CHUNK).min(self.parts[part]))?.decode_row(within - start, out)
    }
}

/// The packed chunks of one expert's matrix, made one by one. Lives on while somebody computes with it.
struct Kept {
    chunks: Vec<OnceLock<Packed>>,
}

/// What is known of one expert's matrix.
struct Seen {
    bytes: u64,
    /// Logarithm (base 2) of the sum of `2^(time / half life)` over its meetings: old ones weigh less and less without being touched.
    score: f64,
    kept: Option<Arc<Kept>>,
}

/// Which experts are kept, over all weights of a model.
pub struct ExpertCache {
    budget: u64,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    seen: Vec<Seen>,
    used: u64,
    /// Meetings so far.
    clock: u64,
    /// Meetings of experts that were kept.
    hits: u64,
}

impl ExpertCache {
    /// Keeps at most `budget` bytes.
    pub fn new(budget: u64) -> ExpertCache {
        ExpertCache { budget, state: Mutex::default() }
    }

    /// The budget.
    pub fn budget(&self) -> u64 {
        self.budget
    }

    /// Meetings of experts so far, and how many of them were of kept ones.
    pub fn meetings(&self) -> (u64, u64) {
        let state = self.state();
        (state.clock, state.hits)
    }

    /// Keeps nothing any more; what is met again is packed again.
    pub fn trim(&self) {
        let mut state = self.state();
        state.seen.iter_mut().for_each(|seen| seen.kept = None);
        state.used = 0;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Numbers for `count` matrices of `bytes` each; returns the first.
    fn register(&self, count: usize, bytes: u64) -> usize {
        let mut state = self.state();
        let first = state.seen.len();
        state.seen.extend((0..count).map(|_| Seen { bytes, score: f64::NEG_INFINITY, kept: None }));
        first
    }

    /// A matrix's place, if it has one or, when it is met, earns one.
    fn kept(&self, index: usize, meets: bool, chunks: usize) -> Option<Arc<Kept>> {
        let mut state = self.state();
        if meets {
            self.meet(&mut state, index, chunks);
        }
        state.seen[index].kept.clone()
    }

    fn meet(&self, state: &mut State, index: usize, chunks: usize) {
        state.clock += 1;
        let now = state.clock as f64 / (HALF_LIFE * state.seen.len() as f64);
        let seen = &mut state.seen[index];
        // Judged by what it was before this meeting: the others have not had theirs yet.
        let before = seen.score;
        let (high, low) = (before.max(now), before.min(now));
        seen.score = high + (low - high).exp2().ln_1p() / std::f64::consts::LN_2;
        if seen.kept.is_some() {
            state.hits += 1;
            return;
        }
        let bytes = seen.bytes;
        while state.used + bytes > self.budget {
            let weakest = state.seen.iter_mut().filter(|s| s.kept.is_some()).min_by(|a, b| a.score.total_cmp(&b.score));
            let Some(weakest) = weakest.filter(|w| w.score < before) else { return };
            weakest.kept = None;
            state.used -= weakest.bytes;
        }
        state.used += bytes;
        state.seen[index].kept = Some(Arc::new(Kept { chunks: (0..chunks).map(|_| OnceLock::new()).collect() }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Meets experts in this order and returns the share of hits in the second half.
    fn hits(cache: &ExpertCache, order: impl Iterator<Item = usize>) -> f64 {
        let order: Vec<usize> = order.collect();
        let mut before = (0, 0);
        for (i, &expert) in order.iter().enumerate() {
            if i == order.len() / 2 {
                before = cache.meetings();
            }
            let kept = cache.kept(expert, true, 1);
            assert!(kept.is_none() || cache.state().used <= cache.budget);
        }
        let after = cache.meetings();
        (after.1 - before.1) as f64 / (after.0 - before.0) as f64
    }

    fn cache(matrices: usize, places: u64) -> ExpertCache {
        let cache = ExpertCache::new(places * 10);
        cache.register(matrices, 10);
        cache
    }

    #[test]
    fn a_circle_slightly_over_the_budget_mostly_hits() {
        // Least recently used would never hit once.
        let share = hits(&cache(100, 90), (0..2000).map(|i| i % 100));
        assert!(share > 0.85, "{share}");
    }

    #[test]
    fn a_single_pass_over_everything_moves_nothing() {
        let cache = cache(1000, 50);
        assert_eq!(hits(&cache, (0..1000).map(|i| i % 50)), 1.0);
        hits(&cache, 0..1000);
        assert_eq!(hits(&cache, 0..50), 1.0);
    }

    #[test]
    fn a_new_subject_takes_the_places_of_an_old_one() {
        let cache = cache(100, 50);
        assert_eq!(hits(&cache, (0..2000).map(|i| i % 50)), 1.0);
        assert!(hits(&cache, (0..6000).map(|i| 50 + i % 50)) > 0.95);
    }

    #[test]
    fn a_budget_below_one_expert_keeps_nothing() {
        let cache = ExpertCache::new(9);
        cache.register(4, 10);
        assert_eq!(hits(&cache, (0..100).map(|i| i % 4)), 0.0);
    }
}
