//! `docs/guide.md`: its pieces of C are one program, which compiles with strict warnings and runs.

use std::path::Path;
use std::process::Command;

#[test]
fn the_program_of_the_guide_runs() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let guide = std::fs::read_to_string(root.join("docs/guide.md")).expect("the guide is there");
    let pieces: Vec<&str> = guide.split("```c\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
    assert!(pieces.len() >= 5, "only {} pieces of C", pieces.len());
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join("guide");
    std::fs::write(program.with_extension("c"), pieces.join("\n")).expect("the folder is writable");
    let test = std::env::current_exe().expect("the test has a path");
    let folder = test.parent().expect("it lies in a folder").display();
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-O1", "-Wall", "-Wextra", "-Wpedantic", "-Wshadow", "-Werror", "-pthread", "-I"])
        .arg(root.join("include"))
        .arg("-o")
        .arg(&program);
    cc.arg(program.with_extension("c")).args([
        format!("-L{folder}"),
        "-lmetrale".into(),
        format!("-Wl,-rpath,{folder}"),
        "-Wl,--disable-new-dtags".into(),
    ]);
    let Ok(done) = cc.output() else { return println!("SKIPPED: there is no cc") };
    assert!(done.status.success(), "{}", String::from_utf8_lossy(&done.stderr));
    let done =
        Command::new(&program).arg(root.join("tests/fixtures/stories260k/model.gguf")).arg("Once upon a time").output().expect("it starts");
    assert!(done.status.success(), "{:?}: {}", done.status, String::from_utf8_lossy(&done.stderr));
    assert!(String::from_utf8_lossy(&done.stdout).contains("there was"), "{}", String::from_utf8_lossy(&done.stdout));
}
