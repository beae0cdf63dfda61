//! The alphabet of byte-level BPE: each of the 256 bytes has one printable character.
//!
//! Printable Latin-1 bytes stand for themselves; the other 68 are numbered from U+0100 in byte order (GPT-2's scheme).

/// The character that stands for a byte. The other direction is the one that decoding needs; this one is its definition.
pub(super) fn char_of(byte: u8) -> char {
    if is_printable(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|&b| !is_printable(b)).count() as u32;
    char::from_u32(0x100 + before).expect("0x100 + 67 is a letter")
}

/// The byte a character stands for, if it is in the alphabet.
pub(super) fn byte_of(c: char) -> Option<u8> {
    let code = u32::from(c);
    if let Ok(byte) = u8::try_from(code) {
        return is_printable(byte).then_some(byte);
    }
    OTHERS.get(code.checked_sub(0x100)? as usize).copied()
}

/// The bytes without a printable Latin-1 character, in order.
const OTHERS: [u8; 68] = {
    let mut table = [0; 68];
    let mut at = 0;
    let mut byte = 0;
    while byte < 256 {
        if !is_printable(byte as u8) {
            table[at] = byte as u8;
            at += 1;
        }
        byte += 1;
    }
    table
};

const fn is_printable(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::pre_tokenizers::byte_level::ByteLevel;

    #[test]
    fn is_the_alphabet_of_the_tokenizers_crate() {
        let ours: Vec<char> = (0..=255).map(char_of).collect();
        let theirs = ByteLevel::alphabet();
        assert_eq!(theirs.len(), 256);
        assert!(ours.iter().all(|c| theirs.contains(c)));
        // Known points of GPT-2's table: space, newline, NUL and 0xAD.
        assert_eq!([char_of(b' '), char_of(b'\n'), char_of(0), char_of(0xAD)], ['Ġ', 'Ċ', 'Ā', 'Ń']);
    }

    #[test]
    fn round_trips() {
        for byte in 0..=255 {
            assert_eq!(byte_of(char_of(byte)), Some(byte));
        }
        assert_eq!([byte_of(' '), byte_of('\u{144}'), byte_of('▁'), byte_of('\u{AD}')], [None; 4]);
    }
}
