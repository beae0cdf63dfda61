//! NVIDIA devices, through a driver that is looked for at run time: nothing here needs CUDA to build or to be installed.

#[cfg(feature = "cuda")]
mod device;
#[cfg(feature = "cuda")]
mod graph;
#[cfg(feature = "cuda")]
mod kernels;
pub mod launch;
#[cfg(feature = "cuda")]
mod measure;
#[cfg(feature = "cuda")]
mod memory;
#[cfg(feature = "cuda")]
mod nvrtc;
#[cfg(feature = "cuda")]
mod pack;
#[cfg(feature = "cuda")]
mod probe;
#[cfg(feature = "cuda")]
mod stream;
#[cfg(feature = "cuda")]
mod sys;

#[cfg(feature = "cuda")]
pub use device::Device;
#[cfg(feature = "cuda")]
pub use graph::Graph;
#[cfg(feature = "cuda")]
pub use kernels::{files, flat};
#[cfg(feature = "cuda")]
pub use measure::read_bandwidth;
#[cfg(feature = "cuda")]
pub use memory::{Block, Pinned};
#[cfg(feature = "cuda")]
pub use probe::{Info, Reason, devices};
#[cfg(feature = "cuda")]
pub use stream::{Event, Queue, Stream};
