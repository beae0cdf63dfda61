//! Circuits: what a model records, and how that becomes a program.
//!
//! [`Tape`] records operations on named values; [`lower`] connects the forms of activations that weight formats want;
//! [`fuse`] rewrites neighbours (each rule exact or checked against the reference); [`split`] lets threads share a far query; [`Layout`] gives
//! every value a place in one workspace; [`Program`] runs the operations in order on the worker pool. [`cut`] parts a circuit, so that the layers
//! a device has no room for stay on the processor, [`set_aside`] does so with operations amid them, and [`Segments`] are the programs of all parts. [`explain`] prints any stage as text.

mod ahead;
mod aside;
mod cut;
mod device;
mod device_weights;
mod dump;
mod found;
mod fuse;
mod fuse_device;
mod layout;
mod lower;
mod program;
mod rehearse;
mod segments;
mod split;
mod staging;
mod tape;

pub use aside::set_aside;
pub use cut::{Held, Parts, cut, held, stages};
pub use device::{DeviceWorkspace, Stop};
pub use device_weights::DeviceWeights;
pub use dump::explain;
pub use found::{Found, Keep};
pub use fuse::{RULES, Rule, fuse};
pub use fuse_device::fuse_for_device;
pub use layout::Layout;
pub use lower::{Needs, lower};
pub use program::{Outcome, Program, Progress, Workspace};
pub use rehearse::Rehearsal;
pub use segments::Segments;
pub use split::split;
pub use staging::{Pieces, Staging};
pub use tape::{Circuit, Declared, Node, Tape, ValueInfo};
