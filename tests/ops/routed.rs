//! Routers, routed products and gates.

use crate::bench::*;
use metrale::backend::cpu::pack::Layout;
use metrale::ops::*;
use metrale::weights::{Declarations, Part};

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

/// Experts that a table names for each token, some of them beyond those there are.
#[test]
fn routes_by_token() {
    for (normalize, top_k) in [(true, 3), (false, 1)] {
        let declare = |d: &mut Declarations| vec![d.matrix("ids", 32, top_k).0];
        compare(&format!("hash_route {top_k}"), declare, Layout::F32, 2e-6, |b, w| {
            let logits = b.given_size(20, 4.0);
            b.t.op(HashRoute { logits, table: WeightId(w[0]), normalize, scale: 1.5, y: Value::NONE })
        });
    }
}

/// Every format, in shapes that are small: the last columns are half a stretch.
#[test]
fn experts_of_every_format() {
    let table = std::array::from_fn(|i| (i as i8 - 8) * 9);
    let integers = [16, 32].into_iter().flat_map(|block| {
        let min = [false, true].into_iter();
        let codes = min.flat_map(move |min| [Layout::I8 { block, min }, Layout::I4 { block, min }]);
        codes.chain([Layout::I4Table { block, table }])
    });
    for layout in [Layout::F16, Layout::F8].into_iter().chain(integers) {
        let (experts, slots, cols) = (3, 2, 96);
        let declare = move |d: &mut Declarations| {
            let matrices = (0..experts).map(|e| vec![Part::whole(format!("{e}"), 20)]).collect::<Vec<_>>();
            vec![d.experts("w", matrices, cols).0]
        };
        compare(&format!("experts of {layout:?}"), declare, layout, if layout.is_integer() { 1e-2 } else { 5e-6 }, |b, w| {
            let (x, logits) = (b.given(cols), b.given_size(experts, 3.0));
            let route = b.t.op(Route { logits, top_k: slots, ..routers(experts)[0].clone() });
            b.t.op(ExpertLinear { x, q: Value::NONE, route, weight: WeightId(w[0]), bias: None, slots, y: Value::NONE })
        });
    }
}

/// Routed products with inputs shared by the slots and of their own, with and without bias, with ids that no expert has; put together
/// with a gated shared expert.
#[test]
fn routed_experts() {
    let layouts = [Layout::F32, Layout::Bf16, Layout::F8, Layout::I8 { block: 32, min: false }, Layout::I4 { block: 32, min: true }];
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
            b.t.op(ExpertLinear {
                x,
                q: Value::NONE,
                route: Value::NONE,
                weight: WeightId(w[0]),
                bias: None,
                slots: experts,
                y: Value::NONE,
            })
        });
    }
}
