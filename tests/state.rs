//! What a sequence was can be had again: random walks of decoding, marks, rollbacks, cuts, forks and snapshots, each step
//! compared bit for bit with a fresh sequence that was given the same tokens.
//!
//! Weights are made up, so that the tests need no checkpoint: bits are compared, not meanings.

mod support;

use metrale::engine::{self, Engine, Mark, Sequence, SequenceOptions, Snapshot, forward};
use metrale::error::Kind;
use metrale::options::{Compute, LoadOptions, Synthetic};
use metrale::tensor::DType;
use serde_json::Value;
use std::collections::HashMap;
use std::sync::Arc;
use support::models::VOCAB;
use support::{Random, Scratch, models};

fn load(name: &str, config: &Value) -> Arc<Engine> {
    let folder = Scratch::new(&format!("state-{name}"));
    folder.file("config.json", config.to_string());
    let synthetic = Some(Synthetic::of(DType::BF16, 7));
    let options = LoadOptions {
        compute: Some(Compute::Fast),
        threads: 2,
        synthetic,
        device: support::device(),
        deterministic: true,
        ..LoadOptions::default()
    };
    engine::load(folder.path(), &options, None).unwrap_or_else(|e| panic!("{name}: {e}"))
}

fn empty(engine: &Arc<Engine>) -> Sequence {
    let mut sequence = Sequence::new(engine, &SequenceOptions { context: 600 }).unwrap();
    if engine.has_encoder() {
        sequence.encode(&(5..50).collect::<Vec<_>>()).unwrap();
    }
    sequence
}

fn bits(sequence: &Sequence) -> Vec<u32> {
    sequence.logits().unwrap().iter().map(|v| v.to_bits()).collect()
}

/// Rows of fresh runs, by tokens.
struct Fresh {
    engine: Arc<Engine>,
    rows: HashMap<Vec<i32>, Vec<u32>>,
}

impl Fresh {
    fn agrees(&mut self, sequence: &Sequence, tokens: &[i32], what: &str) {
        assert_eq!(sequence.tokens(), tokens, "{what}");
        if tokens.is_empty() {
            assert_eq!(sequence.logits().unwrap_err().kind(), Kind::InvalidState, "{what}");
            return;
        }
        let row = self.rows.entry(tokens.to_vec()).or_insert_with(|| {
            let mut fresh = empty(&self.engine);
            fresh.prefill(tokens).unwrap();
            bits(&fresh)
        });
        assert!(bits(sequence) == *row, "{what}: bits differ after {} tokens", tokens.len());
    }
}

/// A sequence, and what it should hold.
struct Walker {
    sequence: Sequence,
    tokens: Vec<i32>,
    marks: Vec<(Mark, usize)>,
    /// Marks that ended.
    ended: Vec<Mark>,
    /// Length before the last call, while nothing else happened since.
    undo: Option<usize>,
}

impl Walker {
    fn new(sequence: Sequence, tokens: Vec<i32>) -> Walker {
        Walker { sequence, tokens, marks: Vec::new(), ended: Vec::new(), undo: None }
    }

    fn cut(&mut self, len: usize) {
        self.tokens.truncate(len);
        self.undo = None;
        let (keep, end): (Vec<_>, Vec<_>) = self.marks.drain(..).partition(|m| m.1 <= len);
        self.marks = keep;
        self.ended.extend(end.into_iter().map(|m| m.0));
    }
}

fn tokens(random: &mut Random, n: usize) -> Vec<i32> {
    (0..n).map(|_| random.below(VOCAB) as i32).collect()
}

#[test]
fn walks_agree_with_fresh_runs() {
    let mut engines: Vec<(String, Arc<Engine>)> = Vec::new();
    for (name, config) in models::narrow() {
        let engine = load(name, &config);
        assert_eq!(engine.is_recurrent(), name != "llama", "{name}");
        engines.push((name.to_string(), engine));
    }
    // And every reference checkpoint there is.
    for path in support::golden::folders() {
        let options = LoadOptions { compute: Some(Compute::Fast), threads: 2, ..LoadOptions::default() };
        let Ok(engine) = engine::load(&path, &options, None) else { continue };
        // Models that translate need a source first; tests/nllb.rs walks them.
        if engine.info().context >= 600 && !engine.has_encoder() {
            engines.push((path.file_name().unwrap().to_string_lossy().into_owned(), engine));
        }
    }
    for (name, engine) in engines {
        let recurrent = engine.is_recurrent();
        let steps = if models::narrow().iter().any(|m| m.0 == name) { 150 } else { 40 };
        let mut fresh = Fresh { engine: Arc::clone(&engine), rows: HashMap::new() };
        let mut random = Random(0x5eed + name.len() as u64);
        let mut walkers = vec![Walker::new(empty(&engine), Vec::new())];
        let mut kept: Vec<(Snapshot, Vec<i32>)> = Vec::new();
        let mut refused = 0;
        for step in 0..steps {
            let at = random.below(walkers.len());
            let action = random.below(12);
            let what = format!("{name} step {step} action {action}");
            let count = walkers.len();
            let w = &mut walkers[at];
            match action {
                0..=2 => {
                    let n = 1 + random.below(6);
                    let more = tokens(&mut random, n);
                    w.undo = Some(w.tokens.len());
                    w.sequence.prefill(&more).unwrap();
                    w.tokens.extend(more);
                }
                3 => {
                    // All walkers take a token in one batch.
                    let next = tokens(&mut random, count);
                    let mut sequences: Vec<&mut Sequence> = walkers.iter_mut().map(|w| &mut w.sequence).collect();
                    forward(&mut sequences, &next).unwrap();
                    for (w, token) in walkers.iter_mut().zip(next) {
                        w.undo = Some(w.tokens.len());
                        w.tokens.push(token);
                    }
                }
                4 => {
                    let mark = w.sequence.mark().unwrap();
                    assert_eq!(mark.position(), w.tokens.len());
                    w.marks.push((mark, w.tokens.len()));
                }
                5 | 6 if !w.marks.is_empty() => {
                    let (mark, len) = w.marks[random.below(w.marks.len())];
                    w.sequence.rollback(mark).unwrap();
                    w.cut(len);
                }
                7 if !w.marks.is_empty() => {
                    let (mark, _) = w.marks.remove(random.below(w.marks.len()));
                    w.sequence.release(mark).unwrap();
                    w.ended.push(mark);
                }
                8 if count < 4 => {
                    let fork = Walker::new(w.sequence.fork().unwrap(), w.tokens.clone());
                    walkers.push(fork);
                }
                8 => {
                    walkers.remove(at);
                }
                9 => {
                    let len = random.below(w.tokens.len() + 1);
                    let known = len == w.tokens.len() || len == 0 || w.undo == Some(len) || w.marks.iter().any(|m| m.1 == len);
                    match w.sequence.truncate(len) {
                        Ok(()) => {
                            assert!(known || !recurrent, "{what}: the state at {len} cannot be known");
                            if len < w.tokens.len() {
                                w.cut(len);
                            }
                        }
                        Err(e) => {
                            assert!(e.kind() == Kind::Unsupported && recurrent && !known, "{what}: {e}");
                            refused += 1;
                        }
                    }
                }
                10 => {
                    if kept.len() < 4 {
                        let snapshot = w.sequence.snapshot().unwrap();
                        // Half of them go through bytes.
                        let snapshot = match kept.len() % 2 {
                            0 => snapshot,
                            _ => Snapshot::from_bytes(&engine, &snapshot.to_bytes().unwrap()).unwrap(),
                        };
                        kept.push((snapshot, w.tokens.clone()));
                    } else {
                        let (snapshot, held) = kept.remove(random.below(kept.len()));
                        w.sequence.restore(&snapshot).unwrap();
                        let ended: Vec<Mark> = w.marks.iter().map(|m| m.0).collect();
                        *w = Walker { ended, ..Walker::new(std::mem::replace(&mut w.sequence, empty(&engine)), held) };
                    }
                }
                // Calls that fail leave everything as it was.
                _ => {
                    let bad = [tokens(&mut random, 2), vec![engine.info().vocab as i32]].concat();
                    assert_eq!(w.sequence.prefill(&bad).unwrap_err().kind(), Kind::InvalidToken, "{what}");
                    assert_eq!(w.sequence.prefill(&[1; 601]).unwrap_err().kind(), Kind::ContextFull, "{what}");
                    for mark in &w.ended {
                        assert_eq!(w.sequence.rollback(*mark).unwrap_err().kind(), Kind::InvalidState, "{what}");
                    }
                    assert!(w.sequence.truncate(w.tokens.len() + 1).is_err(), "{what}");
                }
            }
            for w in &walkers {
                fresh.agrees(&w.sequence, &w.tokens, &what);
            }
            if walkers.is_empty() {
                walkers.push(Walker::new(empty(&engine), Vec::new()));
            }
        }
        assert!(recurrent || refused == 0, "{name}: {refused} cuts were refused");
        assert!(!recurrent || steps < 150 || refused > 0, "{name}: no cut was ever refused");
    }
}

#[test]
fn a_prompt_of_several_slices_is_one_state() {
    for (name, config) in models::narrow() {
        let engine = load(name, &config);
        let prompt = tokens(&mut Random(11), 590);
        let mut whole = empty(&engine);
        whole.prefill(&prompt).unwrap();
        for piece in [5, 100, 257] {
            let mut cut = empty(&engine);
            prompt.chunks(piece).for_each(|p| cut.prefill(p).unwrap());
            assert!(bits(&cut) == bits(&whole), "{name}: pieces of {piece}");
        }
        // A call of three slices is undone as a whole.
        let mut undone = empty(&engine);
        undone.prefill(&prompt[..20]).unwrap();
        let before = bits(&undone);
        undone.prefill(&prompt[20..]).unwrap();
        undone.truncate(20).unwrap();
        assert!(bits(&undone) == before, "{name}: undo");
        undone.prefill(&prompt[20..]).unwrap();
        assert!(bits(&undone) == bits(&whole), "{name}: after undo");
    }
}

#[test]
fn marks_of_other_sequences_and_models_are_refused() {
    let engine = load("lfm2", &models::narrow()[1].1);
    let other = load("llama-2", &models::narrow()[0].1);
    let (mut a, mut b) = (empty(&engine), empty(&engine));
    a.prefill(&[1, 2, 3]).unwrap();
    b.prefill(&[1, 2, 3]).unwrap();
    let mark = a.mark().unwrap();
    assert_eq!(b.rollback(mark).unwrap_err().kind(), Kind::InvalidState);
    assert_eq!(b.release(mark).unwrap_err().kind(), Kind::InvalidState);
    // A fork starts without marks.
    assert_eq!(a.fork().unwrap().rollback(mark).unwrap_err().kind(), Kind::InvalidState);
    let snapshot = a.snapshot().unwrap();
    let mut foreign = empty(&other);
    foreign.prefill(&[5]).unwrap();
    let before = bits(&foreign);
    assert_eq!(foreign.restore(&snapshot).unwrap_err().kind(), Kind::Mismatch);
    assert!(bits(&foreign) == before && foreign.tokens() == [5]);
    let mut small = Sequence::new(&engine, &SequenceOptions { context: 2 }).unwrap();
    assert_eq!(small.restore(&snapshot).unwrap_err().kind(), Kind::ContextFull);
    assert!(small.is_empty());
}

#[test]
fn broken_snapshots_are_errors() {
    for (name, config) in models::narrow() {
        let engine = load(&format!("{name}-bytes"), &config);
        let mut sequence = empty(&engine);
        sequence.prefill(&tokens(&mut Random(3), 40)).unwrap();
        let bytes = sequence.snapshot().unwrap().to_bytes().unwrap();
        let kind = |bytes: &[u8]| Snapshot::from_bytes(&engine, bytes).err().map(|e| e.kind());
        assert_eq!(kind(&bytes), None);
        // The seventh byte is the version; a newer one is told from a damaged one by its checksum.
        for at in (0..60).chain((60..bytes.len()).step_by(41)).chain([bytes.len() - 9, bytes.len() - 1]) {
            let mut broken = bytes.clone();
            broken[at] ^= 4;
            assert_eq!(kind(&broken), Some(Kind::CorruptFile), "{name}: byte {at}");
        }
        for len in [0, 7, 8, 16, 100, bytes.len() - 1] {
            assert_eq!(kind(&bytes[..len]), Some(Kind::CorruptFile), "{name}: {len} bytes");
        }
        assert_eq!(kind(&[&bytes[..], &[0; 8]].concat()), Some(Kind::CorruptFile));
        // The same shapes with other weights are another model.
        let folder = Scratch::new(&format!("state-{name}-other"));
        folder.file("config.json", config.to_string());
        let synthetic = Some(Synthetic::of(DType::BF16, 8));
        let options = LoadOptions { compute: Some(Compute::Fast), threads: 1, synthetic, ..LoadOptions::default() };
        let other = engine::load(folder.path(), &options, None).unwrap();
        let e = Snapshot::from_bytes(&other, &bytes).err().unwrap();
        assert_eq!(e.kind(), Kind::Mismatch, "{name}");
        let prints = [&engine, &other].map(|engine| engine.fingerprint().unwrap().to_string());
        assert!(prints[0] != prints[1] && prints.iter().all(|p| p.len() == 32 && e.message().contains(p.as_str())), "{name}: {e}");
    }
}

/// Bytes with a sound checksum over anything: each is refused or fits.
#[test]
fn forged_snapshots_do_no_harm() {
    // As the format says: FNV-1a over words and the bytes left, turned by 23.
    let seal = |body: &[u8]| {
        let words = body.chunks_exact(8).map(|w| u64::from_le_bytes(w.try_into().unwrap()));
        let rest = body.chunks_exact(8).remainder().iter().map(|b| u64::from(*b));
        let sum = words.chain(rest).fold(0xcbf2_9ce4_8422_2325u64, |sum, w| (sum ^ w).wrapping_mul(0x0100_0000_01b3).rotate_left(23));
        [body, &sum.to_le_bytes()].concat()
    };
    for (name, config) in models::narrow() {
        let engine = load(&format!("{name}-forged"), &config);
        let mut sequence = empty(&engine);
        sequence.prefill(&tokens(&mut Random(3), 40)).unwrap();
        let bytes = sequence.snapshot().unwrap().to_bytes().unwrap();
        let body = &bytes[..bytes.len() - 8];
        assert!(seal(body) == bytes, "{name}: the checksum is another");
        let forged = |at: usize, with: &[u8]| {
            let mut body = body.to_vec();
            body[at..at + with.len()].copy_from_slice(with);
            Snapshot::from_bytes(&engine, &seal(&body)).err().map(|e| e.kind())
        };
        // Magic 0, version 7, fingerprint 8, source 24, count 32, tokens 40.
        assert_eq!(forged(7, b"9"), Some(Kind::VersionMismatch), "{name}");
        assert_eq!(forged(8, &[1]), Some(Kind::Mismatch), "{name}");
        assert_eq!(forged(24, &[1]), Some(Kind::CorruptFile), "{name}: a source");
        for (count, kind) in [(0u64, Kind::CorruptFile), (39, Kind::CorruptFile), (41, Kind::CorruptFile), (u64::MAX, Kind::ContextFull)] {
            assert_eq!(forged(32, &count.to_le_bytes()), Some(kind), "{name}: {count} tokens");
        }
        for token in [-1, i32::MIN, VOCAB as i32, i32::MAX] {
            assert_eq!(forged(40 + 4 * 39, &token.to_le_bytes()), Some(Kind::CorruptFile), "{name}: token {token}");
        }
        let mut random = Random(9);
        for _ in 0..100 {
            let mut body = body.to_vec();
            for _ in 0..8 {
                let at = 200 + random.below(body.len() - 200);
                body[at] = random.next() as u8;
            }
            let snapshot = Snapshot::from_bytes(&engine, &seal(&body)).unwrap();
            sequence.restore(&snapshot).unwrap();
            sequence.prefill(&[1, 2]).unwrap();
            sequence.truncate(40).unwrap();
        }
    }
}

#[test]
fn plans_count_recurrent_state() {
    for (name, config) in models::narrow() {
        let folder = Scratch::new(&format!("state-plan-{name}"));
        folder.file("config.json", config.to_string());
        let synthetic = Some(Synthetic::of(DType::BF16, 7));
        let options = LoadOptions { compute: Some(Compute::Fast), synthetic, ..LoadOptions::default() };
        let [one, four] = [1, 4].map(|n| engine::plan(folder.path(), &options, n).unwrap().state);
        // By hand: the floats a layer carries, two copies for each sequence and one for all, rounded up to cache lines.
        let floats = match name {
            "llama" => 0,
            "lfm2" => 2 * 32,
            // Tail of 3 inputs of 16 + 16 + 48 channels; two heads of 24 (in blocks of 16: 32) by 16.
            "qwen3_5" => 3 * 80 + 2 * 32 * 16,
            // Tail of 3 inputs of 48 + 2 * 2 * 16 channels; four heads of 12 (16) by 16.
            _ => 3 * 112 + 4 * 16 * 16,
        };
        assert_eq!((one, four), (3 * 4 * floats, 9 * 4 * floats), "{name}");
    }
}
