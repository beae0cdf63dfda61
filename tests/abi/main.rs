//! The ABI lasts: the header against the record of what was published, hosts of earlier releases against this library, the
//! library's SONAME and symbol versions, and the change log against what is new.
//!
//! `METRALE_ABI=write` (`make abi`) writes the record, the frozen header, the old host and the change log's section anew; that is
//! for the release that is being prepared, and refused once `released = yes` stands in its record.

mod header;
mod record;

use record::Record;
use std::collections::BTreeSet;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn scratch() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
}

/// The folder of the library that cargo built together with this test.
fn library_folder() -> PathBuf {
    let test = std::env::current_exe().expect("the test has a path");
    test.parent().expect("it lies in a folder").to_path_buf()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Major and minor version of the package: a release's folder, and the end of its symbol version.
const RELEASE: &str = concat!(env!("CARGO_PKG_VERSION_MAJOR"), ".", env!("CARGO_PKG_VERSION_MINOR"));

/// Folders of all releases with a record, oldest first.
fn releases() -> Vec<PathBuf> {
    let entries = std::fs::read_dir(root().join("tests/abi")).expect("the folder is there");
    let mut folders: Vec<PathBuf> =
        entries.map(|entry| entry.expect("readable").path()).filter(|path| path.join("record").is_file()).collect();
    folders.sort_by_key(|path| {
        let name = path.file_name().expect("a name").to_string_lossy().into_owned();
        name.split('.').map(|part| part.parse().unwrap_or(0)).collect::<Vec<u32>>()
    });
    folders
}

fn recorded(folder: &Path) -> Record {
    record::read(&std::fs::read_to_string(folder.join("record")).expect("the record is there"))
}

fn output(tool: &str, arguments: &[&str]) -> Option<String> {
    let Ok(done) = Command::new(tool).args(arguments).output() else {
        println!("SKIPPED: there is no {tool}");
        return None;
    };
    assert!(done.status.success(), "{tool} {arguments:?}: {}{}", text(&done.stdout), text(&done.stderr));
    Some(text(&done.stdout))
}

fn library() -> String {
    library_folder().join("libmetrale.so").display().to_string()
}

/// Nothing that a release published was taken away or changed.
#[test]
fn what_was_published_is_still_there() {
    let Some(now) = header::facts(&root().join("include"), scratch()) else { return println!("SKIPPED: there is no cc") };
    if std::env::var("METRALE_ABI").is_ok_and(|what| what == "write") {
        write(&now);
    }
    let releases = releases();
    assert!(!releases.is_empty() && now.len() > 200, "{} records, {} facts", releases.len(), now.len());
    for folder in &releases {
        let faults = record::breaks(&recorded(folder), &now);
        let hint = "if this release is not out yet and the change is wanted: make abi";
        assert!(faults.is_empty(), "hosts of {} break:\n  {}\n{hint}", folder.display(), faults.join("\n  "));
        let frozen = header::facts(folder, scratch()).expect("there is a cc");
        assert!(frozen == recorded(folder).facts, "{}: the record is not that of the header beside it; run make abi", folder.display());
    }
}

/// The change log tells everything that is new in the C interface.
#[test]
fn the_change_log_is_complete() {
    let changelog = std::fs::read_to_string(root().join("CHANGELOG.md")).expect("the change log is there");
    let unreleased = changelog.split("\n## ").find(|section| section.starts_with("Unreleased")).expect("it has an Unreleased section");
    let now = header::parse(&std::fs::read_to_string(root().join("include/metrale.h")).expect("the header is there"));
    let before = releases().into_iter().map(|folder| recorded(&folder)).rfind(|record| record.released);
    let known = |key: &str| before.as_ref().is_some_and(|record| record.facts.contains_key(key));
    let functions = now.functions.keys().filter(|name| !known(&format!("function {name}")));
    let structs = now.structs.keys().filter(|name| !known(&format!("struct {name}")));
    let missing: Vec<&String> = functions.chain(structs).filter(|name| !unreleased.contains(&format!("`{name}`"))).collect();
    assert!(missing.is_empty(), "CHANGELOG.md does not name {missing:?}; run make abi");
}

/// Every function carries the version of the release that brought it, and nothing else is visible.
#[test]
fn symbols_carry_their_versions() {
    let Some(shown) = output("nm", &["-D", "--defined-only", "--with-symbol-versions", &library()]) else { return };
    let symbols: BTreeSet<(&str, &str)> = shown.lines().filter_map(|line| line.split_whitespace().last()?.split_once("@@")).collect();
    let mut expected = BTreeSet::new();
    let now = header::parse(&std::fs::read_to_string(root().join("include/metrale.h")).expect("the header is there"));
    let records: Vec<(String, Record)> =
        releases().iter().map(|folder| (folder.file_name().expect("a name").to_string_lossy().into_owned(), recorded(folder))).collect();
    let versions: Vec<String> = now
        .functions
        .keys()
        .map(|name| {
            let first = records.iter().find(|(_, record)| record.released && record.facts.contains_key(&format!("function {name}")));
            format!("METRALE_{}", first.map_or(RELEASE, |(release, _)| release))
        })
        .collect();
    expected.extend(now.functions.keys().map(String::as_str).zip(versions.iter().map(String::as_str)));
    assert_eq!(symbols, expected);
    // The node itself is the only other name.
    assert!(shown.lines().all(|line| line.contains("@@METRALE_") || line.contains(" A METRALE_")), "{shown}");
}

#[test]
fn the_soname_has_the_version_that_may_break() {
    let Some(shown) = output("readelf", &["--dynamic", &library()]) else { return };
    let number = if RELEASE.starts_with("0.") { RELEASE } else { env!("CARGO_PKG_VERSION_MAJOR") };
    assert!(shown.contains(&format!("soname: [libmetrale.so.{number}]")), "{shown}");
}

/// Hosts of every release, compiled then and compiled now with the header of then, run with this library.
#[test]
fn hosts_of_earlier_releases_run() {
    for folder in releases() {
        let kept = folder.join("host.x86_64-linux");
        if cfg!(all(target_arch = "x86_64", target_os = "linux")) {
            run(&kept);
        }
        let program = scratch().join("abi-host");
        if compile(&folder, &program) {
            run(&program);
        }
    }
}

fn run(program: &Path) {
    let mut host = Command::new(program);
    host.env("LD_LIBRARY_PATH", library_folder()).arg(root().join("tests/fixtures/stories260k/model.gguf"));
    let done = host.output().unwrap_or_else(|e| panic!("{}: {e}", program.display()));
    let said = format!("{}{}", text(&done.stdout), text(&done.stderr));
    if said.contains("GLIBC_") && !said.contains("libmetrale") {
        return println!("SKIPPED: {}: the C library here is older: {said}", program.display());
    }
    assert_eq!((done.status.signal(), done.status.code()), (None, Some(0)), "{}: {said}", program.display());
    assert_eq!(said, "ok\n", "{}", program.display());
}

/// Compiles the host in a release's folder with the header there; `false` without a compiler.
fn compile(folder: &Path, program: &Path) -> bool {
    let libraries = format!("-L{}", library_folder().display());
    let mut cc = Command::new("cc");
    cc.args(["-std=c11", "-O1", "-s", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-Wl,--build-id=none"]);
    cc.arg("-I").arg(folder).arg("-o").arg(program).arg(folder.join("host.c")).arg(libraries).arg("-lmetrale");
    let Ok(done) = cc.output() else {
        println!("SKIPPED: there is no cc");
        return false;
    };
    assert!(done.status.success(), "{}", text(&done.stderr));
    true
}

/// What the tool for this purpose says: it compares the types that the debug information of both hosts and headers name.
#[test]
fn abidiff_agrees() {
    if output("abidiff", &["--version"]).is_none() || output("abidw", &["--version"]).is_none() {
        return;
    }
    for folder in releases() {
        let (old, new) = (shapes(&folder, "old"), shapes(&root().join("include"), "new"));
        let done = Command::new("abidiff").args(["--no-added-syms"]).arg(&old).arg(&new).output().expect("abidiff starts");
        // Bits of its exit code: 1 and 2 errors, 4 changed, 8 changed so that hosts break.
        let code = done.status.code().unwrap_or(1);
        assert!(code & 0b1011 == 0, "abidiff says {code} about {}:\n{}{}", folder.display(), text(&done.stdout), text(&done.stderr));
    }
}

/// A C library with every function of a header and no body: its debug information has the header's types.
fn shapes(folder: &Path, name: &str) -> PathBuf {
    let text_of = std::fs::read_to_string(folder.join("metrale.h")).expect("the header is there");
    let mut source = String::from("#include <stdlib.h>\n#include \"metrale.h\"\n");
    for declaration in header::parse(&text_of).functions.values() {
        source += &format!("{declaration} {{ abort(); }}\n");
    }
    let object = scratch().join(format!("abi-{name}.so"));
    std::fs::write(object.with_extension("c"), source).expect("the folder is writable");
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-g", "-I"]).arg(folder).arg("-o").arg(&object).arg(object.with_extension("c"));
    let done = cc.output().expect("cc runs");
    assert!(done.status.success(), "{}", text(&done.stderr));
    object
}

/// Record, frozen header, host program and change log of the release in preparation.
fn write(now: &header::Facts) {
    let folder = root().join("tests/abi").join(RELEASE);
    std::fs::create_dir_all(&folder).expect("the folder is writable");
    assert!(!folder.join("record").is_file() || !recorded(&folder).released, "{RELEASE} is out: its record stays as it is");
    let put = |path: PathBuf, bytes: &[u8]| std::fs::write(&path, bytes).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    put(folder.join("record"), record::write(&Record { released: false, facts: now.clone() }).as_bytes());
    put(folder.join("metrale.h"), &std::fs::read(root().join("include/metrale.h")).expect("the header is there"));
    if cfg!(all(target_arch = "x86_64", target_os = "linux")) {
        compile(&folder, &folder.join("host.x86_64-linux"));
    }
    let before =
        releases().into_iter().map(|folder| recorded(&folder)).rfind(|record| record.released).map_or_else(Default::default, |r| r.facts);
    let path = root().join("CHANGELOG.md");
    let changelog = std::fs::read_to_string(&path).expect("the change log is there");
    let (begin, end) = ("<!-- C interface: written by make abi -->\n", "<!-- end -->\n");
    let (head, rest) = changelog.split_once(begin).expect("the change log marks where the section goes");
    let (_, tail) = rest.split_once(end).expect("and where it ends");
    put(path, format!("{head}{begin}{}{end}{tail}", record::changelog(&before, now)).as_bytes());
}
