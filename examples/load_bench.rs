//! How fast a checkpoint in the page cache comes onto an NVIDIA device: from the call that loads to the first token, beside the two rates that
//! bound it, measured in the same run.
//!
//!     load_bench [--in FOLDER] [--layers 36] [--rounds 3] [--prompt 32] [--device 1] [--threads N]
//!
//! Writes a checkpoint with the shapes of Qwen3-8B in BF16 (16.4 GB) into a new folder in FOLDER, by default the one for temporary files, and
//! removes it at the end. Each load has a process of its own, so the driver begins anew. `--at CHECKPOINT` loads once what is there, and is what
//! those processes do.
#![allow(unsafe_code)] // copies from pinned memory

#[path = "../benches/support/qwen3_8b.rs"]
mod qwen3_8b;

use metrale::backend::cuda::{Block, Device, Pinned, Stream};
use metrale::engine::{self, Chooser, Sequence, SequenceOptions, decode_step};
use metrale::options::LoadOptions;
use metrale::sampling::Sampler;
use std::error::Error;
use std::fs::File;
use std::ops::ControlFlow;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

type Result<T> = std::result::Result<T, Box<dyn Error>>;

struct Arguments {
    folder: PathBuf,
    layers: usize,
    rounds: usize,
    prompt: usize,
    device: usize,
    threads: usize,
    at: Option<PathBuf>,
}

fn arguments() -> Result<Arguments> {
    let mut a = Arguments { folder: std::env::temp_dir(), layers: 36, rounds: 3, prompt: 32, device: 1, threads: 0, at: None };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let value = words.next().ok_or(format!("{word} needs a value"))?;
        match word.as_str() {
            "--in" => a.folder = value.into(),
            "--layers" => a.layers = value.parse()?,
            "--rounds" => a.rounds = value.parse()?,
            "--prompt" => a.prompt = value.parse()?,
            "--device" => a.device = value.parse()?,
            "--threads" => a.threads = value.parse()?,
            "--at" => a.at = Some(value.into()),
            _ => return Err(format!("unknown option {word}").into()),
        }
    }
    Ok(a)
}

fn main() {
    let done = arguments().and_then(|a| match &a.at {
        Some(checkpoint) => load(&a, checkpoint),
        None => {
            let made = a.folder.join(format!("metrale-load-bench-{}", std::process::id()));
            let measured = std::fs::create_dir_all(&made).map_err(Into::into).and_then(|()| measure(&a, &made));
            let _ = std::fs::remove_dir_all(&made);
            measured
        }
    });
    if let Err(e) = done {
        eprintln!("load_bench: {e}");
        std::process::exit(1);
    }
}

fn measure(a: &Arguments, made: &Path) -> Result<()> {
    let started = Instant::now();
    let file = made.join("model.safetensors");
    let bytes = write_checkpoint(a.layers, made, &file)?;
    println!("a checkpoint of {:.2} GB, written in {:.1} s", bytes as f64 / 1e9, started.elapsed().as_secs_f64());
    if a.device > 0 {
        println!("pinned memory to the device: {:.1} GB/s", copy_rate(a.device)? / 1e9);
    }
    for round in 0..2 {
        println!("reads of the page cache, {} threads: {:.1} GB/s (round {round})", threads(), read_rate(&file, bytes)? / 1e9);
    }
    println!("reads of a new mapping of it: {:.1} GB/s", map_rate(&file, bytes)? / 1e9);
    for _ in 0..a.rounds {
        let number = |n: usize| n.to_string();
        let (device, threads, prompt) = (number(a.device), number(a.threads), number(a.prompt));
        let mut child = std::process::Command::new(std::env::current_exe()?);
        child.arg("--at").arg(made).args(["--device", &device, "--threads", &threads, "--prompt", &prompt]);
        if !child.status()?.success() {
            return Err("a load failed".into());
        }
    }
    Ok(())
}

fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// One load, and its first token.
fn load(a: &Arguments, checkpoint: &Path) -> Result<()> {
    let started = Instant::now();
    let seconds = || started.elapsed().as_secs_f64();
    let options = LoadOptions { device: a.device, threads: a.threads, context: a.prompt + 32, ..LoadOptions::default() };
    let (mut phase, mut phases) = ("", String::new());
    let mut progress = |p: engine::Progress| {
        if p.phase != phase {
            phase = p.phase;
            phases += &format!("{phase} at {:.3}, ", seconds());
        }
        ControlFlow::Continue(())
    };
    let engine = engine::load(checkpoint, &options, Some(&mut progress))?;
    let loaded = seconds();
    let mut sequence = Sequence::new(&engine, &SequenceOptions::default())?;
    sequence.prefill(&(0..a.prompt as i32).map(|i| i * 37 % 1000).collect::<Vec<_>>())?;
    let read = seconds();
    let mut chooser = Chooser::new(Sampler::greedy());
    chooser.ignore_end = true;
    let mut tokens = [0];
    decode_step(&mut [&mut sequence], &mut [&mut chooser], &mut tokens)?;
    let bytes = std::fs::metadata(checkpoint.join("model.safetensors")).map_or(0, |m| m.len());
    println!(
        "{phases}loaded at {loaded:.3}, prompt read at {read:.3} s: {:.1} GB/s to the first token; a step later {:.3} s",
        bytes as f64 / read / 1e9,
        seconds()
    );
    Ok(())
}

/// Bytes a second from pinned memory to the device.
fn copy_rate(device: usize) -> Result<f64> {
    const BYTES: usize = 256 << 20;
    let device = Device::open(device - 1)?;
    let stream = Arc::new(Stream::new(&device, false)?);
    let (from, to) = (Pinned::new(&device, BYTES, "a copy's source")?, Block::new(&device, BYTES, "a copy's target")?);
    let mut best = 0.0f64;
    for _ in 0..4 {
        let started = Instant::now();
        for _ in 0..4 {
            // SAFETY: nobody writes `from`, which outlasts the copies.
            unsafe { stream.write_pinned(to.address(), &from, 0..BYTES) }?;
        }
        stream.synchronize()?;
        best = best.max((4 * BYTES) as f64 / started.elapsed().as_secs_f64());
    }
    Ok(best)
}

/// Bytes a second at which all threads together read a file that is in memory.
fn read_rate(file: &Path, bytes: u64) -> Result<f64> {
    const PIECE: u64 = 8 << 20;
    let (file, next, started) = (File::open(file)?, AtomicU64::new(0), Instant::now());
    let work = || -> std::io::Result<()> {
        let mut buffer = vec![0u8; PIECE as usize];
        loop {
            let at = next.fetch_add(PIECE, Ordering::Relaxed);
            if at >= bytes {
                return Ok(());
            }
            file.read_exact_at(&mut buffer[..PIECE.min(bytes - at) as usize], at)?;
        }
    };
    std::thread::scope(|scope| {
        (0..threads()).map(|_| scope.spawn(work)).collect::<Vec<_>>().into_iter().try_for_each(|t| t.join().unwrap())
    })?;
    Ok(bytes as f64 / started.elapsed().as_secs_f64())
}

/// The same through a mapping that nobody has touched yet.
fn map_rate(file: &Path, bytes: u64) -> Result<f64> {
    const PIECE: usize = 1 << 20;
    // SAFETY: nobody else knows the file, which stays as it is.
    let map = unsafe { memmap2::Mmap::map(&File::open(file)?) }?;
    let (pieces, next, started) = (map.chunks(PIECE), AtomicU64::new(0), Instant::now());
    let work = || {
        let mut sum = 0u64;
        while let Some(piece) = pieces.clone().nth(next.fetch_add(1, Ordering::Relaxed) as usize) {
            sum = piece.as_chunks().0.iter().fold(sum, |sum, word| sum.wrapping_add(u64::from_le_bytes(*word)));
        }
        sum
    };
    let sums = std::thread::scope(|scope| {
        (0..threads()).map(|_| scope.spawn(work)).collect::<Vec<_>>().into_iter().map(|t| t.join().unwrap()).collect::<Vec<_>>()
    });
    std::hint::black_box(sums);
    Ok(bytes as f64 / started.elapsed().as_secs_f64())
}

/// Tensors with their shapes, in the order of the file; norms have one dimension.
fn tensors(layers: usize) -> Vec<(String, Vec<u64>)> {
    let mut all = vec![("model.embed_tokens.weight".to_string(), vec![151936, 4096])];
    for layer in 0..layers {
        let matrices = [
            ("self_attn.q_proj", [4096, 4096]),
            ("self_attn.k_proj", [1024, 4096]),
            ("self_attn.v_proj", [1024, 4096]),
            ("self_attn.o_proj", [4096, 4096]),
            ("mlp.gate_proj", [12288, 4096]),
            ("mlp.up_proj", [12288, 4096]),
            ("mlp.down_proj", [4096, 12288]),
        ];
        let norms = [("self_attn.q_norm", 128), ("self_attn.k_norm", 128), ("input_layernorm", 4096), ("post_attention_layernorm", 4096)];
        let name = |name: &str| format!("model.layers.{layer}.{name}.weight");
        all.extend(matrices.map(|(tensor, shape)| (name(tensor), shape.to_vec())));
        all.extend(norms.map(|(tensor, len)| (name(tensor), vec![len])));
    }
    all.extend([("model.norm.weight".into(), vec![4096]), ("lm_head.weight".into(), vec![151936, 4096])]);
    all
}

/// Writes config and tensors in BF16; the file's bytes.
fn write_checkpoint(layers: usize, folder: &Path, file: &Path) -> Result<u64> {
    std::fs::write(folder.join("config.json"), qwen3_8b::config(layers))?;
    let (mut header, mut places, mut at) = (String::new(), Vec::new(), 0u64);
    for (name, shape) in tensors(layers) {
        let bytes = 2 * shape.iter().product::<u64>();
        let comma = if header.is_empty() { "" } else { "," };
        header += &format!(r#"{comma}"{name}":{{"dtype":"BF16","shape":{shape:?},"data_offsets":[{at},{}]}}"#, at + bytes);
        places.push((at, bytes, shape.len() == 1));
        at += bytes;
    }
    let mut start = format!("{{{header}}}");
    start += &" ".repeat((8 - start.len() % 8) % 8);
    let (begin, out) = (8 + start.len() as u64, File::create(file)?);
    out.write_all_at(&(start.len() as u64).to_le_bytes(), 0)?;
    out.write_all_at(start.as_bytes(), 8)?;
    // Values of either sign below 1/32, and ones.
    let mut state = 1u64;
    let values: Vec<u8> = (0..4 << 20)
        .flat_map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state >> 33) as f32 / (1u64 << 35) as f32 - 1.0 / 32.0).to_bits().to_le_bytes()[2..].to_vec()
        })
        .collect();
    let ones: Vec<u8> = 1f32.to_bits().to_le_bytes()[2..].repeat(4096);
    let next = AtomicU64::new(0);
    let work = || -> std::io::Result<()> {
        while let Some((at, bytes, is_norm)) = places.get(next.fetch_add(1, Ordering::Relaxed) as usize) {
            let block: &[u8] = if *is_norm { &ones } else { &values };
            for done in (0..*bytes).step_by(block.len()) {
                out.write_all_at(&block[..block.len().min((bytes - done) as usize)], begin + at + done)?;
            }
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        (0..threads()).map(|_| scope.spawn(work)).collect::<Vec<_>>().into_iter().try_for_each(|t| t.join().unwrap())
    })?;
    Ok(begin + at)
}
