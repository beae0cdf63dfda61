//! The committed record of what was published, and what a later header may not do to it.

use crate::header::Facts;

/// A record: whether its release is out, and its facts.
pub struct Record {
    /// Out: what is new since needs a higher `METRALE_ABI_VERSION`.
    pub released: bool,
    pub facts: Facts,
}

pub fn read(text: &str) -> Record {
    let lines = text.lines().filter(|line| !line.starts_with('#') && !line.is_empty());
    let mut record = Record { released: false, facts: Facts::new() };
    for line in lines {
        match line.split_once(" = ") {
            Some(("released", value)) => record.released = value == "yes",
            Some((key, value)) => drop(record.facts.insert(key.to_string(), value.to_string())),
            None => panic!("{line:?} is no line of a record"),
        }
    }
    record
}

pub fn write(record: &Record) -> String {
    let mut text = String::from("# What hosts of this release rely on. Written by `make abi`, checked by `cargo test --test abi`.\n");
    text += &format!("released = {}\n", if record.released { "yes" } else { "no" });
    for (key, value) in &record.facts {
        text += &format!("{key} = {value}\n");
    }
    text
}

/// What hosts compiled with `record` would suffer from a library with `now`: removed, changed, or grown where nothing may grow.
pub fn breaks(record: &Record, now: &Facts) -> Vec<String> {
    let mut faults = Vec::new();
    for (key, was) in &record.facts {
        match now.get(key) {
            None => faults.push(format!("{key} was removed (it was {was})")),
            Some(is) if is != was && !may_change(record, key, was, is) => faults.push(format!("{key} was {was} and is {is}")),
            Some(_) => {}
        }
    }
    if record.released && !added(record, now).is_empty() && version(now) <= version(&record.facts) {
        faults.push("something was added; METRALE_ABI_VERSION must be higher than in the release".into());
    }
    faults
}

/// Keys that the record does not have.
pub fn added<'a>(record: &Record, now: &'a Facts) -> Vec<&'a str> {
    now.keys().map(String::as_str).filter(|key| !record.facts.contains_key(*key)).collect()
}

fn may_change(record: &Record, key: &str, was: &str, is: &str) -> bool {
    if key == VERSION {
        return number(is) >> 16 == number(was) >> 16 && number(is) >= number(was);
    }
    // A struct that says its size may grow at its end; where its fields lie is checked field by field.
    let versioned = key.strip_prefix("struct ").is_some_and(|name| record.facts.contains_key(&format!("field {name}.struct_size")));
    let size = |text: &str| text.strip_prefix("size ").map_or(0, number);
    versioned && size(is) >= size(was)
}

const VERSION: &str = "constant METRALE_ABI_VERSION";

fn version(facts: &Facts) -> u64 {
    facts.get(VERSION).map_or(0, |value| number(value))
}

fn number(text: &str) -> u64 {
    text.parse().unwrap_or(0)
}

/// The section of the change log that tells what of the C interface is new since `before`.
pub fn changelog(before: &Facts, now: &Facts) -> String {
    let mut text = String::new();
    for (title, kind) in [("Functions", "function "), ("Structs", "struct "), ("Types", "type "), ("Constants", "constant ")] {
        let names: Vec<&str> = now.keys().filter(|key| !before.contains_key(*key)).filter_map(|key| key.strip_prefix(kind)).collect();
        if !names.is_empty() {
            text += &wrapped(&format!("- {title}: {}.", names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")));
        }
    }
    // A field of a struct that was there before.
    let old = |key: &str| {
        key.strip_prefix("field ")
            .and_then(|key| key.split_once('.'))
            .is_some_and(|(name, _)| before.contains_key(&format!("struct {name}")))
    };
    let fields: Vec<&str> =
        now.keys().filter(|key| !before.contains_key(*key) && old(key)).filter_map(|key| key.strip_prefix("field ")).collect();
    if !fields.is_empty() {
        text += &wrapped(&format!("- Fields: {}.", fields.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")));
    }
    text
}

/// In lines of at most 120 characters, the later ones indented.
fn wrapped(text: &str) -> String {
    let (mut out, mut line) = (String::new(), String::new());
    for word in text.split(' ') {
        if !line.is_empty() && line.len() + 1 + word.len() > 120 {
            out += &format!("{line}\n");
            line = String::from(" ");
        }
        if !line.is_empty() {
            line.push(' ');
        }
        line += word;
    }
    out + &line + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    fn published(released: bool) -> Record {
        let facts = [
            ("function metrale_free", "void metrale_free(metrale_model *model)"),
            ("constant METRALE_ABI_VERSION", "65536"),
            ("constant METRALE_BUSY", "-22"),
            ("struct metrale_a", "size 16"),
            ("field metrale_a.struct_size", "size_t offset 0 size 8"),
            ("field metrale_a.x", "uint64_t offset 8 size 8"),
            ("struct metrale_b", "size 8"),
            ("field metrale_b.x", "uint64_t offset 0 size 8"),
        ];
        Record { released, facts: facts.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect() }
    }

    /// Every way to break a host is found, and growing is none.
    #[test]
    fn breaks_are_found() {
        let record = published(true);
        assert_eq!(breaks(&record, &record.facts), Vec::<String>::new());
        for key in record.facts.keys() {
            let mut less = record.facts.clone();
            less.remove(key);
            assert_eq!(breaks(&record, &less).len(), 1, "{key} removed");
        }
        let with = |pairs: &[(&str, &str)]| {
            let mut facts = record.facts.clone();
            facts.extend(pairs.iter().map(|(k, v)| (k.to_string(), v.to_string())));
            breaks(&record, &facts).len()
        };
        assert_eq!(with(&[("constant METRALE_BUSY", "-23")]), 1);
        assert_eq!(with(&[("field metrale_a.x", "uint64_t offset 16 size 8"), ("struct metrale_a", "size 24")]), 1);
        assert_eq!(with(&[("struct metrale_a", "size 8")]), 1, "shrunk");
        assert_eq!(with(&[("struct metrale_b", "size 16")]), 1, "says no size and grew");
        assert_eq!(with(&[("constant METRALE_ABI_VERSION", "131072")]), 1, "old hosts are refused");
        assert_eq!(with(&[("function metrale_new", "void metrale_new(void)")]), 1, "added without a version");
        let grown = [
            ("function metrale_new", "void metrale_new(void)"),
            ("struct metrale_a", "size 24"),
            ("constant METRALE_ABI_VERSION", "65537"),
        ];
        assert_eq!(with(&grown), 0);
        let mut more = record.facts.clone();
        more.insert("function metrale_new".into(), "void metrale_new(void)".into());
        assert!(breaks(&published(false), &more).is_empty(), "before the release everything may be added");
    }

    #[test]
    fn records_survive_writing() {
        let record = published(true);
        let again = read(&write(&record));
        assert!(again.released && again.facts == record.facts);
    }

    #[test]
    fn the_changelog_names_what_is_new() {
        let record = published(true);
        let mut now = record.facts.clone();
        now.insert("function metrale_new".into(), "x".into());
        now.insert("field metrale_a.y".into(), "x".into());
        assert_eq!(changelog(&record.facts, &now), "- Functions: `metrale_new`.\n- Fields: `metrale_a.y`.\n");
    }
}
