//! NVIDIA devices from outside: what is listed, what is refused, what a model on one shares with the same model on the processor, and what is
//! left when one stops answering. Without a real device the tests run in a child process over the kernels on the host; on a real one they want
//! `--test-threads=1`, since they count its memory.
#![allow(unsafe_code)] // structs and strings of the C interface

mod support;

use metrale::abi::*;
use metrale::backend::cuda::Device;
use metrale::engine::{self, Chooser, Engine, Loader, Sequence, SequenceOptions, Snapshot, StepState, decode_step};
use metrale::error::Kind;
use metrale::options::{Compute, LoadOptions};
use metrale::sampling::Sampler;
use metrale::weights::{Access, Input};
use safetensors::tensor::Dtype;
use std::path::{Path, PathBuf};
use std::ptr::null_mut;
use std::sync::Arc;
use std::time::Duration;
use support::copies::{Copy, Tensor};
use support::golden::Golden;
use support::{Random, Scratch, driver_bytes, fixtures, is_child, is_on_device};

fn options(device: usize) -> LoadOptions {
    LoadOptions { compute: Some(Compute::F32), threads: 1, context: 256, device, ..LoadOptions::default() }
}

fn model() -> PathBuf {
    fixtures().join("llama")
}

fn load(device: usize) -> Arc<Engine> {
    engine::load(&model(), &options(device), None).unwrap()
}

fn sequence(engine: &Arc<Engine>) -> Sequence {
    Sequence::new(engine, &SequenceOptions::default()).unwrap()
}

fn greedy(sequence: &mut Sequence, count: usize) -> Vec<i32> {
    let mut chooser = Chooser::new(Sampler::greedy());
    chooser.ignore_end = true;
    let step = |_| {
        let mut token = [0];
        decode_step(&mut [sequence], &mut [&mut chooser], &mut token).unwrap();
        token[0]
    };
    (0..count).map(step).collect()
}

#[test]
fn devices_are_listed_after_the_processor() {
    if !is_child("devices_are_listed_after_the_processor", &[("METRALE_SHIM_DEVICES", "2")]) {
        return;
    }
    let count = metrale_device_count();
    assert!(count >= 2);
    for index in 0..count {
        // SAFETY: numbers and pointers, for which zeros are values.
        let mut info: metrale_device = unsafe { std::mem::zeroed() };
        info.struct_size = size_of::<metrale_device>();
        assert_eq!(metrale_device_info(index, &mut info, null_mut()), METRALE_OK);
        assert_eq!(info.kind, if index == 0 { METRALE_DEVICE_CPU } else { METRALE_DEVICE_CUDA });
        assert!(info.threads > 0 && info.memory_free <= info.memory_total);
        // SAFETY: a string of the library.
        let kernels = unsafe { std::ffi::CStr::from_ptr(info.kernels) }.to_str().unwrap();
        assert_eq!(kernels.starts_with("sm_"), index > 0, "{kernels}");
    }
    let beyond = engine::load(&model(), &options(count), None).err().unwrap();
    assert_eq!(beyond.kind(), Kind::NotFound, "{beyond}");
}

#[test]
fn without_a_driver_the_reason_is_told() {
    let found = std::process::Command::new("ldconfig").arg("-p").output();
    if is_on_device() || found.is_ok_and(|done| String::from_utf8_lossy(&done.stdout).contains("libcuda.so.1")) {
        return println!("SKIPPED: there is a driver");
    }
    assert_eq!(metrale_device_count(), 1);
    let e = engine::load(&model(), &options(1), None).err().unwrap();
    assert_eq!(e.kind(), Kind::DeviceUnsupported);
    assert!(e.message().contains("no NVIDIA driver") || e.message().contains("without support"), "{e}");
}

#[test]
fn a_plan_beyond_the_cap_is_refused() {
    if !is_child("a_plan_beyond_the_cap_is_refused", &[]) {
        return;
    }
    let plan = engine::plan(&model(), &options(1), 1).unwrap();
    assert!(plan.device.weights > 0 && plan.device.kv > 0 && plan.device.state > 0 && plan.device.scratch > 0 && plan.kv == 0);
    let refused = LoadOptions { device_bytes: plan.device.total() - 1, device_layers: usize::MAX, ..options(1) };
    let e = engine::load(&model(), &refused, None).err().unwrap();
    assert_eq!((e.kind(), e.name(), e.wanted()), (Kind::OutOfMemory, Some("device_bytes"), Some(plan.device.total())));
    // And the plan holds for what a sequence that is full takes.
    let device = Device::open(0).unwrap();
    let free = || device.memory().unwrap().0;
    let before = free();
    let engine = engine::load(&model(), &LoadOptions { device_bytes: plan.device.total(), ..options(1) }, None).unwrap();
    let mut s = sequence(&engine);
    s.prefill(&vec![1; engine.info().context - 8]).unwrap();
    greedy(&mut s, 8);
    let taken = before - free();
    let most = plan.device.total() + driver_bytes(&device);
    assert!(taken > plan.device.weights && taken <= most, "{taken} bytes are taken, {} are planned", plan.device.total());
}

#[test]
fn tokens_and_snapshots_pass_between_processor_and_device() {
    if !is_child("tokens_and_snapshots_pass_between_processor_and_device", &[]) {
        return;
    }
    let golden = Golden::read(&model());
    let engines = [load(0), load(1)];
    assert_eq!(engines[0].fingerprint().unwrap(), engines[1].fingerprint().unwrap());
    let mut runs: Vec<(Vec<i32>, Vec<u8>)> = Vec::new();
    for engine in &engines {
        let mut s = sequence(engine);
        s.prefill(&golden.prompt).unwrap();
        let mut tokens = greedy(&mut s, 4);
        let bytes = s.snapshot().unwrap().to_bytes().unwrap();
        tokens.extend(greedy(&mut s, 4));
        runs.push((tokens, bytes));
    }
    assert_eq!(runs[0].0, runs[1].0);
    assert_eq!(runs[0].0, golden.decode_ids[..8]);
    for (from, to) in [(0, 1), (1, 0)] {
        let mut s = sequence(&engines[to]);
        s.restore(&Snapshot::from_bytes(&engines[to], &runs[from].1).unwrap()).unwrap();
        assert_eq!(greedy(&mut s, 4), runs[0].0[4..], "from {from} to {to}");
    }
}

/// Weights go to a device in pieces, as many as the host lets a load take: panels of floats, of codes, and of experts.
#[test]
fn a_load_in_slices_is_the_same_model() {
    if !is_child("a_load_in_slices_is_the_same_model", &[]) {
        return;
    }
    for name in ["llama", "mixtral", "gpt_oss-mxfp4", "llama-gguf-q4_k"] {
        let path = fixtures().join(name);
        let (golden, here) = (Golden::read(&path), engine::load(&path, &options(0), None).unwrap());
        for most in [1, 5000, usize::MAX] {
            let mut loader = Loader::new(Input::path(&path, Access::Map).unwrap(), &options(1));
            let mut sums = (0, 0);
            let engine = loop {
                if let Some(engine) = loader.step(most).unwrap() {
                    break engine;
                }
                let p = loader.progress();
                assert!(p.phase != "weights" || (p.done_bytes >= sums.0 && p.done_bytes <= p.total_bytes), "{name}: {p:?} after {sums:?}");
                sums = if p.phase == "weights" { (p.done_bytes, sums.1 + 1) } else { sums };
            };
            assert!(sums.1 > 0 && (most > 1 || sums.1 > 50), "{name}: {sums:?} slices");
            assert_eq!(engine.fingerprint().unwrap(), here.fingerprint().unwrap(), "{name}");
            let mut s = sequence(&engine);
            s.prefill(&golden.prompt).unwrap();
            assert_eq!(greedy(&mut s, 4), golden.decode_ids[..4], "{name}");
        }
    }
}

/// Files that the compiler on the host was given; a real one does not tell.
fn compiled() -> Option<i32> {
    // SAFETY: the compiler is open, since a model was loaded with it, and its function takes nothing.
    unsafe {
        let compiler = libc::dlopen(c"libnvrtc.so.12".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        let function = if compiler.is_null() { null_mut() } else { libc::dlsym(compiler, c"shim_compiled".as_ptr()) };
        (!function.is_null()).then(|| std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> i32>(function)())
    }
}

/// Compiling takes seconds for each file, which no prompt and no step may have to wait for; and what cannot be had is told by the load.
#[test]
fn kernels_are_there_after_the_load() {
    if !is_child("kernels_are_there_after_the_load", &[]) {
        return;
    }
    for (name, threads) in
        [("llama", 1), ("mixtral", 3), ("nemotron_h-mixed", 2), ("lfm2", 1), ("gpt_oss-mxfp4", 1), ("llama-gguf-q4_k", 4)]
    {
        for compute in [Compute::F32, Compute::Fast] {
            let path = fixtures().join(name);
            let options = LoadOptions { compute: Some(compute), threads, ..options(1) };
            let engine = engine::load(&path, &options, None).unwrap();
            let before = compiled();
            assert!(before.is_some() || is_real());
            let prompt: Vec<i32> = (0..100).map(|i| i % 50).collect();
            let mut sequences: Vec<Sequence> = (0..9).map(|_| sequence(&engine)).collect();
            sequences.iter_mut().zip([100, 9, 3, 1].into_iter().cycle()).for_each(|(s, n)| s.prefill(&prompt[..n]).unwrap());
            for count in [1, 2, 5, 9] {
                let mut choosers: Vec<Chooser> = (0..count).map(|_| Chooser::new(Sampler::greedy())).collect();
                choosers.iter_mut().for_each(|chooser| chooser.ignore_end = true);
                let mut all: Vec<&mut Sequence> = sequences[..count].iter_mut().collect();
                decode_step(&mut all, &mut choosers.iter_mut().collect::<Vec<_>>(), &mut vec![0; count]).unwrap();
            }
            assert_eq!(before, compiled(), "{name} {compute:?}");
        }
    }
}

#[test]
fn a_kernel_that_cannot_be_had_fails_the_load() {
    if !is_child("a_kernel_that_cannot_be_had_fails_the_load", &[("METRALE_SHIM_REFUSES", "norm")]) || is_real() {
        return;
    }
    let loads = [options(1), LoadOptions { threads: 3, ..options(1) }];
    for options in loads {
        let e = engine::load(&model(), &options, None).err().expect("norm is refused");
        assert_eq!(e.kind(), Kind::DeviceUnsupported, "{e}");
        assert!(e.to_string().contains("kernels/norm.cu") && e.to_string().contains("it is refused"), "{e}");
    }
}

/// A device of capability 9.0 whose kernels with products of groups of warps cannot be had makes do with the others, which the load sees to as well.
#[test]
fn a_device_does_without_groups_of_warps() {
    if !is_child("a_device_does_without_groups_of_warps", &[("METRALE_SHIM_REFUSES", "linear_group")]) || is_real() {
        return;
    }
    let golden = Golden::read(&model());
    for threads in [1, 3] {
        let engine = engine::load(&model(), &LoadOptions { compute: Some(Compute::Fast), threads, ..options(1) }, None).unwrap();
        let before = compiled().unwrap();
        let mut s = sequence(&engine);
        s.prefill(&golden.prompt.iter().copied().cycle().take(100).collect::<Vec<_>>()).unwrap();
        greedy(&mut s, 2);
        assert_eq!(compiled().unwrap(), before);
    }
}

/// Whether the device is a card.
fn is_real() -> bool {
    Device::open(0).unwrap().info().name != "kernels on the host"
}

/// Rows of 16-bit floats are packed by the device, a launch for each matrix; experts that are stored input-major, and what is not such rows, are not.
#[test]
fn stored_rows_are_packed_by_the_device() {
    let name = "stored_rows_are_packed_by_the_device";
    // Also where memory of our own cannot be pinned, so that the driver has to give some.
    if !(is_child(name, &[]) || is_child(name, &[("METRALE_SHIM_UNPINNED", "1")])) {
        return;
    }
    let open = Device::open(0).unwrap();
    let prompt = Golden::read(&model()).prompt;
    let check = |name: &str, path: &Path, launches: u64| {
        let queued = || queued(-5);
        let here = engine::load(path, &options(0), None).unwrap();
        let before = queued();
        let there = engine::load(path, &options(1), None).unwrap();
        match before {
            Some(before) => assert_eq!(queued().unwrap() - before, launches, "{name}"),
            None => println!("SKIPPED: a real driver does not tell what it was given"),
        }
        assert_eq!(here.fingerprint().unwrap(), there.fingerprint().unwrap(), "{name}");
        let [expected, found] = [here, there].map(|engine| {
            let mut s = sequence(&engine);
            s.prefill(&prompt).unwrap();
            (greedy(&mut s, 2), s.logits().unwrap().to_vec())
        });
        assert_eq!(expected.0, found.0, "{name}");
        assert!(expected.1.iter().zip(&found.1).all(|(a, b)| (a - b).abs() < 1e-4), "{name}");
    };
    check("bfloat16", &model(), 23);
    check("experts of bfloat16", &fixtures().join("mixtral"), 60);
    check("codes", &fixtures().join("llama-gguf-q4_k"), 0);
    let mut halves = Copy::read(&model());
    for tensor in halves.tensors.iter_mut().filter(|t| t.shape.len() == 2) {
        tensor.dtype = Dtype::F16;
        let half = |two: &[u8]| half::f16::from_f32(half::bf16::from_le_bytes([two[0], two[1]]).to_f32()).to_le_bytes();
        tensor.bytes = tensor.bytes.chunks_exact(2).flat_map(half).collect();
    }
    let folder = Scratch::new("halves");
    halves.write(&folder);
    check("half floats", folder.path(), 23);
    let mut turned = Copy::read(&fixtures().join("gpt_oss-mxfp4"));
    turned.config.as_object_mut().unwrap().remove("quantization_config");
    turned.tensors.retain(|t| t.dtype == Dtype::BF16);
    let mut random = Random(7);
    for (layer, (leaf, shape)) in
        [0, 1].into_iter().flat_map(|n| [("gate_up_proj", [6, 64, 192]), ("down_proj", [6, 96, 64])].map(|t| (n, t)))
    {
        let value = |_| half::bf16::from_f32(random.below(1000) as f32 / 5000.0 - 0.1).to_le_bytes();
        let bytes = (0..shape.iter().product::<usize>()).flat_map(value).collect();
        let name = format!("model.layers.{layer}.mlp.experts.{leaf}");
        turned.tensors.push(Tensor { name, dtype: Dtype::BF16, shape: shape.to_vec(), bytes });
    }
    let folder = Scratch::new("turned");
    turned.write(&folder);
    // Two tables, and attention and router of two layers.
    check("experts input-major", folder.path(), 2 + 2 * (4 + 1));
    drop(open);
}

#[test]
fn bounded_steps_come_to_the_same_tokens() {
    if !is_child("bounded_steps_come_to_the_same_tokens", &[]) {
        return;
    }
    let golden = Golden::read(&model());
    let engine = load(1);
    let mut s = sequence(&engine);
    s.feed(&golden.prompt).unwrap();
    let mut chooser = Chooser::new(Sampler::greedy());
    chooser.ignore_end = true;
    let (mut tokens, mut cut) = (Vec::new(), 0);
    while tokens.len() < 4 {
        let mut out = [engine::Stepped::default()];
        engine::step(&mut [&mut s], &mut [&mut chooser], Some(Duration::from_micros(200)), &mut out).unwrap();
        cut += usize::from(matches!(out[0].state, StepState::Unfinished));
        tokens.extend(out[0].token);
    }
    assert_eq!(tokens, golden.decode_ids[..4]);
    assert!(cut > 0, "a budget of 200 us was never too short");
}

/// Kernels that the driver on the host was given on streams of a priority; a real one does not tell.
fn queued(priority: i32) -> Option<u64> {
    // SAFETY: the driver is open, since a model was loaded with it, and has this function.
    unsafe {
        let driver = libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_NOLOAD);
        let function = libc::dlsym(driver, c"shim_queued".as_ptr());
        (!function.is_null()).then(|| std::mem::transmute::<*mut libc::c_void, extern "C" fn(i32) -> u64>(function)(priority))
    }
}

#[test]
fn work_has_the_priority_it_was_given() {
    if !is_child("work_has_the_priority_it_was_given", &[]) {
        return;
    }
    // What the driver on the host calls the least and the greatest.
    const PRIORITIES: [i32; 2] = [0, -5];
    let golden = Golden::read(&model());
    for low_priority in [true, false] {
        let engine = engine::load(&model(), &LoadOptions { low_priority, ..options(1) }, None).unwrap();
        let (own, other) = if low_priority { (0, 1) } else { (1, 0) };
        let before = PRIORITIES.map(queued);
        if before[0].is_none() {
            return println!("SKIPPED: a real driver does not tell what it was given");
        }
        let mut s = sequence(&engine);
        s.prefill(&golden.prompt).unwrap();
        let read = PRIORITIES.map(queued);
        assert_eq!(greedy(&mut s, 4), golden.decode_ids[..4]);
        let after = PRIORITIES.map(queued);
        assert!(before[own] < read[own] && read[own] < after[own], "low {low_priority}: {before:?}, {read:?}, {after:?}");
        assert_eq!(before[other], after[other], "low {low_priority}");
    }
    // Loads on the processor take the option too.
    let engine = engine::load(&model(), &LoadOptions { low_priority: true, ..options(0) }, None).unwrap();
    let mut s = sequence(&engine);
    s.prefill(&golden.prompt).unwrap();
    assert_eq!(greedy(&mut s, 4), golden.decode_ids[..4]);
}

#[test]
fn a_device_lost_while_it_packs_ends_the_load() {
    if !is_child("a_device_lost_while_it_packs_ends_the_load", &[("METRALE_SHIM_FAIL", "5")]) {
        return;
    }
    if std::env::var_os("METRALE_SHIM_FAIL").is_none() {
        return println!("SKIPPED: a real device is not lost on purpose");
    }
    assert_eq!(engine::load(&model(), &options(1), None).err().unwrap().kind(), Kind::DeviceLost);
}

#[test]
fn a_lost_device_takes_nothing_else_with_it() {
    // Loading launches a kernel for each of 23 matrices, then come the prompt's first operations.
    if !is_child("a_lost_device_takes_nothing_else_with_it", &[("METRALE_SHIM_FAIL", "40")]) {
        return;
    }
    if std::env::var_os("METRALE_SHIM_FAIL").is_none() {
        return println!("SKIPPED: a real device is not lost on purpose");
    }
    let golden = Golden::read(&model());
    let engines = [load(0), load(1)];
    let mut lost = sequence(&engines[1]);
    let e = (0..100).find_map(|_| lost.prefill(&golden.prompt[..4]).err()).expect("the 40th launch fails");
    assert_eq!(e.kind(), Kind::DeviceLost, "{e}");
    assert_eq!(lost.len() % 4, 0);
    for e in [lost.prefill(&[1]).err(), lost.snapshot().and_then(|s| s.to_bytes()).err(), engine::load(&model(), &options(1), None).err()] {
        assert!(e.is_some_and(|e| matches!(e.kind(), Kind::DeviceLost | Kind::Internal)));
    }
    let mut sound = sequence(&engines[0]);
    sound.prefill(&golden.prompt).unwrap();
    assert_eq!(greedy(&mut sound, 4), golden.decode_ids[..4]);
    drop((lost, engines));
}
