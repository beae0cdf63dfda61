//! Embeddings against a model in f64, against the references' encoder outputs, and pooling against pooling by hand.

mod support;

use metrale::engine::{self, Bodies, Engine, Pooling};
use metrale::error::Kind;
use metrale::options::{Compute, LoadOptions};
use std::path::Path;
use std::sync::Arc;
use support::Random;
use support::golden::Golden;
use support::llama64::{Llama, difference};

fn load(path: &Path, compute: Compute, threads: usize) -> Arc<Engine> {
    let options = LoadOptions { compute: Some(compute), context: 600, threads, ..LoadOptions::default() };
    engine::load(path, &options, None).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn tokens(vocab: usize, n: usize) -> Vec<i32> {
    let mut random = Random(41);
    (0..n).map(|_| random.below(vocab) as i32).collect()
}

#[test]
fn rows_are_those_of_a_model_in_f64() {
    let folder = support::fixtures().join("llama");
    let model = Llama::read(&folder);
    let text = tokens(320, 300);
    let mut past = model.past();
    let rows: Vec<Vec<f64>> = text.iter().map(|token| model.hidden(&mut past, *token)).collect();
    let width = rows[0].len();
    let mean: Vec<f64> = (0..width).map(|d| rows.iter().map(|row| row[d]).sum::<f64>() / rows.len() as f64).collect();
    let unit = |row: &[f64]| -> Vec<f64> {
        let length = row.iter().map(|v| v * v).sum::<f64>().sqrt();
        row.iter().map(|v| v / length).collect()
    };
    for (compute, allowed) in [(Compute::F32, 2e-5), (Compute::Fast, 4e-2)] {
        let engine = load(&folder, compute, 2);
        let got = |pooling, normalize| engine.embed(&text, pooling, normalize).unwrap();
        let every = got(Pooling::None, false);
        assert_eq!(every.len(), engine.embedding_len(text.len(), Pooling::None));
        for (row, expected) in every.chunks(width).zip(&rows) {
            assert!(difference(row, expected) < allowed, "{compute:?}: {}", difference(row, expected));
        }
        for (pooling, expected) in [(Pooling::Last, &rows[299]), (Pooling::First, &rows[0]), (Pooling::Mean, &mean)] {
            let (plain, scaled) = (got(pooling, false), got(pooling, true));
            assert!(difference(&plain, expected) < allowed, "{compute:?} {pooling:?}: {}", difference(&plain, expected));
            assert!(difference(&scaled, &unit(expected)) < allowed, "{compute:?} {pooling:?} of length 1");
            let length: f64 = scaled.iter().map(|v| f64::from(*v).powi(2)).sum();
            assert!((length - 1.0).abs() < 1e-6, "{pooling:?}: {length}");
        }
        let scaled = got(Pooling::None, true);
        assert!(scaled.chunks(width).zip(&rows).all(|(row, expected)| difference(row, &unit(expected)) < allowed));
    }
}

#[test]
fn every_family_embeds_what_its_logits_come_from() {
    let mut tried = 0;
    for path in support::golden::folders() {
        let options = LoadOptions { compute: Some(Compute::F32), context: 600, threads: 2, ..LoadOptions::default() };
        let Ok(engine) = engine::load(&path, &options, None) else { continue };
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let golden = Golden::read(&path);
        let rows = engine.embed(&golden.prompt, Pooling::None, false).unwrap();
        if let Some(translation) = &golden.translation {
            let expected: Vec<f64> = translation.encoded.iter().map(|v| f64::from(*v)).collect();
            assert!(difference(&rows, &expected) < 1e-3, "{name}: {}", difference(&rows, &expected));
            continue;
        }
        let hidden = engine.capture(&golden.prompt, 7, &["hidden"], Bodies::Definition).unwrap().remove(0);
        let expected: Vec<f64> = hidden.values.iter().map(|v| f64::from(*v)).collect();
        let off = difference(&rows, &expected);
        assert!(off < 2e-3, "{name}: {off}");
        // The same bits in any order of work, and for one row alone.
        let width = engine.info().hidden;
        assert_eq!(engine.embed(&golden.prompt, Pooling::Last, false).unwrap(), rows[rows.len() - width..], "{name}");
        let first = engine.embed(&golden.prompt[..1], Pooling::None, false).unwrap();
        assert!(first.iter().zip(&rows).all(|(a, b)| a.to_bits() == b.to_bits()), "{name}: a text of one token");
        tried += 1;
    }
    assert!(tried > 10);
}

#[test]
fn threads_and_slices_do_not_enter_and_errors_name_the_token() {
    let folder = support::fixtures().join("llama");
    let text = tokens(320, 520);
    let [one, two] = [1, 2].map(|threads| load(&folder, Compute::Fast, threads));
    let rows = one.embed(&text, Pooling::None, false).unwrap();
    assert_eq!(rows, two.embed(&text, Pooling::None, false).unwrap());
    let prefix = two.embed(&text[..300], Pooling::None, false).unwrap();
    assert!(prefix == rows[..prefix.len()], "what follows does not enter");
    assert_eq!(one.embed(&[], Pooling::Mean, false).unwrap_err().kind(), Kind::InvalidArgument);
    let e = one.embed(&[1, 2, 320], Pooling::Mean, false).unwrap_err();
    assert_eq!((e.kind(), e.offset()), (Kind::InvalidToken, Some(2)));
    let e = one.embed(&[1; 601], Pooling::Mean, false).unwrap_err();
    assert_eq!((e.kind(), e.wanted(), e.available()), (Kind::ContextFull, Some(601), Some(600)));
}
