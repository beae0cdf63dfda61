//! Models that translate: sources, what of them sequences share, and beam search against searching everything.

mod support;

use metrale::engine::{self, BeamOptions, Bodies, Engine, Hypothesis, Sequence, SequenceOptions, Snapshot, beam};
use metrale::error::Kind;
use metrale::options::{Compute, LoadOptions};
use std::sync::Arc;
use support::golden::{Golden, folders};

fn open(named: impl Fn(&str) -> bool, threads: usize) -> Option<(Arc<Engine>, Golden)> {
    let path = folders().into_iter().find(|p| named(&p.file_name().unwrap().to_string_lossy()));
    let Some(path) = path else {
        println!("SKIPPED: the checkpoint is not beside the project");
        return None;
    };
    let options = LoadOptions { compute: Some(Compute::F32), threads, ..LoadOptions::default() };
    Some((engine::load(&path, &options, None).unwrap(), Golden::read(&path)))
}

fn translator() -> Option<(Arc<Engine>, Golden)> {
    open(|name| name == "nllb", 2)
}

fn started(engine: &Arc<Engine>, source: &[i32], tokens: &[i32]) -> Sequence {
    let mut sequence = Sequence::new(engine, &SequenceOptions::default()).unwrap();
    sequence.encode(source).unwrap();
    sequence.prefill(tokens).unwrap();
    sequence
}

fn bits(sequence: &Sequence) -> Vec<u32> {
    sequence.logits().unwrap().iter().map(|v| v.to_bits()).collect()
}

#[test]
fn misuse_is_refused_and_changes_nothing() {
    let Some((engine, golden)) = translator() else { return };
    let mut sequence = Sequence::new(&engine, &SequenceOptions::default()).unwrap();
    assert_eq!(sequence.prefill(&[2]).unwrap_err().kind(), Kind::InvalidState);
    assert_eq!(sequence.encode(&[]).unwrap_err().kind(), Kind::InvalidArgument);
    assert_eq!(sequence.encode(&[5, 320]).unwrap_err().kind(), Kind::InvalidToken);
    assert_eq!(sequence.encode(&vec![5; 1025]).unwrap_err().kind(), Kind::ContextFull);
    assert_eq!(sequence.source(), 0);
    sequence.encode(&golden.prompt).unwrap();
    sequence.prefill(&[2, 315]).unwrap();
    let row = bits(&sequence);
    assert_eq!(sequence.encode(&[5, 6]).unwrap_err().kind(), Kind::InvalidState);
    assert_eq!((sequence.source(), sequence.len(), bits(&sequence)), (golden.prompt.len(), 2, row));
    assert_eq!(engine.capture(&[2], 1, &["logits"], Bodies::Fast).unwrap_err().kind(), Kind::InvalidState);
    if let Some((other, _)) = open(|name| name == "llama", 1) {
        let mut plain = Sequence::new(&other, &SequenceOptions::default()).unwrap();
        let e = plain.encode(&[5]).unwrap_err();
        assert!(e.kind() == Kind::Unsupported && !other.has_encoder(), "{e}");
    }
}

#[test]
fn a_source_stays_with_forks_and_snapshots_and_leaves_with_the_next() {
    let Some((engine, golden)) = translator() else { return };
    let (one, two) = (&golden.prompt[..], &golden.prompt[..21]);
    let mut sequence = started(&engine, one, &[2, 315, 40]);
    let row = bits(&sequence);
    let (mut fork, snapshot) = (sequence.fork().unwrap(), sequence.snapshot().unwrap());
    // The sequence goes on with another source; what was split off keeps the first.
    sequence.truncate(0).unwrap();
    sequence.encode(two).unwrap();
    sequence.prefill(&[2, 315, 40]).unwrap();
    assert!(bits(&sequence) != row && bits(&sequence) == bits(&started(&engine, two, &[2, 315, 40])));
    fork.prefill(&[41]).unwrap();
    assert_eq!(bits(&fork), bits(&started(&engine, one, &[2, 315, 40, 41])));
    let snapshot = Snapshot::from_bytes(&engine, &snapshot.to_bytes().unwrap()).unwrap();
    sequence.restore(&snapshot).unwrap();
    assert!(sequence.source() == one.len() && bits(&sequence) == row);
    sequence.prefill(&[41]).unwrap();
    assert_eq!(bits(&sequence), bits(&fork));
    // Cut to nothing, a sequence keeps its source.
    sequence.truncate(0).unwrap();
    sequence.prefill(&[2, 315, 40]).unwrap();
    assert_eq!(bits(&sequence), row);
}

#[test]
fn a_source_gives_the_same_bits_on_any_threads_and_agrees_with_the_definition() {
    let Some((engine, golden)) = translator() else { return };
    let encoded = |engine: &Arc<Engine>, bodies| engine.capture_source(&golden.prompt, &["encoded"], bodies).unwrap().remove(0).values;
    let fast = encoded(&engine, Bodies::Fast);
    let (other, _) = open(|name| name == "nllb", 3).unwrap();
    assert_eq!(fast, encoded(&other, Bodies::Fast));
    let exact = encoded(&engine, Bodies::Definition);
    assert!(fast.iter().zip(&exact).all(|(a, b)| (a - b).abs() < 1e-4));
}

#[test]
fn one_beam_is_the_greedy_path() {
    let Some((engine, golden)) = translator() else { return };
    let sequence = started(&engine, &golden.prompt, &[2, 315]);
    let options = BeamOptions { beams: 1, max_tokens: 24, length_penalty: 1.0, ignore_end: true };
    let found = beam(&sequence, &options).unwrap();
    assert_eq!((found.len(), &found[0].tokens[..], found[0].ended), (1, &golden.decode_ids[..], false));
    assert_eq!(sequence.len(), 2);
}

/// All log-probabilities after a sequence.
fn log_probabilities(sequence: &Sequence) -> Vec<f64> {
    let row: Vec<f64> = sequence.logits().unwrap().iter().map(|v| f64::from(*v)).collect();
    let total: f64 = row.iter().map(|v| v.exp()).sum();
    row.iter().map(|v| v - total.ln()).collect()
}

#[test]
fn as_many_beams_as_tokens_find_what_searching_everything_finds() {
    let Some((engine, golden)) = translator() else { return };
    let start = started(&engine, &golden.prompt, &[2, 315]);
    let vocab = engine.info().vocab;
    for length_penalty in [0.0f32, 1.0, -1.0] {
        let power = f64::from(length_penalty);
        let mut all: Vec<Hypothesis> = Vec::new();
        for (first, a) in log_probabilities(&start).into_iter().enumerate() {
            let first = first as i32;
            if engine.is_end(first) {
                all.push(Hypothesis { tokens: Vec::new(), score: a as f32, ended: true });
                continue;
            }
            let mut next = start.fork().unwrap();
            next.prefill(&[first]).unwrap();
            for (second, b) in log_probabilities(&next).into_iter().enumerate() {
                let ended = engine.is_end(second as i32);
                let tokens = if ended { vec![first] } else { vec![first, second as i32] };
                all.push(Hypothesis { tokens, score: ((a + b) / 2f64.powf(power)) as f32, ended });
            }
        }
        all.sort_by(|a, b| b.score.total_cmp(&a.score));
        let options = BeamOptions { beams: vocab, max_tokens: 2, length_penalty, ignore_end: false };
        let found = beam(&start, &options).unwrap();
        assert_eq!(found.len(), vocab);
        for (found, wanted) in found.iter().zip(&all).take(20) {
            assert!((found.score - wanted.score).abs() < 1e-4, "{found:?} against {wanted:?}");
        }
        assert_eq!((&found[0].tokens, found[0].ended), (&all[0].tokens, all[0].ended));
    }
}

#[test]
fn more_beams_find_no_worse_and_bad_options_are_refused() {
    let Some((engine, golden)) = translator() else { return };
    let start = started(&engine, &golden.prompt, &[2, 315]);
    let plain = BeamOptions { beams: 4, max_tokens: 12, length_penalty: 1.0, ignore_end: false };
    let found = beam(&start, &plain).unwrap();
    assert!(!found.is_empty() && found.len() <= 4 && found.windows(2).all(|w| w[0].score >= w[1].score));
    // A hypothesis' score is what its tokens come to one by one.
    for h in &found {
        let (mut sequence, mut sum) = (start.fork().unwrap(), 0.0);
        let tokens: Vec<i32> = h.tokens.iter().copied().chain(h.ended.then_some(2)).collect();
        for &token in &tokens {
            sum += log_probabilities(&sequence)[token as usize];
            sequence.prefill(&[token]).unwrap();
        }
        assert!((sum / tokens.len() as f64 - f64::from(h.score)).abs() < 1e-4, "{h:?}: {sum}");
    }
    for (options, kind) in [
        (BeamOptions { beams: 0, ..plain }, Kind::InvalidArgument),
        (BeamOptions { max_tokens: 0, ..plain }, Kind::InvalidArgument),
        (BeamOptions { length_penalty: f32::NAN, ..plain }, Kind::InvalidArgument),
        (BeamOptions { max_tokens: 1_000_000, ..plain }, Kind::ContextFull),
    ] {
        assert_eq!(beam(&start, &options).unwrap_err().kind(), kind);
    }
    let empty = Sequence::new(&engine, &SequenceOptions::default()).unwrap();
    assert_eq!(beam(&empty, &plain).unwrap_err().kind(), Kind::InvalidState);
}

/// The C functions, on the greedy path: one beam with plain scores is the golden's continuation.
#[test]
fn the_c_interface_translates() {
    use metrale::abi::*;
    use std::ptr::{null, null_mut};
    let Some((_, golden)) = translator() else { return };
    let path = folders().into_iter().find(|p| p.file_name().unwrap() == "nllb").unwrap();
    let path = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
    let (mut model, mut seq) = (null_mut(), null_mut());
    // The golden was computed in f32; fast arithmetic may choose otherwise where two tokens are close.
    let load = metrale_load_options {
        struct_size: size_of::<metrale_load_options>(),
        flags: 0,
        threads: 0,
        compute: METRALE_COMPUTE_F32,
        context: 0,
        progress: None,
        user: null_mut(),
        synthetic: null(),
        synthetic_seed: 0,
        runtime: null(),
        memory: 0,
        expert_bytes: 0,
        precision: null(),
        prefix_bytes: 0,
        device: 0,
        kv_type: 0,
        device_bytes: 0,
        device_layers: 0,
        host_experts: 0,
    };
    assert_eq!(metrale_load(path.as_ptr(), &load, &mut model, null_mut()), METRALE_OK);
    assert_eq!(metrale_seq_new(model, null(), &mut seq, null_mut()), METRALE_OK);
    let start = [2, 315]; // end, then the language of the golden (`forced_bos_token_id`)
    assert_eq!(metrale_prefill(seq, start.as_ptr(), 2, null_mut()), METRALE_INVALID_STATE);
    assert_eq!(metrale_seq_encode(seq, golden.prompt.as_ptr(), golden.prompt.len(), null_mut()), METRALE_OK);
    assert_eq!(metrale_prefill(seq, start.as_ptr(), 2, null_mut()), METRALE_OK);
    let mut options: metrale_beam_options =
        metrale_beam_options { struct_size: 0, beams: 1, max_tokens: 8, length_penalty: 0.0, flags: METRALE_BEAM_PLAIN_SCORE };
    options.struct_size = size_of::<metrale_beam_options>();
    let (mut tokens, mut count, mut score) = ([0i32; 8], 0usize, 0f32);
    assert_eq!(metrale_seq_beam(seq, &options, null_mut(), 0, &mut count, null_mut(), null_mut()), METRALE_MORE);
    assert_eq!(metrale_seq_beam(seq, &options, tokens.as_mut_ptr(), 8, &mut count, &mut score, null_mut()), METRALE_OK);
    assert_eq!(&tokens[..count], &golden.decode_ids[..count]);
    assert!(count > 0 && score < 0.0, "{count} tokens, score {score}");
    metrale_seq_free(seq);
    metrale_free(model);
}
