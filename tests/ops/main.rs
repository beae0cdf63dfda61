//! Every operation: the pool's body against the definition, on random inputs, over batches of several sequences.
//!
//! A case declares weights and records a small circuit over random inputs. The same batches then run twice, each with
//! its own caches: once by `Program::run` (fast bodies, pool), once by `Program::run_scalar` (definitions in f64).
#![allow(unsafe_code)] // writes the rows of a test input

mod bench;
mod dense;
mod latent;
mod recurrent;
mod routed;

/// The same cases on the slower tables: the choice is made once in a process, so each runs in its own.
#[test]
fn every_instruction_set() {
    if std::env::var_os("METRALE_SIMD").is_some() {
        return;
    }
    let test = std::env::current_exe().unwrap();
    for simd in ["scalar", "avx2", "avx512"] {
        let done = std::process::Command::new(&test).env("METRALE_SIMD", simd).output().unwrap();
        assert!(done.status.success(), "{simd}: {}", String::from_utf8_lossy(&done.stdout));
    }
}
