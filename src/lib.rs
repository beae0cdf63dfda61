//! metrale: a language model inside your own process.
//!
//! Layers *record* operations onto a tape; the recorded circuit is fused, laid out in one workspace and becomes a
//! straight-line program that the CPU (or a GPU) runs. Modules import only from the left of this list:
//! `runtime error options tensor` < `backend text` < `quant` < `ops` < `circuit` < `weights cache sampling` < `layers` <
//! `model` < `families` < `engine` < `abi`.

pub mod abi;
pub mod backend;
pub mod cache;
pub mod circuit;
pub mod engine;
pub mod error;
pub mod families;
pub mod layers;
pub mod model;
pub mod ops;
pub mod options;
pub mod quant;
pub mod runtime;
pub mod sampling;
pub mod tensor;
pub mod text;
pub mod weights;
