//! Same bits however the work is cut: prompt whole or in pieces, alone or in a batch, any number of threads.

mod support;

use metrale::engine::{self, Engine, Sequence, SequenceOptions, forward};
use metrale::error::Kind;
use metrale::options::{Compute, LoadOptions};
use std::path::Path;
use std::sync::Arc;
use support::golden::{Golden, folders};

fn engine(path: &Path, compute: Compute, threads: usize) -> Option<Arc<Engine>> {
    let options = LoadOptions { compute: Some(compute), threads, device: support::device(), deterministic: true, ..LoadOptions::default() };
    engine::load(path, &options, None).ok()
}

/// An empty sequence; of a model that translates, with a source.
fn sequence(engine: &Arc<Engine>) -> Sequence {
    let mut sequence = Sequence::new(engine, &SequenceOptions::default()).unwrap();
    if engine.has_encoder() {
        let source: Vec<i32> = (5..50).collect();
        sequence.encode(&source).unwrap();
    }
    sequence
}

/// The row after `prompt`, and the rows of eight greedy-free steps along `next`.
fn rows(engine: &Arc<Engine>, prompt: &[i32], piece: usize, next: &[i32]) -> Vec<Vec<u32>> {
    let mut s = sequence(engine);
    prompt.chunks(piece).for_each(|tokens| s.prefill(tokens).unwrap());
    let mut rows = vec![bits(s.logits().unwrap())];
    for &token in next {
        s.prefill(&[token]).unwrap();
        rows.push(bits(s.logits().unwrap()));
    }
    rows
}

fn bits(row: &[f32]) -> Vec<u32> {
    row.iter().map(|v| v.to_bits()).collect()
}

/// On a device with kernels on the host: one family, for the others tests/determinism.rs and a real device.
#[test]
fn pieces_and_batches_on_a_device() {
    support::run_on_device(support::cuda::Mode::Plain, "lfm2", &["pieces_batches_and_threads_give_the_same_bits"]);
}

#[test]
fn pieces_batches_and_threads_give_the_same_bits() {
    let only = std::env::var("METRALE_ONLY").unwrap_or_default();
    let mut checked = 0;
    for path in folders() {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if !only.is_empty() && !only.split(',').any(|o| o == name) {
            continue;
        }
        for compute in [Compute::F32, Compute::Fast] {
            let Some(two) = engine(&path, compute, 2) else { continue };
            let golden = Golden::read(&path);
            if golden.decode_ids.is_empty() || golden.prompt.len() < 20 {
                continue;
            }
            let next = &golden.decode_ids[..8];
            let whole = rows(&two, &golden.prompt, golden.prompt.len(), next);
            for piece in [1, 7, 16] {
                assert!(rows(&two, &golden.prompt, piece, next) == whole, "{name} {compute:?}: pieces of {piece} differ");
            }
            for threads in [1, 3] {
                let other = engine(&path, compute, threads).unwrap();
                assert!(rows(&other, &golden.prompt, golden.prompt.len(), next) == whole, "{name} {compute:?}: {threads} threads differ");
            }
            // Three sequences of other lengths in one batch: the first is the one above.
            let mut a = sequence(&two);
            let (mut b, mut c) = (sequence(&two), sequence(&two));
            a.prefill(&golden.prompt).unwrap();
            b.prefill(&golden.prompt[..3]).unwrap();
            c.prefill(&golden.prompt[..19]).unwrap();
            for (i, &token) in next.iter().enumerate() {
                forward(&mut [&mut a, &mut b, &mut c], &[token, golden.prompt[i], golden.prompt[i + 1]]).unwrap();
                assert!(bits(a.logits().unwrap()) == whole[i + 1], "{name} {compute:?}: step {i} in a batch differs");
            }
            // Cutting back and going on is as if the tail had never been; where a recurrence cannot go back, nothing changes.
            let (len, held) = (golden.prompt.len(), a.len());
            match a.truncate(len) {
                Ok(()) => {
                    assert!(bits(a.logits().unwrap()) == whole[0], "{name} {compute:?}: truncate differs");
                    a.prefill(&next[..1]).unwrap();
                    assert!(bits(a.logits().unwrap()) == whole[1], "{name} {compute:?}: after truncate differs");
                }
                Err(e) => {
                    assert!(e.kind() == Kind::Unsupported && a.len() == held, "{name}: {e}");
                    assert!(bits(a.logits().unwrap()) == whole[8], "{name} {compute:?}: a refused truncate changed the row");
                }
            }
            checked += 1;
        }
    }
    println!("{checked} engines checked");
    assert!(checked > 0);
}
