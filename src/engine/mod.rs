//! The engine: loads a checkpoint, plans memory, runs sequences.
//!
//! [`Engine`] is the loaded model, immutable and shared; [`Sequence`] is one timeline of tokens with its state. [`forward`]
//! computes one more token for each of several sequences in one pass; [`step`] does as much of any work as fits a budget of time;
//! [`beam`] searches for the likeliest continuations. Models that translate read their source first, by [`Sequence::encode`].

mod ahead;
mod beam;
mod cancel;
mod chooser_bytes;
mod cost;
mod counters;
mod decode;
mod embed;
mod encode;
mod explain;
mod fault;
mod filling;
mod fingerprint;
mod forward;
pub mod generate;
mod info;
mod late;
mod layouts;
mod load;
mod loader;
mod making;
mod pack;
mod paged;
mod placement;
mod plan;
mod precision;
mod prefix;
mod preflight;
mod prepare;
mod queue;
mod runner;
mod scheduler;
mod sending;
mod sequence;
mod shift;
mod snapshot;
mod stored;
mod synthetic;
mod vocabulary;
mod warm;

pub use crate::cache::TreeCounts;
pub use beam::{BeamOptions, Hypothesis, beam};
pub use cancel::Canceller;
pub use chooser_bytes::SavedChooser;
pub use counters::{Counters, Held};
pub use decode::decode;
pub use embed::Pooling;
pub use explain::{Bodies, Captured, explain};
pub use fingerprint::Fingerprint;
pub use forward::forward;
pub use generate::{Chooser, decode_step};
pub use info::{Info, Probe, probe, probe_from};
pub use load::{Engine, load, load_from, load_with};
pub use loader::{Loader, Progress};
pub use plan::{Plan, plan, plan_from};
pub use precision::{Scheduled, precision};
pub use scheduler::{StepState, Stepped, step, step_estimate};
pub use sequence::{Mark, Sequence, SequenceOptions};
pub use snapshot::Snapshot;
pub use warm::warm;
