//! `bindings/cpp`: its tests in every way that it is compiled, plainly and under the address sanitizer, against the installed prefix.

use crate::{against, have, prefix, root, scratch, succeed, text};
use std::path::Path;
use std::process::Command;

/// A program of `tests/cpp` and how it is compiled besides.
const PROGRAMS: &[(&str, &str, &str)] = &[
    ("nouns", "nouns", "-std=c++17"),
    ("callbacks", "callbacks", "-std=c++17"),
    ("returned", "returned", "-std=c++17 -DMETRALE_EXPECTED"),
    ("bare", "returned", "-std=c++17 -fno-exceptions -fno-rtti"),
];

const STRICT: &str = "-O0 -g -pthread -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wno-sign-conversion -Werror";

fn run_all(prefix: &Path, suffix: &str, flags: &str, environment: &[(&str, &str)]) {
    let out = scratch(&format!("cpp{suffix}"));
    for (name, source, language) in PROGRAMS {
        let build = format!(
            "c++ {language} {STRICT} {flags} tests/cpp/{source}.cpp -o $OUT/{name} $(pkg-config --cflags --libs metrale) -Wl,-rpath,$PREFIX/lib"
        );
        succeed(name, against(prefix, &build).env("OUT", &out));
        let mut program = Command::new(out.join(name));
        let done = program.arg(crate::model()).env_remove("LD_LIBRARY_PATH").envs(environment.iter().copied()).output().expect("it starts");
        let said = text(&done.stdout) + &text(&done.stderr);
        assert!(done.status.success() && said.is_empty(), "{name}{suffix}: {}\n{said}", done.status);
    }
}

#[test]
fn the_classes_do_what_the_functions_do() {
    let Some(prefix) = prefix() else { return };
    if have(&["c++", "pkg-config"]) {
        run_all(prefix, "", "", &[]);
    }
}

/// No access outside, none after a free, no leak, nothing undefined.
#[test]
fn the_classes_are_clean_under_the_address_sanitizer() {
    let Some(prefix) = prefix() else { return };
    if !have(&["c++", "pkg-config"]) {
        return;
    }
    let out = scratch("cpp-sanitizer");
    let probe = "echo 'int main() {}' >$OUT/a.cpp && c++ -fsanitize=address,undefined $OUT/a.cpp -o $OUT/a && $OUT/a";
    if !against(prefix, probe).env("OUT", &out).output().is_ok_and(|done| done.status.success()) {
        return println!("SKIPPED: the C++ compiler has no address sanitizer here");
    }
    let environment = [("ASAN_OPTIONS", "detect_stack_use_after_return=0"), ("UBSAN_OPTIONS", "halt_on_error=1:print_stacktrace=1")];
    run_all(prefix, "-asan", "-fsanitize=address,undefined", &environment);
}

/// The header under other languages and compilers.
#[test]
fn the_header_compiles_everywhere() {
    let Some(prefix) = prefix() else { return };
    for compiler in ["c++", "clang++"] {
        if !have(&[compiler, "pkg-config"]) {
            continue;
        }
        for language in ["-std=c++17", "-std=c++20", "-std=c++17 -DMETRALE_EXPECTED"] {
            let source = if language.contains("EXPECTED") { "returned" } else { "callbacks" };
            let line = format!("{compiler} {language} {STRICT} -fsyntax-only tests/cpp/{source}.cpp $(pkg-config --cflags metrale)");
            succeed(&line, &mut against(prefix, &line));
        }
    }
}

/// Files that are compiled for either way of errors are linked into one program, and each keeps its own.
#[test]
fn both_ways_of_errors_share_a_program() {
    let Some(prefix) = prefix() else { return };
    if !have(&["c++", "pkg-config"]) {
        return;
    }
    let out = scratch("cpp-both");
    let line = "FLAGS=\"-std=c++17 -O0 $(pkg-config --cflags metrale)\"
        c++ $FLAGS -c tests/cpp/both.cpp -o $OUT/thrown.o; c++ $FLAGS -DMETRALE_EXPECTED -c tests/cpp/both.cpp -o $OUT/returned.o
        c++ $OUT/thrown.o $OUT/returned.o -o $OUT/both $(pkg-config --libs metrale) -Wl,-rpath,$PREFIX/lib; $OUT/both $MODEL";
    succeed("both ways", against(prefix, line).env("OUT", &out));
}

/// Every function of the C header is called by the classes: what is new in C has a place in C++.
#[test]
fn every_function_has_its_member() {
    let header = std::fs::read_to_string(root().join("include/metrale.h")).expect("the header is there");
    let mut classes = String::new();
    for entry in std::fs::read_dir(root().join("bindings/cpp/metrale")).expect("the folder is there") {
        classes += &std::fs::read_to_string(entry.expect("readable").path()).expect("it is text");
    }
    let functions: Vec<&str> = header
        .lines()
        .filter(|line| !line.starts_with("//") && !line.starts_with(' ') && !line.starts_with("typedef"))
        .filter_map(|line| line.split_once('(')?.0.rsplit([' ', '*']).next())
        .filter(|name| name.starts_with("metrale_"))
        .collect();
    assert!(functions.len() > 90, "only {} functions were found", functions.len());
    let called = |name: &str| classes.split(name).skip(1).any(|rest| !rest.starts_with(|c: char| c == '_' || c.is_alphanumeric()));
    assert!(!called("metrale_seq_ne") && called("metrale_seq_new"));
    let missing: Vec<&str> = functions.into_iter().filter(|name| !called(name)).collect();
    assert!(missing.is_empty(), "bindings/cpp/metrale has no place for {missing:?}");
}
