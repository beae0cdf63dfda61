//! What we may depend on: licences that let a closed program carry the library.

use crate::{expect_none, root};
use serde_json::Value;
use std::process::Command;

/// Licences whose only demand is that their text travels along.
const ALLOWED: &[&str] = &[
    "0BSD",
    "Apache-2.0",
    "Apache-2.0 WITH LLVM-exception",
    "BSD-2-Clause",
    "BSD-3-Clause",
    "BSL-1.0",
    "CC0-1.0",
    "ISC",
    "MIT",
    "MIT-0",
    "Unicode-3.0",
    "Unicode-DFS-2016",
    "Unlicense",
    "Zlib",
];

/// Whether an SPDX expression can be satisfied with allowed licences alone. `/` is the old way to write OR.
fn allowed(expression: &str) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let mut words = spaced.split_whitespace().peekable();
    any_of(&mut words) == Some(true) && words.peek().is_none()
}

type Words<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

// The three levels of the grammar; `None` is a text that is no expression.
fn any_of(words: &mut Words) -> Option<bool> {
    let mut answer = all_of(words)?;
    while words.next_if_eq(&"OR").is_some() {
        answer |= all_of(words)?;
    }
    Some(answer)
}

fn all_of(words: &mut Words) -> Option<bool> {
    let mut answer = one(words)?;
    while words.next_if_eq(&"AND").is_some() {
        answer &= one(words)?;
    }
    Some(answer)
}

fn one(words: &mut Words) -> Option<bool> {
    let word = words.next()?;
    if word == "(" {
        let answer = any_of(words)?;
        return words.next_if_eq(&")").map(|_| answer);
    }
    let name = match words.next_if_eq(&"WITH") {
        Some(_) => format!("{word} WITH {}", words.next()?),
        None => word.to_string(),
    };
    Some(ALLOWED.contains(&name.as_str()))
}

fn licence_faults(metadata: &Value) -> Vec<String> {
    let packages = metadata["packages"].as_array().expect("cargo metadata lists packages");
    let faults = packages.iter().filter(|package| !package["license"].as_str().is_some_and(allowed));
    faults.map(|package| format!("{} {}: licence {}", package["name"], package["version"], package["license"])).collect()
}

#[test]
fn dependencies_may_travel_with_closed_programs() {
    let cargo = std::env::var("CARGO").unwrap_or_else(|_| "cargo".into());
    let version = Command::new(&cargo).arg("-vV").output().expect("cargo runs");
    let version = String::from_utf8_lossy(&version.stdout).into_owned();
    let host = version.lines().find_map(|line| line.strip_prefix("host: ")).expect("cargo -vV names the host");
    // This machine's packages only: they are all downloaded by the time a test runs, so no network is needed.
    let arguments = ["metadata", "--format-version=1", "--locked", "--offline", "--filter-platform", host];
    let listing = Command::new(&cargo).args(arguments).current_dir(root()).output().expect("cargo runs");
    assert!(listing.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&listing.stderr));
    let metadata: Value = serde_json::from_slice(&listing.stdout).expect("cargo metadata prints JSON");
    assert!(metadata["packages"].as_array().is_some_and(|packages| packages.len() > 10), "cargo metadata lists few packages");
    expect_none(licence_faults(&metadata));
}

#[test]
fn planted_licences_are_found() {
    let fine = [
        "MIT",
        "MIT OR Apache-2.0",
        "MIT/Apache-2.0",
        "GPL-3.0 OR MIT",
        "(MIT OR Apache-2.0) AND Unicode-3.0",
        "Apache-2.0 WITH LLVM-exception",
    ];
    fine.iter().for_each(|expression| assert!(allowed(expression), "{expression}"));
    let refused =
        ["GPL-3.0", "MIT AND GPL-3.0", "(MIT OR Apache-2.0) AND AGPL-3.0", "", "MIT OR", "(MIT", "Apache-2.0 WITH Else", "MPL-2.0"];
    refused.iter().for_each(|expression| assert!(!allowed(expression), "{expression}"));
    let metadata = serde_json::json!({"packages": [
        {"name": "good", "version": "1.0.0", "license": "MIT"},
        {"name": "bad", "version": "1.0.0", "license": "GPL-3.0"},
        {"name": "silent", "version": "1.0.0", "license": null},
    ]});
    assert_eq!(licence_faults(&metadata).len(), 2);
}
