//! Whether a planned model fits: against the host's cap, or against what the machine has free.

use crate::backend::cpu::device;
use crate::backend::cuda::Device;
use crate::engine::plan::Plan;
use crate::error::{Error, Kind, Result};

/// Refuses a plan that does not fit, and says which context would. `cap` of 0 takes what the machine has free.
pub(crate) fn check(plan: &Plan, context: usize, cap: u64) -> Result<()> {
    let (limit, whose) = match cap {
        0 => match device::memory().1 {
            Some(bytes) => (bytes, "are free on this machine"),
            None => return Ok(()),
        },
        cap => (cap, "are allowed by the option memory"),
    };
    let total = plan.total();
    if total <= limit {
        return Ok(());
    }
    let rest = total.saturating_sub(plan.kv);
    let fitting = match plan.kv {
        0 => 0,
        kv => (u128::from(limit.saturating_sub(rest)) * context as u128 / u128::from(kv)) as usize,
    };
    let help = match fitting {
        0 => "a smaller or more quantised model is needed".to_string(),
        n => format!("with a context of {n} tokens it fits"),
    };
    let text = format!(
        "the model with one sequence of {context} tokens takes {}, {} {whose}: weights {}, cache {}, recurrent state {}, workspace {}, files in memory {}, other {}; {help}",
        size(total),
        size(limit),
        size(plan.weights),
        size(plan.kv),
        size(plan.state),
        size(plan.scratch),
        size(plan.source),
        size(plan.other)
    );
    Err(Error::new(Kind::OutOfMemory, text).named("memory").sizes(total, limit))
}

/// Bytes of a device that may be taken. `cap` of 0 takes what is free there.
pub(crate) fn device_limit(cap: u64, device: &Device) -> Result<u64> {
    if cap > 0 { Ok(cap) } else { Ok(device.memory()?.0) }
}

/// As [`check`] for what the plan puts on a device, which is `share` of the model. `cap` of 0 takes what is free there.
pub(crate) fn check_device(plan: &Plan, context: usize, cap: u64, device: &Device, share: &str) -> Result<()> {
    let (limit, whose) = (device_limit(cap, device)?, if cap > 0 { "are allowed by the option device_bytes" } else { "are free there" });
    let (parts, total) = (&plan.device, plan.device.total());
    if total <= limit {
        return Ok(());
    }
    let text = format!(
        "{share} with one sequence of {context} tokens takes {} of {}, {} {whose}: weights {}, cache {}, state {}, workspaces {}",
        size(total),
        device.info().name,
        size(limit),
        size(parts.weights),
        size(parts.kv),
        size(parts.state),
        size(parts.scratch),
    );
    Err(Error::new(Kind::OutOfMemory, text).named("device_bytes").sizes(total, limit))
}

/// Bytes for people.
fn size(bytes: u64) -> String {
    match bytes {
        0..1_048_576 => format!("{} KiB", bytes.div_ceil(1024)),
        1_048_576..1_073_741_824 => format!("{} MiB", bytes.div_ceil(1 << 20)),
        _ => format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_over_the_cap_names_a_context_that_fits() {
        let plan = Plan { weights: 600, kv: 1000, scratch: 100, ..Plan::default() };
        assert!(check(&plan, 100, 1700).is_ok());
        let e = check(&plan, 100, 1200).unwrap_err();
        assert_eq!((e.kind(), e.wanted(), e.available()), (Kind::OutOfMemory, Some(1700), Some(1200)));
        assert!(e.message().contains("context of 50 tokens it fits"), "{e}");
        assert!(check(&plan, 100, 700).unwrap_err().message().contains("smaller"));
        assert!(check(&Plan { weights: u64::MAX, kv: u64::MAX, ..plan }, 100, 1200).is_err());
    }
}
