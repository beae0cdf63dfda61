//! The safetensors header: names, types, shapes and byte ranges, each checked before anybody slices with it.
//!
//! A file is 8 bytes of header length, a JSON object, and the tensor bytes without gaps. The header is read here rather
//! than by the `safetensors` crate because its errors carry no file, tensor or offset; the tests hold both against each
//! other.

use super::TensorInfo;
use super::source::Source;
use crate::error::{Error, Kind, Result};
use crate::tensor::DType;
use serde::Deserialize;
use serde::de::{MapAccess, Visitor};
use std::collections::HashSet;

/// Largest header the format allows.
pub(super) const MAX_HEADER: u64 = 100_000_000;

/// Header entry of one tensor.
#[derive(Deserialize)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: (u64, u64),
}

/// The tensors of a file in the order of their bytes.
pub(super) fn read(source: &Source) -> Result<Vec<TensorInfo>> {
    let (bytes, label) = (source.bytes(), source.label());
    let size = bytes.len() as u64;
    let corrupt = |at: u64, text: String| Error::new(Kind::CorruptFile, format!("{label}: {text}")).named(label).at(at);
    let Some(length) = bytes.first_chunk::<8>().map(|b| u64::from_le_bytes(*b)) else {
        return Err(corrupt(0, format!("{size} bytes are too few for the header length, which takes 8")));
    };
    if length > MAX_HEADER {
        return Err(corrupt(0, format!("the header length is {length}, at most {MAX_HEADER} are allowed")).sizes(length, MAX_HEADER));
    }
    let start = 8 + length;
    let Some(header) = bytes.get(8..start as usize) else {
        return Err(corrupt(8, format!("the header should end at byte {start}, the file has {size}: it is cut short")).sizes(start, size));
    };
    let header = std::str::from_utf8(header).map_err(|e| {
        let at = 8 + e.valid_up_to() as u64;
        corrupt(at, format!("the header is not valid: no UTF-8 at byte {at}"))
    })?;
    let entries = parse(header).map_err(|e| corrupt(8, format!("the header is not valid: {e}")))?;

    let mut tensors = Vec::new();
    let mut names = HashSet::new();
    for (name, entry) in entries {
        if !names.insert(name.clone()) {
            return Err(corrupt(8, format!("tensor {name:?} appears twice in the header")).named(name));
        }
        tensors.push(place(name, entry, start, size, label)?);
    }
    // Ties are empty tensors, which may stand anywhere between their neighbours.
    tensors.sort_by_key(|t| (t.range.start, t.range.end));
    let mut at = start;
    for tensor in &tensors {
        let begin = tensor.range.start as u64;
        if begin != at {
            let what = if begin < at { "overlaps the tensor before it" } else { "leaves a gap after the tensor before it" };
            let text = format!("tensor {:?} {what}: it starts at byte {begin}, expected {at}", tensor.name);
            return Err(corrupt(begin, text).named(&tensor.name));
        }
        at = tensor.range.end as u64;
    }
    if at != size {
        return Err(corrupt(at, format!("the last tensor ends at byte {at}, the file has {size}")).sizes(at, size));
    }
    Ok(tensors)
}

/// Checks one entry against its own shape and the file.
fn place(name: String, entry: Entry, start: u64, size: u64, label: &str) -> Result<TensorInfo> {
    let fail = |kind: Kind, text: String| Error::new(kind, format!("{label}: tensor {name:?}: {text}")).named(&name);
    let Some(dtype) = dtype(&entry.dtype) else {
        return Err(fail(Kind::Unsupported, format!("element type {:?} is not read by this build", entry.dtype)));
    };
    let (begin, end) = entry.data_offsets;
    if begin > end {
        return Err(fail(Kind::CorruptFile, format!("data_offsets [{begin}, {end}] run backwards")));
    }
    let last = start.checked_add(end).filter(|&last| last <= size);
    let Some(last) = last else {
        let text =
            format!("its bytes should end at byte {} of the file, which has {size}: it is cut short", u128::from(start) + u128::from(end));
        return Err(fail(Kind::CorruptFile, text).at(start.saturating_add(begin)).sizes(start.saturating_add(end), size));
    };
    let shape: Option<Vec<usize>> = entry.shape.iter().map(|&d| usize::try_from(d).ok()).collect();
    let wanted = shape.as_ref().and_then(|shape| {
        let elements = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d))?;
        dtype.bytes(shape.last().copied().unwrap_or(1))?;
        dtype.bytes(elements)
    });
    let (Some(shape), Some(wanted)) = (shape, wanted) else {
        return Err(fail(Kind::CorruptFile, format!("shape {:?} of {dtype} is no whole number of bytes or too large", entry.shape)));
    };
    if wanted as u64 != end - begin {
        let text = format!("{dtype} {shape:?} takes {wanted} bytes, data_offsets [{begin}, {end}] hold {}", end - begin);
        return Err(fail(Kind::CorruptFile, text).at(start + begin).sizes(wanted as u64, end - begin));
    }
    // Both fit in usize, since they are at most the length of a slice.
    let range = (start + begin) as usize..last as usize;
    Ok(TensorInfo { name, dtype, shape, range })
}

fn dtype(name: &str) -> Option<DType> {
    use DType::*;
    const PLAIN: [DType; 14] = [F64, F32, F16, BF16, I64, I32, I16, I8, U8, Bool, F8E4M3, F8E5M2, F8E8M0, F4];
    PLAIN.into_iter().find(|t| t.name() == name)
}

/// The header's entries in file order, duplicates kept so that they can be refused. `__metadata__` is left out.
fn parse(header: &str) -> serde_json::Result<Vec<(String, Entry)>> {
    struct Entries;
    impl<'de> Visitor<'de> for Entries {
        type Value = Vec<(String, Entry)>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("an object with one entry per tensor")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut entries = Vec::new();
            while let Some(name) = map.next_key::<String>()? {
                if name == "__metadata__" {
                    map.next_value::<serde::de::IgnoredAny>()?;
                } else {
                    entries.push((name, map.next_value()?));
                }
            }
            Ok(entries)
        }
    }
    let mut parser = serde_json::Deserializer::from_str(header);
    let entries = serde::de::Deserializer::deserialize_map(&mut parser, Entries)?;
    parser.end()?;
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(header: &str, data: usize) -> Vec<u8> {
        [&(header.len() as u64).to_le_bytes(), header.as_bytes(), &vec![0; data]].concat()
    }

    fn read_bytes(bytes: Vec<u8>) -> Result<Vec<TensorInfo>> {
        read(&Source::from_bytes("x.safetensors", bytes))
    }

    #[test]
    fn entries_come_back_in_the_order_of_their_bytes() {
        let header = r#"{"__metadata__":{"format":"pt"},"b":{"dtype":"F32","shape":[2,1],"data_offsets":[2,10]},
            "a":{"dtype":"BF16","shape":[],"data_offsets":[0,2]},"e":{"dtype":"I8","shape":[0,5],"data_offsets":[2,2]}}"#;
        let tensors = read_bytes(file(header, 10)).unwrap();
        let start = 8 + header.len();
        let places: Vec<_> = tensors.iter().map(|t| (t.name.as_str(), t.range.start - start, t.range.len())).collect();
        assert_eq!(places, [("a", 0, 2), ("e", 2, 0), ("b", 2, 8)]);
        assert_eq!((tensors[2].dtype, tensors[2].shape.as_slice()), (DType::F32, &[2, 1][..]));
        assert!(read_bytes(file("{}", 0)).unwrap().is_empty());
    }

    #[test]
    fn each_fault_has_its_error() {
        let one = |entry: &str, data| file(&format!("{{\"w\":{entry}}}"), data);
        let two = |a: &str, b: &str, data| {
            let tensor = |offsets| format!(r#"{{"dtype":"I8","shape":[4],"data_offsets":{offsets}}}"#);
            file(&format!(r#"{{"a":{},"b":{}}}"#, tensor(a), tensor(b)), data)
        };
        for (what, bytes, kind, text) in [
            ("empty", vec![], Kind::CorruptFile, "too few"),
            ("seven bytes", vec![0; 7], Kind::CorruptFile, "too few"),
            ("header beyond the limit", vec![0xFF; 16], Kind::CorruptFile, "at most 100000000"),
            ("header beyond the file", file("{}", 0)[..9].to_vec(), Kind::CorruptFile, "cut short"),
            ("header that is no JSON", file("{{", 0), Kind::CorruptFile, "not valid"),
            ("text after the header", file("{} x", 0), Kind::CorruptFile, "not valid"),
            ("header that is a list", file("[]", 0), Kind::CorruptFile, "not valid"),
            ("missing field", one(r#"{"dtype":"I8","shape":[1]}"#, 1), Kind::CorruptFile, "data_offsets"),
            ("negative dimension", one(r#"{"dtype":"I8","shape":[-1],"data_offsets":[0,1]}"#, 1), Kind::CorruptFile, "not valid"),
            (
                "huge shape",
                one(r#"{"dtype":"F32","shape":[9999999999,9999999999],"data_offsets":[0,4]}"#, 4),
                Kind::CorruptFile,
                "too large",
            ),
            ("unknown type", one(r#"{"dtype":"U32","shape":[1],"data_offsets":[0,4]}"#, 4), Kind::Unsupported, "\"U32\""),
            ("odd half bytes", one(r#"{"dtype":"F4","shape":[2,3],"data_offsets":[0,3]}"#, 3), Kind::CorruptFile, "whole number"),
            ("backwards", one(r#"{"dtype":"I8","shape":[1],"data_offsets":[1,0]}"#, 1), Kind::CorruptFile, "backwards"),
            ("wrong size", one(r#"{"dtype":"F32","shape":[2],"data_offsets":[0,4]}"#, 4), Kind::CorruptFile, "takes 8 bytes"),
            ("cut short", one(r#"{"dtype":"F32","shape":[2],"data_offsets":[0,8]}"#, 7), Kind::CorruptFile, "cut short"),
            ("overflow", one(r#"{"dtype":"I8","shape":[1],"data_offsets":[0,18446744073709551615]}"#, 1), Kind::CorruptFile, "cut short"),
            ("bytes left over", one(r#"{"dtype":"I8","shape":[1],"data_offsets":[0,1]}"#, 2), Kind::CorruptFile, "the last tensor ends"),
            ("overlap", two("[0,4]", "[3,7]", 7), Kind::CorruptFile, "overlaps"),
            ("gap", two("[0,4]", "[5,9]", 9), Kind::CorruptFile, "gap"),
            (
                "same name",
                file(r#"{"a":{"dtype":"I8","shape":[0],"data_offsets":[0,0]},"a":{"dtype":"I8","shape":[0],"data_offsets":[0,0]}}"#, 0),
                Kind::CorruptFile,
                "twice",
            ),
        ] {
            let error = read_bytes(bytes).expect_err(what);
            assert_eq!(error.kind(), kind, "{what}: {error}");
            assert!(
                error.message().contains(text) && error.message().starts_with("x.safetensors: "),
                "{what}: {error} should say {text:?}"
            );
        }
    }

    #[test]
    fn every_cut_is_refused() {
        let whole = file(r#"{"w":{"dtype":"F32","shape":[3],"data_offsets":[0,12]}}"#, 12);
        for cut in 0..whole.len() {
            assert_eq!(read_bytes(whole[..cut].to_vec()).expect_err("cut").kind(), Kind::CorruptFile, "cut at {cut}");
        }
    }

    /// What we accept, the `safetensors` crate accepts and reads the same; what it accepts, we refuse only for an element
    /// type or a row of half bytes that this crate does not carry.
    #[test]
    fn changed_headers_are_judged_as_the_safetensors_crate_does() {
        let header = r#"{"__metadata__":{"a":"b"},"a":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"b":{"dtype":"BF16","shape":[4],"data_offsets":[24,32]}}"#;
        let whole = file(header, 32);
        let mut state = 0x2545_F491_4F6C_DD1Du64;
        let mut random = |n: usize| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 20) as usize % n
        };
        let (mut accepted, mut refused) = (0, 0);
        for _ in 0..20_000 {
            let mut bytes = whole.clone();
            for _ in 0..1 + random(2) {
                let at = random(8 + header.len());
                bytes[at] = if random(4) == 0 { random(256) as u8 } else { b"0123456789,[]{}\"FBI"[random(19)] };
            }
            let theirs = safetensors::SafeTensors::deserialize(&bytes);
            match (read_bytes(bytes.clone()), theirs) {
                (Ok(ours), Ok(theirs)) => {
                    assert_eq!(ours.len(), theirs.len());
                    for t in &ours {
                        let view = theirs.tensor(&t.name).expect("same names");
                        assert_eq!((t.shape.as_slice(), &bytes[t.range.clone()]), (view.shape(), view.data()));
                    }
                    accepted += 1;
                }
                (Err(_), Err(_)) => refused += 1,
                (Err(e), Ok(_)) if e.kind() == Kind::Unsupported || e.message().contains("appears twice") => {}
                (Err(e), Ok(_)) => panic!("only we refuse {:?}: {e}", String::from_utf8_lossy(&bytes)),
                (Ok(_), Err(e)) => panic!("only we accept {:?}: {e}", String::from_utf8_lossy(&bytes)),
            }
        }
        assert!(accepted > 100 && refused > 100, "{accepted} accepted, {refused} refused");
    }
}
