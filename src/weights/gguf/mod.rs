//! GGUF files: metadata by key and tensors by name, as the file holds them.
//!
//! Metadata values stay byte ranges of the file until somebody asks; a vocabulary of 260,000 strings costs one walk over
//! their lengths at open. Getters say what they expected and what they found. What an architecture's keys and names mean
//! is the dialects' business.

mod parse;
mod value;

pub use value::{Value, ValueType};

use super::TensorInfo;
use super::source::Source;
use crate::error::{Error, Kind, Result, vec_with_capacity};
use std::collections::HashMap;
use std::sync::Arc;

/// An open GGUF file with a checked header.
pub struct Gguf {
    source: Arc<Source>,
    version: u32,
    metadata: Vec<(String, Value)>,
    by_key: HashMap<String, usize>,
    tensors: Vec<TensorInfo>,
}

impl Gguf {
    /// Reads and checks the header: metadata, tensor infos, and that every tensor lies inside the file.
    pub fn read(source: Arc<Source>) -> Result<Gguf> {
        let parsed = parse::parse(source.bytes(), source.label())?;
        let by_key = parsed.metadata.iter().enumerate().map(|(i, (key, _))| (key.clone(), i)).collect();
        Ok(Gguf { source, version: parsed.version, metadata: parsed.metadata, by_key, tensors: parsed.tensors })
    }

    /// Version of the container, 2 or 3.
    pub fn version(&self) -> u32 {
        self.version
    }

    /// The file.
    pub fn source(&self) -> &Arc<Source> {
        &self.source
    }

    /// Tensors in the order of the header, under the file's names.
    pub fn tensors(&self) -> &[TensorInfo] {
        &self.tensors
    }

    /// The byte of the first tensor; where there is none, a number beyond every file.
    pub fn data_start(&self) -> usize {
        self.tensors.iter().map(|t| t.range.start).min().unwrap_or(usize::MAX)
    }

    /// A tensor by the file's name.
    pub fn tensor(&self, name: &str) -> Option<&TensorInfo> {
        self.tensors.iter().find(|t| t.name == name)
    }

    /// Keys and values in the order of the header.
    pub fn metadata(&self) -> impl Iterator<Item = (&str, &Value)> {
        self.metadata.iter().map(|(key, value)| (key.as_str(), value))
    }

    /// The raw value of a key.
    pub fn value(&self, key: &str) -> Option<&Value> {
        self.by_key.get(key).map(|&i| &self.metadata[i].1)
    }

    /// A count or id: any integer type that is not negative.
    pub fn u64(&self, key: &str) -> Result<Option<u64>> {
        self.get(key, "an integer that is not negative", |v, bytes| v.integer(bytes).and_then(|x| u64::try_from(x).ok()))
    }

    /// A number: f32 or f64. An f32 becomes the shortest decimal that it was written from (1e-6, not 9.99999997e-7).
    pub fn f64(&self, key: &str) -> Result<Option<f64>> {
        self.get(key, "f32 or f64", Value::float)
    }

    /// A flag.
    pub fn bool(&self, key: &str) -> Result<Option<bool>> {
        self.get(key, "bool", Value::bool)
    }

    /// A text.
    pub fn str(&self, key: &str) -> Result<Option<&str>> {
        self.get(key, "string", Value::str)
    }

    /// An array of strings, as bytes: pieces of a vocabulary need not be UTF-8.
    pub fn strings(&self, key: &str) -> Result<Option<value::Strings<'_>>> {
        self.get(key, "array of strings", Value::strings)
    }

    /// An array of f32.
    pub fn f32_array(&self, key: &str) -> Result<Option<Vec<f32>>> {
        self.array(key, "array of f32", ValueType::F32, |b, _| match b {
            [a, b, c, d] => f32::from_le_bytes([*a, *b, *c, *d]),
            _ => f32::NAN,
        })
    }

    /// An array of any integer type.
    pub fn i64_array(&self, key: &str) -> Result<Option<Vec<i64>>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let element = value.element_type().filter(|t| t.is_integer());
        let Some(element) = element else { return Err(self.wrong_type(key, value, "array of integers")) };
        self.array(key, "array of integers", element, |b, t| t.integer(b).unwrap_or(0) as i64)
    }

    /// An array of flags.
    pub fn bool_array(&self, key: &str) -> Result<Option<Vec<bool>>> {
        self.array(key, "array of bool", ValueType::Bool, |b, _| b[0] != 0)
    }

    fn array<T>(&self, key: &str, expected: &str, element: ValueType, read: impl Fn(&[u8], ValueType) -> T) -> Result<Option<Vec<T>>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        let size = element.size().expect("arrays read here hold numbers");
        if value.element_type() != Some(element) {
            return Err(self.wrong_type(key, value, expected));
        }
        let bytes = &self.source.bytes()[value.range()];
        let mut out = vec_with_capacity(bytes.len() / size, key)?;
        out.extend(bytes.chunks_exact(size).map(|b| read(b, element)));
        Ok(Some(out))
    }

    fn get<'a, T>(&'a self, key: &str, expected: &str, read: impl Fn(&Value, &'a [u8]) -> Option<T>) -> Result<Option<T>> {
        let Some(value) = self.value(key) else { return Ok(None) };
        match read(value, self.source.bytes()) {
            Some(found) => Ok(Some(found)),
            None => Err(self.wrong_type(key, value, expected)),
        }
    }

    fn wrong_type(&self, key: &str, value: &Value, expected: &str) -> Error {
        let found = value.describe(self.source.bytes());
        let text = format!("{}: {key} at byte {} is {found}, expected {expected}", self.source.label(), value.at());
        Error::new(Kind::CorruptFile, text).named(key).at(value.at() as u64)
    }

    /// The error for a key that must be there.
    pub fn missing(&self, key: &str) -> Error {
        Error::new(Kind::CorruptFile, format!("{}: the key {key} is missing", self.source.label())).named(key)
    }
}
