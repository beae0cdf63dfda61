//! The household of the repository: rules that no compiler holds, each with a planted fault that it must find.
//!
//! `imports`: which module may use which, and where `unsafe` may live. `tracked`: what may be committed. `licences`: what we
//! may depend on. Each rule is a function from text to a list of faults, so the same function reads the repository and the plant.

mod imports;
mod licences;
mod tracked;

use std::path::{Path, PathBuf};
use std::process::Command;

/// Where the repository lies.
fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Paths of the tracked files that match `patterns` (all when empty), relative to the root; `None` outside a git checkout.
fn tracked_files(patterns: &[&str]) -> Option<Vec<PathBuf>> {
    let listing = Command::new("git").arg("-C").arg(root()).args(["ls-files", "-z", "--"]).args(patterns).output().ok()?;
    if !listing.status.success() {
        return None;
    }
    let names = String::from_utf8(listing.stdout).expect("tracked names are UTF-8");
    // A file that is deleted but still in the index is on its way out.
    Some(names.split('\0').filter(|name| !name.is_empty()).map(PathBuf::from).filter(|path| root().join(path).is_file()).collect())
}

/// Every Rust file under `folder`, relative to the root, in order.
fn rust_files(folder: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![PathBuf::from(folder)];
    while let Some(next) = folders.pop() {
        for entry in std::fs::read_dir(root().join(&next)).expect("the folder is listed by its parent") {
            let path = next.join(entry.expect("the entry is readable").file_name());
            if root().join(&path).is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }
    found.sort();
    found
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

fn expect_none(faults: Vec<String>) {
    assert!(faults.is_empty(), "{} faults:\n  {}", faults.len(), faults.join("\n  "));
}
