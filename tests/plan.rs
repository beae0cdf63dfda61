//! The plan against what a loaded model and full sequences really take.

mod support;

use metrale::engine::{self, Sequence, SequenceOptions};
use metrale::options::{Compute, LoadOptions};

/// Bytes of private memory this process holds, resident or swapped.
fn private_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let kib = |key: &str| -> u64 {
        status.lines().find_map(|l| l.strip_prefix(key)).and_then(|v| v.trim().trim_end_matches(" kB").trim().parse().ok()).unwrap_or(0)
    };
    1024 * (kib("RssAnon:") + kib("VmSwap:"))
}

#[test]
fn weights_and_caches_are_as_planned() {
    let model = support::fixtures().join("../stories260k/model.gguf");
    for (compute, context) in [(Compute::Fast, 512), (Compute::F32, 100), (Compute::Fast, 33)] {
        let options = LoadOptions { compute: Some(compute), context, threads: 1, ..LoadOptions::default() };
        let planned = engine::plan(&model, &options, 8).unwrap();
        let engine = engine::load(&model, &options, None).unwrap();
        assert_eq!(engine.weight_bytes(), planned.weights, "weights");
        let before = private_bytes();
        let mut sequences: Vec<Sequence> = (0..8).map(|_| Sequence::new(&engine, &SequenceOptions::default()).unwrap()).collect();
        let tokens: Vec<i32> = (0..context as i32).map(|i| i % 500).collect();
        sequences.iter_mut().for_each(|s| s.prefill(&tokens).unwrap());
        let grown = private_bytes() - before;
        let limit = planned.kv + planned.state + planned.scratch + planned.other;
        assert!(grown <= limit + (256 << 10), "{compute:?} {context}: sequences took {grown} bytes, planned {limit}");
        assert!(engine.cache_bytes() == planned.kv, "{compute:?} {context}: pages take {}, planned {}", engine.cache_bytes(), planned.kv);
    }
}
