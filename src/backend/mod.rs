//! Devices: where memory lives and where the arithmetic runs. Nothing above this module names an instruction set.

pub mod cpu;
pub mod cuda;
