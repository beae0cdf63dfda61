//! Products of rounded activations against f64, and against themselves when the work is cut otherwise.

use super::super::activations::{Activations, Epilogue};
use super::super::pack::{Layout, Packed};
use super::tables;
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
            const ROWS: usize = 33;
            let (x, words) = (values(ROWS * k, 3), k.div_ceil(2));
            let mut pairs = vec![0; ROWS * words];
            for (x, pairs) in x.chunks(k).zip(pairs.chunks_mut(words)) {
                table.round_row(x, pairs);
            }
            let acts = Activations::Pairs { x: &pairs, stride: words };
            let bias = values(n, 7);
            let epilogue = Epilogue { bias: Some(&bias), add: false };
            let mut whole = vec![0.0; ROWS * n];
            table.matmul_into(&packed, 0..packed.panels(), &acts, 0..ROWS, &epilogue, &mut whole, n);
            for r in 0..ROWS {
                for i in 0..n {
                    let (mut sum, mut size) = (bias[i] as f64, bias[i].abs() as f64);
                    for j in 0..k {
                        let product = bf16::from_f32(x[r * k + j]).to_f64() * w[i * k + j] as f64;
                        (sum, size) = (sum + product, size + product.abs());
                    }
                    let off = (whole[r * n + i] as f64 - sum).abs();
                    assert!(off <= size * 2e-6, "row {r} feature {i} of [{n}, {k}]: {} for {sum}", whole[r * n + i]);
                }
            }
            for rows in [1, 2, 5, 7, 8] {
                let mut cut = vec![0.0; ROWS * n];
                for panel in 0..packed.panels() {
                    for first in (0..ROWS).step_by(rows) {
                        table.matmul_into(&packed, panel..panel + 1, &acts, first..ROWS.min(first + rows), &epilogue, &mut cut, n);
                    }
                }
                assert!(cut.iter().zip(&whole).all(|(a, b)| a.to_bits() == b.to_bits()), "{rows} rows at a time give other bits");
            }
        }
    }
}
