//! What a device finds in rows of logits, beside a sort of the same rows.

use crate::bench::random;
use crate::device::device;
use metrale::backend::cpu::pause::Control;
use metrale::backend::cuda::{Block, Stream};
use metrale::circuit::{DeviceWorkspace, Keep, Program, Tape};
use metrale::error::Result;
use metrale::ops::*;
use metrale::weights::Declarations;
use std::sync::Arc;

/// These rows, whatever the batch.
#[derive(Clone, Debug)]
struct These {
    rows: Vec<Vec<f32>>,
    y: Value,
}

impl Op for These {
    metrale::op_common!("these");
    fn ports(&mut self) -> Vec<(Port, &mut Value)> {
        vec![(Port::Out, &mut self.y)]
    }
    fn check(&self, _: &dyn Shapes) -> Result<Vec<Shape>> {
        Ok(vec![Shape::f32(Rows::All, self.rows[0].len())])
    }
    fn scalar(&self, _: &Frame<'_>) {}
    fn run(&self, _: &Frame<'_>, _: &Turn<'_>) {}
    fn launch(&self, gpu: &Gpu<'_>) -> Result<()> {
        let y = gpu.view(self.y);
        self.rows.iter().enumerate().try_for_each(|(row, values)| {
            let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_ne_bytes()).collect();
            gpu.write(y.data + 4 * row as u64 * u64::from(y.stride), &bytes)
        })
    }
}

/// Of so many logits: plain ones, many alike, all in order, all alike, most of them ruled out, all of them, and two with faults.
fn rows(width: usize) -> Vec<Vec<f32>> {
    let plain = |seed| random(width, seed).into_iter().map(|v| v * 9.0).collect::<Vec<f32>>();
    let mut few = vec![f32::NEG_INFINITY; width];
    few.iter_mut().skip(width / 2).step_by(37).zip(plain(3)).for_each(|(to, v)| *to = v);
    let (mut nan, mut infinite) = (plain(4), plain(5));
    (nan[width / 3], infinite[width - 1]) = (f32::NAN, f32::INFINITY);
    vec![
        plain(1),
        plain(2).iter().map(|v| (v * 0.5).round()).collect(),
        (0..width).map(|i| i as f32 * -0.25).collect(),
        vec![-0.0; width],
        few,
        vec![f32::NEG_INFINITY; width],
        nan,
        infinite,
    ]
}

const SLOTS: usize = 3;
const MOST: usize = 128;

#[test]
fn logits_and_their_highest() {
    let Some(device) = device() else { return println!("SKIPPED: no device") };
    let stream = Arc::new(Stream::new(device, false).unwrap());
    for width in [1, 65, 127, 128, 1000, 8300] {
        let given = rows(width);
        let d = Declarations::default();
        let mut tape = Tape::new(&d, true);
        let output = tape.op(These { rows: given.clone(), y: Value::NONE });
        let program = Program::new(tape.finish(output).unwrap(), given.len(), given.len(), &[]).unwrap();
        let mut workspace = DeviceWorkspace::new(&stream, &[&program], 0, 64).unwrap().without_graphs();
        let states: Vec<Block> = given.iter().map(|_| Block::new(device, 4 * (SLOTS + width), "a state").unwrap()).collect();
        let mut batch = Batch::default();
        for (row, state) in states.iter().enumerate() {
            batch.tokens.push(0);
            batch.positions.push(0);
            batch.segments.push(Segment { rows: row..row + 1, position: 0 });
            batch.sources.push(0);
            batch.states.push(StatePointers::none().and_device(state.address(), state.address()));
        }
        for candidates in [true, false] {
            let keep = Some(Keep { slots: SLOTS, candidates });
            stream.zero(states[0].address(), states[0].len()).unwrap();
            workspace.run(&program, &batch, &[], keep, Control::none()).unwrap();
            for (row, values) in given.iter().enumerate() {
                let name = format!("row {row} of {width}");
                let mut kept = vec![0u8; 4 * width];
                stream.read(states[row].address() + 4 * SLOTS as u64, &mut kept).unwrap();
                assert!(kept.as_chunks().0.iter().zip(values).all(|(b, v)| f32::from_ne_bytes(*b).to_bits() == v.to_bits()), "{name}");
                let mut order: Vec<usize> = (0..width).collect();
                let sound = values.iter().all(|v| *v < f32::INFINITY);
                if sound {
                    order.sort_by(|a, b| values[*b].partial_cmp(&values[*a]).unwrap());
                }
                let first = (sound && values[order[0]] > f32::NEG_INFINITY).then_some(order[0] as i32);
                assert_eq!(workspace.found().best(row), first, "{name}");
                if !candidates || first.is_none() {
                    continue;
                }
                let (sum, found) = workspace.found().candidates(row);
                let found: Vec<(u32, u32)> = found.map(|(token, logit)| (token, logit.to_bits())).collect();
                let absent = (u32::MAX, f32::NEG_INFINITY.to_bits());
                let wanted = (0..MOST).map(|i| order.get(i).map_or(absent, |at| (*at as u32, values[*at].to_bits())));
                assert_eq!(found, wanted.collect::<Vec<_>>(), "{name}");
                let exact: f64 = values.iter().map(|v| (f64::from(*v) - f64::from(values[order[0]])).exp()).sum();
                assert!((sum / exact - 1.0).abs() < 1e-12, "{name}: {sum}, exactly {exact}");
            }
        }
    }
}
