//! The processor as a device: worker pool, huge-page memory, packed weights, and kernels chosen once for the CPU at hand.
//!
//! One promise shapes everything here: an output element is reduced in one order (k ascending), which does not depend on how many
//! rows are computed together, how the work is cut, or how many threads cut it. So one row and many rows run the same inner loop
//! over the same packed weights, and results are equal bit for bit.

pub mod activations;
pub mod arena;
pub mod crew;
pub mod device;
pub mod flush;
pub mod late;
mod meeting;
pub mod pack;
pub mod parallel_for;
pub mod pause;
pub mod pool;
mod post;
mod processors;
pub mod simd;
mod wait;
mod worker;

pub use activations::{Activations, Epilogue, Q8Block};
pub use arena::Buffer;
pub use crew::Crew;
pub use pack::{CodeRow, Layout, Packed};
pub use parallel_for::{ParallelFor, attend};
pub use pool::{Pool, Team, Worker};
pub use processors::available_threads;
pub use simd::{Table, table, tables};

pub(crate) use wait::{lock, lock_unless, wait_until};
