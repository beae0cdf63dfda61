//! What the processor and its memory are, for people and for plans.

use std::sync::OnceLock;

/// The processor's name as it gives it itself, such as `AMD EPYC 9654 96-Core Processor`; else the architecture.
pub fn name() -> &'static str {
    static NAME: OnceLock<String> = OnceLock::new();
    NAME.get_or_init(|| brand().unwrap_or_else(|| std::env::consts::ARCH.to_string()))
}

#[cfg(target_arch = "x86_64")]
fn brand() -> Option<String> {
    use std::arch::x86_64::__cpuid;
    // The name is three leaves of 16 bytes each, where the processor has them.
    if __cpuid(0x8000_0000).eax < 0x8000_0004 {
        return None;
    }
    let bytes: Vec<u8> = (0x8000_0002..=0x8000_0004)
        .map(__cpuid)
        .flat_map(|leaf| [leaf.eax, leaf.ebx, leaf.ecx, leaf.edx])
        .flat_map(u32::to_le_bytes)
        .collect();
    let text: String = String::from_utf8_lossy(&bytes).chars().filter(|c| !c.is_control()).collect();
    let words: Vec<&str> = text.split_whitespace().collect();
    (!words.is_empty()).then(|| words.join(" "))
}

#[cfg(not(target_arch = "x86_64"))]
fn brand() -> Option<String> {
    None
}

/// Bytes this process may take in all and may still take, as far as the system says.
pub fn memory() -> (Option<u64>, Option<u64>) {
    let text = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    // A container may allow less than the machine has.
    let allowed = std::fs::read_to_string("/sys/fs/cgroup/memory.max").ok().and_then(|text| text.trim().parse().ok());
    // `MemAvailable` counts pages of files that can be given up.
    let bytes = |field| kilobytes(&text, field).map(|bytes| bytes.min(allowed.unwrap_or(u64::MAX)));
    (bytes("MemTotal:"), bytes("MemAvailable:"))
}

/// A field of `/proc/meminfo`, in bytes.
fn kilobytes(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_the_system_are_read() {
        let text = "MemTotal: 9 kB\nMemAvailable:   24 kB\n";
        assert_eq!([kilobytes(text, "MemAvailable:"), kilobytes(text, "MemTotal:")], [Some(24 * 1024), Some(9 * 1024)]);
        assert_eq!(kilobytes("MemTotal: 9 kB\n", "MemAvailable:"), None);
        assert_eq!(kilobytes("MemTotal: 99999999999999999999 kB\n", "MemTotal:"), None);
    }

    #[test]
    fn the_processor_has_a_name() {
        assert!(!name().is_empty() && !name().contains('\0'));
        let (total, free) = memory();
        assert!(free <= total || total.is_none());
    }
}
