//! The tree against a plain list of everything that was kept: what it finds is really there, its bytes are those it holds.

use super::*;
use crate::cache::{PagePool, StateLayout, StatePool};
use std::collections::{HashMap, HashSet};

/// Two kinds of pages; a page's first bytes tell which tokens its positions hold.
struct World {
    pools: [Arc<PagePool>; 2],
    states: Arc<StatePool>,
    random: u64,
}

impl World {
    fn new() -> World {
        let pools = [64, 192].map(|bytes| PagePool::new(bytes, 1024));
        World { pools, states: StatePool::new(StateLayout::new(&[], 7).unwrap()), random: 0x9e37_79b9 }
    }

    fn below(&mut self, n: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 16) as usize % n
    }

    /// Runs of a few lengths, so that prompts meet and borders lie anywhere on a page.
    fn prompt(&mut self) -> Vec<i32> {
        let mut tokens = Vec::new();
        for _ in 0..1 + self.below(7) {
            let (token, run) = (self.below(2) as i32, [7, 32, 45][self.below(3)]);
            tokens.extend(std::iter::repeat_n(token, run));
        }
        let len = tokens.len() - if self.below(4) == 0 { self.below(5) } else { 0 };
        tokens.truncate(len);
        tokens
    }

    /// Pages whose bytes are the tokens they hold, in both kinds.
    fn pages(&self, tokens: &[i32]) -> Vec<LayerPages> {
        let fill = |pool: &Arc<PagePool>| {
            let mut pages = LayerPages::new(pool, 1024).unwrap();
            pages.reserve(0, tokens.len()).unwrap();
            for (index, piece) in tokens.chunks(PAGE).enumerate() {
                let bytes = pages.bytes_mut(index).unwrap();
                bytes.fill(255);
                bytes.iter_mut().zip(piece).for_each(|(to, token)| *to = *token as u8);
            }
            pages
        };
        self.pools.iter().map(fill).collect()
    }

    fn state(&self, tokens: &[i32]) -> Arc<State> {
        self.states.filled(std::iter::repeat(sum(tokens))).unwrap()
    }
}

fn sum(tokens: &[i32]) -> f32 {
    tokens.iter().fold(1.0, |sum, token| (sum * 3.0 + *token as f32) % 8191.0)
}

/// Counts everything anew.
fn recounted(tree: &PrefixTree) -> TreeCounts {
    let mut counts = TreeCounts { budget: tree.counts.budget, ..tree.counts };
    (counts.bytes, counts.entries, counts.tokens) = (0, 0, 0);
    let mut seen = HashSet::new();
    for node in tree.nodes.iter().flatten() {
        counts.entries += 1;
        counts.tokens += node.tokens.len() as u64;
        counts.bytes += (node.lists() + node.state.as_ref().map_or(0, |s| s.bytes())) as u64;
        for page in &node.pages {
            let mut one = LayerPages::new(&tree_pool(page), PAGE).unwrap();
            one.adopt(0, page.clone());
            if seen.insert(one.pointers()[0]) {
                counts.bytes += page.bytes() as u64;
            }
        }
    }
    counts
}

fn tree_pool(page: &SharedPage) -> Arc<PagePool> {
    page.pool()
}

fn walk(stateful: bool, budget: u64) -> TreeCounts {
    let mut world = World::new();
    let mut tree = PrefixTree::new(budget, stateful);
    // By key and tokens: what was ever kept.
    let mut ever: HashMap<u64, HashSet<Vec<i32>>> = HashMap::new();
    for step in 0..600 {
        let key = world.below(2) as u64;
        let tokens = world.prompt();
        if world.below(2) == 0 {
            let (pages, state) = (world.pages(&tokens), world.state(&tokens));
            let kinds: Vec<&LayerPages> = pages.iter().collect();
            tree.insert(key, &Kept { tokens: &tokens, pages: &kinds, state: &state });
            ever.entry(key).or_default().insert(tokens);
        } else {
            let from = world.below(tokens.len());
            let found = tree.find(key, &tokens, from);
            if found.len == 0 {
                assert!(found.pages.is_empty() && found.state.is_none());
            } else {
                assert!(found.len > from && found.len <= found.matched && found.matched <= tokens.len(), "step {step}");
                assert!(stateful || found.len < tokens.len());
                let known = ever.get(&key).unwrap().iter().any(|kept| kept.starts_with(&tokens[..found.len]));
                assert!(known, "step {step}: {} tokens were never kept", found.len);
                assert_eq!(found.pages.len(), 2 * (found.len.div_ceil(PAGE) - from / PAGE));
                for (i, page) in found.pages.iter().enumerate() {
                    let index = from / PAGE + i / 2;
                    let mut one = LayerPages::new(&tree_pool(page), PAGE).unwrap();
                    one.adopt(0, page.clone());
                    assert_eq!(one.page_bytes(), [64, 192][i % 2]);
                    for position in index * PAGE..found.len.min((index + 1) * PAGE) {
                        assert_eq!(i32::from(one.bytes(0).unwrap()[position % PAGE]), tokens[position], "step {step}: position {position}");
                    }
                }
                match found.state {
                    Some(state) => assert!(stateful && state.logits().unwrap()[0] == sum(&tokens[..found.len]), "step {step}"),
                    None => assert!(!stateful),
                }
            }
        }
        assert_eq!(tree.counts, recounted(&tree), "step {step}");
        assert!(tree.counts.bytes <= budget, "step {step}");
    }
    // Everything is let go with the tree.
    let counts = tree.counts;
    drop(tree);
    for pool in &world.pools {
        assert_eq!(pool.taken(), 0);
    }
    counts
}

#[test]
fn what_is_found_was_kept_and_bytes_are_within_the_budget() {
    for stateful in [false, true] {
        let all = walk(stateful, 1 << 30);
        assert!(all.evicted == 0 && all.hits > 50, "{all:?}");
        let some = walk(stateful, 20_000);
        assert!(some.evicted > 20 && some.hits > 10, "{some:?}");
        let few = walk(stateful, 2_000);
        assert!(few.hits < some.hits, "{few:?}");
        assert_eq!(walk(stateful, 100).entries, 0);
    }
}

#[test]
fn what_was_used_last_stays() {
    let world = World::new();
    let mut tree = PrefixTree::new(1 << 30, false);
    let prompt = |first: i32| -> Vec<i32> { std::iter::once(first).chain(std::iter::repeat_n(1, 63)).collect() };
    let keep = |tree: &mut PrefixTree, first: i32| {
        let tokens = prompt(first);
        let (pages, state) = (world.pages(&tokens), world.state(&tokens));
        let kinds: Vec<&LayerPages> = pages.iter().collect();
        tree.insert(0, &Kept { tokens: &tokens, pages: &kinds, state: &state });
    };
    (0..4).for_each(|first| keep(&mut tree, first));
    assert_eq!(tree.find(0, &prompt(0), 0).len, 63);
    tree.counts.budget = tree.counts.bytes;
    keep(&mut tree, 4);
    let found: Vec<bool> = (0..5).map(|first| tree.find(0, &prompt(first), 0).len > 0).collect();
    assert_eq!(found, [true, false, true, true, true]);
    assert_eq!(tree.find(7, &prompt(0), 0).len, 0);
}

#[test]
fn a_longer_prompt_takes_the_place_of_the_page_it_grew_on() {
    let world = World::new();
    let mut tree = PrefixTree::new(1 << 30, false);
    for len in [3, 5, 9, 20, 31, 32] {
        let tokens = vec![1; len];
        let (pages, state) = (world.pages(&tokens), world.state(&tokens));
        let kinds: Vec<&LayerPages> = pages.iter().collect();
        tree.insert(0, &Kept { tokens: &tokens, pages: &kinds, state: &state });
        // One page of each kind, however many nodes lie on it.
        let lists: usize = tree.nodes.iter().flatten().map(Node::lists).sum();
        assert_eq!(tree.counts.bytes as usize - lists, 64 + 192, "{len}");
    }
    assert_eq!(tree.counts.entries, 7);
    for pool in &world.pools {
        assert_eq!(pool.taken(), 1);
    }
}
