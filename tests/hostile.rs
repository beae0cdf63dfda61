//! Hostile configs: any value of any key replaced by another, over all families. The result is an error or a model that runs; never
//! a panic, and never memory that only the config's word asks for.
//!
//! A sample is tried, the same every time; `METRALE_MUTATIONS` sets how many a folder (`all` for every one).

mod support;

use metrale::engine::{self, Sequence, SequenceOptions};
use metrale::error::Kind;
use metrale::options::LoadOptions;
use serde_json::{Value, json};
use std::path::Path;
use support::copies::{Copy, sources};
use support::{Random, Scratch};

/// What values are replaced by.
fn replacements() -> Vec<Value> {
    let numbers = [
        json!(0),
        json!(1),
        json!(-1),
        json!(3),
        json!(1u64 << 31),
        json!(4_294_967_295u64),
        json!(u64::MAX),
        json!(1e18),
        json!(1e300),
        json!(1e-300),
        json!(0.5),
    ];
    numbers.into_iter().chain([json!("x"), Value::Null, json!([]), json!({}), json!([1e300, -1, "x"]), json!(true)]).collect()
}

/// Pointers to all values, numbers in lists included (the first few of each).
fn pointers(value: &Value, at: &str, out: &mut Vec<String>) {
    let escaped = |key: &str| key.replace('~', "~0").replace('/', "~1");
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                let at = format!("{at}/{}", escaped(key));
                out.push(at.clone());
                pointers(value, &at, out);
            }
        }
        Value::Array(list) => {
            for (i, value) in list.iter().enumerate().take(3) {
                let at = format!("{at}/{i}");
                out.push(at.clone());
                pointers(value, &at, out);
            }
        }
        _ => {}
    }
}

/// Peak of the address space in KiB, where the system tells.
fn peak() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    status.lines().find_map(|l| l.strip_prefix("VmPeak:")?.trim().strip_suffix("kB")?.trim().parse().ok()).unwrap_or(0)
}

/// Plans, loads and runs what a folder has become.
fn go(path: &Path) -> Result<(), metrale::error::Error> {
    let options = LoadOptions { threads: 1, memory: 256 << 20, ..LoadOptions::default() };
    engine::plan(path, &options, 1)?;
    let engine = engine::load(path, &options, None)?;
    let mut sequence = Sequence::new(&engine, &SequenceOptions { context: engine.info().context.min(64) })?;
    sequence.prefill(&[1, 2, 3])?;
    sequence.prefill(&[4])
}

#[test]
fn no_config_panics_or_takes_memory_on_its_word() {
    let wanted = std::env::var("METRALE_MUTATIONS").unwrap_or_default();
    let only = std::env::var("METRALE_ONLY").unwrap_or_default();
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let (mut tried, mut accepted, mut failures) = (0, 0, Vec::new());
    for source in sources() {
        let name = source.file_name().unwrap().to_string_lossy().into_owned();
        if !only.is_empty() && !only.split(',').any(|o| o == name) {
            continue;
        }
        let whole = Copy::read(&source);
        let mut places = Vec::new();
        pointers(&whole.config, "", &mut places);
        let mut mutations: Vec<(String, Value)> =
            places.iter().flat_map(|p| replacements().into_iter().map(move |v| (p.clone(), v))).collect();
        let count = match wanted.as_str() {
            "all" => mutations.len(),
            n => n.parse().unwrap_or(8).min(mutations.len()),
        };
        for i in 0..count {
            let other = i + random.below(mutations.len() - i);
            mutations.swap(i, other);
        }
        let scratch = Scratch::new(&format!("hostile-{name}"));
        whole.link(&scratch);
        println!("{name}: {count} of {}", mutations.len());
        for (place, value) in &mutations[..count] {
            let mut config = whole.config.clone();
            *config.pointer_mut(place).unwrap() = value.clone();
            scratch.file("config.json", config.to_string());
            tried += 1;
            let before = peak();
            match std::panic::catch_unwind(|| go(scratch.path())) {
                Err(_) => failures.push(format!("{name}: {place} = {value} panics")),
                Ok(Err(e)) if e.kind() == Kind::Internal => failures.push(format!("{name}: {place} = {value}: {e:?}")),
                Ok(Err(_)) => {}
                Ok(Ok(())) => accepted += 1,
            }
            let grown = peak().saturating_sub(before) >> 10;
            if grown > 768 {
                failures.push(format!("{name}: {place} = {value} took {grown} MiB"));
            }
        }
    }
    println!("{tried} configs, {accepted} of them run");
    assert!(tried > 0 && failures.is_empty(), "{} of {tried}:\n{}", failures.len(), failures.join("\n"));
}
