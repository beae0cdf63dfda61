//! Typed reading of `config.json`: each miss names the key, what was found and what was expected.

use crate::error::{Error, Kind, Result};
use crate::{bail, ensure};
use serde_json::Value;

/// A config, or a nested object of one (`text_config`, `rope_scaling`).
#[derive(Clone, Copy, Debug)]
pub struct Config<'a> {
    value: &'a Value,
}

/// Largest number taken from a config under a key. Far above any published model's, and so small that products of a few of them
/// can be counted and that lists with an entry for each layer or expert stay small: a config is data from elsewhere.
fn most(key: &str) -> u64 {
    let has = |words: &[&str]| words.iter().any(|word| key.contains(word));
    if key == "vocab_size" {
        1 << 24
    } else if has(&["vocab", "position", "window", "context", "length", "token"]) {
        1 << 31
    } else if has(&["layers"]) {
        1 << 12
    } else if has(&["heads", "experts", "head_dim", "rope_dim", "rotary_dim"]) {
        1 << 16
    } else {
        1 << 24
    }
}

impl<'a> Config<'a> {
    /// Wraps a JSON object.
    pub fn new(value: &'a Value) -> Result<Config<'a>> {
        ensure!(value.is_object(), CorruptFile, "config.json: found {}, expected an object", kind_of(value));
        Ok(Config { value })
    }

    /// The value of a key; `null` counts as absent.
    pub fn get(&self, key: &str) -> Option<&'a Value> {
        self.value.get(key).filter(|v| !v.is_null())
    }

    /// All keys and values.
    pub fn entries(&self) -> impl Iterator<Item = (&'a String, &'a Value)> {
        self.value.as_object().into_iter().flatten()
    }

    fn wrong(&self, key: &str, expected: &str) -> Error {
        let found = self.get(key).map_or_else(|| "nothing".into(), |v| format!("{} ({})", kind_of(v), brief(v)));
        Error::new(
            if self.get(key).is_some() { Kind::CorruptFile } else { Kind::Mismatch },
            format!("config.json: {key}: found {found}, expected {expected}"),
        )
        .named(key)
    }

    /// A count or dimension that must be there: 1 to what is possible under this key.
    pub fn usize(&self, key: &str) -> Result<usize> {
        match self.get(key).and_then(whole) {
            Some(n) if (1..=most(key)).contains(&n) => Ok(n as usize),
            _ => Err(self.wrong(key, &format!("a whole number from 1 to {}", most(key)))),
        }
    }

    /// A count or dimension that may be absent.
    pub fn usize_or(&self, key: &str, absent: usize) -> Result<usize> {
        if self.get(key).is_none() { Ok(absent) } else { self.usize(key) }
    }

    /// A count or dimension that may be absent or 0, both meaning none.
    pub fn count(&self, key: &str) -> Result<Option<usize>> {
        match self.get(key) {
            None => Ok(None),
            Some(v) if whole(v) == Some(0) => Ok(None),
            Some(_) => self.usize(key).map(Some),
        }
    }

    /// A number that must be there.
    pub fn f64(&self, key: &str) -> Result<f64> {
        self.get(key).and_then(Value::as_f64).filter(|v| v.abs() <= 1e30).ok_or_else(|| self.wrong(key, "a number up to 1e30"))
    }

    /// A number that may be absent.
    pub fn f64_or(&self, key: &str, absent: f64) -> Result<f64> {
        if self.get(key).is_none() { Ok(absent) } else { self.f64(key) }
    }

    /// A number that may be absent.
    pub fn opt_f64(&self, key: &str) -> Result<Option<f64>> {
        self.get(key).map(|_| self.f64(key)).transpose()
    }

    /// A flag that may be absent.
    pub fn bool_or(&self, key: &str, absent: bool) -> Result<bool> {
        match self.get(key) {
            None => Ok(absent),
            Some(Value::Bool(b)) => Ok(*b),
            Some(v) if whole(v).is_some_and(|n| n <= 1) => Ok(whole(v) == Some(1)),
            Some(_) => Err(self.wrong(key, "true or false")),
        }
    }

    /// A string that may be absent.
    pub fn opt_str(&self, key: &str) -> Result<Option<&'a str>> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => v.as_str().map(Some).ok_or_else(|| self.wrong(key, "a string")),
        }
    }

    /// A nested object that may be absent.
    pub fn opt_object(&self, key: &str) -> Result<Option<Config<'a>>> {
        match self.get(key) {
            None => Ok(None),
            Some(value) if value.is_object() => Ok(Some(Config { value })),
            Some(_) => Err(self.wrong(key, "an object")),
        }
    }

    /// A list that may be absent.
    pub fn opt_list(&self, key: &str) -> Result<Option<&'a [Value]>> {
        match self.get(key) {
            None => Ok(None),
            Some(v) => v.as_array().map(|v| Some(v.as_slice())).ok_or_else(|| self.wrong(key, "a list")),
        }
    }

    /// A list of numbers that may be absent.
    pub fn opt_numbers(&self, key: &str) -> Result<Option<Vec<f64>>> {
        let Some(list) = self.opt_list(key)? else { return Ok(None) };
        list.iter().map(|v| v.as_f64().ok_or_else(|| self.wrong(key, "a list of numbers"))).collect::<Result<_>>().map(Some)
    }

    /// A list of strings, one for each layer, that may be absent (`layer_types`).
    pub fn opt_layer_strings(&self, key: &str, layers: usize) -> Result<Option<Vec<&'a str>>> {
        let Some(list) = self.opt_list(key)? else { return Ok(None) };
        ensure!(list.len() == layers, Mismatch, "config.json: {key} lists {} layers, num_hidden_layers is {layers}", list.len());
        list.iter().map(|v| v.as_str().ok_or_else(|| self.wrong(key, "a list of strings"))).collect::<Result<_>>().map(Some)
    }

    /// Refuses a value this build does not compute.
    pub fn only(&self, key: &str, known: &[&str]) -> Result<()> {
        match self.opt_str(key)? {
            Some(found) if !known.contains(&found) => bail!(Unsupported, "config.json: {key} is {found:?}; known: {known:?}"),
            _ => Ok(()),
        }
    }
}

/// Elements of `heads` heads of `dim`, or an error that names the layer: so small that sums of several stay countable.
pub(super) fn head_width(name: &str, heads: usize, dim: usize) -> Result<usize> {
    heads
        .checked_mul(dim)
        .filter(|n| *n <= 1 << 40)
        .ok_or_else(|| Error::new(Kind::TooLarge, format!("{name}: {heads} heads of {dim} elements")).named(name))
}

/// A whole number, also where it is written as `1.0`.
fn whole(v: &Value) -> Option<u64> {
    v.as_u64().or_else(|| v.as_f64().filter(|f| f.fract() == 0.0 && *f >= 0.0 && *f < 9e15).map(|f| f as u64))
}

fn kind_of(v: &Value) -> &'static str {
    match v {
        Value::Null => "null",
        Value::Bool(_) => "a flag",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

fn brief(v: &Value) -> String {
    let text = v.to_string();
    match text.char_indices().nth(40) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
