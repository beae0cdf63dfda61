//! Every operation: the pool's body against the definition, on random inputs, over batches of several sequences.
//!
//! A case declares weights and records a small circuit over random inputs. The same batches then run twice, each with
//! its own caches: once by `Program::run` (fast bodies, pool), once by `Program::run_scalar` (definitions in f64).
//!
//! With METRALE_TEST_DEVICE set, the first of the two is a device: on machines without one, the kernels on the host (tests/cuda), which
//! `on_the_device` runs this program with.
#![allow(unsafe_code)] // writes the rows of a test input

mod bench;
#[path = "../support/cuda.rs"]
mod cuda;
mod dense;
mod device;
mod latent;
mod logits;
mod packing;
mod recurrent;
mod routed;

/// The same cases on the slower tables: the choice is made once in a process, so each runs in its own.
#[test]
fn every_instruction_set() {
    if is_child() {
        return;
    }
    let test = std::env::current_exe().unwrap();
    for simd in ["scalar", "avx2", "avx512"] {
        let done = std::process::Command::new(&test).env("METRALE_SIMD", simd).output().unwrap();
        assert!(done.status.success(), "{simd}: {}", String::from_utf8_lossy(&done.stdout));
    }
}

fn is_child() -> bool {
    ["METRALE_SIMD", "METRALE_TEST_DEVICE"].iter().any(|name| std::env::var_os(name).is_some())
}

/// The same cases on a device: kernels on the host, as compiled for speed; and under the address sanitizer, with warps in random orders.
#[test]
fn on_the_device() {
    if is_child() {
        return;
    }
    let mut pending = std::collections::BTreeSet::new();
    for (mode, seed) in [(cuda::Mode::Plain, "0"), (cuda::Mode::Address, "5")] {
        let Some(mut command) = cuda::command(&std::env::current_exe().unwrap(), mode) else { return };
        let done = command.args(["--nocapture", "--test-threads=2"]).env("METRALE_SHIM_SEED", seed).output().unwrap();
        let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
        assert!(done.status.success(), "{mode:?}, seed {seed}: {out}\n{err}");
        pending.extend(out.lines().filter_map(|line| Some(line.split_once("PENDING ")?.1.to_string())));
    }
    println!("operations without a kernel: {pending:?}");
}
