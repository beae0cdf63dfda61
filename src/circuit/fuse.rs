//! Fusion: neighbours that become one operation. Every rule says whether it keeps the bits.

use super::tape::{Circuit, Node};
use crate::ops::{Add, AddNorm, Norm, NormKind, Port, Value};

/// A rewrite of a circuit.
pub struct Rule {
    /// Name, for tests and `explain`.
    pub name: &'static str,
    /// Whether the fused circuit gives the same bits; otherwise it agrees within the op's tolerance.
    pub exact: bool,
    /// Rewrites every match.
    pub apply: fn(&mut Circuit),
}

/// The rules, in the order they are tried.
pub const RULES: &[Rule] = &[Rule { name: "add + norm = add_norm", exact: true, apply: add_norm }];

/// Applies all rules.
pub fn fuse(circuit: &mut Circuit) {
    for rule in RULES {
        (rule.apply)(circuit);
    }
}

/// A sum whose next reader is an RMS norm over the whole row.
fn add_norm(circuit: &mut Circuit) {
    let mut index = 0;
    while index < circuit.nodes.len() {
        if let Some(add) = circuit.nodes[index].op.as_any().downcast_ref::<Add>().cloned()
            && let Some(reader) = first_reader(circuit, index + 1, add.y)
            && let Some(norm) = circuit.nodes[reader].op.as_any().downcast_ref::<Norm>()
            && let (NormKind::Rms, 0, None, Some(weight)) = (norm.kind, norm.group, norm.bias, norm.weight)
        {
            let op = AddNorm { a: add.a, b: add.b, weight, eps: norm.eps, sum: add.y, y: norm.y };
            circuit.nodes[index] = Node { op: Box::new(op), layer: circuit.nodes[index].layer };
            circuit.nodes.remove(reader);
        }
        index += 1;
    }
}

/// The first node at or after `from` that reads `value` (or a column range of it).
fn first_reader(circuit: &mut Circuit, from: usize, value: Value) -> Option<usize> {
    (from..circuit.nodes.len()).find(|&i| {
        let inputs: Vec<Value> = circuit.nodes[i].op.ports().into_iter().filter(|(port, _)| *port == Port::In).map(|(_, v)| *v).collect();
        inputs.into_iter().any(|input| circuit.root(input) == value)
    })
}
