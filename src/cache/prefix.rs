//! The prefix tree: keys, values and recurrent states of prompts that were read before, for prompts that begin alike.
//!
//! A radix tree over tokens. A node holds the tokens between its parent and itself, the pages that their positions lie on, and,
//! where the model has recurrent slots, perhaps the state after its last token. Pages are shared with the sequences they
//! come from and copied by whoever writes, so keeping costs no copy. A page that is cut by a node's border is held by the nodes
//! on both sides; it counts once. When the bytes held pass the budget, what was used longest ago goes.
//!
//! Nothing here fails: what there is no memory for is not kept.

use super::{LayerPages, SharedPage, State};
use crate::error::{reserve, vec_with_capacity};
use crate::ops::PAGE;
use std::sync::Arc;

/// What there is of a prompt.
#[derive(Default)]
pub struct Found {
    /// Leading tokens whose state can be taken up.
    pub len: usize,
    /// Leading tokens that are in the tree; more than `len` where no state was kept at that place.
    pub matched: usize,
    /// From the page of the first wanted position to that of position `len - 1`: one of each kind, then the next.
    pub pages: Vec<SharedPage>,
    /// The state after token `len - 1`, of models that carry one.
    pub state: Option<Arc<State>>,
}

/// What is to be kept: tokens, their pages of each kind, the state after the last token.
pub struct Kept<'a> {
    /// From the start of the sequence.
    pub tokens: &'a [i32],
    /// Of each kind.
    pub pages: &'a [&'a LayerPages],
    /// Kept where the model has recurrent slots.
    pub state: &'a Arc<State>,
}

/// Numbers of a tree.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TreeCounts {
    /// Most bytes it may hold; 0 for no tree.
    pub budget: u64,
    /// Bytes it holds: pages, states and its own lists.
    pub bytes: u64,
    /// Nodes.
    pub entries: u64,
    /// Tokens of all nodes.
    pub tokens: u64,
    /// Prompts that found something to take up.
    pub hits: u64,
    /// Prompts that did not.
    pub misses: u64,
    /// Tokens that did not have to be computed.
    pub reused: u64,
    /// Nodes and states that gave way.
    pub evicted: u64,
}

/// A tree for the sequences of one model.
pub struct PrefixTree {
    /// Whether only places with a state can be taken up.
    stateful: bool,
    /// By number; an empty place is in `free`.
    nodes: Vec<Option<Node>>,
    free: Vec<u32>,
    /// One tree for each key: sequences of different keys share nothing.
    roots: Vec<(u64, u32)>,
    clock: u64,
    counts: TreeCounts,
}

struct Node {
    /// `ROOT` for a root.
    parent: u32,
    /// Position of the first token.
    start: usize,
    tokens: Vec<i32>,
    /// From the page of `start` on: one of each kind, then the next.
    pages: Vec<SharedPage>,
    state: Option<Arc<State>>,
    /// By first token.
    children: Vec<(i32, u32)>,
    /// When a prompt last came by.
    used: u64,
    /// When the state was kept or last taken up.
    state_used: u64,
}

const ROOT: u32 = u32::MAX;
const WHAT: &str = "what is kept of prompts";
/// Bytes of a node's place, its parent's entry and its place among the free ones.
const NODE: usize = size_of::<Option<Node>>() + size_of::<(i32, u32)>() + size_of::<u32>();

impl Node {
    fn end(&self) -> usize {
        self.start + self.tokens.len()
    }

    /// Bytes of its lists; pages and state count apart.
    fn lists(&self) -> usize {
        NODE + size_of_val(&*self.tokens) + size_of_val(&*self.pages)
    }

    fn child(&self, token: i32) -> Option<u32> {
        self.children.binary_search_by_key(&token, |c| c.0).ok().map(|at| self.children[at].1)
    }
}

/// How far a prompt is in the tree: the last node that it holds whole, and how many tokens of a child of that.
struct Walk {
    node: u32,
    inside: Option<(u32, usize)>,
}

impl PrefixTree {
    /// An empty tree of at most `budget` bytes. `stateful`: the model has recurrent slots.
    pub fn new(budget: u64, stateful: bool) -> PrefixTree {
        let counts = TreeCounts { budget, ..TreeCounts::default() };
        PrefixTree { stateful, nodes: Vec::new(), free: Vec::new(), roots: Vec::new(), clock: 0, counts }
    }

    /// Its numbers.
    pub fn counts(&self) -> TreeCounts {
        self.counts
    }

    /// What can be taken up for a prompt of `tokens`, counted from the start of the sequence, which holds `from` of them. At least the last
    /// token is left to be computed, unless its row comes with a state.
    pub fn find(&mut self, key: u64, tokens: &[i32], from: usize) -> Found {
        let found = self.look(key, tokens, from).unwrap_or_default();
        match found.len > from {
            true => {
                self.counts.hits += 1;
                self.counts.reused += (found.len - from) as u64;
            }
            false => self.counts.misses += 1,
        }
        found
    }

    fn look(&mut self, key: u64, tokens: &[i32], from: usize) -> Option<Found> {
        let root = self.roots.iter().find(|r| r.0 == key)?.1;
        let walk = self.walk(root, tokens);
        self.touch(&walk);
        let matched = self.node(walk.node).end() + walk.inside.map_or(0, |i| i.1);
        let mut last = walk.inside.map_or(walk.node, |i| i.0);
        let mut found = Found { matched, ..Found::default() };
        if self.stateful {
            last = walk.node;
            while self.node(last).state.is_none() {
                last = self.node(last).parent;
                if last == ROOT {
                    return Some(found);
                }
            }
            found.len = self.node(last).end();
            found.state = self.node(last).state.clone();
        } else {
            found.len = matched.min(tokens.len().saturating_sub(1));
        }
        if found.len <= from {
            return Some(Found { matched, ..Found::default() });
        }
        let (first, end) = (from / PAGE, found.len.div_ceil(PAGE));
        let kinds = self.kinds(last);
        reserve(&mut found.pages, (end - first) * kinds, WHAT).ok()?;
        // Backwards: of the nodes that hold a page, the deepest has it filled furthest.
        for index in (first..end).rev() {
            while self.node(last).start / PAGE > index {
                last = self.node(last).parent;
            }
            let node = self.node(last);
            let at = (index - node.start / PAGE) * kinds;
            found.pages.extend(node.pages[at..at + kinds].iter().rev().cloned());
        }
        found.pages.reverse();
        if self.stateful {
            let clock = self.clock;
            let mut node = walk.node;
            while self.node(node).end() > found.len {
                node = self.node(node).parent;
            }
            self.node_mut(node).state_used = clock;
        }
        Some(found)
    }

    /// Keeps a prompt, or as much of it as the budget has room for.
    pub fn insert(&mut self, key: u64, kept: &Kept<'_>) {
        let set: usize = kept.pages.iter().map(|pages| pages.page_bytes() + size_of::<SharedPage>()).sum();
        let state = if self.stateful { kept.state.bytes() } else { 0 };
        let room = usize::try_from(self.counts.budget).unwrap_or(usize::MAX).saturating_sub(state).saturating_sub(4 * NODE);
        let most = room / (set + PAGE * size_of::<i32>()) * PAGE;
        let tokens = match kept.tokens.len() {
            len if len <= most => kept.tokens,
            _ if self.stateful => return,
            _ => &kept.tokens[..most],
        };
        if !tokens.is_empty() {
            // Without memory, what was made so far stays: each step leaves a sound tree.
            let _ = self.add(key, tokens, kept);
            self.evict();
        }
    }

    fn add(&mut self, key: u64, tokens: &[i32], kept: &Kept<'_>) -> Option<()> {
        let root = match self.roots.iter().find(|r| r.0 == key) {
            Some(root) => root.1,
            None => self.add_root(key)?,
        };
        let walk = self.walk(root, tokens);
        self.touch(&walk);
        let at = self.node(walk.node).end() + walk.inside.map_or(0, |i| i.1);
        if at == tokens.len() && !self.stateful {
            return Some(());
        }
        let node = match walk.inside {
            Some((child, count)) => self.split(child, count)?,
            None => walk.node,
        };
        let node = if at < tokens.len() { self.add_leaf(node, tokens, kept.pages)? } else { node };
        if self.stateful {
            let clock = self.clock;
            let node = self.node_mut(node);
            node.state_used = clock;
            if node.state.is_none() {
                node.state = Some(Arc::clone(kept.state));
                self.counts.bytes += kept.state.bytes() as u64;
            }
        }
        Some(())
    }

    fn node(&self, id: u32) -> &Node {
        self.nodes[id as usize].as_ref().expect("numbers of nodes are those of nodes that are there")
    }

    fn node_mut(&mut self, id: u32) -> &mut Node {
        self.nodes[id as usize].as_mut().expect("numbers of nodes are those of nodes that are there")
    }

    /// Kinds of pages, as a node that has tokens shows them.
    fn kinds(&self, id: u32) -> usize {
        let node = self.node(id);
        node.pages.len() / (node.end().div_ceil(PAGE) - node.start / PAGE).max(1)
    }

    fn walk(&self, root: u32, tokens: &[i32]) -> Walk {
        let mut walk = Walk { node: root, inside: None };
        let mut rest = tokens;
        while let Some(child) = rest.first().and_then(|token| self.node(walk.node).child(*token)) {
            let label = &self.node(child).tokens;
            let same = label.iter().zip(rest).take_while(|(a, b)| a == b).count();
            if same < label.len() {
                walk.inside = Some((child, same));
                break;
            }
            rest = &rest[same..];
            walk.node = child;
        }
        walk
    }

    /// Notes that the nodes of a walk are in use.
    fn touch(&mut self, walk: &Walk) {
        self.clock += 1;
        let clock = self.clock;
        let mut id = walk.inside.map_or(walk.node, |i| i.0);
        while id != ROOT {
            let node = self.node_mut(id);
            node.used = clock;
            id = node.parent;
        }
    }

    /// A place for a node, which is then filled.
    fn place(&mut self) -> Option<u32> {
        if self.free.is_empty() {
            reserve(&mut self.nodes, 1, WHAT).ok()?;
            // So that giving a place back never allocates.
            let most = self.nodes.len() + 1;
            reserve(&mut self.free, most, WHAT).ok()?;
            self.nodes.push(None);
            self.free.push(self.nodes.len() as u32 - 1);
        }
        self.free.last().copied()
    }

    /// Fills the place that [`PrefixTree::place`] gave.
    fn fill(&mut self, node: Node) {
        let id = self.free.pop().expect("place() left one");
        self.counts.bytes += node.lists() as u64;
        self.counts.entries += 1;
        self.nodes[id as usize] = Some(node);
    }

    fn add_root(&mut self, key: u64) -> Option<u32> {
        reserve(&mut self.roots, 1, WHAT).ok()?;
        let id = self.place()?;
        let (tokens, pages, children) = (Vec::new(), Vec::new(), Vec::new());
        self.fill(Node { parent: ROOT, start: 0, tokens, pages, state: None, children, used: self.clock, state_used: 0 });
        self.roots.push((key, id));
        Some(id)
    }

    /// Cuts a node after `count` of its tokens; the first half's number.
    fn split(&mut self, id: u32, count: usize) -> Option<u32> {
        let upper = self.place()?;
        let (used, kinds, node) = (self.clock, self.kinds(id), self.node(id));
        let (parent, start, token) = (node.parent, node.start, node.tokens[0]);
        let cut = start + count;
        let until = (cut.div_ceil(PAGE) - start / PAGE) * kinds;
        let from = (cut / PAGE - start / PAGE) * kinds;
        let (head, tail) = (copied(&node.tokens[..count])?, copied(&node.tokens[count..])?);
        let (head_pages, tail_pages) = (copied(&node.pages[..until])?, copied(&node.pages[from..])?);
        let mut children = vec_with_capacity(1, WHAT).ok()?;
        children.push((tail[0], id));
        node.pages[from..until].iter().for_each(|page| _ = page.keep());
        let before = node.lists();
        let node = self.node_mut(id);
        (node.parent, node.start, node.tokens, node.pages) = (upper, cut, tail, tail_pages);
        let after = node.lists();
        self.counts.bytes = self.counts.bytes + after as u64 - before as u64;
        let entry = &mut self.node_mut(parent).children;
        let at = entry.binary_search_by_key(&token, |c| c.0).expect("a node is among its parent's children");
        entry[at].1 = upper;
        self.fill(Node { parent, start, tokens: head, pages: head_pages, state: None, children, used, state_used: 0 });
        Some(upper)
    }

    /// Adds a child with what `tokens` have beyond a node's end.
    fn add_leaf(&mut self, parent: u32, tokens: &[i32], kinds: &[&LayerPages]) -> Option<u32> {
        let id = self.place()?;
        let start = self.node(parent).end();
        let label = copied(&tokens[start..])?;
        let (first, end) = (start / PAGE, tokens.len().div_ceil(PAGE));
        let mut pages = vec_with_capacity((end - first) * kinds.len(), WHAT).ok()?;
        reserve(&mut self.node_mut(parent).children, 1, WHAT).ok()?;
        (first..end).for_each(|index| pages.extend(kinds.iter().map(|kind| kind.share(index))));
        for page in &pages {
            if page.keep() {
                self.counts.bytes += page.bytes() as u64;
            }
        }
        self.refresh(parent, first, &pages[..kinds.len()]);
        self.counts.tokens += label.len() as u64;
        let token = label[0];
        self.fill(Node { parent, start, tokens: label, pages, state: None, children: Vec::new(), used: self.clock, state_used: 0 });
        let children = &mut self.node_mut(parent).children;
        let at = children.partition_point(|c| c.0 < token);
        children.insert(at, (token, id));
        Some(id)
    }

    /// Lets a node and those above it hold `pages` as their page `index`: they hold the same positions and more, so that
    /// the ones there so far need not stay.
    fn refresh(&mut self, mut id: u32, index: usize, pages: &[SharedPage]) {
        while id != ROOT {
            let node = self.node_mut(id);
            let held = node.start / PAGE..node.end().div_ceil(PAGE);
            if !held.contains(&index) {
                return;
            }
            let (at, parent) = ((index - held.start) * pages.len(), node.parent);
            for (kind, page) in pages.iter().enumerate() {
                page.keep();
                let old = std::mem::replace(&mut self.node_mut(id).pages[at + kind], page.clone());
                self.let_go(&old);
            }
            id = parent;
        }
    }

    fn let_go(&mut self, page: &SharedPage) {
        if page.let_go() {
            self.counts.bytes -= page.bytes() as u64;
        }
    }

    /// Gives up what was used longest ago until the rest fits the budget.
    fn evict(&mut self) {
        self.evict_to(self.counts.budget);
    }

    /// Gives up all that it keeps. What sequences have taken up stays theirs.
    pub fn clear(&mut self) {
        self.evict_to(0);
    }

    fn evict_to(&mut self, most: u64) {
        while self.counts.bytes > most {
            let ages = self.nodes.iter().enumerate().filter_map(|(id, node)| {
                let node = node.as_ref().filter(|node| node.parent != ROOT)?;
                match (node.children.is_empty(), &node.state) {
                    (true, _) => Some((node.used, id)),
                    (false, Some(_)) => Some((node.state_used, id)),
                    (false, None) => None,
                }
            });
            let Some((_, id)) = ages.min() else { return };
            self.counts.evicted += 1;
            self.give_up(id as u32);
        }
    }

    /// Gives up a leaf, or another node's state; and what serves nobody without it.
    fn give_up(&mut self, mut id: u32) {
        self.drop_state(id);
        while self.node(id).children.is_empty() && self.node(id).state.is_none() {
            let node = self.nodes[id as usize].take().expect("its number is that of a node");
            self.free.push(id);
            self.counts.bytes -= node.lists() as u64;
            self.counts.entries -= 1;
            self.counts.tokens -= node.tokens.len() as u64;
            node.pages.iter().for_each(|page| self.let_go(page));
            if node.parent == ROOT {
                self.roots.retain(|root| root.1 != id);
                return;
            }
            let siblings = &mut self.node_mut(node.parent).children;
            siblings.retain(|child| child.1 != id);
            // A place without a state is of no use where states are needed, and a root of none without children.
            if !self.stateful && self.node(node.parent).parent != ROOT {
                return;
            }
            id = node.parent;
        }
    }

    fn drop_state(&mut self, id: u32) {
        if let Some(state) = self.node_mut(id).state.take() {
            self.counts.bytes -= state.bytes() as u64;
        }
    }
}

fn copied<T: Clone>(items: &[T]) -> Option<Vec<T>> {
    let mut copy = vec_with_capacity(items.len(), WHAT).ok()?;
    copy.extend_from_slice(items);
    Some(copy)
}

#[cfg(test)]
#[path = "prefix_tests.rs"]
mod tests;
