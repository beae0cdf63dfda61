//! Splitting: attention of a far query gets an operation before it that computes its stretches apart. The bits stay.

use super::tape::{Circuit, Node};
use crate::ops::{Attention, AttentionParts, Rows};

/// Puts [`AttentionParts`] before every attention that it can serve.
pub fn split(circuit: &mut Circuit) {
    let mut nodes = Vec::with_capacity(circuit.nodes.len() + circuit.nodes.len() / 8);
    for mut node in std::mem::take(&mut circuit.nodes) {
        let attention = node.op.as_any().downcast_ref::<Attention>().cloned();
        if let Some(attention) = attention.filter(|a| circuit.values[a.q.0 as usize].shape.rows == Rows::All)
            && let Some(shape) = AttentionParts::shape(&attention)
        {
            let attention = Attention { parts: circuit.new_value(shape), ..attention };
            nodes.push(Node { op: Box::new(AttentionParts { attention: attention.clone() }), layer: node.layer });
            node.op = Box::new(attention);
        }
        nodes.push(node);
    }
    circuit.nodes = nodes;
}
