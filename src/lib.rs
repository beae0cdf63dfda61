//! metrale: a language model inside your own process.
//!
//! Most hosts use the C library, `libmetrale.so` with `metrale.h`. This is the same engine for programs in Rust: the model is an
//! [`engine::Engine`], loaded once and shared; a timeline of tokens with all its state is an [`engine::Sequence`].
//!
//! ```
//! use metrale::engine::{self, Chooser, Sequence, SequenceOptions};
//! use metrale::options::LoadOptions;
//! use metrale::sampling::Sampler;
//! use metrale::text::{StreamOptions, TextStream};
//!
//! # fn main() -> metrale::error::Result<()> {
//! let model = engine::load("tests/fixtures/stories260k/model.gguf".as_ref(), &LoadOptions::default(), None)?;
//! let tokenizer = model.tokenizer()?;
//! let mut sequence = Sequence::new(&model, &SequenceOptions::default())?;
//! sequence.prefill(&tokenizer.encode("Once upon a time", true, false)?)?;
//!
//! let mut chooser = Chooser::new(Sampler::greedy());
//! let mut text = TextStream::new(tokenizer.clone(), &["."], StreamOptions::default())?;
//! let mut story = Vec::new();
//! loop {
//!     let mut token = [0];
//!     if engine::decode_step(&mut [&mut sequence], &mut [&mut chooser], &mut token)? {
//!         break; // the model ended
//!     }
//!     let piece = text.push(token[0])?;
//!     story.extend(piece.bytes);
//!     if piece.stopped.is_some() {
//!         break;
//!     }
//! }
//! assert_eq!(story, b", there was a little girl named Lily");
//! # Ok(())
//! # }
//! ```
//!
//! `examples/generate.rs` is a whole program. What such programs use:
//!
//! | module | for |
//! | --- | --- |
//! | [`engine`] | loading, planning memory, sequences, steps of one ([`engine::decode_step`]) or of a budget of time ([`engine::step`]), embeddings, beam search |
//! | [`options`] | what a load may be told |
//! | [`text`] | tokens of a text, text of tokens, chat templates |
//! | [`sampling`] | how tokens are chosen: stages, hooks, grammars and JSON schemas |
//! | [`error`] | the one error: what kind, what about, found and expected |
//! | [`runtime`] | an allocator, a limit of memory and a log for models |
//!
//! What the C interface promises holds here as well: a call that fails changes nothing, no input ends the process, and on the CPU the
//! same input gives the same bits, however it is batched or cut. The C interface is what stays; until 1.0 names here may change
//! with any minor version. A program that has a global allocator of its own turns the feature `reserve` off.
//!
//! # Inside
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
