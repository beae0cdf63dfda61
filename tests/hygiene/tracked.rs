//! What may be committed: no trace of one machine, nothing large, nothing unfinished, no dead link.

use crate::{expect_none, read, rust_files, tracked_files};
use std::path::{Path, PathBuf};

const LARGEST_FILE: u64 = 2 << 20;
const LONGEST_SOURCE: usize = 600;
const SOURCES: &[&str] = &["rs", "cu", "cuh", "c", "h", "hpp", "go", "swift", "py"];
/// Written by a program; its length says nothing about how it reads.
const GENERATED: &[&str] = &["include/metrale.h", "tests/abi/0.1/metrale.h"];
/// The only registry that the lock file may name, as cargo writes it on every machine.
const INDEX: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Words that tie a file to one machine or one mirror. Written in halves, so that this file does not contain them.
fn forbidden() -> Vec<String> {
    let halves = [
        ("/wo", "rk/"),
        ("/ro", "ot/"),
        ("/fa", "rm/"),
        ("/ho", "me/"),
        ("/Us", "ers/"),
        ("static.cra", "tes.io"),
        ("index.cra", "tes.io"),
        ("files.pythonh", "osted"),
        ("pypi", ".org"),
        ("registry.npm", "js"),
        ("proxy.gol", "ang"),
    ];
    halves.iter().map(|(a, b)| format!("{a}{b}")).collect()
}

fn text_faults(path: &Path, text: &str) -> Vec<String> {
    let words = forbidden();
    let lines = text.lines().enumerate();
    lines
        .flat_map(|(n, line)| {
            let hits = words.iter().filter(move |word| line.contains(word.as_str()));
            hits.map(move |word| format!("{}:{}: `{word}` belongs to one machine or mirror", path.display(), n + 1))
        })
        .collect()
}

fn lock_faults(text: &str) -> Vec<String> {
    let sources = text.lines().filter_map(|line| line.strip_prefix("source = "));
    sources
        .filter(|source| source.trim_matches('"') != INDEX)
        .map(|source| format!("Cargo.lock: source {source}, expected {INDEX}"))
        .collect()
}

fn unfinished_faults(path: &Path, text: &str) -> Vec<String> {
    let marks = ["to".to_owned() + "do!(", "unimple".to_owned() + "mented!(", "FIX".to_owned() + "ME", "db".to_owned() + "g!("];
    let lines = text.lines().enumerate();
    lines
        .filter(|(_, line)| marks.iter().any(|mark| line.contains(mark.as_str())))
        .map(|(n, line)| format!("{}:{}: unfinished: {}", path.display(), n + 1, line.trim()))
        .collect()
}

/// Relative targets of `[text](target)` in a Markdown file that do not exist beside it. Blocks of code have brackets of their own.
fn link_faults(path: &Path, text: &str, exists: impl Fn(&Path) -> bool) -> Vec<String> {
    let folder = path.parent().unwrap_or(Path::new(""));
    let prose: Vec<&str> = text.split("```").step_by(2).collect();
    let targets = prose.iter().flat_map(|piece| piece.split("](").skip(1)).filter_map(|rest| rest.split(')').next());
    targets
        .filter(|target| !target.contains("://") && !target.starts_with('#') && !target.starts_with("mailto:"))
        .map(|target| target.split('#').next().unwrap_or(target))
        .filter(|target| !exists(&folder.join(target)))
        .map(|target| format!("{}: link to {target}, which is not there", path.display()))
        .collect()
}

/// `make` words in a text, told from prose by the backquotes or the code block around them.
fn make_targets(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    for (n, piece) in text.split('`').enumerate() {
        let code = n % 2 == 1;
        for line in piece.lines().filter(|line| code || line.starts_with("    ")) {
            if let Some(rest) = line.trim_start().strip_prefix("make ") {
                let words = rest.split_whitespace().take_while(|word| !word.starts_with('#') && !word.contains('='));
                found.extend(words.filter(|word| word.chars().all(|c| c.is_alphanumeric() || c == '-')).map(String::from));
            }
        }
    }
    found
}

fn missing_targets(path: &Path, text: &str, makefile: &str) -> Vec<String> {
    let known = |target: &str| makefile.lines().any(|line| line.starts_with(&format!("{target}:")));
    let targets = make_targets(text).into_iter().filter(|target| !known(target));
    targets.map(|target| format!("{}: `make {target}` is no target of the Makefile", path.display())).collect()
}

/// Tracked files, or a note that there is no checkout to look at (a source package).
fn tracked(patterns: &[&str]) -> Vec<PathBuf> {
    tracked_files(patterns).unwrap_or_else(|| {
        println!("SKIPPED: not a git checkout");
        Vec::new()
    })
}

/// Tracked text files that people write.
fn written() -> Vec<(PathBuf, String)> {
    let paths = tracked(&[]).into_iter().filter(|path| path.extension().is_none_or(|extension| extension != "lock"));
    let root = crate::root();
    paths.filter_map(|path| Some((path.clone(), String::from_utf8(std::fs::read(root.join(&path)).ok()?).ok()?))).collect()
}

#[test]
fn no_file_names_this_machine() {
    expect_none(written().iter().flat_map(|(path, text)| text_faults(path, text)).collect());
    expect_none(lock_faults(&read(Path::new("Cargo.lock"))));
}

#[test]
fn files_are_of_readable_size() {
    let size = |path: &PathBuf| std::fs::metadata(crate::root().join(path)).map_or(0, |facts| facts.len());
    let large = tracked(&[]).into_iter().map(|path| (size(&path), path)).filter(|(bytes, _)| *bytes > LARGEST_FILE);
    expect_none(large.map(|(bytes, path)| format!("{}: {bytes} bytes; at most {LARGEST_FILE} are kept in git", path.display())).collect());

    let is_source = |path: &Path| path.extension().is_some_and(|extension| SOURCES.iter().any(|known| extension == *known));
    let sources =
        written().into_iter().filter(|(path, _)| is_source(path) && !GENERATED.iter().any(|known| path.as_path() == Path::new(known)));
    let long = sources.map(|(path, text)| (path, text.lines().count())).filter(|(_, lines)| *lines > LONGEST_SOURCE);
    expect_none(long.map(|(path, lines)| format!("{}: {lines} lines; which second idea hides in it?", path.display())).collect());
}

#[test]
fn sources_say_what_they_are_and_are_finished() {
    let sources: Vec<(PathBuf, String)> = rust_files("src").into_iter().map(|path| (path.clone(), read(&path))).collect();
    let bare = sources.iter().filter(|(_, text)| !text.starts_with("//!"));
    expect_none(bare.map(|(path, _)| format!("{}: does not open with `//!` saying what it is and why", path.display())).collect());
    expect_none(sources.iter().flat_map(|(path, text)| unfinished_faults(path, text)).collect());
}

#[test]
fn documents_point_at_things_that_exist() {
    let makefile = read(Path::new("Makefile"));
    for path in tracked(&["*.md"]) {
        let text = read(&path);
        expect_none(link_faults(&path, &text, |target| crate::root().join(target).exists()));
        expect_none(missing_targets(&path, &text, &makefile));
    }
}

#[test]
fn ci_runs_the_commands_of_the_readme() {
    let (readme, ci) = (read(Path::new("README.md")), read(Path::new(".ci/run")));
    for command in ["make demo", "make test"] {
        assert!(readme.contains(command), "README.md no longer shows `{command}`");
        assert!(
            ci.lines().any(|line| line.trim_start().contains(command) && !line.trim_start().starts_with('#')),
            ".ci/run does not run `{command}`"
        );
    }
}

#[test]
fn planted_traces_are_found() {
    let at = Path::new("notes.md");
    for word in forbidden() {
        assert_eq!(text_faults(at, &format!("fine\nsee {word}x\n")).len(), 1, "{word}");
    }
    assert!(text_faults(at, "../shared/reference/models, network/x, target/release").is_empty());
    let mirror = format!("[[package]]\nsource = \"{INDEX}\"\n[[package]]\nsource = \"registry+https://mirror.example/index\"\n");
    assert_eq!(lock_faults(&mirror).len(), 1);
}

#[test]
fn planted_loose_ends_are_found() {
    let at = Path::new("docs/a.md");
    let there = |path: &Path| path == Path::new("docs/b.md");
    assert_eq!(link_faults(at, "[b](b.md) [part](b.md#x) [web](https://example.org) [here](#top)", there), Vec::<String>::new());
    assert_eq!(link_faults(at, "[c](c.md)\n```\nauto f = [&](const T &x) {};\n```\n[d](d.md)", there).len(), 2);
    assert_eq!(make_targets("to make sense, `make demo` or\n\n    make test   # all\n"), ["demo", "test"]);
    assert_eq!(missing_targets(at, "`make demo` `make tea`", "demo: build\n").len(), 1);
    let unfinished = format!("fn f() {{ {}) }}\n// fine\n", "to".to_owned() + "do!(");
    assert_eq!(unfinished_faults(at, &unfinished).len(), 1);
}
