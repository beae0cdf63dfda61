//! What a case is made of: random inputs and weights, batches of several sequences, and the comparison of both bodies.

use crate::device::{OnDevice, device};
use metrale::backend::cpu::pack::{LANES, Layout, Packed};
use metrale::backend::cpu::pause::Control;
use metrale::backend::cpu::pool::Pool;
use metrale::backend::cuda::Stream;
use metrale::cache::{LayerPages, PagePool, SequenceState, StateLayout, StatePool};
use metrale::circuit::{Needs, Program, Progress, Tape, Workspace, fuse_for_device, lower};
use metrale::error::Result;
use metrale::ops::*;
use metrale::weights::{Declarations, Role, Source};
use std::sync::Arc;

/// Numbers in -1..1 that depend on the seed alone.
pub fn random(n: usize, seed: u64) -> Vec<f32> {
    let mut s = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    (0..n)
        .map(|_| {
            s ^= s << 13;
            s ^= s >> 7;
            s ^= s << 17;
            (s >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        })
        .collect()
}

/// A test input: rows that depend on position and sequence, so that the same position gives the same row.
#[derive(Clone, Debug)]
pub struct Given {
    width: usize,
    seed: u64,
    size: f32,
    y: Value,
}

impl Given {
    fn each_row(&self, batch: &Batch, mut give: impl FnMut(usize, Vec<f32>)) {
        for (index, segment) in batch.segments.iter().enumerate() {
            for row in segment.rows.clone() {
                let seed = self.seed + 1000 * index as u64 + 7 * u64::from(batch.positions[row]);
                give(row, random(self.width, seed).iter().map(|v| v * self.size).collect());
            }
        }
    }

    fn fill(&self, frame: &Frame<'_>) {
        let y = frame.output(self.y);
        // SAFETY: runs on one thread.
        self.each_row(frame.batch, |row, values| unsafe { y.row(row) }.copy_from_slice(&values));
    }
}

impl Op for Given {
    metrale::op_common!("given");
    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::Out, &mut self.y)]
    }
    fn check(&self, _: &dyn Shapes) -> Result<Vec<Shape>> {
        Ok(vec![Shape::f32(Rows::All, self.width)])
    }
    fn solo(&self, _: &Frame<'_>) -> bool {
        true
    }
    fn scalar(&self, frame: &Frame<'_>) {
        self.fill(frame);
    }
    fn run(&self, frame: &Frame<'_>, turn: &Turn<'_>) {
        if turn.worker.is_leader() {
            self.fill(frame);
        }
    }
    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let y = gpu.view(self.y);
        let mut done = Ok(());
        self.each_row(gpu.batch, |row, values| {
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_ne_bytes()).collect();
            done = done.clone().and_then(|()| gpu.write(y.data + 4 * row as u64 * u64::from(y.stride), &bytes));
        });
        done
    }
}

/// What a case may use while it records.
pub struct Bench<'a, 'b> {
    pub t: &'a mut Tape<'b>,
    pub seed: u64,
}

impl Bench<'_, '_> {
    pub fn given(&mut self, width: usize) -> Value {
        self.given_size(width, 1.0)
    }
    pub fn given_size(&mut self, width: usize, size: f32) -> Value {
        self.seed += 1;
        self.t.op(Given { width, seed: self.seed * 100_000, size, y: Value::NONE })
    }
}

/// Tolerance relative to the largest magnitude of the row's output. Names begin with `rounded` where activations may be rounded to 16 bits, and with
/// `fused` and an operation where the circuit for devices must have that.
pub fn compare(
    name: &str,
    declare: impl Fn(&mut Declarations) -> Vec<u32>,
    layout: Layout,
    tolerance: f32,
    record: impl Fn(&mut Bench<'_, '_>, &[u32]) -> Value,
) {
    let mut d = Declarations::default();
    let ids = declare(&mut d);
    let weights: Vec<Weight> = d
        .weights
        .iter()
        .enumerate()
        .map(|(i, spec)| match (&spec.source, spec.role) {
            (Source::Constant(values), _) => Weight::Vector(values.clone()),
            (_, Role::Vector { .. }) => Weight::Vector(random(spec.cols, 900 + i as u64).iter().map(|v| 1.0 + 0.5 * v).collect()),
            (_, role) => {
                let matrix = |e: usize| {
                    let mut values = random(spec.rows * spec.cols, 500 + i as u64 + 31 * e as u64);
                    // A table of ids holds whole numbers from 0 on.
                    if matches!(&spec.source, Source::Tensors(parts) if parts[0].tensor == "ids") {
                        values.iter_mut().for_each(|v| *v = ((*v + 1.0) * 12.0).floor());
                    }
                    // In the parts that were declared; large ones in two, of which the second begins in the middle of a panel of the whole.
                    let first = match &spec.source {
                        Source::Tensors(parts) if parts.len() > 1 => parts[0].rows,
                        _ if spec.rows >= 100 => 60,
                        _ => spec.rows,
                    };
                    let part = |values: &[f32]| {
                        let mut packed = Packed::new(layout, values.len() / spec.cols, spec.cols).unwrap();
                        for (panel, rows) in packed.panels_mut().zip(values.chunks(LANES * spec.cols)) {
                            fill(layout, spec.cols, panel, rows);
                        }
                        packed
                    };
                    let (head, tail) = values.split_at(first * spec.cols);
                    Matrix { parts: [head, tail].into_iter().filter(|values| !values.is_empty()).map(part).collect() }
                };
                match role {
                    Role::Experts => Weight::Experts((0..spec.experts()).map(matrix).collect()),
                    _ => Weight::Matrix(matrix(0)),
                }
            }
        })
        .collect();
    let mut tape = Tape::new(&d, true);
    let output = record(&mut Bench { t: &mut tape, seed: 1 }, &ids);
    let mut circuit = tape.finish(output).unwrap_or_else(|e| panic!("{name}: {e}"));
    circuit.rounds = name.starts_with("rounded ");
    lower(&mut circuit, &|_| Needs { f32: !layout.is_integer(), q8: layout.is_integer() });
    fuse_for_device(&mut circuit, &|id| takes_prepared(layout, d.weights[id.0 as usize].cols));
    let prepared = circuit.values.iter().any(|value| value.shape.kind == Kind::Prepared);
    assert_eq!(prepared, name.contains(" prepared"), "{name}: whether a value is made for products");
    if let Some(fused) = name.strip_prefix("fused ").or(name.strip_prefix("rounded gated").map(|_| "gated_linear")) {
        let fused = fused.split(' ').next().unwrap();
        assert!(circuit.nodes.iter().any(|node| node.op.name() == fused), "{name}: the circuit has no such operation");
    }
    let mut program = Program::new(circuit, 80, 4, &[]).unwrap();
    let stream = device().map(|device| Arc::new(Stream::new(device, false).unwrap()));
    let pool = Pool::new(3).unwrap();
    let mut workspaces = [0, 1].map(|_| Workspace::new(program.workspace_bytes()).unwrap());
    let pools: Vec<_> = d.kv.iter().map(|spec| PagePool::new(spec.page_bytes(), 256)).collect();
    let mut caches: [Vec<Vec<LayerPages>>; 2] =
        [0, 1].map(|_| (0..3).map(|_| pools.iter().map(|p| LayerPages::new(p, 256).unwrap()).collect()).collect());
    let states = StatePool::new(StateLayout::new(&d.slots, 1).unwrap());
    let zero = states.zero().unwrap();
    let mut slots = [0, 1].map(|_| [0, 1, 2].map(|_| SequenceState::new(&states, &zero)));
    let floats = states.layout().slot_floats(false);
    let mut on_device = stream.as_ref().map(|stream| OnDevice::new(stream, &program, &weights, &d, floats, 3));
    let mut lengths = [0usize; 3];
    // Rows for each of three sequences in successive batches: alone, together, prompts beside single tokens.
    // None is one token each: on a device that is a graph, which the writes of given values do not fit into.
    let counts = [[5, 0, 0], [1, 1, 9], [1, 1, 17], [33, 1, 0], [1, 2, 1], [2, 3, 40], [70, 1, 3], [60, 1, 1], [1, 2, 5]];
    // The last two are for attention alone: what single rows see is then more than one piece.
    let rounds = if name.contains("attention ") { counts.len() } else { counts.len() - 2 };
    for counts in counts.into_iter().take(rounds) {
        let mut found: Vec<Vec<f32>> = Vec::new();
        for side in 0..2 {
            let mut batch = Batch { kv_states: d.kv.len(), slots: states.layout().slots().clone(), ..Batch::default() };
            for (s, &count) in counts.iter().enumerate().filter(|(_, c)| **c > 0) {
                let start = batch.tokens.len();
                for p in lengths[s]..lengths[s] + count {
                    batch.tokens.push((p * 7 + s) as i32 % 32);
                    batch.positions.push(p as u32);
                }
                batch.segments.push(Segment { rows: start..start + count, position: lengths[s] });
                // Everything that was written so far is the source of operations that look at one.
                batch.sources.push(lengths[s] + count);
                if let (0, Some(on_device)) = (side, &mut on_device) {
                    on_device.reserve(s, lengths[s] + count);
                    batch.kv.extend(on_device.lists[s].iter().map(|list| KvPages::new(list)));
                    batch.states.push(on_device.state(s));
                    continue;
                }
                for pages in &mut caches[side][s] {
                    pages.reserve(lengths[s], lengths[s] + count).unwrap();
                    batch.kv.push(KvPages::new(pages.pointers()));
                }
                slots[side][s].begin().unwrap();
                batch.states.push(slots[side][s].pointers(false));
            }
            if let (0, Some(on_device)) = (side, &mut on_device) {
                let Some(rows) = on_device.run(&program, &batch, output) else { return };
                found.push(rows);
                (0..3).filter(|s| counts[*s] > 0).for_each(|s| on_device.commit(s));
                continue;
            }
            if side == 0 {
                program.run(&pool, &mut workspaces[0], &batch, &weights, &mut Progress::default(), Control::none()).unwrap();
            } else {
                program.run_scalar(&mut workspaces[1], &batch, &weights).unwrap();
            }
            let mut rows = Vec::new();
            program.read(&mut workspaces[side], &batch, output, &mut rows).unwrap();
            found.push(rows);
            (0..3).filter(|s| counts[*s] > 0).for_each(|s| slots[side][s].commit(None));
        }
        let most = found[1].iter().fold(1e-3f32, |m, v| m.max(v.abs()));
        for (i, (fast, exact)) in found[0].iter().zip(&found[1]).enumerate() {
            assert!((fast - exact).abs() <= tolerance * most, "{name}, rows {counts:?}, element {i}: {fast} against {exact} (of {most})");
        }
        assert!(found[1].iter().any(|v| *v != 0.0), "{name}: all zeros prove nothing");
        (0..3).for_each(|s| lengths[s] += counts[s]);
    }
}

/// Packs rows of floats as `layout`; integer layouts take codes made from the values.
pub fn fill(layout: Layout, cols: usize, panel: &mut [u8], values: &[f32]) {
    use metrale::backend::cpu::pack::CodeRow;
    if !layout.is_integer() {
        let rows: Vec<&[f32]> = values.chunks(cols).collect();
        return layout.fill_f32(cols, panel, &rows).unwrap();
    }
    let (low, high) = match layout {
        Layout::I8 { .. } => (-127.0, 127.0),
        Layout::I4 { min: false, .. } => (-8.0, 7.0),
        _ => (0.0, 15.0),
    };
    let codes: Vec<i8> = values.iter().map(|v| (low + (v + 1.0) / 2.0 * (high - low)).round() as i8).collect();
    let blocks = cols / layout.block();
    let scale: Vec<f32> = values.iter().take(blocks).map(|v| 0.01 + 0.01 * v.abs()).collect();
    let min: Vec<f32> = if layout.has_min() { scale.iter().map(|s| s * 7.0).collect() } else { Vec::new() };
    let rows: Vec<CodeRow<'_>> = codes.chunks(cols).map(|codes| CodeRow { codes, scale: &scale, min: &min, gain: 1.0 }).collect();
    layout.fill_codes(cols, panel, &rows).unwrap();
}

pub fn none(_: &mut Declarations) -> Vec<u32> {
    Vec::new()
}
