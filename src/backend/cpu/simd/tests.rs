//! Products of every table and layout against f64, and against themselves when the work is cut otherwise.

use super::super::activations::{Activations, Epilogue, Q8Block};
use super::super::pack::{CodeRow, F8_RUN, F8Row, Layout, Packed};
use super::{Table, tables};
use half::{bf16, f16};

const COLUMNS: [usize; 5] = [32, 64, 96, 160, 256];
const FEATURES: [usize; 6] = [1, 15, 16, 17, 48, 100];
const ROWS: [usize; 7] = [1, 2, 3, 7, 8, 16, 33];
const TABLE: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];

fn layouts() -> Vec<Layout> {
    let mut all = vec![Layout::F32, Layout::Bf16, Layout::F16, Layout::F8];
    for block in [16, 32] {
        for min in [false, true] {
            all.extend([Layout::I8 { block, min }, Layout::I4 { block, min }]);
        }
        all.push(Layout::I4Table { block, table: TABLE });
    }
    all
}

/// xorshift: the tests need variety, not quality.
struct Random(u64);

impl Random {
    fn bits(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 11
    }
    fn float(&mut self) -> f32 {
        (self.bits() % 65_536) as f32 / 32_768.0 - 1.0
    }
}

/// An 8-bit float by its definition: sign, four bits of exponent, three of mantissa.
fn e4m3(code: u8) -> f64 {
    let (exponent, mantissa) = ((code >> 3 & 15) as i32, (code & 7) as f64);
    let size = if exponent == 0 { mantissa * 2f64.powi(-9) } else { (8.0 + mantissa) * 2f64.powi(exponent - 10) };
    if code & 0x80 == 0 { size } else { -size }
}

/// A random matrix, packed, and its exact elements.
fn weights(layout: Layout, n: usize, k: usize, gain: f32, random: &mut Random) -> (Packed, Vec<Vec<f64>>) {
    let mut packed = Packed::new(layout, n, k).unwrap();
    assert_eq!(Packed::bytes(layout, n, k), Some(packed.data().len()));
    let mut exact = Vec::new();
    if layout == Layout::F8 {
        // All codes but the two that are no numbers, under scales of one size.
        let code = |random: &mut Random| Some(random.bits() as u8).filter(|c| c & 0x7f != 0x7f).unwrap_or(0x7e);
        let codes: Vec<Vec<u8>> = (0..n).map(|_| (0..k).map(|_| code(random)).collect()).collect();
        let scales: Vec<Vec<f32>> =
            (0..n).map(|_| (0..k.div_ceil(F8_RUN)).map(|_| gain * (1.5 + random.float()) / 448.0).collect()).collect();
        for (panel, (codes, scales)) in packed.panels_mut().zip(codes.chunks(16).zip(scales.chunks(16))) {
            let rows: Vec<F8Row> = codes.iter().zip(scales).map(|(codes, scale)| F8Row { codes, scale }).collect();
            layout.fill_f8(k, panel, &rows).unwrap();
        }
        let value = |(codes, scale): (&Vec<u8>, &Vec<f32>)| (0..k).map(|i| scale[i / F8_RUN] as f64 * e4m3(codes[i])).collect();
        exact.extend(codes.iter().zip(&scales).map(value));
        return (packed, exact);
    }
    if !layout.is_integer() {
        let round = |v: f32| match layout {
            Layout::Bf16 => bf16::from_f32(v).to_f32(),
            Layout::F16 => f16::from_f32(v).to_f32(),
            _ => v,
        };
        let rows: Vec<Vec<f32>> = (0..n).map(|_| (0..k).map(|_| round(random.float())).collect()).collect();
        for (panel, rows) in packed.panels_mut().zip(rows.chunks(16)) {
            let rows: Vec<&[f32]> = rows.iter().map(|r| &r[..]).collect();
            layout.fill_f32(k, panel, &rows).unwrap();
        }
        exact.extend(rows.iter().map(|r| r.iter().map(|&v| v as f64).collect()));
        return (packed, exact);
    }
    let block = layout.block();
    let mut rows = Vec::new();
    for row in 0..n {
        let codes: Vec<i8> = (0..k)
            .map(|i| match layout {
                // The extremes everywhere in some rows, where saturating arithmetic would show.
                Layout::I8 { .. } if row % 5 == 1 => [-128, 127][i % 2 * (row / 5 % 2)],
                Layout::I8 { .. } => random.bits() as i8,
                Layout::I4 { min: false, .. } => (random.bits() % 16) as i8 - 8,
                _ => (random.bits() % 16) as i8,
            })
            .collect();
        let mut factors = || (0..k / block).map(|_| f16::from_f32(random.float()).to_f32()).collect::<Vec<f32>>();
        let scale = factors();
        let min = if layout.has_min() { factors() } else { Vec::new() };
        let value = |i: usize| {
            let code = if let Layout::I4Table { table, .. } = layout { table[codes[i] as usize] } else { codes[i] };
            gain as f64 * (scale[i / block] as f64 * code as f64 - min.get(i / block).map_or(0.0, |&m| m as f64))
        };
        exact.push((0..k).map(value).collect());
        rows.push((codes, scale, min));
    }
    for (panel, rows) in packed.panels_mut().zip(rows.chunks(16)) {
        let rows: Vec<CodeRow> = rows.iter().map(|(codes, scale, min)| CodeRow { codes, scale, min, gain }).collect();
        layout.fill_codes(k, panel, &rows).unwrap();
    }
    (packed, exact)
}

/// Input rows in both forms, with a stride wider than the row.
struct Input {
    x: Vec<f32>,
    blocks: Vec<Q8Block>,
    stride: usize,
}

impl Input {
    fn new(table: &Table, rows: usize, k: usize, random: &mut Random) -> Input {
        let stride = k + 32;
        let mut x: Vec<f32> = (0..rows * stride).map(|_| random.float()).collect();
        x[..k / 2].fill(1.0); // Codes of 127 in a row.
        let mut blocks = vec![Q8Block::ZERO; rows * stride / 32];
        table.quantize_row(&x, &mut blocks);
        Input { x, blocks, stride }
    }
    fn acts(&self, layout: Layout) -> Activations<'_> {
        if layout.is_integer() {
            Activations::Q8 { blocks: &self.blocks, stride: self.stride / 32 }
        } else {
            Activations::F32 { x: &self.x, stride: self.stride }
        }
    }
    /// What the product sees as element `k` of a row.
    fn value(&self, layout: Layout, row: usize, k: usize) -> f64 {
        let i = row * self.stride + k;
        if layout.is_integer() { self.blocks[i / 32].scale as f64 * self.blocks[i / 32].codes[i % 32] as f64 } else { self.x[i] as f64 }
    }
}

#[test]
fn products_are_right_and_independent_of_the_cut() {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    for table in tables() {
        for layout in layouts() {
            for k in COLUMNS {
                for n in FEATURES {
                    // The scalar table is slow, and its single tile has no special sizes to try.
                    let most = if table.name() == "scalar" { 8 } else { 33 };
                    one_shape(table, layout, n, k, most, &mut random);
                }
            }
            // More columns than a tile widens at a time.
            one_shape(table, layout, 33, 2144, 9, &mut random);
        }
    }
}

fn one_shape(table: &Table, layout: Layout, n: usize, k: usize, most: usize, random: &mut Random) {
    let what = format!("{} {layout:?} n {n} k {k}", table.name());
    let (w, exact) = weights(layout, n, k, 1.0, random);
    let input = Input::new(table, most, k, random);
    let acts = input.acts(layout);
    let bias: Vec<f32> = (0..n).map(|_| random.float()).collect();
    let epilogue = Epilogue { bias: Some(&bias), add: true };
    let ld = n + 3;
    let start: Vec<f32> = (0..most * ld).map(|_| random.float()).collect();

    // One row at a time is the yardstick for bits.
    let mut single = start.clone();
    for row in 0..most {
        table.matmul_into(&w, 0..w.panels(), &acts, row..row + 1, &epilogue, &mut single, ld);
    }
    for row in 0..most {
        for i in 0..ld {
            let found = single[row * ld + i];
            let old = start[row * ld + i];
            if i >= n {
                assert_eq!(found, old, "{what}: wrote beyond the features");
                continue;
            }
            let terms = (0..k).map(|j| input.value(layout, row, j) * exact[i][j]);
            let (sum, size) = terms.fold((0.0, 0.0), |(s, a), t| (s + t, a + t.abs()));
            let wanted = sum + bias[i] as f64 + old as f64;
            // Each of k steps rounds at most twice, bias and old value once each; minimum sums are themselves rounded once. A term
            // scale * code - min is taken apart in the kernels, so cancellation inside it counts with its parts.
            let parts = if layout.has_min() { 130.0 * k as f64 } else { 0.0 };
            let tolerance = (2 * k + 8) as f64 * 2f64.powi(-24) * (size + parts + bias[i].abs() as f64 + old.abs() as f64);
            assert!((found as f64 - wanted).abs() <= tolerance, "{what}: row {row} feature {i}: {found}, exactly {wanted} +- {tolerance}");
        }
    }
    for rows in ROWS.into_iter().filter(|&r| r <= most) {
        let first = random.bits() as usize % (most - rows + 1);
        let mut together = start.clone();
        table.matmul_into(&w, 0..w.panels(), &acts, first..first + rows, &epilogue, &mut together, ld);
        let mut cut = start.clone();
        let mut panel = 0;
        while panel < w.panels() {
            let end = w.panels().min(panel + 1 + random.bits() as usize % 5);
            let row = first + random.bits() as usize % rows;
            table.matmul_into(&w, panel..end, &acts, first..row, &epilogue, &mut cut, ld);
            table.matmul_into(&w, panel..end, &acts, row..first + rows, &epilogue, &mut cut, ld);
            panel = end;
        }
        for i in 0..most * ld {
            let inside = (first..first + rows).contains(&(i / ld));
            let wanted = if inside { single[i] } else { start[i] };
            assert_eq!(wanted.to_bits(), together[i].to_bits(), "{what}: {rows} rows at once, element {i}");
            assert_eq!(wanted.to_bits(), cut[i].to_bits(), "{what}: {rows} rows in pieces, element {i}");
        }
    }
}

#[test]
fn odd_column_counts_of_float_layouts() {
    let mut random = Random(77);
    for table in tables() {
        for layout in [Layout::F32, Layout::Bf16, Layout::F16] {
            for k in [1, 2, 3, 33, 101] {
                let (w, exact) = weights(layout, 70, k, 1.0, &mut random);
                let x: Vec<f32> = (0..7 * k).map(|_| random.float()).collect();
                let mut y = vec![0.0; 7 * 70];
                table.matmul_into(&w, 0..5, &Activations::F32 { x: &x, stride: k }, 0..7, &Epilogue::default(), &mut y, 70);
                for (i, &found) in y.iter().enumerate() {
                    let wanted: f64 = (0..k).map(|j| exact[i % 70][j] * x[i / 70 * k + j] as f64).sum();
                    assert!((found as f64 - wanted).abs() <= k as f64 * k as f64 * 2f64.powi(-23), "{} {layout:?} {k}", table.name());
                }
            }
        }
    }
}

#[test]
fn rows_decode_to_what_was_packed() {
    let mut random = Random(5);
    for layout in layouts() {
        for gain in [1.0, 0.37] {
            for k in [32, 160] {
                let (w, exact) = weights(layout, 19, k, gain, &mut random);
                let mut row = vec![0.0; k];
                for i in 0..19 {
                    w.decode_row(i, &mut row).unwrap();
                    for (&found, &wanted) in row.iter().zip(&exact[i]) {
                        assert!(
                            (found as f64 - wanted).abs() <= 3.0 * 2f64.powi(-24) * (wanted.abs() + 130.0),
                            "{layout:?}: {found} {wanted}"
                        );
                    }
                }
            }
        }
    }
}

#[test]
fn gains_and_scales_out_of_the_range_of_f16() {
    let mut random = Random(6);
    let (n, k) = (20, 64);
    for layout in [Layout::I8 { block: 32, min: true }, Layout::I4 { block: 16, min: true }] {
        for size in [1e-30f32, 1e-9, 3e-5, 1.1, 7e6, 1e30] {
            let codes: Vec<i8> = (0..k).map(|_| (random.bits() % 16) as i8).collect();
            let blocks = k / layout.block();
            let scale: Vec<f32> = (0..blocks).map(|_| size * random.float()).collect();
            let min: Vec<f32> = (0..blocks).map(|_| size * random.float()).collect();
            let mut w = Packed::new(layout, n, k).unwrap();
            for panel in w.panels_mut() {
                layout.fill_codes(k, panel, &[CodeRow { codes: &codes, scale: &scale, min: &min, gain: 0.7 }; 4]).unwrap();
            }
            let mut row = vec![0.0; k];
            w.decode_row(2, &mut row).unwrap();
            for table in tables() {
                let mut blocks = vec![Q8Block::ZERO; k / 32];
                let x: Vec<f32> = (0..k).map(|_| random.float()).collect();
                table.quantize_row(&x, &mut blocks);
                let mut y = vec![9.0; n];
                table.matmul_into(&w, 0..2, &Activations::Q8 { blocks: &blocks, stride: 2 }, 0..1, &Epilogue::default(), &mut y, n);
                let wanted: f64 = (0..k).map(|i| blocks[i / 32].scale as f64 * blocks[i / 32].codes[i % 32] as f64 * row[i] as f64).sum();
                let tolerance = 1e-5 * size as f64 * 16.0 * k as f64;
                assert!((y[2] as f64 - wanted).abs() <= tolerance, "{} {layout:?} {size}: {} {wanted}", table.name(), y[2]);
                assert_eq!(y[4], 0.0, "rows that were not given are zeros");
            }
            for (i, &found) in row.iter().enumerate() {
                let j = i / layout.block();
                let wanted = 0.7f32 as f64 * (scale[j] as f64 * codes[i] as f64 - min[j] as f64);
                assert!((found as f64 - wanted).abs() <= 2f64.powi(-11) * size as f64 * 17.0, "{layout:?} {size}: {found} {wanted}");
            }
        }
    }
}

/// Each code by itself, also where the thread takes subnormal numbers for zeros.
#[test]
fn each_8_bit_float_is_exact() {
    let _flush = crate::backend::cpu::flush::FlushGuard::new();
    let codes: Vec<u8> = (0..=255u8).map(|c| if c & 0x7f == 0x7f { 0 } else { c }).collect();
    let mut w = Packed::new(Layout::F8, 1, 256).unwrap();
    let scale = [0.75, -3.0];
    Layout::F8.fill_f8(256, w.panels_mut().next().unwrap(), &[F8Row { codes: &codes, scale: &scale }]).unwrap();
    let mut decoded = vec![0.0; 256];
    w.decode_row(0, &mut decoded).unwrap();
    for table in tables() {
        for k in 0..256 {
            let mut x = vec![0.0; 256];
            x[k] = 1.0;
            let mut y = [9.0];
            table.matmul_into(&w, 0..1, &Activations::F32 { x: &x, stride: 256 }, 0..1, &Epilogue::default(), &mut y, 1);
            let wanted = (scale[k / 128] as f64 * e4m3(codes[k])) as f32;
            assert_eq!((y[0], decoded[k]), (wanted, wanted), "{} code {:#x}", table.name(), codes[k]);
        }
    }
}

#[test]
fn scales_of_8_bit_floats_keep_a_ratio() {
    let codes = [0x38u8; 512]; // ones
    let mut nan = codes;
    nan[300] = 0xff;
    let rows = [
        F8Row { codes: &codes, scale: &[0.0, 2.0, 1e-30, f32::INFINITY] },
        F8Row { codes: &nan, scale: &[1.0, 1.0, 1.0, 3.0] },
        F8Row { codes: &codes, scale: &[0.0; 4] },
    ];
    let mut w = Packed::new(Layout::F8, 3, 512).unwrap();
    Layout::F8.fill_f8(512, w.panels_mut().next().unwrap(), &rows).unwrap();
    let scale = |run: usize, row: usize| f32::from_le_bytes(w.data()[(run * 16 + row) * 4..][..4].try_into().unwrap());
    assert_eq!([0, 1, 2, 3].map(|run| scale(run, 0)), [2.0, 2.0, 2.0, f32::INFINITY]);
    assert_eq!([0, 1, 3].map(|run| scale(run, 2)), [1.0; 3]);
    let mut row = [0.0; 512];
    w.decode_row(0, &mut row).unwrap();
    assert!(row[..128].iter().all(|v| *v == 0.0) && row[128..256].iter().all(|v| *v == 2.0));
    assert!(row[256..384].iter().all(|v| *v == 0.0) && row[384..].iter().all(|v| *v == f32::INFINITY));
    w.decode_row(1, &mut row).unwrap();
    assert!(row[..256].iter().all(|v| *v == 1.0) && row[256..384].iter().all(|v| v.is_nan()) && row[384..].iter().all(|v| *v == 3.0));
    w.decode_row(2, &mut row).unwrap();
    assert_eq!(row, [0.0; 512]);
}

/// Floats become the nearest 8-bit floats under the scale of their run.
#[test]
fn floats_pack_as_the_nearest_8_bit_floats() {
    let mut random = Random(10);
    let values: Vec<f32> = (0..160).map(|k| random.float() * if k % 3 == 0 { 1e-3 } else { 1.0 }).collect();
    let mut w = Packed::new(Layout::F8, 1, 160).unwrap();
    Layout::F8.fill_f32(160, w.panels_mut().next().unwrap(), &[&values]).unwrap();
    let mut row = vec![0.0; 160];
    w.decode_row(0, &mut row).unwrap();
    let all: Vec<f64> = (0..=255u8).filter(|c| c & 0x7f != 0x7f).map(e4m3).collect();
    for run in 0..2 {
        let range = run * 128..160.min(run * 128 + 128);
        let scale = values[range.clone()].iter().fold(0.0f32, |m, v| m.max(v.abs())) as f64 / 448.0;
        for k in range {
            let error = |v: f64| (v - values[k] as f64).abs();
            let best = all.iter().map(|code| error(code * scale)).fold(f64::MAX, f64::min);
            assert!(error(row[k] as f64) <= best + 1e-6, "{k}: {} for {}, {best} were possible", row[k], values[k]);
        }
    }
}

#[test]
fn what_is_not_finite_shows() {
    let mut random = Random(8);
    for table in tables() {
        for layout in layouts() {
            let (w, _) = weights(layout, 33, 64, 1.0, &mut random);
            for bad in [f32::NAN, f32::INFINITY] {
                let mut input = Input::new(table, 2, 64, &mut random);
                input.x[input.stride + 40] = bad;
                table.quantize_row(&input.x, &mut input.blocks);
                let mut y = vec![0.0; 66];
                table.matmul_into(&w, 0..3, &input.acts(layout), 0..2, &Epilogue::default(), &mut y, 33);
                assert!(y[..33].iter().all(|v| v.is_finite()), "{} {layout:?}: the other row is clean", table.name());
                assert!(y[33..].iter().all(|v| !v.is_finite()), "{} {layout:?}: {bad} vanished", table.name());
            }
        }
    }
}

#[test]
fn wrong_sizes_are_refused() {
    assert_eq!(Packed::bytes(Layout::I8 { block: 32, min: false }, 16, 33), None);
    assert_eq!(Packed::bytes(Layout::I4 { block: 64, min: false }, 16, 64), None);
    assert_eq!(Packed::bytes(Layout::F32, usize::MAX, usize::MAX), None);
    assert_eq!(Packed::bytes(Layout::F8, 16, 48), None);
    assert_eq!(Packed::bytes(Layout::F8, usize::MAX, usize::MAX / 32 * 32), None);
    assert!(Packed::new(Layout::Bf16, 1 << 40, 1 << 40).is_err());
    let layout = Layout::I4 { block: 32, min: false };
    let mut w = Packed::new(layout, 16, 32).unwrap();
    let panel = w.panels_mut().next().unwrap();
    let row = |codes| CodeRow { codes, scale: &[1.0], min: &[], gain: 1.0 };
    assert!(layout.fill_codes(32, panel, &[row(&[8; 32])]).is_err(), "code 8 does not fit");
    assert!(layout.fill_codes(32, panel, &[row(&[7; 31])]).is_err());
    assert!(layout.fill_codes(64, panel, &[row(&[7; 64])]).is_err());
    assert!(layout.fill_codes(32, panel, &[row(&[7; 32]); 17]).is_err());
    assert!(layout.fill_f32(32, panel, &[&[0.0; 32]]).is_err());
    layout.fill_codes(32, panel, &[row(&[-8; 32]); 16]).unwrap();
    let mut out = [0.0; 32];
    assert!(w.decode_row(16, &mut out).is_err());
    assert!(w.decode_row(0, &mut out[1..]).is_err());
    w.decode_row(15, &mut out).unwrap();
    assert_eq!(out, [-8.0; 32]);
}

#[test]
fn sixteen_bit_rows_pack_as_their_values() {
    let mut random = Random(9);
    for (layout, one) in [(Layout::Bf16, bf16::ONE.to_bits()), (Layout::F16, f16::ONE.to_bits())] {
        for k in [1, 7, 64, 600] {
            let rows: Vec<Vec<u16>> = (0..13).map(|_| (0..k).map(|_| one ^ (random.bits() as u16 & 0x80ff)).collect()).collect();
            let float = |b: u16| if layout == Layout::F16 { f16::from_bits(b).to_f32() } else { bf16::from_bits(b).to_f32() };
            let floats: Vec<Vec<f32>> = rows.iter().map(|r| r.iter().map(|&b| float(b)).collect()).collect();
            let (mut a, mut b) = (Packed::new(layout, 13, k).unwrap(), Packed::new(layout, 13, k).unwrap());
            let views: Vec<&[u16]> = rows.iter().map(|r| &r[..]).collect();
            layout.fill_u16(k, a.panels_mut().next().unwrap(), &views).unwrap();
            let views: Vec<&[f32]> = floats.iter().map(|r| &r[..]).collect();
            layout.fill_f32(k, b.panels_mut().next().unwrap(), &views).unwrap();
            assert!(a.data() == b.data(), "{layout:?} {k}");
        }
    }
}
