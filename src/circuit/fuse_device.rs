//! Fusion for devices, where each operation costs a launch: after `lower` and `fuse`. The operations are the same, their sums may be added in
//! another order.

use super::tape::{Circuit, Node};
use crate::ops::{
    ActMul, ActQuantize, AddNorm, AddNormQuantize, CacheWrite, GatedLinear, HeadNorm, Heads, Kind, Linear, Norm, NormKind, Op,
    PREPARED_COLUMNS, Port, Quantize, Rope, Value, WIDEST_HEAD, WeightId,
};

/// Applies all rules. `words` tells weights all of whose parts take rows of words ([`takes_prepared`](crate::ops::takes_prepared)).
pub fn fuse_for_device(circuit: &mut Circuit, words: &dyn Fn(WeightId) -> bool) {
    quantized(circuit);
    heads(circuit);
    // What makers write as words depends on the number of rows, and so does the kernel that gates.
    if circuit.rounds && !circuit.fixed_order {
        gated(circuit, words);
        prepared(circuit, words);
    }
}

/// Products whose two halves only an activation reads.
fn gated(circuit: &mut Circuit, words: &dyn Fn(WeightId) -> bool) {
    let mut index = 0;
    while index < circuit.nodes.len() {
        let linear = circuit.nodes[index].op.as_any().downcast_ref::<Linear>().cloned();
        if let Some(linear) = linear.filter(|linear| linear.x.is_some() && words(linear.weight))
            && let Some(reader) = only_reader(circuit, linear.y)
            && let Some(act) = circuit.nodes[reader].op.as_any().downcast_ref::<ActMul>().cloned()
            && let Some(up_first) = halves(circuit, linear.y, &act)
        {
            circuit.nodes[index] = Node { op: Box::new(GatedLinear { linear, act, up_first }), layer: circuit.nodes[index].layer };
            circuit.nodes.remove(reader);
        }
        index += 1;
    }
}

/// Whether `act` reads the halves of `whole`, and then whether `up` is the first of them.
fn halves(circuit: &Circuit, whole: Value, act: &ActMul) -> Option<bool> {
    let half = circuit.values[whole.0 as usize].shape.width / 2;
    let start = |value: Value| {
        let info = circuit.values.get(value.0 as usize)?;
        let (of, start) = info.part_of?;
        (of == whole && info.shape.width == half).then_some(start)
    };
    match (start(act.gate)?, start(act.up)?) {
        (0, at) if at == half => Some(false),
        (at, 0) if at == half => Some(true),
        _ => None,
    }
}

/// Values that only products with floats of up to 16 bits read, which round them: their makers write them in the order of those products.
fn prepared(circuit: &mut Circuit, words: &dyn Fn(WeightId) -> bool) {
    for index in 0..circuit.nodes.len() {
        let Some(value) = circuit.nodes[index].op.prepares() else { continue };
        let info = &circuit.values[value.0 as usize];
        if info.part_of.is_some() || info.shape.kind != Kind::F32 || !info.shape.width.is_multiple_of(PREPARED_COLUMNS) {
            continue;
        }
        let seen = info.name.is_some() || circuit.root(circuit.output) == value;
        let readers = readers(circuit, value);
        let takes_words = |&at: &usize| {
            let op = circuit.nodes[at].op.as_any();
            let product = op.downcast_ref::<Linear>().or_else(|| Some(&op.downcast_ref::<GatedLinear>()?.linear));
            product.is_some_and(|product| product.x == value && words(product.weight))
        };
        if !seen && !readers.is_empty() && readers.iter().all(takes_words) {
            circuit.values[value.0 as usize].shape.kind = Kind::Prepared;
        }
    }
}

/// Sums with a norm, and activations, that are only read as 8-bit blocks.
fn quantized(circuit: &mut Circuit) {
    let mut index = 0;
    while index < circuit.nodes.len() {
        let node = circuit.nodes[index].op.as_any();
        let (value, add, act) = match (node.downcast_ref::<AddNorm>(), node.downcast_ref::<ActMul>()) {
            (Some(add), _) => (add.y, Some(add.clone()), None),
            (_, Some(act)) => (act.y, None, Some(act.clone())),
            _ => {
                index += 1;
                continue;
            }
        };
        if let Some(reader) = only_reader(circuit, value)
            && let Some(y) = circuit.nodes[reader].op.as_any().downcast_ref::<Quantize>().filter(|q| q.tail == 0).map(|q| q.y)
        {
            let op: Option<Box<dyn Op>> = match (add, act) {
                (Some(AddNorm { a, b, weight, eps, sum, .. }), _) => Some(Box::new(AddNormQuantize { a, b, weight, eps, sum, y })),
                (_, Some(ActMul { act, gate, up, .. })) => Some(Box::new(ActQuantize { act, gate, up, y })),
                _ => None,
            };
            if let Some(op) = op {
                circuit.nodes[index] = Node { op, layer: circuit.nodes[index].layer };
                circuit.nodes.remove(reader);
            }
        }
        index += 1;
    }
}

/// Norms and rotations of queries and keys with the write into the cache.
fn heads(circuit: &mut Circuit) {
    let mut index = 0;
    while index < circuit.nodes.len() {
        if let Some(write) = circuit.nodes[index].op.as_any().downcast_ref::<CacheWrite>().cloned()
            && let Some((op, dead)) = heads_of(circuit, index, &write)
        {
            circuit.nodes[index] = Node { op: Box::new(op), layer: circuit.nodes[index].layer };
            index -= dead.len();
            for node in dead {
                circuit.nodes.remove(node);
            }
        }
        index += 1;
    }
}

/// The operation that takes the place of the write at `index`, and the nodes that it makes superfluous, last first.
fn heads_of(circuit: &mut Circuit, index: usize, write: &CacheWrite) -> Option<(Heads, Vec<usize>)> {
    let key = maker(circuit, index, write.k)?;
    let rope = circuit.nodes[key].op.as_any().downcast_ref::<Rope>()?.clone();
    if only_reader(circuit, rope.y) != Some(index) || rope.head_dim != write.spec.key_dim || rope.head_dim > WIDEST_HEAD {
        return None;
    }
    // The queries' rotation by the same table, which nobody reads before the write.
    let (query, turn) = (0..index).rev().find_map(|at| {
        let turn = circuit.nodes[at].op.as_any().downcast_ref::<Rope>()?;
        (at != key && turn.table == rope.table && turn.head_dim == rope.head_dim && turn.style == rope.style).then(|| (at, turn.clone()))
    })?;
    if circuit.nodes[query].layer != circuit.nodes[index].layer || first_reader(circuit, turn.y)? < index {
        return None;
    }
    let mut dead = vec![key, query];
    let mut source = |circuit: &mut Circuit, x: Value, reader: usize| -> (Value, Option<HeadNorm>) {
        if let Some(at) = maker(circuit, reader, x)
            && only_reader(circuit, x) == Some(reader)
            && let Some(norm) = circuit.nodes[at].op.as_any().downcast_ref::<Norm>()
            && let (NormKind::Rms, None, Some(weight)) = (norm.kind, norm.bias, norm.weight)
            && norm.group == rope.head_dim
        {
            dead.push(at);
            return (norm.x, Some(HeadNorm { weight, eps: norm.eps }));
        }
        (x, None)
    };
    let (q, q_norm) = source(circuit, turn.x, query);
    let (k, k_norm) = source(circuit, rope.x, key);
    dead.sort_unstable_by(|a, b| b.cmp(a));
    let CacheWrite { v, state, spec, .. } = *write;
    let (table, head_dim, style) = (rope.table, rope.head_dim, rope.style);
    Some((Heads { q, k, v, table, q_norm, k_norm, head_dim, style, state, spec, y: turn.y }, dead))
}

/// The node before `index` that writes `value`.
fn maker(circuit: &mut Circuit, index: usize, value: Value) -> Option<usize> {
    (0..index).rev().find(|&at| circuit.nodes[at].op.ports().into_iter().any(|(port, v)| port == Port::Out && *v == value))
}

/// Nodes that read `value` or a column range of it.
fn readers(circuit: &mut Circuit, value: Value) -> Vec<usize> {
    (0..circuit.nodes.len())
        .filter(|&at| {
            let inputs: Vec<Value> =
                circuit.nodes[at].op.ports().into_iter().filter(|(port, _)| *port == Port::In).map(|(_, v)| *v).collect();
            inputs.into_iter().any(|input| input == value || circuit.root(input) == value)
        })
        .collect()
}

fn first_reader(circuit: &mut Circuit, value: Value) -> Option<usize> {
    readers(circuit, value).first().copied()
}

/// The one node that reads a value which nobody else, no host and no result, can see.
fn only_reader(circuit: &mut Circuit, value: Value) -> Option<usize> {
    if circuit.values[value.0 as usize].name.is_some() || circuit.root(circuit.output) == circuit.root(value) {
        return None;
    }
    match readers(circuit, value)[..] {
        [one] => Some(one),
        _ => None,
    }
}
