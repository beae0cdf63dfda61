//! Tokens to text, while they are generated.
//!
//! Two things are held back and nothing else: the first bytes of a character whose last bytes are in tokens to come, and
//! the longest tail that may yet become a stop string. Invalid bytes become U+FFFD, one for each maximal part of a
//! character, as the WHATWG decoder does. Each byte remembers the token it came from, so that text and tokens can be put
//! side by side. Where tokens are cut makes no difference to what comes out.
//!
//! Stop strings are found by one automaton each (Knuth, Morris, Pratt), fed byte by byte; its state is how much of a stop
//! string the text so far ends with, which is also how much must be held. The stop string that is complete first wins; of
//! those complete at the same byte the longest.

use std::ops::Range;
use std::sync::Arc;

use super::tokenizer::Tokenizer;
use crate::ensure;
use crate::error::{Error, Kind, Result};

/// How a stream treats its tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StreamOptions {
    /// Hand out bytes as they are, without waiting for whole characters.
    pub raw_bytes: bool,
    /// Show the text of special tokens.
    pub specials: bool,
}

/// What came out of one push or flush.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TextPiece {
    /// The bytes; valid UTF-8 unless the stream is raw.
    pub bytes: Vec<u8>,
    /// The tokens these bytes came from, by number of push since the start.
    pub tokens: Option<Range<u64>>,
    /// The stop string that ended the text. It is not part of the bytes.
    pub stopped: Option<Stopped>,
}

/// A stop string that was found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stopped {
    /// Its index in the list given to the stream.
    pub index: usize,
    /// The tokens it came from.
    pub tokens: Range<u64>,
}

/// Turns tokens into text. A clone is a snapshot.
#[derive(Clone)]
pub struct TextStream {
    tokenizer: Arc<Tokenizer>,
    options: StreamOptions,
    stops: Arc<[Stop]>,
    /// For each stop string, how many of its bytes the text ends with.
    matched: Vec<usize>,
    /// The beginning of a character.
    partial: Vec<Byte>,
    /// Text that may become a stop string.
    held: Vec<Byte>,
    pushed: u64,
    stopped: bool,
}

/// A byte and the token it came from.
#[derive(Clone, Copy)]
struct Byte {
    value: u8,
    token: u64,
}

struct Stop {
    text: Vec<u8>,
    /// `back[n]`: after `n` matching bytes, the longest shorter match.
    back: Vec<usize>,
}

impl TextStream {
    /// A stream that ends at any of `stops`. Unless it is raw, stop strings must be UTF-8.
    pub fn new(tokenizer: Arc<Tokenizer>, stops: &[impl AsRef<[u8]>], options: StreamOptions) -> Result<TextStream> {
        let mut automata = Vec::new();
        for (at, stop) in stops.iter().enumerate() {
            let stop = stop.as_ref();
            let bad = |text: &str| Error::new(Kind::InvalidArgument, format!("stop string {at} {text}")).at(at as u64);
            ensure_or(!stop.is_empty(), || bad("is empty"))?;
            ensure_or(options.raw_bytes || std::str::from_utf8(stop).is_ok(), || bad("is not UTF-8"))?;
            automata.push(Stop::new(stop));
        }
        Ok(TextStream {
            tokenizer,
            options,
            matched: vec![0; automata.len()],
            stops: automata.into(),
            partial: Vec::new(),
            held: Vec::new(),
            pushed: 0,
            stopped: false,
        })
    }

    /// Takes the next token. A token that is not in the vocabulary leaves the stream as it was.
    pub fn push(&mut self, token: i32) -> Result<TextPiece> {
        ensure!(!self.stopped, InvalidState, "the text has ended at a stop string; reset the stream first");
        let tokenizer = Arc::clone(&self.tokenizer);
        let bytes = tokenizer.token_bytes(token)?;
        let number = self.pushed;
        self.pushed += 1;
        if tokenizer.is_special(token) && !self.options.specials {
            return Ok(TextPiece::default());
        }
        for &value in bytes {
            let byte = Byte { value, token: number };
            let found = if self.options.raw_bytes { self.text_byte(byte) } else { self.raw_byte(byte) };
            if let Some(index) = found {
                return Ok(self.stop_at(index));
            }
        }
        Ok(self.release(self.held_back()))
    }

    /// Gives out everything that is held. The stream can go on afterwards, as if the text began here.
    pub fn flush(&mut self) -> TextPiece {
        if !self.partial.is_empty() {
            let broken = std::mem::take(&mut self.partial);
            if let Some(index) = self.replacement(broken[0].token) {
                return self.stop_at(index);
            }
        }
        self.matched.fill(0);
        self.release(0)
    }

    /// Back to the beginning.
    pub fn reset(&mut self) {
        self.matched.fill(0);
        self.partial.clear();
        self.held.clear();
        self.pushed = 0;
        self.stopped = false;
    }

    /// Whether a stop string was found.
    pub fn is_stopped(&self) -> bool {
        self.stopped
    }

    /// Number of bytes that wait for more.
    pub fn held_len(&self) -> usize {
        self.partial.len() + self.held.len()
    }

    /// A byte of a token: becomes text when its character is whole or cannot become whole.
    fn raw_byte(&mut self, byte: Byte) -> Option<usize> {
        self.partial.push(byte);
        loop {
            let mut bytes = [0; 4];
            let len = self.partial.len();
            for (to, from) in bytes.iter_mut().zip(&self.partial) {
                *to = from.value;
            }
            match std::str::from_utf8(&bytes[..len]) {
                Ok(_) => {
                    for at in 0..len {
                        if let Some(index) = self.text_byte(self.partial[at]) {
                            return Some(index);
                        }
                    }
                    self.partial.clear();
                    return None;
                }
                Err(e) => {
                    let bad = e.error_len()?;
                    let token = self.partial[0].token;
                    self.partial.drain(..bad);
                    if let Some(index) = self.replacement(token) {
                        return Some(index);
                    }
                    if self.partial.is_empty() {
                        return None;
                    }
                }
            }
        }
    }

    fn replacement(&mut self, token: u64) -> Option<usize> {
        "\u{FFFD}".bytes().find_map(|value| self.text_byte(Byte { value, token }))
    }

    /// A byte of text: moves every automaton and says which stop string is complete.
    fn text_byte(&mut self, byte: Byte) -> Option<usize> {
        self.held.push(byte);
        let mut found: Option<usize> = None;
        for (index, (stop, matched)) in self.stops.iter().zip(&mut self.matched).enumerate() {
            *matched = stop.step(*matched, byte.value);
            let longer = found.is_none_or(|best| stop.text.len() > self.stops[best].text.len());
            if *matched == stop.text.len() && longer {
                found = Some(index);
            }
        }
        found
    }

    fn held_back(&self) -> usize {
        self.matched.iter().copied().max().unwrap_or(0)
    }

    /// Gives out the held text but for its last `keep` bytes.
    fn release(&mut self, keep: usize) -> TextPiece {
        let count = self.held.len() - keep;
        let tokens = span(&self.held[..count]);
        TextPiece { bytes: self.held.drain(..count).map(|byte| byte.value).collect(), tokens, stopped: None }
    }

    /// Gives out what precedes the stop string and ends the stream.
    fn stop_at(&mut self, index: usize) -> TextPiece {
        let mut piece = self.release(self.stops[index].text.len());
        let tokens = span(&self.held).unwrap_or_default();
        piece.stopped = Some(Stopped { index, tokens });
        self.held.clear();
        self.partial.clear();
        self.matched.fill(0);
        self.stopped = true;
        piece
    }
}

impl TextPiece {
    /// The bytes as text; `None` where a raw stream gave part of a character.
    pub fn text(&self) -> Option<&str> {
        std::str::from_utf8(&self.bytes).ok()
    }
}

fn span(bytes: &[Byte]) -> Option<Range<u64>> {
    Some(bytes.first()?.token..bytes.last()?.token + 1)
}

fn ensure_or(holds: bool, error: impl FnOnce() -> Error) -> Result<()> {
    if holds { Ok(()) } else { Err(error()) }
}

impl Stop {
    fn new(text: &[u8]) -> Stop {
        let mut stop = Stop { text: text.to_vec(), back: vec![0; text.len() + 1] };
        for at in 1..text.len() {
            stop.back[at + 1] = stop.step(stop.back[at], text[at]);
        }
        stop
    }

    /// The length of the match after one more byte.
    fn step(&self, mut matched: usize, byte: u8) -> usize {
        if matched == self.text.len() {
            matched = self.back[matched];
        }
        while matched > 0 && self.text[matched] != byte {
            matched = self.back[matched];
        }
        if self.text[matched] == byte { matched + 1 } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// 256 tokens of one byte each, then some longer ones.
    fn tokenizer() -> Arc<Tokenizer> {
        let mut vocab: serde_json::Map<String, serde_json::Value> =
            (0..=255u8).map(|b| (super::super::bytes::char_of(b).to_string(), b.into())).collect();
        for (at, text) in ["ab", "abc", "bcd", "ĊĊ", "stop"].into_iter().enumerate() {
            vocab.insert(text.into(), (256 + at).into());
        }
        let file = serde_json::json!({
            "added_tokens": [{"id": 300, "content": "<e>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
            "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
            "model": {"type": "BPE", "vocab": vocab, "merges": []}});
        Arc::new(Tokenizer::from_json(file.to_string().as_bytes(), None).unwrap())
    }

    fn stream(stops: &[&str]) -> TextStream {
        TextStream::new(tokenizer(), stops, StreamOptions::default()).unwrap()
    }

    /// Everything that comes out of these tokens, and the stop string found.
    fn run(stream: &mut TextStream, tokens: &[i32]) -> (Vec<u8>, Option<usize>) {
        let mut out = Vec::new();
        for &token in tokens {
            let piece = stream.push(token).unwrap();
            assert!(stream.options.raw_bytes || piece.text().is_some());
            out.extend(piece.bytes);
            if let Some(stopped) = piece.stopped {
                return (out, Some(stopped.index));
            }
        }
        let piece = stream.flush();
        out.extend(piece.bytes);
        (out, piece.stopped.map(|s| s.index))
    }

    fn ids(bytes: &[u8]) -> Vec<i32> {
        bytes.iter().map(|&b| i32::from(b)).collect()
    }

    #[test]
    fn every_scalar_comes_out_whole_and_at_once() {
        let mut stream = stream(&[]);
        for c in '\0'..=char::MAX {
            let mut buffer = [0; 4];
            let bytes = c.encode_utf8(&mut buffer).as_bytes();
            for (at, &byte) in bytes.iter().enumerate() {
                let piece = stream.push(i32::from(byte)).unwrap();
                let expected: &[u8] = if at + 1 == bytes.len() { bytes } else { b"" };
                assert_eq!(piece.bytes, expected, "{c:?} byte {at}");
            }
            assert_eq!(stream.held_len(), 0);
        }
    }

    #[test]
    fn spans_name_the_tokens() {
        let mut s = stream(&["cd"]);
        let snowman = ids("⛄".as_bytes());
        assert_eq!(s.push(257).unwrap(), TextPiece { bytes: b"ab".into(), tokens: Some(0..1), stopped: None });
        // "abc" held its c; the snowman frees it with its first byte only when it is whole.
        assert_eq!(s.push(snowman[0]).unwrap(), TextPiece::default());
        assert_eq!(s.push(snowman[1]).unwrap(), TextPiece::default());
        assert_eq!(s.push(snowman[2]).unwrap(), TextPiece { bytes: "c⛄".into(), tokens: Some(0..4), stopped: None });
        assert_eq!(s.push(300).unwrap(), TextPiece::default());
        let end = s.push(258).unwrap();
        assert_eq!(end, TextPiece { bytes: b"b".into(), tokens: Some(5..6), stopped: Some(Stopped { index: 0, tokens: 5..6 }) });
        assert_eq!(s.push(0).unwrap_err().kind(), Kind::InvalidState);
        assert_eq!(s.flush(), TextPiece::default());
        s.reset();
        assert_eq!(s.push(0).unwrap().tokens, Some(0..1));
    }

    #[test]
    fn holds_only_what_may_become_a_stop_string() {
        let mut s = stream(&["</s>", "\n\nUser"]);
        for (byte, out) in [(b'<', ""), (b'/', ""), (b'<', "</"), (b'x', "<x"), (b'\n', ""), (b'\n', ""), (b'\n', "\n")] {
            assert_eq!(s.push(i32::from(byte)).unwrap().text(), Some(out));
        }
        let snapshot = s.clone();
        assert_eq!(s.flush().bytes, b"\n\n");
        // A flush forgets the held text; the snapshot still knows it.
        assert_eq!(run(&mut s, &ids(b"User")), (b"User".to_vec(), None));
        assert_eq!(run(&mut snapshot.clone(), &ids(b"User")), (b"".to_vec(), Some(1)));
    }

    #[test]
    fn raw_streams_give_bytes_at_once() {
        let options = StreamOptions { raw_bytes: true, specials: true };
        let mut s = TextStream::new(tokenizer(), &[b"\xff\xfe"], options).unwrap();
        assert_eq!(s.push(0xE2).unwrap().bytes, [0xE2]);
        assert_eq!(s.push(300).unwrap().bytes, b"<e>");
        assert_eq!(s.push(0xFF).unwrap().bytes, b"");
        assert_eq!(s.push(0xFE).unwrap().stopped.unwrap().tokens, 2..4);
    }

    #[test]
    fn bad_arguments() {
        let new = |stop: &[u8]| TextStream::new(tokenizer(), &[stop], StreamOptions::default()).err().map(|e| e.kind());
        assert_eq!([new(b""), new(b"\xff")], [Some(Kind::InvalidArgument); 2]);
        let mut s = stream(&["x"]);
        for id in [-1, 299, 301, i32::MAX] {
            assert_eq!(s.push(id).unwrap_err().kind(), Kind::InvalidToken);
        }
        assert_eq!(s.push(0).unwrap().tokens, Some(0..1));
    }

    /// The text up to the stop string that is complete first, found by trying every end.
    fn reference(text: &[u8], stops: &[&str]) -> (Vec<u8>, Option<usize>) {
        for end in 1..=text.len() {
            let complete = stops.iter().enumerate().filter(|(_, s)| text[..end].ends_with(s.as_bytes()));
            if let Some((index, stop)) = complete.max_by_key(|(index, s)| (s.len(), std::cmp::Reverse(*index))) {
                return (text[..end - stop.len()].to_vec(), Some(index));
            }
        }
        (text.to_vec(), None)
    }

    proptest! {
        #[test]
        fn any_bytes_in_any_cut_read_like_the_standard_library(bytes in prop::collection::vec(
            prop_oneof![any::<u8>(), Just(0xE2), Just(0x9B), Just(0x84), Just(0xF0), Just(0x9F), Just(0xED), Just(0xA0)], 0..40)) {
            let (out, _) = run(&mut stream(&[]), &ids(&bytes));
            prop_assert_eq!(String::from_utf8(out).unwrap(), String::from_utf8_lossy(&bytes));
        }

        #[test]
        fn stop_strings_like_the_reference(tokens in prop::collection::vec(prop_oneof![97..101i32, 256..259i32], 0..30),
                                           stops in prop::collection::vec("[a-d]{1,5}", 0..4)) {
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let mut s = stream(&stops);
            let text = s.tokenizer.decode(&tokens, true).unwrap();
            prop_assert_eq!(run(&mut s, &tokens), reference(&text, &stops));
        }

        #[test]
        fn what_is_held_is_the_longest_possible_beginning(tokens in prop::collection::vec(97..101i32, 0..20), stop in "[a-d]{2,6}") {
            let mut s = stream(&[&stop]);
            let text = s.tokenizer.decode(&tokens, true).unwrap();
            prop_assume!(reference(&text, &[&stop]).1.is_none());
            for &token in &tokens {
                s.push(token).unwrap();
            }
            let longest = (0..stop.len()).rev().find(|&n| text.ends_with(&stop.as_bytes()[..n])).unwrap();
            prop_assert_eq!(s.held_len(), longest);
        }
    }
}
