//! Speed of a model's shapes on an NVIDIA device, as shares of what its memory gives a plain read in the same run.
//!
//!     gpu_bench [--types BF16,Q8_0,Q4_K_M] [--batches 1,8,32] [--prompt 2048] [--layers 36] [--steps 64] [--device 1] [--on-device N] [--host-experts N]
//!         [--threads N] [--kernels] [--deterministic] [--sampling] [--ahead N] [CONFIG]
//!
//! CONFIG is a folder with `config.json`; without it the shapes are those of Qwen3-8B. Weights are random. With `--on-device` the last N layers
//! run on the device and the others on the processor; with `--host-experts` the experts of the first N layers stay there. A row tells tokens a second, the time
//! and the bytes of a step (weights and cached positions), their share of the read, and the host's part of a step: what is not spent waiting for
//! the device, the median, the mean and the most of the steps (a step that captures a graph for more positions, or takes new pages, is among them).
//! With `--kernels` a prompt and a step of each batch are run once more, and what each kernel takes is told; kernels do not overlap then. With
//! `--deterministic` each type is measured again with bits that do not depend on the batch, and what that costs is printed. With `--sampling` each
//! batch is measured again with tokens that are drawn (top-k 40, top-p 0.95, temperature 0.8): from what the device finds, and from whole rows.
//! With `--ahead` also by calls for N tokens, between which the device goes on by itself; times are those of one token then.

#[path = "../benches/support/qwen3_8b.rs"]
mod qwen3_8b;

use metrale::backend::cuda::{Device, Stream, read_bandwidth};
use metrale::engine::{self, Chooser, Sequence, SequenceOptions, decode, decode_step, forward};
use metrale::options::{LoadOptions, Synthetic};
use metrale::sampling::{Sampler, Stage};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

struct Arguments {
    types: Vec<String>,
    batches: Vec<usize>,
    prompt: usize,
    layers: usize,
    steps: usize,
    device: usize,
    on_device: usize,
    host_experts: usize,
    threads: usize,
    deterministic: bool,
    kernels: bool,
    sampling: bool,
    ahead: usize,
    config: Option<PathBuf>,
}

fn arguments() -> Result<Arguments, String> {
    let mut a = Arguments {
        types: vec!["BF16".into(), "Q8_0".into()],
        batches: vec![1, 8, 32],
        prompt: 2048,
        layers: 36,
        steps: 64,
        device: 1,
        on_device: 0,
        host_experts: 0,
        threads: 0,
        deterministic: false,
        kernels: false,
        sampling: false,
        ahead: 0,
        config: None,
    };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        let number = |text: String| text.parse::<usize>().map_err(|_| format!("{text:?} is no number"));
        match word.as_str() {
            "--types" => a.types = value()?.split(',').map(str::to_string).collect(),
            "--batches" => a.batches = value()?.split(',').map(|n| number(n.into())).collect::<Result<_, _>>()?,
            "--prompt" => a.prompt = number(value()?)?,
            "--layers" => a.layers = number(value()?)?,
            "--steps" => a.steps = number(value()?)?,
            "--device" => a.device = number(value()?)?,
            "--on-device" => a.on_device = number(value()?)?,
            "--host-experts" => a.host_experts = number(value()?)?,
            "--deterministic" => a.deterministic = true,
            "--threads" => a.threads = number(value()?)?,
            "--kernels" => a.kernels = true,
            "--sampling" => a.sampling = true,
            "--ahead" => a.ahead = number(value()?)?,
            _ if word.starts_with('-') => return Err(format!("unknown option {word}")),
            _ => a.config = Some(word.into()),
        }
    }
    Ok(a)
}

fn main() {
    if let Err(e) = arguments().and_then(|a| run(&a).map_err(|e| e.to_string())) {
        eprintln!("gpu_bench: {e}");
        std::process::exit(1);
    }
}

fn run(a: &Arguments) -> metrale::error::Result<()> {
    let device = Device::open(a.device.saturating_sub(1))?;
    let stream = Arc::new(Stream::new(&device, false)?);
    let (free, total) = device.memory()?;
    let read = read_bandwidth(&stream, (free as usize / 8).min(8 << 30), 8)?;
    println!(
        "{}, {} multiprocessors, {:.1} of {:.1} GB free",
        device.info().name,
        device.info().processors,
        free as f64 / 1e9,
        total as f64 / 1e9
    );
    println!("a plain read: {:.0} GB/s", read / 1e9);
    let made = std::env::temp_dir().join(format!("metrale-gpu-bench-{}", std::process::id()));
    let folder = a.config.clone().unwrap_or_else(|| {
        std::fs::create_dir_all(&made).expect("the folder for temporary files can be written to");
        std::fs::write(made.join("config.json"), qwen3_8b::config(a.layers)).expect("as above");
        made.clone()
    });
    for name in &a.types {
        let plain = one(a, &folder, name, read, false);
        let fixed = if a.deterministic { one(a, &folder, name, read, true) } else { Ok(Vec::new()) };
        match plain.and_then(|plain| Ok((plain, fixed?))) {
            Ok((plain, fixed)) => {
                for ((what, plain), (_, fixed)) in plain.iter().zip(&fixed) {
                    println!(
                        "{name} deterministic, {what}: {:.2} times the time, {:.1} instead of {:.1} tokens/s",
                        plain / fixed,
                        fixed,
                        plain
                    );
                }
            }
            Err(e) => println!("{name}: {e}"),
        }
    }
    let _ = std::fs::remove_dir_all(&made);
    Ok(())
}

/// What was measured, and tokens a second.
fn one(a: &Arguments, folder: &std::path::Path, name: &str, read: f64, deterministic: bool) -> metrale::error::Result<Vec<(String, f64)>> {
    let mut figures = Vec::new();
    let synthetic = Some(Synthetic::parse(name, 1)?);
    let context = a.prompt.max(DEPTH) + 512 + a.ahead;
    let (device, device_layers, host_experts) = (a.device, a.on_device, a.host_experts);
    let options = LoadOptions {
        device,
        device_layers,
        host_experts,
        threads: a.threads,
        context,
        synthetic,
        deterministic,
        ..LoadOptions::default()
    };
    let started = Instant::now();
    let engine = engine::load(folder, &options, None)?;
    let (bytes, vocab) = (engine.step_bytes(), engine.info().vocab as u64);
    let there = engine.plan().device;
    let (layers, experts, total) = (there.layers, there.host_experts, there.total() as f64 / 1e9);
    println!("{name}: {layers} layers, without the experts of {experts}, and {total:.1} GB on the device");
    println!(
        "{}{}: loaded in {:.1} s; a step reads {:.2} GB of weights",
        name,
        if deterministic { ", deterministic" } else { "" },
        started.elapsed().as_secs_f64(),
        bytes as f64 / 1e9
    );
    let token = |i: usize| ((i as u64).wrapping_mul(2_654_435_761) % vocab) as i32;
    let prompt: Vec<i32> = (0..a.prompt).map(token).collect();
    let mut fastest = f64::INFINITY;
    for round in 0..3 {
        let mut sequence = Sequence::new(&engine, &SequenceOptions::default())?;
        let started = Instant::now();
        sequence.prefill(&prompt)?;
        let seconds = started.elapsed().as_secs_f64();
        fastest = fastest.min(seconds);
        let flops = engine.token_flops() as f64 * a.prompt as f64 / seconds;
        println!(
            "  prefill {:>5}: {:>9.0} tokens/s  {:>8.2} ms  {:>6.1} Tflop/s  (round {round})",
            a.prompt,
            a.prompt as f64 / seconds,
            seconds * 1e3,
            flops / 1e12
        );
    }
    figures.push((format!("prefill {}", a.prompt), a.prompt as f64 / fastest));
    if a.kernels {
        let mut sequence = Sequence::new(&engine, &SequenceOptions::default())?;
        engine.time_kernels();
        sequence.prefill(&prompt)?;
        print_times(&engine)?;
    }
    for &batch in &a.batches {
        let mut sequences = Vec::new();
        for index in 0..batch {
            let mut sequence = Sequence::new(&engine, &SequenceOptions::default())?;
            sequence.prefill(&(0..DEPTH).map(|i| token(i + 1000 * index)).collect::<Vec<_>>())?;
            sequences.push(sequence);
        }
        let mut choosers = choosers(&[], batch)?;
        let greedy = steps(a, &engine, batch, |tokens| {
            decode_step(&mut sequences.iter_mut().collect::<Vec<_>>(), &mut choosers.iter_mut().collect::<Vec<_>>(), tokens)
        })?;
        figures.push((format!("decode B={batch}"), batch as f64 / greedy.median));
        let kv = kv_bytes(&engine) * batch as u64 * sequences[0].len() as u64;
        let moved = (bytes + kv) as f64;
        let share = format!("{:>6.2} GB  {:>5.1} % of the read", moved / 1e9, 100.0 * moved / greedy.median / read);
        println!("  decode B={batch:<3}: {}", greedy.line(batch, &share));
        if a.ahead > 0 {
            let (mut times, mut host) = (Vec::new(), Vec::new());
            let mut tokens = vec![0; batch * a.ahead];
            for call in 0..calls(a) {
                // The same positions as one by one.
                for sequence in &mut sequences {
                    sequence.truncate(DEPTH - 1)?;
                    sequence.prefill(&[0])?;
                }
                let (waited, started) = (engine.device_waited()?, Instant::now());
                let mut all: Vec<&mut Sequence> = sequences.iter_mut().collect();
                decode(&mut all, &mut choosers.iter_mut().collect::<Vec<_>>(), a.ahead, &mut tokens).1?;
                let spent = started.elapsed().as_secs_f64();
                // The first one captures.
                if call > 0 {
                    times.push(spent / a.ahead as f64);
                    host.push((spent - (engine.device_waited()? - waited).as_secs_f64()).max(0.0) * 1e6 / a.ahead as f64);
                }
            }
            times.sort_by(f64::total_cmp);
            host.sort_by(f64::total_cmp);
            let ahead = Steps { median: times[times.len() / 2], best: times[0], host };
            println!("    ahead {:<8}{}", a.ahead, ahead.line(batch, ""));
        }
        if a.sampling {
            let mut drawing = self::choosers(&RECIPE, batch)?;
            let drawn = steps(a, &engine, batch, |tokens| {
                decode_step(&mut sequences.iter_mut().collect::<Vec<_>>(), &mut drawing.iter_mut().collect::<Vec<_>>(), tokens)
            })?;
            println!("    drawn         {}", drawn.line(batch, ""));
            let mut samplers = (0..batch).map(|seed| Sampler::new(&RECIPE, seed as u64)).collect::<Result<Vec<_>, _>>()?;
            let by_rows = steps(a, &engine, batch, |tokens| {
                for ((sequence, sampler), token) in sequences.iter().zip(&mut samplers).zip(&mut *tokens) {
                    *token = sampler.sample(sequence.logits()?, sequence.tokens())?;
                }
                forward(&mut sequences.iter_mut().collect::<Vec<_>>(), tokens)
            })?;
            println!("    drawn by rows {}", by_rows.line(batch, ""));
        }
        if a.kernels {
            engine.time_kernels();
            let mut all: Vec<&mut Sequence> = sequences.iter_mut().collect();
            decode_step(&mut all, &mut choosers.iter_mut().collect::<Vec<_>>(), &mut vec![0; batch])?;
            print_times(&engine)?;
        }
    }
    Ok(figures)
}

/// Tokens that a sequence holds before it decodes.
const DEPTH: usize = 512;

/// Calls for `--ahead` tokens each: for as many steps as are taken one by one, and three at least.
fn calls(a: &Arguments) -> usize {
    a.steps.div_ceil(a.ahead.max(1)).max(3) + 1
}

/// What tokens are drawn with.
const RECIPE: [Stage; 3] = [Stage::TopK(40), Stage::TopP(0.95), Stage::Temperature(0.8)];

fn choosers(recipe: &[Stage], count: usize) -> metrale::error::Result<Vec<Chooser>> {
    let one = |seed| {
        let mut chooser = Chooser::new(Sampler::new(recipe, seed as u64)?);
        chooser.ignore_end = true;
        Ok(chooser)
    };
    (0..count).map(one).collect()
}

/// Steps in seconds, and the host's part of them in microseconds.
struct Steps {
    median: f64,
    best: f64,
    host: Vec<f64>,
}

impl Steps {
    fn line(&self, batch: usize, share: &str) -> String {
        let (median, host) = (self.median, &self.host);
        format!(
            "{:>9.1} tokens/s  {:>8.3} ms (best {:.3})  {share}  host {:.1} us (mean {:.1}, most {:.0})",
            batch as f64 / median,
            median * 1e3,
            self.best * 1e3,
            host[host.len() / 2],
            host.iter().sum::<f64>() / host.len() as f64,
            host[host.len() - 1],
        )
    }
}

/// Takes steps of `batch` tokens; the first ones capture and warm up.
fn steps<T>(
    a: &Arguments,
    engine: &Arc<engine::Engine>,
    batch: usize,
    mut step: impl FnMut(&mut [i32]) -> metrale::error::Result<T>,
) -> metrale::error::Result<Steps> {
    let (mut tokens, mut times, mut host) = (vec![0; batch], Vec::new(), Vec::new());
    for index in 0..a.steps + 8 {
        let waited = engine.device_waited()?;
        let started = Instant::now();
        step(&mut tokens)?;
        let spent = started.elapsed().as_secs_f64();
        if index >= 8 {
            times.push(spent);
            host.push((spent - (engine.device_waited()? - waited).as_secs_f64()).max(0.0) * 1e6);
        }
    }
    times.sort_by(f64::total_cmp);
    host.sort_by(f64::total_cmp);
    Ok(Steps { median: times[times.len() / 2], best: times[0], host })
}

/// A line for each kernel that takes a hundredth or more.
fn print_times(engine: &Arc<engine::Engine>) -> metrale::error::Result<()> {
    let times = engine.kernel_times()?;
    let all: f64 = times.iter().map(|t| t.milliseconds).sum();
    for t in times.iter().filter(|t| t.milliseconds >= all / 100.0) {
        println!(
            "    {:<32} {:>4} x {:>8.1} us = {:>7.2} ms",
            t.name,
            t.launches,
            t.milliseconds * 1e3 / t.launches as f64,
            t.milliseconds
        );
    }
    Ok(())
}

/// Bytes of keys and values of one position.
fn kv_bytes(engine: &Arc<engine::Engine>) -> u64 {
    engine.plan().device.kv / engine.info().context.next_multiple_of(512) as u64
}
