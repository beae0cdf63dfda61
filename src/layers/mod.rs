//! Layers, named by their mechanism. A layer is built from a config (declaring its weights) and records itself onto a tape.

mod attention;
mod block;
mod compressed;
mod config;
mod experts;
mod hyper;
mod linear;
mod mla;
mod mlp;
mod moe;
mod norm;
mod rope;

pub use attention::{Attention, AttentionDims, HeadGating, QkNorm};
pub use block::{Block, FeedForward, Mixer};
pub use compressed::{Compressed, CompressedDims, Compressor};
pub use config::Config;
pub use experts::{ExpertDims, Experts, Stacking};
pub use hyper::{HyperHead, HyperSite, Streams};
pub use linear::Linear;
pub use mla::{Mla, MlaDims, MlaForm, MlaParts};
pub use mlp::GatedMlp;
pub use moe::{Moe, Router};
pub use norm::RmsNorm;
pub use rope::{RopeParameters, Ropes};
