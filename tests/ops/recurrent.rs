//! Operations with a state that every token changes.

use crate::bench::*;
use metrale::backend::cpu::pack::Layout;
use metrale::ops::{self, *};
use metrale::weights::Declarations;

#[test]
fn convolutions() {
    for (channels, taps, dilation, silu, bias) in
        [(40, 4, 1, true, true), (16, 3, 1, false, false), (600, 4, 3, true, false), (7, 1, 1, false, true)]
    {
        let declare = move |d: &mut Declarations| {
            d.slot("tail", ops::Conv::tail(taps, dilation) * channels);
            vec![d.vector("w", channels * taps, 0.0).0, d.vector("b", channels, 0.0).0]
        };
        compare(&format!("conv {channels}x{taps}/{dilation}"), declare, Layout::F32, 1e-6, |b, w| {
            let wide = b.given(channels + 24);
            let x = b.t.slice(wide, 8, channels);
            b.t.op(ops::Conv {
                x,
                weight: WeightId(w[0]),
                bias: bias.then_some(WeightId(w[1])),
                taps,
                dilation,
                silu,
                slot: SlotId(0),
                y: Value::NONE,
            })
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
    compare("regroup in many pieces", none, Layout::F32, 0.0, |b, _| {
        let x = b.given(60);
        let pieces = (0..20).map(|i| Piece { first: 57 - 3 * i, width: 1 + i % 3, stride: 0, count: 1 }).collect();
        b.t.op(Regroup { x, pieces, y: Value::NONE })
    });
}

#[test]
fn delta_rules() {
    for (key_heads, heads, key_dim, value_dim, gates) in
        [(2, 4, 24, 20, 1), (3, 3, 16, 32, 16), (1, 2, 33, 7, 1), (1, 1, 128, 40, 128), (1, 1, 200, 16, 1)]
    {
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
    for (heads, groups, channels, depth, limit) in
        [(6, 2, 20, 12, (0.0, f32::INFINITY)), (2, 1, 16, 33, (0.1, 2.0)), (1, 1, 40, 128, (0.0, 1.0)), (1, 1, 16, 200, (0.0, 1.0))]
    {
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
