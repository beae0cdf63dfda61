//! Prepares the source of a chat template, so that a hostile one stays within bounds.
//!
//! The template engine counts instructions and calls, but not how deep a value is nested, and dropping or printing a value
//! recurses. A value can grow from one round of a loop to the next only through `{% set %}`; so every assignment is given
//! a filter that checks what is assigned, and a `{% with %}` may only hold few brackets. A namespace that holds itself
//! would never finish printing; the filter for `{% set namespace.name = ... %}` allows plain data only.
//!
//! The engine's compiler recurses along chains such as `--x` or `a.b.c` and looks at each link again from every link before
//! it, so the code in one tag (its strings apart) is bounded too.
//!
//! `{% generation %}`, which marks the assistant's words for training, becomes a block that is always taken.

use crate::error::{Error, Kind, Result};

/// The filter around the value of `{% set name = value %}`.
pub(super) const CHECK_VARIABLE: &str = "metrale_check_variable";
/// The filter around the value of `{% set namespace.name = value %}`.
pub(super) const CHECK_ATTRIBUTE: &str = "metrale_check_attribute";

/// Longest source. The largest templates in use have about 30 KB.
const MAX_SOURCE: usize = 256 << 10;
/// Most bytes in one tag that are not in its strings.
const MAX_TAG_CODE: usize = 4096;
/// Most opening brackets in one `{% with %}`, whose variables may be made from each other.
const MAX_WITH_BRACKETS: usize = 64;

/// The source with its assignments checked.
pub(super) fn prepare(source: &str) -> Result<String> {
    if source.len() > MAX_SOURCE {
        let text = format!("chat template of {} bytes; at most {MAX_SOURCE} are accepted", source.len());
        return Err(Error::new(Kind::TooLarge, text).sizes(source.len() as u64, MAX_SOURCE as u64));
    }
    let mut out = String::with_capacity(source.len() + source.len() / 8);
    let mut rest = source;
    let mut raw = false;
    while let Some(at) = rest.find('{') {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let end = match tag.as_bytes().get(1) {
            Some(b'#') if !raw => tag.find("#}").map_or(tag.len(), |end| end + 2),
            Some(b'{') if !raw => close_of(tag, "}}"),
            Some(b'%') => {
                let end = close_of(tag, "%}");
                let name = tag_name(&tag[..end]);
                if raw && name != "endraw" {
                    out.push_str("{%");
                    rest = &tag[2..];
                    continue;
                }
                raw = name == "raw";
                out.push_str(&block(&tag[..end], name)?);
                rest = &tag[end..];
                continue;
            }
            _ => 1,
        };
        if tag[..end].starts_with("{{") {
            check_length(&tag[..end])?;
        }
        out.push_str(&tag[..end]);
        rest = &tag[end..];
    }
    out.push_str(rest);
    Ok(out)
}

/// The first word of a block.
fn tag_name(tag: &str) -> &str {
    let inner = tag[2..].trim_start_matches(['-', '+']).trim_start();
    let end = inner.find(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).unwrap_or(inner.len());
    &inner[..end]
}

fn check_length(tag: &str) -> Result<()> {
    let code = outside_strings(tag).count();
    if code <= MAX_TAG_CODE {
        return Ok(());
    }
    let text = format!("chat template: a tag with {code} bytes of code, at most {MAX_TAG_CODE} are accepted");
    Err(Error::new(Kind::LimitExceeded, text).sizes(code as u64, MAX_TAG_CODE as u64))
}

/// One block, rewritten where it must be.
fn block(tag: &str, name: &str) -> Result<String> {
    check_length(tag)?;
    match name {
        "generation" => Ok(tag.replacen(name, "if true", 1)),
        "endgeneration" => Ok(tag.replacen(name, "endif", 1)),
        "with" => {
            let brackets = outside_strings(tag).filter(|&(_, b)| matches!(b, b'(' | b'[' | b'{')).count() - 1;
            if brackets > MAX_WITH_BRACKETS {
                let text = format!("chat template: a 'with' block has {brackets} brackets, at most {MAX_WITH_BRACKETS} are accepted");
                return Err(Error::new(Kind::LimitExceeded, text));
            }
            Ok(tag.to_string())
        }
        "set" => Ok(checked_assignment(tag).unwrap_or_else(|| tag.to_string())),
        _ => Ok(tag.to_string()),
    }
}

/// `{% set a = b %}` as `{% set a = ((b) | check) %}`; `None` if there is no `=` (a block that is captured as text).
fn checked_assignment(tag: &str) -> Option<String> {
    let body = tag.strip_suffix("%}")?;
    let body_end = body.strip_suffix(['-', '+']).unwrap_or(body).len();
    let equals = outside_strings(&tag[..body_end]).find(|&(_, b)| b == b'=').map(|(at, _)| at)?;
    let (target, value) = (&tag[..equals], &tag[equals + 1..body_end]);
    let check = if target.contains('.') { CHECK_ATTRIBUTE } else { CHECK_VARIABLE };
    Some(format!("{target}= (({value}) | {check}) {}", &tag[body_end..]))
}

/// Where a tag ends: after `close`, outside of strings and, for an expression, of braces.
fn close_of(tag: &str, close: &str) -> usize {
    let mut depth = 0usize;
    for (at, byte) in outside_strings(tag).filter(|&(at, _)| at >= 2) {
        if tag[at..].starts_with(close) && depth == 0 {
            return at + 2;
        }
        match byte {
            b'{' if close == "}}" => depth += 1,
            b'}' if close == "}}" => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    tag.len()
}

/// The ASCII bytes of a tag that are in no string literal, with their places.
fn outside_strings(tag: &str) -> impl Iterator<Item = (usize, u8)> {
    let mut quote: Option<u8> = None;
    let mut escaped = false;
    tag.bytes().enumerate().filter(move |&(_, byte)| match quote {
        Some(open) => {
            if escaped {
                escaped = false;
            } else if byte == b'\\' {
                escaped = true;
            } else if byte == open {
                quote = None;
            }
            false
        }
        None if byte == b'\'' || byte == b'"' => {
            quote = Some(byte);
            false
        }
        None => byte.is_ascii(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assignments_are_checked_and_nothing_else_changes() {
        let cases = [
            ("{% set x = 1 %}", "{% set x = (( 1 ) | metrale_check_variable) %}"),
            ("{%- set ns.x = '=%}' -%}", "{%- set ns.x = (( '=%}' ) | metrale_check_attribute) -%}"),
            ("{%set x=a=='b'%}", "{%set x= ((a=='b') | metrale_check_variable) %}"),
            ("{% set x %}a = b{% endset %}", "{% set x %}a = b{% endset %}"),
            ("{{ {'a': {'b': 1}} }} {# {% set a = 1 %} #}", "{{ {'a': {'b': 1}} }} {# {% set a = 1 %} #}"),
            ("{% raw %}{% set a = 1 %}{% endraw %}{% if a = b", "{% raw %}{% set a = 1 %}{% endraw %}{% if a = b"),
            ("{%- generation -%}a{% endgeneration %}", "{%- if true -%}a{% endif %}"),
            ("a { b } é {", "a { b } é {"),
            ("{% set", "{% set"),
            ("{%", "{%"),
            ("{{ 'é", "{{ 'é"),
        ];
        for (source, expected) in cases {
            assert_eq!(prepare(source).unwrap(), expected);
        }
    }

    #[test]
    fn limits() {
        let with = format!("{{% with a = {}{} %}}", "[".repeat(65), "]".repeat(65));
        assert_eq!(prepare(&with).unwrap_err().kind(), Kind::LimitExceeded);
        assert_eq!(prepare(&" ".repeat(MAX_SOURCE + 1)).unwrap_err().kind(), Kind::TooLarge);
    }
}
