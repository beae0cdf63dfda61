//! Latent, indexed, pooled and cross attention, and residual streams.

use crate::bench::*;
use metrale::backend::cpu::pack::{LANES, Layout, Packed};
use metrale::backend::cpu::pause::Control;
use metrale::backend::cpu::pool::Pool;
use metrale::cache::{LayerPages, PagePool};
use metrale::circuit::{Needs, Program, Progress, Tape, Workspace, lower};
use metrale::layers::{Mixer, Mla, MlaDims, MlaForm, RopeParameters, Ropes};
use metrale::ops::*;
use metrale::weights::{Declarations, Part, Pick, Role, Source};

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
    let table = std::array::from_fn(|i| (i as i8 - 8) * 9);
    let integers = [
        Layout::I8 { block: 32, min: false },
        Layout::I8 { block: 16, min: true },
        Layout::I4 { block: 32, min: false },
        Layout::I4 { block: 32, min: true },
        Layout::I4Table { block: 16, table },
    ];
    for layout in [Layout::F32, Layout::Bf16, Layout::F8].into_iter().chain(integers) {
        // Tails of any length: 8-bit blocks leave them out. The last has its matrices in two parts.
        for (outputs, tail) in [(20, 5), (80, 0), (120, 32)] {
            let part = move |h: usize| vec![Part::slice("w", [3, outputs, 64], h, outputs)];
            let declare = move |d: &mut Declarations| vec![d.experts("w", (0..3).map(part).collect(), 64).0];
            compare(&format!("head_linear {layout:?} {outputs}"), declare, layout, 1e-5, |b, w| {
                let x = b.given(3 * (64 + tail));
                b.t.op(HeadLinear { x, q: Value::NONE, weight: WeightId(w[0]), heads: 3, tail, y: Value::NONE })
            });
        }
    }
}

#[test]
fn rows_that_all_heads_share() {
    for dtype in [KvType::F32, KvType::F16, KvType::Bf16] {
        for (heads, width, value_dim, window, every, sinks) in
            [(3, 40, 32, None, None, false), (10, 48, 48, Some(9), Some(4), true), (1, 16, 16, Some(1), Some(1), true)]
                .into_iter()
                // Widths of published models, and the widest there is a kernel for.
                .chain([(2, 300, 256, None, None, false), (2, 576, 512, Some(9), Some(4), true), (3, 1000, 1000, Some(5), None, false)])
        {
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
            b.t.op(SharedAttention {
                q,
                heads: 2,
                records,
                window: None,
                selection,
                pooled: None,
                value_dim: 16,
                scale: 1.0,
                sinks: None,
                y: Value::NONE,
            })
        });
    }
}

/// Positions of a window, and the best of pooled rows.
#[test]
fn attention_over_selected_pooled_rows() {
    let (width, every, top_k) = (24, 3, 4);
    let declare = move |d: &mut Declarations| {
        records(d, width, every, KvType::F32);
        records(d, 16, 1, KvType::F32);
        records(d, 16, every, KvType::F32);
        Vec::new()
    };
    compare("selected pooled rows", declare, Layout::F32, 1e-5, |b, _| {
        let (index_q, weights, key) = (b.given(2 * width), b.given(2), b.given(width));
        let place = |state, width, every| Records { state: StateId(state), width, every, dtype: KvType::F32 };
        let (q, k, pooled) = (b.given(5 * 16), b.given(16), b.given(16));
        for (x, records) in [(key, place(0, width, every)), (k, place(1, 16, 1)), (pooled, place(2, 16, every))] {
            b.t.record(RecordWrite { x, records });
        }
        let indexer = Indexer { q: index_q, weights, keys: place(0, width, every) };
        let selection = b.t.op(IndexSelect { indexer, top_k, blocks: Value::NONE, block: 0, positions: false, y: Value::NONE });
        b.t.op(SharedAttention {
            q,
            heads: 5,
            records: place(1, 16, 1),
            window: Some(6),
            selection: Value::NONE,
            pooled: Some(Pooled { records: place(2, 16, every), selection }),
            value_dim: 16,
            scale: 1.5,
            sinks: None,
            y: Value::NONE,
        })
    });
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
        let tables = vec![NgramTable { rows: 57, offset: 0, tokens: 2 }, NgramTable { rows: 59, offset: 0, tokens: 3 }];
        let hash = NgramHash::Polynomial { base: 32, ends: vec![3] };
        let ids = b.t.op(NgramRows { history, hash, tables, y: Value::NONE });
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
        (Source::Tensors(parts), Role::Vector { .. }) => {
            Weight::Vector(parts.iter().flat_map(|p| (0..p.rows).map(move |r| 1.0 + value(p, r, 0))).collect())
        }
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
            let mut program = Program::new(circuit, 64, 1, &[]).unwrap();
            let mut workspace = Workspace::new(program.workspace_bytes()).unwrap();
            let mut pages: Vec<LayerPages> =
                d.kv.iter().map(|s| LayerPages::new(&PagePool::new(s.page_bytes(), 64), 64).unwrap()).collect();
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
    let cases = [
        (24, KvType::F32, 1e-5),
        (24, KvType::F16, 1e-5),
        (64, KvType::F16, 1e-5),
        (24, KvType::Bf16, 1e-5),
        (24, KvType::Q8, 5e-4),
        (64, KvType::Q8, 5e-4),
    ];
    for (dim, dtype, tolerance) in cases {
        let spec = KvSpec { heads: 3, key_dim: dim, value_dim: dim, dtype };
        let declare = move |d: &mut Declarations| {
            d.source_kv(spec);
            Vec::new()
        };
        compare(&format!("source_attention {dim} {dtype:?}"), declare, Layout::F32, tolerance, |b, _| {
            let (q, k, v) = (b.given(3 * dim), b.given(3 * dim), b.given(3 * dim));
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
    let narrow = [(4, 2, 20, KvType::F32), (18, 1, 20, KvType::F32), (2, 2, 20, KvType::F16)];
    for (heads, kv_heads, dim, dtype) in narrow.into_iter().chain([(3, 1, 150, KvType::F32), (2, 1, 300, KvType::F16)]) {
        let (every, top_k) = (4, 3);
        let sizes = [(2 * kv_heads * dim, 1, dtype), (16, 1, KvType::F32), (16, every, KvType::F32)];
        let place = |i: usize| Records { state: StateId(i as u32), width: sizes[i].0, every: sizes[i].1, dtype: sizes[i].2 };
        let declare = move |d: &mut Declarations| {
            for (width, every, dtype) in sizes {
                records(d, width, every, dtype);
            }
            Vec::new()
        };
        compare(&format!("selected_attention {heads}/{kv_heads} {dim} {dtype:?}"), declare, Layout::F32, 1e-5, |b, _| {
            let (q, kv, index_q, key) = (b.given(heads * dim), b.given(2 * kv_heads * dim), b.given(5 * 16), b.given(16));
            b.t.record(RecordWrite { x: kv, records: place(0) });
            b.t.record(RecordWrite { x: key, records: place(1) });
            let block = b.t.op(MeanGroups { source: place(1), every, y: Value::NONE });
            b.t.record(RecordWrite { x: block, records: place(2) });
            let indexer = Indexer { q: index_q, weights: Value::NONE, keys: place(2) };
            let selection = b.t.op(IndexSelect { indexer, top_k, blocks: Value::NONE, block: 0, positions: true, y: Value::NONE });
            b.t.op(SelectedAttention {
                q,
                heads,
                kv_heads,
                key_dim: dim,
                value_dim: dim,
                records: place(0),
                selection,
                scale: 1.5,
                y: Value::NONE,
            })
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
    let tables = vec![NgramTable { rows: 7, offset: 0, tokens: 2 }, NgramTable { rows: 25, offset: 7, tokens: 3 }];
    let declare = |d: &mut Declarations| {
        records(d, 1, 1, KvType::F32);
        vec![d.matrix("table", 32, 16).0]
    };
    compare("ngram_rows", declare, Layout::F32, 1e-6, |b, w| {
        let history = Records { state: StateId(0), width: 1, every: 1, dtype: KvType::F32 };
        let x = b.t.op(TokenIds { y: Value::NONE });
        b.t.record(RecordWrite { x, records: history });
        let multipliers = vec![(1 << 57) + 12345, (1 << 56) + 6789, 77];
        let hash = NgramHash::Xor { multipliers, end: 3 };
        let ids = b.t.op(NgramRows { history, hash, tables: tables.clone(), y: Value::NONE });
        b.t.op(Lookup { ids, column: 0, count: 2, table: WeightId(w[0]), y: Value::NONE })
    });
}
