//! Several steps in one call against as many calls of one step: the same tokens, bits, errors and states, on the processor and on a device, which goes
//! on by itself as long as the highest logits are all that is asked for.
//!
//! Without a real device the tests run in child processes over the kernels on the host, once with work done as soon as it is queued and once as
//! late as it may be: what is changed under work that is still queued shows in the second, what is read before it is there too.
#![allow(unsafe_code)] // a function of the driver on the host

mod support;

use metrale::engine::{self, Chooser, Engine, Sequence, SequenceOptions, Snapshot, decode, decode_step};
use metrale::error::{Error, Kind};
use metrale::ops::{Batch, BatchImage, BatchPlaces, KvPages, News, Segment, StatePointers};
use metrale::options::{Compute, LoadOptions, Synthetic};
use metrale::sampling::{Sampler, Stage};
use metrale::tensor::DType;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use support::copies::Copy;
use support::golden::Golden;
use support::{Scratch, fixtures, is_child, models};

fn options(device: usize, deterministic: bool) -> LoadOptions {
    LoadOptions { compute: Some(Compute::F32), threads: 1, device, deterministic, ..LoadOptions::default() }
}

fn load(config: &Value, device: usize, deterministic: bool) -> Arc<Engine> {
    let folder = Scratch::new("decode");
    folder.file("config.json", config.to_string());
    let synthetic = Some(Synthetic::of(DType::BF16, 7));
    engine::load(folder.path(), &LoadOptions { synthetic, ..options(device, deterministic) }, None).unwrap()
}

/// In the parent two children are started, in each of which this is true.
fn on_device(name: &str) -> bool {
    is_child(name, &[]) || is_child(name, &[("METRALE_SHIM_LATE", "1")])
}

/// Steps that the driver on the host was given before the one before them had ended; a real one does not tell, nor one that does all at once.
fn behind() -> Option<u64> {
    std::env::var_os("METRALE_SHIM_LATE")?;
    // SAFETY: the driver is open, since a model was loaded with it, and its function takes nothing.
    unsafe {
        let driver = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        let function = libc::dlsym(driver, c"shim_behind".as_ptr());
        (!function.is_null()).then(|| std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> u64>(function)())
    }
}

fn chooser(stages: &[Stage], ignore_end: bool) -> Chooser {
    let mut chooser = Chooser::new(Sampler::new(stages, 5).unwrap());
    chooser.ignore_end = ignore_end;
    chooser
}

/// Sequences that decode many steps at once, and their twins, which decode one by one.
struct Twins {
    many: Vec<(Sequence, Chooser)>,
    single: Vec<(Sequence, Chooser)>,
}

type Parts<'a> = (Vec<&'a mut Sequence>, Vec<&'a mut Chooser>);

fn parts(all: &mut [(Sequence, Chooser)]) -> Parts<'_> {
    all.iter_mut().map(|(sequence, chooser)| (sequence, chooser)).unzip()
}

fn bits(sequence: &Sequence) -> Vec<u32> {
    sequence.logits().unwrap().iter().map(|v| v.to_bits()).collect()
}

impl Twins {
    /// Prompts of different lengths, the first of `len` tokens.
    fn new(engine: &Arc<Engine>, count: usize, len: usize, context: usize, chooser: impl Fn(usize) -> Chooser) -> Twins {
        let one = |index: usize| {
            let mut sequence = Sequence::new(engine, &SequenceOptions { context }).unwrap();
            let len = (len - len.min(3 * index)).max(1);
            let vocab = engine.info().vocab;
            sequence.prefill(&(0..len).map(|i| ((7 + i * i + 5 * index) % vocab) as i32).collect::<Vec<_>>()).unwrap();
            (sequence, chooser(index))
        };
        Twins { many: (0..count).map(one).collect(), single: (0..count).map(one).collect() }
    }

    /// Decodes both ways and compares. Steps done, and the error if there was one.
    fn decode(&mut self, steps: usize, what: &str) -> (usize, Option<Error>) {
        let count = self.many.len();
        let mut tokens = vec![-7; steps * count];
        let (mut sequences, mut choosers) = parts(&mut self.many);
        let (done, ended) = decode(&mut sequences, &mut choosers, steps, &mut tokens);
        assert!(done > 0 || ended.is_err(), "{what}");
        let (mut sequences, mut choosers) = parts(&mut self.single);
        let mut last = false;
        for step in 0..done {
            let mut wanted = vec![-7; count];
            last = decode_step(&mut sequences, &mut choosers, &mut wanted).unwrap();
            assert_eq!(tokens[step * count..][..count], wanted, "{what}: step {step}");
            let some = (0..count).any(|i| !choosers[i].ignore_end && sequences[i].engine().is_end(wanted[i]));
            assert!(!some || step + 1 == done, "{what}: step {step} ended a sequence, {done} were done");
            assert!(step + 1 < done || done == steps || some || ended.is_err(), "{what}: {done} of {steps} for no reason");
        }
        let e = match ended {
            Ok(all) => {
                assert_eq!(all, last, "{what}");
                None
            }
            Err(e) => {
                let wanted = decode_step(&mut sequences, &mut choosers, &mut vec![-7; count]);
                if !matches!(e.kind(), Kind::Cancelled | Kind::DeviceLost) {
                    let wanted = wanted.unwrap_err();
                    assert_eq!((wanted.kind(), wanted.message(), wanted.offset()), (e.kind(), e.message(), e.offset()), "{what}");
                }
                Some(e)
            }
        };
        (done, e)
    }

    fn same(&self, what: &str) {
        for (index, ((many, chooser), (single, twin))) in self.many.iter().zip(&self.single).enumerate() {
            assert_eq!(many.tokens(), single.tokens(), "{what}: sequence {index}");
            assert!(bits(many) == bits(single), "{what}: bits of sequence {index} after {} tokens", many.len());
            assert_eq!(chooser.sampler.state(), twin.sampler.state(), "{what}");
            assert_eq!(chooser.last_logprob, twin.last_logprob, "{what}");
            let count = |sequence: &Sequence| {
                let counters = sequence.counters();
                [counters.read, counters.generated, counters.passes, counters.reused, counters.cancelled]
            };
            assert_eq!(count(many), count(single), "{what}: counters of sequence {index}");
        }
    }

    fn both(&mut self, mut f: impl FnMut(&mut Sequence)) {
        self.many.iter_mut().chain(&mut self.single).for_each(|(sequence, _)| f(sequence));
    }
}

fn walk(engine: &Arc<Engine>, name: &str) {
    for count in [1, 2].into_iter().skip(usize::from(name != "llama")) {
        let what = format!("{name}, {count} sequences");
        let mut twins = Twins::new(engine, count, 11, 1000, |_| chooser(&[], true));
        for steps in [1, 3, 20] {
            assert_eq!(twins.decode(steps, &what), (steps, None));
            twins.same(&what);
        }
        // A mark holds the state that a step after the next would write.
        let mut marks: Vec<_> = twins.many.iter_mut().chain(&mut twins.single).map(|(sequence, _)| sequence.mark().unwrap()).collect();
        twins.decode(9, &what);
        twins.same(&format!("{what}, behind a mark"));
        let mut next = marks.iter();
        twins.both(|sequence| sequence.rollback(*next.next().unwrap()).unwrap());
        twins.same(&format!("{what}, rolled back"));
        twins.decode(5, &what);
        let mut next = marks.drain(..);
        twins.both(|sequence| sequence.release(next.next().unwrap()).unwrap());
        twins.same(&format!("{what}, going on behind the mark"));
        // The state before the last step is still there.
        twins.both(|sequence| sequence.truncate(sequence.len() - 1).unwrap());
        twins.same(&format!("{what}, one token less"));
        twins.decode(4, &what);
        // Forks in the middle, of which both go on.
        let mut forks: Vec<_> = twins.many.iter().map(|(sequence, chooser)| (sequence.fork().unwrap(), chooser.fork())).collect();
        twins.decode(7, &what);
        twins.same(&format!("{what}, beside a fork"));
        let mut tokens = vec![0; 7 * count];
        let (mut sequences, mut choosers) = parts(&mut forks);
        let (done, ended) = decode(&mut sequences, &mut choosers, 7, &mut tokens);
        assert!(done == 7 && ended.is_ok());
        for ((fork, _), (twin, _)) in forks.iter().zip(&twins.single) {
            assert!(fork.tokens() == twin.tokens() && bits(fork) == bits(twin), "{what}: a fork");
        }
        // A snapshot right after, taken up by new sequences.
        let saved: Vec<_> = twins.many.iter().map(|(sequence, _)| sequence.snapshot().unwrap().to_bytes().unwrap()).collect();
        for ((sequence, _), bytes) in twins.many.iter_mut().zip(&saved) {
            *sequence = Sequence::new(engine, &SequenceOptions { context: 1000 }).unwrap();
            sequence.restore(&Snapshot::from_bytes(engine, bytes).unwrap()).unwrap();
        }
        twins.many.iter_mut().zip(&mut twins.single).for_each(|((many, _), (single, _))| {
            many.prefill(&[3, 1]).unwrap();
            single.prefill(&[3, 1]).unwrap();
        });
        let mut tokens = vec![0; 6 * count];
        let (mut sequences, mut choosers) = parts(&mut twins.many);
        let (done, ended) = decode(&mut sequences, &mut choosers, 6, &mut tokens);
        assert!(done == 6 && ended.is_ok());
        let (mut sequences, mut choosers) = parts(&mut twins.single);
        for step in 0..6 {
            let mut wanted = vec![0; count];
            decode_step(&mut sequences, &mut choosers, &mut wanted).unwrap();
            assert_eq!(tokens[step * count..][..count], wanted, "{what}: after a snapshot");
        }
    }
}

#[test]
fn many_steps_on_the_processor() {
    for (name, config) in models::wide() {
        walk(&load(&config, 0, false), name);
    }
}

#[test]
fn many_steps_on_a_device() {
    if !on_device("many_steps_on_a_device") {
        return;
    }
    for (name, config) in models::wide().into_iter().filter(|(name, _)| *name != "qwen3_moe") {
        let before = behind();
        walk(&load(&config, 1, name == "qwen3_5"), name);
        // In the first calls alone, all steps but the first of each call.
        assert!(behind().zip(before).is_none_or(|(after, before)| after - before > 20), "{name}: {before:?} to {:?}", behind());
    }
    for name in ["kimi_linear", "qwen3_next"] {
        let reference = Path::new(env!("CARGO_MANIFEST_DIR")).join("../shared/reference/models").join(name);
        if !reference.exists() {
            println!("SKIPPED: {} is not here", reference.display());
            continue;
        }
        let engine = engine::load(&reference, &options(1, false), None).unwrap();
        let before = behind();
        let mut twins = Twins::new(&engine, 2, 9, 200, |_| chooser(&[], true));
        twins.decode(12, name);
        twins.same(name);
        println!("{name}: {before:?} to {:?}", behind());
    }
}

/// The processor's tokens and the device's, over the places where pages end and graphs are others.
#[test]
fn pages_and_graphs_end_on_the_way() {
    if !on_device("pages_and_graphs_end_on_the_way") {
        return;
    }
    let (_, config) = models::wide().swap_remove(0);
    let engine = load(&config, 1, false);
    for (count, len, steps) in [(1, 440, 80), (3, 509, 6)] {
        let mut twins = Twins::new(&engine, count, len, 1000, |_| chooser(&[], true));
        assert_eq!(twins.decode(steps, "borders"), (steps, None));
        twins.same("borders");
    }
}

#[test]
fn an_end_or_a_full_context_in_the_middle() {
    if !on_device("an_end_or_a_full_context_in_the_middle") {
        return;
    }
    for (name, mut config) in models::wide().into_iter().step_by(3) {
        // What is produced, to make a token of it the end.
        let mut free = Twins::new(&load(&config, 1, false), 2, 11, 1000, |_| chooser(&[], true));
        free.decode(20, name);
        let produced: Vec<&[i32]> = free.single.iter().map(|(sequence, _)| &sequence.tokens()[sequence.len() - 20..]).collect();
        let ends: Vec<i32> =
            produced.iter().filter_map(|tokens| (5..20).find(|i| !tokens[..*i].contains(&tokens[*i])).map(|i| tokens[i])).collect();
        println!("{name}: ends {ends:?}");
        config["eos_token_id"] = json!(if ends.is_empty() { vec![produced[0][0]] } else { ends });
        let engine = load(&config, 1, false);
        let mut twins = Twins::new(&engine, 2, 11, 1000, |index| chooser(&[], index == 7));
        let mut done = 0;
        while done < 20 {
            let (steps, e) = twins.decode(20 - done, name);
            assert!(steps > 0 && e.is_none());
            done += steps;
            twins.same(name);
        }
        // One of them does not hear its end.
        let mut twins = Twins::new(&engine, 2, 11, 1000, |index| chooser(&[], index == 0));
        twins.decode(20, name);
        twins.same(name);
        // The first one's context ends in the middle.
        let mut twins = Twins::new(&engine, 2, 11, 11 + 9, |_| chooser(&[], true));
        let (done, e) = twins.decode(30, name);
        assert_eq!((done, e.unwrap().kind()), (9, Kind::ContextFull), "{name}");
        twins.same(name);
        let (done, e) = twins.decode(3, name);
        assert_eq!((done, e.unwrap().kind()), (0, Kind::ContextFull), "{name}");
        twins.same(name);
    }
}

/// Drawn tokens, kept log-probabilities and penalties need the host: the same calls, step by step.
#[test]
fn choosers_of_all_kinds() {
    if !on_device("choosers_of_all_kinds") {
        return;
    }
    let (_, config) = models::wide().swap_remove(3);
    let engine = load(&config, 1, false);
    let before = behind();
    let recipes: [&[Stage]; 4] =
        [&[], &[Stage::Temperature(0.9)], &[Stage::TopK(5), Stage::Temperature(0.7)], &[Stage::Repetition { penalty: 1.3, window: 0 }]];
    let mut twins = Twins::new(&engine, 4, 11, 1000, |index| chooser(recipes[index], true));
    twins.decode(20, "mixed");
    twins.same("mixed");
    let mut twins = Twins::new(&engine, 2, 11, 1000, |_| {
        let mut chooser = chooser(&[], true);
        chooser.record_logprob = true;
        chooser
    });
    twins.decode(20, "log-probabilities");
    twins.same("log-probabilities");
    assert_eq!(behind(), before);
    // And a greedy one that has other stages which keep the highest logit.
    let mut twins = Twins::new(&engine, 1, 11, 1000, |_| chooser(&[Stage::Greedy, Stage::TopK(3)], true));
    twins.decode(20, "greedy");
    twins.same("greedy");
    assert!(behind().zip(before).is_none_or(|(after, before)| after - before == 19), "{before:?} to {:?}", behind());
}

/// A row that no token can be chosen from, of a token in the middle: the step behind it is under way by then.
#[test]
fn a_row_that_is_no_number_in_the_middle() {
    if !on_device("a_row_that_is_no_number_in_the_middle") {
        return;
    }
    let path = fixtures().join("llama");
    let golden = Golden::read(&path);
    let mut copy = Copy::read(&path);
    let at = (3..20)
        .find(|i| !golden.prompt.contains(&golden.decode_ids[*i]) && !golden.decode_ids[..*i].contains(&golden.decode_ids[*i]))
        .unwrap();
    let table = copy.tensors.iter_mut().find(|tensor| tensor.name == "model.embed_tokens.weight").unwrap();
    let row = table.bytes.len() / table.shape[0];
    // A NaN of bfloat16.
    table.bytes[row * golden.decode_ids[at] as usize..][..2].copy_from_slice(&0x7fc0u16.to_le_bytes());
    let folder = Scratch::new("decode-nan");
    copy.write(&folder);
    let engine = engine::load(folder.path(), &options(1, false), None).unwrap();
    let new = || {
        let mut sequence = Sequence::new(&engine, &SequenceOptions { context: 200 }).unwrap();
        sequence.prefill(&golden.prompt).unwrap();
        (sequence, chooser(&[], true))
    };
    let mut twins = Twins { many: vec![new()], single: vec![new()] };
    let before = behind();
    let (done, e) = twins.decode(24, "nan");
    assert_eq!((done, e.unwrap().kind()), (at + 1, Kind::NumericFault));
    assert!(behind().zip(before).is_none_or(|(after, before)| after - before == at as u64 + 1), "{before:?} to {:?}", behind());
    twins.same("nan");
    // As if the step behind it had never been: the state before the last step is there, and what goes on from it.
    twins.both(|sequence| sequence.truncate(sequence.len() - 1).unwrap());
    twins.both(|sequence| sequence.prefill(&[golden.prompt[0]]).unwrap());
    twins.same("nan, gone on");
    twins.decode(2, "nan, gone on");
    twins.same("nan, gone on");
}

#[test]
fn a_cancel_from_another_thread() {
    if !on_device("a_cancel_from_another_thread") {
        return;
    }
    for (name, config) in models::wide().into_iter().step_by(4) {
        let engine = load(&config, 1, false);
        let mut some = 0;
        for wait in [0, 60, 200] {
            let mut twins = Twins::new(&engine, 2, 11, 1000, |_| chooser(&[], true));
            twins.decode(3, name);
            let canceller = Arc::clone(twins.many[1].0.canceller());
            let thread = std::thread::spawn(move || {
                std::thread::sleep(Duration::from_millis(wait));
                canceller.cancel();
            });
            let count = 2;
            let mut tokens = vec![-7; 900 * count];
            let (mut sequences, mut choosers) = parts(&mut twins.many);
            let (done, ended) = decode(&mut sequences, &mut choosers, 900, &mut tokens);
            thread.join().unwrap();
            let Err(e) = ended else { continue };
            assert_eq!(e.kind(), Kind::Cancelled, "{name}: {e}");
            some += usize::from(done > 0);
            let (mut sequences, mut choosers) = parts(&mut twins.single);
            for step in 0..done {
                let mut wanted = vec![0; count];
                decode_step(&mut sequences, &mut choosers, &mut wanted).unwrap();
                assert_eq!(tokens[step * count..][..count], wanted, "{name}: step {step}");
            }
            for ((many, _), (single, _)) in twins.many.iter().zip(&twins.single) {
                assert!(many.tokens() == single.tokens() && bits(many) == bits(single), "{name}: cancelled after {done}");
                assert_eq!((many.counters().cancelled, many.counters().generated), (1, single.counters().generated), "{name}");
            }
            twins.decode(4, name);
            for ((many, _), (single, _)) in twins.many.iter().zip(&twins.single) {
                assert!(many.tokens() == single.tokens() && bits(many) == bits(single), "{name}: gone on after {done}");
            }
        }
        assert!(some > 0, "{name}: no cancel came in the middle");
    }
}

/// A device that is lost at each of many launches: what was done stays, and is what the processor says.
#[test]
fn a_device_lost_in_the_middle() {
    if support::is_on_device() && std::env::var_os("METRALE_SHIM_FAIL").is_none() {
        return println!("SKIPPED: a real device is not lost on purpose");
    }
    let mut child = false;
    for fail in ["173", "220", "283"] {
        for late in ["0", "1"] {
            child |= is_child("a_device_lost_in_the_middle", &[("METRALE_SHIM_FAIL", fail), ("METRALE_SHIM_LATE", late)]);
            if child {
                break;
            }
        }
        if child {
            break;
        }
    }
    if !child {
        return;
    }
    let path = fixtures().join("llama");
    let golden = Golden::read(&path);
    let load = |device| engine::load(&path, &LoadOptions { context: 256, ..options(device, false) }, None).unwrap();
    let mut sequence = Sequence::new(&load(1), &SequenceOptions::default()).unwrap();
    sequence.prefill(&golden.prompt).unwrap();
    let mut greedy = chooser(&[], true);
    let mut tokens = vec![-7; 24];
    let (done, ended) = decode(&mut [&mut sequence], &mut [&mut greedy], 24, &mut tokens);
    let e = ended.unwrap_err();
    println!("lost after {done} steps: {e}");
    assert!(e.kind() == Kind::DeviceLost && done > 0, "{done}: {e}");
    assert_eq!(tokens[..done], golden.decode_ids[..done]);
    assert_eq!(sequence.tokens(), [&golden.prompt[..], &golden.decode_ids[..done]].concat());
    let (more, again) = decode(&mut [&mut sequence], &mut [&mut greedy], 3, &mut [0; 3]);
    assert!(more == 0 && matches!(again.unwrap_err().kind(), Kind::DeviceLost | Kind::Internal));
    assert!(sequence.prefill(&[1]).is_err());
    assert_eq!(sequence.len(), golden.prompt.len() + done);
    let mut sound = Sequence::new(&load(0), &SequenceOptions::default()).unwrap();
    sound.prefill(&golden.prompt).unwrap();
    let (done, ended) = decode(&mut [&mut sound], &mut [&mut chooser(&[], true)], 24, &mut tokens);
    assert!(done == 24 && ended.is_ok() && tokens == golden.decode_ids[..24]);
}

/// What `advance` of kernels/batch.cu does, in a batch at address 0 with places `next` and `turn`.
fn advance(device: &mut [u8], [next, turn]: [usize; 2], found: &[i32]) {
    let long = |device: &[u8], at: usize| u64::from_ne_bytes(device[at..at + 8].try_into().unwrap());
    let word = |device: &[u8], at: usize| u32::from_ne_bytes(device[at..at + 4].try_into().unwrap());
    let put = |device: &mut [u8], at: usize, bytes: &[u8]| device[at..at + bytes.len()].copy_from_slice(bytes);
    let [tokens, positions, segments, read, write] = [16, 24, 48, 64, 72].map(|at| long(device, at) as usize);
    for (i, token) in found.iter().enumerate() {
        put(device, tokens + 4 * i, &token.to_ne_bytes());
        for at in [positions + 4 * i, segments + 16 * i + 8] {
            let position = word(device, at) + 1;
            put(device, at, &position.to_ne_bytes());
        }
        let states = [read, write, next].map(|at| long(device, at + 8 * i));
        for (at, state) in [read, write, next].into_iter().zip([states[1], states[2], states[0]]) {
            put(device, at + 8 * i, &state.to_ne_bytes());
        }
    }
    let other = word(device, turn) ^ 1;
    put(device, turn, &other.to_ne_bytes());
}

#[test]
fn the_host_follows_what_a_device_makes_of_its_batch() {
    let places = BatchPlaces::new(8, 4, 1, 3);
    let (mut host, mut list, mut device) = (vec![0; places.bytes()], vec![0; BatchPlaces::NEWS_BYTES], vec![0xff; places.bytes()]);
    let mut image = BatchImage::new(places, 0).unwrap();
    let take_up = |news: News, host: &[u8], list: &[u8], device: &mut [u8]| match news {
        News::Copy(range) => device[range.clone()].copy_from_slice(&host[range]),
        News::Listed(count) => {
            for pair in list[16..].as_chunks::<8>().0.iter().take(count) {
                let at = 4 * u32::from_ne_bytes(pair[..4].try_into().unwrap()) as usize;
                device[at..at + 4].copy_from_slice(&pair[4..]);
            }
        }
        News::None => {}
    };
    let pages = [std::ptr::without_provenance_mut::<u8>(16), std::ptr::without_provenance_mut(32)];
    let mut batch = Batch { tokens: vec![7, 8, 9], positions: vec![30, 4, 511], kv_states: 1, stamps: vec![1, 2, 3], ..Batch::default() };
    batch.segments = (0..3).map(|i| Segment { rows: i..i + 1, position: batch.positions[i] as usize }).collect();
    batch.kv = vec![KvPages::new(&pages); 3];
    let state = |first: u64| StatePointers::none().and_device(first, first + 1).and_next(first + 2);
    batch.states = [100, 200, 300].map(state).to_vec();
    let ahead = places.ahead().map(|at| at as usize);
    for steps in [1usize, 2, 3, 4] {
        let news = image.write(&batch, &mut host, &mut list).unwrap();
        take_up(news, &host, &list, &mut device);
        assert!(device == host, "a batch of the host before {steps}");
        for step in 0..steps {
            batch.advance();
            batch.tokens = vec![step as i32, 40 + steps as i32, 9];
            advance(&mut device, ahead, &batch.tokens);
        }
        image.follow(&batch, steps, &mut host, &mut list).unwrap();
        assert!(device == host, "{steps} steps");
        assert_eq!(batch.positions[0] as usize, batch.segments[0].position);
        // The next one of the host is another, of fewer sequences at times.
        batch.tokens[0] = 1;
        batch.states[0] = state(400 + steps as u64).and_next(0);
    }
    assert_eq!(batch.states[1].read_address(), 201);
}

/// Two threads of one model: each gives way to the other, and nobody's tokens change.
#[test]
fn two_threads_and_bounded_steps_beside() {
    if !on_device("two_threads_and_bounded_steps_beside") {
        return;
    }
    let (_, config) = models::wide().swap_remove(0);
    let engine = load(&config, 1, true);
    let wanted = |len: usize| {
        let mut twins = Twins::new(&engine, 1, len, 1000, |_| chooser(&[], true));
        assert_eq!(twins.decode(40, "alone"), (40, None));
        twins.single.remove(0).0.tokens().to_vec()
    };
    let all = [11, 14, 17].map(wanted);
    std::thread::scope(|scope| {
        for (index, len) in [11, 14, 17].into_iter().enumerate() {
            let (engine, wanted) = (&engine, &all[index]);
            scope.spawn(move || {
                let mut twins = Twins::new(engine, 1, len, 1000, |_| chooser(&[], true));
                let (sequence, chooser) = &mut twins.many[0];
                while sequence.len() < len + 40 {
                    if index == 2 {
                        engine::step(&mut [sequence], &mut [chooser], Some(Duration::from_micros(300)), &mut [engine::Stepped::default()])
                            .unwrap();
                        continue;
                    }
                    let steps = (len + 40 - sequence.len()).min(15);
                    let (done, ended) = decode(&mut [sequence], &mut [chooser], steps, &mut vec![0; steps]);
                    assert!(done == steps && ended.is_ok(), "{done} of {steps}: {ended:?}");
                }
                assert_eq!(sequence.tokens(), wanted);
            });
        }
    });
}
