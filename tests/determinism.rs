//! The option `deterministic` on a device: a row of logits has the same bits however its tokens came and whatever else was in the batch. What a
//! fresh sequence gives for all tokens in one call is what everything is compared with. Without the option the same comparison finds differences,
//! so it would find them with it. Without a real device the tests run in a child process over the kernels on the host.
//!
//! tests/bits.rs, tests/state.rs and tests/steps.rs ask for the option too: on a real device they walk every family and reference checkpoint.

mod support;

use metrale::engine::{self, Engine, Sequence, SequenceOptions, Snapshot, forward};
use metrale::options::{Compute, LoadOptions, Synthetic};
use metrale::tensor::DType;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::sync::Arc;
use support::{Random, Scratch, cuda, is_on_device};

const VOCAB: usize = 64;

/// A model, how it is stored and computed.
struct Case {
    name: &'static str,
    config: Value,
    dtype: DType,
    compute: Compute,
}

fn config(model_type: &str, more: Value) -> Value {
    let mut config = json!({
        "model_type": model_type, "vocab_size": VOCAB, "hidden_size": 256, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 4096, "rope_theta": 10000.0,
    });
    config.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    config
}

/// Each kind of product and each kernel of attention; experts; latent attention; recurrences.
fn cases() -> Vec<Case> {
    let case = |name, model_type: &str, more, dtype, compute| Case { name, config: config(model_type, more), dtype, compute };
    let experts =
        json!({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": true, "decoder_sparse_step": 1});
    let latent = json!({"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 64,
        "first_k_dense_replace": 0, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": true,
        "scoring_func": "sigmoid", "topk_method": "noaux_tc", "q_lora_rank": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 4});
    let delta = json!({"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        "linear_key_head_dim": 32, "linear_value_head_dim": 32});
    let mamba = json!({"num_hidden_layers": 2, "hybrid_override_pattern": "M*", "mamba_num_heads": 4, "mamba_head_dim": 32, "n_groups": 2, "ssm_state_size": 16});
    let (wide, narrow) = (json!({"head_dim": 128}), json!({"head_dim": 32}));
    vec![
        case("bf16", "llama", wide.clone(), DType::BF16, Compute::Fast),
        case("bf16 exact", "llama", json!({}), DType::BF16, Compute::F32),
        case("f16", "llama", narrow, DType::F16, Compute::Fast),
        case("f8", "llama", json!({}), DType::F8E4M3, Compute::Fast),
        case("q8_0", "llama", wide, DType::Q8_0, Compute::Fast),
        case("q4_k", "llama", json!({"intermediate_size": 256}), DType::Q4K, Compute::Fast),
        case("window", "mistral", json!({"sliding_window": 30}), DType::Q4_0, Compute::Fast),
        case("experts", "qwen3_moe", experts, DType::BF16, Compute::Fast),
        case("latent", "deepseek_v3", latent, DType::BF16, Compute::Fast),
        case("delta", "qwen3_5", delta, DType::BF16, Compute::Fast),
        case("mamba", "nemotron_h", mamba, DType::BF16, Compute::Fast),
    ]
}

fn load(case: &Case, deterministic: bool) -> Arc<Engine> {
    let folder = Scratch::new(&format!("determinism-{}-{deterministic}", case.name.replace(' ', "-")));
    folder.file("config.json", case.config.to_string());
    let synthetic = Some(Synthetic::of(case.dtype, 7));
    let options = LoadOptions { compute: Some(case.compute), threads: 1, synthetic, device: 1, deterministic, ..LoadOptions::default() };
    engine::load(folder.path(), &options, None).unwrap_or_else(|e| panic!("{}: {e}", case.name))
}

fn empty(engine: &Arc<Engine>) -> Sequence {
    Sequence::new(engine, &SequenceOptions::default()).unwrap()
}

fn bits(sequence: &Sequence) -> Vec<u32> {
    sequence.logits().unwrap().iter().map(|v| v.to_bits()).collect()
}

/// Whether this process has a device; else the test `name` is run in a child that has one.
fn is_child(name: &str) -> bool {
    if is_on_device() {
        return true;
    }
    let Some(mut command) = cuda::command(&std::env::current_exe().unwrap(), cuda::Mode::Plain) else { return false };
    let done = command.args(["--exact", name, "--nocapture"]).output().unwrap();
    let (out, err) = (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
    println!("{out}");
    assert!(done.status.success() && out.contains("1 passed"), "{out}\n{err}");
    false
}

/// One text, rows of fresh sequences by how much of it they read, and where others differed.
struct Check {
    engine: Arc<Engine>,
    text: Vec<i32>,
    fresh: HashMap<usize, Vec<u32>>,
    compared: usize,
    differing: Vec<String>,
}

impl Check {
    fn new(engine: Arc<Engine>, len: usize) -> Check {
        let mut random = Random(0x5eed);
        let text = (0..len).map(|_| random.below(VOCAB) as i32).collect();
        Check { engine, text, fresh: HashMap::new(), compared: 0, differing: Vec::new() }
    }

    /// The sequence holds the text's beginning.
    fn compare(&mut self, sequence: &Sequence, how: &str) {
        let len = sequence.len();
        let row = self.fresh.entry(len).or_insert_with(|| {
            let mut fresh = empty(&self.engine);
            fresh.prefill(&self.text[..len]).unwrap();
            bits(&fresh)
        });
        self.compared += 1;
        if bits(sequence) != *row {
            self.differing.push(format!("{how}, {len} tokens"));
        }
    }

    fn read(&self, sequence: &mut Sequence, count: usize) {
        sequence.prefill(&self.text[sequence.len()..][..count]).unwrap();
    }

    /// Token by token.
    fn alone(&mut self, len: usize) {
        let mut sequence = empty(&self.engine);
        for at in 1..=len {
            self.read(&mut sequence, 1);
            if at % 4 == 1 {
                self.compare(&sequence, "alone");
            }
        }
    }

    /// In pieces of any size.
    fn cut(&mut self, random: &mut Random) {
        let mut sequence = empty(&self.engine);
        while sequence.len() < self.text.len() {
            let most = [3, 9, 20][random.below(3)];
            let count = 1 + random.below(most.min(self.text.len() - sequence.len()));
            self.read(&mut sequence, count);
            self.compare(&sequence, "in pieces");
        }
    }

    /// A token for each of so many sequences: forks of one sequence at two places, and what a snapshot of one gives.
    fn together(&mut self, count: usize) {
        let mut trunk = empty(&self.engine);
        let mut sequences = Vec::new();
        for (index, len) in [5, 30].into_iter().enumerate() {
            let more = len - trunk.len();
            self.read(&mut trunk, more);
            let snapshot = Snapshot::from_bytes(&self.engine, &trunk.snapshot().unwrap().to_bytes().unwrap()).unwrap();
            for other in 0..count.div_ceil(2).min(count - sequences.len()) {
                sequences.push(trunk.fork().unwrap());
                if (index + other) % 3 == 0 {
                    let last = sequences.last_mut().unwrap();
                    *last = empty(&self.engine);
                    last.restore(&snapshot).unwrap();
                }
            }
        }
        let tokens: Vec<i32> = sequences.iter().map(|s| self.text[s.len()]).collect();
        let marks: Vec<_> = sequences.iter_mut().map(|s| s.mark().unwrap()).collect();
        // Once in vain: what is undone leaves nothing behind.
        forward(&mut sequences.iter_mut().collect::<Vec<_>>(), &vec![1; count]).unwrap();
        sequences.iter_mut().zip(&marks).for_each(|(s, mark)| s.rollback(*mark).unwrap());
        forward(&mut sequences.iter_mut().collect::<Vec<_>>(), &tokens).unwrap();
        for sequence in &sequences {
            self.compare(sequence, &format!("{count} together"));
        }
    }
}

/// All of it for one model.
fn checked(case: &Case, deterministic: bool) -> Check {
    let mut check = Check::new(load(case, deterministic), 36);
    check.alone(9);
    check.cut(&mut Random(11));
    for count in [3, 34] {
        check.together(count);
    }
    check
}

#[test]
fn bits_are_those_of_one_call_alone() {
    if !is_child("bits_are_those_of_one_call_alone") {
        return;
    }
    let only = std::env::var("METRALE_ONLY").unwrap_or_default();
    for case in cases().into_iter().filter(|case| only.is_empty() || only.split(',').any(|name| name == case.name)) {
        let begun = std::time::Instant::now();
        let check = checked(&case, true);
        println!("{}: {} rows compared in {:.1?}", case.name, check.compared, begun.elapsed());
        assert!(check.differing.is_empty(), "{}: {:?}", case.name, check.differing);
    }
}

/// What the option is for, and that the comparison sees it.
#[test]
fn without_the_option_bits_depend_on_the_batch() {
    if !is_child("without_the_option_bits_depend_on_the_batch") {
        return;
    }
    for case in cases().into_iter().filter(|case| ["bf16", "latent"].contains(&case.name)) {
        let check = checked(&case, false);
        println!("{}: {} of {} rows differ", case.name, check.differing.len(), check.compared);
        assert!(!check.differing.is_empty(), "{}", case.name);
    }
}

/// Rows whose positions are cut into chunks, beside short ones that are not.
#[test]
fn long_rows_are_cut_by_their_own_positions() {
    if !is_child("long_rows_are_cut_by_their_own_positions") {
        return;
    }
    let small =
        json!({"num_hidden_layers": 1, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 1, "num_key_value_heads": 1});
    for (name, head_dim) in [("long 64", 64), ("long 32", 32)] {
        let mut more = small.clone();
        more.as_object_mut().unwrap().insert("head_dim".into(), head_dim.into());
        let case = Case { name, config: config("llama", more), dtype: DType::BF16, compute: Compute::Fast };
        let mut check = Check::new(load(&case, true), 1040);
        let mut long = empty(&check.engine);
        check.read(&mut long, 1030);
        let mut short = empty(&check.engine);
        check.read(&mut short, 40);
        for _ in 0..2 {
            let tokens = [check.text[long.len()], check.text[short.len()]];
            forward(&mut [&mut long, &mut short], &tokens).unwrap();
        }
        check.compare(&long, "beside a short one");
        check.compare(&short, "beside a long one");
        assert!(check.differing.is_empty(), "{name}: {:?}", check.differing);
    }
}
