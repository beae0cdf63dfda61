//! Strangers' bytes by mutation, for every target and a moment each; `METRALE_FUZZ_SECONDS` says how long, `METRALE_ONLY` which.
//!
//! What was ever found lies in `corpus` and is tried first. A find is written there, and the test names it. The same targets run
//! under libFuzzer, which sees what the code does with its input: `make fuzz`.

#[path = "../support/mod.rs"]
mod support;
mod targets;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use support::{GgufWriter, Random};
use targets::{TARGETS, Target};

/// No input may take longer, on a machine that does other things too.
const LONGEST: Duration = Duration::from_secs(20);
const MOST_BYTES: usize = 1 << 20;

fn corpus(target: &Target) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fuzz/corpus").join(target.name)
}

/// Inputs to begin with: the kept ones, and sound ones that are fixtures already.
fn seeds(target: &Target) -> Vec<Vec<u8>> {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
    let read = |name: &str| std::fs::read(fixtures.join(name)).expect("the fixture is there");
    let mut files: Vec<PathBuf> = std::fs::read_dir(corpus(target)).into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    files.sort();
    let mut seeds: Vec<Vec<u8>> = files.iter().map(|path| std::fs::read(path).expect("the corpus is readable")).collect();
    match target.name {
        "gguf" => seeds.extend([GgufWriter::llama().bytes(), read("models/llama-gguf-low/model.gguf")]),
        "safetensors" => seeds.push(read("models/llama/model.safetensors")),
        "config" => seeds.extend(
            ["llama", "mixtral", "nemotron_h-mixed", "nllb", "lfm2", "gpt_oss-mxfp4"]
                .map(|name| read(&format!("models/{name}/config.json"))),
        ),
        "tokenizer" => seeds.push(read("stories260k/tokenizer.json")),
        "template" => {
            let chats: serde_json::Value = serde_json::from_slice(&read("text/chats.json")).expect("JSON");
            let templates = chats.as_array().expect("a list").iter().filter_map(|chat| chat["template"].as_str());
            seeds.extend(templates.map(|template| template.as_bytes().to_vec()));
        }
        _ => {}
    }
    assert!(!seeds.is_empty(), "{} has no corpus", target.name);
    seeds
}

/// One change, or a few.
fn mutate(bytes: &mut Vec<u8>, other: &[u8], words: &[&str], random: &mut Random) {
    for _ in 0..1 + random.below(4) {
        // Most of what a file says stands at its beginning.
        let near = if random.below(2) == 0 { bytes.len().min(2048) } else { bytes.len() };
        let at = random.below(near + 1).min(bytes.len());
        let end = (at + 1 + random.below(16)).min(bytes.len());
        match random.below(10) {
            0 => drop(bytes.drain(at..end)),
            1 if at < bytes.len() => bytes[at] ^= 1 << random.below(8),
            2 if at < bytes.len() => bytes[at] = random.next() as u8,
            3 => {
                let value = [0, 1, u64::MAX, 1 << 31, 1 << 63, 1 << 40, 0xffff, random.next()][random.below(8)].to_le_bytes();
                let len = [1, 2, 4, 8][random.below(4)].min(bytes.len() - at);
                bytes[at..at + len].copy_from_slice(&value[..len]);
            }
            4 => {
                let piece = bytes[at..end].to_vec();
                let times = 1 << random.below(if bytes.len() < 4096 { 12 } else { 3 });
                bytes.splice(at..at, piece.repeat(times));
            }
            5 if !other.is_empty() => {
                let from = random.below(other.len());
                let to = (from + 1 + random.below(64)).min(other.len());
                bytes.splice(at..end, other[from..to].iter().copied());
            }
            6 => bytes.truncate(at),
            _ => drop(bytes.splice(at..if random.below(2) == 0 { at } else { end }, words[random.below(words.len())].bytes())),
        }
        bytes.truncate(MOST_BYTES);
    }
}

/// Tries one input; what is wrong with the target, if anything.
fn fault(target: &Target, data: &[u8]) -> Option<String> {
    let begin = Instant::now();
    let done = catch_unwind(AssertUnwindSafe(|| targets::run(target, data)));
    match done {
        Err(panic) => {
            Some(format!("panics: {:?}", panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied())))
        }
        Ok(Some(error)) => Some(format!("a defect: {error:?}")),
        Ok(None) if begin.elapsed() > LONGEST => Some(format!("takes {:?}", begin.elapsed())),
        Ok(None) => None,
    }
}

fn fuzz(target: &Target, time: Duration, random: &mut Random) -> (usize, Vec<String>) {
    let seeds = seeds(target);
    let (mut tried, mut faults) = (0, Vec::new());
    let mut pool = seeds.clone();
    let begin = Instant::now();
    let mut next: Box<dyn FnMut(&mut Random, &mut Vec<Vec<u8>>) -> Vec<u8>> = Box::new({
        let mut first = seeds.into_iter();
        move |random, pool| {
            first.next().unwrap_or_else(|| {
                let mut bytes = pool[random.below(pool.len())].clone();
                let other = pool[random.below(pool.len())].clone();
                mutate(&mut bytes, &other, target.words, random);
                // Changes add up: some results are begun with again.
                if random.below(8) == 0 && pool.len() < 64 {
                    pool.push(bytes.clone());
                }
                bytes
            })
        }
    });
    while tried < pool.len().min(32) || begin.elapsed() < time {
        let data = next(random, &mut pool);
        tried += 1;
        if let Some(fault) = fault(target, &data) {
            let name = format!(
                "found-{:016x}",
                data.iter().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(*b)).wrapping_mul(0x100_0000_01b3))
            );
            let _ = std::fs::write(corpus(target).join(&name), &data);
            faults.push(format!("{}: corpus/{}/{name} {fault}", target.name, target.name));
            if faults.len() == 5 {
                break;
            }
        }
    }
    (tried, faults)
}

#[test]
fn no_bytes_take_the_library_down() {
    let seconds: f64 = std::env::var("METRALE_FUZZ_SECONDS").ok().and_then(|text| text.parse().ok()).unwrap_or(1.0);
    let only = std::env::var("METRALE_ONLY").unwrap_or_default();
    let mut random = Random(std::env::var("METRALE_FUZZ_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(0x2545_f491_4f6c_dd1d));
    let mut faults = Vec::new();
    for target in TARGETS.iter().filter(|target| only.is_empty() || only.split(',').any(|name| name == target.name)) {
        let (tried, found) = fuzz(target, Duration::from_secs_f64(seconds), &mut random);
        println!("{}: {tried} inputs", target.name);
        assert!(tried > 0);
        faults.extend(found);
    }
    assert!(faults.is_empty(), "{}", faults.join("\n"));
}
