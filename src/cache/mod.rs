//! Per-sequence state: pages of keys and values, and recurrent slots; who owns them and how many share them.

mod pages;
mod state;

pub use pages::{LayerPages, PagePool};
pub use state::{SequenceState, State, StateLayout, StatePool};
