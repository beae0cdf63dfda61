//! Prompt and decode speed of a checkpoint or of a config's shapes with random weights, against the machine's own limits.
//!
//!     metrale_bench MODEL [--threads N] [--prompt 512] [--decode 128] [--batch 1] [--context N] [--synthetic Q8_0] [--f32] [--json]
//!
//! MODEL is a folder or a GGUF file; with `--synthetic TYPE` a folder with `config.json` is enough. Limits (read bandwidth) are measured in
//! the same run, on as many threads. Every figure is the median of three, but for the load, of which there is one: `--prompt 0 --decode 0`
//! measures it alone.

use metrale::backend::cpu::arena::Buffer;
use metrale::backend::cpu::pool::Pool;
use metrale::engine::{self, Sequence, SequenceOptions, forward};
use metrale::options::{Compute, LoadOptions, Synthetic};
use metrale::tensor::DType;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

struct Arguments {
    model: PathBuf,
    options: LoadOptions,
    prompt: usize,
    decode: usize,
    batch: usize,
    json: bool,
}

fn dtype(name: &str) -> Option<DType> {
    use DType::*;
    [F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2K, Q3K, Q4K, Q5K, Q6K, IQ4NL].into_iter().find(|t| t.name() == name)
}

fn arguments() -> Result<Arguments, String> {
    let mut a = Arguments { model: PathBuf::new(), options: LoadOptions::default(), prompt: 512, decode: 128, batch: 1, json: false };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut number = || words.next().and_then(|w| w.parse::<usize>().ok()).ok_or(format!("{word} needs a number"));
        match word.as_str() {
            "--threads" => a.options.threads = number()?,
            "--prompt" => a.prompt = number()?,
            "--decode" => a.decode = number()?,
            "--batch" => a.batch = number()?.max(1),
            "--context" => a.options.context = number()?,
            "--f32" => a.options.compute = Some(Compute::F32),
            "--json" => a.json = true,
            "--synthetic" => {
                let name = words.next().unwrap_or_default();
                let dtype = dtype(&name).ok_or(format!("unknown type {name:?}"))?;
                a.options.synthetic = Some(Synthetic { dtype, seed: 1 });
            }
            _ if word.starts_with('-') => return Err(format!("unknown option {word}")),
            _ => a.model = word.into(),
        }
    }
    if a.model.as_os_str().is_empty() {
        return Err(
            "usage: metrale_bench MODEL [--threads N] [--prompt 512] [--decode 128] [--batch 1] [--synthetic Q8_0] [--f32] [--json]".into(),
        );
    }
    Ok(a)
}

/// Tokens of the prompt that is waited for after a load.
const FIRST: usize = 32;

/// The most bytes this process ever had in memory, files that are mapped included; 0 where the system does not say.
fn peak_rss() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    line.and_then(|v| v.trim().trim_end_matches(" kB").parse::<u64>().ok()).unwrap_or(0) << 10
}

/// 0 where nothing was measured.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// Bytes per second that the pool's threads read together from memory far larger than the caches.
fn read_bandwidth(threads: usize) -> Result<f64, metrale::error::Error> {
    const BYTES: usize = 1 << 30;
    let pool = Pool::new(threads)?;
    let mut buffer = Buffer::new(BYTES, "a buffer to read")?;
    buffer.as_mut_slice().chunks_mut(4096).enumerate().for_each(|(i, page)| page[0] = i as u8);
    let sink = AtomicU64::new(0);
    let mut rates = Vec::new();
    for _ in 0..3 {
        let counter = AtomicUsize::new(0);
        let start = Instant::now();
        pool.run(&|worker| {
            worker.each(&counter, BYTES >> 20, 1, |range| {
                for block in range {
                    let words: &[u32] = &buffer.as_slice_of::<u32>()[block << 18..(block + 1) << 18];
                    let mut lanes = [0u32; 64];
                    for chunk in words.chunks_exact(64) {
                        for (lane, w) in lanes.iter_mut().zip(chunk) {
                            *lane ^= w;
                        }
                    }
                    sink.fetch_xor(u64::from(lanes.iter().fold(0, |a, b| a ^ b)), Ordering::Relaxed);
                }
            });
        })?;
        rates.push(BYTES as f64 / start.elapsed().as_secs_f64());
    }
    std::hint::black_box(sink.into_inner());
    Ok(median(rates))
}

fn run(a: &Arguments) -> Result<(), metrale::error::Error> {
    let start = Instant::now();
    let engine = engine::load(&a.model, &a.options, None)?;
    let load_seconds = start.elapsed().as_secs_f64();
    let vocab = engine.info().vocab as i32;
    // From nothing to the first token of a short prompt, and what was most in memory until then.
    let first: Vec<i32> = (0..FIRST as i32).map(|i| (i * 7919 + 13) % vocab).collect();
    let mut sequence = Sequence::new(&engine, &SequenceOptions::default())?;
    sequence.prefill(&first)?;
    let token = metrale::sampling::Sampler::greedy().sample(sequence.logits()?, &[])?;
    let first_seconds = start.elapsed().as_secs_f64();
    std::hint::black_box(token);
    drop(sequence);
    let (peak, plan) = (peak_rss(), engine.plan().total());
    let prompt: Vec<i32> = (0..a.prompt as i32).map(|i| (i * 7919 + 13) % vocab).collect();
    let (mut prompt_rates, mut decode_rates) = (Vec::new(), Vec::new());
    for _ in 0..if a.prompt + a.decode > 0 { 3 } else { 0 } {
        let mut sequences = (0..a.batch).map(|_| Sequence::new(&engine, &SequenceOptions::default())).collect::<Result<Vec<_>, _>>()?;
        let start = Instant::now();
        if let Some(first) = sequences.first_mut().filter(|_| a.prompt > 0) {
            first.prefill(&prompt)?;
            prompt_rates.push(a.prompt as f64 / start.elapsed().as_secs_f64());
        }
        // Decoding starts from short contexts, as the peers' benchmarks do.
        for s in &mut sequences {
            s.truncate(0)?;
            s.prefill(&[1])?;
        }
        let start = Instant::now();
        for step in 0..a.decode as i32 {
            let mut all: Vec<&mut Sequence> = sequences.iter_mut().collect();
            let tokens: Vec<i32> = (0..a.batch as i32).map(|i| (step * 31 + i * 7 + 5) % vocab).collect();
            forward(&mut all, &tokens)?;
        }
        decode_rates.push((a.decode * a.batch) as f64 / start.elapsed().as_secs_f64());
    }
    let threads = engine.info().threads;
    let (prompt_tps, decode_tps) = (median(prompt_rates), median(decode_rates));
    // Where only the load is asked about, nothing else is measured.
    let read = if a.prompt + a.decode > 0 { read_bandwidth(threads)? } else { f64::INFINITY };
    let read_used = engine.step_bytes() as f64 * decode_tps / a.batch as f64;
    let flops = engine.token_flops() as f64 * prompt_tps;
    if a.json {
        let object = serde_json::json!({
            "model": a.model.display().to_string(), "threads": threads, "simd": engine.info().simd, "compute": engine.info().compute, "batch": a.batch,
            "prompt": a.prompt, "decode": a.decode, "load_seconds": load_seconds, "first_token_seconds": first_seconds, "peak_rss_bytes": peak, "plan_bytes": plan, "weight_bytes": engine.step_bytes(),
            "prompt_tps": prompt_tps, "decode_tps": decode_tps, "prompt_gflops": flops / 1e9,
            "decode_gbps": read_used / 1e9, "read_gbps": if read.is_finite() { read / 1e9 } else { 0.0 }, "decode_of_read": read_used / read,
        });
        println!("{object}");
    } else {
        println!(
            "{} ({}, {} threads, {} kernels), loaded in {load_seconds:.2} s",
            a.model.display(),
            engine.info().model_type,
            threads,
            engine.info().simd
        );
        println!(
            "first token of a prompt of {FIRST}: {first_seconds:.3} s after the load began; at most {} MiB in memory, {} MiB planned",
            peak >> 20,
            plan >> 20
        );
        println!("prompt {:>5} tokens: {prompt_tps:>9.1} tokens/s   {:>7.1} GFLOP/s in the matrices", a.prompt, flops / 1e9);
        println!(
            "decode {:>5} tokens: {decode_tps:>9.1} tokens/s   {:>7.1} GB/s of weights, {:.0} % of the {:.1} GB/s this machine reads",
            a.decode * a.batch,
            read_used / 1e9,
            100.0 * read_used / read,
            read / 1e9
        );
    }
    Ok(())
}

fn main() {
    let done = arguments().and_then(|a| run(&a).map_err(|e| e.to_string()));
    if let Err(e) = done {
        eprintln!("metrale_bench: {e}");
        std::process::exit(1);
    }
}
