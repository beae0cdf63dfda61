//! Samplers: recipes for choosing tokens.

use std::sync::Arc;

use super::guard::{guard, guard_value};
use super::handle;
use super::pointer;
use super::status::metrale_status;
use super::types::*;
use crate::error::{self, Error, Kind, Result};
use crate::sampling::{Sampler, Stage};

/// A recipe; sequences copy it.
pub(super) struct SamplerObject {
    sampler: Sampler,
}

impl SamplerObject {
    /// A fresh copy with the recipe's own seed.
    pub(super) fn copy(&self) -> Sampler {
        self.sampler.clone()
    }
}

/// Makes a sampler of `count` stages, which run in the given order on every row of logits; then a token is drawn from
/// what is left, in proportion to its probability. No stage at all is greedy. Draws depend on `seed` alone: the same
/// seed gives the same tokens. The stages are copied. On success `*out` is a handle for `metrale_sampler_free`. Any
/// thread.
///
/// Statuses: `METRALE_INVALID_ARGUMENT` or `METRALE_UNKNOWN_OPTION` with the index of the stage.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_sampler_new(
    stages: *const metrale_sampler_stage,
    count: usize,
    seed: u64,
    out: *mut *mut metrale_sampler,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || {
        let out = pointer::out(out, "out")?;
        let host = pointer::slice(stages, count, "stages")?;
        let mut stages = error::vec_with_capacity(host.len(), "sampler stages")?;
        for (index, host) in host.iter().enumerate() {
            stages.push(stage(host).map_err(|e| e.context(format!("stage {index}")).at(index as u64))?);
        }
        let sampler = Sampler::new(&stages, seed)?;
        out.set(handle::insert(Arc::new(SamplerObject { sampler }))?);
        Ok(())
    })
}

/// Frees a sampler; sequences that use it have their own copy. NULL and handles that are none are ignored. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_sampler_free(sampler: *mut metrale_sampler) {
    guard_value((), || handle::remove(sampler).map(drop))
}

/// Reads one stage, and refuses what its kind does not use: a value in the wrong field would otherwise do nothing.
fn stage(host: &metrale_sampler_stage) -> Result<Stage> {
    let metrale_sampler_stage { kind, count, token, value, reserved } = *host;
    let (stage, uses_count, uses_token, uses_value) = match kind {
        METRALE_STAGE_GREEDY => (Stage::Greedy, false, false, false),
        METRALE_STAGE_TEMPERATURE => (Stage::Temperature(value), false, false, true),
        METRALE_STAGE_TOP_K => (Stage::TopK(count), true, false, false),
        METRALE_STAGE_TOP_P => (Stage::TopP(value), false, false, true),
        METRALE_STAGE_MIN_P => (Stage::MinP(value), false, false, true),
        METRALE_STAGE_REPETITION => (Stage::Repetition { penalty: value, window: count }, true, false, true),
        METRALE_STAGE_PRESENCE => (Stage::Presence { penalty: value, window: count }, true, false, true),
        METRALE_STAGE_FREQUENCY => (Stage::Frequency { penalty: value, window: count }, true, false, true),
        METRALE_STAGE_BIAS => (Stage::Bias { token, value }, false, true, true),
        other => return Err(Error::new(Kind::UnknownOption, format!("there is no stage kind {other}")).named("kind")),
    };
    let unused = [
        ("count", !uses_count && count != 0),
        ("token", !uses_token && token != 0),
        ("value", !uses_value && value.to_bits() != 0),
        ("reserved", reserved != [0; 4]),
    ];
    match unused.iter().find(|(_, set)| *set) {
        Some((field, _)) => Err(Error::new(Kind::InvalidArgument, format!("{field} is set, but {stage:?} does not use it")).named(*field)),
        None => Ok(stage),
    }
}
