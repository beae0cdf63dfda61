//! The library as its users get it: installed into an empty prefix, and everything built against that prefix alone.
//!
//! `examples` builds and runs the programs of `examples/` and of the bindings, from a table; `packages` looks at what is installed, moved,
//! taken away and archived; `cpp` tests the C++ header; `beside` shares a process with other libraries; `pages` replays the
//! documentation's transcripts. What is installed is the build that cargo made for this test. Tools that are absent are SKIPPED.

mod beside;
mod cpp;
mod examples;
mod packages;
mod pages;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::OnceLock;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn model() -> PathBuf {
    root().join("tests/fixtures/stories260k/model.gguf")
}

/// Where cargo puts the libraries that belong to this test: beside the test.
fn built() -> PathBuf {
    let test = std::env::current_exe().expect("the test has a path");
    test.parent().expect("it lies in a folder").to_path_buf()
}

/// An empty folder of this test's own.
fn scratch(name: &str) -> PathBuf {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("install").join(name);
    let _ = std::fs::remove_dir_all(&path);
    std::fs::create_dir_all(&path).expect("the target folder is writable");
    path
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Whether all of the tools are there; says SKIPPED when one is not.
fn have(tools: &[&str]) -> bool {
    let missing = tools
        .iter()
        .find(|tool| !Command::new("sh").args(["-c", &format!("command -v {tool}")]).output().is_ok_and(|o| o.status.success()));
    if let Some(tool) = missing {
        println!("SKIPPED: there is no {tool}");
    }
    missing.is_none()
}

/// A shell line in the repository's root, without what cargo adds to the environment and what could lead to another copy of the library.
fn shell(line: &str) -> Command {
    let mut command = Command::new("sh");
    command.args(["-e", "-c", line]).current_dir(root());
    for name in
        ["LD_LIBRARY_PATH", "PKG_CONFIG_PATH", "CPATH", "LIBRARY_PATH", "CMAKE_PREFIX_PATH", "MAKEFLAGS", "MFLAGS", "METRALE_COMPUTE"]
    {
        command.env_remove(name);
    }
    command
}

/// Runs it and gives what it said, stdout first.
fn succeed(what: &str, command: &mut Command) -> String {
    let Output { status, stdout, stderr } = command.output().unwrap_or_else(|e| panic!("{what}: {e}"));
    let said = text(&stdout) + &text(&stderr);
    assert!(status.success(), "{what}: {status}\n{said}");
    said
}

/// The prefix with everything in it, installed once; `None`, saying so, without the tools.
fn prefix() -> Option<&'static Path> {
    static PREFIX: OnceLock<Option<PathBuf>> = OnceLock::new();
    PREFIX
        .get_or_init(|| {
            if !have(&["make", "ld", "objcopy", "ar", "python3"]) {
                return None;
            }
            let prefix = scratch("prefix");
            succeed("make install", shell("make -s install").env("PREFIX", &prefix).env("BUILT", built()));
            Some(prefix)
        })
        .as_deref()
}

/// `shell` with what a build against the prefix needs.
fn against(prefix: &Path, line: &str) -> Command {
    let mut command = shell(line);
    command.env("PREFIX", prefix).env("MODEL", model()).env("PKG_CONFIG_PATH", prefix.join("lib/pkgconfig"));
    command
}

/// A prompt and how it goes on, by an independent implementation.
fn golden() -> (String, String) {
    let path = root().join("tests/fixtures/stories260k/golden.json");
    let golden: serde_json::Value = serde_json::from_slice(&std::fs::read(path).expect("golden.json is there")).expect("it is JSON");
    let words = |value: &serde_json::Value| value.as_str().expect("text").trim().to_string();
    (words(&golden["prompts"][0]["text"]), words(&golden["runs"]["hf_f32"]["results"][0]["text"]))
}
