//! Lowering: gives every product the form of activations its weight's format wants.
//!
//! Integer weights meet 8-bit activations. One quantised form of a value serves all products that read it.

use super::tape::{Circuit, Node};
use crate::ops::{Kind, Quantize, Shape, Value, WeightId};
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
    let mut quantized: HashMap<(Value, usize, usize), Value> = HashMap::new();
    let mut nodes = Vec::with_capacity(circuit.nodes.len() + circuit.nodes.len() / 4);
    for mut node in std::mem::take(&mut circuit.nodes) {
        if let Some(product) = node.op.product() {
            let (x, need, runs, tail) = (*product.x, needs(product.weight), product.runs, product.tail);
            if need.q8 {
                *product.q = *quantized.entry((x, runs, tail)).or_insert_with(|| {
                    let shape = circuit.values[x.0 as usize].shape;
                    let y = circuit.new_value(Shape { kind: Kind::Q8, sliced: false, width: shape.width - runs * tail, ..shape });
                    nodes.push(Node { op: Box::new(Quantize { x, runs, tail, y }), layer: node.layer });
                    y
                });
            }
            if !need.f32 && tail == 0 {
                *product.x = Value::NONE;
            }
        }
        nodes.push(node);
    }
    circuit.nodes = nodes;
}
