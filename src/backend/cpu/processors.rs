//! How many processors there are for the threads that compute.
#![allow(unsafe_code)] // The affinity mask has no safe interface.

/// Processors the calling thread may use: its affinity mask, further limited by the quota of its control groups. At least 1.
pub fn available_threads() -> usize {
    // The standard library looks at sched_getaffinity and at cgroup v2 and v1 quotas.
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// The processors that several threads may use together.
#[derive(Default)]
pub(super) struct Processors {
    mask: [u64; 16],
    /// What the control groups leave; the same for every thread of a process.
    quota: Option<usize>,
}

impl Processors {
    /// Adds those of the calling thread.
    pub(super) fn add_own(&mut self) {
        let available = available_threads();
        let own = own_mask();
        // A mask that cannot be read counts like one without gaps; where masks are finer than the quota, the quota decides.
        let mask = own.unwrap_or_else(|| first(available));
        if available < count(&mask) {
            self.quota = Some(available);
        }
        self.mask.iter_mut().zip(mask).for_each(|(all, own)| *all |= own);
    }

    /// How many there are; at least 1.
    pub(super) fn count(&self) -> usize {
        count(&self.mask).min(self.quota.unwrap_or(usize::MAX)).max(1)
    }
}

fn count(mask: &[u64; 16]) -> usize {
    mask.iter().map(|word| word.count_ones() as usize).sum()
}

/// A mask of the first `n` processors.
fn first(n: usize) -> [u64; 16] {
    std::array::from_fn(|word| match n.saturating_sub(word * 64) {
        0 => 0,
        bits if bits < 64 => (1 << bits) - 1,
        _ => u64::MAX,
    })
}

/// The affinity mask of this thread, unless the machine has more processors than fit.
#[cfg(target_os = "linux")]
fn own_mask() -> Option<[u64; 16]> {
    let mut mask = [0u64; 16];
    // SAFETY: the call writes at most the given number of bytes to the array; thread 0 is the calling one.
    let done = unsafe { libc::sched_getaffinity(0, size_of_val(&mask), mask.as_mut_ptr().cast()) };
    (done == 0).then_some(mask)
}

#[cfg(not(target_os = "linux"))]
fn own_mask() -> Option<[u64; 16]> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn masks_are_counted_once() {
        assert_eq!([0, 1, 63, 64, 65, 1000, 5000].map(|n| count(&first(n))), [0, 1, 63, 64, 65, 1000, 1024]);
        let mut both = Processors::default();
        assert_eq!(both.count(), 1);
        both.add_own();
        let one = both.count();
        assert_eq!(one, available_threads());
        both.add_own();
        std::thread::scope(|s| s.spawn(|| both.add_own()).join().unwrap());
        assert_eq!(both.count(), one);
    }
}
