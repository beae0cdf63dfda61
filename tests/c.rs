//! The C surface as C sees it: the programs of `tests/c` compiled against the header and run against the built
//! library, plainly and under Valgrind; the header under several language standards; the symbols that are visible.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::atomic::{AtomicUsize, Ordering};

/// One program for each noun.
const PROGRAMS: [&str; 19] = [
    "library", "errors", "model", "source", "parts", "text", "sequence", "state", "prefix", "step", "embed", "sampler", "grammar",
    "structs", "stack", "threads", "teardown", "runtime", "workers",
];

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn model() -> PathBuf {
    let path = root().join("tests/fixtures/stories260k/model.gguf");
    assert!(path.exists(), "{} is missing", path.display());
    path
}

/// The folder of the library that cargo built together with this test: the test's own.
fn library_folder() -> PathBuf {
    let test = std::env::current_exe().expect("the test has a path");
    test.parent().expect("it lies in a folder").to_path_buf()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Whether a tool is there; says SKIPPED when it is not.
fn have(tool: &str) -> bool {
    let found = Command::new(tool).arg("--version").output().is_ok_and(|o| o.status.success());
    if !found {
        println!("SKIPPED: there is no {tool}");
    }
    found
}

/// Compiles `tests/c/<name>.c` with `link` at the end of the command line.
fn compile(name: &str, suffix: &str, link: &[String]) -> PathBuf {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("c-{name}{suffix}"));
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-D_GNU_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-pthread"]);
    cc.arg("-I").arg(root().join("include")).arg(root().join(format!("tests/c/{name}.c"))).arg("-o").arg(&program).args(link);
    let done = cc.output().expect("cc runs");
    assert!(done.status.success(), "{name}.c does not compile:\n{}", text(&done.stderr));
    program
}

/// An old-style rpath comes before LD_LIBRARY_PATH, in which cargo may name a folder with an older copy of the library.
fn shared_library() -> Vec<String> {
    let folder = library_folder().display().to_string();
    vec![format!("-L{folder}"), "-lmetrale".into(), format!("-Wl,-rpath,{folder}"), "-Wl,--disable-new-dtags".into(), "-lm".into()]
}

/// A program succeeds, and neither it nor the library says a word.
fn check(name: &str, done: &Output) {
    assert!(done.status.success(), "{name}: {:?}\n{}{}", done.status, text(&done.stdout), text(&done.stderr));
    assert!(done.stdout.is_empty() && done.stderr.is_empty(), "{name} printed: {}{}", text(&done.stdout), text(&done.stderr));
}

#[test]
fn programs_run() {
    if !have("cc") {
        return;
    }
    for name in PROGRAMS {
        let program = compile(name, "", &shared_library());
        check(name, &Command::new(&program).arg(model()).output().expect("the program starts"));
    }
}

/// Without standard streams their numbers belong to files that the host opens: what is said arrives in error objects and the log callback
/// alone.
#[test]
fn programs_run_without_standard_streams() {
    if !have("cc") {
        return;
    }
    for name in ["library", "errors", "model", "source", "runtime"] {
        let program = compile(name, "-closed", &shared_library());
        let line = "exec \"$0\" \"$1\" <&- >&- 2>&-";
        let done = Command::new("sh").args(["-c", line]).arg(&program).arg(model()).output().expect("sh starts");
        assert!(done.status.success(), "{name} without streams: {:?}", done.status);
    }
}

/// The process may end at any time, in every way there is. Repeated, because what is tried is a race.
#[test]
fn leaving_in_the_middle_of_work_is_quiet() {
    if !have("cc") {
        return;
    }
    let program = compile("leave", "", &shared_library());
    for round in 0..24 {
        check("leave", &Command::new(&program).arg(model()).arg((round % 6).to_string()).output().expect("the program starts"));
    }
}

#[test]
fn the_library_can_be_opened_and_closed_again() {
    if !have("cc") {
        return;
    }
    let program = compile("unload", "", &["-ldl".into(), "-pthread".into()]);
    let library = library_folder().join("libmetrale.so");
    check("unload", &Command::new(&program).arg(model()).arg(&library).output().expect("the program starts"));
}

/// The static library serves as well, with the system libraries that rustc names for it.
#[test]
fn a_program_runs_with_the_static_library() {
    if !have("cc") {
        return;
    }
    let archive = library_folder().join("libmetrale.a").display().to_string();
    let link = [archive.as_str(), "-lm", "-ldl", "-lpthread"].map(String::from);
    let program = compile("sequence", "-static", &link);
    check("sequence", &Command::new(&program).arg(model()).arg("quick").output().expect("the program starts"));
}

/// No invalid access, no use of undefined bytes, no lost memory.
#[test]
fn programs_are_clean_under_valgrind() {
    if !have("cc") || !have("valgrind") {
        return;
    }
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some(name) = PROGRAMS.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let program = compile(name, "-valgrind", &shared_library());
                    let mut valgrind = Command::new("valgrind");
                    valgrind.args(["--quiet", "--error-exitcode=99", "--leak-check=full", "--show-leak-kinds=definite"]);
                    valgrind.args(["--errors-for-leak-kinds=definite", "--fair-sched=yes"]);
                    valgrind.arg(format!("--suppressions={}", root().join("tests/c/valgrind.supp").display()));
                    valgrind.arg(program).arg(model()).arg("quick");
                    check(name, &valgrind.output().expect("valgrind starts"));
                }
            });
        }
    });
}

/// The library is built for any x86-64: instructions beyond it are only in functions that are chosen by what the processor
/// reports. Their names say so: our tables, and the equivalents of the crates we use.
#[test]
#[cfg(target_arch = "x86_64")]
fn instructions_beyond_the_baseline_are_chosen_at_run_time() {
    if !have("objdump") {
        return;
    }
    let library = library_folder().join("libmetrale.so");
    let done = Command::new("objdump").args(["-d", "--no-show-raw-insn", "-C"]).arg(&library).output().expect("objdump runs");
    assert!(done.status.success(), "objdump {}: {}", library.display(), text(&done.stderr));
    let beyond = |word: &str| {
        let vector = word.starts_with('v') && !word.starts_with("verr") && !word.starts_with("verw");
        let scalar =
            ["pext", "pdep", "bzhi", "mulx", "andn", "lzcnt", "sarx", "shlx", "shrx", "rorx", "popcnt", "movbe", "pshufb", "palignr"];
        let floats =
            ["ptest", "pminsd", "pmaxsd", "pmulld", "roundss", "roundsd", "pextrd", "pextrq", "pinsrd", "pinsrq", "crc32", "pclmulqdq"];
        vector || scalar.contains(&word) || floats.contains(&word)
    };
    // Vector packers and products of pairs and of narrow tiles enable their instructions themselves; only tables for AVX2 and up name them.
    let chosen = ["avx", "ssse3", "sse41", "sse4_", "f16c", "::fma::", "::simd::fill::", "::product::pairs", "::product::narrow::"];
    let (mut name, mut guarded, mut bad) = (String::new(), 0, BTreeSet::new());
    for line in text(&done.stdout).lines() {
        if let Some((_, rest)) = line.split_once(" <").filter(|_| line.ends_with(">:")) {
            name = rest.to_lowercase();
        } else if line.split('\t').nth(1).and_then(|rest| rest.split_whitespace().next()).is_some_and(beyond) {
            match chosen.iter().any(|part| name.contains(part)) {
                true => guarded += 1,
                false => drop(bad.insert(name.clone())),
            }
        }
    }
    assert!(guarded > 1000, "only {guarded} vector instructions were found");
    assert!(bad.is_empty(), "functions that any processor may reach: {bad:#?}");
}

/// The oldest processors there are run the library, and count the same.
#[test]
#[cfg(target_arch = "x86_64")]
fn a_processor_without_any_extension_runs_it() {
    if !have("cc") || !have("qemu-x86_64") {
        return;
    }
    let program = compile("sequence", "-emulated", &shared_library());
    for processor in ["qemu64", "core2duo"] {
        let done = Command::new("qemu-x86_64").args(["-cpu", processor]).arg(&program).arg(model()).arg("quick").output();
        check(processor, &done.expect("the emulator starts"));
    }
}

/// The header is plain C99, C11 and C++17, and says the same twice.
#[test]
fn the_header_compiles_everywhere() {
    let source = Path::new(env!("CARGO_TARGET_TMPDIR")).join("header.c");
    std::fs::write(&source, "#include \"metrale.h\"\n#include \"metrale.h\"\nint main(void) { return METRALE_OK; }\n").expect("writable");
    for (compiler, language) in [("cc", ["-xc", "-std=c99"]), ("cc", ["-xc", "-std=c11"]), ("c++", ["-xc++", "-std=c++17"])] {
        if !have(compiler) {
            continue;
        }
        let mut command = Command::new(compiler);
        command.args(language).args(["-Wall", "-Wextra", "-Wpedantic", "-Werror", "-fsyntax-only", "-I"]);
        let done = command.arg(root().join("include")).arg(&source).output().expect("the compiler runs");
        assert!(done.status.success(), "{compiler} {language:?}:\n{}", text(&done.stderr));
    }
}

/// What the library shows is what the header declares: nothing missing, nothing besides.
#[test]
fn visible_symbols_are_those_of_the_header() {
    if !have("nm") {
        return;
    }
    let library = library_folder().join("libmetrale.so");
    let done = Command::new("nm").args(["-D", "--defined-only"]).arg(&library).output().expect("nm runs");
    assert!(done.status.success(), "nm {}: {}", library.display(), text(&done.stderr));
    let visible: BTreeSet<String> =
        text(&done.stdout).lines().filter_map(|l| Some(l.split_whitespace().last()?.split('@').next()?.to_string())).collect();
    let header = std::fs::read_to_string(root().join("include/metrale.h")).expect("the header is there");
    assert!(visible.len() > 30, "only {} symbols are visible", visible.len());
    assert_eq!(visible, declared(&header));
}

/// A host's own names stay free: everything the header defines begins with the library's.
#[test]
fn the_header_defines_only_names_of_its_own() {
    let header = std::fs::read_to_string(root().join("include/metrale.h")).expect("the header is there");
    let macros = header.lines().filter_map(|l| l.strip_prefix("#define ")?.split([' ', '(']).next());
    let structs = header.lines().filter_map(|l| l.strip_prefix("} ")).filter(|rest| !rest.contains("//"));
    let opaque = header.lines().filter_map(|l| l.strip_prefix("typedef struct ")).filter(|rest| !rest.starts_with('{'));
    let names: Vec<&str> = macros.chain(structs).chain(opaque).collect();
    assert!(names.len() > 50, "only {} names were found", names.len());
    for name in names {
        assert!(name.starts_with("METRALE_") || name.starts_with("metrale_"), "the header defines {name}");
    }
}

/// Names of the functions that a header declares.
fn declared(header: &str) -> BTreeSet<String> {
    let lines = header.lines().filter(|l| !l.starts_with("//") && !l.starts_with(' ') && !l.starts_with("typedef"));
    lines
        .filter_map(|line| {
            let before = line.split_once('(')?.0;
            let name = before.rsplit([' ', '*']).next()?;
            name.starts_with("metrale_").then(|| name.to_string())
        })
        .collect()
}

/// The committed header is what cbindgen makes of the sources.
#[test]
fn the_header_is_up_to_date() {
    let cbindgen = std::env::var("CBINDGEN").unwrap_or_else(|_| "cbindgen".into());
    if !have(&cbindgen) {
        return;
    }
    let done = Command::new(root().join("tests/support/header.sh")).arg("--check").output().expect("the script runs");
    assert!(done.status.success(), "include/metrale.h is old; run tests/support/header.sh\n{}", text(&done.stderr));
}
