//! Prompt and decode speed of a checkpoint or of a config's shapes with random weights, against the machine's own limits.
//!
//!     metrale_bench MODEL [--threads N] [--prompt 512] [--decode 128] [--batch 1] [--depth 0] [--context N] [--rounds 3]
//!                         [--synthetic Q8_0] [--f32] [--json]
//!
//! MODEL is a folder or a GGUF file; with `--synthetic TYPE` a folder with `config.json` is enough. Limits (read bandwidth, peaks of
//! arithmetic) are measured in the same run, between its parts, on as many threads. Speeds are the median of the rounds, but for the load, of
//! which there is one: `--prompt 0 --decode 0` measures it alone. The share of the read bandwidth compares the best eight steps with the best
//! read. `--depth` tokens are read before decoding begins; their keys and values are then read as well and count among the bytes.

#![allow(unsafe_code)] // Reads with intrinsics for the ceiling.

#[path = "../benches/support/ceilings.rs"]
mod ceilings;

use metrale::backend::cpu::arena::Buffer;
use metrale::backend::cpu::pool::Pool;
use metrale::engine::{self, Sequence, SequenceOptions, forward};
use metrale::options::{Compute, LoadOptions, Synthetic};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

struct Arguments {
    model: PathBuf,
    options: LoadOptions,
    prompt: usize,
    decode: usize,
    batch: usize,
    depth: usize,
    rounds: usize,
    json: bool,
}

fn arguments() -> Result<Arguments, String> {
    let (model, options) = (PathBuf::new(), LoadOptions::default());
    let mut a = Arguments { model, options, prompt: 512, decode: 128, batch: 1, depth: 0, rounds: 3, json: false };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut number = || words.next().and_then(|w| w.parse::<usize>().ok()).ok_or(format!("{word} needs a number"));
        match word.as_str() {
            "--threads" => a.options.threads = number()?,
            "--prompt" => a.prompt = number()?,
            "--decode" => a.decode = number()?,
            "--batch" => a.batch = number()?.max(1),
            "--depth" => a.depth = number()?,
            "--rounds" => a.rounds = number()?.max(1),
            "--context" => a.options.context = number()?,
            "--f32" => a.options.compute = Some(Compute::F32),
            "--json" => a.json = true,
            "--synthetic" => {
                let name = words.next().unwrap_or_default();
                a.options.synthetic = Some(Synthetic::parse(&name, 1).map_err(|e| e.to_string())?);
            }
            _ if word.starts_with('-') => return Err(format!("unknown option {word}")),
            _ => a.model = word.into(),
        }
    }
    if a.model.as_os_str().is_empty() {
        return Err(
            "usage: metrale_bench MODEL [--threads N] [--prompt 512] [--decode 128] [--batch 1] [--depth 0] [--rounds 3] [--synthetic Q8_0] [--f32] [--json]"
                .into(),
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

/// What memory gives a plain read: the ceiling of a decode step. The same kind of memory as weights (huge pages, random bits), shared out the
/// same way, read in one ascending stream for each thread, which on the processors seen is the fastest there is; prefetching by hand is slower.
struct Reader {
    pool: Pool,
    memory: Buffer,
    best: f64,
}

impl Reader {
    /// Bytes read in one go: several times what caches hold.
    const BYTES: usize = 256 << 20;
    /// Bytes that a thread takes at a time, about what it takes of a matrix.
    const PIECE: usize = 256 << 10;

    fn new(threads: usize) -> Result<Reader, metrale::error::Error> {
        let mut memory = Buffer::new(Self::BYTES, "a buffer to read")?;
        let mut random = 1u64;
        for word in memory.as_mut_slice_of::<u32>() {
            random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            *word = (random >> 32) as u32;
        }
        Ok(Reader { pool: Pool::new(threads)?, memory, best: 0.0 })
    }

    /// Reads everything a few times; the best time counts, as it does for the steps it is compared with.
    fn measure(&mut self) -> Result<(), metrale::error::Error> {
        let bytes = self.memory.as_slice();
        for _ in 0..4 {
            let (counter, sink) = (AtomicUsize::new(0), AtomicU64::new(0));
            let start = Instant::now();
            self.pool.run(&|worker| {
                worker.each(&counter, Self::BYTES / Self::PIECE, 1, |range| {
                    let piece = &bytes[range.start * Self::PIECE..range.end * Self::PIECE];
                    sink.fetch_xor(fold(piece), Ordering::Relaxed);
                });
            })?;
            std::hint::black_box(sink.into_inner());
            self.best = self.best.max(Self::BYTES as f64 / start.elapsed().as_secs_f64());
        }
        Ok(())
    }
}

impl Reader {
    /// Operations in a second of all threads together.
    fn peak(&self, one: fn(usize) -> f64) -> Result<f64, metrale::error::Error> {
        let mut best = 0.0f64;
        for _ in 0..4 {
            let done = AtomicU64::new(0);
            let start = Instant::now();
            self.pool.run(&|_| _ = done.fetch_add(one(100_000) as u64, Ordering::Relaxed))?;
            best = best.max(done.into_inner() as f64 / start.elapsed().as_secs_f64());
        }
        Ok(best)
    }
}

/// Every byte, folded into one word.
fn fold(bytes: &[u8]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if is_x86_feature_detected!("avx512f") {
        // SAFETY: just detected.
        return unsafe { fold_wide(bytes) };
    }
    let mut lanes = [0u64; 64];
    for chunk in bytes.as_chunks::<512>().0 {
        for (lane, word) in lanes.iter_mut().zip(chunk.as_chunks::<8>().0) {
            *lane ^= u64::from_ne_bytes(*word);
        }
    }
    lanes.iter().fold(0, |a, b| a ^ b)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f")]
fn fold_wide(bytes: &[u8]) -> u64 {
    use std::arch::x86_64::*;
    let mut lanes = [_mm512_setzero_si512(); 8];
    for chunk in bytes.as_chunks::<512>().0 {
        for (i, lane) in lanes.iter_mut().enumerate() {
            // SAFETY: the chunk holds eight registers.
            *lane = _mm512_xor_si512(*lane, unsafe { _mm512_loadu_si512(chunk.as_ptr().add(i * 64).cast()) });
        }
    }
    lanes.iter().fold(0, |a, &lane| a ^ _mm512_reduce_add_epi64(lane) as u64)
}

/// Steps whose time is taken together.
const WINDOW: usize = 8;

fn run(a: &Arguments) -> Result<(), metrale::error::Error> {
    let start = Instant::now();
    let engine = engine::load(&a.model, &a.options, None)?;
    let load_seconds = start.elapsed().as_secs_f64();
    let vocab = engine.info().vocab as i32;
    // From nothing to the first token of a short prompt and the one after it, and what was most in memory until then.
    let first: Vec<i32> = (0..FIRST as i32).map(|i| (i * 7919 + 13) % vocab).collect();
    let mut sequence = Sequence::new(&engine, &SequenceOptions::default())?;
    sequence.prefill(&first)?;
    let token = metrale::sampling::Sampler::greedy().sample(sequence.logits()?, &[])?;
    let first_seconds = start.elapsed().as_secs_f64();
    // Weights that waited are packed now.
    sequence.prefill(&[token])?;
    let token = metrale::sampling::Sampler::greedy().sample(sequence.logits()?, &[])?;
    let second_seconds = start.elapsed().as_secs_f64();
    std::hint::black_box(token);
    drop(sequence);
    let (peak, plan) = (peak_rss(), engine.plan().total());
    let prompt: Vec<i32> = (0..a.prompt as i32).map(|i| (i * 7919 + 13) % vocab).collect();
    let (mut prompt_rates, mut decode_rates) = (Vec::new(), Vec::new());
    // Where only the load is asked about, nothing else is measured.
    let rounds = if a.prompt + a.decode > 0 { a.rounds } else { 0 };
    let mut reader = Reader::new(engine.info().threads)?;
    let (mut best_window, mut best_prompt, mut kv_bytes) = (0.0f64, 0.0f64, 0);
    for _ in 0..rounds {
        reader.measure()?;
        let mut sequences = (0..a.batch).map(|_| Sequence::new(&engine, &SequenceOptions::default())).collect::<Result<Vec<_>, _>>()?;
        let start = Instant::now();
        if let Some(first) = sequences.first_mut().filter(|_| a.prompt > 0) {
            first.prefill(&prompt)?;
            let rate = a.prompt as f64 / start.elapsed().as_secs_f64();
            prompt_rates.push(rate);
            best_prompt = best_prompt.max(rate);
        }
        // Decoding starts from short contexts, as the peers' benchmarks do.
        let depth: Vec<i32> = (0..a.depth.max(1) as i32).map(|i| (i * 7919 + 1) % vocab).collect();
        for s in &mut sequences {
            s.truncate(0)?;
            s.prefill(&depth)?;
        }
        kv_bytes = if a.depth > 0 { sequences.iter().map(|s| s.held().kv_owned).sum() } else { 0 };
        let start = Instant::now();
        let mut window = start;
        for step in 0..a.decode as i32 {
            let mut all: Vec<&mut Sequence> = sequences.iter_mut().collect();
            let tokens: Vec<i32> = (0..a.batch as i32).map(|i| (step * 31 + i * 7 + 5) % vocab).collect();
            forward(&mut all, &tokens)?;
            if (step as usize + 1).is_multiple_of(WINDOW) {
                best_window = best_window.max((WINDOW * a.batch) as f64 / window.elapsed().as_secs_f64());
                window = Instant::now();
            }
        }
        decode_rates.push((a.decode * a.batch) as f64 / start.elapsed().as_secs_f64());
    }
    let threads = engine.info().threads;
    let (prompt_tps, decode_tps) = (median(prompt_rates), median(decode_rates));
    if rounds > 0 {
        reader.measure()?;
    }
    let (read, best) = (reader.best, best_window.max(decode_tps));
    // The best of each: on a shared machine medians measure the neighbours, and not the same ones.
    let read_used = (engine.step_bytes() + kv_bytes) as f64 * best / a.batch as f64;
    // Of a prompt, only the last token meets the output matrix.
    let output = 2 * engine.info().vocab as u64 * engine.info().hidden as u64;
    let flops = engine.token_flops().saturating_sub(output) as f64 * best_prompt;
    let peaks =
        if rounds > 0 { [ceilings::fma, ceilings::pairs, ceilings::dot].map(|one| reader.peak(one)) } else { [const { Ok(0.0) }; 3] };
    let [fma, pairs, dot] = peaks;
    if a.json {
        let object = serde_json::json!({
            "model": a.model.display().to_string(), "threads": threads, "simd": engine.info().simd, "compute": engine.info().compute, "batch": a.batch,
            "prompt": a.prompt, "decode": a.decode, "depth": a.depth, "load_seconds": load_seconds, "first_token_seconds": first_seconds,
            "second_token_seconds": second_seconds,
            "peak_rss_bytes": peak, "plan_bytes": plan, "weight_bytes": engine.step_bytes(), "packed_bytes": engine.weight_bytes(),
            "kv_bytes": kv_bytes, "prompt_tps": prompt_tps, "prompt_best_tps": best_prompt, "decode_tps": decode_tps,
            "decode_best_tps": best, "prompt_gflops": flops / 1e9, "fma_gflops": fma? / 1e9, "bf16_gflops": pairs? / 1e9,
            "int8_gops": dot? / 1e9, "decode_gbps": read_used / 1e9, "read_gbps": read / 1e9, "decode_of_read": if read > 0.0 { read_used / read } else { 0.0 },
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
            "first token of a prompt of {FIRST}: {first_seconds:.3} s after the load began, the second {second_seconds:.3} s;\n    at most {} MiB in memory, {} MiB planned",
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
