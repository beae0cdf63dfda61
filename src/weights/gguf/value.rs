//! Metadata values of a GGUF file: a type and the bytes it covers.

use std::ops::Range;

/// Type ids of metadata values, as the format numbers them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum ValueType {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    F32,
    Bool,
    String,
    Array,
    U64,
    I64,
    F64,
}

impl ValueType {
    const ALL: [ValueType; 13] = {
        use ValueType::*;
        [U8, I8, U16, I16, U32, I32, F32, Bool, String, Array, U64, I64, F64]
    };

    /// The type with this number.
    pub fn from_id(id: u32) -> Option<ValueType> {
        Self::ALL.get(id as usize).copied()
    }

    /// Bytes of a value; `None` where it varies.
    pub fn size(self) -> Option<usize> {
        use ValueType::*;
        match self {
            U8 | I8 | Bool => Some(1),
            U16 | I16 => Some(2),
            U32 | I32 | F32 => Some(4),
            U64 | I64 | F64 => Some(8),
            String | Array => None,
        }
    }

    /// Whether it counts.
    pub fn is_integer(self) -> bool {
        use ValueType::*;
        matches!(self, U8 | I8 | U16 | I16 | U32 | I32 | U64 | I64)
    }

    /// Name for messages.
    pub fn name(self) -> &'static str {
        ["u8", "i8", "u16", "i16", "u32", "i32", "f32", "bool", "string", "array", "u64", "i64", "f64"][self as usize]
    }

    /// An integer of this type from exactly its bytes; i128 holds them all.
    pub(super) fn integer(self, bytes: &[u8]) -> Option<i128> {
        if !self.is_integer() || bytes.len() != self.size()? {
            return None;
        }
        let unsigned = bytes.iter().rev().fold(0i128, |x, &b| x << 8 | i128::from(b));
        let bits = 8 * bytes.len();
        let signed = matches!(self, ValueType::I8 | ValueType::I16 | ValueType::I32 | ValueType::I64);
        Some(if signed && unsigned >> (bits - 1) == 1 { unsigned - (1 << bits) } else { unsigned })
    }
}

/// A value: its type and where its bytes lie. The parser has checked that they lie inside the file, that strings are
/// UTF-8, that flags are 0 or 1 and that the elements of arrays fill their range.
#[derive(Clone, Debug)]
pub struct Value {
    pub(super) at: usize,
    pub(super) kind: ValueType,
    /// Element type and count of an array.
    pub(super) elements: Option<(ValueType, usize)>,
    pub(super) range: Range<usize>,
}

impl Value {
    /// Byte offset of the value's type in the file.
    pub fn at(&self) -> usize {
        self.at
    }

    /// The type.
    pub fn kind(&self) -> ValueType {
        self.kind
    }

    /// Element type of an array.
    pub fn element_type(&self) -> Option<ValueType> {
        self.elements.map(|(kind, _)| kind)
    }

    /// Number of elements of an array.
    pub fn element_count(&self) -> Option<usize> {
        self.elements.map(|(_, len)| len)
    }

    pub(super) fn range(&self) -> Range<usize> {
        self.range.clone()
    }

    pub(super) fn integer(&self, file: &[u8]) -> Option<i128> {
        self.kind.integer(&file[self.range()])
    }

    pub(super) fn float(&self, file: &[u8]) -> Option<f64> {
        let bytes = &file[self.range()];
        match self.kind {
            // Printing gives the shortest decimal that reads back as this f32.
            ValueType::F32 => f32::from_le_bytes(bytes.try_into().ok()?).to_string().parse().ok(),
            ValueType::F64 => Some(f64::from_le_bytes(bytes.try_into().ok()?)),
            _ => None,
        }
    }

    pub(super) fn bool(&self, file: &[u8]) -> Option<bool> {
        (self.kind == ValueType::Bool).then(|| file[self.range.start] != 0)
    }

    pub(super) fn str<'a>(&self, file: &'a [u8]) -> Option<&'a str> {
        (self.kind == ValueType::String).then(|| std::str::from_utf8(&file[self.range()]).ok())?
    }

    pub(super) fn strings<'a>(&self, file: &'a [u8]) -> Option<Strings<'a>> {
        match self.elements {
            Some((ValueType::String, left)) => Some(Strings { bytes: &file[self.range()], left }),
            _ => None,
        }
    }

    /// Type, and the value itself where it is short enough for a message.
    pub(super) fn describe(&self, file: &[u8]) -> String {
        match (self.kind, self.elements) {
            (_, Some((element, len))) => format!("array of {len} {}", element.name()),
            (ValueType::String, _) => format!("string of {} bytes", self.range.len()),
            (kind, _) => match (self.integer(file), self.float(file), self.bool(file)) {
                (Some(x), _, _) => format!("{} {x}", kind.name()),
                (_, Some(x), _) => format!("{} {x}", kind.name()),
                (_, _, x) => format!("{} {}", kind.name(), x.unwrap_or_default()),
            },
        }
    }
}

/// Walks an array of strings.
#[derive(Clone)]
pub struct Strings<'a> {
    bytes: &'a [u8],
    left: usize,
}

impl<'a> Iterator for Strings<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        self.left = self.left.checked_sub(1)?;
        // The parser walked the same lengths, so neither split can fail; ending early would be the answer if it did.
        let (length, rest) = self.bytes.split_first_chunk::<8>()?;
        let (string, rest) = rest.split_at_checked(u64::from_le_bytes(*length) as usize)?;
        self.bytes = rest;
        Some(string)
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        (self.left, Some(self.left))
    }
}

impl ExactSizeIterator for Strings<'_> {}
