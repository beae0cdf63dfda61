//! The pack of compiled kernels that the library may carry; `kernels/build.py` writes it.
//!
//! A line of text for each image, then an empty line, then LZMA files, each of a few images one after the other: `FILE ARCHITECTURE HASH OFFSET
//! BYTES START LENGTH`, where `HASH` is that of the file's text with its headers in place, `OFFSET` and `BYTES` tell where the LZMA file lies behind the
//! empty line, and `START` and `LENGTH` where the image lies in what it holds.

use crate::error::vec_with_capacity;
use lzma_rust2::LzmaReader;
use std::io::Read;

/// Most memory that unpacking takes, in KiB: the dictionary is as large as kernels/build.py says.
const MEMORY: u32 = 16 << 10;

/// The image of a file for an architecture, if it was made of the text with this hash.
pub(super) fn find(pack: &[u8], file: &str, architecture: &str, hash: u64) -> Option<Vec<u8>> {
    let end = pack.windows(2).position(|two| two == b"\n\n")?;
    let (head, images) = (std::str::from_utf8(&pack[..end]).ok()?, &pack[end + 2..]);
    let hash = format!("{hash:016x}");
    head.lines().find_map(|line| {
        let mut words = line.split(' ');
        if (words.next()?, words.next()?, words.next()?) != (file, architecture, &hash) {
            return None;
        }
        let mut number = || words.next()?.parse::<usize>().ok();
        let (offset, bytes, start, length) = (number()?, number()?, number()?, number()?);
        let packed = images.get(offset..offset.checked_add(bytes)?)?;
        let mut unpacked = LzmaReader::new_mem_limit(packed, MEMORY, None).ok()?;
        let before = std::io::copy(&mut unpacked.by_ref().take(start as u64), &mut std::io::sink()).ok()?;
        let mut image = vec_with_capacity(length, "code of kernels").ok()?;
        unpacked.take(length as u64).read_to_end(&mut image).ok()?;
        (before == start as u64 && image.len() == length).then_some(image)
    })
}

/// FNV-1a.
pub(super) fn hash(text: &[u8]) -> u64 {
    text.iter().fold(0xcbf2_9ce4_8422_2325, |sum, byte| (sum ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_is_found_by_file_architecture_and_hash() {
        // "other machine code", as Python's lzma writes it.
        let packed = [
            93, 0, 0, 128, 0, 255, 255, 255, 255, 255, 255, 255, 255, 0, 55, 157, 9, 51, 210, 99, 150, 212, 138, 155, 32, 176, 9, 244, 21,
            21, 200, 198, 88, 108, 118, 64, 255, 255, 122, 116, 0, 0,
        ];
        let (a, b) = (hash(b"a"), hash(b"b"));
        let pack = |start: usize, length: usize| {
            let mut pack = format!("x sm_80 {a:016x} 0 0 0 0\nx sm_90a {b:016x} 0 {} {start} {length}\n\n", packed.len()).into_bytes();
            pack.extend(packed);
            pack
        };
        assert_eq!(find(&pack(6, 12), "x", "sm_90a", b).as_deref(), Some(&b"machine code"[..]));
        assert_eq!(find(&pack(0, 5), "x", "sm_90a", b).as_deref(), Some(&b"other"[..]));
        assert_eq!(find(&pack(6, 12), "x", "sm_90a", a), None);
        assert_eq!(find(&pack(6, 12), "y", "sm_90a", b), None);
        // Cut short, or holding less than was told.
        assert_eq!(find(&pack(6, 12)[..pack(6, 12).len() - 12], "x", "sm_90a", b), None);
        for (start, length) in [(6, 13), (18, 1), (19, 0), (usize::MAX, 1), (0, usize::MAX)] {
            assert_eq!(find(&pack(start, length), "x", "sm_90a", b), None, "{start} {length}");
        }
        assert_eq!(find(b"nothing", "x", "sm_90a", b), None);
    }
}
