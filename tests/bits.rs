//! Same bits however the work is cut: prompt whole or in pieces, alone or in a batch, any number of threads.

mod support;

use metrale::engine::{self, Bodies, Engine, Sequence, SequenceOptions, forward};
use metrale::error::Kind;
use metrale::options::{Compute, LoadOptions};
use std::path::Path;
use std::sync::Arc;
use support::golden::{Golden, folders};

fn engine(path: &Path, compute: Compute, threads: usize) -> Option<Arc<Engine>> {
    engine_with(path, compute, threads, u64::MAX)
}

/// One of which weights are left in their file until their second use, from `late` bytes of them on.
fn engine_with(path: &Path, compute: Compute, threads: usize, late: u64) -> Option<Arc<Engine>> {
    let (device, late_bytes) = (support::device(), Some(late));
    let options = LoadOptions { compute: Some(compute), threads, device, late_bytes, deterministic: true, ..LoadOptions::default() };
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
            // Weights that are met for the first time, for the second, and ever after; a single row first or a prompt.
            for (threads, piece) in [(1, golden.prompt.len()), (2, 1), (3, 16)] {
                let late = engine_with(&path, compute, threads, 0).unwrap();
                for _ in 0..2 {
                    assert!(
                        rows(&late, &golden.prompt, piece, next) == whole,
                        "{name} {compute:?}: {threads} threads differ while packing"
                    );
                }
                assert_eq!(late.fingerprint().unwrap(), two.fingerprint().unwrap(), "{name}");
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

/// Far into a sequence a single row's attention is computed in parts and merged; that of a prompt's rows is not.
#[test]
fn far_rows_have_the_bits_of_a_prompt_and_agree_with_the_definition() {
    if support::is_on_device() {
        println!("skipped: a device cuts attention in its own way");
        return;
    }
    // Past 1,536 positions there are four parts; 1,610 ends inside of one.
    let (far, more) = (1610, 3);
    let path = |name: &str| folders().into_iter().find(|p| p.ends_with(name)).unwrap();
    for name in ["llama", "gpt_oss-mxfp4"] {
        let one = engine(&path(name), Compute::F32, 1).unwrap();
        let tokens: Vec<i32> = (0..far + more).map(|i| (i * 7919 % one.info().vocab) as i32).collect();
        let last = |engine: &Arc<Engine>, cuts: &[usize]| {
            let mut s = sequence(engine);
            let mut rest = &tokens[..];
            for &cut in cuts {
                s.prefill(&rest[..cut]).unwrap();
                rest = &rest[cut..];
            }
            assert!(rest.is_empty());
            bits(s.logits().unwrap())
        };
        let whole = last(&one, &[far + more]);
        assert!(last(&one, &[far, 1, 1, 1]) == whole, "{name}: far single rows differ");
        let two = engine(&path(name), Compute::F32, 2).unwrap();
        assert!(last(&two, &[700, far - 700, 1, 2]) == whole, "{name}: far rows two by two differ");
        // A far one beside a near one, in one batch.
        let (mut a, mut b) = (sequence(&two), sequence(&two));
        a.prefill(&tokens[..far]).unwrap();
        b.prefill(&tokens[..5]).unwrap();
        tokens[far..].iter().for_each(|&token| forward(&mut [&mut b, &mut a], &[token, token]).unwrap());
        assert!(bits(a.logits().unwrap()) == whole, "{name}: in a batch differs");

        let run = |slice, bodies| one.capture(&tokens, slice, &["logits"], bodies).unwrap().remove(0).values;
        let (fast, defined) = (run(64, Bodies::Fast), run(64, Bodies::Definition));
        let most = fast.iter().zip(&defined).map(|(a, b)| (a - b).abs()).fold(0.0f32, f32::max);
        assert!(most < 1e-3, "{name}: far rows are {most} from the definition");
    }
}

/// A file that changes in place shows which weights are still there after a load, and that they are not after two uses.
#[test]
fn weights_wait_in_their_file_for_their_second_use() {
    if support::is_on_device() {
        return;
    }
    let fixture = folders().into_iter().find(|path| path.file_name().is_some_and(|name| name == "smollm3")).expect("a fixture");
    let folder = std::env::temp_dir().join(format!("metrale-late-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    for entry in std::fs::read_dir(&fixture).unwrap().map(Result::unwrap).filter(|entry| entry.file_type().unwrap().is_file()) {
        std::fs::copy(entry.path(), folder.join(entry.file_name())).unwrap();
    }
    let file = folder.join("model.safetensors");
    let kept = std::fs::read(&file).unwrap();
    let data = 8 + u64::from_le_bytes(kept[..8].try_into().unwrap());
    let overwrite = |bytes: &[u8]| {
        use std::io::{Seek, SeekFrom, Write};
        let mut file = std::fs::File::options().write(true).open(&file).unwrap();
        file.seek(SeekFrom::Start(data)).unwrap();
        file.write_all(bytes).unwrap();
    };
    let whole = &kept[data as usize..];
    let first = |engine: &Arc<Engine>| {
        let mut s = sequence(engine);
        s.prefill(&[5, 6, 7]).unwrap();
        bits(s.logits().unwrap())
    };
    let load = |late| engine_with(&folder, Compute::Fast, 1, late).unwrap();
    let (packed, late) = (load(u64::MAX), load(0));
    let wanted = first(&packed);
    overwrite(&vec![0; whole.len()]);
    assert!(first(&packed) == wanted && first(&late) != wanted);
    overwrite(whole);
    let late = load(0);
    assert!(first(&late) == wanted && first(&late) == wanted);
    overwrite(&vec![0; whole.len()]);
    assert!(first(&late) == wanted, "what was met twice is packed");
    std::fs::remove_dir_all(folder).unwrap();
}
