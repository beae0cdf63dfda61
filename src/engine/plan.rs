//! The memory plan: bytes by class, from headers and config alone.

use super::prepare::Prepared;
use crate::error::Result;
use crate::options::LoadOptions;
use crate::weights::{Access, Input, Reading};
use std::path::Path;

/// Bytes of host memory by class, and of a device's. Mapped files do not count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct Plan {
    /// Packed weights and vectors.
    pub weights: u64,
    /// Key/value pages of the sequences.
    pub kv: u64,
    /// Recurrent states of the sequences.
    pub state: u64,
    /// Workspace of the largest step.
    pub scratch: u64,
    /// Rows of logits, tokenizer, tables.
    pub other: u64,
    /// Files that were read into memory, or copied.
    pub source: u64,
    /// What is on the device that computes, where that is not the processor.
    pub device: DevicePlan,
}

/// Bytes of a device's memory by class.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
pub struct DevicePlan {
    /// Packed weights and vectors.
    pub weights: u64,
    /// Key/value pages of the sequences.
    pub kv: u64,
    /// Recurrent states and rows of logits of the sequences.
    pub state: u64,
    /// Workspaces.
    pub scratch: u64,
}

impl DevicePlan {
    /// Sum of the classes.
    pub fn total(&self) -> u64 {
        [self.kv, self.state, self.scratch].into_iter().fold(self.weights, u64::saturating_add)
    }
}

impl Plan {
    /// Sum of the classes.
    pub fn total(&self) -> u64 {
        [self.kv, self.state, self.scratch, self.other, self.source].into_iter().fold(self.weights, u64::saturating_add)
    }
}

/// Plans `path` for `sequences` sequences of the context limit. Reads headers only.
pub fn plan(path: &Path, options: &LoadOptions, sequences: usize) -> Result<Plan> {
    plan_from(Input::path(path, Access::Map)?, options, sequences)
}

/// As [`plan`], from wherever the bytes come.
pub fn plan_from(input: Input, options: &LoadOptions, sequences: usize) -> Result<Plan> {
    Prepared::of(Reading::headers(input, options.synthetic.is_some())?, options)?.plan(sequences)
}
