//! What surrounds the kernels: that running them on the host finds mistakes, and what they take of a processor.

#[path = "support/cuda.rs"]
mod cuda;

use cuda::Mode;
use std::process::Command;

/// Mistakes that are planted, with the mode and seeds in which one of them must show; status 0 is an escape.
const PLANTED: [(&str, Mode, &[&str]); 11] = [
    ("race", Mode::Plain, &["0"]),
    ("overwritten", Mode::Plain, &["1", "2", "3", "4", "5", "6", "7", "8"]),
    ("divergent", Mode::Plain, &["0"]),
    ("mixed", Mode::Plain, &["0"]),
    ("unawaited", Mode::Plain, &["0"]),
    ("unwritten", Mode::Plain, &["0"]),
    ("uncounted", Mode::Plain, &["0"]),
    ("short_bulk", Mode::Plain, &["0"]),
    ("hasty", Mode::Plain, &["0"]),
    ("outside", Mode::Address, &["0"]),
    ("outside_shared", Mode::Address, &["0"]),
];

#[test]
fn planted_mistakes_are_found_and_sound_kernels_pass() {
    for mode in [Mode::Plain, Mode::Address] {
        let Some(program) = cuda::program(mode, "tests/cuda/planted/main.cpp") else { return };
        let status = |name: &str, seed: &str| {
            let done = Command::new(&program).arg(name).env("METRALE_SHIM_SEED", seed).output().unwrap();
            (done.status.code(), String::from_utf8_lossy(&done.stderr).into_owned())
        };
        for seed in ["0", "1", "2", "3"] {
            for name in ["sound", "sound_bulk", "sound_products"] {
                assert_eq!(status(name, seed).0, Some(0), "{name}, {mode:?}, seed {seed}");
            }
        }
        for (name, _, seeds) in PLANTED.iter().filter(|planted| planted.1 == mode) {
            let found = seeds.iter().map(|seed| status(name, seed)).find(|(code, _)| *code != Some(0));
            let (code, text) = found.unwrap_or_else(|| panic!("{name}: not found"));
            assert_ne!(code, Some(2), "{name}: there is no such kernel");
            assert!(mode == Mode::Plain || text.contains("AddressSanitizer"), "{name}: {text}");
        }
    }
}

/// Registers, spills and shared memory of every kernel, where NVRTC is there to tell them (`make kernels` fetches it).
#[test]
fn resources_are_as_recorded() {
    let done = Command::new("python3").args(["kernels/build.py", "--check"]).current_dir(env!("CARGO_MANIFEST_DIR")).output();
    let Ok(done) = done else { return println!("SKIPPED: there is no python3") };
    let out = String::from_utf8_lossy(&done.stdout);
    match done.status.code() {
        Some(77) => println!("{out}"),
        Some(0) => {}
        _ => panic!("kernels/resources.txt differs (`make kernels` writes it anew):\n{out}{}", String::from_utf8_lossy(&done.stderr)),
    }
}
