//! Reading a GGUF header, versions 2 and 3, little-endian.
//!
//! Nothing is believed: counts are only used as loop bounds (each turn consumes bytes, so a lying count ends at the end
//! of the file), lengths are compared with what is left, and array nesting has a limit because each level is a recursion.

use super::value::{Value, ValueType};
use crate::error::{Error, Kind, Result};
use crate::tensor::DType;
use crate::weights::TensorInfo;
use std::collections::HashSet;

pub(super) struct Parsed {
    pub version: u32,
    pub metadata: Vec<(String, Value)>,
    pub tensors: Vec<TensorInfo>,
}

const DEFAULT_ALIGNMENT: u64 = 32;
/// Far above any published key or tensor name.
const MAX_NAME: usize = 65_535;
/// Arrays in arrays; no known file has more than two levels.
const MAX_DEPTH: usize = 8;
/// ggml's own limit.
const MAX_DIMENSIONS: u32 = 4;

pub(super) fn parse(bytes: &[u8], label: &str) -> Result<Parsed> {
    let mut r = Reader { bytes, at: 0, label };
    if r.take(4, "the magic")? != b"GGUF" {
        return Err(Error::new(Kind::NotAModel, format!("{label}: does not start with GGUF")).named(label).at(0));
    }
    let version = r.u32("the version")?;
    if version.swap_bytes() <= 3 && version != 0 {
        return Err(r.unsupported(4, "the file is big-endian; only little-endian GGUF is read".into()));
    }
    if !(2..=3).contains(&version) {
        return Err(r.unsupported(4, format!("GGUF version {version}; 2 and 3 are read")));
    }
    let tensor_count = r.u64("the tensor count")?;
    let key_count = r.u64("the key count")?;
    let metadata = metadata(&mut r, key_count)?;
    let alignment = alignment(&r, &metadata)?;
    let pending = tensor_infos(&mut r, tensor_count)?;
    let tensors = place(&r, pending, alignment)?;
    Ok(Parsed { version, metadata, tensors })
}

fn metadata(r: &mut Reader<'_>, count: u64) -> Result<Vec<(String, Value)>> {
    let mut metadata = Vec::new();
    let mut seen = HashSet::new();
    for i in 0..count {
        let at = r.at;
        let key = r.name(&format!("key {i} of {count}"))?;
        if !seen.insert(key.clone()) {
            return Err(r.corrupt(at, format!("the key {key:?} appears twice")).named(key));
        }
        let value = r.value().map_err(|e| e.context(format_args!("value of {key:?}")))?;
        metadata.push((key, value));
    }
    Ok(metadata)
}

fn alignment(r: &Reader<'_>, metadata: &[(String, Value)]) -> Result<u64> {
    const KEY: &str = "general.alignment";
    let Some((_, value)) = metadata.iter().find(|(key, _)| key == KEY) else { return Ok(DEFAULT_ALIGNMENT) };
    match value.integer(r.bytes).and_then(|x| u64::try_from(x).ok()) {
        Some(x) if x.is_power_of_two() && x <= 1 << 30 => Ok(x),
        _ => Err(r.corrupt(value.at, format!("{KEY} is {}, expected a power of two", value.describe(r.bytes))).named(KEY)),
    }
}

/// A tensor info whose place in the file is not checked yet.
struct Pending {
    at: usize,
    name: String,
    dtype: DType,
    shape: Vec<usize>,
    bytes: u64,
    offset: u64,
}

fn tensor_infos(r: &mut Reader<'_>, count: u64) -> Result<Vec<Pending>> {
    let mut infos = Vec::new();
    let mut seen = HashSet::new();
    for i in 0..count {
        let at = r.at;
        let name = r.name(&format!("name of tensor {i} of {count}"))?;
        if !seen.insert(name.clone()) {
            return Err(r.corrupt(at, format!("the tensor {name:?} appears twice")).named(name));
        }
        infos.push(tensor_info(r, at, &name).map_err(|e| e.context(format_args!("tensor {name:?}")).named(&name))?);
    }
    Ok(infos)
}

fn tensor_info(r: &mut Reader<'_>, at: usize, name: &str) -> Result<Pending> {
    let dimensions_at = r.at;
    let dimensions = r.u32("the number of dimensions")?;
    if dimensions > MAX_DIMENSIONS {
        return Err(r.corrupt(dimensions_at, format!("{dimensions} dimensions, at most {MAX_DIMENSIONS} are possible")));
    }
    // Files count from the innermost dimension.
    let mut shape = Vec::new();
    for _ in 0..dimensions {
        let at = r.at;
        let d = r.u64("a dimension")?;
        shape.insert(0, usize::try_from(d).map_err(|_| r.corrupt(at, format!("a dimension is {d}")))?);
    }
    let type_at = r.at;
    let dtype = dtype(r.u32("the type")?)
        .map_err(|(kind, text)| Error::new(kind, format!("{}: at byte {type_at}: {text}", r.label)).at(type_at as u64))?;
    let offset = r.u64("the offset")?;
    let cols = shape.last().copied().unwrap_or(1);
    let elements = shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
    let bytes = elements.and_then(|n| dtype.bytes(cols).and(dtype.bytes(n)));
    let Some(bytes) = bytes else {
        let text = format!("{dtype} {shape:?} is too large or its rows are no whole number of blocks of {}", dtype.block_len());
        return Err(r.corrupt(dimensions_at, text));
    };
    Ok(Pending { at, name: name.to_owned(), dtype, shape, bytes: bytes as u64, offset })
}

/// Turns offsets into ranges of the file; they must be aligned, inside, and apart from each other.
fn place(r: &Reader<'_>, pending: Vec<Pending>, alignment: u64) -> Result<Vec<TensorInfo>> {
    let size = r.bytes.len() as u64;
    let base = (r.at as u64).next_multiple_of(alignment);
    let mut tensors = Vec::new();
    for p in pending {
        let fail = |text: String| r.corrupt(p.at, format!("tensor {:?}: {text}", p.name)).named(&p.name);
        if !p.offset.is_multiple_of(alignment) {
            return Err(fail(format!("its offset {} is not a multiple of the alignment {alignment}", p.offset)));
        }
        let begin = base.checked_add(p.offset);
        let end = begin.and_then(|begin| begin.checked_add(p.bytes)).filter(|&end| end <= size);
        let (Some(begin), Some(end)) = (begin, end) else {
            let wanted = base.saturating_add(p.offset).saturating_add(p.bytes);
            return Err(
                fail(format!("its bytes should end at byte {wanted} of the file, which has {size}: it is cut short")).sizes(wanted, size)
            );
        };
        // Both are at most the length of a slice.
        tensors.push(TensorInfo { name: p.name, dtype: p.dtype, shape: p.shape, range: begin as usize..end as usize });
    }
    let mut order: Vec<&TensorInfo> = tensors.iter().filter(|t| !t.range.is_empty()).collect();
    order.sort_by_key(|t| t.range.start);
    for pair in order.windows(2) {
        if pair[1].range.start < pair[0].range.end {
            let text = format!("tensors {:?} and {:?} overlap at byte {}", pair[0].name, pair[1].name, pair[1].range.start);
            return Err(r.corrupt(pair[1].range.start, text).named(&pair[1].name));
        }
    }
    Ok(tensors)
}

/// Element type by ggml's number.
fn dtype(id: u32) -> Result<DType, (Kind, String)> {
    use DType::*;
    Ok(match id {
        0 => F32,
        1 => F16,
        2 => Q4_0,
        3 => Q4_1,
        6 => Q5_0,
        7 => Q5_1,
        8 => Q8_0,
        10 => Q2K,
        11 => Q3K,
        12 => Q4K,
        13 => Q5K,
        14 => Q6K,
        20 => IQ4NL,
        24 => I8,
        25 => I16,
        26 => I32,
        27 => I64,
        28 => F64,
        30 => BF16,
        39 => MXFP4,
        _ => {
            const OTHERS: [(u32, &str); 17] = [
                (9, "Q8_1"),
                (15, "Q8_K"),
                (16, "IQ2_XXS"),
                (17, "IQ2_XS"),
                (18, "IQ3_XXS"),
                (19, "IQ1_S"),
                (21, "IQ3_S"),
                (22, "IQ2_S"),
                (23, "IQ4_XS"),
                (29, "IQ1_M"),
                (34, "TQ1_0"),
                (35, "TQ2_0"),
                (40, "NVFP4"),
                (41, "Q1_0"),
                (4, "Q4_2 (withdrawn)"),
                (5, "Q4_3 (withdrawn)"),
                (31, "Q4_0_4_4 (withdrawn)"),
            ];
            return Err(match OTHERS.iter().find(|(other, _)| *other == id) {
                Some((_, name)) => (Kind::Unsupported, format!("element type {name} is not read by this build")),
                None => (Kind::CorruptFile, format!("{id} is not a known element type")),
            });
        }
    })
}

/// A position in the file that only moves forward, and only inside it.
struct Reader<'a> {
    bytes: &'a [u8],
    at: usize,
    label: &'a str,
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize, what: &str) -> Result<&'a [u8]> {
        let left = self.bytes.len() - self.at;
        if n > left {
            let text = format!("{what} takes {n} bytes, the file ends after {left}: it is cut short");
            return Err(self.corrupt(self.at, text).sizes(n as u64, left as u64));
        }
        let taken = &self.bytes[self.at..self.at + n];
        self.at += n;
        Ok(taken)
    }

    fn u32(&mut self, what: &str) -> Result<u32> {
        let b = self.take(4, what)?;
        Ok(u32::from_le_bytes([b[0], b[1], b[2], b[3]]))
    }

    fn u64(&mut self, what: &str) -> Result<u64> {
        let b = self.take(8, what)?;
        Ok(u64::from_le_bytes([b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]))
    }

    /// A length and that many bytes; gives their range.
    fn string(&mut self, what: &str) -> Result<std::ops::Range<usize>> {
        let length = self.u64(what)?;
        let start = self.at;
        self.take(usize::try_from(length).unwrap_or(usize::MAX), what)?;
        Ok(start..self.at)
    }

    /// A key or tensor name: UTF-8, neither empty nor absurdly long.
    fn name(&mut self, what: &str) -> Result<String> {
        let at = self.at;
        let range = self.string(what)?;
        if range.is_empty() || range.len() > MAX_NAME {
            return Err(self.corrupt(at, format!("{what} has {} bytes, expected 1 to {MAX_NAME}", range.len())));
        }
        match std::str::from_utf8(&self.bytes[range]) {
            Ok(name) => Ok(name.to_owned()),
            Err(_) => Err(self.corrupt(at, format!("{what} is not UTF-8"))),
        }
    }

    fn value_type(&mut self) -> Result<ValueType> {
        let at = self.at;
        let id = self.u32("the value's type")?;
        ValueType::from_id(id).ok_or_else(|| self.corrupt(at, format!("{id} is not a known value type")))
    }

    fn value(&mut self) -> Result<Value> {
        let at = self.at;
        let kind = self.value_type()?;
        if kind == ValueType::Array {
            let (element, count) = (self.value_type()?, self.u64("the array's length")?);
            let start = self.at;
            self.elements(element, count, 1)?;
            // Each element takes a byte at least, so a count that passed fits.
            return Ok(Value { at, kind, elements: Some((element, count as usize)), range: start..self.at });
        }
        let range = match kind.size() {
            Some(size) => {
                let start = self.at;
                self.take(size, "the value")?;
                start..self.at
            }
            None => self.string("the string")?,
        };
        if kind == ValueType::String && std::str::from_utf8(&self.bytes[range.clone()]).is_err() {
            return Err(self.corrupt(range.start, "the string is not UTF-8".into()));
        }
        if kind == ValueType::Bool && self.bytes[range.start] > 1 {
            return Err(self.corrupt(range.start, format!("the bool is {}, expected 0 or 1", self.bytes[range.start])));
        }
        Ok(Value { at, kind, elements: None, range })
    }

    /// Steps over the elements of an array.
    fn elements(&mut self, element: ValueType, count: u64, depth: usize) -> Result<()> {
        if let Some(size) = element.size() {
            let bytes = usize::try_from(count).ok().and_then(|n| n.checked_mul(size)).unwrap_or(usize::MAX);
            self.take(bytes, &format!("an array of {count} {}", element.name()))?;
            return Ok(());
        }
        for _ in 0..count {
            if element == ValueType::String {
                self.string("a string of the array")?;
                continue;
            }
            if depth == MAX_DEPTH {
                return Err(self.corrupt(self.at, format!("arrays are nested more than {MAX_DEPTH} deep")));
            }
            let (inner, inner_count) = (self.value_type()?, self.u64("the inner array's length")?);
            self.elements(inner, inner_count, depth + 1)?;
        }
        Ok(())
    }

    fn corrupt(&self, at: usize, text: String) -> Error {
        Error::new(Kind::CorruptFile, format!("{}: at byte {at}: {text}", self.label)).named(self.label).at(at as u64)
    }

    fn unsupported(&self, at: usize, text: String) -> Error {
        Error::new(Kind::Unsupported, format!("{}: at byte {at}: {text}", self.label)).named(self.label).at(at as u64)
    }
}
