use metrale::engine::{Loader, Sequence, SequenceOptions};
use metrale::options::LoadOptions;
use metrale::weights::{Access, Input};
use std::time::Instant;
fn main() {
    let mut args = std::env::args().skip(1);
    let path = std::path::PathBuf::from(args.next().unwrap());
    let threads = args.next().and_then(|t| t.parse().ok()).unwrap_or(1);
    let slice = args.next().and_then(|t| t.parse().ok()).unwrap_or(32usize << 20);
    let options = LoadOptions { threads, ..LoadOptions::default() };
    let start = Instant::now();
    let mut loader = Loader::new(Input::path(&path, Access::Map).unwrap(), &options);
    let mut pieces = Vec::new();
    let engine = loop {
        let before = Instant::now();
        let p = loader.progress();
        let made = loader.step(slice).unwrap();
        pieces.push((before.elapsed().as_secs_f64() * 1e3, p.phase, p.done_bytes));
        if let Some(e) = made {
            break e;
        }
    };
    let loaded = start.elapsed().as_secs_f64() * 1e3;
    for (ms, phase, done) in pieces.iter().filter(|p| p.0 > 1.0) {
        println!("{ms:8.2} ms {phase} at {done}");
    }
    let vocab = engine.info().vocab as i32;
    let prompt: Vec<i32> = (0..32).map(|i| (i * 7919 + 13) % vocab).collect();
    let mut s = Sequence::new(&engine, &SequenceOptions::default()).unwrap();
    let made = start.elapsed().as_secs_f64() * 1e3;
    s.prefill(&prompt).unwrap();
    let first = start.elapsed().as_secs_f64() * 1e3;
    println!("load {loaded:.1} sequence {:.1} prompt {:.1} first {first:.1}", made - loaded, first - made);
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    for l in status.lines().filter(|l| l.starts_with("VmHWM") || l.starts_with("RssAnon")) {
        println!("{l}");
    }
}
