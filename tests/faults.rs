//! Nothing takes the host down: the fault matrix of `tests/c/faults.c` over every exported function, and failing
//! allocations of `tests/c/memory.c`, each in a process of its own whose death this test would see and name.

use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn model() -> PathBuf {
    root().join("tests/fixtures/stories260k/model.gguf")
}

/// The folder of the library that cargo built together with this test: the test's own.
fn library_folder() -> String {
    let test = std::env::current_exe().expect("the test has a path");
    test.parent().expect("it lies in a folder").display().to_string()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Compiles `tests/c/<name>.c`; `None`, saying so, where there is no C compiler.
fn compile(name: &str) -> Option<PathBuf> {
    if Command::new("cc").arg("--version").output().is_err() {
        println!("SKIPPED: there is no cc");
        return None;
    }
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("faults-{name}"));
    let folder = library_folder();
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-D_DEFAULT_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-pthread"]);
    cc.arg("-I").arg(root().join("include")).arg(root().join(format!("tests/c/{name}.c"))).arg("-o").arg(&program);
    cc.args([format!("-L{folder}"), "-lmetrale".into(), format!("-Wl,-rpath,{folder}"), "-Wl,--disable-new-dtags".into()]);
    let done = cc.output().expect("cc runs");
    assert!(done.status.success(), "{name}.c does not compile:\n{}", text(&done.stderr));
    Some(program)
}

/// Zero signals and exit code 0; otherwise the line that says what was being called.
fn check(name: &str, done: &Output) -> String {
    let shown = text(&done.stdout);
    let last = shown.lines().last().unwrap_or_default();
    assert_eq!(done.status.signal(), None, "{name} died of a signal at {last:?}\n{}", text(&done.stderr));
    assert!(done.status.success(), "{name}: {:?} at {last:?}\n{}", done.status, text(&done.stderr));
    let (_, counts) = last.split_once("counts: ").unwrap_or_else(|| panic!("{name} ends with {last:?}"));
    println!("{name}: zero signals; {counts}");
    shown
}

#[test]
fn no_argument_takes_the_process_down() {
    let Some(program) = compile("faults") else { return };
    let done = Command::new(&program).arg(model()).output().expect("the program starts");
    let shown = check("faults", &done);
    let tried: BTreeSet<&str> = shown.lines().filter(|l| l.starts_with("metrale_")).collect();
    let header = std::fs::read_to_string(root().join("include/metrale.h")).expect("the header is there");
    assert_eq!(tried, declared(&header), "the matrix covers what the header declares");
}

#[test]
fn no_failing_allocation_takes_the_process_down() {
    let Some(program) = compile("memory") else { return };
    let done = Command::new(&program).arg(model()).arg("quick").env("FOLDER", folder()).output().expect("the program starts");
    let shown = check("memory", &done);
    for line in shown.lines().filter(|l| l.contains(" points, ")) {
        println!("{line}");
    }
}

/// A small folder with weights, `config.json` and `tokenizer.json`.
fn folder() -> PathBuf {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("faults-folder");
    std::fs::create_dir_all(&folder).expect("a folder can be made");
    let fixtures = root().join("tests/fixtures");
    for file in
        ["models/llama/config.json", "models/llama/model.safetensors", "stories260k/tokenizer.json", "stories260k/tokenizer_config.json"]
    {
        let from = fixtures.join(file);
        std::fs::copy(&from, folder.join(from.file_name().expect("it has a name"))).expect("the fixture is there");
    }
    folder
}

#[test]
fn cases_from_the_field() {
    let Some(program) = compile("field") else { return };
    check("field", &Command::new(&program).arg(model()).arg("quick").output().expect("the program starts"));
}

/// Names of the functions that a header declares.
fn declared(header: &str) -> BTreeSet<&str> {
    let lines = header.lines().filter(|l| !l.starts_with("//") && !l.starts_with(' ') && !l.starts_with("typedef"));
    lines.filter_map(|line| line.split_once('(')?.0.rsplit([' ', '*']).next().filter(|name| name.starts_with("metrale_"))).collect()
}
