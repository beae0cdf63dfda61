//! NVIDIA devices, through a driver that is looked for at run time: nothing here needs CUDA to build or to be installed.

pub mod launch;

/// All launches of a kernel in a time that was measured.
#[derive(Clone, Debug, PartialEq)]
pub struct KernelTime {
    /// The kernel's name.
    pub name: &'static str,
    /// How often it was launched.
    pub launches: usize,
    /// Milliseconds, all together.
    pub milliseconds: f64,
}

#[cfg(not(feature = "cuda"))]
mod absent;
#[cfg(not(feature = "cuda"))]
pub use absent::{Block, Device, Event, Graph, Info, Pinned, Queue, Reason, Stream, devices};

#[cfg(feature = "cuda")]
mod device;
#[cfg(feature = "cuda")]
mod graph;
#[cfg(feature = "cuda")]
mod kernels;
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
mod times;

#[cfg(feature = "cuda")]
pub use self::{
    device::Device,
    graph::Graph,
    kernels::{files, flat},
    measure::read_bandwidth,
    memory::{Block, Pinned},
    probe::{Info, Reason, devices},
    stream::{Event, Queue, Stream},
};
