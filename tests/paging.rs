//! Experts left in their file: the same bits under any budget, and never more memory than the budget.

mod support;

use metrale::engine::{self, Engine, Sequence, SequenceOptions};
use metrale::options::{Compute, LoadOptions};
use std::path::Path;
use std::sync::Arc;
use support::golden::{Golden, folders};

fn load(path: &Path, compute: Compute, expert_bytes: Option<u64>) -> Arc<Engine> {
    let options = LoadOptions { compute: Some(compute), threads: 2, expert_bytes, ..LoadOptions::default() };
    engine::load(path, &options, None).unwrap()
}

/// Bits of the rows after a prompt in two pieces and after each of `next`.
fn rows(engine: &Arc<Engine>, prompt: &[i32], next: &[i32]) -> Vec<Vec<u32>> {
    let mut s = Sequence::new(engine, &SequenceOptions::default()).unwrap();
    prompt.chunks(40).for_each(|piece| s.prefill(piece).unwrap());
    let mut rows = Vec::new();
    for &token in next {
        s.prefill(&[token]).unwrap();
        rows.push(s.logits().unwrap().iter().map(|v| v.to_bits()).collect());
    }
    rows
}

#[test]
fn any_budget_gives_the_same_bits() {
    let mut checked = 0;
    for path in folders() {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if !["qwen3_moe", "qwen3_moe-gguf-q8_0", "qwen3_moe-ct-nvfp4", "gpt_oss-gguf-mxfp4", "gpt_oss-mxfp4", "glm4_moe-gguf"]
            .contains(&name.as_str())
        {
            continue;
        }
        let golden = Golden::read(&path);
        for compute in [Compute::F32, Compute::Fast] {
            let whole = load(&path, compute, None);
            let expected = rows(&whole, &golden.prompt, &golden.decode_ids);
            let (all, rest) = (whole.weight_bytes(), load(&path, compute, Some(0)).weight_bytes());
            assert!(rest < all, "{name}: nothing was left in the file");
            for budget in [0, (all - rest) / 2, (all - rest) * 9 / 10, all] {
                let paged = load(&path, compute, Some(budget));
                assert_eq!(paged.weight_bytes(), rest, "{name}: something was packed before it was met");
                assert_eq!(paged.plan().weights, whole.plan().weights - (all - rest) + budget.min(all - rest), "{name}: the plan");
                assert!(
                    rows(&paged, &golden.prompt, &golden.decode_ids) == expected,
                    "{name} {compute:?}: bits differ under {budget} bytes"
                );
                let kept = paged.weight_bytes() - rest;
                assert!(kept <= budget && (kept > 0 || budget == 0), "{name}: {kept} bytes are kept of {budget}");
            }
            checked += 1;
        }
    }
    println!("{checked} engines checked");
    assert!(checked > 0);
}
