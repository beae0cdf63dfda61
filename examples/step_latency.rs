//! How well bounded work keeps its bounds: overshoot of `step` beyond its budget, how soon a cancelled call returns, and what
//! forks, saves and restores cost.
//!
//!     step_latency MODEL [--threads N] [--prompt 4096] [--calls 400] [--synthetic TYPE] [--prefix MIB]
//!
//! Work is measured while a prompt is read, all of it, and while tokens are produced after it. Overshoot is the time of a call
//! less its budget; calls that were done before are not counted. Cancel latency runs from just before the cancel, made by another
//! thread at a random moment, to the return of the cancelled call. Percentiles are in microseconds. With `--prefix` prompts that share
//! their first half are read with a prefix tree of that size, and nothing else is measured.
//!
//! Two rows stand beside each: of all samples, and of those during which no thread of ours waited for a processor that the system
//! had given to somebody else (by the kernel's own account, `schedstat`). The control is a program that does nothing: as many
//! threads as the engine has spin until a deadline and meet; how late they are is what the machine adds to every figure.

use metrale::engine::{Chooser, Engine, Loader, Sequence, SequenceOptions, Snapshot, StepState, Stepped, decode_step, step};
use metrale::error::Kind;
use metrale::options::{LoadOptions, Synthetic};
use metrale::sampling::Sampler;
use metrale::weights::{Access, Input};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

struct Arguments {
    model: PathBuf,
    options: LoadOptions,
    prompt: usize,
    calls: usize,
}

const USAGE: &str = "usage: step_latency MODEL [--threads N] [--prompt 4096] [--calls 400] [--synthetic Q8_0] [--prefix MIB]";

fn arguments() -> Result<Arguments, String> {
    let mut a = Arguments { model: PathBuf::new(), options: LoadOptions::default(), prompt: 4096, calls: 400 };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let mut value = || words.next().ok_or(format!("{word} needs a value"));
        let number = |text: String| text.parse::<usize>().map_err(|_| format!("{text} is no number"));
        match word.as_str() {
            "--threads" => a.options.threads = number(value()?)?,
            "--prompt" => a.prompt = number(value()?)?.max(1),
            "--calls" => a.calls = number(value()?)?.max(1),
            "--prefix" => a.options.prefix_bytes = number(value()?)? as u64 * (1 << 20),
            "--synthetic" => a.options.synthetic = Some(Synthetic::parse(&value()?, 1).map_err(|e| e.to_string())?),
            _ if word.starts_with('-') => return Err(format!("unknown option {word}")),
            _ => a.model = word.into(),
        }
    }
    if a.model.as_os_str().is_empty() {
        return Err(USAGE.into());
    }
    a.options.context = a.prompt + 512;
    Ok(a)
}

/// Microseconds, and whether somebody else had one of our processors meanwhile.
struct Sample {
    us: f64,
    disturbed: bool,
}

/// Nanoseconds that the threads of this process have waited for a processor while they could run, or that the machine below
/// this one took its processors away.
fn waited() -> u64 {
    let tasks = std::fs::read_dir("/proc/self/task").into_iter().flatten().flatten();
    let waited = |task: std::fs::DirEntry| -> Option<u64> {
        std::fs::read_to_string(task.path().join("schedstat")).ok()?.split_whitespace().nth(1)?.parse().ok()
    };
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    // The eighth number of the first line, in hundredths of a second.
    let stolen = stat.split_whitespace().nth(8).and_then(|n| n.parse::<u64>().ok()).unwrap_or(0);
    tasks.filter_map(waited).sum::<u64>() + stolen * 10_000_000
}

/// Waits shorter than this are the wake-up of a thread, not the absence of a processor.
const DISTURBED: u64 = 200_000;

/// Times what `work` says it took, and whether it was disturbed.
fn observed(work: impl FnOnce() -> metrale::error::Result<Option<f64>>) -> metrale::error::Result<Option<Sample>> {
    let before = waited();
    let us = work()?;
    let disturbed = waited().saturating_sub(before) > DISTURBED;
    Ok(us.map(|us| Sample { us, disturbed }))
}

fn print(what: &str, samples: &[Sample]) {
    for disturbed in [true, false] {
        let mut us: Vec<f64> = samples.iter().filter(|s| disturbed || !s.disturbed).map(|s| s.us).collect();
        us.sort_by(f64::total_cmp);
        let at = |p: f64| us.get(((us.len() as f64 - 1.0) * p).round() as usize).copied().unwrap_or(0.0);
        let what = if disturbed { what } else { "    undisturbed" };
        println!("{what:<40} p50 {:>7.0}  p99 {:>7.0}  most {:>7.0} us  n {}", at(0.5), at(0.99), at(1.0), us.len());
    }
}

/// Loads a slice at a time, as `metrale_load_step` does with a budget of 0, and says how long slices take.
fn load_in_slices(a: &Arguments) -> metrale::error::Result<Arc<Engine>> {
    let mut loader = Loader::new(Input::path(&a.model, Access::Map)?, &a.options);
    let (mut samples, mut words, mut whole) = (Vec::new(), Vec::new(), Vec::new());
    loop {
        let (before, started) = (loader.progress(), Instant::now());
        let mut made = None;
        let sample = observed(|| {
            made = loader.step_for(256 << 10, Some(Duration::from_micros(250)))?;
            Ok(Some(started.elapsed().as_secs_f64() * 1e6))
        })?;
        let now = loader.progress();
        match before.phase {
            "tokenizer" => words.extend(sample),
            _ if now.done_bytes > before.done_bytes => samples.extend(sample),
            _ => whole.extend(sample),
        }
        if let Some(engine) = made {
            print("load: slices of 256 KiB", &samples);
            print("load: tokenizer, 250 us at a time", &words);
            let pieces: Vec<String> = whole.iter().filter(|s| s.us > 100.0).map(|s| format!("{:.1} ms", s.us / 1e3)).collect();
            println!("{:<40} {}", "load: pieces that are not cut, in order", pieces.join(", "));
            return Ok(engine);
        }
    }
}

/// `threads` threads that spin until a deadline and then meet: how late the last one is.
fn control(threads: usize, budget: Duration, calls: usize) -> metrale::error::Result<Vec<Sample>> {
    let start = Instant::now();
    let now = || start.elapsed().as_nanos() as u64;
    // The round and its deadline, and how many others have come to its end.
    let (deadline, round, met) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let mut samples = Vec::new();
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(|| {
                let mut seen = 0;
                while seen < calls as u64 {
                    if round.load(Ordering::Acquire) > seen {
                        seen += 1;
                        while now() < deadline.load(Ordering::Acquire) {
                            std::hint::spin_loop();
                        }
                        met.fetch_add(1, Ordering::AcqRel);
                    }
                    std::hint::spin_loop();
                }
            });
        }
        for _ in 0..calls {
            let sample = observed(|| {
                let end = now() + budget.as_nanos() as u64;
                met.store(0, Ordering::Release);
                deadline.store(end, Ordering::Release);
                round.fetch_add(1, Ordering::AcqRel);
                while now() < end || met.load(Ordering::Acquire) + 1 < threads as u64 {
                    std::hint::spin_loop();
                }
                Ok(Some((now() - end) as f64 / 1e3))
            });
            samples.extend(sample.ok().flatten());
        }
    });
    Ok(samples)
}

fn tokens(engine: &Engine, count: usize) -> Vec<i32> {
    (0..count).map(|i| (i * 7919 % engine.info().vocab) as i32).collect()
}

fn greedy() -> Chooser {
    let mut chooser = Chooser::new(Sampler::greedy());
    chooser.ignore_end = true;
    chooser
}

/// Overshoot of calls that ran out of time, while the queue is read or, without one, while tokens are produced.
fn overshoot(mut sequence: Sequence, budget: Duration, calls: usize) -> metrale::error::Result<Vec<Sample>> {
    let (mut chooser, decode) = (greedy(), sequence.queued() == 0);
    let mut samples = Vec::new();
    while if decode { samples.len() < calls && sequence.len() < sequence.capacity() } else { sequence.queued() > 0 } {
        let mut out = [Stepped::default()];
        samples.extend(observed(|| {
            let started = Instant::now();
            step(&mut [&mut sequence], &mut [&mut chooser], Some(budget), &mut out)?;
            let spent = started.elapsed();
            let late = spent.saturating_sub(budget).as_secs_f64() * 1e6;
            Ok(matches!(out[0].state, StepState::Unfinished).then_some(late))
        })?);
    }
    Ok(samples)
}

/// Latency of cancels that hit a running call: a prefill of `prompt`, or a decode step where there is none.
fn cancel(sequence: &mut Sequence, prompt: &[i32], calls: usize) -> metrale::error::Result<Vec<Sample>> {
    let (start, at) = (Instant::now(), AtomicU64::new(0));
    let (now, canceller) = (|| start.elapsed().as_nanos() as u64, Arc::clone(sequence.canceller()));
    let mut chooser = greedy();
    let (ask, asked) = mpsc::channel::<u64>();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for when in asked {
                // Asleep at first, then awake, so that the moment of the cancel is known.
                std::thread::sleep(Duration::from_nanos(when.saturating_sub(now() + 200_000)));
                while now() < when {
                    std::hint::spin_loop();
                }
                at.store(now(), Ordering::SeqCst);
                canceller.cancel();
            }
        });
        let mut samples = Vec::new();
        for round in 0..calls as u64 {
            if sequence.len() == sequence.capacity() {
                break;
            }
            let delay = if prompt.is_empty() { 300_000 + round * 131_071 % 4_000_000 } else { 1_000_000 + round * 7_919_003 % 60_000_000 };
            samples.extend(observed(|| {
                let when = now() + delay;
                // Nobody listens once the thread is gone, which it is not.
                let _ = ask.send(when);
                loop {
                    let ended = match prompt.is_empty() {
                        false => sequence.prefill(prompt),
                        true => decode_step(&mut [sequence], &mut [&mut chooser], &mut [0]).map(|_| ()),
                    };
                    match ended {
                        Err(e) if e.kind() == Kind::Cancelled => return Ok(Some((now() - at.load(Ordering::SeqCst)) as f64 / 1e3)),
                        other => other?,
                    }
                    // A cancel between two calls meets none; the next round's will.
                    if now() > when || sequence.len() == sequence.capacity() {
                        std::thread::sleep(Duration::from_millis(1));
                        return Ok(None);
                    }
                }
            })?);
        }
        drop(ask);
        Ok(samples)
    })
}

/// Overshoot while prompts are read that begin like earlier ones and then part, so that steps take up what the tree has and put into it.
fn prefixes(engine: &Arc<Engine>, a: &Arguments) -> metrale::error::Result<()> {
    let (vocab, mut rounds) = (engine.info().vocab, 0);
    for ms in [1, 2, 4] {
        let mut samples = Vec::new();
        for _ in 0..4 {
            rounds += 1;
            let mut prompt = tokens(engine, a.prompt);
            let half = prompt.len() / 2;
            prompt[half..].iter_mut().enumerate().for_each(|(i, token)| *token = ((i * 104_729 + rounds * 31) % vocab) as i32);
            let mut sequence = Sequence::new(engine, &SequenceOptions::default())?;
            sequence.feed(&prompt)?;
            samples.extend(overshoot(sequence, Duration::from_millis(ms), a.calls)?);
        }
        print(&format!("prefix tree: overshoot of step, {ms} ms"), &samples);
    }
    println!("{:?}", engine.prefix_counts());
    Ok(())
}

/// Forks, their first writes, saves and restores of a long sequence.
fn state(sequence: &Sequence, calls: usize) -> metrale::error::Result<()> {
    let engine = sequence.engine();
    let time = |what: &str, times: &[f64], note: String| {
        let mut us = times.to_vec();
        us.sort_by(f64::total_cmp);
        println!("{what:<40} p50 {:>7.1}  most {:>7.1} us  {note}", us[us.len() / 2], us[us.len() - 1]);
    };
    let (mut fork, mut write) = (Vec::new(), Vec::new());
    let cache = engine.cache_bytes();
    let (mut taken, mut copied) = (0, 0);
    for _ in 0..calls.min(100) {
        let started = Instant::now();
        let mut copy = sequence.fork()?;
        fork.push(started.elapsed().as_secs_f64() * 1e6);
        taken = engine.cache_bytes() - cache;
        let started = Instant::now();
        copy.prefill(&[1])?;
        write.push(started.elapsed().as_secs_f64() * 1e6);
        copied = engine.cache_bytes() - cache;
    }
    time(&format!("fork of {} tokens", sequence.len()), &fork, format!("cache bytes taken: {taken}"));
    time("first token of a fork (copies a page)", &write, format!("cache bytes taken: {copied}"));
    let (mut save, mut restore, mut size) = (Vec::new(), Vec::new(), 0);
    for _ in 0..calls.min(20) {
        let started = Instant::now();
        let bytes = sequence.snapshot()?.to_bytes()?;
        save.push(started.elapsed().as_secs_f64() * 1e6);
        let started = Instant::now();
        let mut back = Sequence::new(engine, &SequenceOptions::default())?;
        back.restore(&Snapshot::from_bytes(engine, &bytes)?)?;
        restore.push(started.elapsed().as_secs_f64() * 1e6);
        size = bytes.len();
    }
    let speed = |times: &[f64]| {
        let mut us = times.to_vec();
        us.sort_by(f64::total_cmp);
        format!("{} bytes, {:.0} MB/s", size, size as f64 / us[us.len() / 2])
    };
    time("save", &save, speed(&save));
    time("restore", &restore, speed(&restore));
    Ok(())
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let a = arguments()?;
    let engine = load_in_slices(&a)?;
    let info = engine.info();
    println!("{}, {} parameters, {} threads, {}; prompt {} tokens", info.model_type, info.parameters, info.threads, info.simd, a.prompt);
    for ms in [1, 2, 4] {
        print(&format!("control: spinning threads meet, {ms} ms"), &control(info.threads, Duration::from_millis(ms), 4 * a.calls)?);
    }
    if a.options.prefix_bytes > 0 {
        return Ok(prefixes(&engine, &a)?);
    }
    let prompt = tokens(&engine, a.prompt);
    let new = || Sequence::new(&engine, &SequenceOptions::default());
    let mut read = new()?;
    for ms in [1, 2, 4] {
        let mut sequence = new()?;
        sequence.feed(&prompt)?;
        print(&format!("prefill: overshoot of step, {ms} ms"), &overshoot(sequence, Duration::from_millis(ms), a.calls)?);
    }
    print("prefill: cancel latency", &cancel(&mut new()?, &prompt, a.calls)?);
    read.prefill(&prompt)?;
    for ms in [1, 2, 4] {
        print(&format!("decode: overshoot of step, {ms} ms"), &overshoot(read.fork()?, Duration::from_millis(ms), a.calls)?);
    }
    print("decode: cancel latency", &cancel(&mut read.fork()?, &[], a.calls)?);
    state(&read, a.calls)?;
    Ok(())
}
