//! Which module may use which, and where `unsafe` may live.
//!
//! The order is what lets a newcomer change one module without knowing those to its right. It is read from the text: any
//! `crate::name` outside comments, strings and the tests at the bottom of a file counts, not only `use` lines.

use crate::{expect_none, read, root, rust_files};
use std::path::Path;

/// A module uses only what stands in an earlier row; modules of one row leave each other alone.
const ORDER: &[&[&str]] = &[
    &["runtime"],
    &["error"],
    &["tensor"],
    &["options"],
    &["backend", "text"],
    &["comm", "quant"],
    &["ops"],
    &["circuit"],
    &["weights", "cache", "sampling"],
    &["lora"],
    &["layers"],
    &["model", "vision"],
    &["families"],
    &["speculative"],
    &["engine"],
    &["abi"],
];

/// Where `unsafe` is let in: the C border, the processor and the device, memory that operations of one step share, a
/// mapped file, bytes seen as numbers.
const UNSAFE_PLACES: &[&str] = &[
    "src/abi/",
    "src/backend/cpu/",
    "src/backend/cuda/",
    "src/cache/memory.rs",
    "src/cache/pages.rs",
    "src/cache/state.rs",
    "src/circuit/device.rs",
    "src/circuit/device_weights.rs",
    "src/circuit/found.rs",
    "src/circuit/staging.rs",
    "src/comm/nccl.rs",
    "src/ops/",
    "src/runtime/",
    "src/tensor/view.rs",
    "src/weights/source.rs",
];

fn rank(module: &str) -> Option<usize> {
    ORDER.iter().position(|row| row.contains(&module))
}

/// The top module a file belongs to: `src/ops/norm.rs` is `ops`.
fn module_of(path: &Path) -> String {
    let inside = path.strip_prefix("src").unwrap_or(path);
    let first = inside.iter().next().expect("a file has a name").to_string_lossy();
    first.trim_end_matches(".rs").to_string()
}

/// `text` with comments and the contents of strings blanked (newlines stay), cut where the tests begin.
fn code_of(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut code = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let rest = &bytes[at..];
        let skipped = if rest.starts_with(b"//") {
            rest.iter().position(|&b| b == b'\n').unwrap_or(rest.len())
        } else if rest.starts_with(b"/*") {
            block_comment(rest)
        } else if let Some(length) = raw_string(rest) {
            length
        } else if rest[0] == b'"' {
            plain_string(rest)
        } else if rest.starts_with(b"'\"'") || rest.starts_with(b"'\\\"'") {
            rest.iter().skip(1).position(|&b| b == b'\'').map_or(1, |n| n + 2)
        } else {
            0
        };
        if skipped == 0 {
            code.push(bytes[at]);
            at += 1;
        } else {
            code.extend(rest[..skipped].iter().filter(|&&b| b == b'\n'));
            code.push(b' ');
            at += skipped;
        }
    }
    let code = String::from_utf8_lossy(&code).into_owned();
    let tests = code.match_indices("#[cfg(test)]").find(|(at, mark)| code[at + mark.len()..].trim_start().starts_with("mod "));
    match tests {
        Some((at, _)) => code[..at].to_string(),
        None => code,
    }
}

/// Length of the block comment at the start of `rest`; they nest.
fn block_comment(rest: &[u8]) -> usize {
    let (mut depth, mut at) = (0, 0);
    while at < rest.len() {
        if rest[at..].starts_with(b"/*") {
            depth += 1;
            at += 2;
        } else if rest[at..].starts_with(b"*/") {
            depth -= 1;
            at += 2;
            if depth == 0 {
                break;
            }
        } else {
            at += 1;
        }
    }
    at
}

/// Length of the raw string at the start of `rest`, if there is one.
fn raw_string(rest: &[u8]) -> Option<usize> {
    let marks = rest.strip_prefix(b"r")?.iter().take_while(|&&b| b == b'#').count();
    if rest.get(1 + marks) != Some(&b'"') {
        return None;
    }
    let end = [b"\"".as_slice(), "#".repeat(marks).as_bytes()].concat();
    let from = 2 + marks;
    let body = rest[from..].windows(end.len()).position(|window| window == end);
    Some(body.map_or(rest.len(), |n| from + n + end.len()))
}

/// Length of the string at the start of `rest`.
fn plain_string(rest: &[u8]) -> usize {
    let mut at = 1;
    while at < rest.len() && rest[at] != b'"' {
        at += if rest[at] == b'\\' { 2 } else { 1 };
    }
    (at + 1).min(rest.len())
}

/// First names after `crate::`, groups in braces included, each with its line number.
fn crate_names(code: &str) -> Vec<(usize, String)> {
    let mut names = Vec::new();
    for (at, mark) in code.match_indices("crate::") {
        // `$crate::` belongs to a macro's user, `my_crate::` to somebody else.
        if code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_' || c == '$') {
            continue;
        }
        let line = 1 + code[..at].matches('\n').count();
        let after = &code[at + mark.len()..];
        match after.strip_prefix('{') {
            None => names.push((line, word(after))),
            Some(group) => {
                let mut depth = 0;
                let mut fresh = true;
                for (offset, c) in group.char_indices() {
                    match c {
                        '{' => depth += 1,
                        '}' if depth == 0 => break,
                        '}' => depth -= 1,
                        ',' if depth == 0 => fresh = true,
                        c if fresh && !c.is_whitespace() => {
                            names.push((line, word(&group[offset..])));
                            fresh = false;
                        }
                        _ => {}
                    }
                }
            }
        }
    }
    names
}

fn word(text: &str) -> String {
    text.chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect()
}

/// Uses of a module that does not stand earlier in the order.
fn import_faults(path: &Path, text: &str) -> Vec<String> {
    let own = module_of(path);
    if own == "lib" || path.file_name().is_some_and(|name| name == "tests.rs") {
        return Vec::new();
    }
    let Some(own_rank) = rank(&own) else {
        return vec![format!("{}: module `{own}` has no place in the order of {}", path.display(), file!())];
    };
    let names = crate_names(&code_of(text)).into_iter();
    names
        .filter(|(_, name)| *name != own)
        .filter_map(|(line, name)| rank(&name).map(|rank| (line, name, rank)))
        .filter(|(_, _, rank)| *rank >= own_rank)
        .map(|(line, name, _)| format!("{}:{line}: `{own}` uses `{name}`, which does not stand to its left", path.display()))
        .collect()
}

/// `unsafe` outside the places it is let into. The crate denies it, so the attribute that lets it in is what is looked for.
fn unsafe_faults(path: &Path, text: &str) -> Vec<String> {
    let place = path.to_string_lossy().replace('\\', "/");
    if UNSAFE_PLACES.iter().any(|allowed| place.starts_with(allowed)) {
        return Vec::new();
    }
    let code = code_of(text);
    let lets_in = |line: &str| line.contains("unsafe_code") && (line.contains("allow(") || line.contains("expect("));
    let lines = code.lines().enumerate().filter(|(_, line)| lets_in(line));
    lines.map(|(n, _)| format!("{place}:{}: lets unsafe in; it may live in {}", n + 1, UNSAFE_PLACES.join(", "))).collect()
}

#[test]
fn modules_use_only_what_stands_to_their_left() {
    expect_none(rust_files("src").iter().flat_map(|path| import_faults(path, &read(path))).collect());
}

#[test]
fn every_module_in_the_order_of_the_crate_root_is_known() {
    let lib = read(Path::new("src/lib.rs"));
    let code = code_of(&lib);
    let modules: Vec<&str> =
        code.lines().filter_map(|line| line.trim_start_matches("pub ").strip_prefix("mod ")?.strip_suffix(';')).collect();
    assert!(modules.contains(&"error"), "src/lib.rs lists {modules:?}");
    expect_none(modules.iter().filter(|name| rank(name).is_none()).map(|name| format!("src/lib.rs: `{name}` has no place")).collect());
}

#[test]
fn unsafe_lives_where_it_is_let_in() {
    expect_none(rust_files("src").iter().flat_map(|path| unsafe_faults(path, &read(path))).collect());
    let manifest = read(Path::new("Cargo.toml"));
    assert!(manifest.contains("unsafe_code = \"deny\""), "Cargo.toml no longer denies unsafe_code");
}

#[test]
fn planted_imports_are_found() {
    let found = |path: &str, text: &str| import_faults(Path::new(path), text).len();
    assert_eq!(found("src/ops/norm.rs", "use crate::engine::Engine;\n"), 1);
    assert_eq!(found("src/ops/norm.rs", "use crate::{error::Result, tensor::{DType, View}, families};\n"), 1);
    assert_eq!(found("src/ops/norm.rs", "fn f() -> crate::abi::Status { todo() }\n"), 1);
    assert_eq!(found("src/cache/kv.rs", "use crate::weights::Store;\n"), 1, "neighbours leave each other alone");
    assert_eq!(found("src/error.rs", "use crate::tensor::DType;\n"), 1);
    assert_eq!(found("src/errand/mod.rs", ""), 1, "a module without a place");

    assert_eq!(found("src/ops/norm.rs", "use crate::error::Result;\nuse crate::{bail, ensure, ops::Case};\n"), 0);
    assert_eq!(found("src/ops/norm.rs", "// use crate::engine\n/* crate::abi /* nested */ crate::abi */\n"), 0);
    assert_eq!(
        found("src/ops/norm.rs", "const A: &str = \"crate::abi\"; const B: &str = r#\"\"crate::abi\"\"#; const C: char = '\"';\n"),
        0
    );
    assert_eq!(found("src/ops/norm.rs", "const C: char = '\"'; use crate::abi;\n"), 1, "a quote in a character is no string");
    assert_eq!(
        found("src/ops/norm.rs", "fn f() {}\n#[cfg(test)]\nmod tests {\n use crate::engine;\n}\n"),
        0,
        "tests compare with anything"
    );
}

#[test]
fn planted_unsafe_is_found() {
    let found = |path: &str, text: &str| unsafe_faults(Path::new(path), text).len();
    assert_eq!(found("src/engine/step.rs", "//! Steps.\n#![allow(unsafe_code)]\n"), 1);
    assert_eq!(found("src/engine/step.rs", "#[allow(dead_code, unsafe_code)] fn f() {}\n"), 1);
    assert_eq!(found("src/engine/step.rs", "// #![allow(unsafe_code)] would be wrong here\n"), 0);
    assert_eq!(found("src/abi/guard.rs", "#![allow(unsafe_code)]\n"), 0);
    assert!(root().join("src/abi").is_dir() || !root().join("src/abi.rs").exists(), "UNSAFE_PLACES names src/abi/");
}
