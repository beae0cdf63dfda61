//! The C surface: one file per noun, each function five to twenty lines.
//!
//! `guard` is the wall every body runs behind, `handle` decides what a handle is, `pointer` and `versioned` turn raw
//! arguments into values. The doc comments of the exported functions are the manual: cbindgen copies them into
//! `include/metrale.h`.

#![allow(unsafe_code)] // C pointers end here: every other module sees references.
#![allow(non_camel_case_types)]
// The names are C's.
// An exported function follows raw pointers that its caller vouches for; its doc comment is the contract, and marking
// all of them `unsafe` would not tell a C caller anything.
#![allow(clippy::not_unsafe_ptr_arg_deref)]

mod device;
mod embed;
mod error;
mod grammar;
mod guard;
mod handle;
mod library;
mod load;
mod loading;
mod model;
mod plan;
mod pointer;
mod quiet;
mod results;
mod runtime;
mod runtime_types;
mod sampler;
mod sequence;
mod small;
mod source;
mod state;
mod stats;
mod status;
mod step;
mod text;
mod tokenize;
mod translate;
mod types;
mod versioned;
mod work;
mod workers;

pub use device::*;
pub use embed::*;
pub use error::*;
pub use grammar::*;
pub use library::*;
pub use load::*;
pub use loading::*;
pub use model::*;
pub use plan::*;
pub use results::*;
pub use runtime::*;
pub use sampler::*;
pub use sequence::*;
pub use source::*;
pub use state::*;
pub use stats::*;
pub use status::*;
pub use step::*;
pub use text::*;
pub use tokenize::*;
pub use translate::*;
pub use types::*;
pub use work::*;
pub use workers::*;

/// A C string of a text; a NUL inside becomes U+FFFD, so that nothing after it is lost.
fn c_string(text: &str) -> std::ffi::CString {
    let bytes = if text.contains('\0') { text.replace('\0', "\u{fffd}") } else { text.to_owned() };
    std::ffi::CString::new(bytes).unwrap_or_default()
}

#[cfg(test)]
mod tests;
