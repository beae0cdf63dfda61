//! Norms, products, rotations, attention: what every decoder is made of.

use crate::bench::*;
use metrale::backend::cpu::pack::Layout;
use metrale::ops::{self, *};
use metrale::weights::Declarations;

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
    let plain = [
        Activation::Silu,
        Activation::GeluTanh,
        Activation::Gelu,
        Activation::Relu,
        Activation::Relu2,
        Activation::Sigmoid,
        Activation::Softplus,
    ];
    for act in plain.into_iter().chain(bounded) {
        compare(&format!("act_mul {act:?}"), none, Layout::F32, 1e-6, |b, _| {
            let h = b.given_size(2 * 1100, 6.0);
            let (gate, up) = (b.t.slice(h, 0, 1100), b.t.slice(h, 1100, 1100));
            b.t.op(ActMul { act, gate, up, y: Value::NONE })
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
                b.t.op(Norm {
                    kind,
                    x,
                    weight: Some(WeightId(w[0])),
                    bias: bias.then_some(WeightId(w[1])),
                    group,
                    eps: 1e-5,
                    y: Value::NONE,
                })
            });
        }
    }
    compare("add_norm", vector(576), Layout::F32, 2e-6, |b, w| {
        let (x, y) = (b.given(576), b.given(576));
        b.t.record(AddNorm { a: x, b: y, weight: WeightId(w[0]), eps: 1e-5, sum: Value::NONE, y: Value::NONE })[1]
    });
}

/// Of both signs, none zero, none a pair's negative.
const TABLE: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

#[test]
fn products() {
    let layouts = [
        (Layout::F32, 2e-6),
        (Layout::Bf16, 2e-6),
        (Layout::F16, 2e-6),
        (Layout::F8, 2e-6),
        (Layout::I8 { block: 32, min: false }, 2e-6),
        (Layout::I8 { block: 16, min: false }, 2e-6),
        (Layout::I8 { block: 16, min: true }, 2e-6),
        (Layout::I8 { block: 32, min: true }, 2e-6),
        (Layout::I4 { block: 32, min: false }, 2e-6),
        (Layout::I4 { block: 32, min: true }, 2e-6),
        (Layout::I4 { block: 16, min: false }, 2e-6),
        (Layout::I4 { block: 16, min: true }, 2e-6),
        (Layout::I4Table { block: 32, table: TABLE }, 2e-6),
        (Layout::I4Table { block: 16, table: TABLE }, 2e-6),
    ];
    for (layout, tolerance) in layouts {
        for (rows, cols) in [(48, 64), (100, 160), (17, 32), (40, 576)] {
            let declare = move |d: &mut Declarations| vec![d.matrix("w", rows, cols).0, d.vector("b", rows, 0.0).0];
            compare(&format!("linear {layout:?} {rows}x{cols}"), declare, layout, tolerance, |b, w| {
                let x = b.given(cols);
                b.t.op(ops::Linear { x, q: Value::NONE, weight: WeightId(w[0]), bias: Some(WeightId(w[1])), y: Value::NONE })
            });
        }
    }
}

/// What devices have for many rows: 16-bit floats in large blocks, activations in one piece, integers as f16.
#[test]
fn products_of_many_rows() {
    for (name, layout, tolerance) in [
        ("linear", Layout::Bf16, 2e-6),
        ("linear", Layout::F16, 2e-6),
        ("linear", Layout::F8, 2e-6),
        ("rounded linear", Layout::Bf16, 1e-2),
        ("rounded linear", Layout::F16, 1e-2),
        ("rounded linear", Layout::F8, 1e-2),
        ("rounded linear", Layout::I8 { block: 32, min: false }, 1e-3),
        ("rounded linear", Layout::I8 { block: 16, min: false }, 1e-3),
        ("rounded linear", Layout::I8 { block: 16, min: true }, 1e-3),
        ("rounded linear", Layout::I8 { block: 32, min: true }, 1e-3),
        ("rounded linear", Layout::I4 { block: 32, min: false }, 1e-3),
        ("rounded linear", Layout::I4 { block: 32, min: true }, 1e-3),
        ("rounded linear", Layout::I4 { block: 16, min: false }, 1e-3),
        ("rounded linear", Layout::I4 { block: 16, min: true }, 1e-3),
        ("rounded linear", Layout::I4Table { block: 32, table: TABLE }, 1e-3),
        ("rounded linear", Layout::I4Table { block: 16, table: TABLE }, 1e-3),
    ] {
        for cols in [64, 320, 416] {
            let declare = move |d: &mut Declarations| vec![d.matrix("w", 530, cols).0, d.vector("b", 530, 0.0).0];
            compare(&format!("{name} {layout:?} 530x{cols}"), declare, layout, tolerance, |b, w| {
                let x = b.given(cols);
                b.t.op(ops::Linear { x, q: Value::NONE, weight: WeightId(w[0]), bias: Some(WeightId(w[1])), y: Value::NONE })
            });
        }
    }
}

#[test]
fn embeddings_and_rotations() {
    let declare = |d: &mut Declarations| vec![d.matrix("e", 32, 64).0];
    for layout in [Layout::Bf16, Layout::F8] {
        compare(&format!("embed {layout:?}"), declare, layout, 1e-6, |b, w| {
            b.t.op(Embed { table: WeightId(w[0]), factor: 3.0, y: Value::NONE })
        });
    }
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
fn fused_for_devices() {
    let spec = KvSpec { heads: 2, key_dim: 16, value_dim: 16, dtype: KvType::F16 };
    let declare = move |d: &mut Declarations| {
        d.kv(spec);
        vec![d.vector("q", 16, 0.0).0, d.vector("k", 16, 0.0).0, d.constant("f", vec![1.0, 0.3, 0.1, 0.01]).0]
    };
    for (normed, style) in [(true, RopeStyle::Halves), (false, RopeStyle::Pairs)] {
        compare(&format!("fused heads {style:?}"), declare, Layout::F32, 1e-5, |b, w| {
            let (q, k, v) = (b.given(64), b.given(32), b.given(32));
            let table = b.t.op(RopeTable { frequencies: WeightId(w[2]), factor: 1.1, y: Value::NONE });
            let mut turned = |x, weight| {
                let weight = Some(WeightId(weight));
                let norm = Norm { kind: NormKind::Rms, x, weight, bias: None, group: 16, eps: 1e-5, y: Value::NONE };
                let x = if normed { b.t.op(norm) } else { x };
                b.t.op(Rope { x, table, head_dim: 16, style, y: Value::NONE })
            };
            let (q, k) = (turned(q, w[0]), turned(k, w[1]));
            let state = StateId(0);
            b.t.record(CacheWrite { k, v, state, spec });
            let (window, softcap, sinks) = (None, None, None);
            b.t.op(ops::Attention { q, state, spec, heads: 4, scale: 0.25, window, softcap, sinks, parts: Value::NONE, y: Value::NONE })
        });
    }
    // Seen through a product. A code differs where the last bit of what is rounded does.
    let layout = Layout::I8 { block: 32, min: false };
    let declare = |d: &mut Declarations| vec![d.matrix("w", 40, 1088).0, d.vector("n", 1088, 0.0).0];
    compare("fused add_norm_quantize", declare, layout, 2e-3, |b, w| {
        let (x, y) = (b.given(1088), b.given(1088));
        let x = b.t.record(AddNorm { a: x, b: y, weight: WeightId(w[1]), eps: 1e-5, sum: Value::NONE, y: Value::NONE })[1];
        b.t.op(ops::Linear { x, q: Value::NONE, weight: WeightId(w[0]), bias: None, y: Value::NONE })
    });
    compare("fused act_quantize", declare, layout, 2e-3, |b, w| {
        let (gate, up) = (b.given_size(1088, 6.0), b.given(1088));
        let x = b.t.op(ActMul { act: Activation::Silu, gate, up, y: Value::NONE });
        b.t.op(ops::Linear { x, q: Value::NONE, weight: WeightId(w[0]), bias: None, y: Value::NONE })
    });
}

/// Values that products in tensor cores alone read: their makers lay them as those want them.
#[test]
fn prepared_for_products() {
    let product = |x, w: &[u32]| ops::Linear { x, q: Value::NONE, weight: WeightId(w[0]), bias: None, y: Value::NONE };
    let declare = |d: &mut Declarations| vec![d.matrix("w", 148, 320).0, d.vector("n", 320, 0.0).0];
    compare("rounded add_norm prepared", declare, Layout::Bf16, 1e-2, |b, w| {
        let (x, y) = (b.given(320), b.given(320));
        let x = b.t.record(AddNorm { a: x, b: y, weight: WeightId(w[1]), eps: 1e-5, sum: Value::NONE, y: Value::NONE })[1];
        b.t.op(product(x, w))
    });
    compare("rounded norm prepared", declare, Layout::Bf16, 1e-2, |b, w| {
        let x = b.given(320);
        let norm = Norm { kind: NormKind::Rms, x, weight: Some(WeightId(w[1])), bias: None, group: 0, eps: 1e-5, y: Value::NONE };
        let x = b.t.op(norm);
        b.t.op(product(x, w))
    });
    compare("rounded act_mul prepared", declare, Layout::Bf16, 1e-2, |b, w| {
        let (gate, up) = (b.given_size(320, 6.0), b.given(320));
        let x = b.t.op(ActMul { act: Activation::Silu, gate, up, y: Value::NONE });
        b.t.op(product(x, w))
    });
    // The gate's half first, or second: a kernel for many rows keeps both. With rows of words, and of f32 where another width is read.
    for (layout, half, up_first, bias, act) in [
        (Layout::Bf16, 192, false, false, Activation::Silu),
        (Layout::Bf16, 192, true, true, Activation::GeluTanh),
        (Layout::Bf16, 100, false, true, Activation::Silu),
        (Layout::Bf16, 192, false, false, Activation::Relu2),
        (Layout::F8, 256, false, true, Activation::Silu),
        (Layout::F8, 256, true, false, Activation::GeluTanh),
        // No whole runs behind the activation: rows of f32.
        (Layout::F8, 192, false, false, Activation::Silu),
    ] {
        let declare = move |d: &mut Declarations| {
            let gated = d.stacked("g", &[("gate", half), ("up", half)], 128).0;
            vec![d.matrix("w", 148, half).0, gated, d.vector("b", 2 * half, 0.0).0, d.vector("n", 128, 0.0).0]
        };
        compare(&format!("rounded gated_linear {layout:?} {half} prepared"), declare, layout, 1e-2, |b, w| {
            let (x, y) = (b.given(128), b.given(128));
            let x = b.t.record(AddNorm { a: x, b: y, weight: WeightId(w[3]), eps: 1e-5, sum: Value::NONE, y: Value::NONE })[1];
            let bias = bias.then_some(WeightId(w[2]));
            let h = b.t.op(ops::Linear { x, q: Value::NONE, weight: WeightId(w[1]), bias, y: Value::NONE });
            let (first, second) = (b.t.slice(h, 0, half), b.t.slice(h, half, half));
            let (gate, up) = if up_first { (second, first) } else { (first, second) };
            let x = b.t.op(ActMul { act, gate, up, y: Value::NONE });
            b.t.op(product(x, w))
        });
    }
    // Read by what is no product as well, so rows of f32 stay.
    compare("rounded act_mul of two readers", declare, Layout::Bf16, 1e-2, |b, w| {
        let (gate, up) = (b.given_size(320, 6.0), b.given(320));
        let x = b.t.op(ActMul { act: Activation::Silu, gate, up, y: Value::NONE });
        let (x, y) = (b.t.op(product(x, w)), b.t.slice(x, 0, 148));
        b.t.add(x, y)
    });
    for (heads, kv_heads, dim, dtype) in
        [(4, 2, 128, KvType::F16), (4, 2, 64, KvType::F16), (2, 1, 96, KvType::F16), (2, 1, 32, KvType::F32)]
    {
        let spec = KvSpec { heads: kv_heads, key_dim: dim, value_dim: dim, dtype };
        let declare = move |d: &mut Declarations| {
            d.kv(spec);
            vec![d.matrix("w", 148, heads * dim).0]
        };
        compare(&format!("rounded attention {dim} {dtype:?} prepared"), declare, Layout::Bf16, 1e-2, |b, w| {
            let (q, k, v) = (b.given(heads * dim), b.given(kv_heads * dim), b.given(kv_heads * dim));
            b.t.record(CacheWrite { k, v, state: StateId(0), spec });
            let (window, softcap, sinks) = (None, None, None);
            let x = b.t.op(ops::Attention {
                q,
                state: StateId(0),
                spec,
                heads,
                scale: 0.25,
                window,
                softcap,
                sinks,
                parts: Value::NONE,
                y: Value::NONE,
            });
            b.t.op(product(x, w))
        });
    }
}

#[test]
fn attention() {
    // Weights of 14 bits meet values of 8.
    for (dtype, tolerance) in [(KvType::F32, 1e-5), (KvType::F16, 1e-5), (KvType::Bf16, 1e-5), (KvType::Q8, 5e-4)] {
        for (heads, kv_heads, dim, window, softcap, sinks) in [
            (4, 2, 16, None, None, false),
            (4, 1, 64, Some(24), None, true),
            (3, 3, 40, Some(1), Some(5.0), false),
            (8, 2, 80, Some(100), None, false),
            // Widths that have kernels for decoding, by query heads that share keys: up to four, more, more than eight.
            (3, 1, 128, None, Some(20.0), true),
            (6, 1, 128, Some(70), None, true),
            (10, 1, 64, None, None, false),
            (2, 2, 256, Some(40), None, false),
            // Widths that end inside a block of 8 bits.
            (7, 1, 20, None, Some(3.0), true),
        ] {
            attends("", tolerance, heads, KvSpec { heads: kv_heads, key_dim: dim, value_dim: dim, dtype }, window, softcap, sinks);
        }
    }
    for (heads, kv_heads, dim, window, softcap, sinks) in [
        (4, 1, 64, Some(24), None, true),
        (8, 2, 128, None, None, false),
        (4, 2, 128, Some(40), None, true),
        (3, 3, 128, Some(1), Some(5.0), false),
    ] {
        let spec = KvSpec { heads: kv_heads, key_dim: dim, value_dim: dim, dtype: KvType::F16 };
        attends("rounded ", 5e-3, heads, spec, window, softcap, sinks);
    }
}

/// Attention with a cache against its definition.
fn attends(kind: &str, tolerance: f32, heads: usize, spec: KvSpec, window: Option<usize>, softcap: Option<f32>, sinks: bool) {
    let declare = move |d: &mut Declarations| {
        d.kv(spec);
        vec![d.vector("sinks", heads, 0.0).0]
    };
    let (kv_heads, dim, dtype) = (spec.heads, spec.key_dim, spec.dtype);
    let name = format!("{kind}attention {heads}/{kv_heads}x{dim} {window:?} {softcap:?} {dtype:?}");
    compare(&name, declare, Layout::F32, tolerance, |b, w| {
        let (q, k, v) = (b.given(heads * dim), b.given(kv_heads * dim), b.given(kv_heads * dim));
        b.t.record(CacheWrite { k, v, state: StateId(0), spec });
        let sinks = sinks.then_some(WeightId(w[0]));
        b.t.op(ops::Attention { q, state: StateId(0), spec, heads, scale: 1.5, window, softcap, sinks, parts: Value::NONE, y: Value::NONE })
    });
}
