//! The 12 bytes in which Q4_K and Q5_K keep eight 6-bit scales and eight 6-bit minima.
//!
//! Bytes 0-3 hold scales 0-3 and bytes 4-7 minima 0-3 in their low six bits. Bytes 8-11 hold the low nibbles of scales
//! (low half) and minima (high half) 4-7, whose top two bits sit in the spare bits of bytes 0-3 and 4-7.

/// Scale and minimum of run `j`.
pub(super) fn get(bytes: &[u8], j: usize) -> (u8, u8) {
    if j < 4 {
        (bytes[j] & 63, bytes[j + 4] & 63)
    } else {
        let low = bytes[j + 4];
        (low & 15 | bytes[j - 4] >> 6 << 4, low >> 4 | bytes[j] >> 6 << 4)
    }
}

/// Writes all 12 bytes. Scales and minima are below 64.
pub(super) fn put(bytes: &mut [u8], scales: &[u8], mins: &[u8]) {
    for j in 0..4 {
        bytes[j] = scales[j] | scales[j + 4] >> 4 << 6;
        bytes[j + 4] = mins[j] | mins[j + 4] >> 4 << 6;
        bytes[j + 8] = scales[j + 4] & 15 | (mins[j + 4] & 15) << 4;
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn what_is_put_is_got() {
        let scales = [0, 63, 17, 32, 63, 0, 45, 16];
        let mins = [63, 1, 2, 40, 5, 48, 63, 31];
        let mut bytes = [0; 12];
        super::put(&mut bytes, &scales, &mins);
        for j in 0..8 {
            assert_eq!(super::get(&bytes, j), (scales[j], mins[j]), "run {j}");
        }
    }
}
