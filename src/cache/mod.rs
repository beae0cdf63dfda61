//! Per-sequence state: pages of keys and values, and recurrent slots; who owns them and how many share them; and what is kept of them for
//! prompts that begin alike.

mod lists;
mod memory;
mod pages;
mod prefix;
mod state;

pub use lists::PageLists;
pub use memory::Home;
pub use pages::{LayerPages, PagePool, SharedPage};
pub use prefix::{Found, Kept, PrefixTree, TreeCounts};
pub use state::{SequenceState, State, StateLayout, StatePool};
