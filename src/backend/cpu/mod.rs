//! The processor as a device: worker pool, huge-page memory, packed weights, and kernels chosen once for the CPU at hand.
//!
//! One promise shapes everything here: an output element is reduced in one order (k ascending), which does not depend on how many
//! rows are computed together, how the work is cut, or how many threads cut it. So one row and many rows run the same inner loop
//! over the same packed weights, and results are equal bit for bit.

pub mod activations;
pub mod arena;
mod barrier;
pub mod flush;
pub mod pack;
pub mod pause;
pub mod pool;
pub mod simd;

pub use activations::{Activations, Epilogue, Q8Block};
pub use arena::Buffer;
pub use pack::{CodeRow, Layout, Packed};
pub use pool::{Pool, Worker, available_threads};
pub use simd::{Table, table, tables};
