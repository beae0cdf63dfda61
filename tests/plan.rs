//! The plan against what a loaded model and full sequences really take, by the kernel's count.
//!
//! Each case runs in a process of its own, which loads, fills its sequences to the last token and produces one with all of
//! them, while a thread looks at `RssAnon` every quarter of a millisecond. What the process had before is taken off.

mod support;

use metrale::engine::{self, Sequence, SequenceOptions, forward};
use metrale::options::{Compute, LoadOptions};
use metrale::weights::{Access, FileBytes, Input};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Bytes of private memory this process holds.
fn private_bytes() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").expect("Linux");
    let kib = |key: &str| -> u64 {
        status.lines().find_map(|l| l.strip_prefix(key)).and_then(|v| v.trim().trim_end_matches(" kB").trim().parse().ok()).unwrap_or(0)
    };
    1024 * (kib("RssAnon:") + kib("VmSwap:"))
}

/// One measurement.
#[derive(Clone, Debug)]
struct Case {
    model: PathBuf,
    compute: Compute,
    context: usize,
    sequences: usize,
    threads: usize,
    /// `map`, `read` or `copy`.
    source: &'static str,
}

impl Case {
    fn options(&self) -> LoadOptions {
        LoadOptions { compute: Some(self.compute), context: self.context, threads: self.threads, ..LoadOptions::default() }
    }

    fn input(&self) -> Input {
        match self.source {
            "map" => Input::path(&self.model, Access::Map).unwrap(),
            "read" => Input::path(&self.model, Access::Read).unwrap(),
            _ => Input::Ready(Arc::new(FileBytes::from_bytes("copy", std::fs::read(&self.model).unwrap()))),
        }
    }

    fn text(&self) -> String {
        let compute = if self.compute == Compute::F32 { "f32" } else { "fast" };
        format!("{}|{compute}|{}|{}|{}|{}", self.model.display(), self.context, self.sequences, self.threads, self.source)
    }

    fn parse(text: &str) -> Case {
        let words: Vec<&str> = text.split('|').collect();
        let number = |i: usize| words[i].parse().unwrap();
        Case {
            model: words[0].into(),
            compute: if words[1] == "f32" { Compute::F32 } else { Compute::Fast },
            context: number(2),
            sequences: number(3),
            threads: number(4),
            source: ["map", "read", "copy"].into_iter().find(|s| *s == words[5]).unwrap(),
        }
    }
}

const CASE: &str = "METRALE_PLAN_CASE";

/// Not a test by itself: what the child of a measurement does.
#[test]
fn child() {
    let Ok(text) = std::env::var(CASE) else { return };
    let case = Case::parse(&text);
    let (done, peak) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let (started, wait) = std::sync::mpsc::channel();
        let (done, peak) = (&done, &peak);
        scope.spawn(move || {
            let _ = private_bytes();
            started.send(()).unwrap();
            while !done.load(Ordering::SeqCst) {
                peak.fetch_max(private_bytes(), Ordering::SeqCst);
                std::thread::sleep(std::time::Duration::from_micros(250));
            }
        });
        wait.recv().unwrap();
        let before = private_bytes();
        let engine = engine::load_from(case.input(), &case.options(), None).unwrap();
        let loaded = private_bytes();
        let mut sequences: Vec<Sequence> =
            (0..case.sequences).map(|_| Sequence::new(&engine, &SequenceOptions::default()).unwrap()).collect();
        let tokens: Vec<i32> = (0..engine.info().context as i32 - 1).map(|i| i % 500).collect();
        sequences.iter_mut().for_each(|s| s.prefill(&tokens).unwrap());
        for group in sequences.chunks_mut(16) {
            let count = group.len();
            forward(&mut group.iter_mut().collect::<Vec<_>>(), &vec![1; count]).unwrap();
        }
        let full = private_bytes();
        done.store(true, Ordering::SeqCst);
        let peak = peak.load(Ordering::SeqCst).max(full) - before;
        println!("peak {peak} loaded {} cache {} weights {}", loaded - before, engine.cache_bytes(), engine.weight_bytes());
    });
}

/// The numbers that the child printed.
fn measure(case: &Case) -> [u64; 4] {
    let exe = std::env::current_exe().unwrap();
    let done = std::process::Command::new(exe)
        .args(["--exact", "child", "--nocapture", "--test-threads", "1"])
        .env(CASE, case.text())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&done.stdout).into_owned();
    let line = text.lines().find_map(|l| l.split_once("peak ").map(|(_, rest)| rest.to_owned()));
    let line = line.unwrap_or_else(|| panic!("{}: {text}\n{}", case.text(), String::from_utf8_lossy(&done.stderr)));
    let words: Vec<&str> = line.split_whitespace().collect();
    [0, 2, 4, 6].map(|i| words[i].parse().unwrap())
}

/// What no plan of a model can know: pages that the allocator keeps half used, stacks, the library's own tables.
const SLACK: u64 = 1 << 20;

fn check(case: &Case) {
    let plan = engine::plan_from(case.input(), &case.options(), case.sequences).unwrap();
    let [peak, loaded, cache, weights] = measure(case);
    let total = plan.total();
    let off = 100.0 * (total as f64 / peak as f64 - 1.0);
    println!("{:>6.1} % {:>10} planned {:>10} peak {:>10} loaded  {}  {plan:?}", off, total, peak, loaded, case.text());
    if std::env::var("METRALE_PLAN_LOOK").is_ok() {
        return;
    }
    assert_eq!(weights, plan.weights, "{}: weights", case.text());
    assert_eq!(cache, plan.kv, "{}: cache", case.text());
    assert!(peak <= total, "{}: {peak} bytes, planned {total}", case.text());
    assert!(total <= peak + peak / 20 + SLACK, "{}: {peak} bytes, planned {total}", case.text());
}

#[test]
fn fixtures_stay_within_their_plans() {
    let stories = support::fixtures().join("../stories260k/model.gguf");
    for (compute, context, sequences, threads, source) in [
        (Compute::Fast, 512, 8, 1, "map"),
        (Compute::F32, 100, 8, 1, "map"),
        (Compute::Fast, 33, 1, 2, "read"),
        (Compute::F32, 512, 40, 2, "copy"),
        (Compute::Fast, 512, 1, 4, "map"),
    ] {
        check(&Case { model: stories.clone(), compute, context, sequences, threads, source });
    }
}

/// Contexts and numbers of sequences whose products pass 2^31, 2^32 and 2^64: counted in full, or refused up front.
#[test]
fn products_beyond_all_sizes_are_counted_or_refused() {
    let folder = std::env::temp_dir().join(format!("metrale-plan-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    let config = std::fs::read_to_string(support::fixtures().join("llama/config.json")).unwrap();
    let mut config: serde_json::Value = serde_json::from_str(&config).unwrap();
    let (mut counted, mut refused) = (0, 0);
    for context in [1u64 << 20, (1 << 26) + 1, (1 << 31) - 1, 1 << 31, 1 << 32, 1 << 40, 1 << 62] {
        config["max_position_embeddings"] = context.into();
        std::fs::write(folder.join("config.json"), config.to_string()).unwrap();
        let number = |key: &str| u128::from(config[key].as_u64().unwrap());
        let head_dim = config["head_dim"].as_u64().map_or(number("hidden_size") / number("num_attention_heads"), u128::from);
        for sequences in [1usize, 1 << 12, 1 << 31, 1 << 40, usize::MAX] {
            let synthetic = metrale::options::Synthetic::of(metrale::tensor::DType::F32, 1);
            let options = LoadOptions { context: context as usize, synthetic: Some(synthetic), ..LoadOptions::default() };
            match engine::plan(&folder, &options, sequences) {
                Ok(plan) => {
                    // Two bytes for each element of keys and values at least, four at most.
                    let elements = number("num_hidden_layers") * 2 * number("num_key_value_heads") * head_dim;
                    let elements = elements.saturating_mul(context.into()).saturating_mul(sequences as u128);
                    let least = u64::try_from(elements.saturating_mul(2)).unwrap_or(u64::MAX);
                    assert!(plan.kv >= least && plan.total() >= plan.kv, "{context} x {sequences}: {plan:?}, at least {least}");
                    let most = u64::try_from(elements.saturating_mul(5)).unwrap_or(u64::MAX);
                    assert!(plan.kv <= most, "{context} x {sequences}: {plan:?}, at most {most}");
                    counted += 1;
                }
                Err(e) => {
                    use metrale::error::Kind::{CorruptFile, LimitExceeded, TooLarge, Unsupported};
                    assert!(matches!(e.kind(), CorruptFile | LimitExceeded | TooLarge | Unsupported), "{context} x {sequences}: {e:?}");
                    refused += 1;
                }
            }
        }
    }
    std::fs::remove_dir_all(&folder).unwrap();
    println!("{counted} counted, {refused} refused");
    assert!(counted >= 10);
}

#[test]
fn real_models_stay_within_their_plans() {
    let Some(cache) = std::env::var_os("METRALE_CACHE") else { return println!("SKIPPED: METRALE_CACHE names no folder of models") };
    for name in ["smollm2-135m-instruct", "gemma-3-270m", "qwen2.5-coder-0.5b-instruct"] {
        let folder = Path::new(&cache).join(name);
        for (model, compute, context, sequences, source) in [
            (folder.join("model.gguf"), Compute::Fast, 256, 1, "map"),
            (folder.join("model.gguf"), Compute::F32, 64, 4, "map"),
            (folder.join("model.gguf"), Compute::Fast, 96, 16, "read"),
            (folder.join("hf"), Compute::Fast, 128, 2, "map"),
            (folder.join("hf"), Compute::F32, 64, 1, "read"),
        ] {
            if !model.exists() {
                println!("SKIPPED: there is no {}", model.display());
                continue;
            }
            check(&Case { model, compute, context, sequences, threads: 2, source });
        }
    }
}
