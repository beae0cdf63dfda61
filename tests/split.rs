//! Models of which a device runs the last layers and the processor the others, or all layers and the processor their experts: the numbers of
//! every cut against goldens, states that pass from cut to cut, and caps of every size against what is then taken. Without a real device the tests run in a child process over the kernels on
//! the host.

mod support;

use metrale::backend::cuda::Device;
use metrale::engine::{self, Bodies, Chooser, Engine, Sequence, SequenceOptions, Snapshot, StepState, Stepped, decode_step, step};
use metrale::error::{Error, Kind};
use metrale::options::{Compute, LoadOptions};
use metrale::sampling::Sampler;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use support::golden::{Golden, folders};
use support::{driver_bytes, fixtures, is_child};

/// On the processor alone.
const HERE: usize = 0;
/// On the device alone.
const THERE: usize = usize::MAX;

/// Layers on the device: `HERE`, `THERE`, or a number of them; and of these the first so many whose experts are not.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Cut {
    layers: usize,
    experts: usize,
}

impl From<usize> for Cut {
    fn from(layers: usize) -> Cut {
        Cut { layers, experts: 0 }
    }
}

impl std::fmt::Display for Cut {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = |count: usize| if count == THERE { "all".to_string() } else { count.to_string() };
        write!(f, "{} layers on the device, experts of {} not", name(self.layers), name(self.experts))
    }
}

fn options(cut: impl Into<Cut>) -> LoadOptions {
    let Cut { layers, experts } = cut.into();
    let device = usize::from(layers != HERE);
    let counts = LoadOptions { device, device_layers: layers, host_experts: experts, ..LoadOptions::default() };
    LoadOptions { compute: Some(Compute::F32), threads: 2, context: 256, ..counts }
}

fn load(path: &Path, cut: impl Into<Cut>) -> Result<Arc<Engine>, Error> {
    engine::load(path, &options(cut), None)
}

fn model(name: &str) -> PathBuf {
    fixtures().join(name)
}

fn sequence(engine: &Arc<Engine>) -> Sequence {
    Sequence::new(engine, &SequenceOptions::default()).unwrap()
}

fn chooser() -> Chooser {
    let mut chooser = Chooser::new(Sampler::greedy());
    chooser.ignore_end = true;
    chooser
}

fn greedy(sequence: &mut Sequence, count: usize) -> Vec<i32> {
    let mut chooser = chooser();
    let step = |_| {
        let mut token = [0];
        decode_step(&mut [sequence], &mut [&mut chooser], &mut token).unwrap();
        token[0]
    };
    (0..count).map(step).collect()
}

fn bytes(sequence: &Sequence) -> Vec<u8> {
    sequence.snapshot().unwrap().to_bytes().unwrap()
}

fn row(sequence: &Sequence) -> Vec<f32> {
    sequence.logits().unwrap().to_vec()
}

/// Layers with experts.
fn with_experts(path: &Path) -> u64 {
    engine::plan(path, &options(Cut { layers: THERE, experts: THERE }), 1).unwrap().device.host_experts
}

/// Engines of every cut that a model has.
fn cuts(path: &Path) -> Vec<(Cut, Arc<Engine>)> {
    let layers = load(path, HERE).unwrap().info().layers;
    let mut cuts: Vec<Cut> = (1..layers).map(Cut::from).collect();
    match with_experts(path) {
        0 => {}
        1 => cuts.push(Cut { layers: THERE, experts: 1 }),
        _ => cuts.extend([(THERE, 1), (THERE, THERE), (1, THERE)].map(|(layers, experts)| Cut { layers, experts })),
    }
    let engine = |cut: Cut| match load(path, cut) {
        Ok(engine) => Some((cut, engine)),
        Err(e) => {
            assert_eq!((e.kind(), e.name()), (Kind::Unsupported, Some("device_layers")), "{}: {cut}: {e}", path.display());
            println!("{}: {e}", path.display());
            None
        }
    };
    cuts.into_iter().filter_map(engine).collect()
}

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| if a.is_finite() && b.is_finite() { (a - b).abs() } else { f32::INFINITY }).fold(0.0, f32::max)
}

/// Logits of the prompt, and greedy tokens with their logits; layers of both sides beside those of the processor alone; of a translation, the
/// encoder's output and the decoder's logits.
fn check(engine: &Arc<Engine>, here: &Arc<Engine>, golden: &Golden, what: &str) {
    let tolerance = 1e-3f32.max(10.0 * golden.uncertainty);
    let mut s = sequence(engine);
    let near = |found: &[f32], expected: &[f32], which: &str| {
        let difference = largest_difference(found, expected);
        assert!(difference <= tolerance, "{what}: {which}: {difference:.1e}, the limit is {tolerance:.0e}");
    };
    if let Some(expected) = &golden.translation {
        near(&engine.capture_source(&golden.prompt, &["encoded"], Bodies::Fast).unwrap()[0].values, &expected.encoded, "encoded");
        s.encode(&golden.prompt).unwrap();
        for (index, (token, row)) in expected.tokens.iter().zip(expected.logits.chunks(engine.info().vocab)).enumerate() {
            s.prefill(&[*token]).unwrap();
            near(s.logits().unwrap(), row, &format!("token {index}"));
        }
        return;
    }
    let names: Vec<&str> = golden.layers.iter().map(|(name, _)| name.as_str()).chain(["logits"]).collect();
    let [found, expected] = [engine, here].map(|engine| engine.capture(&golden.prompt, 64, &names, Bodies::Fast).unwrap());
    for ((found, expected), name) in found.iter().zip(&expected).zip(&names) {
        let largest = expected.values.iter().fold(1.0, |most, v| v.abs().max(most));
        let scaled = |values: &[f32]| values.iter().map(|v| v / largest).collect::<Vec<f32>>();
        near(&scaled(&found.values), &scaled(&expected.values), name);
    }
    near(&found.last().unwrap().values, &golden.prompt_logits, "logits");
    s.prefill(&golden.prompt).unwrap();
    for (index, (token, row)) in golden.decode_ids.iter().zip(golden.decode_logits.chunks(engine.info().vocab)).enumerate() {
        near(s.logits().unwrap(), row, &format!("logits of step {index}"));
        assert_eq!(greedy(&mut s, 1), [*token], "{what}: step {index}");
    }
}

#[test]
fn every_cut_agrees_with_the_golden() {
    if !is_child("every_cut_agrees_with_the_golden", &[]) {
        return;
    }
    let only = std::env::var("METRALE_ONLY").unwrap_or_default();
    let mut count = 0;
    // All reference checkpoints take minutes: METRALE_REFERENCE names their folder.
    let all = std::env::var_os("METRALE_REFERENCE").is_some();
    for path in folders().into_iter().filter(|path| all || path.starts_with(fixtures())) {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if !only.is_empty() && !only.split(',').any(|o| o == name) {
            continue;
        }
        let (golden, here) = (Golden::read(&path), load(&path, HERE).unwrap());
        for (cut, engine) in cuts(&path) {
            let (plan, all) = (engine.plan(), here.info().layers);
            assert_eq!(plan.device.layers, cut.layers.min(all) as u64, "{name}: {cut}");
            assert!(plan.weights > 0 && plan.device.weights > 0, "{name}: {cut}: {plan:?}");
            assert!(cut.layers >= all || plan.kv > 0 || plan.state > 0, "{name}: {cut}: {plan:?}");
            check(&engine, &here, &golden, &format!("{name}, {cut}"));
            count += 1;
        }
    }
    println!("{count} cuts agree");
    assert!(count > 0);
}

/// Attention alone; convolutions; a scan, experts and attention; experts.
const MODELS: [&str; 4] = ["llama", "lfm2", "nemotron_h-mixed", "mixtral"];

#[test]
fn states_pass_between_all_cuts() {
    if !is_child("states_pass_between_all_cuts", &[]) {
        return;
    }
    for name in MODELS {
        let prompt = Golden::read(&model(name)).prompt;
        let mut engines = vec![("here".to_string(), load(&model(name), HERE).unwrap())];
        engines.extend(cuts(&model(name)).into_iter().map(|(cut, engine)| (cut.to_string(), engine)));
        engines.push(("there".into(), load(&model(name), THERE).unwrap()));
        assert!(engines.len() > 2, "{name}");
        let mut saved = Vec::new();
        for (cut, engine) in &engines {
            assert_eq!(engine.fingerprint().unwrap(), engines[0].1.fingerprint().unwrap(), "{name}: {cut}");
            let mut s = sequence(engine);
            s.prefill(&prompt).unwrap();
            greedy(&mut s, 3);
            let kept = bytes(&s);
            saved.push((kept, s.tokens().to_vec(), greedy(&mut s, 4)));
        }
        for ((from, _), (kept, tokens, next)) in engines.iter().zip(&saved) {
            assert_eq!((tokens, next), (&saved[0].1, &saved[0].2), "{name}: {from}");
            for (to, engine) in &engines {
                let mut s = sequence(engine);
                s.restore(&Snapshot::from_bytes(engine, kept).unwrap()).unwrap();
                assert!(bytes(&s) == *kept, "{name}: from {from} to {to}: other bytes");
                assert_eq!(greedy(&mut s, 4), *next, "{name}: from {from} to {to}");
            }
        }
    }
}

/// The golden's tokens from a prompt in steps of a budget, and how many steps were cut short.
fn in_steps(s: &mut Sequence, prompt: &[i32], budget: Duration) -> (Vec<i32>, usize) {
    let mut chooser = chooser();
    s.feed(prompt).unwrap();
    let (mut tokens, mut cut) = (Vec::new(), 0);
    while tokens.len() < 4 {
        let mut out = [Stepped::default()];
        step(&mut [s], &mut [&mut chooser], Some(budget), &mut out).unwrap();
        cut += usize::from(matches!(out[0].state, StepState::Unfinished));
        tokens.extend(out[0].token);
    }
    (tokens, cut)
}

#[test]
fn what_a_sequence_can_do_it_can_do_across_a_cut() {
    if !is_child("what_a_sequence_can_do_it_can_do_across_a_cut", &[]) {
        return;
    }
    for name in MODELS {
        let Golden { prompt, decode_ids, .. } = Golden::read(&model(name));
        for (cut, engine) in cuts(&model(name)) {
            let what = format!("{name}, {cut}");
            // Back to a mark, and a fork that goes its own way.
            let mut s = sequence(&engine);
            s.prefill(&prompt).unwrap();
            let (mark, at_mark) = (s.mark().unwrap(), row(&s));
            assert_eq!(greedy(&mut s, 3), decode_ids[..3], "{what}");
            let mut fork = s.fork().unwrap();
            fork.prefill(&[5, 6, 7]).unwrap();
            assert_eq!(greedy(&mut s, 2), decode_ids[3..5], "{what}");
            s.rollback(mark).unwrap();
            assert!(row(&s) == at_mark && s.tokens() == prompt, "{what}: a rollback left other logits");
            assert_eq!(greedy(&mut s, 5), decode_ids[..5], "{what}");
            // A prompt in pieces, and steps that are cut short in either segment.
            let mut pieces = sequence(&engine);
            prompt.chunks(3).for_each(|piece| pieces.prefill(piece).unwrap());
            assert_eq!(greedy(&mut pieces, 4), decode_ids[..4], "{what}");
            let (tokens, short) = in_steps(&mut sequence(&engine), &prompt, Duration::from_micros(100));
            assert_eq!(tokens, decode_ids[..4], "{what}");
            assert!(short > 0, "{what}: a budget of 100 us was never too short");
            // A cancel while a step is left off: the sequence is as it was, and all can be begun again.
            let mut s = sequence(&engine);
            s.prefill(&prompt[..4]).unwrap();
            let (before, mut picks, mut out) = (row(&s), chooser(), [Stepped::default()]);
            s.feed(&prompt[4..]).unwrap();
            step(&mut [&mut s], &mut [&mut picks], Some(Duration::from_nanos(1)), &mut out).unwrap();
            assert!(matches!(out[0].state, StepState::Unfinished), "{what}");
            s.canceller().cancel();
            step(&mut [&mut s], &mut [&mut picks], None, &mut out).unwrap();
            assert!(matches!(out[0].state, StepState::Cancelled) && row(&s) == before && s.tokens() == &prompt[..4], "{what}");
            assert_eq!(in_steps(&mut s, &prompt[4..], Duration::from_secs(9)).0, decode_ids[..4], "{what}");
            // Several at once, of different lengths.
            let mut many: Vec<Sequence> = (0..3).map(|_| sequence(&engine)).collect();
            many.iter_mut().for_each(|s| s.prefill(&prompt).unwrap());
            greedy(&mut many[1], 1);
            let (mut choosers, mut tokens) = ([chooser(), chooser(), chooser()], [0; 3]);
            for at in 0..3 {
                let mut sequences: Vec<&mut Sequence> = many.iter_mut().collect();
                let mut choosers: Vec<&mut Chooser> = choosers.iter_mut().collect();
                decode_step(&mut sequences, &mut choosers, &mut tokens).unwrap();
                assert_eq!(tokens, [decode_ids[at], decode_ids[at + 1], decode_ids[at]], "{what}: together");
            }
        }
    }
}

#[test]
fn experts_in_their_file_go_with_a_device() {
    if !is_child("experts_in_their_file_go_with_a_device", &[]) {
        return;
    }
    let golden = Golden::read(&model("mixtral"));
    let engine = engine::load(&model("mixtral"), &LoadOptions { expert_bytes: Some(64 << 10), ..options(THERE) }, None).unwrap();
    assert_eq!(engine.plan().device.host_experts, with_experts(&model("mixtral")));
    let packed = load(&model("mixtral"), Cut { layers: THERE, experts: THERE }).unwrap();
    assert!(engine.plan().weights < packed.plan().weights && engine.plan().device == packed.plan().device, "{:?}", engine.plan());
    assert_eq!(greedy_after(&engine, &golden.prompt), golden.decode_ids[..4]);
}

#[test]
fn a_message_tells_what_did_not_fit() {
    if !is_child("a_message_tells_what_did_not_fit", &[]) {
        return;
    }
    let told = [
        (Cut::from(THERE), "the model with one sequence"),
        (Cut::from(1), "the model's last 1 layers, with what follows them, with one sequence"),
        (Cut { layers: THERE, experts: 1 }, "the model without the experts of 1 of its layers with one sequence"),
    ];
    for (cut, words) in told {
        let e = engine::load(&model("mixtral"), &LoadOptions { device_bytes: 1, ..options(cut) }, None).err().unwrap();
        assert!(e.kind() == Kind::OutOfMemory && e.message().contains(words), "{cut}: {e}");
    }
}

#[test]
fn beginnings_are_taken_up_across_a_cut() {
    if !is_child("beginnings_are_taken_up_across_a_cut", &[]) {
        return;
    }
    for name in ["llama", "lfm2"] {
        let prompt: Vec<i32> = (0..80).map(|i| 3 + i % 40).collect();
        let plain = greedy_after(&load(&model(name), 1).unwrap(), &prompt);
        let engine = engine::load(&model(name), &LoadOptions { prefix_bytes: 16 << 20, ..options(1) }, None).unwrap();
        for _ in 0..2 {
            assert_eq!(greedy_after(&engine, &prompt), plain, "{name}");
        }
        let counts = engine.prefix_counts();
        assert!(counts.hits > 0 && counts.reused > 0, "{name}: {counts:?}");
    }
}

fn greedy_after(engine: &Arc<Engine>, prompt: &[i32]) -> Vec<i32> {
    let mut s = sequence(engine);
    s.prefill(prompt).unwrap();
    greedy(&mut s, 4)
}

#[test]
fn a_cap_of_any_size_is_kept_or_told() {
    if !is_child("a_cap_of_any_size_is_kept_or_told", &[]) {
        return;
    }
    let device = Device::open(0).unwrap();
    let free = || device.memory().unwrap().0;
    for name in MODELS {
        let path = model(name);
        let golden = Golden::read(&path);
        let capped = |cap: u64| LoadOptions { device_bytes: cap, ..LoadOptions { device_layers: 0, ..options(1) } };
        let layers = load(&path, HERE).unwrap().info().layers as u64;
        let whole = engine::plan(&path, &options(THERE), 1).unwrap();
        let least = engine::plan(&path, &capped(1), 1).unwrap();
        assert!(whole.device.layers == layers && least.device.layers == 0 && least.device.total() < whole.device.total(), "{name}");
        let (low, high) = (least.device.total(), whole.device.total());
        // Around both ends, where one layer more fits, and evenly between.
        // What is left on the device: layers, and experts of these.
        let left = |plan: &engine::Plan| (plan.device.layers, plan.device.layers - plan.device.host_experts);
        let experts = with_experts(&path) as usize;
        let staying = (1..=experts).map(|experts| Cut { layers: THERE, experts });
        let leaving = (1..layers as usize).map(|layers| Cut { layers, experts: if experts > 0 { THERE } else { 0 } });
        let plans = staying.chain(leaving).filter_map(|cut| engine::plan(&path, &options(cut), 1).ok());
        let mut exactly: Vec<(u64, (u64, u64))> = plans.map(|plan| (plan.device.total(), left(&plan))).collect();
        exactly.sort_by_key(|(_, left)| *left);
        // The workspace of a toy may be smaller with a layer more, and what is sought by halves is then not found.
        let grows = exactly.is_sorted();
        let ends = [1, low / 2, low - 1, low, low + 1, high - 1, high, high + 1];
        let mut caps: Vec<u64> = ends.into_iter().chain((1..12).map(|i| low + (high - low) * i / 12)).collect();
        caps.extend(exactly.iter().flat_map(|(bytes, _)| [bytes - 1, *bytes]));
        caps.sort();
        let (mut before, mut seen) = ((0, 0), Vec::new());
        for cap in caps {
            let plan = engine::plan(&path, &capped(cap), 1).unwrap();
            let taken = free();
            let loaded = engine::load(&path, &capped(cap), None);
            if cap < low {
                let e = loaded.err().expect("a cap below the least");
                assert_eq!((e.kind(), e.name()), (Kind::OutOfMemory, Some("device_bytes")), "{name}: {e}");
                assert_eq!((e.wanted(), e.available()), (Some(low), Some(cap)), "{name}: {e}");
                assert_eq!(free(), taken, "{name}: a load that failed left something");
                continue;
            }
            let engine = loaded.unwrap_or_else(|e| panic!("{name}: a cap of {cap}, where {low} do: {e}"));
            assert_eq!(*engine.plan(), plan, "{name}: a cap of {cap}");
            assert!(plan.device.total() <= cap && left(&plan) >= before, "{name}: a cap of {cap}: {plan:?} after {before:?}");
            before = left(&plan);
            if let Some((_, most)) = exactly.iter().find(|(bytes, _)| *bytes == cap && grows) {
                assert_eq!(before, *most, "{name}: a cap that holds so many layers and experts");
            }
            let mut s = sequence(&engine);
            s.prefill(&golden.prompt).unwrap();
            assert_eq!(greedy(&mut s, 2), golden.decode_ids[..2], "{name}: a cap of {cap}");
            // What a full sequence takes is looked at where nothing is left over.
            if cap == plan.device.total() {
                s.prefill(&vec![1; engine.info().context - s.len() - 8]).unwrap();
                greedy(&mut s, 8);
            }
            let taken = taken - free();
            assert!(
                taken <= cap + driver_bytes(&device) && taken > plan.device.weights,
                "{name}: {taken} bytes are taken, {cap} may be, {:?} are planned",
                plan.device
            );
            seen.push((left(&plan), plan.weights > 0 && plan.device.total() < high));
        }
        seen.dedup();
        println!("{name}: layers on the device, and with their experts, as the cap grows: {seen:?}");
        assert!(!grows || exactly.iter().all(|(_, left)| seen.iter().any(|(found, _)| found == left)), "{name}: {seen:?} of {exactly:?}");
        let staying = seen.iter().any(|((there, with), _)| *there == layers && with < there);
        assert_eq!(staying, experts > 0, "{name}: experts stay before layers do");
        // Whoever wants all of the model there or nothing says so.
        let e = engine::load(&path, &LoadOptions { device_bytes: high - 1, ..options(THERE) }, None).err().unwrap();
        assert_eq!((e.kind(), e.name(), e.wanted()), (Kind::OutOfMemory, Some("device_bytes"), Some(high)), "{name}: {e}");
    }
}

#[test]
fn a_device_lost_below_the_cut_leaves_the_sequence_as_it_was() {
    if !is_child("a_device_lost_below_the_cut_leaves_the_sequence_as_it_was", &[("METRALE_SHIM_FAIL", "60")]) {
        return;
    }
    if std::env::var_os("METRALE_SHIM_FAIL").is_none() {
        return println!("SKIPPED: a real device is not lost on purpose");
    }
    let golden = Golden::read(&model("llama"));
    let engine = load(&model("llama"), 1).unwrap();
    let mut s = sequence(&engine);
    let e = (0..40).find_map(|_| s.prefill(&golden.prompt[..4]).err()).expect("the 60th launch fails");
    assert_eq!((e.kind(), s.len() % 4), (Kind::DeviceLost, 0), "{e}");
    assert!(s.prefill(&[1]).is_err() && s.snapshot().and_then(|s| s.to_bytes()).is_err());
    drop((s, engine));
    assert_eq!(greedy_after(&load(&model("llama"), HERE).unwrap(), &golden.prompt), golden.decode_ids[..4]);
}
