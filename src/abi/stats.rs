//! Numbers: what a sequence has done and holds, and what a model keeps between sequences.

use super::guard::guard;
use super::handle;
use super::status::metrale_status;
use super::types::{metrale_error, metrale_model, metrale_model_counts, metrale_seq, metrale_stats};
use super::versioned;
use std::time::Duration;

/// Fills `*out` with what the sequence has done since it was made and the memory it holds now; `out->struct_size` must be set. Safe beside
/// other calls that take a const sequence.
///
/// Statuses: `METRALE_BUSY`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_seq_stats(seq: *const metrale_seq, out: *mut metrale_stats, err: *mut *mut metrale_error) -> metrale_status {
    guard(err, || {
        let out = versioned::out(out)?;
        let object = handle::get(seq)?;
        let state = object.shared()?;
        let (counters, held) = (state.sequence.counters(), state.sequence.held());
        out.set(&metrale_stats {
            struct_size: size_of::<metrale_stats>(),
            read: counters.read,
            reused: counters.reused,
            generated: counters.generated,
            passes: counters.passes,
            cancelled: counters.cancelled,
            prefill_ns: nanoseconds(counters.prefill),
            decode_ns: nanoseconds(counters.decode),
            kv_owned: held.kv_owned,
            kv_shared: held.kv_shared,
            state_owned: held.state_owned,
            state_shared: held.state_shared,
        });
        Ok(())
    })
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

/// Fills `*out` with what the model keeps of its sequences' beginnings and how often that served; `out->struct_size` must be set. Any
/// thread; waits for no computation.
///
/// Statuses: only those of arguments.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_model_stats(
    model: *const metrale_model,
    out: *mut metrale_model_counts,
    err: *mut *mut metrale_error,
) -> metrale_status {
    guard(err, || {
        let out = versioned::out(out)?;
        let counts = handle::get(model)?.engine().prefix_counts();
        out.set(&metrale_model_counts {
            struct_size: size_of::<metrale_model_counts>(),
            prefix_budget: counts.budget,
            prefix_bytes: counts.bytes,
            prefix_entries: counts.entries,
            prefix_tokens: counts.tokens,
            prefix_hits: counts.hits,
            prefix_misses: counts.misses,
            prefix_reused: counts.reused,
            prefix_evicted: counts.evicted,
        });
        Ok(())
    })
}
