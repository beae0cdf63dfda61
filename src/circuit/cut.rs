//! A circuit in two parts: what the processor runs, and then what a device does.
//!
//! Where the cut lies is said by stage: what comes before the layers, each layer, what comes after them. Everything from the cut on is the
//! device's. So is whatever touches a state that lies there or reads a value made there: the processor never waits for the device within a
//! step, and what crosses goes one way, once. What follows from the batch alone (rotary tables) is computed on both sides instead.

use super::tape::{Circuit, Node};
use crate::ops::{Port, SlotId, StateId, Value};

/// A circuit's parts; one that has nothing to do is missing.
pub struct Parts<T> {
    /// The processor's.
    pub host: Option<T>,
    /// The device's, which runs after it.
    pub device: Option<T>,
    /// The processor's again, which the device stops for ([`Aside`](crate::ops::Aside)).
    pub asides: Vec<T>,
}

impl<T> Parts<T> {
    /// Each part by `f`, which is told whether it is the device's.
    pub fn map<U, E>(self, mut f: impl FnMut(T, bool) -> Result<U, E>) -> Result<Parts<U>, E> {
        let host = self.host.map(|part| f(part, false)).transpose()?;
        let device = self.device.map(|part| f(part, true)).transpose()?;
        Ok(Parts { host, device, asides: self.asides.into_iter().map(|part| f(part, false)).collect::<Result<_, E>>()? })
    }
}

impl Parts<Circuit> {
    /// The value of that name.
    pub fn named(&self, name: &str) -> Option<Value> {
        // Both know all values.
        self.host.as_ref().or(self.device.as_ref()).and_then(|part| part.named(name))
    }
}

/// Which states of a model lie on the device.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Key/value pages, by [`StateId`].
    pub kv: Vec<bool>,
    /// Recurrent slots, by [`SlotId`].
    pub slots: Vec<bool>,
}

impl Held {
    fn has(&self, node: &Node) -> bool {
        node.op.states().iter().any(|(_, state)| self.kv[state.0 as usize])
            || node.op.slots().iter().any(|slot| self.slots[slot.0 as usize])
    }

    fn add(&mut self, node: &Node) {
        node.op.states().iter().for_each(|(_, StateId(id))| self.kv[*id as usize] = true);
        node.op.slots().iter().for_each(|SlotId(id)| self.slots[*id as usize] = true);
    }
}

/// The stage of each node: 0 before the layers, then one for each of them, then one for what follows the last.
pub fn stages(circuit: &Circuit) -> Vec<usize> {
    let end = circuit.nodes.iter().rposition(|node| node.layer.is_some()).map_or(0, |last| last + 1);
    let (mut stage, mut layer) = (0, None);
    let mut stages = Vec::with_capacity(circuit.nodes.len());
    for (index, node) in circuit.nodes.iter().enumerate() {
        if index == end && end > 0 || node.layer.is_some() && node.layer != layer {
            stage += 1;
            layer = node.layer;
        }
        stages.push(stage);
    }
    stages
}

/// Which nodes run on the device when everything from stage `cut` on does and the states in `held` lie there, to which others may be added.
fn chosen(circuit: &mut Circuit, cut: usize, held: &mut Held) -> Vec<bool> {
    let free = free(circuit);
    let mut chosen: Vec<bool> = stages(circuit).into_iter().map(|stage| stage >= cut).collect();
    let mut there = vec![false; circuit.values.len()];
    circuit.nodes.iter().zip(&chosen).filter(|(_, chosen)| **chosen).for_each(|(node, _)| held.add(node));
    loop {
        let mut grown = false;
        for index in 0..circuit.nodes.len() {
            let (inputs, outputs) = ports(circuit, index);
            let pulled = held.has(&circuit.nodes[index]) || !free[index] && inputs.iter().any(|value| there[value.0 as usize]);
            if pulled && !chosen[index] {
                chosen[index] = true;
                held.add(&circuit.nodes[index]);
                // Earlier ones may touch the same states.
                grown = true;
            }
            if chosen[index] && !free[index] {
                // What is free can be had everywhere.
                outputs.iter().for_each(|value| there[value.0 as usize] = true);
            }
        }
        if !grown {
            return chosen;
        }
    }
}

/// Whether each node follows from the batch and vectors alone.
fn free(circuit: &mut Circuit) -> Vec<bool> {
    let mut values = vec![false; circuit.values.len()];
    let mut nodes = Vec::with_capacity(circuit.nodes.len());
    for index in 0..circuit.nodes.len() {
        let (inputs, outputs) = ports(circuit, index);
        let op = &circuit.nodes[index].op;
        let free = op.weight().is_none() && op.states().is_empty() && op.slots().is_empty();
        let free = free && !outputs.is_empty() && inputs.iter().all(|value| values[value.0 as usize]);
        outputs.iter().for_each(|value| values[value.0 as usize] = free);
        nodes.push(free);
    }
    nodes
}

/// Values that a node reads and those it makes; column ranges count for the whole.
pub(super) fn ports(circuit: &mut Circuit, index: usize) -> (Vec<Value>, Vec<Value>) {
    let ports: Vec<(Port, Value)> = circuit.nodes[index].op.ports().into_iter().map(|(port, value)| (port, *value)).collect();
    let of = |wanted: Port| {
        let values = ports.iter().filter(|(port, value)| *port == wanted && value.is_some());
        values.map(|(_, value)| circuit.root(*value)).collect()
    };
    (of(Port::In), of(Port::Out))
}

/// The states that lie on a device when everything from stage `cut` of a model's circuit on runs there, besides those in `held`; and whether
/// no layer before the cut has to go there too, because it shares a state with one behind it.
pub fn held(mut circuit: Circuit, cut: usize, mut held: Held) -> (Held, bool) {
    let (stages, chosen) = (stages(&circuit), chosen(&mut circuit, cut, &mut held));
    let broken = |index: usize| chosen[index] && stages[index] < cut && circuit.nodes[index].layer.is_some();
    let sound = !(0..chosen.len()).any(broken);
    (held, sound)
}

/// Cuts a circuit before stage `cut`, where the states in `held` lie on the device.
pub fn cut(mut circuit: Circuit, cut: usize, held: &Held) -> Parts<Circuit> {
    let mut held = held.clone();
    let chosen = chosen(&mut circuit, cut, &mut held);
    let free = free(&mut circuit);
    // From the end: a node whose values both sides can compute goes wherever somebody reads them.
    let mut needed = [vec![false; circuit.values.len()], vec![false; circuit.values.len()]];
    let mut sides = Vec::with_capacity(chosen.len());
    let mut crossing = vec![false; circuit.values.len()];
    for index in (0..chosen.len()).rev() {
        let (inputs, outputs) = ports(&mut circuit, index);
        let wanted = |side: usize| outputs.iter().any(|value| needed[side][value.0 as usize]);
        let runs = match free[index] {
            true if wanted(0) || wanted(1) => [wanted(0), wanted(1)],
            _ => [!chosen[index], chosen[index]],
        };
        if !free[index] && !chosen[index] {
            outputs.iter().for_each(|value| crossing[value.0 as usize] = needed[1][value.0 as usize]);
        }
        for side in (0..2).filter(|side| runs[*side]) {
            inputs.iter().for_each(|value| needed[side][value.0 as usize] = true);
        }
        sides.push(runs);
    }
    sides.reverse();
    let crossing: Vec<Value> = (0..crossing.len()).filter(|index| crossing[*index]).map(|index| Value(index as u32)).collect();
    let part = |side: usize, inputs: Vec<Value>| {
        let nodes: Vec<Node> = circuit.nodes.iter().zip(&sides).filter(|(_, runs)| runs[side]).map(|(node, _)| node.clone()).collect();
        let values = circuit.values.clone();
        Circuit { nodes, values, inputs, output: circuit.output, rounds: circuit.rounds, fixed_order: circuit.fixed_order }
    };
    let device = chosen.contains(&true).then(|| part(1, crossing));
    // What only follows from the batch is no part by itself.
    let works = device.is_none() || chosen.iter().zip(&free).any(|(chosen, free)| !chosen && !free);
    Parts { host: works.then(|| part(0, Vec::new())), device, asides: Vec::new() }
}
