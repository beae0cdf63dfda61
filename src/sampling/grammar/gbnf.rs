//! GBNF: the grammar notation of GGUF users, read here and written again as Lark rules.
//!
//! `root ::= "a" item+ [0-9]{2,4} ( "x" | "y" )?  # a comment`. Rules that do not lead back to themselves describe
//! regular texts and become Lark terminals, that is regular expressions, which the parser follows much faster than rules;
//! a grammar without recursion becomes a single one and is followed exactly. Beside recursion a regular part takes the
//! longest text it can, as terminals do in Lark.

use std::collections::HashMap;
use std::fmt::Write;

use super::check::{too_deep, too_many, wrong};
use super::{MAX_DEPTH, MAX_RULES};
use crate::error::Result;

/// A part of the right side of a rule.
#[derive(Debug, PartialEq)]
enum Expr {
    /// One character of these ranges, or, if `negated`, of all others.
    One {
        negated: bool,
        ranges: Vec<(char, char)>,
    },
    /// Characters as they are.
    Literal(String),
    /// Another rule, by index.
    Rule(usize),
    Sequence(Vec<Expr>),
    Choice(Vec<Expr>),
    /// From so many to so many; `None` is without end.
    Repeat(Box<Expr>, u32, Option<u32>),
}

/// A grammar as it was read. Every rule that is mentioned has a body.
struct Rules {
    bodies: Vec<Expr>,
    root: usize,
}

/// Largest regular expression that rules are joined into, in parts; beyond it they stay rules.
const MAX_JOINED: usize = 20_000;

/// Largest count of a repetition.
const MAX_COUNT: u32 = i32::MAX as u32;

/// The same grammar in Lark's notation.
pub(super) fn to_lark(source: &str) -> Result<String> {
    let reader = Reader { source, at: 0, index: HashMap::new(), mentions: Vec::new(), bodies: Vec::new() };
    let rules = reader.rules()?;
    let mut writer = Writer { sizes: joined_sizes(&rules.bodies), text: String::new(), terminals: String::new(), extra: 0 };
    writer.write(&rules);
    Ok(writer.text + &writer.terminals)
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '-' || c == '_'
}

struct Reader<'a> {
    source: &'a str,
    at: usize,
    index: HashMap<&'a str, usize>,
    /// Where each rule is first mentioned, and its name.
    mentions: Vec<(usize, &'a str)>,
    bodies: Vec<Option<Expr>>,
}

impl<'a> Reader<'a> {
    fn rules(mut self) -> Result<Rules> {
        self.space(true);
        while self.peek().is_some() {
            let start = self.at;
            let name = self.name()?;
            let rule = self.rule(name, start);
            self.space(false);
            if !self.source[self.at..].starts_with("::=") {
                return Err(wrong(self.at, format_args!("::= is expected after the rule name {name}")));
            }
            self.at += 3;
            self.space(true);
            if self.bodies[rule].is_some() {
                return Err(wrong(start, format_args!("the rule {name} is defined twice")));
            }
            let body = self.choice(0)?;
            self.bodies[rule] = Some(body);
            self.space(true);
            if self.bodies.len() > MAX_RULES {
                return Err(too_many("rules", self.bodies.len()));
            }
        }
        let Some(&root) = self.index.get("root") else { return Err(wrong(0, "there is no rule called root").named("root")) };
        let mut bodies = Vec::with_capacity(self.bodies.len());
        for (body, (at, name)) in self.bodies.into_iter().zip(self.mentions) {
            bodies.push(body.ok_or_else(|| wrong(at, format_args!("the rule {name} is not defined")).named(name))?);
        }
        Ok(Rules { bodies, root })
    }

    fn rule(&mut self, name: &'a str, at: usize) -> usize {
        *self.index.entry(name).or_insert_with(|| {
            self.mentions.push((at, name));
            self.bodies.push(None);
            self.bodies.len() - 1
        })
    }

    fn peek(&self) -> Option<char> {
        self.source[self.at..].chars().next()
    }

    fn next(&mut self) -> Result<char> {
        let c = self.peek().ok_or_else(|| wrong(self.at, "the grammar ends in the middle of a rule"))?;
        self.at += c.len_utf8();
        Ok(c)
    }

    /// Skips blanks and comments, and line ends if `lines`.
    fn space(&mut self, lines: bool) {
        while let Some(c) = self.peek() {
            match c {
                ' ' | '\t' => self.at += 1,
                '\n' | '\r' if lines => self.at += 1,
                '#' => self.at += self.source[self.at..].find('\n').unwrap_or(self.source.len() - self.at),
                _ => return,
            }
        }
    }

    fn name(&mut self) -> Result<&'a str> {
        let rest = &self.source[self.at..];
        let len = rest.find(|c| !is_name(c)).unwrap_or(rest.len());
        if len == 0 {
            return Err(wrong(self.at, format_args!("a rule name is expected, found {:?}", rest.chars().next().unwrap_or(' '))));
        }
        self.at += len;
        Ok(&rest[..len])
    }

    /// Alternatives; inside parentheses they may go over lines.
    fn choice(&mut self, depth: usize) -> Result<Expr> {
        if depth > MAX_DEPTH {
            return Err(too_deep(self.at, MAX_DEPTH));
        }
        let mut all = vec![self.sequence(depth)?];
        while self.peek() == Some('|') {
            self.at += 1;
            self.space(true);
            all.push(self.sequence(depth)?);
        }
        Ok(if all.len() == 1 { all.remove(0) } else { Expr::Choice(all) })
    }

    fn sequence(&mut self, depth: usize) -> Result<Expr> {
        let mut parts: Vec<Expr> = Vec::new();
        loop {
            let start = self.at;
            let part = match self.peek() {
                Some('"') => self.literal()?,
                Some('[') => self.class()?,
                Some('.') => {
                    self.at += 1;
                    Expr::One { negated: true, ranges: Vec::new() }
                }
                Some('(') => {
                    self.at += 1;
                    self.space(true);
                    let inner = self.choice(depth + 1)?;
                    if self.peek() != Some(')') {
                        return Err(wrong(self.at, format_args!("the parenthesis of byte {start} is not closed")));
                    }
                    self.at += 1;
                    inner
                }
                Some('*' | '+' | '?' | '{') => {
                    let Some(last) = parts.pop() else { return Err(wrong(start, "there is nothing to repeat")) };
                    let (min, max) = self.counts()?;
                    Expr::Repeat(Box::new(last), min, max)
                }
                Some(c) if is_name(c) => {
                    let name = self.name()?;
                    Expr::Rule(self.rule(name, start))
                }
                Some('|' | ')' | '\n' | '\r') | None => break,
                Some(c) => return Err(wrong(start, format_args!("{c:?} is not expected here"))),
            };
            if nesting(&part) > MAX_DEPTH {
                return Err(too_deep(start, MAX_DEPTH));
            }
            parts.push(part);
            self.space(depth > 0);
        }
        if depth > 0 {
            self.space(true);
        }
        Ok(if parts.len() == 1 { parts.remove(0) } else { Expr::Sequence(parts) })
    }

    /// `*`, `+`, `?`, `{2}`, `{2,}`, `{2,4}` or `{,4}`.
    fn counts(&mut self) -> Result<(u32, Option<u32>)> {
        let start = self.at;
        match self.next()? {
            '*' => return Ok((0, None)),
            '+' => return Ok((1, None)),
            '?' => return Ok((0, Some(1))),
            _ => {}
        }
        let close = self.source[self.at..].find('}').ok_or_else(|| wrong(start, "the brace is not closed"))?;
        let inside = &self.source[self.at..self.at + close];
        self.at += close + 1;
        let number = |text: &str| -> Result<u32> {
            let text = text.trim();
            let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
            match text.parse::<u32>() {
                Ok(n) if digits && n <= MAX_COUNT => Ok(n),
                _ if digits => Err(crate::error::Error::new(
                    crate::error::Kind::LimitExceeded,
                    format!("byte {start}: the count {} is more than {MAX_COUNT}", text.get(..20).unwrap_or(text)),
                )
                .at(start as u64)),
                _ => Err(wrong(start, "a count is expected between the braces")),
            }
        };
        let (min, max) = match inside.split_once(',') {
            None => (number(inside)?, Some(number(inside)?)),
            Some((min, max)) => {
                let min = if min.trim().is_empty() { 0 } else { number(min)? };
                (min, if max.trim().is_empty() { None } else { Some(number(max)?) })
            }
        };
        match max {
            Some(max) if max < min => Err(wrong(start, format_args!("at least {min}, but at most {max}"))),
            _ => Ok((min, max)),
        }
    }

    fn literal(&mut self) -> Result<Expr> {
        let start = self.at;
        self.at += 1;
        let mut text = String::new();
        loop {
            match self.peek() {
                Some('"') => break self.at += 1,
                Some('\n') | None => return Err(wrong(start, "the string is not closed")),
                Some(_) => text.push(self.character()?),
            }
        }
        Ok(Expr::Literal(text))
    }

    /// `[a-z]`, `[^"\\]`.
    fn class(&mut self) -> Result<Expr> {
        let start = self.at;
        self.at += 1;
        let negated = self.peek() == Some('^');
        self.at += usize::from(negated);
        let mut ranges = Vec::new();
        loop {
            match self.peek() {
                Some(']') => break self.at += 1,
                Some('\n') | None => return Err(wrong(start, "the class is not closed")),
                Some(_) => {}
            }
            let at = self.at;
            let low = self.character()?;
            let is_range = self.peek() == Some('-') && !self.source[self.at + 1..].starts_with(']');
            let high = if is_range {
                self.at += 1;
                self.character()?
            } else {
                low
            };
            if high < low {
                return Err(wrong(at, format_args!("the range {low:?} to {high:?} is empty")));
            }
            ranges.push((low, high));
        }
        if ranges.is_empty() && !negated {
            return Err(wrong(start, "the class is empty"));
        }
        Ok(Expr::One { negated, ranges })
    }

    /// A character of a string or class, written out or escaped.
    fn character(&mut self) -> Result<char> {
        let start = self.at;
        let c = self.next()?;
        if c != '\\' {
            return Ok(c);
        }
        let digits = match self.next()? {
            'n' => return Ok('\n'),
            'r' => return Ok('\r'),
            't' => return Ok('\t'),
            c @ ('"' | '\\' | '[' | ']' | '-' | '^' | '/' | '\'') => return Ok(c),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            c => return Err(wrong(start, format_args!("there is no escape \\{c}"))),
        };
        let code = self.source.get(self.at..self.at + digits).filter(|hex| hex.bytes().all(|b| b.is_ascii_hexdigit()));
        let c = code.and_then(|hex| u32::from_str_radix(hex, 16).ok()).and_then(char::from_u32);
        self.at += digits;
        c.ok_or_else(|| wrong(start, format_args!("{digits} hexadecimal digits of a character are expected")))
    }
}

/// How many repetitions stand directly inside one another, which needs no parenthesis: `"a"+++`.
fn nesting(expr: &Expr) -> usize {
    let (mut depth, mut expr) = (0, expr);
    while let Expr::Repeat(inner, ..) = expr {
        depth += 1;
        expr = inner;
    }
    depth
}

/// The size of each rule with all it refers to written out, where that is a regular expression of a sensible size.
fn joined_sizes(bodies: &[Expr]) -> Vec<Option<usize>> {
    let mut waiting: Vec<usize> = vec![0; bodies.len()];
    let mut users: Vec<Vec<usize>> = vec![Vec::new(); bodies.len()];
    for (index, body) in bodies.iter().enumerate() {
        references(body, &mut |rule| {
            waiting[index] += 1;
            users[rule].push(index);
        });
    }
    let mut sizes = vec![None; bodies.len()];
    let mut ready: Vec<usize> = (0..bodies.len()).filter(|&i| waiting[i] == 0).collect();
    // A rule is looked at once all it refers to is known; a rule that leads back to itself never is.
    while let Some(index) = ready.pop() {
        let Some(size) = size(&bodies[index], &sizes) else { continue };
        sizes[index] = Some(size);
        for &user in &users[index] {
            waiting[user] -= 1;
            if waiting[user] == 0 {
                ready.push(user);
            }
        }
    }
    sizes
}

fn references(expr: &Expr, found: &mut impl FnMut(usize)) {
    match expr {
        Expr::One { .. } | Expr::Literal(_) => {}
        Expr::Rule(rule) => found(*rule),
        Expr::Sequence(parts) | Expr::Choice(parts) => parts.iter().for_each(|part| references(part, found)),
        Expr::Repeat(inner, ..) => references(inner, found),
    }
}

/// Parts of an expression with its rules written out; `None` if it is not regular, or too large.
fn size(expr: &Expr, sizes: &[Option<usize>]) -> Option<usize> {
    let size = match expr {
        Expr::One { ranges, .. } => 1 + ranges.len(),
        Expr::Literal(text) => 1 + text.len(),
        Expr::Rule(rule) => sizes[*rule]?,
        Expr::Sequence(parts) | Expr::Choice(parts) => parts.iter().try_fold(1usize, |sum, part| size_sum(sum, size(part, sizes)?))?,
        Expr::Repeat(inner, ..) => size_sum(1, size(inner, sizes)?)?,
    };
    (size <= MAX_JOINED).then_some(size)
}

fn size_sum(a: usize, b: usize) -> Option<usize> {
    a.checked_add(b)
}

/// Writes Lark. Rule `i` is the terminal `T<i>` if it is regular, else the rule `r<i>`; regular parts of other rules become
/// terminals `X<n>`.
struct Writer {
    sizes: Vec<Option<usize>>,
    text: String,
    terminals: String,
    extra: usize,
}

impl Writer {
    fn write(&mut self, rules: &Rules) {
        let start = self.name(rules.root);
        let mut text = format!("start: {start}\n");
        for (index, body) in rules.bodies.iter().enumerate() {
            let name = self.name(index);
            let mut right = String::new();
            match self.sizes[index] {
                Some(_) => self.terminal(body, &mut right),
                None => self.rule(body, &mut right),
            }
            let _ = writeln!(text, "{name}: {right}");
        }
        self.text = text;
    }

    fn name(&self, rule: usize) -> String {
        format!("{}{rule}", if self.sizes[rule].is_some() { 'T' } else { 'r' })
    }

    /// An expression of a recursive rule.
    fn rule(&mut self, expr: &Expr, out: &mut String) {
        if size(expr, &self.sizes).is_some() {
            match expr {
                Expr::Rule(rule) => out.push_str(&self.name(*rule)),
                // An empty text is nothing to look for.
                Expr::Literal(text) if text.is_empty() => out.push_str("\"\""),
                Expr::Sequence(parts) if parts.is_empty() => out.push_str("\"\""),
                _ => {
                    let name = format!("X{}", self.extra);
                    self.extra += 1;
                    let mut right = String::new();
                    self.terminal(expr, &mut right);
                    let _ = writeln!(self.terminals, "{name}: {right}");
                    out.push_str(&name);
                }
            }
            return;
        }
        match expr {
            Expr::Sequence(parts) => self.sequence(parts, out),
            Expr::Choice(parts) => each(parts, " | ", out, |part, out| self.rule(part, out)),
            Expr::Repeat(inner, min, max) => {
                each(std::slice::from_ref(&**inner), "", out, |part, out| self.rule(part, out));
                counts(*min, *max, out);
            }
            Expr::Rule(rule) => out.push_str(&self.name(*rule)),
            // Never: these are regular.
            Expr::One { .. } | Expr::Literal(_) => self.terminal(expr, out),
        }
    }

    /// Regular neighbours are joined, so that what is between them is found exactly.
    fn sequence(&mut self, parts: &[Expr], out: &mut String) {
        out.push('(');
        let mut at = 0;
        while at < parts.len() {
            let mut end = at;
            while end < parts.len() && size(&parts[end], &self.sizes).is_some() {
                end += 1;
            }
            if end > at + 1 {
                let name = format!("X{}", self.extra);
                self.extra += 1;
                let mut right = String::new();
                each(&parts[at..end], " ", &mut right, |part, out| self.terminal(part, out));
                let _ = writeln!(self.terminals, "{name}: {right}");
                out.push_str(&name);
                at = end;
            } else {
                self.rule(&parts[at], out);
                at += 1;
            }
            out.push(' ');
        }
        out.push(')');
    }

    /// A regular expression.
    fn terminal(&self, expr: &Expr, out: &mut String) {
        match expr {
            Expr::One { negated, ranges } => {
                out.push_str("/[");
                let everything = [('\0', char::MAX)];
                let (negated, ranges) = if *negated && ranges.is_empty() { (false, &everything[..]) } else { (*negated, &ranges[..]) };
                if negated {
                    out.push('^');
                }
                for &(low, high) in ranges {
                    let _ = write!(out, "\\u{{{:x}}}-\\u{{{:x}}}", u32::from(low), u32::from(high));
                }
                out.push_str("]/");
            }
            Expr::Literal(text) => out.push_str(&serde_json::Value::from(text.as_str()).to_string()),
            Expr::Rule(rule) => out.push_str(&self.name(*rule)),
            Expr::Sequence(parts) if parts.is_empty() => out.push_str("\"\""),
            Expr::Sequence(parts) => each(parts, " ", out, |part, out| self.terminal(part, out)),
            Expr::Choice(parts) => each(parts, " | ", out, |part, out| self.terminal(part, out)),
            Expr::Repeat(inner, min, max) => {
                each(std::slice::from_ref(&**inner), "", out, |part, out| self.terminal(part, out));
                counts(*min, *max, out);
            }
        }
    }
}

/// Parts in parentheses.
fn each(parts: &[Expr], between: &str, out: &mut String, mut write: impl FnMut(&Expr, &mut String)) {
    out.push('(');
    for (index, part) in parts.iter().enumerate() {
        if index > 0 {
            out.push_str(between);
        }
        write(part, out);
    }
    out.push(')');
}

fn counts(min: u32, max: Option<u32>, out: &mut String) {
    let _ = match (min, max) {
        (0, None) => write!(out, "*"),
        (1, None) => write!(out, "+"),
        (0, Some(1)) => write!(out, "?"),
        (min, Some(max)) => write!(out, "{{{min},{max}}}"),
        (min, None) => write!(out, "{{{min},}}"),
    };
}
