//! How well bounded work keeps its bounds: overshoot of `step` beyond its budget, and how soon a cancelled call returns.
//!
//!     step_latency MODEL [--threads N] [--prompt 4096] [--calls 400]
//!
//! Every figure is measured while a prompt of 4,096 tokens is read, and while tokens are produced after it. Overshoot is the
//! time of a call less its budget; calls that were done before are not counted. Cancel latency runs from just before the cancel, made by
//! another thread at a random moment, to the return of the cancelled call. Percentiles are of all samples, in microseconds.

use metrale::engine::{self, Chooser, Engine, Sequence, SequenceOptions, StepState, Stepped, decode_step, step};
use metrale::error::Kind;
use metrale::options::LoadOptions;
use metrale::sampling::Sampler;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

struct Arguments {
    model: PathBuf,
    options: LoadOptions,
    prompt: usize,
    calls: usize,
}

fn arguments() -> Result<Arguments, String> {
    let mut a = Arguments { model: PathBuf::new(), options: LoadOptions::default(), prompt: 4096, calls: 400 };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut number = || words.next().and_then(|w| w.parse::<usize>().ok()).ok_or(format!("{word} needs a number"));
        match word.as_str() {
            "--threads" => a.options.threads = number()?,
            "--prompt" => a.prompt = number()?.max(1),
            "--calls" => a.calls = number()?.max(1),
            _ if word.starts_with('-') => return Err(format!("unknown option {word}")),
            _ => a.model = word.into(),
        }
    }
    if a.model.as_os_str().is_empty() {
        return Err("usage: step_latency MODEL [--threads N] [--prompt 4096] [--calls 400]".into());
    }
    a.options.context = a.prompt + 512;
    Ok(a)
}

/// Samples in microseconds, as a line.
fn print(what: &str, mut samples: Vec<f64>) {
    samples.sort_by(f64::total_cmp);
    let at = |p: f64| samples.get(((samples.len() as f64 - 1.0) * p).round() as usize).copied().unwrap_or(0.0);
    println!("{what:<44} p50 {:>8.0} us   p99 {:>8.0} us   most {:>8.0} us   n {}", at(0.5), at(0.99), at(1.0), samples.len());
}

fn tokens(engine: &Engine, count: usize) -> Vec<i32> {
    (0..count).map(|i| (i * 7919 % engine.info().vocab) as i32).collect()
}

fn greedy() -> Chooser {
    let mut chooser = Chooser::new(Sampler::greedy());
    chooser.ignore_end = true;
    chooser
}

/// Overshoot of calls that ran out of time, while the prompt is read or after it.
fn overshoot(engine: &Arc<Engine>, a: &Arguments, budget: Duration, decode: bool) -> metrale::error::Result<Vec<f64>> {
    let mut sequence = Sequence::new(engine, &SequenceOptions::default())?;
    let mut chooser = greedy();
    let prompt = tokens(engine, a.prompt);
    if decode {
        sequence.prefill(&prompt[..a.prompt.min(256)])?;
    } else {
        sequence.feed(&prompt)?;
    }
    let mut samples = Vec::new();
    let mut out = [Stepped::default()];
    for _ in 0..a.calls {
        let started = Instant::now();
        step(&mut [&mut sequence], &mut [&mut chooser], Some(budget), &mut out)?;
        if matches!(out[0].state, StepState::Unfinished) {
            samples.push(started.elapsed().saturating_sub(budget).as_secs_f64() * 1e6);
        }
        if !decode && sequence.queued() == 0 || sequence.len() == sequence.capacity() {
            break;
        }
    }
    Ok(samples)
}

/// Latency of cancels that hit a running call.
fn cancel(engine: &Arc<Engine>, a: &Arguments, decode: bool) -> metrale::error::Result<Vec<f64>> {
    let mut sequence = Sequence::new(engine, &SequenceOptions::default())?;
    let mut chooser = greedy();
    let prompt = tokens(engine, a.prompt);
    if decode {
        sequence.prefill(&prompt[..a.prompt.min(256)])?;
    }
    let start = Instant::now();
    let mut samples = Vec::new();
    for round in 0..a.calls as u64 {
        let canceller = Arc::clone(sequence.canceller());
        let at = AtomicU64::new(0);
        let delay = Duration::from_micros(if decode { round * 131 % 4000 } else { 1000 + round * 7919 % 60_000 });
        std::thread::scope(|scope| -> metrale::error::Result<()> {
            scope.spawn(|| {
                std::thread::sleep(delay);
                at.store(start.elapsed().as_nanos() as u64, Ordering::SeqCst);
                canceller.cancel();
            });
            let ended = match decode {
                false => sequence.prefill(&prompt),
                true => decode_step(&mut [&mut sequence], &mut [&mut chooser], &mut [0]).map(|_| ()),
            };
            let now = start.elapsed().as_nanos() as u64;
            match ended {
                Err(e) if e.kind() == Kind::Cancelled => samples.push((now - at.load(Ordering::SeqCst)) as f64 / 1e3),
                other => other?,
            }
            Ok(())
        })?;
        if sequence.len() == sequence.capacity() {
            break;
        }
    }
    Ok(samples)
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let a = arguments()?;
    let engine = engine::load(&a.model, &a.options, None)?;
    println!("{}, {} threads, {}; prompt {} tokens", engine.info().model_type, engine.info().threads, engine.info().simd, a.prompt);
    for decode in [false, true] {
        let what = if decode { "decode" } else { "prefill" };
        for ms in [1, 2, 4] {
            print(&format!("{what}: overshoot of step, budget {ms} ms"), overshoot(&engine, &a, Duration::from_millis(ms), decode)?);
        }
        print(&format!("{what}: cancel latency"), cancel(&engine, &a, decode)?);
    }
    Ok(())
}
