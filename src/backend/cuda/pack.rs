//! The pack of compiled kernels that the library may carry; `kernels/build.py` writes it.
//!
//! A line of text for each image, then an empty line, then the images, each an LZMA file (half of what they deflate to): `FILE ARCHITECTURE HASH
//! OFFSET BYTES LENGTH`, where `HASH` is that of the file's text with its headers in place and `OFFSET` counts from behind the empty line.

use crate::error::vec_with_capacity;
use lzma_rust2::LzmaReader;
use std::io::Read;

/// Most memory that unpacking takes, in KiB: the dictionary is as large as kernels/build.py says.
const MEMORY: u32 = 8 << 10;

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
        let (offset, bytes, length) = (number()?, number()?, number()?);
        let image = images.get(offset..offset.checked_add(bytes)?)?;
        let mut code = vec_with_capacity(length, "code of a kernel").ok()?;
        let unpacked = LzmaReader::new_mem_limit(image, MEMORY, None).ok()?;
        unpacked.take(length as u64 + 1).read_to_end(&mut code).ok()?;
        (code.len() == length).then_some(code)
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
        // As Python's lzma writes it.
        let image = [
            93, 0, 0, 32, 0, 255, 255, 255, 255, 255, 255, 255, 255, 0, 54, 152, 72, 153, 138, 247, 170, 180, 55, 233, 5, 31, 210, 96, 71,
            124, 255, 255, 66, 216, 0, 0,
        ];
        let (a, b) = (hash(b"a"), hash(b"b"));
        let mut pack = format!("x sm_80 {a:016x} 0 0 0\nx sm_90a {b:016x} 0 {} 12\n\n", image.len()).into_bytes();
        pack.extend(image);
        assert_eq!(find(&pack, "x", "sm_90a", b).as_deref(), Some(&b"machine code"[..]));
        assert_eq!(find(&pack, "x", "sm_90a", a), None);
        assert_eq!(find(&pack, "y", "sm_90a", b), None);
        // Cut short, or of another length than was told.
        assert_eq!(find(&pack[..pack.len() - 1], "x", "sm_90a", b), None);
        let longer = String::from_utf8_lossy(&pack[..pack.len() - image.len()]).replace(" 12\n", " 13\n");
        assert_eq!(find(&[longer.as_bytes(), &image].concat(), "x", "sm_90a", b), None);
        assert_eq!(find(b"nothing", "x", "sm_90a", b), None);
    }
}
