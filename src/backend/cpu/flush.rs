//! Subnormal numbers count as zero while kernels run.
//!
//! A subnormal operand costs a hundred cycles on common processors; a matrix with a few of them runs 25 times slower. The guard sets
//! flush-to-zero and denormals-are-zero for the current thread and puts the host's own setting back when it goes.
#![allow(unsafe_code)] // MXCSR has no safe interface.

/// Subnormals are zero on this thread until the guard is dropped. Not `Send`: it restores the thread that made it.
pub struct FlushGuard {
    #[cfg(target_arch = "x86_64")]
    saved: u32,
    _thread: std::marker::PhantomData<*const ()>,
}

/// Flush-to-zero (bit 15) and denormals-are-zero (bit 6).
#[cfg(target_arch = "x86_64")]
const FLUSH: u32 = 1 << 15 | 1 << 6;

impl FlushGuard {
    /// Starts flushing on this thread.
    #[allow(clippy::new_without_default)]
    pub fn new() -> FlushGuard {
        #[cfg(target_arch = "x86_64")]
        {
            let saved = read();
            write(saved | FLUSH);
            FlushGuard { saved, _thread: std::marker::PhantomData }
        }
        #[cfg(not(target_arch = "x86_64"))]
        FlushGuard { _thread: std::marker::PhantomData }
    }
}

impl Drop for FlushGuard {
    fn drop(&mut self) {
        // The sticky exception flags raised inside are dropped with the rest: the host sees the register it had.
        #[cfg(target_arch = "x86_64")]
        write(self.saved);
    }
}

#[cfg(target_arch = "x86_64")]
fn read() -> u32 {
    let mut value = 0u32;
    // SAFETY: stmxcsr stores four bytes at the address of `value` and does nothing else.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &mut value, options(nostack, preserves_flags)) };
    value
}

#[cfg(target_arch = "x86_64")]
fn write(value: u32) {
    // SAFETY: `value` came from `read` with two architected bits added, so no reserved bit is set and ldmxcsr cannot fault.
    unsafe { std::arch::asm!("ldmxcsr [{}]", in(reg) &value, options(nostack, preserves_flags)) };
}

#[cfg(all(test, target_arch = "x86_64"))]
mod tests {
    use super::*;
    use std::hint::black_box;

    #[test]
    fn subnormals_vanish_inside_and_return_after() {
        let half = |x: f32| black_box(x) * black_box(0.5);
        assert_ne!(half(f32::MIN_POSITIVE), 0.0);
        let before = read();
        {
            let _guard = FlushGuard::new();
            assert_eq!(half(f32::MIN_POSITIVE), 0.0);
            assert_eq!(black_box(f32::from_bits(1)) * black_box(1e30), 0.0);
        }
        assert_eq!(read(), before);
        assert_ne!(half(f32::MIN_POSITIVE), 0.0);
    }
}
