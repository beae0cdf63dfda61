//! Layers, named by their mechanism. A layer is built from a config (declaring its weights) and records itself onto a tape.

mod attention;
mod block;
mod compressed;
mod config;
mod conv;
mod delta_net;
mod experts;
mod hyper;
mod kda;
mod linear;
mod mamba2;
mod mla;
mod mlp;
mod moe;
mod norm;
mod rope;
mod short_conv;

pub use attention::{Attention, AttentionDims, AttentionNames, HeadGating, QkNorm, Values};
pub use block::{Block, FeedForward, Mixer, OnePart, Part};
pub use compressed::{Compressed, CompressedDims, Compressor};
pub use config::Config;
pub use conv::CausalConv;
pub use delta_net::{DeltaNet, DeltaNetDims, DeltaNetTensors};
pub use experts::{ExpertDims, Experts, Stacking};
pub use hyper::{HyperHead, HyperSite, Streams};
pub use kda::{Kda, KdaDims};
pub use linear::Linear;
pub use mamba2::{Mamba2, Mamba2Dims};
pub use mla::{Mla, MlaDims, MlaForm, MlaParts};
pub use mlp::GatedMlp;
pub use moe::{Latent, Moe, Router};
pub use norm::RmsNorm;
pub use rope::{RopeParameters, Ropes};
pub use short_conv::ShortConv;
