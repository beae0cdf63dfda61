//! What the library is: version, build, names of statuses.

use std::ffi::{CString, c_char};
use std::sync::OnceLock;

use serde_json::json;

use super::c_string;
use super::guard::{guard, guard_value};
use super::status::{self, metrale_status};
use super::types::metrale_error;
use crate::error::{Error, Kind};

/// The shape of this header: the upper 16 bits change when old hosts stop working, the lower when something is added.
pub const METRALE_ABI_VERSION: u32 = 0x0001_0000;

/// One of the three parts of the package's version.
const fn part(text: &str) -> u32 {
    let (mut value, mut i) = (0, 0);
    while i < text.len() {
        value = value * 10 + (text.as_bytes()[i] - b'0') as u32;
        i += 1;
    }
    value
}

const VERSION: u32 =
    part(env!("CARGO_PKG_VERSION_MAJOR")) << 16 | part(env!("CARGO_PKG_VERSION_MINOR")) << 8 | part(env!("CARGO_PKG_VERSION_PATCH"));

/// The library's version, such as `"0.1.0"`. Static. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_version_string() -> *const c_char {
    const TEXT: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    TEXT.as_ptr().cast()
}

/// The library's version as `major << 16 | minor << 8 | patch`. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_version_number() -> u32 {
    VERSION
}

/// Whether a host compiled with this header can use this library: pass `METRALE_ABI_VERSION`. Worth calling first.
/// `METRALE_VERSION_MISMATCH` when it cannot. Any thread.
///
/// Statuses: `METRALE_VERSION_MISMATCH` with both versions in `wanted` and `available`.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_check_abi(header_version: u32, err: *mut *mut metrale_error) -> metrale_status {
    guard(err, || {
        if !fits(header_version, METRALE_ABI_VERSION) {
            let text = |v: u32| format!("{}.{}", v >> 16, v & 0xffff);
            let (host, ours) = (text(header_version), text(METRALE_ABI_VERSION));
            let message = format!("the host was compiled with header version {host}, this library provides {ours}");
            return Err(Error::new(Kind::VersionMismatch, message).sizes(header_version.into(), METRALE_ABI_VERSION.into()));
        }
        Ok(())
    })
}

/// Whether a library of version `ours` serves a host of version `host`: nothing was broken, nothing is missing.
fn fits(host: u32, ours: u32) -> bool {
    host >> 16 == ours >> 16 && host & 0xffff <= ours & 0xffff
}

/// How the library was built and what it found on this machine, as a JSON object: `version`, `abi`, `target`,
/// `profile`, `features`, `cpu` (instruction sets present). Static. Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_build_info() -> *const c_char {
    static TEXT: OnceLock<CString> = OnceLock::new();
    guard_value(c"{}".as_ptr(), || {
        let text = TEXT.get_or_init(|| {
            c_string(
                &json!({
                    "version": env!("CARGO_PKG_VERSION"),
                    "abi": METRALE_ABI_VERSION,
                    "target": format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS),
                    "profile": if cfg!(debug_assertions) { "debug" } else { "release" },
                    "features": features(),
                    "cpu": instruction_sets(),
                })
                .to_string(),
            )
        });
        Some(text.as_ptr())
    })
}

/// Parts of this build that another one might lack.
fn features() -> Vec<&'static str> {
    vec!["llguidance"]
}

#[cfg(target_arch = "x86_64")]
pub(super) fn instruction_sets() -> Vec<&'static str> {
    let present = [
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("f16c", is_x86_feature_detected!("f16c")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bw", is_x86_feature_detected!("avx512bw")),
        ("avx512vl", is_x86_feature_detected!("avx512vl")),
        ("avx512vnni", is_x86_feature_detected!("avx512vnni")),
        ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
    ];
    present.iter().filter(|(_, found)| *found).map(|(name, _)| *name).collect()
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) fn instruction_sets() -> Vec<&'static str> {
    Vec::new()
}

/// The name of a status constant, such as `"METRALE_BUSY"`; `"METRALE_UNKNOWN"` for a number that is none. Static.
/// Any thread.
#[unsafe(no_mangle)]
pub extern "C" fn metrale_status_name(status: metrale_status) -> *const c_char {
    status::name(status).as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn older_hosts_are_served() {
        assert!(fits(0x0001_0000, 0x0001_0003) && fits(0x0001_0003, 0x0001_0003));
        assert!(!fits(0x0001_0004, 0x0001_0003) && !fits(0x0002_0000, 0x0001_0003) && !fits(0x0001_0000, 0x0002_0000));
    }
}
