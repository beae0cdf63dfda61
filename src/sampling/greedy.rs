//! The highest logit, and the check that a row is fit to choose from.
//!
//! Both are plain loops over independent lanes, which the compiler turns into vector code for any processor.

use crate::error::{Error, Kind, Result};
use crate::{bail, ensure};

/// Independent running maxima; enough to fill the widest vector registers.
const LANES: usize = 32;

/// The highest logit of a row. NaN, plus infinity and a row without any finite number are `NumericFault`.
pub(super) fn maximum(logits: &[f32]) -> Result<f32> {
    ensure!(!logits.is_empty(), InvalidState, "there is no row of logits to choose from");
    ensure!(logits.len() <= i32::MAX as usize, TooLarge, "a row of {} logits is wider than token ids reach", logits.len());
    let mut best = [f32::NEG_INFINITY; LANES];
    let mut faults = [0u32; LANES];
    let (blocks, rest) = logits.as_chunks::<LANES>();
    for block in blocks {
        for lane in 0..LANES {
            let x = block[lane];
            faults[lane] |= u32::from(unfit(x));
            best[lane] = if x > best[lane] { x } else { best[lane] };
        }
    }
    for (lane, &x) in rest.iter().enumerate() {
        faults[lane] |= u32::from(unfit(x));
        best[lane] = if x > best[lane] { x } else { best[lane] };
    }
    if faults.iter().any(|&f| f != 0) {
        return Err(fault(logits));
    }
    let max = best.iter().fold(f32::NEG_INFINITY, |a, &b| if b > a { b } else { a });
    if max == f32::NEG_INFINITY {
        bail!(NumericFault, "all {} logits are minus infinity", logits.len());
    }
    Ok(max)
}

/// NaN or plus infinity. Without a short circuit, so that whole vectors can be compared.
fn unfit(x: f32) -> bool {
    x.is_nan() | (x == f32::INFINITY)
}

/// The lowest id that holds the highest logit.
pub fn argmax(logits: &[f32]) -> Result<usize> {
    let max = maximum(logits)?;
    // Whole blocks are compared without a branch; the exact place is then sought in one block only.
    for (index, block) in logits.chunks(LANES).enumerate() {
        if block.iter().fold(false, |found, &x| found | (x == max)) {
            let within = block.iter().position(|&x| x == max).unwrap_or(0);
            return Ok(index * LANES + within);
        }
    }
    bail!(Internal, "the maximum {max} is not in the row it was taken from")
}

#[cold]
fn fault(logits: &[f32]) -> Error {
    let index = logits.iter().position(|&x| unfit(x)).unwrap_or(0);
    let count = logits.iter().filter(|&&x| unfit(x)).count();
    let value = logits.get(index).copied().unwrap_or(f32::NAN);
    let text = format!("logit {index} is {value}; {count} of {} logits are not numbers to choose from", logits.len());
    Error::new(Kind::NumericFault, text).at(index as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sampling::tests::row;

    #[test]
    fn agrees_with_a_plain_scan() {
        for n in 1..300 {
            let logits = row(n, n as u64);
            let mut best = 0;
            for i in 0..n {
                if logits[i] > logits[best] {
                    best = i;
                }
            }
            assert_eq!(argmax(&logits).unwrap(), best, "{n} logits");
        }
    }

    #[test]
    fn ties_take_the_lowest_id() {
        for n in [1usize, 31, 32, 33, 64, 100] {
            assert_eq!(argmax(&vec![-3.0; n]).unwrap(), 0);
            let mut logits = vec![0.0; n];
            logits[n - 1] = 2.0;
            logits[n / 2] = 2.0;
            assert_eq!(argmax(&logits).unwrap(), n / 2);
        }
        assert_eq!(argmax(&[f32::NEG_INFINITY, -0.0, 0.0]).unwrap(), 1);
    }

    #[test]
    fn faults_are_found_anywhere() {
        for n in [1usize, 31, 32, 33, 97] {
            for place in [0, n / 2, n - 1] {
                for bad in [f32::NAN, -f32::NAN, f32::INFINITY] {
                    let mut logits = row(n, 3);
                    logits[place] = bad;
                    let e = argmax(&logits).unwrap_err();
                    assert_eq!((e.kind(), e.offset()), (Kind::NumericFault, Some(place as u64)), "{bad} at {place} of {n}");
                }
            }
            let e = argmax(&vec![f32::NEG_INFINITY; n]).unwrap_err();
            assert_eq!(e.kind(), Kind::NumericFault);
        }
        assert_eq!(argmax(&[]).unwrap_err().kind(), Kind::InvalidState);
    }
}
