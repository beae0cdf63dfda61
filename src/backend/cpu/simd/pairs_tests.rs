//! Products of rounded activations against f64, and against themselves when the work is cut otherwise.

use super::super::activations::{Activations, Epilogue};
use super::super::pack::{F8_RUN, F8Row, Layout, Packed};
use super::{Table, tables};
use half::bf16;

fn values(n: usize, seed: u64) -> Vec<f32> {
    let mut s = seed;
    let mut next = || {
        s = s.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (s >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..n).map(|_| next()).collect()
}

#[test]
fn rounding_is_to_the_nearest_even_in_pairs() {
    for table in tables().into_iter().filter(|t| t.has_pairs()) {
        for n in [1, 2, 31, 32, 33, 95] {
            let mut x = values(n, 5);
            // Exactly between two bfloat16, twice: the even one is below and above.
            x[0] = f32::from_bits(0x3f80_8000);
            x[n - 1] = f32::from_bits(0x3f81_8000);
            let mut pairs = vec![u32::MAX; n.div_ceil(2)];
            table.round_row(&x, &mut pairs);
            let at = |i: usize| (pairs[i / 2] >> (i % 2 * 16)) as u16;
            for (i, x) in x.iter().enumerate() {
                assert_eq!(at(i), bf16::from_f32(*x).to_bits(), "element {i} of {n}");
            }
            assert!(n % 2 == 0 || at(n) == 0, "the half beyond an odd end");
        }
    }
}

/// Products of `count` rows with a matrix whose elements `weight` tells by row and column: near the sums in f64, and the same bits when panels and rows,
/// so many of `cuts` at a time, are multiplied apart.
fn check(table: &Table, packed: &Packed, weight: &dyn Fn(usize, usize) -> f64, count: usize, cuts: &[usize]) {
    let (n, k) = (packed.rows(), packed.cols());
    let (x, words) = (values(count * k, 3), k.div_ceil(2));
    let mut pairs = vec![0; count * words];
    for (x, pairs) in x.chunks(k).zip(pairs.chunks_mut(words)) {
        table.round_row(x, pairs);
    }
    let acts = Activations::Pairs { x: &pairs, stride: words };
    let bias = values(n, 7);
    let epilogue = Epilogue { bias: Some(&bias), add: false };
    let mut whole = vec![0.0; count * n];
    table.matmul_into(packed, 0..packed.panels(), &acts, 0..count, &epilogue, &mut whole, n);
    for r in 0..count {
        for i in 0..n {
            let (mut sum, mut size) = (bias[i] as f64, bias[i].abs() as f64);
            for j in 0..k {
                let product = bf16::from_f32(x[r * k + j]).to_f64() * weight(i, j);
                (sum, size) = (sum + product, size + product.abs());
            }
            let off = (whole[r * n + i] as f64 - sum).abs();
            assert!(off <= size * 2e-6, "row {r} feature {i} of [{n}, {k}]: {} for {sum}", whole[r * n + i]);
        }
    }
    let same = |cut: &[f32]| cut.iter().zip(&whole).all(|(a, b)| a.to_bits() == b.to_bits());
    for &rows in cuts {
        let mut cut = vec![0.0; count * n];
        for panel in 0..packed.panels() {
            for first in (0..count).step_by(rows) {
                table.matmul_into(packed, panel..panel + 1, &acts, first..count.min(first + rows), &epilogue, &mut cut, n);
            }
        }
        assert!(same(&cut), "{rows} rows at a time give other bits");
    }
    let mut few = vec![0.0; count * n];
    for row in 0..count {
        table.matmul_into(packed, 0..packed.panels(), &acts, row..row + 1, &epilogue, &mut few, n);
    }
    assert!(same(&few), "single rows of several panels give other bits");
}

#[test]
fn products_of_pairs_are_right_and_independent_of_the_cut() {
    for table in tables().into_iter().filter(|t| t.has_pairs()) {
        for (n, k) in [(1, 32), (16, 33), (17, 64), (100, 95), (64, 256)] {
            let w: Vec<f32> = values(n * k, 11).into_iter().map(|v| bf16::from_f32(v).to_f32()).collect();
            let mut packed = Packed::new(Layout::Bf16, n, k).unwrap();
            for (panel, rows) in packed.panels_mut().zip(w.chunks(16 * k)) {
                let rows: Vec<&[f32]> = rows.chunks(k).collect();
                Layout::Bf16.fill_f32(k, panel, &rows).unwrap();
            }
            check(table, &packed, &|i, j| f64::from(w[i * k + j]), 33, &[1, 2, 5, 7, 8]);
        }
    }
}

/// The value of an 8-bit float, by its definition.
fn e4m3(code: u8) -> f64 {
    let (exponent, mantissa) = (code >> 3 & 15, f64::from(code & 7));
    let size = if exponent == 0 { mantissa / 512.0 } else { (1.0 + mantissa / 8.0) * 2f64.powi(i32::from(exponent) - 7) };
    if code > 127 { -size } else { size }
}

#[test]
fn products_of_pairs_with_8_bit_floats_are_right_and_independent_of_the_cut() {
    for table in tables().into_iter().filter(|t| t.has_pairs()) {
        for (n, k) in [(1, 32), (16, 96), (17, 160), (100, 256), (130, 416)] {
            // Every code but NaN.
            let codes: Vec<u8> =
                values(n * k, 21).iter().map(|v| ((v + 1.0) * 127.9) as u8).map(|c| if c & 0x7f == 0x7f { c ^ 1 } else { c }).collect();
            let scale: Vec<f32> = values(n * k.div_ceil(F8_RUN), 22).iter().map(|v| v + 1.5).collect();
            let mut packed = Packed::new(Layout::F8, n, k).unwrap();
            let rows: Vec<F8Row<'_>> =
                codes.chunks(k).zip(scale.chunks(k.div_ceil(F8_RUN))).map(|(codes, scale)| F8Row { codes, scale }).collect();
            for (panel, rows) in packed.panels_mut().zip(rows.chunks(16)) {
                Layout::F8.fill_f8(k, panel, rows).unwrap();
            }
            let weight = |i: usize, j: usize| f64::from(scale[i * k.div_ceil(F8_RUN) + j / F8_RUN]) * e4m3(codes[i * k + j]);
            check(table, &packed, &weight, 205, &[1, 2, 3, 5, 97]);
        }
    }
}

/// Each code by itself, also where the thread takes subnormal numbers for zeros.
#[test]
fn each_8_bit_float_is_exact_as_a_pair() {
    let _flush = crate::backend::cpu::flush::FlushGuard::new();
    let codes: Vec<u8> = (0..=255u8).map(|c| if c & 0x7f == 0x7f { 0 } else { c }).collect();
    let mut w = Packed::new(Layout::F8, 1, 256).unwrap();
    Layout::F8.fill_f8(256, w.panels_mut().next().unwrap(), &[F8Row { codes: &codes, scale: &[0.75, -3.0] }]).unwrap();
    for table in tables().into_iter().filter(|t| t.has_pairs()) {
        for rows in [1, 4] {
            for k in 0..256 {
                let (mut x, mut pairs) = (vec![0.0; 256], vec![0; 128 * rows]);
                x[k] = 1.0;
                pairs.chunks_mut(128).for_each(|pairs| table.round_row(&x, pairs));
                let mut y = vec![9.0; rows];
                table.matmul_into(&w, 0..1, &Activations::Pairs { x: &pairs, stride: 128 }, 0..rows, &Epilogue::default(), &mut y, 1);
                let wanted = (if k < 128 { 0.75 } else { -3.0 } * e4m3(codes[k])) as f32;
                assert!(y.iter().all(|y| *y == wanted), "code {:#x}: {y:?}, {wanted} wanted", codes[k]);
            }
        }
    }
}

#[test]
fn what_is_not_finite_shows_in_pairs_with_8_bit_floats() {
    let (ones, mut bad) = ([0x38u8; 256], [0x38u8; 256]);
    bad[130] = 0x7f;
    let mut w = Packed::new(Layout::F8, 2, 256).unwrap();
    let rows = [F8Row { codes: &ones, scale: &[1.0, 1.0] }, F8Row { codes: &bad, scale: &[1.0, 1.0] }];
    Layout::F8.fill_f8(256, w.panels_mut().next().unwrap(), &rows).unwrap();
    for table in tables().into_iter().filter(|t| t.has_pairs()) {
        for rows in [1, 5] {
            for infinite in [false, true] {
                let (mut x, mut pairs) = (vec![1.0; 256], vec![0; 128 * rows]);
                x[7] = if infinite { f32::INFINITY } else { 1.0 };
                pairs.chunks_mut(128).for_each(|pairs| table.round_row(&x, pairs));
                let mut y = vec![9.0; 2 * rows];
                table.matmul_into(&w, 0..1, &Activations::Pairs { x: &pairs, stride: 128 }, 0..rows, &Epilogue::default(), &mut y, 2);
                assert!(y.chunks(2).all(|y| y[0].is_infinite() == infinite && (infinite || y[0] == 256.0) && y[1].is_nan()), "{y:?}");
            }
        }
    }
}
