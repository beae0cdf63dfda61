//! One position of a recurrence over a matrix state: sixteen channels side by side, key after key.
//!
//! Written over arrays of 16 lanes, which the compiler turns into the vectors of whichever instruction set the function is compiled for.
//! Each lane's sums have one shape, two accumulators that take turns, so its bits depend on nothing but its operands.

/// Channels of a block.
const N: usize = 16;
type V = [f32; N];

/// `S <- decay S`, `out = S^T k`. `decay` has one factor for all keys, or one for each.
#[inline(always)]
pub(super) fn decay_read(state: &mut [V], decay: &[f32], k: &[f32], out: &mut V) {
    let mut sums = [[0.0; N]; 2];
    let shared = decay.len() == 1;
    for (i, (s, k)) in state.iter_mut().zip(k).enumerate() {
        let (factor, sum) = (if shared { decay[0] } else { decay[i] }, &mut sums[i % 2]);
        for lane in 0..N {
            s[lane] *= factor;
            sum[lane] += s[lane] * k;
        }
    }
    *out = total(&sums);
}

/// `S <- S + k delta^T`, `out = S^T q`.
#[inline(always)]
pub(super) fn learn_read(state: &mut [V], delta: &V, k: &[f32], q: &[f32], out: &mut V) {
    let mut sums = [[0.0; N]; 2];
    for (i, ((s, k), q)) in state.iter_mut().zip(k).zip(q).enumerate() {
        let sum = &mut sums[i % 2];
        for lane in 0..N {
            s[lane] += k * delta[lane];
            sum[lane] += s[lane] * q;
        }
    }
    *out = total(&sums);
}

/// `S <- decay S + b write^T`, `out = S^T c`.
#[inline(always)]
pub(super) fn scan_read(state: &mut [V], decay: f32, write: &V, b: &[f32], c: &[f32], out: &mut V) {
    let mut sums = [[0.0; N]; 2];
    for (i, ((s, b), c)) in state.iter_mut().zip(b).zip(c).enumerate() {
        let sum = &mut sums[i % 2];
        for lane in 0..N {
            s[lane] = decay * s[lane] + b * write[lane];
            sum[lane] += s[lane] * c;
        }
    }
    *out = total(&sums);
}

#[inline(always)]
fn total(sums: &[V; 2]) -> V {
    let mut out = sums[0];
    for lane in 0..N {
        out[lane] += sums[1][lane];
    }
    out
}

#[cfg(test)]
mod tests {
    use super::super::tables;
    use super::*;

    fn numbers(n: usize, seed: u32) -> Vec<f32> {
        (0..n as u32)
            .map(|i| ((i.wrapping_mul(2_654_435_761) ^ seed).wrapping_mul(2_246_822_519) >> 8) as f32 / (1 << 23) as f32 - 1.0)
            .collect()
    }

    /// `out[lane] = sum_i s[i][lane] * by[i]` in f64, from a state that a step has left behind.
    fn read(state: &[V], by: &[f32], lane: usize) -> f64 {
        state.iter().zip(by).map(|(s, by)| f64::from(s[lane]) * f64::from(*by)).sum()
    }

    #[test]
    fn every_table_agrees_with_the_sums_in_f64() {
        for table in tables() {
            for keys in [1, 7, 64, 129] {
                let before: Vec<V> = numbers(keys * N, 1).as_chunks().0.to_vec();
                let (k, q, delta) = (numbers(keys, 2), numbers(keys, 3), numbers(N, 4));
                let delta: V = delta[..].try_into().unwrap();
                let close = |a: f32, b: f64| assert!((f64::from(a) - b).abs() < 1e-5 * keys as f64, "{} {keys}: {a} {b}", table.name());
                for decay in [vec![0.7], numbers(keys, 5)] {
                    let (mut state, mut out) = (before.clone(), [0.0; N]);
                    table.decay_read(&mut state, &decay, &k, &mut out);
                    for lane in 0..N {
                        (0..keys).for_each(|i| close(state[i][lane], f64::from(before[i][lane]) * f64::from(decay[i % decay.len()])));
                        close(out[lane], read(&state, &k, lane));
                    }
                }
                let (mut state, mut out) = (before.clone(), [0.0; N]);
                table.learn_read(&mut state, &delta, &k, &q, &mut out);
                for lane in 0..N {
                    (0..keys).for_each(|i| close(state[i][lane], f64::from(before[i][lane]) + f64::from(k[i]) * f64::from(delta[lane])));
                    close(out[lane], read(&state, &q, lane));
                }
                let (mut state, mut out) = (before.clone(), [0.0; N]);
                table.scan_read(&mut state, 0.3, &delta, &k, &q, &mut out);
                for lane in 0..N {
                    (0..keys)
                        .for_each(|i| close(state[i][lane], 0.3 * f64::from(before[i][lane]) + f64::from(k[i]) * f64::from(delta[lane])));
                    close(out[lane], read(&state, &q, lane));
                }
            }
        }
    }
}
