//! Every operation: the pool's body against the definition, on random inputs, over batches of several sequences.
//!
//! A case declares weights and records a small circuit over random inputs. The same batches then run twice, each with
//! its own caches: once by `Program::run` (fast bodies, pool), once by `Program::run_scalar` (definitions in f64).
#![allow(unsafe_code)] // writes the rows of a test input

use metrale::backend::cpu::pack::{LANES, Layout, Packed};
use metrale::backend::cpu::pause::Control;
use metrale::backend::cpu::pool::Pool;
use metrale::cache::{LayerPages, PagePool, SequenceState, StateLayout, StatePool};
use metrale::circuit::{Needs, Program, Progress, Tape, Workspace, lower};
use metrale::error::Result;
use metrale::layers::{Mixer, Mla, MlaDims, MlaForm, RopeParameters, Ropes};
use metrale::ops::{self, *};
use metrale::weights::{Declarations, Part, Pick, Role, Source};

/// Numbers in -1..1 that depend on the seed alone.
fn random(n: usize, seed: u64) -> Vec<f32> {
    let mut s = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            s ^= s << 13;
            s ^= s >> 7;
            s ^= s << 17;
            (s >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}

/// A test input: rows that depend on position and sequence, so that the same position gives the same row.
#[derive(Clone, Debug)]
struct Given {
    width: usize,
    seed: u64,
    size: f32,
    y: Value,
}

impl Given {
    fn fill(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        for (index, segment) in frame.batch.segments.iter().enumerate() {
            for row in segment.rows.clone() {
                let seed = self.seed + 1000 * index as u64 + 7 * u64::from(frame.batch.positions[row]);
                // SAFETY: runs on one thread.
                for (y, v) in unsafe { y.row(row) }.iter_mut().zip(random(self.width, seed)) {
                    *y = v * self.size;
                }
            }
        }
    }
}

impl Op for Given {
    metrale::op_common!("given");
    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::Out, &mut self.y)]
    }
    fn check(&self, _: &dyn Shapes) -> Result<Vec<Shape>> {
        Ok(vec![Shape::f32(Rows::All, self.width)])
    }
    fn solo(&self, _: &Frame<'_>) -> bool {
        true
    }
    fn scalar(&self, frame: &Frame<'_>) {
        self.fill(frame);
    }
    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        if turn.worker.index() == 0 {
            self.fill(frame);
        }
    }
}

/// What a case may use while it records.
struct Bench<'a, 'b> {
    t: &'a mut Tape<'b>,
    seed: u64,
}

impl Bench<'_, '_> {
    fn given(&mut self, width: usize) -> Value {
        self.given_size(width, 1.0)
    }
    fn given_size(&mut self, width: usize, size: f32) -> Value {
        self.seed += 1;
        self.t.op(Given { width, seed: self.seed * 100_000, size, y: Value::NONE })
    }
}

/// Tolerance relative to the largest magnitude of the row's output.
fn compare(name: &str, declare: impl Fn(&mut Declarations) -> Vec<u32>, layout: Layout, tolerance: f32, record: impl Fn(&mut Bench<'_, '_>, &[u32]) -> Value) {
    let mut d = Declarations::default();
    let ids = declare(&mut d);
    let weights: Vec<Weight> = d
        .weights
        .iter()
        .enumerate()
        .map(|(i, spec)| match (&spec.source, spec.role) {
            (Source::Constant(values), _) => Weight::Vector(values.clone()),
            (_, Role::Vector { .. }) => Weight::Vector(random(spec.cols, 900 + i as u64).iter().map(|v| 1.0 + 0.5 * v).collect()),
            (_, role) => {
                let matrix = |e: usize| {
                    let mut packed = Packed::new(layout, spec.rows, spec.cols).unwrap();
                    let values = random(spec.rows * spec.cols, 500 + i as u64 + 31 * e as u64);
                    for (panel, rows) in packed.panels_mut().zip(values.chunks(LANES * spec.cols)) {
                        fill(layout, spec.cols, panel, rows);
                    }
                    Matrix { parts: vec![packed] }
                };
                match role {
                    Role::Experts => Weight::Experts((0..spec.experts()).map(matrix).collect()),
                    _ => Weight::Matrix(matrix(0)),
                }
            }
        })
        .collect();
    let mut tape = Tape::new(&d, true);
    let output = record(&mut Bench { t: &mut tape, seed: 1 }, &ids);
    let mut circuit = tape.finish(output).unwrap_or_else(|e| panic!("{name}: {e}"));
    lower(&mut circuit, &|_| Needs { f32: !layout.is_integer(), q8: layout.is_integer() });
    let program = Program::new(circuit, 64, 4, &[]).unwrap();
    let pool = Pool::new(3).unwrap();
    let mut workspaces = [0, 1].map(|_| Workspace::new(program.workspace_bytes()).unwrap());
    let pools: Vec<_> = d.kv.iter().map(|spec| PagePool::new(spec.page_bytes(), 256)).collect();
    let mut caches: [Vec<Vec<LayerPages>>; 2] =
        [0, 1].map(|_| (0..3).map(|_| pools.iter().map(|p| LayerPages::new(p, 256).unwrap()).collect()).collect());
    let states = StatePool::new(StateLayout::new(&d.slots, 1).unwrap());
    let zero = states.zero().unwrap();
    let mut slots = [0, 1].map(|_| [0, 1, 2].map(|_| SequenceState::new(&states, &zero)));
    let mut lengths = [0usize; 3];
    // Rows for each of three sequences in successive batches: alone, together, prompts beside single tokens.
    for counts in [[5, 0, 0], [1, 1, 17], [33, 1, 0], [1, 1, 1], [2, 3, 40]] {
        let mut found: Vec<Vec<f32>> = Vec::new();
        for side in 0..2 {
            let mut batch = Batch { kv_states: d.kv.len(), slots: states.layout().slots().clone(), ..Batch::default() };
            for (s, &count) in counts.iter().enumerate().filter(|(_, c)| **c > 0) {
                let start = batch.tokens.len();
                for p in lengths[s]..lengths[s] + count {
                    batch.tokens.push((p * 7 + s) as i32 % 32);
                    batch.positions.push(p as u32);
                }
                batch.segments.push(Segment { rows: start..start + count, position: lengths[s] });
                // Everything that was written so far is the source of operations that look at one.
                batch.sources.push(lengths[s] + count);
                for pages in &mut caches[side][s] {
                    pages.reserve(lengths[s], lengths[s] + count).unwrap();
                    batch.kv.push(KvPages::new(pages.pointers()));
                }
                slots[side][s].begin().unwrap();
                batch.states.push(slots[side][s].pointers(false));
            }
            if side == 0 {
                program.run(&pool, &mut workspaces[0], &batch, &weights, &mut Progress::default(), Control::none()).unwrap();
            } else {
                program.run_scalar(&mut workspaces[1], &batch, &weights);
            }
            let mut rows = Vec::new();
            program.read(&mut workspaces[side], &batch, output, &mut rows).unwrap();
            found.push(rows);
            (0..3).filter(|s| counts[*s] > 0).for_each(|s| slots[side][s].commit(None));
        }
        let most = found[1].iter().fold(1e-3f32, |m, v| m.max(v.abs()));
        for (i, (fast, exact)) in found[0].iter().zip(&found[1]).enumerate() {
            assert!((fast - exact).abs() <= tolerance * most, "{name}, rows {counts:?}, element {i}: {fast} against {exact} (of {most})");
        }
        assert!(found[1].iter().any(|v| *v != 0.0), "{name}: all zeros prove nothing");
        (0..3).for_each(|s| lengths[s] += counts[s]);
    }
}

/// Packs rows of floats as `layout`; integer layouts take codes made from the values.
fn fill(layout: Layout, cols: usize, panel: &mut [u8], values: &[f32]) {
    use metrale::backend::cpu::pack::CodeRow;
    if !layout.is_integer() {
        let rows: Vec<&[f32]> = values.chunks(cols).collect();
        return layout.fill_f32(cols, panel, &rows).unwrap();
    }
    let (low, high) = match layout {
        Layout::I8 { .. } => (-127.0, 127.0),
        Layout::I4 { min: false, .. } => (-8.0, 7.0),
        _ => (0.0, 15.0),
    };
    let codes: Vec<i8> = values.iter().map(|v| (low + (v + 1.0) / 2.0 * (high - low)).round() as i8).collect();
    let blocks = cols / layout.block();
    let scale: Vec<f32> = values.iter().take(blocks).map(|v| 0.01 + 0.01 * v.abs()).collect();
    let min: Vec<f32> = if layout.has_min() { scale.iter().map(|s| s * 7.0).collect() } else { Vec::new() };
    let rows: Vec<CodeRow<'_>> = codes.chunks(cols).map(|codes| CodeRow { codes, scale: &scale, min: &min, gain: 1.0 }).collect();
    layout.fill_codes(cols, panel, &rows).unwrap();
}

fn none(_: &mut Declarations) -> Vec<u32> {
    Vec::new()
}

#[test]
fn elementwise() {
    compare("add", none, Layout::F32, 1e-6, |b, _| {
        let (x, y) = (b.given(96), b.given(96));
        b.t.add(x, y)
    });
    compare("scale", none, Layout::F32, 1e-6, |b, _| {
        let x = b.given(33);
        b.t.scale(x, 1.7)
    });
    for width in [1, 48] {
        let declare = move |d: &mut Declarations| vec![d.vector("factor", width, 0.0).0];
        compare(&format!("scale_by {width}"), declare, Layout::F32, 1e-6, |b, w| {
            let x = b.given(48);
            b.t.op(ScaleBy { x, factor: WeightId(w[0]), y: Value::NONE })
        });
    }
    compare("softcap", none, Layout::F32, 1e-6, |b, _| {
        let x = b.given_size(48, 40.0);
        b.t.op(Softcap { x, cap: 30.0, y: Value::NONE })
    });
    let limit = 2.0;
    let bounded = [Activation::ClampedSilu { limit }, Activation::SiluThenClamp { limit }, Activation::SwigluOai { alpha: 1.702, limit }];
    let plain = [Activation::Silu, Activation::GeluTanh, Activation::Gelu, Activation::Relu, Activation::Relu2, Activation::Sigmoid, Activation::Softplus];
    for act in plain.into_iter().chain(bounded) {
        compare(&format!("act_mul {act:?}"), none, Layout::F32, 1e-6, |b, _| {
            let h = b.given_size(2 * 1100, 6.0);
            let (gate, up) = (b.t.slice(h, 0, 1100), b.t.slice(h, 1100, 1100));
            b.t.op(ActMul { act, gate, up, y: Value::NONE })
        });
    }
}

#[test]
fn head_gates() {
    compare("head_gate", none, Layout::F32, 1e-6, |b, _| {
        let (gate, x) = (b.given_size(5, 6.0), b.given(5 * 24));
        b.t.op(HeadGate { act: Activation::Softplus, gate, x, y: Value::NONE })
    });
}

/// A router over `choices`, with every switch of it in some case.
fn routers(choices: usize) -> Vec<Route> {
    let (logits, y) = (Value::NONE, Value::NONE);
    let plain = Route { logits, scoring: Scoring::Softmax, bias: None, groups: None, top_k: 3, normalize: true, scale: 1.0, gain: None, y };
    let bias = Some(WeightId(0));
    vec![
        plain.clone(),
        Route { normalize: false, scale: 2.5, ..plain.clone() },
        Route { normalize: false, bias, ..plain.clone() },
        Route { scoring: Scoring::SoftmaxPicked, top_k: choices, normalize: false, ..plain.clone() },
        Route { scoring: Scoring::Sigmoid, bias, scale: 1.5, gain: bias, ..plain.clone() },
        Route { scoring: Scoring::Sigmoid, bias, groups: Some(Groups { count: 4, keep: 2, best_two: true }), ..plain.clone() },
        Route { groups: Some(Groups { count: 4, keep: 1, best_two: false }), ..plain.clone() },
        Route { scoring: Scoring::SqrtSoftplus, bias, top_k: 1, ..plain },
    ]
}

#[test]
fn routes() {
    for (i, op) in routers(24).into_iter().enumerate() {
        let declare = |d: &mut Declarations| vec![d.vector("bias", 24, 0.0).0];
        compare(&format!("route {i}"), declare, Layout::F32, 1e-6, |b, _| {
            let logits = b.given_size(24, 4.0);
            b.t.op(Route { logits, ..op.clone() })
        });
    }
}

/// Routed products with inputs shared by the slots and of their own, with and without bias, with ids that no expert has; put together
/// with a gated shared expert.
#[test]
fn routed_experts() {
    let layouts = [Layout::F32, Layout::Bf16, Layout::I8 { block: 32, min: false }, Layout::I4 { block: 32, min: true }];
    for layout in layouts {
        // 9 experts and 3 choices beyond them; 70 outputs end inside a panel and need two chunks.
        let (experts, choices, slots, hidden, inner) = (9, 12, 3, 64, 96);
        let declare = move |d: &mut Declarations| {
            let matrices = |rows: usize| (0..experts).map(|e| vec![Part::whole(format!("{e}"), rows)]).collect::<Vec<_>>();
            let up = d.experts("up", matrices(inner), hidden);
            let down = d.experts("down", matrices(70), inner);
            vec![up.0, d.vector("bias", experts * inner, 0.0).0, down.0]
        };
        compare(&format!("experts {layout:?}"), declare, layout, if layout.is_integer() { 2e-2 } else { 5e-6 }, |b, w| {
            let (x, logits) = (b.given(hidden), b.given_size(choices, 3.0));
            let route = b.t.op(Route { logits, top_k: slots, ..routers(choices)[0].clone() });
            let expert = |x, weight, bias| ExpertLinear { x, q: Value::NONE, route, weight, bias, slots, y: Value::NONE };
            let up = b.t.op(expert(x, WeightId(w[0]), Some(WeightId(w[1]))));
            let down = b.t.op(expert(up, WeightId(w[2]), None));
            let (shared, gate, identity) = (b.given(70), b.given(1), b.given(70));
            b.t.op(Combine { x: down, route, shared, gate, identity, experts, y: Value::NONE })
        });
        compare(&format!("heads {layout:?}"), declare, layout, 5e-6, |b, w| {
            let x = b.given(experts * hidden);
            b.t.op(ExpertLinear { x, q: Value::NONE, route: Value::NONE, weight: WeightId(w[0]), bias: None, slots: experts, y: Value::NONE })
        });
    }
}

#[test]
fn norms() {
    let vector = |n: usize| move |d: &mut Declarations| vec![d.vector("w", n, 0.0).0, d.vector("b", n, 0.0).0];
    for (kind, bias) in [(NormKind::Rms, false), (NormKind::Layer, true)] {
        for (width, group) in [(96, 0), (100, 0), (96, 32), (64, 16)] {
            let n = if group == 0 { width } else { group };
            compare(&format!("norm {kind:?} {width}/{group}"), vector(n), Layout::F32, 2e-6, |b, w| {
                let x = b.given(width);
                b.t.op(Norm { kind, x, weight: Some(WeightId(w[0])), bias: bias.then_some(WeightId(w[1])), group, eps: 1e-5, y: Value::NONE })
            });
        }
    }
    compare("add_norm", vector(576), Layout::F32, 2e-6, |b, w| {
        let (x, y) = (b.given(576), b.given(576));
        b.t.record(AddNorm { a: x, b: y, weight: WeightId(w[0]), eps: 1e-5, sum: Value::NONE, y: Value::NONE })[1]
    });
}

#[test]
fn products() {
    let layouts = [
        (Layout::F32, 2e-6),
        (Layout::Bf16, 2e-6),
        (Layout::F16, 2e-6),
        (Layout::I8 { block: 32, min: false }, 2e-6),
        (Layout::I8 { block: 16, min: true }, 2e-6),
        (Layout::I4 { block: 32, min: false }, 2e-6),
        (Layout::I4 { block: 32, min: true }, 2e-6),
    ];
    for (layout, tolerance) in layouts {
        for (rows, cols) in [(48, 64), (100, 160), (17, 32)] {
            let declare = move |d: &mut Declarations| vec![d.matrix("w", rows, cols).0, d.vector("b", rows, 0.0).0];
            compare(&format!("linear {layout:?} {rows}x{cols}"), declare, layout, tolerance, |b, w| {
                let x = b.given(cols);
                b.t.op(ops::Linear { x, q: Value::NONE, weight: WeightId(w[0]), bias: Some(WeightId(w[1])), y: Value::NONE })
            });
        }
    }
}

#[test]
fn embeddings_and_rotations() {
    let declare = |d: &mut Declarations| vec![d.matrix("e", 32, 64).0];
    compare("embed", declare, Layout::Bf16, 1e-6, |b, w| b.t.op(Embed { table: WeightId(w[0]), factor: 3.0, y: Value::NONE }));
    let declare = |d: &mut Declarations| vec![d.constant("f", vec![1.0, 0.3, 0.1, 0.01]).0];
    for style in [RopeStyle::Halves, RopeStyle::Pairs] {
        compare(&format!("rope {style:?}"), declare, Layout::F32, 1e-6, |b, w| {
            let x = b.given(3 * 12);
            let table = b.t.op(RopeTable { frequencies: WeightId(w[0]), factor: 1.1, y: Value::NONE });
            b.t.op(Rope { x, table, head_dim: 12, style, y: Value::NONE })
        });
    }
}

#[test]
fn attention() {
    for dtype in [KvType::F32, KvType::F16] {
        for (heads, kv_heads, dim, window, softcap, sinks) in
            [(4, 2, 16, None, None, false), (4, 1, 64, Some(24), None, true), (3, 3, 40, Some(1), Some(5.0), false), (8, 2, 80, Some(100), None, false)]
        {
            let spec = KvSpec { heads: kv_heads, key_dim: dim, value_dim: dim, dtype };
            let declare = move |d: &mut Declarations| {
                d.kv(spec);
                vec![d.vector("sinks", heads, 0.0).0]
            };
            compare(&format!("attention {heads}/{kv_heads}x{dim} {window:?} {softcap:?} {dtype:?}"), declare, Layout::F32, 1e-5, |b, w| {
                let (q, k, v) = (b.given(heads * dim), b.given(kv_heads * dim), b.given(kv_heads * dim));
                b.t.record(CacheWrite { k, v, state: StateId(0), spec });
                let sinks = sinks.then_some(WeightId(w[0]));
                b.t.op(ops::Attention { q, state: StateId(0), spec, heads, scale: 1.5, window, softcap, sinks, y: Value::NONE })
            });
        }
    }
}

#[test]
fn convolutions() {
    for (channels, taps, dilation, silu, bias) in [(40, 4, 1, true, true), (16, 3, 1, false, false), (600, 4, 3, true, false), (7, 1, 1, false, true)] {
        let declare = move |d: &mut Declarations| {
            d.slot("tail", ops::Conv::tail(taps, dilation) * channels);
            vec![d.vector("w", channels * taps, 0.0).0, d.vector("b", channels, 0.0).0]
        };
        compare(&format!("conv {channels}x{taps}/{dilation}"), declare, Layout::F32, 1e-6, |b, w| {
            let wide = b.given(channels + 24);
            let x = b.t.slice(wide, 8, channels);
            b.t.op(ops::Conv { x, weight: WeightId(w[0]), bias: bias.then_some(WeightId(w[1])), taps, dilation, silu, slot: SlotId(0), y: Value::NONE })
        });
    }
}

/// A forget gate between 0 and 1 from random numbers.
fn decay(b: &mut Bench<'_, '_>, width: usize, floor: Option<f32>, w: &[u32]) -> Value {
    let x = b.given_size(width, 3.0);
    b.t.op(ops::Decay { x, a_log: WeightId(w[0]), negated: false, bias: WeightId(w[1]), floor, y: Value::NONE })
}

#[test]
fn forget_gates() {
    for (heads, gates, floor) in [(3, 1, None), (3, 48, None), (5, 40, Some(-5.0))] {
        let declare = move |d: &mut Declarations| vec![d.vector("a", heads, 0.0).0, d.vector("b", heads * gates, 0.0).0];
        compare(&format!("decay {heads}x{gates}"), declare, Layout::F32, 2e-6, |b, w| decay(b, heads * gates, floor, w));
    }
}

#[test]
fn regrouped_columns() {
    compare("regroup", none, Layout::F32, 0.0, |b, _| {
        let x = b.given(60);
        let pieces = vec![Piece { first: 1, width: 3, stride: 20, count: 3 }, Piece { first: 40, width: 20, stride: 0, count: 1 }];
        b.t.op(Regroup { x, pieces, y: Value::NONE })
    });
}

#[test]
fn delta_rules() {
    for (key_heads, heads, key_dim, value_dim, gates) in [(2, 4, 24, 20, 1), (3, 3, 16, 32, 16), (1, 2, 33, 7, 1)] {
        let declare = move |d: &mut Declarations| {
            d.slot("state", ops::DeltaRule::slot_elements(heads, key_dim, value_dim).unwrap());
            vec![d.vector("a", heads, 0.0).0, d.vector("b", heads * gates, 0.0).0]
        };
        compare(&format!("delta_rule {key_heads}/{heads} {key_dim}x{value_dim} {gates}"), declare, Layout::F32, 2e-5, |b, w| {
            let keys = key_heads * key_dim;
            let v = b.given(heads * value_dim);
            let [q, k] = [0, 1].map(|_| {
                let x = b.given(keys);
                let unit = b.t.op(Norm { kind: NormKind::Rms, x, weight: None, bias: None, group: key_dim, eps: 1e-6, y: Value::NONE });
                b.t.scale(unit, 1.0 / (key_dim as f32).sqrt())
            });
            let decay = decay(b, heads * gates, None, w);
            let gate = b.given_size(heads, 4.0);
            let beta = b.t.op(ActMul { act: Activation::Sigmoid, gate, up: Value::NONE, y: Value::NONE });
            b.t.op(ops::DeltaRule { q, k, v, decay, beta, key_heads, heads, tiled: key_heads == 2, slot: SlotId(0), y: Value::NONE })
        });
    }
}

#[test]
fn state_spaces() {
    for (heads, groups, channels, depth, limit) in [(6, 2, 20, 12, (0.0, f32::INFINITY)), (2, 1, 16, 33, (0.1, 2.0))] {
        let declare = move |d: &mut Declarations| {
            d.slot("state", ops::Mamba2::slot_elements(heads, channels, depth).unwrap());
            ["a", "d", "t"].map(|name| d.vector(name, heads, 0.0).0).to_vec()
        };
        compare(&format!("mamba2 {heads}/{groups} {channels}x{depth}"), declare, Layout::F32, 1e-5, |b, w| {
            let (x, dt) = (b.given(heads * channels), b.given_size(heads, 4.0));
            let (write, read) = (b.given(groups * depth), b.given(groups * depth));
            let [a_log, d, dt_bias] = [0, 1, 2].map(|i| WeightId(w[i]));
            b.t.op(ops::Mamba2 { x, b: write, c: read, dt, a_log, d, dt_bias, limit, heads, groups, slot: SlotId(0), y: Value::NONE })
        });
    }
}

/// The same cases on the slower tables: the choice is made once in a process, so each runs in its own.
#[test]
fn every_instruction_set() {
    if std::env::var_os("METRALE_SIMD").is_some() {
        return;
    }
    let test = std::env::current_exe().unwrap();
    for simd in ["scalar", "avx2"] {
        let done = std::process::Command::new(&test).env("METRALE_SIMD", simd).output().unwrap();
        assert!(done.status.success(), "{simd}: {}", String::from_utf8_lossy(&done.stdout));
    }
}

/// Records of `width` floats for each `every` positions, in the pages declared next.
fn records(d: &mut Declarations, width: usize, every: usize, dtype: KvType) -> Records {
    Records { state: d.kv(Records::spec(width, every, dtype)), width, every, dtype }
}

#[test]
fn pieces_of_latent_attention() {
    compare("join", none, Layout::F32, 1e-6, |b, _| {
        let (x, y) = (b.given(40), b.given(7));
        let x = b.t.slice(x, 3, 20);
        b.t.op(Join { parts: vec![x, y], y: Value::NONE })
    });
    compare("position_scale", none, Layout::F32, 1e-6, |b, _| {
        let x = b.given(40);
        b.t.op(PositionScale { x, beta: 0.1, original: 8, y: Value::NONE })
    });
    compare("expand_heads", none, Layout::F32, 1e-6, |b, _| {
        let (x, shared) = (b.given(3 * (12 + 8)), b.given(5));
        let split = b.t.record(ExpandHeads { x, shared, heads: 3, key_dim: 12, value_dim: 8, k: Value::NONE, v: Value::NONE });
        b.t.op(Join { parts: split, y: Value::NONE })
    });
    let declare = |d: &mut Declarations| vec![d.constant("f", vec![1.0, 0.3, 0.1, 0.01]).0];
    for (style, inverse) in [(RopeStyle::Halves, false), (RopeStyle::Pairs, true)] {
        compare(&format!("rope_tail {style:?}"), declare, Layout::F32, 1e-6, |b, w| {
            let x = b.given(3 * 12);
            let table = b.t.op(GroupRopeTable { frequencies: WeightId(w[0]), factor: 1.1, every: 3, y: Value::NONE });
            b.t.op(RopeTail { x, table, head_dim: 12, style, inverse, y: Value::NONE })
        });
    }
    for layout in [Layout::F32, Layout::Bf16, Layout::I8 { block: 32, min: false }] {
        for (outputs, tail) in [(20, 5), (80, 0)] {
            let part = move |h: usize| vec![Part::slice("w", [3, outputs, 64], h, outputs)];
            let declare = move |d: &mut Declarations| vec![d.experts("w", (0..3).map(part).collect(), 64).0];
            compare(&format!("head_linear {layout:?} {outputs}"), declare, layout, 1e-5, |b, w| {
                let x = b.given(3 * (64 + tail));
                b.t.op(HeadLinear { x, weight: WeightId(w[0]), heads: 3, tail, y: Value::NONE })
            });
        }
    }
}

#[test]
fn rows_that_all_heads_share() {
    for dtype in [KvType::F32, KvType::F16] {
        for (heads, width, value_dim, window, every, sinks) in [(3, 40, 32, None, None, false), (10, 48, 48, Some(9), Some(4), true), (1, 16, 16, Some(1), Some(1), true)] {
            let declare = move |d: &mut Declarations| {
                records(d, width, 1, dtype);
                records(d, width, every.unwrap_or(1), dtype);
                vec![d.vector("sinks", heads, 0.0).0]
            };
            compare(&format!("shared_attention {heads}x{width} {window:?} {every:?} {dtype:?}"), declare, Layout::F32, 1e-5, |b, w| {
                let (q, k, pooled) = (b.given(heads * width), b.given(width), b.given(width));
                let near = Records { state: StateId(0), width, every: 1, dtype };
                let far = Records { state: StateId(1), every: every.unwrap_or(1), ..near };
                b.t.record(RecordWrite { x: k, records: near });
                b.t.record(RecordWrite { x: pooled, records: far });
                let pooled = every.map(|_| Pooled { records: far, selection: Value::NONE });
                let sinks = sinks.then_some(WeightId(w[0]));
                let selection = Value::NONE;
                b.t.op(SharedAttention { q, heads, records: near, window, selection, pooled, value_dim, scale: 1.5, sinks, y: Value::NONE })
            });
        }
    }
}

#[test]
fn indexers() {
    let (heads, width) = (3, 24);
    for (every, top_k, blocks, positions) in [(1, 4, false, false), (4, 3, false, true), (2, 5, true, false), (3, 200, false, true)] {
        let declare = move |d: &mut Declarations| {
            records(d, width, every, KvType::F32);
            records(d, 16, 1, KvType::F32);
            Vec::new()
        };
        let name = format!("index every {every}, best {top_k}, blocks {blocks}, positions {positions}");
        compare(&name, declare, Layout::F32, 1e-5, |b, _| {
            let (q, weights, key) = (b.given(heads * width), b.given(heads), b.given(width));
            let keys = Records { state: StateId(0), width, every, dtype: KvType::F32 };
            b.t.record(RecordWrite { x: key, records: keys });
            let indexer = Indexer { q, weights, keys };
            let blocks = if blocks { b.t.op(IndexBlocks { indexer, block: 3, top_k: 4, y: Value::NONE }) } else { Value::NONE };
            let selection = b.t.op(IndexSelect { indexer, top_k, blocks, block: 3, positions, y: Value::NONE });
            // What a selection is for: attention over it alone.
            let (q, k) = (b.given(2 * 16), b.given(16));
            let records = Records { state: StateId(1), width: 16, every: 1, dtype: KvType::F32 };
            b.t.record(RecordWrite { x: k, records });
            b.t.op(SharedAttention { q, heads: 2, records, window: None, selection, pooled: None, value_dim: 16, scale: 1.0, sinks: None, y: Value::NONE })
        });
    }
}

#[test]
fn pooled_groups() {
    for (every, overlap, bias) in [(4, true, true), (3, false, false), (8, false, true)] {
        let width = if overlap { 2 * 20 } else { 20 };
        let declare = move |d: &mut Declarations| {
            records(d, 2 * width, 1, KvType::F32);
            vec![d.vector("bias", every * width, 0.0).0]
        };
        compare(&format!("pool_groups {every} {overlap}"), declare, Layout::F32, 1e-5, |b, w| {
            let (x, seen) = (b.given_size(2 * width, 3.0), b.given(1));
            let source = Records { state: StateId(0), width: 2 * width, every: 1, dtype: KvType::F32 };
            b.t.record(RecordWrite { x, records: source });
            let bias = bias.then_some(WeightId(w[0]));
            let pooled = b.t.op(PoolGroups { source, bias, every, dim: 20, overlap, y: Value::NONE });
            // A batch may complete no group; the other column is never all zeros.
            b.t.op(Join { parts: vec![pooled, seen], y: Value::NONE })
        });
    }
}

#[test]
fn residual_streams() {
    let streams = 3;
    let declare = move |d: &mut Declarations| vec![d.vector("scale", 3, 0.0).0, d.vector("base", (2 + streams) * streams, 0.0).0];
    compare("hyper", declare, Layout::F32, 1e-5, |b, w| {
        let (m, x, out) = (b.given_size((2 + streams) * streams, 3.0), b.given(streams * 24), b.given(24));
        let mix = b.t.op(HyperMix { m, scale: WeightId(w[0]), base: WeightId(w[1]), streams, rounds: 20, eps: 1e-6, y: Value::NONE });
        let y = b.t.op(HyperExpand { out, x, mix, streams, y: Value::NONE });
        let one = b.t.op(HyperCollapse { x: y, pre: mix, streams, y: Value::NONE });
        let mean = b.t.op(HyperCollapse { x: y, pre: Value::NONE, streams, y: Value::NONE });
        b.t.op(Join { parts: vec![mix, y, one, mean], y: Value::NONE })
    });
    let declare = |d: &mut Declarations| vec![d.vector("query", 24, 0.0).0, d.vector("norm", 24, 0.0).0];
    compare("residual_mix", declare, Layout::F32, 1e-5, |b, w| {
        let sources = (0..4).map(|_| b.given(24)).collect();
        b.t.op(ResidualMix { sources, query: WeightId(w[0]), norm: WeightId(w[1]), eps: 1e-6, y: Value::NONE })
    });
}

#[test]
fn hashes_of_tokens() {
    let history = Records { state: StateId(0), width: 1, every: 1, dtype: KvType::F32 };
    let declare = |d: &mut Declarations| {
        records(d, 1, 1, KvType::F32);
        let map = (0..32).map(|i| if i == 9 { -1.0 } else { (i / 2) as f32 }).collect();
        vec![d.matrix("table", 60, 16).0, d.constant("map", map).0]
    };
    compare("ngram_rows", declare, Layout::F32, 1e-6, |b, w| {
        let x = b.t.op(TokenIds { y: Value::NONE });
        b.t.record(RecordWrite { x, records: history });
        let tables = vec![NgramTable { rows: 57, tokens: 2 }, NgramTable { rows: 59, tokens: 3 }];
        let ids = b.t.op(NgramRows { history, base: 32, ends: vec![3], tables, y: Value::NONE });
        b.t.op(Lookup { ids, column: 0, count: 2, table: WeightId(w[0]), y: Value::NONE })
    });
    compare("engram_rows", declare, Layout::F32, 1e-6, |b, w| {
        let x = b.t.op(TokenIds { y: Value::NONE });
        b.t.record(RecordWrite { x, records: history });
        let hash = EngramHash { multipliers: vec![i64::MAX / 3, 12345, -7], primes: vec![11, 13, 17, 19], offsets: vec![0, 11, 24, 41] };
        let ids = b.t.op(EngramRows { history, map: WeightId(w[1]), pad: 2, hash, y: Value::NONE });
        b.t.op(Lookup { ids, column: 1, count: 3, table: WeightId(w[0]), y: Value::NONE })
    });
    let declare = |d: &mut Declarations| vec![d.vector("q", 3 * 24, 0.0).0, d.vector("k", 3 * 24, 0.0).0];
    compare("engram_inject", declare, Layout::F32, 1e-5, |b, w| {
        let (x, kv) = (b.given(3 * 24), b.given(4 * 24));
        b.t.op(EngramInject { x, kv, q: WeightId(w[0]), k: WeightId(w[1]), streams: 3, eps: 1e-6, y: Value::NONE })
    });
}

/// Element `(row, col)` of a checkpoint's tensor that does not exist: a number that depends on its name and place alone.
fn element(tensor: &str, row: usize, col: usize) -> f32 {
    let seed = tensor.bytes().fold(7u64, |s, b| s.wrapping_mul(31).wrapping_add(u64::from(b)));
    random(1, seed ^ ((row as u64) << 32 | col as u64).wrapping_mul(0x2545_f491_4f6c_dd1d))[0]
}

/// The weights of some declarations, all from the tensors of one such checkpoint.
fn checkpoint(d: &Declarations) -> Vec<Weight> {
    let value = |part: &Part, row: usize, col: usize| match part.pick {
        Pick::Transposed { from, .. } => element(&part.tensor, from + col, part.stored(row)),
        _ => element(&part.tensor, part.stored(row), col),
    };
    let matrix = |parts: &[Part], cols: usize| {
        let packed = parts.iter().map(|part| {
            let mut packed = Packed::new(Layout::F32, part.rows, cols).unwrap();
            let values: Vec<f32> = (0..part.rows * cols).map(|i| value(part, i / cols, i % cols)).collect();
            packed.panels_mut().zip(values.chunks(LANES * cols)).for_each(|(panel, rows)| fill(Layout::F32, cols, panel, rows));
            packed
        });
        Matrix { parts: packed.collect() }
    };
    let weight = |spec: &metrale::weights::WeightSpec| match (&spec.source, spec.role) {
        (Source::Tensors(parts), Role::Vector { .. }) => Weight::Vector(parts.iter().flat_map(|p| (0..p.rows).map(move |r| 1.0 + value(p, r, 0))).collect()),
        (Source::Tensors(parts), _) => Weight::Matrix(matrix(parts, spec.cols)),
        (Source::Experts(experts), _) => Weight::Experts(experts.iter().map(|parts| matrix(parts, spec.cols)).collect()),
        (Source::Constant(values), _) => Weight::Vector(values.clone()),
    };
    d.weights.iter().map(weight).collect()
}

#[test]
fn both_forms_of_latent_attention_agree() {
    let dims = MlaDims {
        hidden: 48,
        heads: 3,
        q_rank: None,
        kv_rank: 20,
        nope_dim: 12,
        rope_dim: 8,
        value_dim: 16,
        scale: 0.2,
        rope: Some((0, RopeStyle::Pairs)),
        eps: 1e-6,
        bias: false,
        query_factor: 1.5,
        latent_factor: 0.5,
        position_scale: Some((0.1, 8)),
        output_gate: true,
        form: MlaForm::Latent,
        kv_type: KvType::F32,
    };
    for q_rank in [None, Some(24)] {
        let rows = [MlaForm::Latent, MlaForm::Expanded].map(|form| {
            let mut d = Declarations::default();
            let mut ropes = Ropes::default();
            ropes.add(&mut d, RopeParameters::plain(100.0, 8));
            let layer = Mla::new(&mut d, "attn", MlaDims { q_rank, form, ..dims });
            let weights = checkpoint(&d);
            let mut tape = Tape::new(&d, true);
            let x = Bench { t: &mut tape, seed: 1 }.given(48);
            let tables = ropes.record(&mut tape);
            let output = Mixer::record(&layer, &mut tape, x, &tables);
            let mut circuit = tape.finish(output).unwrap();
            lower(&mut circuit, &|_| Needs { f32: true, q8: false });
            let program = Program::new(circuit, 64, 1, &[]).unwrap();
            let mut workspace = Workspace::new(program.workspace_bytes()).unwrap();
            let mut pages: Vec<LayerPages> = d.kv.iter().map(|s| LayerPages::new(&PagePool::new(s.page_bytes(), 64), 64).unwrap()).collect();
            let mut batch = Batch { kv_states: d.kv.len(), tokens: vec![1; 40], positions: (0..40).collect(), ..Batch::default() };
            batch.segments.push(Segment { rows: 0..40, position: 0 });
            for pages in &mut pages {
                pages.reserve(0, 40).unwrap();
                batch.kv.push(KvPages::new(pages.pointers()));
            }
            program.run(&Pool::new(2).unwrap(), &mut workspace, &batch, &weights, &mut Progress::default(), Control::none()).unwrap();
            let mut rows = Vec::new();
            program.read(&mut workspace, &batch, output, &mut rows).unwrap();
            rows
        });
        let most = rows[1].iter().fold(0.0f32, |m, v| m.max(v.abs()));
        let apart = rows[0].iter().zip(&rows[1]).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
        assert!(most > 0.1 && apart < 1e-5 * most, "{apart} of {most}");
    }
}

#[test]
fn attention_over_a_source() {
    for dtype in [KvType::F32, KvType::F16] {
        let spec = KvSpec { heads: 3, key_dim: 24, value_dim: 24, dtype };
        let declare = move |d: &mut Declarations| {
            d.source_kv(spec);
            Vec::new()
        };
        compare(&format!("source_attention {dtype:?}"), declare, Layout::F32, 1e-5, |b, _| {
            let (q, k, v) = (b.given(72), b.given(72), b.given(72));
            b.t.record(CacheWrite { k, v, state: StateId(0), spec });
            b.t.op(SourceAttention { q, state: StateId(0), spec, scale: 1.5, y: Value::NONE })
        });
    }
    let declare = |d: &mut Declarations| vec![d.constant("f", vec![1.0, 0.3, 0.1, 0.01]).0];
    compare("sinusoid", declare, Layout::F32, 1e-6, |b, w| {
        let x = b.given(9);
        b.t.op(Sinusoid { x, frequencies: WeightId(w[0]), offset: 2, y: Value::NONE })
    });
}

/// An indexer over means of blocks, and attention over the positions it names.
#[test]
fn attention_over_selected_positions() {
    for (heads, kv_heads, dtype) in [(4, 2, KvType::F32), (18, 1, KvType::F32), (2, 2, KvType::F16)] {
        let (dim, every, top_k) = (20, 4, 3);
        let sizes = [(2 * kv_heads * dim, 1, dtype), (16, 1, KvType::F32), (16, every, KvType::F32)];
        let place = |i: usize| Records { state: StateId(i as u32), width: sizes[i].0, every: sizes[i].1, dtype: sizes[i].2 };
        let declare = move |d: &mut Declarations| {
            for (width, every, dtype) in sizes {
                records(d, width, every, dtype);
            }
            Vec::new()
        };
        compare(&format!("selected_attention {heads}/{kv_heads} {dtype:?}"), declare, Layout::F32, 1e-5, |b, _| {
            let (q, kv, index_q, key) = (b.given(heads * dim), b.given(2 * kv_heads * dim), b.given(5 * 16), b.given(16));
            b.t.record(RecordWrite { x: kv, records: place(0) });
            b.t.record(RecordWrite { x: key, records: place(1) });
            let block = b.t.op(MeanGroups { source: place(1), every, y: Value::NONE });
            b.t.record(RecordWrite { x: block, records: place(2) });
            let indexer = Indexer { q: index_q, weights: Value::NONE, keys: place(2) };
            let selection = b.t.op(IndexSelect { indexer, top_k, blocks: Value::NONE, block: 0, positions: true, y: Value::NONE });
            b.t.op(SelectedAttention { q, heads, kv_heads, key_dim: dim, value_dim: dim, records: place(0), selection, scale: 1.5, y: Value::NONE })
        });
    }
}

#[test]
fn gated_streams() {
    compare("stream_gate", none, Layout::F32, 2e-6, |b, _| {
        let (key, query, value) = (b.given_size(4 * 40, 3.0), b.given(4 * 40), b.given(40));
        b.t.op(StreamGate { key, query, value, y: Value::NONE })
    });
    compare("hyper_inject", none, Layout::F32, 1e-6, |b, _| {
        let (out, x, weight) = (b.given(40), b.given(3 * 40), b.given_size(3, 4.0));
        b.t.op(HyperInject { out, x, weight, y: Value::NONE })
    });
    let tables = vec![HashTable { rows: 7, offset: 0, tokens: 2 }, HashTable { rows: 25, offset: 7, tokens: 3 }];
    let declare = |d: &mut Declarations| {
        records(d, 1, 1, KvType::F32);
        vec![d.matrix("table", 32, 16).0]
    };
    compare("ngram_hash", declare, Layout::F32, 1e-6, |b, w| {
        let history = Records { state: StateId(0), width: 1, every: 1, dtype: KvType::F32 };
        let x = b.t.op(TokenIds { y: Value::NONE });
        b.t.record(RecordWrite { x, records: history });
        let multipliers = vec![(1 << 57) + 12345, (1 << 56) + 6789, 77];
        let ids = b.t.op(NgramHash { history, end: 3, multipliers, tables: tables.clone(), y: Value::NONE });
        b.t.op(Lookup { ids, column: 0, count: 2, table: WeightId(w[0]), y: Value::NONE })
    });
}
