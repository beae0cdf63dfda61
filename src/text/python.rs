//! Values as Python writes them.
//!
//! Chat templates were written for Jinja on Python, so what they print are Python's texts: `True`, `None`, `{'a': 1}`, and
//! `json.dumps` with a blank after comma and colon. Models were trained on exactly these.

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};

/// Deepest value that is written. Arguments are at most 128 deep, see `template.rs`.
const MAX_DEPTH: usize = 512;

/// `str(value)`.
pub(super) fn text(value: &Value) -> Result<String, Error> {
    let mut out = String::new();
    match value.as_str() {
        Some(text) => out.push_str(text),
        None if value.is_undefined() => {}
        None => repr(value, &mut out, 0)?,
    }
    Ok(out)
}

/// `repr(value)`.
fn repr(value: &Value, out: &mut String, depth: usize) -> Result<(), Error> {
    check_depth(depth)?;
    match value.kind() {
        ValueKind::Undefined => out.push_str("Undefined"),
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::Number => out.push_str(&number(value)),
        ValueKind::String => quoted(value.as_str().unwrap_or_default(), out),
        ValueKind::Seq => {
            out.push('[');
            for (at, item) in value.try_iter()?.enumerate() {
                out.push_str(if at == 0 { "" } else { ", " });
                repr(&item, out, depth + 1)?;
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (at, key) in value.try_iter()?.enumerate() {
                out.push_str(if at == 0 { "" } else { ", " });
                repr(&key, out, depth + 1)?;
                out.push_str(": ");
                repr(&value.get_item(&key)?, out, depth + 1)?;
            }
            out.push('}');
        }
        _ => out.push_str(&value.to_string()),
    }
    Ok(())
}

/// A string as `repr` writes it: single quotes unless only they occur in it.
fn quoted(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if u32::from(c) < 0x20 || (0x7F..0xA1).contains(&u32::from(c)) => out.push_str(&format!("\\x{:02x}", u32::from(c))),
            c => out.push(c),
        }
    }
    out.push(quote);
}

/// A number: integers as they are, floats with the shortest digits that read back the same.
fn number(value: &Value) -> String {
    if value.is_integer() {
        return value.to_string();
    }
    let Ok(float) = f64::try_from(value.clone()) else { return value.to_string() };
    if !float.is_finite() {
        return if float.is_nan() {
            "nan".into()
        } else if float > 0.0 {
            "inf".into()
        } else {
            "-inf".into()
        };
    }
    let scientific = format!("{float:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) || float == 0.0 {
        let plain = format!("{float}");
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    let sign = if exponent < 0 { '-' } else { '+' };
    format!("{digits}e{sign}{:02}", exponent.abs())
}

/// The `tojson` filter: `json.dumps(value, ensure_ascii=False)` with the arguments that transformers gives it.
pub(super) fn tojson(value: &Value, indent: Option<Value>, kwargs: Kwargs) -> Result<Value, Error> {
    let named: Option<Value> = kwargs.get("indent")?;
    let indent = match named.or(indent).filter(|v| !v.is_none() && !v.is_undefined()) {
        None => None,
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.to_string(),
            None => " ".repeat(usize::try_from(indent).ok().filter(|n| *n <= 64).ok_or_else(|| bad("indent must be 0 to 64"))?),
        }),
    };
    let separators: Option<Vec<String>> = kwargs.get("separators")?;
    let (comma, colon) = match separators.as_deref() {
        Some([comma, colon]) => (comma.clone(), colon.clone()),
        Some(_) => return Err(bad("separators must be two texts")),
        None => (if indent.is_some() { "," } else { ", " }.to_string(), ": ".to_string()),
    };
    let json = Json {
        indent,
        comma,
        colon,
        ascii: kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort: kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    kwargs.assert_all_used()?;
    let mut out = String::new();
    json.write(value, &mut out, 0)?;
    Ok(Value::from_safe_string(out))
}

struct Json {
    indent: Option<String>,
    comma: String,
    colon: String,
    ascii: bool,
    sort: bool,
}

impl Json {
    fn write(&self, value: &Value, out: &mut String, depth: usize) -> Result<(), Error> {
        check_depth(depth)?;
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => out.push_str(&match number(value).as_str() {
                "nan" => "NaN".to_string(),
                "inf" => "Infinity".to_string(),
                "-inf" => "-Infinity".to_string(),
                other => other.to_string(),
            }),
            ValueKind::String => self.string(value.as_str().unwrap_or_default(), out),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.group(out, ['[', ']'], depth, &items, |out, item| self.write(item, out, depth + 1))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort {
                    keys.sort();
                }
                self.group(out, ['{', '}'], depth, &keys, |out, key| {
                    match key.kind() {
                        ValueKind::String => self.string(key.as_str().unwrap_or_default(), out),
                        ValueKind::Number | ValueKind::Bool | ValueKind::None => {
                            out.push('"');
                            self.write(key, out, depth + 1)?;
                            out.push('"');
                        }
                        kind => return Err(bad(&format!("a key of kind {kind} cannot be written as JSON"))),
                    }
                    out.push_str(&self.colon);
                    self.write(&value.get_item(key)?, out, depth + 1)
                })?;
            }
            kind => return Err(bad(&format!("a value of kind {kind} cannot be written as JSON"))),
        }
        Ok(())
    }

    fn group(
        &self,
        out: &mut String,
        [open, close]: [char; 2],
        depth: usize,
        items: &[Value],
        mut each: impl FnMut(&mut String, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let line = |out: &mut String, depth: usize| {
            if let Some(indent) = &self.indent {
                out.push('\n');
                out.extend(std::iter::repeat_n(indent.as_str(), depth));
            }
        };
        out.push(open);
        for (at, item) in items.iter().enumerate() {
            out.push_str(if at == 0 { "" } else { &self.comma });
            line(out, depth + 1);
            each(out, item)?;
        }
        if !items.is_empty() {
            line(out, depth);
        }
        out.push(close);
        Ok(())
    }

    fn string(&self, text: &str, out: &mut String) {
        out.push('"');
        for c in text.chars() {
            match c {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                c if u32::from(c) < 0x20 || (self.ascii && !c.is_ascii()) => {
                    for unit in c.encode_utf16(&mut [0; 2]) {
                        out.push_str(&format!("\\u{unit:04x}"));
                    }
                }
                c => out.push(c),
            }
        }
        out.push('"');
    }
}

fn check_depth(depth: usize) -> Result<(), Error> {
    if depth > MAX_DEPTH { Err(bad(&format!("a value is nested more than {MAX_DEPTH} deep"))) } else { Ok(()) }
}

fn bad(text: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, text.to_string())
}
