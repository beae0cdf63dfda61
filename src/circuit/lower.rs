//! Lowering: gives every product the form of activations its weight's format wants.
//!
//! Integer weights meet 8-bit activations. One quantised form of a value serves all products that read it.

use super::tape::{Circuit, Node};
use crate::ops::{Kind, Linear, Quantize, Shape, Value, WeightId};
use std::collections::HashMap;

/// Which forms of `x` the parts of a weight want.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Needs {
    /// Some part multiplies f32.
    pub f32: bool,
    /// Some part multiplies 8-bit activations.
    pub q8: bool,
}

/// Connects products to quantised activations where `needs` says so.
pub fn lower(circuit: &mut Circuit, needs: &dyn Fn(WeightId) -> Needs) {
    let mut quantized: HashMap<Value, Value> = HashMap::new();
    let mut nodes = Vec::with_capacity(circuit.nodes.len() + circuit.nodes.len() / 4);
    for node in std::mem::take(&mut circuit.nodes) {
        let Some(linear) = node.op.as_any().downcast_ref::<Linear>() else {
            nodes.push(node);
            continue;
        };
        let mut linear = linear.clone();
        let need = needs(linear.weight);
        if need.q8 {
            linear.q = *quantized.entry(linear.x).or_insert_with(|| {
                let shape = circuit.values[linear.x.0 as usize].shape;
                let y = circuit.new_value(Shape { kind: Kind::Q8, sliced: false, ..shape });
                nodes.push(Node { op: Box::new(Quantize { x: linear.x, y }), layer: node.layer });
                y
            });
        }
        if !need.f32 {
            linear.x = Value::NONE;
        }
        nodes.push(Node { op: Box::new(linear), layer: node.layer });
    }
    circuit.nodes = nodes;
}
