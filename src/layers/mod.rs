//! Layers, named by their mechanism. A layer is built from a config (declaring its weights) and records itself onto a tape.

mod attention;
mod block;
mod config;
mod linear;
mod mla;
mod mlp;
mod norm;
mod rope;

pub use attention::{Attention, AttentionDims, QkNorm};
pub use block::Block;
pub use config::Config;
pub use linear::Linear;
pub use mla::{Mla, MlaDims, MlaForm, MlaParts};
pub use mlp::GatedMlp;
pub use norm::RmsNorm;
pub use rope::{RopeParameters, Ropes};
