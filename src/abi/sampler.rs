//! Samplers: recipes for choosing tokens.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use super::guard::{guard, guard_value};
use super::handle;
use super::pointer;
use super::status::{self, metrale_status};
use super::types::*;
use crate::ensure;
use crate::error::{self, Error, Kind, Result};
use crate::sampling::{Dry, Hook, Mirostat, Sampler, Stage};

/// A recipe; sequences copy it.
pub(super) struct SamplerObject {
    sampler: Mutex<Sampler>,
}

impl SamplerObject {
    /// A fresh copy with the recipe's own seed.
    pub(super) fn copy(&self) -> Sampler {
        self.sampler.lock().unwrap_or_else(PoisonError::into_inner).clone()
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
        out.set(handle::insert(Arc::new(SamplerObject { sampler: Mutex::new(sampler) }))?);
        Ok(())
    })
}

/// Says what the stages `METRALE_STAGE_HOOK` of a sampler do: `hook` is called with `user`, see `metrale_hook_fn`; NULL takes it away.
/// Sequences that get the sampler from now on have it, until they get another; those that have a copy keep what they have. So both
/// pointers must stay valid until those sequences, and forks and marks of them, are gone or have another sampler. One function may be
/// called on several threads at once, for sequences that are stepped there. A sequence does not take a sampler with such a stage and no
/// hook. Any thread.
///
/// Statuses: `METRALE_INVALID_STATE` (the sampler has no such stage).
#[unsafe(no_mangle)]
pub extern "C" fn metrale_sampler_set_hook(
    sampler: *mut metrale_sampler,
    hook: metrale_hook_fn,
    user: *mut c_void,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || {
        let object = handle::get(sampler)?;
        let mut sampler = object.sampler.lock().unwrap_or_else(PoisonError::into_inner);
        ensure!(sampler.wants_hook(), InvalidState, "no stage of the sampler is METRALE_STAGE_HOOK, so the hook would never be called");
        sampler.set_hook(hook.map(|function| Arc::new(HostHook { function, user }) as Arc<dyn Hook>));
        Ok(())
    })
}

/// The host's function.
struct HostHook {
    function: unsafe extern "C" fn(*mut c_void, *mut f32, usize, *const metrale_token, usize) -> i32,
    user: *mut c_void,
}

// SAFETY: the host promises that its function may be called from any thread that steps, with the pointer it gave.
unsafe impl Send for HostHook {}
// SAFETY: as above.
unsafe impl Sync for HostHook {}

impl Hook for HostHook {
    fn call(&self, row: &mut [f32], history: &[i32]) -> Result<()> {
        // SAFETY: both slices live during the call, and only the row is written; the host promises to return.
        let result = unsafe { (self.function)(self.user, row.as_mut_ptr(), row.len(), history.as_ptr(), history.len()) };
        if result == 0 {
            return Ok(());
        }
        let kind = status::kind(result).unwrap_or(Kind::Cancelled);
        Err(Error::new(kind, format!("the host's hook returned {result}")).named("hook"))
    }
}

/// Frees a sampler; sequences that use it have their own copy. NULL and handles that are none are ignored. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_sampler_free(sampler: *mut metrale_sampler) {
    guard_value((), || handle::remove(sampler).map(drop))
}

/// Reads one stage, and refuses what its kind does not use: a value in the wrong field would otherwise do nothing.
fn stage(host: &metrale_sampler_stage) -> Result<Stage> {
    let metrale_sampler_stage { kind, count, token, value, second, length, reserved } = *host;
    let window = count;
    let (stage, uses) = match kind {
        METRALE_STAGE_GREEDY => (Stage::Greedy, ""),
        METRALE_STAGE_TEMPERATURE => (Stage::Temperature(value), "value"),
        METRALE_STAGE_TOP_K => (Stage::TopK(count), "count"),
        METRALE_STAGE_TOP_P => (Stage::TopP(value), "value"),
        METRALE_STAGE_MIN_P => (Stage::MinP(value), "value"),
        METRALE_STAGE_REPETITION => (Stage::Repetition { penalty: value, window }, "count value"),
        METRALE_STAGE_PRESENCE => (Stage::Presence { penalty: value, window }, "count value"),
        METRALE_STAGE_FREQUENCY => (Stage::Frequency { penalty: value, window }, "count value"),
        METRALE_STAGE_BIAS => (Stage::Bias { token, value }, "token value"),
        METRALE_STAGE_TYPICAL => (Stage::Typical(value), "value"),
        METRALE_STAGE_TOP_N_SIGMA => (Stage::TopNSigma(value), "value"),
        METRALE_STAGE_XTC => (Stage::Xtc { threshold: value, probability: second }, "value second"),
        METRALE_STAGE_MIROSTAT => {
            (Stage::Mirostat(Mirostat { version: 1, target: value, rate: second, looked_at: count }), "count value second")
        }
        METRALE_STAGE_MIROSTAT_V2 => (Stage::Mirostat(Mirostat { version: 2, target: value, rate: second, looked_at: 0 }), "value second"),
        METRALE_STAGE_DRY => (Stage::Dry(Dry { multiplier: value, base: second, allowed: length, window }), "count value second length"),
        METRALE_STAGE_DRY_BREAKER => (Stage::DryBreaker(token), "token"),
        METRALE_STAGE_HOOK => (Stage::Hook, ""),
        other => return Err(Error::new(Kind::UnknownOption, format!("there is no stage kind {other}")).named("kind")),
    };
    let set = [
        ("count", count != 0),
        ("token", token != 0),
        ("value", value.to_bits() != 0),
        ("second", second.to_bits() != 0),
        ("length", length != 0),
        ("reserved", reserved != [0; 2]),
    ];
    match set.iter().find(|(field, set)| *set && !uses.split(' ').any(|used| used == *field)) {
        Some((field, _)) => Err(Error::new(Kind::InvalidArgument, format!("{field} is set, but {stage:?} does not use it")).named(*field)),
        None => Ok(stage),
    }
}
