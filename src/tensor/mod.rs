//! Element types, shapes and borrowed tensors: how bytes from a file are named before anybody computes with them.

mod dtype;
mod view;

pub use dtype::DType;
pub use view::{RowMap, TensorView};
