//! Checkpoints: finding the files, checking every length in them, and handing out tensors under one set of names.
//!
//! Two containers are read, safetensors folders (single or sharded) and GGUF files; what GGUF files of an architecture
//! do differently is data in `dialect`, what quantised safetensors do is a table in `scheme`. Opening costs the headers only; tensor bytes stay in the mapped files until
//! somebody reads them. A file is taken at its word nowhere: each count, length and offset is compared with the file's
//! size before it is used, and every error names file, thing and byte offset.

mod declare;
mod decode;
pub mod detect;
mod dialect;
mod folder;
pub mod gguf;
mod headers;
mod index;
mod input;
mod json;
mod native;
mod regroup;
mod safetensors;
mod scheme;
mod source;
mod store;

pub use declare::{Declarations, Part, Pick, Role, Source, WeightSpec};
pub use decode::to_f32;
pub use folder::Folder;
pub use gguf::Gguf;
pub use input::{Input, ReadAt, Reading};
pub use json::parse as parse_json;
pub use regroup::regroup;
pub use scheme::{CodeForm, Form, Piece, Stored};
pub use source::{Access, Source as FileBytes};
pub use store::{Checkpoint, Description};

use crate::tensor::DType;
use std::ops::Range;

/// A tensor as a file's header describes it, checked against the file's size.
#[derive(Clone, Debug, PartialEq)]
pub struct TensorInfo {
    /// Name in the file.
    pub name: String,
    /// Element type.
    pub dtype: DType,
    /// Dimensions, outermost first.
    pub shape: Vec<usize>,
    /// Where its bytes lie in the file.
    pub range: Range<usize>,
}
