//! The C programs that people copy: the README's, and `examples/chat/chat.c`. They compile with the strictest warnings and run.
//!
//! Both link with the library that cargo just built, and both read the checkpoint kept in `tests/fixtures`, so what they
//! print can be compared with `golden.json`, which an independent implementation wrote.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const STRICT: &[&str] =
    &["-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Wconversion", "-Wno-sign-conversion", "-Werror"];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn model() -> PathBuf {
    root().join("tests/fixtures/stories260k/model.gguf")
}

/// Where cargo puts the library that belongs to this test: beside the test. The copy one folder up may be an older one.
fn library_folder() -> PathBuf {
    let test = std::env::current_exe().expect("the test has a path");
    test.parent().expect("it lies in a folder").to_path_buf()
}

/// Compiles `source` to `name`; `None`, saying so, where there is no C compiler.
fn compile(source: &Path, name: &str) -> Option<PathBuf> {
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    if Command::new(&compiler).arg("--version").output().is_err() {
        println!("SKIPPED: no C compiler called {compiler}");
        return None;
    }
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let folder = library_folder();
    let mut command = Command::new(&compiler);
    command.args(STRICT).arg("-I").arg(root().join("include")).arg("-o").arg(&program).arg(source);
    command.arg("-L").arg(&folder).arg("-lmetrale").arg(format!("-Wl,-rpath,{}", folder.display())).arg("-Wl,--disable-new-dtags");
    let done = command.output().expect("the compiler runs");
    assert!(done.status.success(), "{}:\n{}", source.display(), String::from_utf8_lossy(&done.stderr));
    Some(program)
}

fn run(program: &Path, arguments: &[&str]) -> Output {
    Command::new(program).args(arguments).env_remove("METRALE_COMPUTE").env_remove("LD_LIBRARY_PATH").output().expect("the program starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("programs print UTF-8")
}

/// The C program of the README: its one block of C.
fn readme_program() -> String {
    let readme = std::fs::read_to_string(root().join("README.md")).expect("README.md is there");
    let blocks: Vec<&str> = readme.split("```c\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert_eq!(blocks.len(), 1, "README.md shows one C program");
    blocks[0].to_string()
}

/// Prompt and continuation of the golden's first run, as text.
fn golden(prompt: usize) -> (String, String) {
    let path = root().join("tests/fixtures/stories260k/golden.json");
    let golden: serde_json::Value = serde_json::from_slice(&std::fs::read(path).expect("golden.json is there")).expect("it is JSON");
    let words = |value: &serde_json::Value| value.as_str().expect("text").to_string();
    (words(&golden["prompts"][prompt]["text"]), words(&golden["runs"]["hf_f32"]["results"][prompt]["text"]))
}

#[test]
fn the_program_of_the_readme_runs() {
    let source = Path::new(env!("CARGO_TARGET_TMPDIR")).join("readme.c");
    std::fs::write(&source, readme_program()).expect("the target folder is writable");
    let Some(program) = compile(&source, "readme") else { return };
    let (prompt, continuation) = golden(0);
    let done = run(&program, &[model().to_str().expect("UTF-8 path"), &prompt]);
    assert!(done.status.success(), "{:?}: {}", done.status, text(&done.stderr));
    let shown = text(&done.stdout);
    assert!(shown.contains(continuation.trim()), "printed {shown:?}, the golden continues {continuation:?}");
    let wrong = run(&program, &["no-such-file.gguf", "x"]);
    assert!(wrong.status.code().is_some_and(|code| code != 0), "a missing file is an error, not a signal: {:?}", wrong.status);
    assert!(text(&wrong.stderr).contains("no-such-file.gguf"), "the message names the file: {}", text(&wrong.stderr));
}

#[test]
fn the_demo_continues_a_text() {
    let Some(program) = compile(&root().join("examples/chat/chat.c"), "chat") else { return };
    let model = model();
    let model = model.to_str().expect("UTF-8 path");
    let (prompt, continuation) = golden(0);
    let done = run(&program, &["--raw", "--max-tokens", "32", model, &prompt]);
    assert!(done.status.success(), "{:?}: {}", done.status, text(&done.stderr));
    let shown = text(&done.stdout);
    assert!(shown.contains(continuation.trim()), "printed {shown:?}, the golden continues {continuation:?}");
    assert!(text(&done.stderr).contains("tokens/s"), "no speed in {:?}", text(&done.stderr));

    // The model has no chat template: asking for a chat is refused with a hint, not with a crash.
    let refused = run(&program, &[model, "hello"]);
    assert!(refused.status.code().is_some_and(|code| code != 0), "{:?}", refused.status);
    assert!(text(&refused.stderr).contains("--raw"), "{}", text(&refused.stderr));
    for wrong in [&["--threads", "x", model, "hello"][..], &["--max-tokens"], &[], &["--unknown", model, "hello"]] {
        assert_eq!(run(&program, wrong).status.code(), Some(2), "{wrong:?}");
    }
}
