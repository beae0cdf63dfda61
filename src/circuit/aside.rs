//! Setting aside: operations amid a device's circuit that the processor computes, because their matrices stayed with it. An [`Aside`] holds
//! their place.

use super::cut::ports;
use super::tape::{Circuit, Node};
use crate::ops::{Aside, Value};

/// Sets aside, layer by layer, the nodes that `wanted` names, with what lies between them and with what only makes less of their answers (the
/// weighted sum over experts). The circuits that are set aside, in the order of their places.
pub fn set_aside(circuit: &mut Circuit, wanted: impl Fn(&Node) -> bool) -> Vec<Circuit> {
    let mut asides = Vec::new();
    let mut start = 0;
    while let Some(first) = (start..circuit.nodes.len()).find(|index| wanted(&circuit.nodes[*index])) {
        let layer = circuit.nodes[first].layer;
        let of_layer = circuit.nodes[first..].iter().take_while(|node| node.layer == layer).count();
        let chosen = chosen(circuit, first..first + of_layer, &wanted);
        let aside = take(circuit, first..first + of_layer, &chosen, asides.len());
        asides.push(aside);
        // What was put there instead is no longer wanted.
        start = first;
    }
    asides
}

/// Which of the nodes in `range` go.
fn chosen(circuit: &mut Circuit, range: std::ops::Range<usize>, wanted: &impl Fn(&Node) -> bool) -> Vec<bool> {
    let last = range.clone().rev().find(|index| wanted(&circuit.nodes[*index])).unwrap_or(range.start);
    let mut chosen = vec![false; range.len()];
    // What follows from them, and what leads to them.
    let (mut follows, mut leads) = (vec![false; circuit.values.len()], vec![false; circuit.values.len()]);
    let mut after = vec![false; range.len()];
    for index in range.start..=last {
        let (inputs, outputs) = ports(circuit, index);
        let is = wanted(&circuit.nodes[index]) || inputs.iter().any(|value| follows[value.0 as usize]);
        after[index - range.start] = is;
        outputs.iter().for_each(|value| follows[value.0 as usize] = is);
    }
    for index in (range.start..=last).rev() {
        let (inputs, outputs) = ports(circuit, index);
        let is = wanted(&circuit.nodes[index]) || outputs.iter().any(|value| leads[value.0 as usize]);
        chosen[index - range.start] = is && after[index - range.start];
        if is {
            inputs.iter().for_each(|value| leads[value.0 as usize] = true);
        }
    }
    let (mut made, mut late) = (vec![false; circuit.values.len()], vec![false; circuit.values.len()]);
    for index in range.clone() {
        let (inputs, outputs) = ports(circuit, index);
        let is_late = inputs.iter().any(|value| late[value.0 as usize]);
        let width =
            |values: &mut dyn Iterator<Item = &Value>| values.map(|value| circuit.values[value.0 as usize].shape.width).sum::<usize>();
        let (read, makes) = (width(&mut inputs.iter().filter(|value| made[value.0 as usize])), width(&mut outputs.iter()));
        let op = &circuit.nodes[index].op;
        let is_plain = op.weight().is_none() && op.states().is_empty() && op.slots().is_empty();
        if index > last && is_plain && makes < read && !is_late {
            chosen[index - range.start] = true;
        }
        if chosen[index - range.start] {
            outputs.iter().for_each(|value| made[value.0 as usize] = true);
        } else if is_late || read > 0 {
            outputs.iter().for_each(|value| late[value.0 as usize] = true);
        }
    }
    chosen
}

/// Takes the chosen nodes out and puts an [`Aside`] in their place: behind whatever does not wait for them.
fn take(circuit: &mut Circuit, range: std::ops::Range<usize>, chosen: &[bool], index: usize) -> Circuit {
    let mut made = vec![false; circuit.values.len()];
    let mut waits = vec![false; circuit.values.len()];
    let mut inputs: Vec<Value> = Vec::new();
    let (mut before, mut aside, mut after): (Vec<Node>, Vec<Node>, Vec<Node>) = Default::default();
    for at in range.clone() {
        let (reads, makes) = ports(circuit, at);
        let node = circuit.nodes[at].clone();
        if chosen[at - range.start] {
            makes.iter().for_each(|value| (made[value.0 as usize], waits[value.0 as usize]) = (true, true));
            let fresh = reads.into_iter().filter(|value| !made[value.0 as usize]);
            fresh.for_each(|value| {
                if !inputs.contains(&value) {
                    inputs.push(value)
                }
            });
            aside.push(node);
            continue;
        }
        let shares = |other: &Node| {
            node.op.states().iter().any(|(_, state)| other.op.states().iter().any(|(_, s)| s == state))
                || node.op.slots().iter().any(|slot| other.op.slots().contains(slot))
        };
        if reads.iter().any(|value| waits[value.0 as usize]) || after.iter().any(shares) {
            makes.iter().for_each(|value| waits[value.0 as usize] = true);
            after.push(node);
        } else {
            before.push(node);
        }
    }
    // What anybody else reads of it.
    let mut outputs: Vec<Value> = Vec::new();
    for at in (0..circuit.nodes.len()).filter(|at| !range.contains(at) || !chosen[at - range.start]) {
        for value in ports(circuit, at).0 {
            if made[value.0 as usize] && !outputs.contains(&value) {
                outputs.push(value);
            }
        }
    }
    let layer = circuit.nodes[range.start].layer;
    let place = Node { op: Box::new(Aside { index, inputs: inputs.clone(), outputs: outputs.clone() }), layer };
    circuit.nodes.splice(range, before.into_iter().chain([place]).chain(after));
    let output = outputs.first().copied().unwrap_or(Value::NONE);
    Circuit { nodes: aside, values: circuit.values.clone(), inputs, output, rounds: circuit.rounds, fixed_order: circuit.fixed_order }
}
