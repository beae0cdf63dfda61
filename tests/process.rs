//! The library in its process: it leaves everything as it found it, imports nothing that could end or change a host, does not
//! grow over a long run; and the header says of each function what a host has to know.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// The folder of the library that cargo built together with this test.
fn library_folder() -> PathBuf {
    let test = std::env::current_exe().expect("the test has a path");
    test.parent().expect("it lies in a folder").to_path_buf()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Compiles and runs `tests/c/<name>.c` on the small model; `None`, saying so, without a compiler.
fn run(name: &str, flags: &[&str], arguments: &[&str]) -> Option<Output> {
    let program = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("process-{name}"));
    let folder = library_folder().display().to_string();
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-D_DEFAULT_SOURCE", "-O1", "-g", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-pthread"]).args(flags);
    cc.arg("-I").arg(root().join("include")).arg(root().join(format!("tests/c/{name}.c"))).arg("-o").arg(&program);
    cc.args([format!("-L{folder}"), "-lmetrale".into(), format!("-Wl,-rpath,{folder}"), "-Wl,--disable-new-dtags".into(), "-lm".into()]);
    let Ok(done) = cc.output() else {
        println!("SKIPPED: there is no cc");
        return None;
    };
    assert!(done.status.success(), "{name}.c does not compile:\n{}", text(&done.stderr));
    let mut program = Command::new(&program);
    // An environment in which a library that looks around would find what it looks for.
    program
        .env("RUST_BACKTRACE", "1")
        .env("RAYON_NUM_THREADS", "2")
        .arg(root().join("tests/fixtures/stories260k/model.gguf"))
        .args(arguments);
    let done = program.output().expect("the program starts");
    assert!(done.status.success(), "{name}: {:?}\n{}{}", done.status, text(&done.stdout), text(&done.stderr));
    Some(done)
}

#[test]
fn the_process_stays_as_it_was() {
    let Some(done) = run("process", &["-rdynamic"], &[]) else { return };
    assert!(done.stdout.is_empty() && done.stderr.is_empty(), "{}{}", text(&done.stdout), text(&done.stderr));
}

/// The short form; `make soak` is the long one. Other tests on the same processors make it slow, never wrong.
#[test]
fn a_run_does_not_grow() {
    if let Some(done) = run("soak", &[], &["20000"]) {
        print!("{}", text(&done.stdout));
    }
}

fn nm(arguments: &[&str], file: &str) -> Option<String> {
    let Ok(done) = Command::new("nm").args(arguments).arg(library_folder().join(file)).output() else {
        println!("SKIPPED: there is no nm");
        return None;
    };
    Some(text(&done.stdout))
}

/// Of all that ends or changes a process the library can reach one thing, `abort`, and that through the standard library alone. It opens one
/// library, a driver, and that only once a device is asked for.
#[test]
fn no_import_ends_or_changes_the_process() {
    let Some(shown) = nm(&["-D", "--undefined-only"], "libmetrale.so") else { return };
    let imports: BTreeSet<&str> = shown.lines().filter_map(|line| line.split_whitespace().last()?.split('@').next()).collect();
    assert!(imports.contains("malloc") && imports.len() > 50, "{imports:?}");
    let never = "exit _exit _Exit quick_exit raise kill tgkill signal sigaction bsd_signal sigprocmask setlocale umask chdir fchdir atexit \
        on_exit __cxa_atexit at_quick_exit setenv unsetenv putenv clearenv fork vfork execv execve execvp posix_spawn posix_spawnp system \
        popen dlclose socket connect printf puts putchar perror fputs fwrite fprintf setrlimit setpriority nice alarm setitimer";
    let found: Vec<&str> = never.split_whitespace().filter(|name| imports.contains(name)).collect();
    assert!(found.is_empty(), "the library imports {found:?}");
}

/// Who in the static library refers to `std::process::abort`, and why that is never reached; `exit` has no excuse.
#[test]
fn aborts_are_accounted_for() {
    // In all of them it is the same two things of the standard library, copied into the crate that uses them: a destructor of a
    // thread-local value that panics (none of these does), and a channel or scope with more than 2^63 owners (lzma_rust2's are those of its
    // readers on several threads, which nothing here calls).
    let known = "crossbeam_utils cudarc llguidance lzma_rust2 metrale minijinja rand rayon_core rustix tempfile tokenizers std";
    let known: Vec<&str> = known.split(' ').collect();
    let Some(shown) = nm(&["-A", "--undefined-only"], "libmetrale.a") else { return };
    let mut found: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for line in shown.lines() {
        let Some((place, symbol)) = line.rsplit_once(' ') else { continue };
        let crate_name =
            place.rsplit('/').next().unwrap_or(place).split(':').nth(1).unwrap_or(place).split(['-', '.']).next().unwrap_or(place);
        if symbol.contains("3std7process5abort") || symbol.contains("3std7process4exit") {
            found.entry(crate_name).or_default().insert(if symbol.contains("process4exit") { "exit" } else { "abort" });
        }
    }
    assert!(shown.lines().count() > 1000, "only {} undefined symbols", shown.lines().count());
    let unknown: Vec<_> = found.iter().filter(|(name, what)| what.contains("exit") || !known.contains(name)).collect();
    assert!(unknown.is_empty(), "these can end the process: {unknown:?}");
}

/// Each function's comment says which threads may call it and, where it can fail, how.
#[test]
fn the_header_is_a_manual() {
    let header = std::fs::read_to_string(root().join("include/metrale.h")).expect("the header is there");
    let functions = documented(&header);
    assert!(functions.len() > 60, "only {} functions were found", functions.len());
    let missing: Vec<String> = functions.iter().flat_map(|(name, doc, code)| faults(name, doc, code)).collect();
    assert!(missing.is_empty(), "{}", missing.join("\n"));
    // The rule sees what it is for.
    assert_eq!(faults("metrale_x", "Does a thing.", "(metrale_error **err)").len(), 2);
    assert_eq!(
        faults("metrale_x", "Any thread. Statuses: none. On success `*out` is new.", "(metrale_seq **out, metrale_error **err)").len(),
        1
    );
}

fn faults(name: &str, doc: &str, code: &str) -> Vec<String> {
    let mut faults = Vec::new();
    let has = |words: &[&str]| words.iter().any(|word| doc.contains(word));
    if !has(&["Any thread", "any thread", "One call at a time", "Safe beside"]) {
        faults.push(format!("{name}: which threads may call it?"));
    }
    if code.contains("metrale_error **err") && !doc.contains("Statuses") {
        faults.push(format!("{name}: which statuses does it return?"));
    }
    let makes = ["model", "seq", "sampler", "text", "grammar", "source", "loading"]
        .iter()
        .any(|noun| code.contains(&format!("metrale_{noun} **out")));
    if makes && !has(&["_free`", "freed once", "As `metrale_", "as `metrale_", "as for `metrale_"]) {
        faults.push(format!("{name}: who frees what it makes?"));
    }
    faults
}

/// Name, comment and declaration of each function.
fn documented(header: &str) -> Vec<(String, String, String)> {
    let (mut doc, mut found, mut lines) = (String::new(), Vec::new(), header.lines());
    while let Some(line) = lines.next() {
        if let Some(rest) = line.strip_prefix("//") {
            doc += rest;
            continue;
        }
        let name = line.split_once('(').and_then(|(before, _)| before.rsplit([' ', '*']).next()).unwrap_or_default();
        if name.starts_with("metrale_") && !line.starts_with([' ', '#']) && !line.starts_with("typedef") {
            let mut code = line.to_string();
            while !code.ends_with(';') {
                code += lines.next().expect("a declaration ends");
            }
            found.push((name.to_string(), doc.split_whitespace().collect::<Vec<_>>().join(" "), code));
        }
        doc.clear();
    }
    found
}
