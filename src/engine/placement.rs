//! What of a model its device runs, and what stays on the processor: everything; or everything but the experts of the first layers; or, where
//! that is still too much, the last layers alone, with the output matrix. Keys, values and recurrent state lie where their layer runs.
//!
//! Experts first, since they are most of such a model, of which a token needs few, while attention, keys and values are needed whole.
//!
//! The last layers, since the output matrix is the largest a step reads, and embeddings, of which a step reads a row for each token, may then
//! stay in their file; what crosses is the residual, once, and logits end up where they are sorted.

use super::plan::packed_bytes;
use super::preflight;
use super::prepare::{Prepared, Programs};
use super::runner::Shape;
use crate::circuit::{self, Circuit, DeviceWorkspace, Held, Node, held, stages};
use crate::error::{Error, Kind, Result};
use crate::ops::{ExpertLinear, Uses};
use crate::weights::{Declarations, Pick, Role, Source, WeightSpec};

/// Where a weight is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Location {
    /// Whether the device has it.
    pub device: bool,
    /// What the processor has of it.
    pub host: Keep,
}

/// What the processor has of a weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Keep {
    Nothing,
    /// Rows to look up, as the checkpoint stores them.
    Rows,
    /// All of it, in the form of its role.
    Whole,
}

/// What runs where.
#[derive(Clone, Debug)]
pub(super) struct Placement {
    /// The first stage that the device runs ([`stages`]): 0 for everything, more than there are for nothing.
    pub cut: usize,
    /// Layers that the device runs.
    pub layers: usize,
    /// Of those the first so many with experts whose experts stay here.
    pub host_experts: usize,
    /// Which of the placements that are tried one after the other this is ([`Recorded::rung`]).
    rung: usize,
    /// By weight.
    pub weights: Vec<Location>,
    /// States on the device.
    pub held: Held,
}

const NOWHERE: usize = usize::MAX;

impl Placement {
    /// Everything on one side.
    pub fn whole(declarations: &Declarations, on_device: bool, layers: usize) -> Placement {
        let place = |spec: &WeightSpec| match (on_device, spec.role) {
            (true, Role::Vector { .. }) => Location { device: true, host: Keep::Whole },
            (true, _) => Location { device: true, host: Keep::Nothing },
            (false, _) => Location { device: false, host: Keep::Whole },
        };
        let held = Held { kv: vec![on_device; declarations.kv.len()], slots: vec![on_device; declarations.slots.len()] };
        let (cut, layers) = if on_device { (0, layers) } else { (NOWHERE, 0) };
        Placement { cut, layers, host_experts: 0, rung: 0, weights: declarations.weights.iter().map(place).collect(), held }
    }

    /// Whether the processor begins what the device ends.
    pub fn is_cut(&self) -> bool {
        (1..NOWHERE).contains(&self.cut)
    }

    /// Whether both sides run something.
    pub fn is_split(&self) -> bool {
        self.is_cut() || self.host_experts > 0
    }

    /// What of the model is the device's, for messages.
    pub fn share(&self) -> String {
        let experts = match self.host_experts {
            0 => String::new(),
            count => format!(" without the experts of {count} of its layers"),
        };
        match (self.is_cut(), self.layers) {
            (false, _) => format!("the model{experts}"),
            (true, 0) => "what follows the model's last layer".into(),
            (true, count) => format!("the model's last {count} layers{experts}, with what follows them,"),
        }
    }

    /// Whether an operation of a layer that the device runs stays on the processor.
    pub fn stays(&self, node: &Node) -> bool {
        experts(node).is_some_and(|index| !self.weights[index].device)
    }
}

/// The weight that holds the experts an operation multiplies with.
fn experts(node: &Node) -> Option<usize> {
    match node.op.weight() {
        Some(Uses::Whole(id)) if node.op.as_any().is::<ExpertLinear>() => Some(id.0 as usize),
        _ => None,
    }
}

/// How often the layer changes among operations that multiply with experts.
fn layers_with_experts<'a>(nodes: impl IntoIterator<Item = &'a Node>) -> usize {
    let mut layers: Vec<Option<usize>> = nodes.into_iter().filter(|node| experts(node).is_some()).map(|node| node.layer).collect();
    layers.dedup();
    layers.len()
}

/// A model's circuits as they are recorded, to be cut in many ways.
struct Recorded {
    decoder: Circuit,
    encoder: Option<Circuit>,
    layers: usize,
    /// Layers with experts.
    with_experts: usize,
    /// Of those the first so many whose experts shall stay here, where the options say a number.
    asked: Option<usize>,
}

impl Recorded {
    fn of(prepared: &Prepared) -> Result<Recorded> {
        let (decoder, encoder) = prepared.recorded()?;
        let of_layers = decoder.nodes.iter().zip(stages(&decoder)).filter(|(node, _)| node.layer.is_some());
        let layers = of_layers.map(|(_, stage)| stage).max().unwrap_or(0);
        let with_experts = layers_with_experts(decoder.nodes.iter().chain(encoder.iter().flat_map(|encoder| &encoder.nodes)));
        let asked = Some(prepared.options.host_experts).filter(|count| *count > 0);
        Ok(Recorded { decoder, encoder, layers, with_experts, asked })
    }

    /// The stage that begins the last `count` layers.
    fn cut(&self, count: usize) -> usize {
        if count >= self.layers { 0 } else { self.layers + 1 - count }
    }

    /// The last of the placements that are tried one after the other, from most on the device to least.
    fn last_rung(&self) -> usize {
        self.expert_rungs() + self.layers + 1
    }

    /// How many of them, behind the first, move experts and no layer.
    fn expert_rungs(&self) -> usize {
        if self.asked.is_some() { 0 } else { self.with_experts }
    }

    /// One of them, and whether the model can be cut there.
    fn rung(&self, declarations: &Declarations, rung: usize) -> (Placement, bool) {
        let experts = self.expert_rungs();
        let (placement, sound) = self.placement(declarations, rung.saturating_sub(experts), self.asked.unwrap_or(rung.min(experts)));
        (Placement { rung, ..placement }, sound)
    }

    /// With everything from stage `cut` on on the device but the experts of the first `host_experts` layers, and whether the model can be
    /// cut there.
    fn placement(&self, declarations: &Declarations, cut: usize, host_experts: usize) -> (Placement, bool) {
        let nothing = Held { kv: vec![false; declarations.kv.len()], slots: vec![false; declarations.slots.len()] };
        let (held, sound) = held(self.decoder.clone(), cut, nothing);
        let mut parts = vec![circuit::cut(self.decoder.clone(), cut, &held)];
        // Of a model that is cut, what reads a source is all the processor's, but for what later layers read of it.
        let encoders = if cut == 0 { 0 } else { NOWHERE };
        parts.extend(self.encoder.clone().map(|encoder| circuit::cut(encoder, encoders, &held)));
        let role = |index: usize| matches!(declarations.weights[index].role, Role::Vector { .. });
        let start = |index| Location { device: role(index), host: if role(index) { Keep::Whole } else { Keep::Nothing } };
        let mut weights: Vec<Location> = (0..declarations.weights.len()).map(start).collect();
        let (mut layer, mut seen) = (None, 0);
        for part in &parts {
            for node in part.device.iter().flat_map(|circuit| &circuit.nodes) {
                if let Some(index) = experts(node) {
                    seen += usize::from(layer.replace(node.layer) != Some(node.layer));
                    if seen <= host_experts {
                        weights[index].host = Keep::Whole;
                        continue;
                    }
                }
                if let Some(Uses::Rows(id) | Uses::Whole(id)) = node.op.weight() {
                    weights[id.0 as usize].device = true;
                }
            }
            for node in part.host.iter().flat_map(|circuit| &circuit.nodes) {
                match node.op.weight() {
                    Some(Uses::Rows(id)) if weights[id.0 as usize].host != Keep::Whole => {
                        let spec = &declarations.weights[id.0 as usize];
                        weights[id.0 as usize].host = if has_rows(spec) { Keep::Rows } else { Keep::Whole };
                    }
                    Some(Uses::Whole(id)) => weights[id.0 as usize].host = Keep::Whole,
                    _ => {}
                }
            }
        }
        let layers = (self.layers + 1 - cut).min(self.layers);
        (Placement { cut, layers, host_experts: seen.min(host_experts), rung: 0, weights, held }, sound)
    }
}

/// Whether the rows of a weight are rows of what is stored.
fn has_rows(spec: &WeightSpec) -> bool {
    let stored = |pick: &Pick| !matches!(pick, Pick::Transposed { .. } | Pick::Flat(_));
    matches!(spec.source, Source::Tensors(_)) && spec.parts().all(|part| stored(&part.pick))
}

impl Prepared {
    /// Takes up a placement.
    fn place(&mut self, placement: Placement) {
        for ((spec, layouts), place) in self.declarations.weights.iter().zip(&mut self.layouts).zip(&placement.weights) {
            // Tables are packed for a device alone.
            if spec.role == Role::Rows && !place.device {
                layouts.clear();
            }
        }
        self.placement = placement;
    }

    /// Puts as many layers on the device, without as many of their experts, as the options ask for, where they say a number.
    pub fn place_asked(&mut self) -> Result<()> {
        let (count, experts) = (self.options.device_layers, self.options.host_experts);
        if self.device.is_none() || count == 0 && experts == 0 {
            return Ok(());
        }
        let recorded = Recorded::of(self)?;
        let cut = if count == 0 { 0 } else { recorded.cut(count) };
        if cut > 0 || experts > 0 {
            let (placement, sound) = recorded.placement(&self.declarations, cut, experts);
            if !sound {
                let first = recorded.layers - count;
                let text = format!(
                    "device_layers: {count} of {} layers are asked for, and layers before layer {first} keep what later ones read; the model \
                     cannot be cut there",
                    recorded.layers
                );
                return Err(Error::new(Kind::Unsupported, text).named("device_layers"));
            }
            self.place(placement);
        }
        Ok(())
    }

    /// Whether the placement that `programs` are for is final: it fits its device, was asked for, or is the least there is. Else another
    /// one is taken up, with fewer layers on the device.
    pub fn settle(&mut self, programs: &Programs) -> Result<bool> {
        let Some(device) = self.device.clone() else { return Ok(true) };
        if self.options.device_layers != 0 {
            return Ok(true);
        }
        let limit = preflight::device_limit(self.options.device_bytes, &device)?;
        let plan = self.plan_of(programs, 1)?;
        if plan.device.total() <= limit {
            return Ok(true);
        }
        let recorded = Recorded::of(self)?;
        let (first, last) = (self.placement.rung + 1, recorded.last_rung());
        if first > last {
            return Ok(true);
        }
        let (mut low, mut high) = (first, last);
        while low < high {
            let rung = low.midpoint(high);
            if self.bytes_at(&recorded, rung)? <= limit { high = rung } else { low = rung + 1 }
        }
        // Where layers share a state, there is no cut between them; behind the last there always is.
        let (placement, _) = (low..=last)
            .map(|rung| recorded.rung(&self.declarations, rung))
            .find(|(_, sound)| *sound)
            .unwrap_or_else(|| recorded.rung(&self.declarations, last));
        self.place(placement);
        Ok(false)
    }

    /// About the bytes that a placement puts on the device: workspaces are those of the widest programs alone.
    fn bytes_at(&mut self, recorded: &Recorded, rung: usize) -> Result<u64> {
        let taken = std::mem::replace(&mut self.placement, recorded.rung(&self.declarations, rung).0);
        let bytes = self.plan_kept(&self.placement, 1).and_then(|plan| Ok(plan.device.total().saturating_add(self.widest_scratch()?)));
        self.placement = taken;
        bytes
    }

    fn widest_scratch(&self) -> Result<u64> {
        let Some(device) = &self.device else { return Ok(0) };
        let mut sum = 0u64;
        for shapes in [&self.shapes().all, &self.shapes().steps] {
            let [.., shape]: [Shape; 3] = *shapes;
            let program = self.program(shape, false, &[])?.0;
            let list: Vec<_> = program.both().1.into_iter().collect();
            let bytes = DeviceWorkspace::bytes(&list, self.declarations.kv.len(), self.context, device.info().processors);
            sum = sum.saturating_add(bytes as u64);
        }
        Ok(sum)
    }

    /// Bytes that the device's part of a weight takes there; 0 for what it has not.
    pub(super) fn device_bytes_of(&self, index: usize, placement: &Placement) -> u64 {
        let spec = &self.declarations.weights[index];
        match (placement.weights[index].device, spec.role) {
            (false, _) => 0,
            (true, Role::Vector { .. }) => (spec.cols as u64).saturating_mul(4),
            (true, _) => packed_bytes(spec, &self.layouts[index]),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::circuit::Parts;
    use crate::ops::{Aside, Port, Value};
    use crate::options::LoadOptions;
    use std::collections::HashSet;
    use std::path::{Path, PathBuf};

    fn folders() -> Vec<PathBuf> {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let entries = ["tests/fixtures/models", "../shared/reference/models"].map(|place| std::fs::read_dir(root.join(place)));
        let found = entries.into_iter().flatten().flatten().flatten().map(|entry| entry.path());
        found.filter(|path| path.join("golden.safetensors").exists() && !path.join("adapter_config.json").exists()).collect()
    }

    #[test]
    fn operations_tell_the_matrices_that_their_fields_name() {
        for folder in folders() {
            let prepared = Prepared::new(&folder, &LoadOptions::default()).unwrap();
            let (decoder, encoder) = prepared.recorded().unwrap();
            for node in decoder.nodes.iter().chain(encoder.iter().flat_map(|circuit| &circuit.nodes)) {
                let fields = format!("{:?}", node.op);
                let named = fields.split("WeightId(").skip(1).map(|rest| rest.split(')').next().unwrap().parse::<usize>().unwrap());
                let matrices = named.filter(|id| !matches!(prepared.declarations.weights[*id].role, Role::Vector { .. }));
                let told = node.op.weight().map(|(Uses::Rows(id) | Uses::Whole(id))| id.0 as usize);
                for id in matrices {
                    assert_eq!(told, Some(id), "{}: {fields}", folder.display());
                }
            }
        }
    }

    /// Values a part reads, and those it makes.
    fn values(part: &mut Circuit) -> [HashSet<Value>; 2] {
        let mut sets = [HashSet::new(), HashSet::new()];
        for index in 0..part.nodes.len() {
            let ports: Vec<(Port, Value)> = part.nodes[index].op.ports().into_iter().map(|(port, value)| (port, *value)).collect();
            for (port, value) in ports.into_iter().filter(|(_, value)| value.is_some()) {
                sets[usize::from(port == Port::Out)].insert(part.root(value));
            }
        }
        sets
    }

    /// What a part touches of the states.
    fn states(part: &Circuit) -> HashSet<String> {
        let of = |node: &crate::circuit::Node| {
            let pages = node.op.states().into_iter().map(|(_, state)| format!("{state:?}"));
            pages.chain(node.op.slots().into_iter().map(|slot| format!("{slot:?}"))).collect::<Vec<_>>()
        };
        part.nodes.iter().flat_map(of).collect()
    }

    #[test]
    fn parts_have_what_they_read_and_share_no_state() {
        let (mut cuts, mut broken) = (0, 0);
        for folder in folders() {
            let prepared = Prepared::new(&folder, &LoadOptions::default()).unwrap();
            let recorded = Recorded::of(&prepared).unwrap();
            let name = folder.display();
            for cut in 1..=recorded.layers + 1 {
                let (placement, sound) = recorded.placement(&prepared.declarations, cut, 0);
                // A cut at an end is always possible.
                assert!(sound || (2..=recorded.layers).contains(&cut), "{name}: cut {cut}");
                broken += usize::from(!sound);
                let mut parts = vec![circuit::cut(recorded.decoder.clone(), cut, &placement.held)];
                parts.extend(recorded.encoder.clone().map(|encoder| circuit::cut(encoder, NOWHERE, &placement.held)));
                for Parts { host, device, .. } in parts {
                    // An encoder of which no later layer reads anything is one part.
                    let (Some(mut host), Some(mut device)) = (host, device) else { continue };
                    let [reads, makes] = values(&mut device);
                    let inputs: HashSet<Value> = device.inputs.iter().copied().collect();
                    assert!(reads.iter().all(|value| makes.contains(value) || inputs.contains(value)), "{name}: cut {cut}");
                    assert!(inputs.is_disjoint(&makes) && inputs.is_subset(&reads), "{name}: cut {cut}");
                    let [reads, makes] = values(&mut host);
                    assert!(reads.is_subset(&makes) && inputs.is_subset(&makes), "{name}: cut {cut}");
                    assert!(states(&host).is_disjoint(&states(&device)), "{name}: cut {cut}");
                    for (part, on_device) in [(&host, false), (&device, true)] {
                        for node in &part.nodes {
                            let there = |held: bool| assert_eq!(held, on_device, "{name}: cut {cut}: {:?}", node.op);
                            node.op.states().iter().for_each(|(_, state)| there(placement.held.kv[state.0 as usize]));
                            node.op.slots().iter().for_each(|slot| there(placement.held.slots[slot.0 as usize]));
                            if let Some(Uses::Rows(id) | Uses::Whole(id)) = node.op.weight() {
                                let location = placement.weights[id.0 as usize];
                                assert!(if on_device { location.device } else { location.host != Keep::Nothing }, "{name}: cut {cut}");
                            }
                        }
                    }
                    cuts += usize::from(sound);
                }
            }
        }
        println!("{cuts} cuts, {broken} others are impossible");
        assert!(cuts > 0);
    }

    #[test]
    fn what_is_set_aside_has_what_it_reads_and_leaves_the_rest_in_order() {
        let mut count = 0;
        for folder in folders() {
            let prepared = Prepared::new(&folder, &LoadOptions::default()).unwrap();
            let recorded = Recorded::of(&prepared).unwrap();
            let (placement, sound) = recorded.placement(&prepared.declarations, 0, usize::MAX);
            assert!(sound && placement.host_experts == recorded.with_experts, "{}", folder.display());
            for mut circuit in [Some(recorded.decoder), recorded.encoder].into_iter().flatten() {
                let name = folder.display();
                let order: Vec<String> = circuit.nodes.iter().flat_map(touched).collect();
                let nodes = circuit.nodes.len();
                let asides = circuit::set_aside(&mut circuit, |node| placement.stays(node));
                assert_eq!(circuit.nodes.iter().flat_map(touched).collect::<Vec<_>>(), order, "{name}: states in another order");
                assert_eq!(circuit.nodes.len() + asides.iter().map(|aside| aside.nodes.len() - 1).sum::<usize>(), nodes, "{name}");
                assert!(circuit.nodes.iter().all(|node| experts(node).is_none()), "{name}: experts on the device");
                let mut there: HashSet<Value> = HashSet::new();
                for index in 0..circuit.nodes.len() {
                    let mut node = circuit.nodes[index].clone();
                    for (port, value) in node.op.ports().into_iter().filter(|(_, value)| value.is_some()) {
                        let root = circuit.root(*value);
                        match port {
                            Port::In => assert!(there.contains(&root), "{name}: {:?} reads what comes later", circuit.nodes[index].op),
                            Port::Out => assert!(there.insert(root), "{name}: {:?} makes what is there", circuit.nodes[index].op),
                        }
                    }
                }
                let places: Vec<Aside> = circuit.nodes.iter().filter_map(|node| node.op.as_any().downcast_ref().cloned()).collect();
                assert_eq!(places.len(), asides.len(), "{name}");
                for (index, (place, mut aside)) in places.iter().zip(asides).enumerate() {
                    let [reads, makes] = values(&mut aside);
                    let given: HashSet<Value> = place.inputs.iter().copied().collect();
                    assert!(place.index == index && aside.inputs == place.inputs, "{name}");
                    assert!(reads.iter().all(|value| makes.contains(value) || given.contains(value)), "{name}");
                    assert!(!place.outputs.is_empty() && place.outputs.iter().all(|value| makes.contains(value)), "{name}");
                    // One answer goes back: the weighted sum.
                    let width = |values: &[Value]| values.iter().map(|value| circuit.values[value.0 as usize].shape.width).sum::<usize>();
                    assert!(width(&place.outputs) <= width(&place.inputs), "{name}: more goes back than comes");
                    count += 1;
                }
            }
        }
        assert!(count > 0);
    }

    /// States that an operation touches, in the order in which it says so.
    fn touched(node: &Node) -> Vec<String> {
        let pages = node.op.states().into_iter().map(|(port, state)| format!("{port:?} {state:?}"));
        pages.chain(node.op.slots().into_iter().map(|slot| format!("{slot:?}"))).collect()
    }
}
