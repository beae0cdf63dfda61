//! The targets under libFuzzer. `METRALE_FUZZ_TARGET` names one; the arguments are libFuzzer's. `make fuzz` builds it and runs all.

#![no_main]

#[path = "../targets.rs"]
mod targets;

use std::sync::OnceLock;

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    static TARGET: OnceLock<&targets::Target> = OnceLock::new();
    let target = TARGET.get_or_init(|| {
        let name = std::env::var("METRALE_FUZZ_TARGET").unwrap_or_default();
        targets::TARGETS.iter().find(|target| target.name == name).unwrap_or_else(|| panic!("METRALE_FUZZ_TARGET={name:?} is no target"))
    });
    if let Some(error) = targets::run(target, data) {
        panic!("a defect: {error:?}");
    }
});
