//! What kernels take, one by one: an event before and one after each, so none begins early and sums are more than a run takes without.

use super::KernelTime;
use super::stream::{Event, Stream};
use crate::error::{Result, reserve};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Launches since timing began; none while kernels are not timed.
#[derive(Default)]
pub(super) struct Times(Mutex<Option<Vec<(&'static str, [Event; 2])>>>);

impl Times {
    fn lock(&self) -> MutexGuard<'_, Option<Vec<(&'static str, [Event; 2])>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Launches by `launch`, between two events if kernels are timed.
    pub fn around(&self, stream: &Stream, name: &'static str, launch: impl FnOnce() -> Result<()>) -> Result<()> {
        let mut marks = self.lock();
        let Some(marks) = &mut *marks else { return launch() };
        let event = || Event::new(stream.device(), true);
        let (before, after) = (event()?, event()?);
        before.record(stream)?;
        launch()?;
        after.record(stream)?;
        reserve(marks, 1, "the times of kernels")?;
        marks.push((name, [before, after]));
        Ok(())
    }
}

impl Stream {
    /// Begins to time kernels that are queued one by one: those of a graph are not.
    pub fn time_kernels(&self) {
        *self.times.lock() = Some(Vec::new());
    }

    /// Whether kernels are timed.
    pub fn times_kernels(&self) -> bool {
        self.times.lock().is_some()
    }

    /// Ends timing: what each kernel took, most first.
    pub fn kernel_times(&self) -> Result<Vec<KernelTime>> {
        let marks = self.times.lock().take().unwrap_or_default();
        self.synchronize()?;
        let mut sums: BTreeMap<&'static str, KernelTime> = BTreeMap::new();
        for (name, [before, after]) in &marks {
            let sum = sums.entry(name).or_insert(KernelTime { name, launches: 0, milliseconds: 0.0 });
            sum.launches += 1;
            sum.milliseconds += f64::from(after.since(before)?);
        }
        let mut all: Vec<KernelTime> = sums.into_values().collect();
        all.sort_by(|a, b| b.milliseconds.total_cmp(&a.milliseconds));
        Ok(all)
    }
}
