//! Rows that a device packs as it gets them, beside the processor's packing of the same rows: the same bytes.

use crate::device::device;
use metrale::backend::cpu::crew::Crew;
use metrale::backend::cpu::pack::{LANES, Layout, Packed};
use metrale::backend::cpu::pool::{Pool, Team};
use metrale::backend::cuda::Stream;
use metrale::circuit::{DeviceWeights, Pieces, Staging};
use metrale::error::{Error, Kind};
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

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
fn send(weights: &mut DeviceWeights, pool: &Pool, layout: Layout, (rows, cols): (usize, usize), most: usize, state: &mut u64) -> Sent {
    let values: Vec<Vec<u16>> = (0..rows).map(|_| (0..cols).map(|_| bits(state)).collect()).collect();
    let (stride, panel_bytes) = (DeviceWeights::stride(cols), layout.panel_bytes(cols).unwrap());
    let address = weights.take(Packed::bytes(layout, rows, cols).unwrap(), "panels").unwrap();
    for (index, part) in values.chunks(most).enumerate() {
        let fill = |rows: Range<usize>, to: &mut [u8]| {
            // What lies behind a row is not to be looked at.
            to.fill(0xa5);
            assert_eq!(to.len(), rows.len() * stride);
            for (row, to) in part[rows].iter().zip(to.chunks_mut(stride)) {
                row.iter().zip(to.chunks_mut(2)).for_each(|(v, to)| to.copy_from_slice(&v.to_le_bytes()));
            }
            Ok(())
        };
        let to = address + (index * most / LANES * panel_bytes) as u64;
        let written = Mutex::new(0);
        let filled = |rows: Range<usize>| *written.lock().unwrap() += rows.len();
        weights.send_rows(to, layout, (part.len(), cols), pool, fill, filled).unwrap();
        assert_eq!(written.into_inner().unwrap(), part.len());
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
    for threads in [1, 3] {
        // Scratch has room for few rows, so that buffers go by turns.
        let mut weights = DeviceWeights::new(&stream, 0).unwrap().with_spare(2 * LANES * DeviceWeights::stride(20001));
        let pool = Pool::of(Team::Crew(Arc::new(Crew::exactly(threads).unwrap())), threads);
        let mut sent = Vec::new();
        for most in [LANES, 3 * LANES, usize::MAX] {
            for shape in SHAPES {
                for layout in [Layout::Bf16, Layout::F16] {
                    sent.push(send(&mut weights, &pool, layout, shape, most, &mut state));
                }
            }
        }
        weights.finish().unwrap();
        for Sent { layout, shape, address, panels } in sent {
            let mut found = vec![0; panels.len()];
            stream.read(address, &mut found).unwrap();
            assert!(found == panels, "{shape:?} as {layout:?} by {threads} threads");
        }
    }
}

#[test]
fn rows_go_as_many_at_once_as_scratch_has_room_for() {
    let Some(device) = device() else { return };
    let stream = Arc::new(Stream::new(device, false).unwrap());
    let of = |spare: usize| DeviceWeights::new(&stream, 0).unwrap().with_spare(spare);
    assert_eq!([1, 8, 9].map(DeviceWeights::stride), [16, 16, 32]);
    // Two buffers go by turns, each with a half.
    assert_eq!([0, 511, 512, 1023, 1024, usize::MAX].map(|spare| of(spare).most_rows(8)), [0, 0, 16, 16, 32, Staging::BYTES / 16]);
    assert_eq!(of(1 << 20).most_rows(usize::MAX), 0);
    let pool = Pool::new(1).unwrap();
    for (layout, rows, spare) in [(Layout::Bf16, 16, 511), (Layout::Bf16, 0, 512), (Layout::F32, 16, 512)] {
        assert!(of(spare).send_rows(0, layout, (rows, 8), &pool, |_, _| Ok(()), |_| {}).is_err(), "{rows} as {layout:?} through {spare}");
    }
}

/// Bytes of all buffers of staging several times over, filled by more threads than there are processors.
#[test]
fn pieces_arrive_where_they_belong() {
    let Some(device) = device() else { return };
    let stream = Arc::new(Stream::new(device, false).unwrap());
    let pool = Pool::of(Team::Crew(Arc::new(Crew::exactly(4).unwrap())), 4);
    let byte = |at: usize| (at.wrapping_mul(0x9e37_79b9) >> 11) as u8;
    let mut weights = DeviceWeights::new(&stream, 0).unwrap();
    for (total, each, together) in
        [(1, 1, 1), (1000, 7, 3), (999, 1000, 5), (4096, 64, 1), (Staging::BYTES * 19 / 2, 1 << 20, Staging::BYTES >> 20)]
    {
        let address = weights.take(total, "bytes").unwrap();
        let fill = |_: &mut (), piece: usize, to: &mut [u8]| {
            to.iter_mut().zip(piece * each..).for_each(|(b, at)| *b = byte(at));
            Ok(())
        };
        let mut passed = 0;
        let pass = |range: Range<usize>, bytes: &[u8]| {
            assert_eq!((range.start, range.len()), (passed, bytes.len()));
            assert!(bytes.iter().zip(range.clone()).all(|(b, at)| *b == byte(at)));
            passed = range.end;
            Ok(())
        };
        let filled = AtomicUsize::new(0);
        let count = |range: Range<usize>| {
            filled.fetch_add(range.len(), Ordering::Relaxed);
        };
        weights.send(address, Pieces { total, each, together }, &pool, fill, count, pass).unwrap();
        assert_eq!((passed, filled.into_inner()), (total, total));
        weights.finish().unwrap();
        let mut found = vec![0; total];
        stream.read(address, &mut found).unwrap();
        assert!(found.iter().enumerate().all(|(at, b)| *b == byte(at)), "{total} bytes, {each} at a time, {together} together");
    }
}

/// The first failure is told, whoever fails, and nobody waits for what is not filled any more.
#[test]
fn a_piece_that_fails_ends_the_run() {
    let Some(device) = device() else { return };
    let stream = Arc::new(Stream::new(device, false).unwrap());
    let pool = Pool::of(Team::Crew(Arc::new(Crew::exactly(4).unwrap())), 4);
    let mut weights = DeviceWeights::new(&stream, 0).unwrap();
    let address = weights.take(1 << 20, "bytes").unwrap();
    let pieces = Pieces { total: 1 << 20, each: 1 << 12, together: 4 };
    let beyond = Pieces { together: 1 + Staging::BYTES / pieces.each, ..pieces };
    let failed = weights.send(address, beyond, &pool, |_: &mut (), _, _| Ok(()), |_| {}, |_, _| Ok(())).unwrap_err();
    assert_eq!(failed.kind(), Kind::Internal);
    for bad in [0, 3, 100, 255] {
        let fill = |_: &mut (), piece: usize, _: &mut [u8]| match piece == bad {
            true => Err(Error::new(Kind::Io, format!("piece {piece}"))),
            false => Ok(()),
        };
        let failed = weights.send(address, pieces, &pool, fill, |_| {}, |_, _| Ok(())).unwrap_err();
        assert_eq!((failed.kind(), failed.to_string()), (Kind::Io, format!("piece {bad}")));
        let panics = |_: &mut (), piece: usize, _: &mut [u8]| {
            assert!(piece != bad, "piece {piece} is bad");
            Ok(())
        };
        let failed = weights.send(address, pieces, &pool, panics, |_| {}, |_, _| Ok(())).unwrap_err();
        assert!(failed.kind() == Kind::Internal && failed.to_string().contains("is bad"), "{failed}");
        let failed = weights.send(
            address,
            pieces,
            &pool,
            |_: &mut (), _, _| Ok(()),
            |_| {},
            |range, _| match range.start == (bad / 4) << 14 {
                true => Err(Error::new(Kind::Io, "on its way")),
                false => Ok(()),
            },
        );
        assert_eq!(failed.unwrap_err().to_string(), "on its way");
        weights.send(address, pieces, &pool, |_: &mut (), _, _| Ok(()), |_| {}, |_, _| Ok(())).unwrap();
    }
}
