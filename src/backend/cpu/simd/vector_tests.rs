//! Row functions of every table against f64, on all lengths around the vector sizes and on odd values.

use super::tables;
use half::{bf16, f16};

fn random(n: usize, seed: u64, size: f32) -> Vec<f32> {
    let mut state = seed * 2 + 1;
    (0..n)
        .map(|_| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            ((state >> 40) as f32 / (1 << 23) as f32 - 1.0) * size
        })
        .collect()
}

const LENGTHS: [usize; 12] = [0, 1, 5, 15, 16, 17, 31, 64, 65, 100, 257, 1000];

fn close(found: f32, wanted: f64, tolerance: f64, what: &str) {
    assert!((found as f64 - wanted).abs() <= tolerance, "{what}: {found}, exactly {wanted} +- {tolerance}");
}

#[test]
fn sums_and_products() {
    for table in tables() {
        for n in LENGTHS {
            let (a, b) = (random(n, 1, 3.0), random(n, 2, 2.0));
            let unit = 2f64.powi(-24);
            let reference = |b: &[f32]| {
                let terms = a.iter().zip(b).map(|(&a, &b)| a as f64 * b as f64);
                terms.fold((0.0, 0.0), |(s, m), t| (s + t, m + t.abs()))
            };
            let bound = |size: f64| (2.0 * (n as f64 / 64.0).ceil() + 10.0) * unit * size;
            let (sum, size) = reference(&b);
            close(table.dot(&a, &b), sum, bound(size), "dot");
            close(table.sum_squares(&a), a.iter().map(|&v| v as f64 * v as f64).sum(), bound(9.0 * n as f64), "sum of squares");

            let mut bits = vec![0u16; n];
            let mut back = vec![0.0; n];
            for half in [false, true] {
                let mut y = a.clone();
                let dot = if half {
                    table.to_f16(&b, &mut bits);
                    assert!(bits.iter().zip(&b).all(|(&x, &v)| x == f16::from_f32(v).to_bits()));
                    table.from_f16(&bits, &mut back);
                    table.axpy_f16(0.7, &bits, &mut y);
                    table.dot_f16(&a, &bits)
                } else {
                    table.to_bf16(&b, &mut bits);
                    assert!(bits.iter().zip(&b).all(|(&x, &v)| x == bf16::from_f32(v).to_bits()));
                    table.from_bf16(&bits, &mut back);
                    table.axpy_bf16(0.7, &bits, &mut y);
                    table.dot_bf16(&a, &bits)
                };
                assert!(back.iter().zip(&b).all(|(x, v)| (x - v).abs() <= v.abs() / 256.0));
                let (sum, size) = reference(&back);
                close(dot, sum, bound(size), "dot with 16 bits");
                // The same elements in f32 give the same bits.
                assert_eq!(dot.to_bits(), table.dot(&a, &back).to_bits());
                let mut wide = a.clone();
                table.axpy(0.7, &back, &mut wide);
                assert_eq!(wide, y);
                for i in 0..n {
                    close(y[i], a[i] as f64 + 0.7f32 as f64 * back[i] as f64, 6.0 * unit, "axpy");
                }
            }
            let mut y = b.clone();
            table.add(&a, &mut y);
            assert!((0..n).all(|i| y[i] == a[i] + b[i]));
            table.scale(0.3, &mut y);
            assert!((0..n).all(|i| y[i] == 0.3 * (a[i] + b[i])));
            assert_eq!(table.max(&a), a.iter().copied().fold(f32::NEG_INFINITY, f32::max));

            let mut out = vec![0.0; n];
            table.rms_norm(&a, &b, 1e-5, &mut out);
            let mean = a.iter().map(|&v| v as f64 * v as f64).sum::<f64>() / n.max(1) as f64;
            for i in 0..n {
                let wanted = a[i] as f64 / (mean + 1e-5f32 as f64).sqrt() * b[i] as f64;
                close(out[i], wanted, 1e-6 * (wanted.abs() + 1e-3), "rms norm");
            }
        }
    }
}

#[test]
fn every_half_float_widens_exactly() {
    let all: Vec<u16> = (0..=u16::MAX).collect();
    let mut out = vec![0.0; all.len()];
    for table in tables() {
        for flush in [false, true] {
            let _guard = flush.then(super::super::flush::FlushGuard::new);
            table.from_f16(&all, &mut out);
            for (&bits, &found) in all.iter().zip(&out) {
                let wanted = f16::from_bits(bits).to_f32_const();
                assert!(found.to_bits() == wanted.to_bits() || found.is_nan() && wanted.is_nan(), "{} {bits:#x}: {found}", table.name());
            }
        }
        let mut back = vec![0; all.len()];
        table.from_f16(&all, &mut out);
        table.to_f16(&out, &mut back);
        assert!(all.iter().zip(&back).all(|(&a, &b)| a == b || f16::from_bits(a).is_nan() && f16::from_bits(b).is_nan()));
        table.from_bf16(&all, &mut out);
        table.to_bf16(&out, &mut back);
        assert!(all.iter().zip(&back).all(|(&a, &b)| a == b || bf16::from_bits(a).is_nan() && bf16::from_bits(b).is_nan()));
    }
}

/// Distance in units in the last place of the exact value.
fn units(found: f32, wanted: f64) -> f64 {
    let exponent = (wanted as f32).to_bits() >> 23 & 0xff;
    (found as f64 - wanted).abs() / 2f64.powi(exponent as i32 - 127 - 23)
}

#[test]
fn exponentials() {
    let specials = [0.0, -0.0, 1.0, -1.0, 88.72, 88.7, -87.33, 0.34657, -0.34657, 1e-10, 30.5];
    for table in tables() {
        let mut x: Vec<f32> = (0..400_003).map(|i| -87.3 + i as f32 * (176.0 / 400_003.0)).collect();
        x.extend(specials);
        let given = x.clone();
        table.exp(&mut x);
        let worst = x.iter().zip(&given).map(|(&y, &x)| units(y, (x as f64).exp())).fold(0.0, f64::max);
        assert!(worst <= 2.0, "{}: {worst} units off", table.name());

        let mut odd = [f32::NEG_INFINITY, -1e30, -88.0, f32::INFINITY, 89.0, f32::NAN, -f32::NAN];
        table.exp(&mut odd);
        assert_eq!(odd[..5], [0.0, 0.0, 0.0, f32::INFINITY, f32::INFINITY]);
        assert!(odd[5].is_nan() && odd[6].is_nan());

        for n in LENGTHS {
            let mut x = random(n, 3, 20.0);
            let given = x.clone();
            let shift = table.max(&x);
            let sum = table.exp_sum(shift, &mut x);
            let wanted: Vec<f64> = given.iter().map(|&v| (v as f64 - shift as f64).exp()).collect();
            // The difference is rounded before the exponential, which magnifies that by its size.
            close(sum, wanted.iter().sum(), 1e-5 * wanted.iter().sum::<f64>(), "sum of exponentials");
            x.iter().zip(&wanted).for_each(|(&x, &w)| close(x, w, 4e-6 * w, "exponential"));
        }
        let mut masked = [0.0, f32::NEG_INFINITY, 0.0];
        assert_eq!(table.exp_sum(0.0, &mut masked), 2.0);
        assert_eq!(masked, [1.0, 0.0, 1.0]);
    }
}

#[test]
fn activations_of_gated_layers() {
    for table in tables() {
        for n in LENGTHS {
            let (gate, up) = (random(n, 4, 12.0), random(n, 5, 2.0));
            let mut out = vec![0.0; n];
            table.silu_mul(&gate, &up, &mut out);
            for i in 0..n {
                let (g, u) = (gate[i] as f64, up[i] as f64);
                close(out[i], g / (1.0 + (-g).exp()) * u, 5e-7 * (g * u).abs(), "silu");
            }
            table.sigmoid_mul(&gate, &up, &mut out);
            for i in 0..n {
                let (g, u) = (gate[i] as f64, up[i] as f64);
                close(out[i], u / (1.0 + (-g).exp()), 5e-7 * u.abs(), "sigmoid");
            }
            table.gelu_tanh_mul(&gate, &up, &mut out);
            for i in 0..n {
                let (g, u) = (gate[i] as f64, up[i] as f64);
                let inner = (2.0 / std::f64::consts::PI).sqrt() * (g + 0.044715 * g * g * g);
                close(out[i], 0.5 * g * (1.0 + inner.tanh()) * u, 5e-6 * (g * u).abs().min(1.0) + 5e-7 * (g * u).abs(), "gelu");
            }
            for cap in [30.0f32, 2.0] {
                let mut x = gate.clone();
                table.softcap(cap, &mut x);
                for i in 0..n {
                    let wanted = cap as f64 * (gate[i] as f64 / cap as f64).tanh();
                    close(x[i], wanted, 1e-6 * wanted.abs(), "softcap");
                }
            }
        }
        let mut out = [0.0; 3];
        table.silu_mul(&[f32::NAN, 1.0, -200.0], &[1.0, f32::NAN, 1.0], &mut out);
        assert!(out[0].is_nan() && out[1].is_nan() && out[2].abs() < 1e-30);
        table.gelu_tanh_mul(&[f32::NAN, 200.0, -200.0], &[1.0; 3], &mut out);
        assert!(out[0].is_nan() && out[1] == 200.0 && out[2].abs() < 1e-30);
    }
}

#[test]
fn softplus_of_all_sizes() {
    for table in tables() {
        let mut x: Vec<f32> = (0..200_003).map(|i| -87.0 + i as f32 * (187.0 / 200_003.0)).collect();
        x.extend([0.0, -0.0, 1e-30, -1e-30, 1e30]);
        let given = x.clone();
        table.softplus(&mut x);
        for (&y, &x) in x.iter().zip(&given) {
            let wanted = (x as f64).max(0.0) + (-(x as f64).abs()).exp().ln_1p();
            assert!(units(y, wanted) <= 4.0, "{} of {x}: {y}, exactly {wanted}", table.name());
        }
        let mut odd = [f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
        table.softplus(&mut odd);
        assert!(odd[0] == f32::INFINITY && odd[1] == 0.0 && odd[2].is_nan());
    }
}

#[test]
fn taps_over_channels() {
    for table in tables() {
        for taps in [1, 2, 3, 4, 7] {
            for n in LENGTHS {
                let (w, before) = (random(n * taps, 7, 2.0), random(n, 8, 1.0));
                let x: Vec<Vec<f32>> = (0..taps).map(|j| random(n, 9 + j as u64, 3.0)).collect();
                let mut y = before.clone();
                table.taps(&w, &x.iter().map(Vec::as_slice).collect::<Vec<_>>(), &mut y);
                for c in 0..n {
                    let wanted = (0..taps).fold(before[c] as f64, |y, j| y + w[c * taps + j] as f64 * x[j][c] as f64);
                    close(y[c], wanted, 1e-5, "taps");
                }
            }
        }
    }
}

#[test]
fn max_sees_nan_anywhere() {
    for table in tables() {
        for at in [0, 7, 16, 33, 39] {
            let mut x = random(40, 6, 1.0);
            x[at] = f32::NAN;
            assert!(table.max(&x).is_nan());
            x[at] = f32::INFINITY;
            assert_eq!(table.max(&x), f32::INFINITY);
        }
        assert_eq!(table.max(&[f32::NEG_INFINITY; 20]), f32::NEG_INFINITY);
    }
}

#[cfg(target_arch = "x86_64")]
mod whole_registers {
    use super::super::avx2::Avx2;
    use super::super::avx512::Avx512;
    use super::super::lane::{Lanes, Tile};
    use super::super::quantize;
    use super::super::vector;
    use super::tables;
    use std::marker::PhantomData;

    /// What lanes make of two vectors: the larger, the largest of the first, exponentials of the second.
    struct Taken<'a, S> {
        x: &'a [f32; 16],
        y: &'a [f32; 16],
        out: &'a mut ([f32; 16], f32, [f32; 16]),
        _lanes: PhantomData<S>,
    }

    impl<S: Lanes> Tile for Taken<'_, S> {
        #[inline(always)]
        unsafe fn run(self) {
            // SAFETY: the caller has the instruction set; arrays of 16.
            unsafe {
                let (x, y) = (S::load(self.x.as_ptr()), S::load(self.y.as_ptr()));
                S::store(self.out.0.as_mut_ptr(), S::max(x, y));
                self.out.1 = S::largest(x);
                S::store(self.out.2.as_mut_ptr(), S::exp_below(y));
            }
        }
    }

    /// The lanes' own ways of doing what the trait does number by number.
    fn agrees<S: Lanes>(name: &str) {
        if !tables().iter().any(|table| table.name() == name) {
            return;
        }
        let bits = |x: &[f32]| x.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        let odd = [f32::NAN, f32::NEG_INFINITY, -0.0, 0.0, -87.336_54, -87.336_55, -1e-30, -1e30, -88.8, -1e-42];
        for seed in 0..200 {
            let mut values = super::random(32, seed, 60.0);
            if seed % 2 == 1 {
                for (i, odd) in odd.iter().enumerate().filter(|(i, _)| (seed as usize >> 1) % 11 != *i) {
                    values[(i * 7 + seed as usize) % 32] = *odd;
                }
            }
            let x: [f32; 16] = std::array::from_fn(|i| values[i]);
            let y: [f32; 16] = std::array::from_fn(|i| if values[16 + i] > 0.0 { -values[16 + i] * 1.6 } else { values[16 + i] * 1.6 });
            let mut out = ([0.0; 16], 0.0, [0.0; 16]);
            // SAFETY: the processor has the instruction set, or its table would not be there.
            unsafe { S::call(Taken::<S> { x: &x, y: &y, out: &mut out, _lanes: PhantomData }) };
            let larger: [f32; 16] = std::array::from_fn(|i| if x[i] > y[i] { x[i] } else { y[i] });
            assert_eq!(bits(&out.0), bits(&larger), "{name} {seed}: the larger");
            if x.iter().all(|x| !x.is_nan()) {
                assert_eq!(out.1, x.iter().copied().fold(f32::NEG_INFINITY, f32::max), "{name} {seed}: the largest");
            }
            for (found, y) in out.2.iter().zip(y) {
                let wanted = vector::exp_below::<S>(y);
                assert!(found.to_bits() == wanted.to_bits() || found.is_nan() && wanted.is_nan(), "{name}: e^{y}: {found}, {wanted}");
            }
        }
        for seed in 0..200 {
            let mut weights: [f32; 32] = super::random(32, seed, 1.0).try_into().unwrap();
            weights.iter_mut().for_each(|w| *w = w.abs() * 10f32.powi(seed as i32 % 45 - 40));
            match seed % 10 {
                7 => weights[11] = f32::NAN,
                8 => weights[29] = f32::INFINITY,
                9 => weights = [0.0; 32],
                _ => {}
            }
            // SAFETY: as above.
            let (found, wanted) = (unsafe { S::split(&weights) }, quantize::split(&weights));
            assert!(found == wanted || found.gain.is_nan() && wanted.gain.is_nan(), "{name} {seed}: {found:?}, {wanted:?}");
        }
    }

    #[test]
    fn agree_with_the_definition() {
        agrees::<Avx2>("avx2");
        agrees::<Avx512>("avx512");
    }
}
