//! The documentation's transcripts, replayed: what a page shows is what happens.
//!
//! A transcript is a block of kind `console`: `$ ` begins a command, `> ` goes on with it, and everything else is what it says on both
//! streams. `...` stands for any text within a line, and alone on a line for any lines. All blocks of a page run one after the other in one
//! shell, which begins in an empty folder with a checkout of this repository called `metrale`.

use crate::{built, have, prefix, root, scratch, shell, succeed};

/// A page, and the tools without which it is skipped. `$MODEL` is a small model, `prefix` is installed.
const PAGES: &[(&str, &[&str])] = &[
    ("docs/c.md", &["cc", "make", "pkg-config", "python3"]),
    ("docs/cpp.md", &["c++", "pkg-config"]),
    ("docs/go.md", &["go", "cc", "pkg-config"]),
    ("docs/rust.md", &["cargo"]),
    ("docs/swift.md", &["swift", "pkg-config"]),
];

struct Step {
    command: String,
    expected: Vec<String>,
}

fn steps(page: &str) -> Vec<Step> {
    let mut steps: Vec<Step> = Vec::new();
    let blocks = page.split("```console\n").skip(1).filter_map(|rest| rest.split("```").next());
    for line in blocks.flat_map(str::lines) {
        if let Some(command) = line.strip_prefix("$ ") {
            steps.push(Step { command: command.to_string(), expected: Vec::new() });
        } else {
            let step = steps.last_mut().expect("a transcript begins with a command");
            match line.strip_prefix("> ").or((line == ">").then_some("")) {
                Some(more) if step.expected.is_empty() => step.command += &format!("\n{more}"),
                _ => step.expected.push(line.to_string()),
            }
        }
    }
    steps
}

/// Whether a line is as a pattern has it: the pieces between `...` in their order, the outer ones at the ends.
fn line_fits(pattern: &str, line: &str) -> bool {
    let pieces: Vec<&str> = pattern.split("...").collect();
    let (first, last) = (pieces[0], pieces[pieces.len() - 1]);
    if pieces.len() == 1 {
        return pattern == line;
    }
    if line.len() < first.len() + last.len() || !line.starts_with(first) || !line.ends_with(last) {
        return false;
    }
    let mut rest = &line[first.len()..line.len() - last.len()];
    pieces[1..pieces.len() - 1].iter().all(|piece| match rest.split_once(piece) {
        Some((_, after)) => {
            rest = after;
            true
        }
        None => false,
    })
}

fn lines_fit(pattern: &[String], lines: &[&str]) -> bool {
    match pattern.split_first() {
        None => lines.is_empty(),
        Some((first, rest)) if first == "..." => (0..=lines.len()).any(|skipped| lines_fit(rest, &lines[skipped..])),
        Some((first, rest)) => lines.split_first().is_some_and(|(line, after)| line_fits(first, line) && lines_fit(rest, after)),
    }
}

#[test]
fn transcripts_are_true() {
    let Some(prefix) = prefix() else { return };
    for (name, needs) in PAGES {
        if !have(needs) {
            continue;
        }
        let page = std::fs::read_to_string(root().join(name)).expect("the page is there");
        let steps = steps(&page);
        assert!(steps.len() > 2, "{name} shows {} commands", steps.len());
        let folder = scratch(&name.replace(['/', '.'], "-"));
        let script: String =
            steps.iter().map(|step| format!("{{\n{}\n}} 2>&1\nstatus=$?; echo; echo \"@@ $status\"\n", step.command)).collect();
        std::fs::write(folder.join(".script"), script).expect("writable");
        let mut replay = shell("ln -s $ROOT metrale; [ -e prefix ] || ln -s $PREFIX prefix; set +e; . ./.script");
        let done = replay.current_dir(&folder).env("ROOT", root()).env("PREFIX", prefix).env("BUILT", built()).env("MODEL", crate::model());
        let said = succeed(name, done);
        let mut outputs = said.split("\n@@ ");
        let mut output = outputs.next().unwrap_or("");
        for step in &steps {
            let next = outputs.next().unwrap_or_else(|| panic!("{name}: `{}` ended the shell:\n{said}", step.command));
            let (status, after) = next.split_once('\n').unwrap_or((next, ""));
            let lines: Vec<&str> = output.lines().collect();
            assert_eq!(status, "0", "{name}: `{}`:\n{output}", step.command);
            assert!(
                lines_fit(&step.expected, &lines),
                "{name}: `{}` says\n{output}\nthe page shows\n{}",
                step.command,
                step.expected.join("\n")
            );
            output = after;
        }
    }
}

#[test]
fn other_outputs_do_not_pass() {
    let fits = |pattern: &str, lines: &str| {
        let pattern: Vec<String> = pattern.lines().map(String::from).collect();
        lines_fit(&pattern, &lines.lines().collect::<Vec<_>>())
    };
    assert!(fits("a ... c\n...\nend", "a b c\nx\ny\nend") && fits("", "") && fits("...", "") && fits("...s ... s", "in 3 s and 4 s"));
    assert!(!fits("a ... c", "a b") && !fits("", "x") && !fits("a", "a\nb") && !fits("...\nend", "x") && !fits("ab...ba", "aba"));
    let found = steps("x\n```console\n$ cat <<E\n> one\n>\n> E\none\n\n$ true\n```\ny");
    assert_eq!((found.len(), found[0].command.as_str(), found[0].expected.join("|").as_str()), (2, "cat <<E\none\n\nE", "one|"));
}

/// The pages on other libraries and languages name functions, fields and constants that exist.
#[test]
fn pages_name_what_there_is() {
    let header = std::fs::read_to_string(root().join("include/metrale.h")).expect("the header is there");
    let names = |text: &str| -> Vec<String> {
        let words = text.split(|c: char| c != '_' && !c.is_alphanumeric());
        words.filter(|word| word.starts_with("metrale_") || word.starts_with("METRALE_")).map(String::from).collect()
    };
    let known = names(&header);
    // `METRALE_POOLING_*` stands for all that begin so; the C++ header and programs have some words of their own.
    let unknown = |text: &str| -> Vec<String> {
        let ours = ["METRALE_EXPECTED", "metrale_VERSION", "metrale_FOUND", "METRALE_PEER"];
        let named = names(text).into_iter().filter(|name| !ours.contains(&name.as_str()));
        named.filter(|name| !known.iter().any(|word| word == name || (name.ends_with('_') && word.starts_with(name.as_str())))).collect()
    };
    for page in ["docs/c.md", "docs/cpp.md", "docs/migrate-llama.md", "docs/install.md", "docs/frames.md"] {
        let text = std::fs::read_to_string(root().join(page)).expect("the page is there");
        assert_eq!(unknown(&text), Vec::<String>::new(), "{page}");
    }
    assert_eq!(unknown("`metrale_lode` and METRALE_POOLING_*, metrale_load"), ["metrale_lode"]);
}

/// `make manual`: every function has its entry, and doxygen has nothing to complain about, which would be an error.
#[test]
fn the_manual_is_rendered() {
    if !have(&["doxygen", "make"]) {
        return;
    }
    let said = succeed("make manual", &mut shell("make -s manual"));
    let folder = root().join(said.lines().last().expect("it says where")).parent().expect("a file in a folder").to_path_buf();
    let entries = std::fs::read_to_string(folder.join("metrale_8h.html")).expect("the page of the header is there");
    for name in ["metrale_load", "metrale_seq_fork", "metrale_grammar_regex", "metrale_status_name"] {
        assert!(entries.contains(&format!(">{name}</a>")), "{name} has no entry");
    }
    let first = std::fs::read_to_string(folder.join("index.html")).expect("the first page is there");
    assert!(first.contains("What holds for every function") && first.contains("METRALE_BUSY"));
}
