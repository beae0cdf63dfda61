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
fn parse(header: &[u8]) -> serde_json::Result<Vec<(String, Entry)>> {
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
    let mut parser = serde_json::Deserializer::from_slice(header);
    let entries = serde::de::Deserializer::deserialize_map(&mut parser, Entries)?;
    parser.end()?;
    Ok(entries)
}
