//! Inner loops that several operations share: sixteen partial sums, so that they vectorise and always add in one order.

/// `a . b`.
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; 16];
    let (mut a16, mut b16) = (a.chunks_exact(16), b.chunks_exact(16));
    for (a, b) in (&mut a16).zip(&mut b16) {
        for i in 0..16 {
            lanes[i] += a[i] * b[i];
        }
    }
    for (i, (a, b)) in a16.remainder().iter().zip(b16.remainder()).enumerate() {
        lanes[i] += a * b;
    }
    let mut half = 8;
    while half > 0 {
        for i in 0..half {
            lanes[i] += lanes[i + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// `y += factor * x`.
pub(super) fn axpy(factor: f32, x: &[f32], y: &mut [f32]) {
    for (y, x) in y.iter_mut().zip(x) {
        *y += factor * x;
    }
}

/// `a . b`, the definition.
pub(super) fn dot64(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_meets_the_definition() {
        for n in 0..70 {
            let a: Vec<f32> = (0..n).map(|i| (i as f32 * 0.7).sin()).collect();
            let b: Vec<f32> = (0..n).map(|i| (i as f32 * 1.3).cos()).collect();
            assert!((f64::from(dot(&a, &b)) - dot64(&a, &b)).abs() < 1e-5, "{n}");
        }
    }
}
