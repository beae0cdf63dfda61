//! Per-sequence state: pages of keys and values, who owns them and how many share them.

mod pages;

pub use pages::{LayerPages, PagePool};
