//! NVIDIA devices, through a driver that is looked for at run time: nothing here needs CUDA to build or to be installed.

pub mod launch;
