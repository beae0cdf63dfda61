//! Rows that a device packs as it gets them, beside the processor's packing of the same rows: the same bytes.

use crate::device::device;
use metrale::backend::cpu::pack::{LANES, Layout, Packed};
use metrale::backend::cuda::Stream;
use metrale::circuit::DeviceWeights;
use std::sync::Arc;

/// Rows and columns: fewer and more than a panel has, odd and even, below a word of sixteen bytes, around what a warp takes, wide.
const SHAPES: [(usize, usize); 14] = [
    (1, 1),
    (16, 64),
    (5, 3),
    (17, 8),
    (33, 65),
    (48, 63),
    (160, 128),
    (47, 500),
    (2, 4096),
    (20, 4099),
    (31, 1022),
    (256, 7),
    (1, 20001),
    (64, 512),
];

/// A part's rows, where its panels are, and what they are to hold.
struct Sent {
    layout: Layout,
    shape: (usize, usize),
    address: u64,
    panels: Vec<u8>,
}

fn bits(state: &mut u64) -> u16 {
    *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    (*state >> 40) as u16
}

/// Sends rows of every bit pattern, `most` at a time.
fn send(weights: &mut DeviceWeights, layout: Layout, (rows, cols): (usize, usize), most: usize, state: &mut u64) -> Sent {
    let values: Vec<Vec<u16>> = (0..rows).map(|_| (0..cols).map(|_| bits(state)).collect()).collect();
    let (stride, panel_bytes) = (DeviceWeights::stride(cols), layout.panel_bytes(cols).unwrap());
    let address = weights.take(Packed::bytes(layout, rows, cols).unwrap(), "panels").unwrap();
    let most = weights.most_rows(cols).min(most);
    for (index, piece) in values.chunks(most).enumerate() {
        let stage = weights.stage().unwrap();
        for (row, to) in piece.iter().zip(stage.chunks_mut(stride)) {
            // What lies behind a row is not to be looked at.
            to.fill(0xa5);
            row.iter().zip(to.chunks_mut(2)).for_each(|(v, to)| to.copy_from_slice(&v.to_le_bytes()));
        }
        weights.send_rows(address + (index * most / LANES * panel_bytes) as u64, layout, piece.len(), cols).unwrap();
    }
    let fill = |rows: &[Vec<u16>]| {
        let mut panel = vec![0xff; panel_bytes];
        let rows: Vec<&[u16]> = rows.iter().map(Vec::as_slice).collect();
        layout.fill_u16(cols, &mut panel, &rows).unwrap();
        panel
    };
    Sent { layout, shape: (rows, cols), address, panels: values.chunks(LANES).flat_map(fill).collect() }
}

#[test]
fn rows_are_packed_as_on_the_processor() {
    let Some(device) = device() else { return };
    let stream = Arc::new(Stream::new(device, false).unwrap());
    let mut state = 1;
    // Each part in memory of its own, so that the address sanitizer sees what lies outside.
    let mut weights = DeviceWeights::new(&stream, 0).unwrap().with_spare(1 << 20);
    let mut sent = Vec::new();
    for most in [LANES, 3 * LANES, usize::MAX] {
        for shape in SHAPES {
            for layout in [Layout::Bf16, Layout::F16] {
                sent.push(send(&mut weights, layout, shape, most, &mut state));
            }
        }
    }
    weights.finish().unwrap();
    for Sent { layout, shape, address, panels } in sent {
        let mut found = vec![0; panels.len()];
        stream.read(address, &mut found).unwrap();
        assert!(found == panels, "{shape:?} as {layout:?}");
    }
}

#[test]
fn rows_go_as_many_at_once_as_scratch_has_room_for() {
    let Some(device) = device() else { return };
    let stream = Arc::new(Stream::new(device, false).unwrap());
    let of = |spare: usize| DeviceWeights::new(&stream, 0).unwrap().with_spare(spare);
    assert_eq!([1, 8, 9].map(DeviceWeights::stride), [16, 16, 32]);
    assert_eq!([0, 255, 256, 511, 512, usize::MAX].map(|spare| of(spare).most_rows(8)), [0, 0, 16, 16, 32, DeviceWeights::STAGE / 16]);
    assert_eq!(of(1 << 20).most_rows(usize::MAX), 0);
    for (layout, rows) in [(Layout::Bf16, 17), (Layout::Bf16, 0), (Layout::F32, 16)] {
        assert!(of(256).send_rows(0, layout, rows, 8).is_err(), "{rows} as {layout:?}");
    }
}
